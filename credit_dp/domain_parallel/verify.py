"""Is the sharded model the model? Both run on random numbers, and all they make is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from credit_dp.domain_parallel.comparison import (
    Step,
    named_tensors,
    run_step,
    severity,
    step_errors,
)
from credit_dp.domain_parallel.convert import Converter, convert_to_domain_parallel
from credit_dp.domain_parallel.copies import copied
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.plan import Shape, as_shapes, is_banded
from credit_dp.domain_parallel.sharding import shard_tensor
from credit_dp.domain_parallel.thread_ranks import ThreadRanks
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError

MODEL_TOLERANCE = 1e-11
TIMEOUT = 300.0  # seconds for all ranks together


@final
@dataclass(frozen=True)
class VerifyReport:
    """Relative errors of the sharded model, by name: largest difference over largest entry.

    `outputs` are named by their place in what the model returns (`output`, `output[1]`),
    `input_gradients` by the input's number, `gradients` and `buffers` as in the model.
    """

    ranks: int
    input_shapes: tuple[Shape, ...]
    tolerance: float
    outputs: Mapping[str, float]
    input_gradients: Mapping[str, float]
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """All errors, in words: `output`, `gradient of input 0`, `gradient of stem.weight`."""
        gradients = {**self.input_gradients, **self.gradients}
        return {
            **self.outputs,
            **{f"gradient of {name}": error for name, error in gradients.items()},
            **{f"buffer {name}": error for name, error in self.buffers.items()},
        }

    @property
    def worst(self) -> tuple[str, float]:
        """The name of what is farthest off, and its error."""
        return max(self.errors.items(), key=lambda item: severity(item[1]))

    @property
    def passed(self) -> bool:
        """Whether nothing is farther off than the tolerance."""
        return all(error <= self.tolerance for error in self.errors.values())


def verify_domain_parallel(
    build_model: Callable[[], nn.Module],
    input_shape: Shape | Sequence[Shape],
    ranks: int,
    *,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    tolerance: float = MODEL_TOLERANCE,
    seed: int = 0,
) -> VerifyReport:
    """Compare a sharded model with the unsharded one: forward and backward, float64, on the CPU.

    The ranks are threads of this process. Input and cotangents are random. The model is in training
    mode but for its dropout layers, which draw other numbers on every rank and are switched off.

    Args:
        build_model: returns the model, not converted; called once, and what it returns is copied.
        input_shape: the whole globe's input, batch included, `(B, C, H, W)`, or a tuple of such for
            several inputs. A small grid will do: heights only have to suit the ranks.
        ranks: how many bands, at least two.
        custom_converters: as for `convert_to_domain_parallel`.
        tolerance: the largest relative error that passes.
        seed: of the model's parameters, the input and the cotangents.

    Raises:
        UserError: the model can't be sharded so, or its outputs are random, or a rank failed.
    """
    if ranks < 2:
        raise UserError(
            f"ranks: one rank is the plain model, nothing to verify; needs 2 or more, got {ranks}."
        )
    globes = as_shapes(input_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = prepared(copied(build_model()).to("cpu", torch.float64))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in globes]
        check_outputs_are_not_random(model, inputs)
        cotangents: list[Tensor] = []

        def draw(outputs: list[Tensor]) -> list[Tensor]:
            cotangents.extend(torch.randn_like(y) for y in outputs)
            return cotangents

        globe = run_step(copied(model), inputs, draw)
        world = ThreadWorld(
            ranks, timeout=2 * TIMEOUT
        )  # before that ThreadRanks tells who is stuck
        bands = [
            _Band(model, world, rank, globes, custom_converters or {}) for rank in range(ranks)
        ]
        work = ThreadRanks[Step](world, TIMEOUT)
        steps = work.run(lambda rank: bands[rank].step(inputs, cotangents))
    return VerifyReport(ranks, globes, tolerance, **step_errors(globe, steps))


def prepared(model: nn.Module) -> nn.Module:
    """Put a model into training mode, and its dropout layers out of it."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    return model


@final
class _Band:
    """One rank's copy of the model. Made before the threads start: planning is not for threads."""

    def __init__(
        self,
        model: nn.Module,
        world: ThreadWorld,
        rank: int,
        input_shapes: Sequence[Shape],
        converters: Mapping[type[nn.Module], Converter],
    ) -> None:
        transport = ThreadTransport(world, rank)
        self.manager = DomainParallelManager(world.size, world.size, transport=transport)
        converted = convert_to_domain_parallel(
            copied(model), self.manager, custom_converters=converters, input_shape=input_shapes
        )
        self.model = prepared(converted)

    def step(self, inputs: list[Tensor], cotangents: list[Tensor]) -> Step:
        """Run this rank's band of the globe's step."""

        def share(outputs: list[Tensor]) -> list[Tensor]:
            pairs = zip(outputs, cotangents, strict=True)
            return [cotangent_share(y, whole, self.manager) for y, whole in pairs]

        bands = [
            shard_tensor(x, manager=self.manager) if is_banded(tuple(x.shape)) else x
            for x in inputs
        ]
        return run_step(self.model, bands, share)


def cotangent_share(output: Tensor, cotangent: Tensor, manager: DomainParallelManager) -> Tensor:
    """This rank's rows of a cotangent, or an equal share of it for an output without rows."""
    pairs = zip(output.shape, cotangent.shape, strict=True)
    dim = next((d for d, (mine, whole) in enumerate(pairs) if mine != whole), None)
    if dim is None:
        return cotangent / manager.domain_parallel_size
    rows = manager.gathered_partition(output.shape[dim]).rows(manager.domain_rank)
    return cotangent[(slice(None),) * dim + (rows,)]


def check_outputs_are_not_random(model: nn.Module, inputs: list[Tensor]) -> None:
    """Refuse a model that makes something else of the same input every time.

    Raises:
        UserError: it does.
    """
    state = torch.get_rng_state()
    with torch.no_grad():
        first = named_tensors(copied(model)(*inputs))
        if torch.equal(torch.get_rng_state(), state):
            return
        again = named_tensors(copied(model)(*inputs))
    if any(not torch.equal(first[name], again[name]) for name in first):
        raise UserError(
            f"{type(model).__name__}: draws random numbers in training mode, other ones on every "
            "rank, so that outputs can't be compared. Let build_model switch them off."
        )

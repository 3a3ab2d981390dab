"""Is the sharded model the model? Both run on random numbers, and all results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import keystr, tree_flatten_with_path

from credit_dp.domain_parallel.convert import Converter, convert_to_domain_parallel
from credit_dp.domain_parallel.halo_exchange import shard_tensor
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planning.plan import Shape, as_shapes, is_banded
from credit_dp.domain_parallel.planning.trace import copy_model
from credit_dp.domain_parallel.thread_ranks import ThreadRanks
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError

# A tensor whose entries are all below this share of the largest one of its kind is zero by theory
# and noise in practice: its errors are taken relative to that share.
NOISE_FLOOR = 1e-3
SMALLEST_DIVISOR = 1e-300  # divides where everything is zero
NamedTensors = dict[str, Tensor]
CotangentFunction = Callable[[list[Tensor]], list[Tensor]]


@final
@dataclass(frozen=True)
class StepResult:
    """What a model makes of one input and its outputs' cotangents, by name."""

    outputs: NamedTensors
    input_gradients: NamedTensors
    gradients: NamedTensors
    buffers: NamedTensors


def run_step(
    model: nn.Module, inputs: Sequence[Tensor], cotangents: CotangentFunction
) -> StepResult:
    """Run a model forward and backward on copies of `inputs`.

    `cotangents` gets the outputs that have gradients, and returns as many tensors of their shapes.
    """
    fields = [x.clone().requires_grad_() for x in inputs]
    outputs = named_tensors(model(*fields))
    differentiable = [y for y in outputs.values() if y.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, cotangents(differentiable))
    of_parameters = {
        n: _gradient_or_zeros(p) for n, p in model.named_parameters() if p.requires_grad
    }
    return StepResult(
        {name: y.detach() for name, y in outputs.items()},
        {f"input {i}": _gradient_or_zeros(x) for i, x in enumerate(fields)},
        of_parameters,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def named_tensors(made: object) -> NamedTensors:
    """The tensors of an output, by where they are in it: `output`, `output[1]`, `output['u']`."""
    leaves, _ = tree_flatten_with_path(made)
    return {f"output{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _gradient_or_zeros(x: Tensor) -> Tensor:
    """The gradient; zeros where none came."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def step_errors(whole: StepResult, bands: Sequence[StepResult]) -> dict[str, dict[str, float]]:
    """The relative error of every tensor, by the field of `StepResult` that it is in and by name.

    An output or buffer without rows is the same on all ranks, and the worst one counts; gradients
    of what all ranks share add up.
    """
    largest = {**whole.input_gradients, **whole.gradients}
    kinds: list[tuple[str, bool, NamedTensors]] = [
        ("outputs", False, whole.outputs),
        ("input_gradients", True, largest),
        ("gradients", True, largest),
        ("buffers", False, whole.buffers),
    ]
    errors = {}
    for kind, summed, scale in kinds:
        floor = NOISE_FLOOR * max((_max_abs(x) for x in scale.values()), default=0.0)
        parts = [getattr(band, kind) for band in bands]
        errors[kind] = _tensor_errors(getattr(whole, kind), parts, summed, floor)
    return errors


def _tensor_errors(
    whole: NamedTensors, bands: Sequence[Mapping[str, Tensor]], summed: bool, floor: float
) -> dict[str, float]:
    names = dict.fromkeys([*whole, *(name for band in bands for name in band)])
    errors = {}
    for name in names:
        if name not in whole or any(name not in band for band in bands):
            errors[name] = math.inf
            continue
        candidates = join_bands([band[name] for band in bands], whole[name].shape, summed)
        found = (relative_error(x, whole[name], floor) for x in candidates)
        errors[name] = max(found, key=severity)
    return errors


def join_bands(parts: Sequence[Tensor], shape: Sequence[int], summed: bool) -> list[Tensor]:
    """The whole tensor made of what the ranks have; several where each of them has a whole one."""
    differing = [d for d, (a, b) in enumerate(zip(parts[0].shape, shape, strict=False)) if a != b]
    if len(differing) == 1:
        return [torch.cat(list(parts), differing[0])]
    return [torch.stack(list(parts)).sum(0)] if summed else list(parts)


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest finite entry of `b`, or to `floor` if larger.

    Infinite if the shapes differ. Equal infinities, as masks have, are no difference; NaN is.
    """
    if a.shape != b.shape:
        return math.inf
    a, b = _to_double(a), _to_double(b)
    difference = torch.where(a == b, 0.0, (a - b).abs())
    return _max_abs(difference) / max(_max_abs(b[b.isfinite()]), floor, SMALLEST_DIVISOR)


def severity(error: float) -> float:
    """What errors are compared by: NaN is as bad as can be."""
    return math.inf if math.isnan(error) else error


def _to_double(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float64))


def _max_abs(x: Tensor) -> float:
    return _to_double(x).abs().max().item() if x.numel() else 0.0


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
        model = train_without_dropout(copy_model(build_model()).to("cpu", torch.float64))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in globes]
        check_outputs_are_deterministic(model, inputs)
        cotangents: list[Tensor] = []

        def draw(outputs: list[Tensor]) -> list[Tensor]:
            cotangents.extend(torch.randn_like(y) for y in outputs)
            return cotangents

        globe = run_step(copy_model(model), inputs, draw)
        world = ThreadWorld(
            ranks, timeout=2 * TIMEOUT
        )  # before that ThreadRanks tells who is stuck
        bands = [
            _BandModel(model, world, rank, globes, custom_converters or {}) for rank in range(ranks)
        ]
        work = ThreadRanks[StepResult](world, TIMEOUT)
        steps = work.run(lambda rank: bands[rank].step(inputs, cotangents))
    return VerifyReport(ranks, globes, tolerance, **step_errors(globe, steps))


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a model into training mode, and its dropout layers out of it."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    return model


@final
class _BandModel:
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
            copy_model(model), self.manager, custom_converters=converters, input_shape=input_shapes
        )
        self.model = train_without_dropout(converted)

    def step(self, inputs: list[Tensor], cotangents: list[Tensor]) -> StepResult:
        """Run this rank's band of the globe's step."""

        def share(outputs: list[Tensor]) -> list[Tensor]:
            pairs = zip(outputs, cotangents, strict=True)
            return [local_cotangent(y, whole, self.manager) for y, whole in pairs]

        bands = [
            shard_tensor(x, manager=self.manager) if is_banded(tuple(x.shape)) else x
            for x in inputs
        ]
        return run_step(self.model, bands, share)


def local_cotangent(output: Tensor, cotangent: Tensor, manager: DomainParallelManager) -> Tensor:
    """This rank's rows of a cotangent, or an equal share of it for an output without rows."""
    pairs = zip(output.shape, cotangent.shape, strict=True)
    dim = next((d for d, (mine, whole) in enumerate(pairs) if mine != whole), None)
    if dim is None:
        return cotangent / manager.domain_parallel_size
    rows = manager.gather_partition(output.shape[dim]).rows(manager.domain_rank)
    return cotangent[(slice(None),) * dim + (rows,)]


def check_outputs_are_deterministic(model: nn.Module, inputs: list[Tensor]) -> None:
    """Refuse a model that makes something else of the same input every time.

    Raises:
        UserError: it does.
    """
    state = torch.get_rng_state()
    with torch.no_grad():
        first = named_tensors(copy_model(model)(*inputs))
        if torch.equal(torch.get_rng_state(), state):
            return
        again = named_tensors(copy_model(model)(*inputs))
    if any(not torch.equal(first[name], again[name]) for name in first):
        raise UserError(
            f"{type(model).__name__}: draws random numbers in training mode, other ones on every "
            "rank, so that outputs can't be compared. Let build_model switch them off."
        )

"""Numerical verification: a sharded model against the unsharded one, on random numbers.

`verify_domain_parallel` takes these steps:

1. Draw an input and the parameters from the seed, in float64.
2. Run the unsharded model forward and backward, with random gradients of its outputs.
3. Convert one copy per rank, and run all ranks as threads on their bands of the same numbers.
4. Join the bands and compare outputs, gradients of inputs and parameters, and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.conversion import Converter
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.halo_exchange import shard_tensor
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import is_banded
from credit_dp.domain_parallel.planning.model_plan import Shape, as_shapes
from credit_dp.domain_parallel.planning.trace import copy_model, named_leaves
from credit_dp.domain_parallel.thread_ranks import ThreadRanks
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError
from credit_dp.torch_private import DropoutNd

MODEL_TOLERANCE = 1e-11
TIMEOUT = 300.0  # seconds for all ranks together
# A tensor whose entries are all below this share of the largest one of its kind (the bias before a
# norm, say) is zero in theory and noise in practice: its errors are taken relative to that share.
NOISE_FLOOR = 1e-3
SMALLEST_DIVISOR = 1e-300  # avoids 0 / 0 where everything is zero
NamedTensors = dict[str, Tensor]
CotangentFunction = Callable[[list[Tensor]], list[Tensor]]


@final
@dataclass(frozen=True)
class VerifyReport:
    """Relative errors of the sharded model: largest difference over largest entry.

    Attributes:
        outputs: by position in the model's output (`output[1]`, `output['u']`, `output.u`).
        input_gradients: by number of the input (`input 0`).
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
        """Return all errors by a readable name: `output`, `gradient of stem.weight`, ..."""
        gradients = {**self.input_gradients, **self.gradients}
        return {
            **self.outputs,
            **{f"gradient of {name}": error for name, error in gradients.items()},
            **{f"buffer {name}": error for name, error in self.buffers.items()},
        }

    @property
    def worst(self) -> tuple[str, float]:
        """Return the name of the tensor with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: severity(item[1]))

    @property
    def passed(self) -> bool:
        """Return whether no error is larger than the tolerance."""
        # NaN is not <= anything: it fails.
        return all(error <= self.tolerance for error in self.errors.values())


def verify_domain_parallel(
    build_model: Callable[[], nn.Module],
    input_shape: Shape | Sequence[Shape],
    ranks: int,
    *,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    whole_ops: str = "allow",
    tolerance: float = MODEL_TOLERANCE,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> VerifyReport:
    """Compare a sharded model with the unsharded one: forward and backward, in float64.

    The ranks are threads of this process. The model is in training mode except for its dropout
    layers, which draw other numbers on every rank and are switched off.

    Args:
        build_model: returns the unconverted model; called once, and the result is copied.
        input_shape: the shape of the global input with its batch, `(B, C, H, W)`, or a tuple of
            shapes for several inputs. A small grid will do: heights only have to suit the ranks.
        ranks: number of bands, at least two.
        seed: determines the model's parameters, the inputs and the gradients of the outputs.
        device: where the model runs, all ranks on the same GPU if it is one.

    Raises:
        UserError: the model can't be sharded, its outputs are random, or a rank failed; or this
            machine lacks the device.
    """
    if ranks < 2:
        raise UserError(
            f"ranks: one rank is the plain model, nothing to verify; needs 2 or more, got {ranks}."
        )
    input_shapes = as_shapes(input_shape)
    device = _existing_device(device)
    gpus = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(gpus), _as_default(device):
        torch.manual_seed(seed)
        model = train_without_dropout(_in_double_precision(copy_model(build_model())).to(device))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in input_shapes]
        check_outputs_are_deterministic(model, inputs)
        cotangents: list[Tensor] = []

        def draw(outputs: list[Tensor]) -> list[Tensor]:
            # The shapes of the outputs are known only now; the ranks get bands of the same numbers.
            cotangents.extend(torch.randn_like(y) for y in outputs)
            return cotangents

        unsharded = run_step(copy_model(model), inputs, draw)
        # Longer than ThreadRanks waits: its error names the rank that is stuck, while a rank that
        # waits for a message only knows that none came.
        world = ThreadWorld(ranks, timeout=2 * TIMEOUT)
        models = [
            _BandModel(model, world, rank, input_shapes, custom_converters or {}, whole_ops)
            for rank in range(ranks)
        ]

        def step(rank: int) -> StepResult:
            with _as_default(device):  # each thread has a default of its own
                return models[rank].step(inputs, cotangents)

        bands = ThreadRanks[StepResult](world, TIMEOUT).run(step)
    return VerifyReport(ranks, input_shapes, tolerance, **step_errors(unsharded, bands))


def _existing_device(name: torch.device | str) -> torch.device:
    """Return a device with its number."""
    try:
        device = torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:  # the former from a build for CPUs
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"device: this machine has no {name} ({reason}). Pass cpu, or a GPU that it has."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: needs cpu or cuda, got {name}.")
    return device


def _as_default(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if torch.empty(0).device == device else device


def _in_double_precision(model: nn.Module) -> nn.Module:
    complex_tensors = [x for x in (*model.parameters(), *model.buffers()) if x.is_complex()]
    for x in complex_tensors:
        x.data = x.data.to(torch.complex128)
    return model.double()


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a model into training mode and its dropout layers into evaluation mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, DropoutNd):
            module.eval()
    return model


def check_outputs_are_deterministic(model: nn.Module, inputs: list[Tensor]) -> None:
    """Refuse a model whose outputs for the same input differ from call to call."""
    gpus = {x.device for x in inputs if x.is_cuda}

    def random_states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

    states = random_states()
    with torch.no_grad():
        first = named_tensors(copy_model(model)(*inputs))
        if all(map(torch.equal, random_states(), states)):
            return
        # It draws random numbers, which may be without effect on the outputs.
        second = named_tensors(copy_model(model)(*inputs))
    if any(not torch.equal(first[name], second[name]) for name in first):
        raise UserError(
            f"{type(model).__name__}: draws random numbers in training mode, different ones on "
            "every rank, so that outputs can't be compared. Switch them off in build_model."
        )


@final
@dataclass(frozen=True)
class StepResult:
    """The outputs, gradients and buffers of one forward and backward pass, by name."""

    outputs: NamedTensors
    input_gradients: NamedTensors
    gradients: NamedTensors
    buffers: NamedTensors


@final
class _BandModel:
    """One rank's converted copy of the model.

    Created before the threads start: planning is not meant to run in several threads at once.
    """

    def __init__(
        self,
        model: nn.Module,
        world: ThreadWorld,
        rank: int,
        input_shapes: Sequence[Shape],
        converters: Mapping[type[nn.Module], Converter],
        whole_ops: str,
    ) -> None:
        transport = ThreadTransport(world, rank)
        self.manager = DomainParallelManager(world.size, world.size, transport=transport)
        converted = convert_to_domain_parallel(
            copy_model(model),
            self.manager,
            custom_converters=converters,
            input_shape=input_shapes,
            whole_ops=whole_ops,
            whole_ops_limit=None,  # numbers are compared, on a grid of any size
        )
        self.model = train_without_dropout(converted)

    def step(self, inputs: list[Tensor], cotangents: list[Tensor]) -> StepResult:
        def local_cotangents(outputs: list[Tensor]) -> list[Tensor]:
            pairs = zip(outputs, cotangents, strict=True)
            return [local_cotangent(y, cotangent, self.manager) for y, cotangent in pairs]

        bands = [
            shard_tensor(x, manager=self.manager) if is_banded(tuple(x.shape)) else x
            for x in inputs
        ]
        return run_step(self.model, bands, local_cotangents)


def local_cotangent(output: Tensor, cotangent: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return this rank's rows of a cotangent, or an equal share of it for an output without rows.

    An output without rows is on all ranks: their shares add up to the cotangent.
    """
    sizes = zip(output.shape, cotangent.shape, strict=True)
    dim = next((d for d, (local, unsharded) in enumerate(sizes) if local != unsharded), None)
    if dim is None:
        return cotangent / manager.domain_parallel_size
    rows = manager.gather_partition(output.shape[dim]).rows(manager.domain_rank)
    return cotangent[(slice(None),) * dim + (rows,)]


def run_step(
    model: nn.Module, inputs: Sequence[Tensor], cotangents: CotangentFunction
) -> StepResult:
    """Run a model forward and backward on copies of `inputs`.

    Args:
        cotangents: returns the gradients of the outputs, given those outputs that require grad.
    """
    fields = [x.clone().requires_grad_() for x in inputs]
    outputs = named_tensors(model(*fields))
    differentiable = [y for y in outputs.values() if y.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, cotangents(differentiable))
    parameter_gradients = {
        name: gradient_or_zeros(p) for name, p in model.named_parameters() if p.requires_grad
    }
    return StepResult(
        outputs={name: y.detach() for name, y in outputs.items()},
        input_gradients={f"input {i}": gradient_or_zeros(x) for i, x in enumerate(fields)},
        gradients=parameter_gradients,
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def named_tensors(output: object) -> NamedTensors:
    """Return the tensors of an output by their position: `output[1]`, `output['u']`, `output.u`."""
    leaves = named_leaves(output)
    return {f"output{name}": leaf for name, leaf in leaves if isinstance(leaf, Tensor)}


def gradient_or_zeros(x: Tensor) -> Tensor:
    """Return the gradient of a tensor; zeros if it got none."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def step_errors(unsharded: StepResult, bands: Sequence[StepResult]) -> dict[str, dict[str, float]]:
    """Return the relative error of every tensor, by field of `StepResult` and by name.

    Outputs and buffers without rows are replicated, and the worst rank counts. Gradients of
    replicated tensors are summed over the ranks.
    """
    # Inputs and parameters have one scale: a gradient that is tiny beside all others is noise.
    gradients = {**unsharded.input_gradients, **unsharded.gradients}
    kinds: list[tuple[str, bool, NamedTensors]] = [
        ("outputs", False, unsharded.outputs),
        ("input_gradients", True, gradients),
        ("gradients", True, gradients),
        ("buffers", False, unsharded.buffers),
    ]
    errors = {}
    for kind, summed, scale in kinds:
        floor = NOISE_FLOOR * max((_max_abs(x) for x in scale.values()), default=0.0)
        parts = [getattr(band, kind) for band in bands]
        errors[kind] = _tensor_errors(getattr(unsharded, kind), parts, summed, floor)
    return errors


def _tensor_errors(
    unsharded: NamedTensors, bands: Sequence[Mapping[str, Tensor]], summed: bool, floor: float
) -> dict[str, float]:
    names = dict.fromkeys([*unsharded, *(name for band in bands for name in band)])
    errors = {}
    for name in names:
        if name not in unsharded or any(name not in band for band in bands):
            errors[name] = math.inf
            continue
        expected = unsharded[name]
        candidates = join_bands([band[name] for band in bands], expected.shape, summed)
        candidate_errors = (relative_error(x, expected, floor) for x in candidates)
        errors[name] = max(candidate_errors, key=severity)
    return errors


def join_bands(parts: Sequence[Tensor], shape: Sequence[int], summed: bool) -> list[Tensor]:
    """Return the global tensor of this shape that the parts of all ranks make.

    Args:
        summed: whether to sum the tensors of all ranks if they are not bands; otherwise each of
            them is returned.
    """
    sizes = zip(parts[0].shape, shape, strict=False)
    row_dims = [dim for dim, (local, unsharded) in enumerate(sizes) if local != unsharded]
    if len(row_dims) == 1:
        return [torch.cat(list(parts), row_dims[0])]
    return [torch.stack(list(parts)).sum(0)] if summed else list(parts)


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest finite entry of `b` or to `floor`.

    Infinite if the shapes differ. Equal infinities, as in masks, don't differ; NaN always does.
    """
    if a.shape != b.shape:
        return math.inf
    a, b = _stored_entries(_to_double(a), _to_double(b))
    # Infinity minus infinity is NaN: equal entries first.
    difference = torch.where(a == b, 0.0, (a - b).abs())
    return _max_abs(difference) / max(_max_abs(b[b.isfinite()]), floor, SMALLEST_DIVISOR)


def severity(error: float) -> float:
    """Return a key to compare errors by: NaN is as bad as infinity."""
    return math.inf if math.isnan(error) else error


def _to_double(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float64))


def _to_dense(x: Tensor) -> Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def _to_coordinates(x: Tensor) -> Tensor:
    coordinates: Tensor = x.to_sparse_coo()  # type: ignore[no-untyped-call]
    return coordinates.coalesce()


def _stored_entries(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.layout is torch.strided or b.layout is torch.strided:
        return _to_dense(a), _to_dense(b)
    # Dense, the matrix of a stencil or of weights between two grids has more entries than memory.
    a, b = _to_coordinates(a), _to_coordinates(b)
    return _values_with_zeros(a, b), _values_with_zeros(b, a)


def _values_with_zeros(x: Tensor, other: Tensor) -> Tensor:
    """Return the values of a sparse tensor, with zeros where only the other one has a value."""
    indices = torch.cat([x.indices(), other.indices()], 1)
    values = torch.cat([x.values(), torch.zeros_like(other.values())])
    joined = torch.sparse_coo_tensor(indices, values, x.shape, check_invariants=False)
    return joined.coalesce().values()


def _max_abs(x: Tensor) -> float:
    values = x if x.layout is torch.strided else _to_coordinates(x).values()
    return _to_double(values).abs().max().item() if values.numel() else 0.0

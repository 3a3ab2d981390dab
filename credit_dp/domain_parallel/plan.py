"""The plan of a converted model: bands of every height it sees, found on fake tensors."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.audit import audit
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, BandTable, RowPartition
from credit_dp.domain_parallel.planner import Planner
from credit_dp.domain_parallel.trace import FOREIGN, Trace
from credit_dp.errors import UserError

Shape = tuple[int, ...]
# What a call is made with, for a function from whole-globe shapes to those wanted.
Inputs = Callable[[Callable[[Shape], Shape]], tuple[list[Any], dict[str, Any]]]
# Sizes that stand for any batch: views that fold rows into a batch of one look harmless.
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def plan_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Shape | Sequence[Shape],
    trusted: Iterable[nn.Module] = (),
) -> None:
    """Give every height that the model sees its bands, and every layer its heights.

    Runs the model on fake tensors: once whole, once per distinct band, training and evaluating.
    Nothing is sent, no activation is held, the model and random state stay as they are.

    Raises:
        UserError: a level has fewer rows than there are ranks, code between the layers mixes or
            changes rows, or the model's control flow depends on data.
    """
    whole = isinstance(input_shape[0], int)
    shapes: list[Shape] = [tuple(input_shape)] if whole else [tuple(s) for s in input_shape]  # type: ignore[arg-type]
    dtype, device = _dtype_and_device(model)

    def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Tensor], dict[str, Any]]:
        return [torch.empty(shape_of(s), dtype=dtype, device=device) for s in shapes], {}

    plan_calls(model, manager, shapes, inputs, trusted)


def is_banded(shape: Shape) -> bool:
    """Return whether a tensor of this whole-globe shape is cut into bands."""
    return len(shape) >= FIELD_DIMS and shape[ROW_DIM] > 1


def plan_calls(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: list[Shape],
    inputs: Inputs,
    trusted: Iterable[nn.Module] = (),
) -> None:
    """Plan the calls that `inputs` makes, whose tensors have these whole-globe shapes.

    What `trusted` modules do inside is not audited.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}
    names = {layer: name or type(layer).__name__ for name, layer in layers.items()}
    planner = Planner(model, names, manager.bands)
    trusted = list(trusted)
    for training in (True, False):
        with planner.trusting(trusted), _traceable(model):
            _plan_mode(planner, manager.bands.ranks, shapes, inputs, training)
    for layer in planner.seen:
        layer.set_plan(*planner.planned(layer))
    for layer in planner.apart:
        layer.set_apart()


def _plan_mode(
    planner: Planner, ranks: int, shapes: list[Shape], inputs: Inputs, training: bool
) -> None:
    """Plan and audit the model in training or in evaluation mode."""
    bands = planner.bands
    any_batch = _batch_changer(shapes)
    planner.expect(shape[ROW_DIM] for shape in shapes if is_banded(shape))
    whole = _follow(planner, None, training, lambda: inputs(any_batch))
    heights = planner.heights() | {shape[ROW_DIM] for shape in shapes if is_banded(shape)}
    _check_rows(planner, heights, ranks)
    bands.plan(heights, planner.ties)
    for rank in _distinct_ranks([bands[h] for h in heights], ranks):

        def cut(shape: Shape, rank: int = rank) -> Shape:
            if not is_banded(shape):
                return any_batch(shape)
            rows = bands[shape[ROW_DIM]].sizes[rank]
            return any_batch((*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :]))

        part = _follow(planner, rank, training, lambda cut=cut: inputs(cut))  # type: ignore[misc]
        audit(whole.trace, part.trace, {h: bands[h].sizes[rank] for h in heights})
        _check_outputs(whole.outputs, part.outputs, bands, rank)


def _batch_changer(shapes: list[Shape]) -> Callable[[Shape], Shape]:
    """Return a function that gives shapes with the first one's batch size one of its own."""
    sizes = {size for shape in shapes for size in shape}
    batch = next((p for p in PRIMES if p not in sizes), PRIMES[-1])

    def change(shape: Shape) -> Shape:
        alike = len(shape) in (1, 2, len(shapes[0]))
        has_batch = len(shapes[0]) > FIELD_DIMS and alike and shape[0] == shapes[0][0]
        return (batch, *shape[1:]) if has_batch else shape

    return change


class _Followed(NamedTuple):
    trace: Trace
    outputs: list[Any]


def _follow(
    planner: Planner,
    rank: int | None,
    training: bool,
    inputs: Callable[[], tuple[list[Any], dict[str, Any]]],
) -> _Followed:
    """Run the model on fake tensors of the whole globe or of one rank's band."""
    args, kwargs = inputs()
    with _unchanged(planner.model):
        planner.model.train(training)
        with planner.following(rank) as trace:
            trace.mark((), _tensors((args, kwargs)))
            try:
                outputs = tree_leaves(planner.model(*args, **kwargs))
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if rank is None:
                    raise
                reason = str(error).strip().splitlines()[0]
                raise UserError(
                    f"{_code_line(error)}: fails on a band of rows ({reason}). A parameter, buffer "
                    "or number may have the globe's rows; put this into a module and name it in "
                    "custom_converters."
                ) from None
            trace.mark(_tensors(outputs), ())
    return _Followed(trace, outputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a run leaves in the model: modes, attributes, buffers and their values."""
    modules = [m for module in model.modules() for m in (module, module.__dict__.get("wrapped"))]
    saved = [
        (m.__dict__, dict(m.__dict__), m._buffers, dict(m._buffers))
        for m in modules
        if m is not None
    ]
    try:
        yield
    finally:
        for attributes, old_attributes, buffers, old_buffers in saved:
            attributes.clear()
            attributes.update(old_attributes)
            buffers.clear()
            buffers.update(old_buffers)


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """Run on fake tensors, without gradients or autocast; restore values and random state."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = _dtype_and_device(model)[1].type
    plain = torch.autocast("cpu" if device == "meta" else device, enabled=False)
    loud = logging.getLogger("torch._subclasses.fake_tensor")
    level = loud.level
    loud.setLevel(logging.CRITICAL)  # it logs a traceback for what is told in one line below
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, plain, torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"{_code_line(error)}: control flow or shapes that depend on data can't be planned. "
            "Decide from shapes or configuration instead."
        ) from None
    finally:
        loud.setLevel(level)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _code_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(FOREIGN)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "model"


def _dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype, parameter.device
    return torch.get_default_dtype(), torch.device("cpu")


def _check_rows(planner: Planner, heights: set[int], ranks: int) -> None:
    lowest = min(heights, default=ranks)
    if lowest >= ranks:
        return
    places = [
        planner.names.get(layer, type(layer).__name__)
        for layer, calls in planner.seen.items()
        if any(lowest in call[1:] for call in calls)
    ]
    raise UserError(
        f"{places[0] if places else 'input'}: {lowest} rows can't be shared by {ranks} ranks. "
        f"Lower parallel.domain to {lowest} or less."
    )


def _distinct_ranks(partitions: list[RowPartition], ranks: int) -> list[int]:
    """Return one rank for every different combination of bands."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(ranks):
        first.setdefault(tuple(p.sizes[rank] for p in partitions), rank)
    return list(first.values())


def _check_outputs(whole: list[Any], parts: list[Any], bands: BandTable, rank: int) -> None:
    if len(whole) != len(parts):
        raise UserError(
            f"output: holds {len(whole)} values of the globe and {len(parts)} of a band of rows. "
            "Return what doesn't depend on the number of rows."
        )
    for total, part in zip(whole, parts, strict=True):
        if not isinstance(total, Tensor):
            if total != part:
                raise UserError(
                    f"output: is {total} of the globe and {part} of a band of rows. "
                    "Return what doesn't depend on the number of rows."
                )
        elif total.shape != part.shape:
            expected = list(total.shape)
            expected[ROW_DIM] = bands[expected[ROW_DIM]].sizes[rank]
            if list(part.shape) != expected:
                raise UserError(
                    f"output: rank {rank} makes {tuple(part.shape)} where its band of "
                    f"{tuple(total.shape)} is {tuple(expected)}. The code after the last layer "
                    "changes rows; put that into a module and name it in custom_converters."
                )

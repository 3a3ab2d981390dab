"""The plan of a converted model: bands of every height it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.functional import attached_contexts
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, BandTable, RowPartition
from credit_dp.domain_parallel.planning.audit import audit, refusal_message
from credit_dp.domain_parallel.planning.planner import Planner
from credit_dp.domain_parallel.planning.trace import (
    DATA_DEPENDENT_ERRORS,
    Trace,
    dtype_and_device,
    preserve_model,
    use_fake_tensors,
    user_line_of,
)
from credit_dp.domain_parallel.row_tensors import RowTensorSharder, forbid_tensor_replacement
from credit_dp.domain_parallel.shared_exchange import ReaderGroup, reader_groups, share_exchanges
from credit_dp.errors import UserError

Shape = tuple[int, ...]
# What a call is made with, for a function from whole-globe shapes to those wanted.
InputFactory = Callable[[Callable[[Shape], Shape]], tuple[list[Any], dict[str, Any]]]
# Sizes that stand for any batch: views that fold rows into a batch of one look harmless.
PLACEHOLDER_BATCH_SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def plan_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Shape | Sequence[Shape],
    trusted: Iterable[nn.Module] = (),
) -> Planner:
    """Give every height that the model sees its bands, and every layer its heights.

    Runs the model on fake tensors: once whole, once per distinct band, training and evaluating.
    Nothing is sent, no activation is held, the model and random state stay as they are. Returns
    what followed these runs.

    Raises:
        UserError: a level has fewer rows than there are ranks, code between the layers mixes or
            changes rows, or the model's control flow depends on data.
    """
    shapes = list(as_shapes(input_shape))
    return plan_calls(model, manager, shapes, _input_factory(model, shapes), trusted)


def as_shapes(input_shape: Shape | Sequence[Shape]) -> tuple[Shape, ...]:
    """Return one shape, or several, as several.

    Raises:
        UserError: it is empty.
    """
    if not input_shape:
        raise UserError("input_shape: needs the whole globe's, like (1, 5, 181, 360), got none.")
    whole = isinstance(input_shape[0], int)
    return (tuple(input_shape),) if whole else tuple(tuple(s) for s in input_shape)  # type: ignore


def _input_factory(model: nn.Module, shapes: list[Shape]) -> InputFactory:
    dtype, device = dtype_and_device(model)

    def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Tensor], dict[str, Any]]:
        return [torch.empty(shape_of(s), dtype=dtype, device=device) for s in shapes], {}

    return inputs


def find_heights(
    model: nn.Module, input_shape: Shape | Sequence[Shape], trusted: Iterable[nn.Module] = ()
) -> dict[int, str]:
    """Return every banded number of rows that a converted model sees, and the first place.

    Runs the whole globe only, so that heights are found for which there are too many ranks.

    Raises:
        UserError: the model's control flow depends on data.
    """
    shapes = list(as_shapes(input_shape))
    planner = Planner(model, _layer_names(model), BandTable(1))
    planner.add_field_heights(shape[ROW_DIM] for shape in shapes if is_banded(shape))
    with (
        planner.exclude_from_trace(trusted),
        planner.record_module_names(),
        use_fake_tensors(model),
    ):
        _trace_run(planner, None, True, lambda: _input_factory(model, shapes)(lambda shape: shape))
    places = {shape[ROW_DIM]: "input" for shape in shapes if is_banded(shape)}
    for layer, calls in planner.layer_rows.items():
        for height in (h for call in sorted(calls) for h in call[1:]):
            places.setdefault(height, planner.names[layer])
    return places


def _layer_names(model: nn.Module) -> dict[RowLayer, str]:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}
    return {layer: name or type(layer).__name__ for name, layer in layers.items()}


def is_banded(shape: Shape) -> bool:
    """Return whether a tensor of this whole-globe shape is cut into bands."""
    return len(shape) >= FIELD_DIMS and shape[ROW_DIM] > 1


def plan_calls(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: list[Shape],
    inputs: InputFactory,
    trusted: Iterable[nn.Module] = (),
) -> Planner:
    """Plan the calls that `inputs` makes, whose tensors have these whole-globe shapes.

    What `trusted` modules do inside is not audited. A parameter or buffer that turns out to have
    rows is cut, and all is planned again.
    """
    names, trusted = _layer_names(model), list(trusted)
    parameters = RowTensorSharder(model, manager)
    with use_fake_tensors(model):
        while True:
            planner = Planner(model, dict(names), manager.bands)
            try:
                with planner.exclude_from_trace(trusted), planner.record_module_names():
                    runs = _plan_batches(planner, manager.bands.ranks, shapes, inputs)
                break
            except UserError as error:
                if not parameters.shard_more(error, planner.provenance.candidates):
                    raise parameters.revert(error) from error.__cause__
    for layer in planner.layer_rows:
        layer.set_plan(*planner.layer_plan(layer))
    for layer in planner.rowwise_layers:
        layer.set_rowwise()
    share_exchanges(model, runs)
    for converted in attached_contexts(model):
        converted.planned = True
    return planner


def _plan_batches(
    planner: Planner, ranks: int, shapes: list[Shape], inputs: InputFactory
) -> list[frozenset[ReaderGroup]]:
    """Plan and audit both modes at a batch size that stands for any, and a batch of one.

    Which inputs have the batch is tried: some models take others of the same size.
    """
    refused: GlobalForwardError | None = None
    for has_batch in _possible_batch_ndims(shapes):
        many, one = (
            _batch_resizer(shapes, has_batch, size) for size in (_placeholder_batch_size(shapes), 1)
        )
        try:
            runs = [
                _plan_mode(planner, ranks, shapes, inputs, many, training)
                for training in (True, False)
            ]
        except GlobalForwardError as error:
            refused = refused or error
            continue
        if any(one(shape) != shape or many(shape) != shape for shape in shapes):
            with suppress(GlobalForwardError):  # what takes no single sample never will
                _plan_mode(planner, ranks, shapes, inputs, one, False)
        return runs
    raise refused or AssertionError("the inputs as they are were tried")


def _plan_mode(
    planner: Planner,
    ranks: int,
    shapes: list[Shape],
    inputs: InputFactory,
    any_batch: Callable[[Shape], Shape],
    training: bool,
) -> frozenset[ReaderGroup]:
    """Plan and audit the model in training or in evaluation mode; return who reads what."""
    bands = planner.bands
    planner.batch_sizes = (
        (any_batch(shapes[0])[0], shapes[0][0]) if shapes and shapes[0] else (1, 1)
    )
    planner.add_field_heights(shape[ROW_DIM] for shape in shapes if is_banded(shape))
    whole = _trace_run(planner, None, training, lambda: inputs(any_batch))
    heights = planner.heights() | {shape[ROW_DIM] for shape in shapes if is_banded(shape)}
    _check_rows(planner, heights, ranks)
    bands.plan(heights, planner.tied_heights, planner.row_multiples())
    for rank in _distinct_ranks([bands[h] for h in heights], ranks):

        def cut(shape: Shape, rank: int = rank) -> Shape:
            if not is_banded(shape):
                return any_batch(shape)
            rows = bands[shape[ROW_DIM]].sizes[rank]
            return any_batch((*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :]))

        part = _trace_run(planner, rank, training, lambda cut=cut: inputs(cut))  # type: ignore[misc]
        audit(whole.trace, part.trace, {h: bands[h].sizes[rank] for h in heights})
        _check_outputs(whole.outputs, part.outputs, bands, rank)
    return reader_groups(whole.trace)


def _placeholder_batch_size(shapes: list[Shape]) -> int:
    sizes = {size for shape in shapes for size in shape}
    return next((p for p in PLACEHOLDER_BATCH_SIZES if p not in sizes), PLACEHOLDER_BATCH_SIZES[-1])


def _possible_batch_ndims(shapes: list[Shape]) -> list[set[int]]:
    """Return which numbers of dimensions a tensor with the batch may have, likely answers first."""
    if not shapes or len(shapes[0]) <= FIELD_DIMS:
        return [set()]
    every = {len(shape) for shape in shapes}
    likely = every & {1, 2, len(shapes[0])}
    readings = [likely, every, {len(shapes[0])}, set()]
    return [r for at, r in enumerate(readings) if r not in readings[:at]]


def _batch_resizer(shapes: list[Shape], has_batch: set[int], size: int) -> Callable[[Shape], Shape]:
    """Return a function that puts a batch size into shapes that have the first one's."""

    def change(shape: Shape) -> Shape:
        changes = len(shape) in has_batch and shape[0] == shapes[0][0]
        return (size, *shape[1:]) if changes else shape

    return change


class GlobalForwardError(UserError):
    """The model fails on the whole globe's input."""


class _TracedRun(NamedTuple):
    trace: Trace
    outputs: list[Any]


def _trace_run(
    planner: Planner,
    rank: int | None,
    training: bool,
    inputs: Callable[[], tuple[list[Any], dict[str, Any]]],
) -> _TracedRun:
    """Run the model on fake tensors of the whole globe or of one rank's band."""
    args, kwargs = inputs()
    with planner.preserve_model():
        planner.model.train(training)
        with planner.trace_run(rank) as trace, forbid_tensor_replacement(planner.model):
            trace.record_boundary((), _tensors((args, kwargs)))
            try:
                outputs = tree_leaves(planner.model(*args, **kwargs))
            except (UserError, *DATA_DEPENDENT_ERRORS):
                raise
            except Exception as error:  # it is the user's code
                if rank is None:
                    raise GlobalForwardError(
                        f"{_location(planner, error)}: fails on the whole globe's input "
                        f"({_first_line(error)}). Is input_shape what the model is called with?"
                    ) from error
                raise _band_error(planner, error) from None
            trace.record_boundary(_tensors(outputs), ())
    return _TracedRun(trace, outputs)


def _band_error(planner: Planner, error: Exception) -> UserError:
    """Return what to say of code that runs on the globe and not on a band."""
    if planner.first_coupling is not None:
        step, mixed = planner.first_coupling
        return UserError(refusal_message(step.location, str(mixed), step.name))
    return UserError(
        f"{_location(planner, error)}: fails on a band of rows ({_first_line(error)}). A number "
        "or a plain tensor may have the globe's rows: make it a buffer, or put this into a module "
        "and name it in custom_converters."
    )


def _location(planner: Planner, error: Exception) -> str:
    return ", ".join([*planner.running_modules, user_line_of(error)])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _check_rows(planner: Planner, heights: set[int], ranks: int) -> None:
    lowest = min(heights, default=ranks)
    if lowest >= ranks:
        return
    places = [
        planner.names.get(layer, type(layer).__name__)
        for layer, calls in planner.layer_rows.items()
        if any(lowest in call[1:] for call in calls)
    ]
    raise UserError(too_few_rows_message(places[0] if places else "input", lowest, ranks, lowest))


def too_few_rows_message(place: str, rows: int, ranks: int, most: int) -> str:
    """Say that a level has fewer rows than ranks; `most` ranks have rows at every level."""
    return (
        f"{place}: {rows} rows can't be shared by {ranks} ranks. "
        f"Lower parallel.domain to {most}{' or less' if most > 1 else ''}."
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


CHECK_BATCH_SIZE = 2


def check_model(
    model: nn.Module, in_channels: int, out_channels: int, grid: tuple[int, int]
) -> None:
    """Refuse a model of the user's that fails or makes another shape; it is left as it was.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)` is what is needed.

    Raises:
        UserError: it has nothing to train, fails, or makes something else.
    """
    name = type(model).__name__
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {name} has no parameters to train.")
    dtype, device = dtype_and_device(model)
    needed = (CHECK_BATCH_SIZE, out_channels, *grid)
    x_shape = (CHECK_BATCH_SIZE, in_channels, *grid)
    try:
        with preserve_model(model), use_fake_tensors(model):
            try:
                made = model.eval()(torch.empty(x_shape, dtype=dtype, device=device))
            except DATA_DEPENDENT_ERRORS:  # it can't be sharded, which one rank has no need of
                return
    except UserError:
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"model: {name}.forward fails at {user_line_of(error)} ({type(error).__name__}: "
            f"{text})."
        ) from error
    came = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if came != needed:
        raise UserError(
            f"model: {name} needs to make {needed} of {x_shape}, got {came}. "
            "It has to return one tensor with the rows and columns of its input."
        )

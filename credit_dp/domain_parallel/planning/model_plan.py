"""The plan of a converted model: the bands of every global height that occurs in it.

For training and for evaluation, `_plan_mode` runs the model on fake tensors of the whole globe,
which gives the heights; cuts these heights into bands; runs the model once more for every distinct
band; and audits each of these runs against the global one. Nothing is sent and no data are held.
`check_model` is a smaller check of a user's model that is not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from credit_dp.domain_parallel.functional import attached_contexts
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import (
    FIELD_DIMS,
    ROW_DIM,
    BandTable,
    RowPartition,
    too_few_rows_messages,
)
from credit_dp.domain_parallel.planning.audit import NAME_RULE, AuditError, audit, refusal_message
from credit_dp.domain_parallel.planning.planner import Planner
from credit_dp.domain_parallel.planning.trace import (
    Trace,
    dtype_and_device,
    named_leaves,
    preserve_model,
    reads_values,
    tensor_leaves,
    use_fake_tensors,
    user_line_of,
)
from credit_dp.domain_parallel.row_tensors import (
    RowTensorSharder,
    forbid_tensor_replacement,
    row_shardings,
)
from credit_dp.domain_parallel.shared_exchange import ReaderGroup, reader_groups, share_exchanges
from credit_dp.errors import UserError, first_line
from credit_dp.random_streams import python_random_state

Shape = tuple[int, ...]
# Returns the arguments of a call, given a function from shapes of the whole globe to those to use.
InputFactory = Callable[[Callable[[Shape], Shape]], tuple[list[Any], dict[str, Any]]]
# Placeholder batch sizes. With a batch of one, a view that folds rows into the batch would look
# row-local. Primes that differ from all other sizes keep such views recognisable.
PLACEHOLDER_BATCH_SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def as_shapes(input_shape: Shape | Sequence[Shape]) -> tuple[Shape, ...]:
    """Return one shape or several as a tuple of shapes.

    Raises:
        UserError: there is none.
    """
    if not input_shape:
        raise UserError(
            "input_shape: needs the whole globe's shape, like (1, 5, 181, 360), got none."
        )
    is_single_shape = isinstance(input_shape[0], int)
    return (tuple(input_shape),) if is_single_shape else tuple(tuple(s) for s in input_shape)  # type: ignore


def empty_inputs(model: nn.Module, shapes: Sequence[Shape]) -> InputFactory:
    """Return a function that makes one tensor of each shape, without values."""
    dtype, device = dtype_and_device(model)

    def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Tensor], dict[str, Any]]:
        return [torch.empty(shape_of(s), dtype=dtype, device=device) for s in shapes], {}

    return inputs


def find_heights(
    model: nn.Module, input_shape: Shape | Sequence[Shape], excluded: Iterable[nn.Module]
) -> dict[int, str]:
    """Return every banded height in a converted model, with the path of its first layer.

    Runs on the whole globe only, so it also returns heights with fewer rows than there are ranks.

    Raises:
        UserError: control flow depends on data.
    """
    shapes = list(as_shapes(input_shape))
    planner = Planner(model, _layer_names(model), BandTable(1))
    planner.add_field_heights(shape[ROW_DIM] for shape in shapes if is_banded(shape))
    with (
        planner.exclude_from_trace(excluded),
        planner.record_module_names(),
        use_fake_tensors(model),
    ):
        _trace_run(planner, None, True, lambda: empty_inputs(model, shapes)(lambda shape: shape))
    return _first_uses(planner, shapes)


def _first_uses(planner: Planner, shapes: Sequence[Shape]) -> dict[int, str]:
    """Return the heights of inputs and layers, with the path of the first that has each."""
    first_use = {shape[ROW_DIM]: "input" for shape in shapes if is_banded(shape)}
    for layer, calls in planner.layer_rows.items():
        for height in (h for call in sorted(calls) for h in call[1:]):
            first_use.setdefault(height, planner.names.get(layer, type(layer).__name__))
    return first_use


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
    excluded: Iterable[nn.Module],
) -> Planner:
    """Plan a converted model: bands for every height that occurs, and heights for every layer.

    The model runs on fake tensors, on the whole globe and on each distinct band, in training and in
    evaluation mode. Nothing is sent; values of the model and the random state do not change.

    Args:
        model: a converted model.
        manager: the manager that it was converted with.
        shapes: of the tensors of `inputs` on the whole globe.
        inputs: makes the arguments of a call.
        excluded: modules whose operations are not audited.

    Returns:
        The planner that was active in these runs.

    Raises:
        UserError: a level has fewer rows than there are ranks, code between the layers couples rows
            or changes their number, or control flow depends on data.
    """
    names = _layer_names(model)
    excluded = list(excluded)
    parameters = RowTensorSharder(model, manager)
    with use_fake_tensors(model):
        while True:
            planner = Planner(model, dict(names), manager.bands)
            try:
                with planner.exclude_from_trace(excluded), planner.record_module_names():
                    runs = _plan_batches(planner, manager.bands.ranks, shapes, inputs)
                break
            except UserError as error:
                # A parameter or buffer may have a row for each row of the globe, which shows only
                # when it meets a band: cut it into bands and plan again.
                if not parameters.shard_more(error, planner.provenance.candidates):
                    raise parameters.revert(error) from error.__cause__
    for layer in planner.layer_rows:
        layer.set_plan(*planner.layer_plan(layer))
    for layer in planner.rowwise_layers:
        layer.set_rowwise()
    # Layers that read the same tensor in every run fetch their rows together.
    share_exchanges(model, runs)
    for context in attached_contexts(model):
        context.is_planned = True
        context.has_row_tensors = bool(row_shardings(model))
        context.is_recomputed = planner.is_recomputed
    return planner


def _plan_batches(
    planner: Planner, ranks: int, shapes: list[Shape], inputs: InputFactory
) -> list[frozenset[ReaderGroup]]:
    """Plan and audit both modes with a placeholder batch size, and evaluation with one sample.

    Tries which inputs have a batch dimension: other inputs may start with the same size by chance.
    """
    refused: GlobalForwardError | None = None
    for has_batch in _possible_batch_ndims(shapes):
        placeholder_batch, single_sample = (
            _batch_resizer(shapes, has_batch, size) for size in (_placeholder_batch_size(shapes), 1)
        )
        try:
            runs = [
                _plan_mode(planner, ranks, shapes, inputs, placeholder_batch, training)
                for training in (True, False)
            ]
        except GlobalForwardError as error:
            refused = refused or error
            continue
        if any(
            single_sample(shape) != shape or placeholder_batch(shape) != shape for shape in shapes
        ):
            with suppress(GlobalForwardError):  # models may refuse a single sample
                _plan_mode(planner, ranks, shapes, inputs, single_sample, False)
        return runs
    raise refused or AssertionError("the unchanged inputs were tried last")


def _plan_mode(
    planner: Planner,
    ranks: int,
    shapes: list[Shape],
    inputs: InputFactory,
    any_batch: Callable[[Shape], Shape],
    training: bool,
) -> frozenset[ReaderGroup]:
    """Plan and audit the model in one mode; return groups of layers that read the same tensor."""
    bands = planner.bands
    planner.add_field_heights(shape[ROW_DIM] for shape in shapes if is_banded(shape))
    global_run = _trace_run(planner, None, training, lambda: inputs(any_batch))
    heights = planner.heights() | {shape[ROW_DIM] for shape in shapes if is_banded(shape)}
    too_few = too_few_rows_messages(_first_uses(planner, shapes), ranks)
    if too_few:
        raise AuditError(too_few)
    # Bands first: the run on a band needs those of all heights.
    bands.plan(heights, planner.tied_heights, planner.row_multiples())
    # Ranks with the same number of rows at all heights run the same operations.
    for rank in _distinct_ranks([bands[h] for h in heights], ranks):

        def band_of(shape: Shape, rank: int = rank) -> Shape:
            if not is_banded(shape):
                return any_batch(shape)
            rows = bands[shape[ROW_DIM]].sizes[rank]
            return any_batch((*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :]))

        band_run = _trace_run(planner, rank, training, lambda band_of=band_of: inputs(band_of))  # type: ignore[misc]
        audit(global_run.trace, band_run.trace, {h: bands[h].sizes[rank] for h in heights})
        _check_outputs(global_run.outputs, band_run.outputs, bands, rank)
    return reader_groups(global_run.trace)


def _placeholder_batch_size(shapes: list[Shape]) -> int:
    sizes = {size for shape in shapes for size in shape}
    return next((p for p in PLACEHOLDER_BATCH_SIZES if p not in sizes), PLACEHOLDER_BATCH_SIZES[-1])


def _possible_batch_ndims(shapes: list[Shape]) -> list[set[int]]:
    """Return guesses of the `ndim` of inputs that have the batch dimension, likely ones first."""
    if not shapes or len(shapes[0]) <= FIELD_DIMS:
        return [set()]
    every = {len(shape) for shape in shapes}
    likely = every & {1, 2, len(shapes[0])}
    readings = [likely, every, {len(shapes[0])}, set()]
    return [reading for index, reading in enumerate(readings) if reading not in readings[:index]]


def _batch_resizer(shapes: list[Shape], has_batch: set[int], size: int) -> Callable[[Shape], Shape]:
    """Return a function that replaces the batch size of the first input by `size`."""

    def change(shape: Shape) -> Shape:
        changes = len(shape) in has_batch and shape[0] == shapes[0][0]
        return (size, *shape[1:]) if changes else shape

    return change


class GlobalForwardError(UserError):
    """The model's own code fails."""


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
            # The input and the output of the model are boundaries: the audit learns from the first
            # where rows are, and checks in the second that they are in the same dimension.
            trace.record_boundary((), tensor_leaves((args, kwargs)))
            numbers = python_random_state()
            try:
                outputs = [leaf for _, leaf in named_leaves(planner.model(*args, **kwargs))]
            except Exception as error:  # user code may raise anything
                if isinstance(error, UserError) or reads_values(error):
                    raise
                if rank is None:
                    where, tensors = _location(planner, error), tensor_leaves((args, kwargs))
                    message = failure_message(where, error, "the whole globe's input", tensors)
                    raise GlobalForwardError(message) from error
                raise _band_error(planner, error) from None
            trace.record_boundary(tensor_leaves(outputs), ())
            if not np.array_equal(python_random_state(), numbers):
                raise UserError(
                    f"{type(planner.model).__name__}: draws random numbers of Python or NumPy, by "
                    "which it may run other layers in the next step."
                )
    return _TracedRun(trace, outputs)


def _band_error(planner: Planner, error: Exception) -> UserError:
    """Return the error for code that fails on a band, but not on the globe.

    The first operation that couples rows is the likely cause, if there is one.
    """
    if planner.first_coupling is not None:
        step, coupling = planner.first_coupling
        return UserError(refusal_message(step.location, str(coupling), step.name))
    return UserError(
        f"{_location(planner, error)}: fails on a band of rows ({first_line(error)}). A number "
        "or a plain tensor may have the globe's rows: make it a buffer, or put this into a module. "
        f"{NAME_RULE}."
    )


# In what torch says of arguments whose shapes don't suit.
SHAPE_WORDS = ("shape", "size", "dim", "channels", "elements", "numel", "features")


def failure_message(
    where: str, error: Exception, inputs_name: str, inputs: Sequence[Tensor]
) -> str:
    """Return the message for a model that fails on these inputs, as its code says."""
    given = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in inputs)
    message = (
        f"{where}: fails on {inputs_name} ({type(error).__name__}: {first_line(error)}) "
        f"when it is called with {given or 'no tensors'}."
    )
    if any(word in str(error).lower() for word in SHAPE_WORDS):
        message += " Set input_shape if the model's calls have other shapes."
    return message


def _location(planner: Planner, error: Exception) -> str:
    return ", ".join([*planner.running_modules, user_line_of(error)])


def _distinct_ranks(partitions: list[RowPartition], ranks: int) -> list[int]:
    """Return one rank for each distinct combination of bands."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(ranks):
        first.setdefault(tuple(p.sizes[rank] for p in partitions), rank)
    return list(first.values())


def _check_outputs(
    global_outputs: list[Any], band_outputs: list[Any], bands: BandTable, rank: int
) -> None:
    if len(global_outputs) != len(band_outputs):
        raise UserError(
            f"output: holds {len(global_outputs)} values on the globe and {len(band_outputs)} on "
            "a band. Return a structure that doesn't depend on the number of rows."
        )
    for output, band_output in zip(global_outputs, band_outputs, strict=True):
        if not isinstance(output, Tensor):
            if output != band_output:
                raise UserError(
                    f"output: is {output} on the globe and {band_output} on a band. "
                    "Return values that don't depend on the number of rows."
                )
        elif output.shape != band_output.shape:
            expected = list(output.shape)
            expected[ROW_DIM] = bands[expected[ROW_DIM]].sizes[rank]
            if list(band_output.shape) != expected:
                raise UserError(
                    f"output: rank {rank} returns {tuple(band_output.shape)}, but its band of "
                    f"{tuple(output.shape)} is {tuple(expected)}. The code after the last layer "
                    f"changes rows; put it into a module. {NAME_RULE}."
                )


CHECK_BATCH_SIZE = 2


def check_model(
    model: nn.Module, in_channels: int, out_channels: int, grid: tuple[int, int]
) -> None:
    """Refuse a user's model that fails or returns another shape; the model does not change.

    Shapes:
        The model has to map `(B, in_channels, H, W)` to `(B, out_channels, H, W)`.

    Raises:
        UserError: it has no parameters to train, or that its output depends on, fails, or returns
            something else.
    """
    name = type(model).__name__
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError(f"model: {name} has no parameters to train.")
    dtype, device = dtype_and_device(model)
    needed = (CHECK_BATCH_SIZE, out_channels, *grid)
    x_shape = (CHECK_BATCH_SIZE, in_channels, *grid)
    try:
        with preserve_model(model), use_fake_tensors(model):
            try:
                output = model.eval()(torch.empty(x_shape, dtype=dtype, device=device))
            except Exception as error:
                if reads_values(error):  # unknown on fake tensors, but fine on one rank
                    return
                raise
    except UserError:
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"model: {name}.forward fails at {user_line_of(error)} ({type(error).__name__}: "
            f"{text}). It is called with one tensor, (batch, channels, rows, columns), of shape "
            f"{x_shape}."
        ) from error
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != needed:
        raise UserError(
            f"model: {name} needs to return {needed} for an input {x_shape}, got {got}. "
            "It has to return one tensor with the rows and columns of its input."
        )
    if len(parameters_outside_graph(model, in_channels, grid)) == len(trained):
        raise UserError(
            f"model: the output of {name} depends on none of its parameters, which can't learn. "
            "Take torch.no_grad, detach and reentrant checkpointing out of its forward."
        )


def parameters_outside_graph(
    model: nn.Module, in_channels: int, grid: tuple[int, int]
) -> tuple[str, ...]:
    """Return the names of parameters that learn, but that the output does not depend on.

    They get no gradient. Empty if that can't be known without data, if the model has parameters in
    a list of its own, which are others on tensors without data, or if the output depends on an
    `autograd.Function` in Python: its backward may compute a block again, as that of reentrant
    checkpointing does, and give gradients to parameters that the graph does not have.

    Args:
        model: before it is converted; it does not change.
        in_channels: of its input `(B, in_channels, H, W)`.
        grid: `(H, W)`.
    """
    dtype, device = dtype_and_device(model)
    try:
        with preserve_model(model), use_fake_tensors(model), torch.enable_grad():
            model.train()  # as a step does, even if the user's code returns it in eval mode
            output = model(
                torch.empty(CHECK_BATCH_SIZE, in_channels, *grid, dtype=dtype, device=device)
            )
            used = {id(output)}  # which may be a parameter itself
            nodes, seen = [output.grad_fn], {None}
            while nodes:
                node = nodes.pop()
                if node in seen:
                    continue
                seen.add(node)
                if isinstance(node, BackwardCFunction):
                    return ()
                if hasattr(node, "variable"):
                    used.add(id(node.variable))
                nodes += [following for following, _ in node.next_functions]
            if used - {id(output), *map(id, model.parameters())}:
                return ()  # parameters that the model reaches otherwise than by their module
            return tuple(
                name
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and id(parameter) not in used
            )
    except Exception:  # noqa: BLE001 - of the user's code; the first step then looks at gradients
        return ()

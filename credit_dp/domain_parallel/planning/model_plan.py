"""The plan of a converted model: the bands of every global height that occurs in it.

In training and in evaluation mode the model runs without data on tensors of the globe, which gives
the heights; these are cut into bands; and it runs once more for every distinct band, on the globe
and on plain bands, which have to compute the same (`comparison`). Nothing is sent.
`check_model` is a smaller check of a user's model that is not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import (
    FIELD_DIMS,
    ROW_DIM,
    RowPartition,
    is_banded,
    too_few_rows_messages,
)
from credit_dp.domain_parallel.planned_run import run_planner
from credit_dp.domain_parallel.planning.comparison import Planner, Run, Unsharded
from credit_dp.domain_parallel.planning.trace import (
    dtype_and_device,
    preserve_model,
    reads_values,
    tensor_leaves,
    use_fake_tensors,
    user_line_of,
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
    """Return one shape or several as a tuple of shapes."""
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


def plan_calls(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: list[Shape],
    inputs: InputFactory,
    trusted: Iterable[nn.Module],
) -> Planner:
    """Plan a converted model: bands for every height that occurs, and heights for every layer.

    The model runs without data as each rank with other bands, on tensors of the globe and on plain
    bands, in training and in evaluation mode. Nothing is sent; values of the model and the random
    state do not change.

    Returns:
        What the runs have shown.

    Raises:
        UserError: a level has fewer rows than there are ranks, or the code between the layers
            computes something else on a band than on the globe.
    """
    planner = Planner(model, manager, trusted)
    planner.input_heights = {shape[ROW_DIM] for shape in shapes if is_banded(shape)}
    with use_fake_tensors(model), planner.followed():
        runs = _plan_batches(planner, shapes, inputs)
    if manager.domain_parallel_size == 1:
        return planner
    for layer in planner.layer_rows:
        layer.set_plan(*planner.layer_plan(layer))
        layer.is_recomputed = layer in planner.recomputed_layers
    for layer in planner.rowwise_layers:
        layer.set_rowwise()
    # Layers that read the same tensor in every run fetch their rows together.
    share_exchanges(model, runs)
    return planner


def _plan_batches(
    planner: Planner, shapes: list[Shape], inputs: InputFactory
) -> list[frozenset[ReaderGroup]]:
    """Plan and compare both modes with a placeholder batch size, with one sample and as they are.

    Tries which inputs have a batch dimension: other inputs may start with the same size by chance.
    """
    refused: GlobalForwardError | None = None
    for has_batch in _possible_batch_ndims(shapes):
        placeholder_batch, single_sample = (
            _batch_resizer(shapes, has_batch, size) for size in (_placeholder_batch_size(shapes), 1)
        )
        try:
            runs = [
                _plan_mode(planner, shapes, inputs, placeholder_batch, training)
                for training in (True, False)
            ]
        except GlobalForwardError as error:
            refused = refused or error
            continue
        for training in (True, False):
            with suppress(GlobalForwardError):  # models may refuse a single sample
                _plan_mode(planner, shapes, inputs, single_sample, training)
        if all(single_sample(shape) != shape for shape in shapes):
            _plan_mode(planner, shapes, inputs, lambda shape: shape, True)
        return runs
    raise refused or AssertionError("the unchanged inputs were tried last")


def _plan_mode(
    planner: Planner,
    shapes: list[Shape],
    inputs: InputFactory,
    any_batch: Callable[[Shape], Shape],
    training: bool,
) -> frozenset[ReaderGroup]:
    """Plan and compare the model in one mode; return groups of layers that read one tensor."""
    bands = planner.manager.bands
    in_this_mode = partial(_run_model, planner, shapes, inputs, any_batch, training)
    planned = {partition.height for partition in bands.planned_partitions}
    try:
        first = in_this_mode(0)
    finally:  # it is why a run fails, too
        for message in too_few_rows_messages(planner.first_uses(), bands.ranks):
            raise UserError(message) from None
    bands.plan(planner.heights, units=planner.row_multiples())
    groups: frozenset[ReaderGroup] = frozenset()
    if bands.ranks == 1:
        return groups
    # Ranks with the same number of rows at all heights run the same operators, but for what happens
    # to the rows at a pole or at a place on the globe, which differs between neighbours.
    ranks = {*_distinct_ranks([bands[h] for h in planner.heights], bands.ranks), 0, 1}
    for rank in sorted(ranks | {bands.ranks - 1}):
        # A run with bands that were chosen after it does not count.
        is_planned = rank == 0 and planner.heights <= planned
        run = in_this_mode(rank, first if is_planned else in_this_mode(rank))
        groups = reader_groups(run.reads)
    return groups


def _run_model(
    planner: Planner,
    shapes: list[Shape],
    inputs: InputFactory,
    any_batch: Callable[[Shape], Shape],
    training: bool,
    rank: int,
    globe: Run | None = None,
) -> Run:
    def band_of(shape: Shape) -> Shape:
        if not is_banded(shape):
            return any_batch(shape)
        rows = planner.manager.partition(shape[ROW_DIM]).sizes[rank]
        return any_batch((*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :]))

    args, kwargs = inputs(band_of)
    run = Run(planner, rank, globe)
    try:
        planner.model.train(training)
        numbers = python_random_state()
        try:
            run(args, kwargs, [any_batch(shape) for shape in shapes])
        except Exception as error:  # user code may raise anything
            if isinstance(error, UserError) or reads_values(error):
                raise
            if globe is not None:
                raise run.difference(error) from None
            error = _error_unsharded(planner.model, *inputs(any_batch)) or error
            where = ", ".join([*run.running_modules[-1:], user_line_of(error)])
            tensors = tensor_leaves(inputs(any_batch))
            message = failure_message(where, error, "the whole globe's input", tensors)
            raise GlobalForwardError(message) from error
        if not np.array_equal(python_random_state(), numbers):
            raise UserError(
                f"{type(planner.model).__name__}: draws random numbers of Python or NumPy, by "
                "which it may run other layers in the next step."
            )
    finally:
        planner.snapshot.restore()
    return run


def _error_unsharded(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception | None:
    token = run_planner.set(Unsharded())
    try:
        model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return error
    finally:
        run_planner.reset(token)
    return None


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
    def change(shape: Shape) -> Shape:
        changes = len(shape) in has_batch and shape[0] == shapes[0][0]
        return (size, *shape[1:]) if changes else shape

    return change


class GlobalForwardError(UserError):
    """The model's own code fails."""


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


def _distinct_ranks(partitions: list[RowPartition], ranks: int) -> list[int]:
    first: dict[tuple[int, ...], int] = {}
    for rank in range(ranks):
        first.setdefault(tuple(p.sizes[rank] for p in partitions), rank)
    return list(first.values())


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

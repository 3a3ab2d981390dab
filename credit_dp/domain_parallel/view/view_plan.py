"""What a model costs through the global view, and whether that is allowed.

`view_model` tries a step before training (`trial`), refuses a model of which a rank would hold too
much (`check_limit`), and attaches the view. All ranks try the same ranks' steps, not each its own:
so they refuse alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import final

from rich.filesize import decimal
from torch import nn

from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.model_plan import (
    GlobalForwardError,
    InputFactory,
    Shape,
    is_banded,
)
from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo
from credit_dp.domain_parallel.view.attach import attach_view, attached_view, detach_view
from credit_dp.domain_parallel.view.boundary import is_same_field
from credit_dp.domain_parallel.view.decisions import Decision, UnplannedError
from credit_dp.domain_parallel.view.tensor import GlobalView
from credit_dp.domain_parallel.view.trial import (
    TrialRun,
    WholeCall,
    trial_run,
)
from credit_dp.errors import UserError

logger = logging.getLogger(__name__)

# The default of `whole_ops_limit`: activations of a rank, over those with a rule for everything.
DEFAULT_LIMIT = 1.5
MAX_LINES = 8


def whole_call_lines(calls: Sequence[WholeCall]) -> list[str]:
    """Return a line for each of the first calls that run whole, and how many more there are."""
    lines = [whole_call_line(call) for call in calls[:MAX_LINES]]
    more = len(calls) - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines


def whole_call_line(call: WholeCall) -> str:
    """Return a line about one entry: where, what, and its costs."""
    where = ", ".join(filter(None, [call.path or "model", _short(call.location)]))
    times = f"{call.calls} times" if call.calls > 1 else "once"
    work = "" if call.work is None else f", {call.work:.0%} of a rank's work"
    return (
        f"{where}: {call.function} runs whole on every rank, {times}, gathers "
        f"{decimal(call.gathered_bytes)}, holds {decimal(call.saved_bytes)}{work}"
    )


def decision_line(decision: Decision) -> str:
    """Return a line about where a model decides by data, and what its plan assumes."""
    return (
        f"{_short(decision.location) or 'model'}: decides by values of fields or weights. The plan "
        f"is that of {decision.value}; in training all ranks follow the first one of their domain"
    )


def _short(location: str) -> str:
    """Return a location without the folder of installed packages or the current one."""
    location = location.rpartition(f"site-packages{os.sep}")[2]
    return location.removeprefix(os.getcwd() + os.sep)


def check_limit(
    model: nn.Module,
    shapes: Sequence[Shape],
    inputs: InputFactory | None,
    trial: TrialRun,
    limit: float | None,
) -> None:
    """Refuse a model of which a rank would hold too much because of calls that run whole.

    Raises:
        UserError: names the calls, the memory, and the largest number of ranks that passes.
    """
    if limit is None or trial.is_within(limit):
        return
    most = _largest_within(model, shapes, inputs, trial, limit)
    fewer = "No number of ranks passes:" if most is None else f"Lower parallel.domain to {most}, or"
    holding = sorted(trial.whole_calls, key=lambda call: -call.saved_bytes)
    raise UserError(
        f"parallel.whole_ops_limit: a rank of {trial.ranks} would hold "
        f"{decimal(trial.saved_bytes)} of activations, "
        f"{trial.saved_bytes / max(trial.least_bytes, 1):.2f} times the "
        f"{decimal(trial.least_bytes)} that it would hold if every operation had a rule for bands. "
        f"{limit:g} times are allowed. {'; '.join(whole_call_lines(holding))}. {fewer} raise "
        "parallel.whole_ops_limit; null turns it off."
    )


def _largest_within(
    model: nn.Module,
    shapes: Sequence[Shape],
    inputs: InputFactory | None,
    trial: TrialRun,
    limit: float,
) -> int | None:
    """Return the largest number of ranks that holds little enough; None if there is none."""
    # By trial runs, as bands are uneven and halos take memory, too. One rank always passes.
    passes, exceeds = 1, trial.ranks
    while exceeds - passes > 1:
        ranks = (passes + exceeds) // 2
        fewer = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
        _choose_bands(fewer, shapes)
        if trial_run(model, fewer, shapes, inputs).is_within(limit):
            passes = ranks
        else:
            exceeds = ranks
    return passes if passes > 1 else None


@final
@dataclass(frozen=True)
class ViewPlan:
    """How a model came to compute through the global view.

    Attributes:
        shapes: of its global inputs.
        refusal: the reason why its layers can't be replaced.
        limit: of the activations that a rank holds, relative to the least.
        trial: what its step costs; None if an operator can't run without data.
    """

    shapes: tuple[Shape, ...]
    refusal: str
    limit: float | None
    trial: TrialRun | None


def view_model(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    refusal: UserError,
    limit: float | None = DEFAULT_LIMIT,
    inputs: InputFactory | None = None,
) -> GlobalView:
    """Make a model that was refused compute through the global view, in place.

    Logs what stopped its conversion, and which operations run whole, the largest first.

    Args:
        model: the model, not converted.
        manager: this rank's position in the mesh.
        shapes: the shapes of its global inputs.
        refusal: the reason why its layers can't be replaced.
        limit: as `whole_ops_limit` of `convert_to_domain_parallel`.
        inputs: as for `trial_run`.

    Raises:
        UserError: an input has fewer rows than there are ranks, the model can't be computed on
            bands, or a rank would hold too much.
    """
    try:
        trial = plan_view(model, manager, shapes, limit, inputs)
    except UnplannedError as error:
        if manager.rank == 0:
            logger.warning("domain parallel: costs are not known before training: %s", error)
        trial = None
    except UserError as error:
        # The model fails unsharded, too: its own error is the one to show. Layers are planned
        # without gradients, where it may fail although it does not in a step.
        if isinstance(refusal, GlobalForwardError):
            raise (refusal if isinstance(error, GlobalForwardError) else error) from None
        raise UserError(f"{error} Nor can its layers be converted: {refusal}") from error
    view = attach_view(model, manager, shapes)
    view.plan = ViewPlan(tuple(shapes), str(refusal), limit, trial)
    logger.info("domain parallel: through the global view, as %s", refusal)
    calls = trial.whole_calls if trial else ()
    for decision in trial.decisions if trial else ():
        logger.info("domain parallel: %s", decision_line(decision))
    for call in calls:
        logger.info("domain parallel: %s", whole_call_line(call))
    if calls and manager.rank == 0:
        logger.warning(
            "domain parallel: functions that run whole on every rank: %d; the largest: %s",
            len(calls),
            whole_call_line(calls[0]),
        )
    return view


def _choose_bands(manager: DomainParallelManager, shapes: Sequence[Shape]) -> list[int]:
    """Choose the bands of the inputs and return their heights.

    Raises:
        UserError: an input has fewer rows than there are ranks, or a rank would have as many rows
            of two inputs with different heights.
    """
    heights = [shape[ROW_DIM] for shape in shapes if is_banded(shape)]
    for height in heights:
        if height < manager.domain_parallel_size:
            raise UserError(
                f"input_shape: {height} rows can't be shared by {manager.domain_parallel_size} "
                f"ranks. Lower parallel.domain to {height} or less."
            )
        manager.bands.plan({height})
    for a, b in combinations([shape for shape in shapes if is_banded(shape)], 2):
        if a[ROW_DIM] == b[ROW_DIM] or not is_same_field(a, b):
            continue
        # A rank knows which input it has by the number of its rows.
        sizes = (manager.partition(shape[ROW_DIM]).sizes for shape in (a, b))
        if any(n == other for n, other in zip(*sizes, strict=True)):
            raise UserError(
                f"input_shape: a rank has as many rows of {a[ROW_DIM]} as of {b[ROW_DIM]}, so "
                "that it can't tell these inputs apart. Change parallel.domain."
            )
    return heights


def replan_view(model: nn.Module, shapes: Sequence[Shape]) -> None:
    """Plan a model that computes through the global view for other shapes.

    Raises:
        UserError: as `view_model`; the model then keeps its plan.
    """
    view = attached_view(model)
    assert view is not None
    before: ViewPlan = view.plan
    detach_view(model)
    try:
        new = view_model(model, view.manager, shapes, UserError(before.refusal), before.limit)
    except UserError:
        new = attach_view(model, view.manager, before.shapes)
        new.plan = before
        raise
    finally:
        new.loss_factor = view.loss_factor


def plan_view(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    limit: float | None,
    inputs: InputFactory | None = None,
    *,
    backward: bool = False,
    training: bool | None = None,
) -> TrialRun:
    """Choose the bands of a model's inputs, and try the ranks with most and fewest rows.

    Returns:
        The run of the rank with most rows.

    Raises:
        UserError: as `view_model`.
        UnplannedError: as `trial_run`.
    """
    heights = _choose_bands(manager, shapes)
    ranks = manager.domain_parallel_size
    sizes = manager.partition(heights[0]).sizes if heights else (0,) * ranks
    most, fewest = sizes.index(max(sizes)), sizes.index(min(sizes))
    memo = ShapeMemo()
    trial = trial_run(
        model, manager, shapes, inputs, rank=most, backward=backward, training=training, memo=memo
    )
    check_limit(model, shapes, inputs, trial, limit)
    if fewest != most:
        # What a function may do can depend on the size of a band. Forward is enough to see it.
        trial_run(model, manager, shapes, inputs, rank=fewest, training=training, memo=memo)
    return trial

"""How a model is sharded: by its layers, on tensors of the globe, or not at all.

`decide` plans a model whose layers are converted. If it is refused, a dry run on tensors of the
globe shows whether they compute it and what a rank would hold, which is limited. The `Decision` has
the reasons and the costs: `convert` carries it out, `credit-dp plan` prints it.

`plan_report` decides for any number of ranks, in this process, and counts the costs of a complete
step on each of them. Exchanges know what all ranks need: one run counts the messages of all, the
others run for their memory only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple, final

from rich.filesize import decimal
from torch import nn

from credit_dp.domain_parallel.assumed_values import AssumedValue, UnplannedError
from credit_dp.domain_parallel.band_tensor.boundary import is_same_field
from credit_dp.domain_parallel.conversion import Conversion, Converter
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.dry_run import DryRun, WholeCall, dry_run
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import (
    ROW_DIM,
    RowPartition,
    is_banded,
    too_few_rows_messages,
)
from credit_dp.domain_parallel.planning.model_plan import (
    GlobalForwardError,
    InputFactory,
    Shape,
    as_shapes,
    empty_inputs,
    plan_calls,
)
from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo
from credit_dp.domain_parallel.recomputation import checkpointed
from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection

# The default of `whole_ops_limit`: activations of a rank, over those with a rule for everything.
DEFAULT_LIMIT = 1.5
MAX_LINES = 8


@final
@dataclass(frozen=True)
class ResolutionLevel:
    """A global height of fields in the model, and the rows of each rank at that height.

    `sent_bytes` is what all ranks send in a step, forward and backward, in rows for layers whose
    input has this height; `least_bytes` is the lower bound for any exchange. Neither contains the
    statistics of norms and other reductions.
    """

    rows: int
    bands: tuple[int, ...]
    sent_bytes: int = 0
    least_bytes: int = 0

    @property
    def imbalance(self) -> float:
        """The largest band, relative to the mean."""
        return max(self.bands) * len(self.bands) / self.rows

    @property
    def excess(self) -> float | None:
        """Bytes sent, relative to the lower bound; None if that is 0."""
        return self.sent_bytes / self.least_bytes if self.least_bytes else None


@final
@dataclass(frozen=True)
class LayerTraffic:
    """The traffic of each rank for one layer, in forward and backward."""

    path: str
    type: str
    forward: tuple[RankTraffic, ...]
    backward: tuple[RankTraffic, ...]


@final
@dataclass(frozen=True)
class Decision:
    """How a model is sharded over `ranks` ranks, and what a training step costs.

    Its layers are converted; or it computes on tensors of the globe, if there is a `refusal`; or it
    can't be sharded, if there are `problems`.

    Attributes:
        whole_ops_limit: the most that a rank may hold of activations, over the least that it could.
        bands: those of the fields of converted layers, or those of the inputs.
        problems: all reasons why the model can't be sharded like this.
        refusal: the reason why its layers can't be converted.
        unplanned: the reason why the costs are not known, although the model can be trained.
        run: the dry run of one rank; None without costs. It counts the messages of all ranks, and
            on tensors of the globe it is the fullest rank's.
        saved_bytes: what autograd saves for backward on each rank, if asked for: an estimate of the
            memory for activations. Temporary memory of operations, gradients and the optimizer come
            on top. Ranks with the same bands, on tensors of the globe the same bands of the inputs,
            share one estimate.
        recomputed_bytes: what the module that saves most saves while backward computes it again;
            it comes on top.
        cause: the error of the model's own code behind a problem.
    """

    input_shapes: tuple[Shape, ...]
    ranks: int
    parameters: int
    parameter_bytes: int
    whole_ops_limit: float | None = None
    bands: tuple[RowPartition, ...] = ()
    problems: tuple[str, ...] = ()
    refusal: str = ""
    unplanned: str = ""
    run: DryRun | None = None
    saved_bytes: tuple[int, ...] = ()
    recomputed_bytes: tuple[int, ...] = ()
    cause: BaseException | None = None

    @property
    def on_globe(self) -> bool:
        """Whether the model computes on tensors of the globe."""
        return bool(self.refusal and not self.problems)

    @property
    def way(self) -> str:
        """What computes on bands, in words; empty on one rank, and if nothing does."""
        return "" if self.ranks == 1 or self.problems else way_of(on_globe=self.on_globe)

    @property
    def levels(self) -> tuple[ResolutionLevel, ...]:
        """The heights of fields, finest first; on tensors of the globe of all that is sent."""
        sent, least = (self.run.sent_bytes, self.run.least_sent_bytes) if self.run else ({}, {})
        levels = [
            ResolutionLevel(p.height, p.sizes, sent.get(p, 0), least.get(p, 0))
            for p in dict.fromkeys([*self.bands, *sent])
        ]
        return tuple(sorted(levels, key=lambda level: -level.rows))

    @property
    def layers(self) -> tuple[LayerTraffic, ...]:
        """The traffic of the converted layers, and of all other modules that send anything."""
        run = self.run
        if run is None:
            return ()
        sending = [
            path
            for path, sent in run.forward.items()
            if any(traffic != RankTraffic() for traffic in (*sent, *run.backward[path]))
        ]
        return tuple(
            LayerTraffic(path or "model", run.types[path], run.forward[path], run.backward[path])
            for path in dict.fromkeys([*run.layers, *sending])
        )

    @property
    def forward(self) -> tuple[RankTraffic, ...]:
        """The traffic of each rank in a forward."""
        return self._total([layer.forward for layer in self.layers])

    @property
    def backward(self) -> tuple[RankTraffic, ...]:
        """The traffic of each rank in a backward."""
        return self._total([layer.backward for layer in self.layers])

    def _total(self, parts: Sequence[tuple[RankTraffic, ...]]) -> tuple[RankTraffic, ...]:
        return tuple(sum((p[rank] for p in parts), RankTraffic()) for rank in range(self.ranks))

    @property
    def whole_calls(self) -> tuple[WholeCall, ...]:
        """The functions that run whole on every rank, the largest first."""
        return self.run.whole_calls if self.run else ()

    @property
    def decisions(self) -> tuple[AssumedValue, ...]:
        """Where a model decides by data, with what the costs assume."""
        return self.run.assumed if self.run else ()

    @property
    def whole_bytes(self) -> int:
        """The part of the fullest rank's `saved_bytes` that it holds as calls run whole."""
        return self.run.whole_bytes if self.run else 0

    @property
    def largest_gathered(self) -> int:
        """The bytes of the largest tensor that is gathered."""
        return self.run.largest_gathered if self.run else 0

    @property
    def launches(self) -> int:
        """The kernels that one rank starts: operations on tensors, without views."""
        return self.run.launches if self.run else 0

    @property
    def error(self) -> str:
        """The problem in one line."""
        if self.refusal and len(self.problems) > 1:
            return f"{self.problems[0]} Nor can its layers be converted: {self.problems[1]}"
        return self.problems[0]


class Wanted(NamedTuple):
    """What a decision may be, and what it has to know.

    Attributes:
        globe: whether the model may compute on tensors of the globe.
        whole: whether functions may run whole then.
        recomputed: paths of the modules that backward computes again; "" stands for the model.
    """

    globe: bool = True
    whole: bool = True
    limit: float | None = DEFAULT_LIMIT
    costs: bool = False
    recomputed: Sequence[str] = ()


def plan_report(
    model: nn.Module,
    input_shape: Shape | Sequence[Shape],
    ranks: int,
    *,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
    recomputed: Sequence[str] = (),
) -> Decision:
    """Return how a model would be sharded, with its costs; takes seconds and sends nothing.

    Args:
        model: a model that is not converted; it does not change. May be on the meta device.
        input_shape: shape of the whole globe's input, `(B, C, H, W)`, or a tuple of shapes.
        recomputed: paths of the modules that backward computes again; "" stands for the model.

    Raises:
        UserError: `ranks` is below 1 or `input_shape` is empty. Reasons why a model can't be
            sharded are in `problems` instead.
    """
    if ranks < 1:
        raise UserError(f"ranks: needs at least 1, got {ranks}.")
    shapes = as_shapes(input_shape)
    conversion = Conversion(counting_manager(ranks), custom_converters or {})
    converted = conversion.apply(model)
    wanted = Wanted(
        whole=whole_ops == "allow", limit=whole_ops_limit, costs=True, recomputed=recomputed
    )
    try:
        return decide(converted, conversion, shapes, wanted)
    finally:
        if conversion.is_applied:
            conversion.undo(converted)


def counting_manager(ranks: int) -> DomainParallelManager:
    """Return the manager of rank 0 of a domain; it counts messages and sends none."""
    return DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))


@no_garbage_collection()  # between its runs, too; each run holds collections back for itself
def decide(
    converted: nn.Module,
    conversion: Conversion,
    shapes: Sequence[Shape],
    wanted: Wanted,
    inputs: InputFactory | None = None,
) -> Decision:
    """Decide how a model is sharded; sends nothing, and all ranks decide alike.

    Args:
        converted: the model, in which the layers that have rules are converted. They stay so, and
            are planned, if that is the decision; otherwise the conversion is undone.
        inputs: returns the arguments of the call; by default one tensor of each shape.
    """
    manager = conversion.manager
    refusals = list(conversion.problems)
    cause: BaseException | None = None
    if not refusals:
        try:
            decision = plan_layers(converted, conversion, shapes, wanted, inputs)
            return _with_costs(decision, converted, conversion, wanted)
        except GlobalForwardError as error:
            refusals, cause = [str(error)], error
        except UserError as error:
            refusals = [str(error)]
    if not wanted.globe:
        decision = _decision(converted, manager, shapes, wanted)
        conversion.undo(converted)
        return replace(decision, problems=tuple(refusals), cause=cause and cause.__cause__)
    # A first forward may have layers of earlier conversions, without rules for fields.
    undo = conversion.undo if inputs is None else conversion.undo_all
    return decide_on_globe(undo(converted), manager, shapes, wanted, refusals, inputs, fails=cause)


def _decision(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Shape], wanted: Wanted
) -> Decision:
    return Decision(
        input_shapes=tuple(shapes),
        ranks=manager.domain_parallel_size,
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        whole_ops_limit=wanted.limit,
    )


def plan_layers(
    model: nn.Module,
    conversion: Conversion,
    shapes: Sequence[Shape],
    wanted: Wanted,
    inputs: InputFactory | None = None,
) -> Decision:
    """Plan a model with converted layers; one that is refused is not changed."""
    manager = conversion.manager
    with conversion.all_layers(), manager.bands.undone_on_error():
        make_inputs = inputs or empty_inputs(model, shapes)
        planner = plan_calls(model, manager, list(shapes), make_inputs, conversion.trusted)
    bands = tuple(manager.bands[height] for height in sorted(planner.heights))
    return replace(_decision(model, manager, shapes, wanted), bands=bands)


def _heights(shapes: Sequence[Shape]) -> list[int]:
    return [shape[ROW_DIM] for shape in shapes if is_banded(shape)]


def _with_costs(
    decision: Decision, converted: nn.Module, conversion: Conversion, wanted: Wanted
) -> Decision:
    """Return a decision with the costs of converted layers; one rank runs the plain model."""
    if not wanted.costs:
        return decision
    manager, shapes = conversion.manager, decision.input_shapes
    model = conversion.undo(converted) if decision.ranks == 1 else converted
    try:
        with checkpointed(model, wanted.recomputed):
            step = partial(
                dry_run, model, manager, shapes, on_globe=False, training=True, memo=ShapeMemo()
            )
            return _with_every_rank(decision, [step(backward=True)], step)
    except UnplannedError as error:
        return replace(decision, unplanned=str(error))
    except UserError as error:
        return replace(decision, problems=(str(error),), cause=error.__cause__)


def _with_every_rank(
    decision: Decision, runs: Sequence[DryRun], step: Callable[..., DryRun]
) -> Decision:
    """Return a decision with what each rank saves; ranks with equal bands share a dry run.

    Args:
        runs: of some ranks; the first counts the messages of all.
    """
    # Modules that backward computes again keep the rows that they receive, which come from one side
    # only on the first and on the last rank.
    ends = (0, decision.ranks - 1) if runs[0].recomputed_bytes else ()
    bands = [
        (rank in ends, *(p.sizes[rank] for p in decision.bands)) for rank in range(decision.ranks)
    ]
    by_bands = {bands[run.rank]: run for run in runs}
    for rank, sizes in enumerate(bands):
        if sizes not in by_bands:
            by_bands[sizes] = step(rank=rank)
    return replace(
        decision,
        run=runs[0],
        saved_bytes=tuple(by_bands[sizes].saved_bytes for sizes in bands),
        recomputed_bytes=tuple(by_bands[sizes].recomputed_bytes for sizes in bands),
    )


# -------------------------------------------------------------------------- tensors of the globe


def decide_on_globe(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    wanted: Wanted,
    refusals: Sequence[str],
    inputs: InputFactory | None = None,
    *,
    fails: BaseException | None = None,
) -> Decision:
    """Decide whether a model whose layers are refused computes on tensors of the globe.

    Args:
        fails: the error if the model fails on the globe, too. Layers are planned without gradients,
            where it may fail although it does not in a step.
    """
    decision = replace(_decision(model, manager, shapes, wanted), refusal=refusals[0])
    try:
        with checkpointed(model, wanted.recomputed):
            training = True if wanted.costs else None
            step = partial(
                dry_run, model, manager=manager, shapes=shapes, inputs=inputs,
                on_globe=True, training=training, memo=ShapeMemo(),
            )  # fmt: skip
            runs = _run_on_globe(model, manager, shapes, wanted, inputs, step)
            bands = tuple(map(manager.partition, dict.fromkeys(_heights(shapes))))
            decision = replace(decision, bands=bands, run=runs[0])
            if not wanted.costs:
                return decision
            return _with_every_rank(decision, runs, step)
    except UnplannedError as error:
        return replace(decision, unplanned=str(error))
    except UserError as error:
        shown = fails if fails and isinstance(error, GlobalForwardError) else error
        problems = (str(shown), *(() if fails else refusals))
        return replace(decision, run=None, problems=problems, cause=shown.__cause__)


def _run_on_globe(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    wanted: Wanted,
    inputs: InputFactory | None,
    step: Callable[..., DryRun],
) -> list[DryRun]:
    """Choose the bands of a model's fields, and run the ranks with most and fewest rows.

    A run with balanced bands shows which numbers of rows the model has, and its windows. If less is
    sent with bands that line up with them, these are the manager's.

    All ranks run the same ranks' steps, not each its own: so they refuse alike.

    Returns:
        The runs, that of the rank with most rows first; one if all have as many.

    Raises:
        UserError: an input has fewer rows than there are ranks, the model can't be computed on
            bands, or a rank would hold too much.
        UnplannedError: as `dry_run`.
    """
    step = partial(step, backward=wanted.costs)
    planned = _with_bands_of(manager)
    heights = choose_bands(planned, shapes)
    run = step(manager=planned, rank=_largest_and_smallest(planned, heights)[0])
    aligned = _with_bands_of(manager)
    with suppress(UserError, UnplannedError):  # the balanced bands stay
        choose_bands(aligned, shapes, run.levels)
        if any(aligned.partition(height) != planned.partition(height) for height in run.levels):
            other = step(manager=aligned, rank=_largest_and_smallest(aligned, heights)[0])
            if other.forward_bytes < run.forward_bytes:
                planned, run = aligned, other
    check_limit(model, shapes, inputs, run, wanted.limit)
    if not wanted.whole and run.whole_calls:
        raise UserError(
            f"parallel.whole_ops=refuse: {'; '.join(whole_call_lines(run.whole_calls))}. Set "
            "parallel.whole_ops=allow to let each rank gather the rows."
        )
    for partition in planned.bands.planned_partitions:
        manager.bands.register(partition)
    most, fewest = _largest_and_smallest(manager, heights)
    # What a function may do can depend on the size of a band. Forward is enough to see it.
    return [run] if fewest == most else [run, step(rank=fewest, backward=False)]


def _with_bands_of(manager: DomainParallelManager) -> DomainParallelManager:
    result = counting_manager(manager.domain_parallel_size)
    for partition in manager.bands.planned_partitions:
        result.bands.register(partition)
    return result


def _largest_and_smallest(
    manager: DomainParallelManager, heights: Sequence[int]
) -> tuple[int, int]:
    sizes = manager.partition(heights[0]).sizes if heights else (0,)
    return sizes.index(max(sizes)), sizes.index(min(sizes))


def check_limit(
    model: nn.Module,
    shapes: Sequence[Shape],
    inputs: InputFactory | None,
    run: DryRun,
    limit: float | None,
) -> None:
    """Refuse a model of which a rank would hold too much because of calls that run whole."""
    if limit is None or run.is_within(limit):
        return
    most = _largest_within(model, shapes, inputs, run, limit)
    fewer = "No number of ranks passes:" if most is None else f"Lower parallel.domain to {most}, or"
    holding = sorted(run.whole_calls, key=lambda call: -call.saved_bytes)
    raise UserError(
        f"parallel.whole_ops_limit: a rank of {run.ranks} would hold "
        f"{decimal(run.saved_bytes)} of activations, "
        f"{run.saved_bytes / max(run.least_bytes, 1):.2f} times the "
        f"{decimal(run.least_bytes)} that it would hold if every operation had a rule for bands. "
        f"{limit:g} times are allowed. {'; '.join(whole_call_lines(holding))}. {fewer} raise "
        "parallel.whole_ops_limit; null turns it off."
    )


def _largest_within(
    model: nn.Module,
    shapes: Sequence[Shape],
    inputs: InputFactory | None,
    run: DryRun,
    limit: float,
) -> int | None:
    # By dry runs, as bands are uneven and halos take memory, too. One rank always passes.
    passes, exceeds = 1, run.ranks
    while exceeds - passes > 1:
        ranks = (passes + exceeds) // 2
        fewer = counting_manager(ranks)
        choose_bands(fewer, shapes)
        if dry_run(model, fewer, shapes, inputs, on_globe=True).is_within(limit):
            passes = ranks
        else:
            exceeds = ranks
    return passes if passes > 1 else None


def choose_bands(
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    levels: Mapping[int, int] = MappingProxyType({}),
) -> list[int]:
    """Choose the bands of the inputs and return their heights.

    Args:
        levels: other numbers of rows that the model has, with which the bands line up: each with
            the number of which its bands should be multiples.

    Raises:
        UserError: an input has fewer rows than there are ranks, or a rank would have as many rows
            of two inputs with different heights.
    """
    heights = _heights(shapes)
    for height in heights:
        for message in too_few_rows_messages({height: "input_shape"}, manager.domain_parallel_size):
            raise UserError(message)
    if levels:
        fine = {height for height in levels if height >= manager.domain_parallel_size}
        manager.bands.plan({*heights, *fine}, units=levels)
    for height in heights:
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


# ------------------------------------------------------------------------------ lines of text


def way_of(*, on_globe: bool) -> str:
    """Return what computes on bands in a model."""
    return ", on tensors of the globe" if on_globe else ", in converted layers"


def decision_lines(decision: Decision) -> list[str]:
    """Return lines about a model that computes on tensors of the globe, and unknown costs."""
    lines = []
    if decision.on_globe:
        lines += [
            "Computes on tensors of the globe, which is exact and needs no change of the model.",
            "Its layers are not converted one by one, because of this:",
            f"  {decision.refusal}",
        ]
    if decision.unplanned:
        return [*lines, "", "Its costs are not known before training:", f"  {decision.unplanned}"]
    if not decision.on_globe:
        return lines
    if decision.decisions:
        lines += ["", *map(assumption_line, decision.decisions)]
    if not decision.whole_calls:
        return [*lines, "Every function has a rule for bands: none runs whole."]
    return [
        *lines,
        "",
        "What runs whole, the largest first:",
        *(f"  {line}" for line in whole_call_lines(decision.whole_calls)),
        f"held whole for backward: {decimal(decision.whole_bytes)}; the largest gathered tensor: "
        f"{decimal(decision.largest_gathered)}",
    ]


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


def assumption_line(assumed: AssumedValue) -> str:
    """Return a line about where a model decides by data, and what its plan assumes."""
    return (
        f"{_short(assumed.location) or 'model'}: decides by values of fields or weights. The plan "
        f"is that of {assumed.value}; in training all ranks follow the first one of their domain"
    )


def _short(location: str) -> str:
    location = location.rpartition(f"site-packages{os.sep}")[2]
    return location.removeprefix(os.getcwd() + os.sep)

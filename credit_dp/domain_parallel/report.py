"""What a sharded model will take, for any number of ranks, without ranks, data or memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from credit_dp.domain_parallel.audit import AuditError
from credit_dp.domain_parallel.conversion import Conversion, Converter
from credit_dp.domain_parallel.copies import copied
from credit_dp.domain_parallel.dry_run import ELSEWHERE, DryRun, dry_runs, row_layers
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.plan import (
    Shape,
    as_shapes,
    find_heights,
    is_banded,
    plan_model,
    too_few_rows,
)
from credit_dp.domain_parallel.tally import Sent, Tally
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class Level:
    """A number of rows that fields of the model have, and how many of them each rank owns.

    `sent_bytes` are those of rows that all ranks send in a step, forward and backward, for the
    layers whose input has this many rows; no exchange could do with less than `least_bytes`.
    Statistics that all ranks add up, as those of norms, are in neither.
    """

    rows: int
    bands: tuple[int, ...]
    sent_bytes: int = 0
    least_bytes: int = 0

    @property
    def imbalance(self) -> float:
        """Rows of the largest band over the mean."""
        return max(self.bands) * len(self.bands) / self.rows

    @property
    def excess(self) -> float | None:
        """What is sent over the least; None where nothing needs to be."""
        return self.sent_bytes / self.least_bytes if self.least_bytes else None


@final
@dataclass(frozen=True)
class LayerTraffic:
    """What each rank sends for one layer, forward and backward."""

    path: str
    type: str
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]


@final
@dataclass(frozen=True)
class PlanReport:
    """A model's sharding over `ranks` ranks, for one training step.

    `saved_bytes` is an estimate of each rank's activation memory: the tensors that autograd saves
    for backward, in a step on tensors without data. Ranks with the same bands count as alike. What
    an operation needs while it runs, gradients and the optimiser come on top.

    `problems` are all reasons found why the model can't be sharded so; if there are any, there are
    no layers, and bands are those of a model without levels.
    """

    input_shapes: tuple[Shape, ...]
    ranks: int
    levels: tuple[Level, ...]
    layers: tuple[LayerTraffic, ...]
    parameters: int
    parameter_bytes: int
    saved_bytes: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def forward(self) -> tuple[Sent, ...]:
        """What each rank sends in a forward."""
        return self._total([layer.forward for layer in self.layers])

    @property
    def backward(self) -> tuple[Sent, ...]:
        """What each rank sends in a backward."""
        return self._total([layer.backward for layer in self.layers])

    def _total(self, parts: Sequence[tuple[Sent, ...]]) -> tuple[Sent, ...]:
        return tuple(sum((p[rank] for p in parts), Sent()) for rank in range(self.ranks))


def plan_report(
    model: nn.Module,
    input_shape: Shape | Sequence[Shape],
    ranks: int,
    *,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
) -> PlanReport:
    """Report on sharding a model; takes seconds, sends nothing and holds no activations.

    Args:
        model: not converted; left as it is. Its parameters may be on the meta device.
        input_shape: the whole globe's input, batch included, `(B, C, H, W)`, or a tuple of such.
        ranks: how many bands.
        custom_converters: as for `convert_to_domain_parallel`.

    Raises:
        UserError: no ranks or no input. Why a model can't be sharded is in `problems` instead.
    """
    if ranks < 1:
        raise UserError(f"ranks: needs at least 1, got {ranks}.")
    shapes = as_shapes(input_shape)
    manager = DomainParallelManager(ranks, ranks, transport=Tally(0, ranks))
    conversion = _Lenient(manager, custom_converters or {})
    sharded = conversion.apply(copied(model))
    heights, refusals = _planned(sharded, shapes, conversion)
    problems = conversion.problems + refusals
    runs: list[DryRun] = []
    if not problems:
        sharded = sharded if ranks > 1 else model  # one rank runs the plain model
        try:
            runs = _dry_runs(sharded, manager, shapes, heights)
        except UserError as error:
            problems.append(str(error))
    return PlanReport(
        shapes,
        ranks,
        _levels(heights, manager, runs),
        _layers(sharded, runs[0]) if runs else (),
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() * p.element_size() for p in model.parameters()),
        tuple(run.saved_bytes for run in runs),
        tuple(problems),
    )


@final
class _Lenient(Conversion):
    """A conversion that notes what has no rule, and goes on."""

    def __init__(
        self, manager: DomainParallelManager, custom: Mapping[type[nn.Module], Converter]
    ) -> None:
        super().__init__(manager, custom)
        self.problems: list[str] = []

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        try:
            return super()._convert(module, path)
        except UserError as error:
            self.problems.append(str(error))
            self.trusted.append(module)
            return module


def _planned(
    model: nn.Module, shapes: tuple[Shape, ...], conversion: _Lenient
) -> tuple[Collection[int], list[str]]:
    """Plan a converted model; return the heights of its fields, and why there is no plan.

    What has too few rows for the ranks is found in a run of its own, where there is no plan.
    """
    ranks, refusals = conversion.manager.domain_parallel_size, list[str]()
    try:
        if ranks > 1 and not conversion.problems:
            planner = plan_model(model, conversion.manager, shapes, conversion.trusted)
            return planner.heights() | {s[ROW_DIM] for s in shapes if is_banded(s)}, []
    except AuditError as error:
        refusals = list(dict.fromkeys(error.refusals))
    except UserError as error:
        refusals = [str(error)]
    try:
        heights = find_heights(model, shapes, conversion.trusted)
    except UserError as error:
        return (), [str(error)]
    return heights, _rows_missing(heights, ranks) or refusals


def _rows_missing(heights: Mapping[int, str], ranks: int) -> list[str]:
    most = min(heights, default=ranks)
    return [
        too_few_rows(path or "model", rows, ranks, most)
        for rows, path in heights.items()
        if rows < ranks
    ]


def _dry_runs(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    heights: Iterable[int],
) -> list[DryRun]:
    """A run for each rank; ranks that have as many rows everywhere share theirs.

    The first rank's tells what all ranks send; of the others only what they save is asked.
    """
    sizes = [manager.bands[height].sizes for height in heights]
    bands = list(zip(*sizes, strict=True)) or [()] * manager.domain_parallel_size
    ranks = [bands.index(of_rank) for of_rank in dict.fromkeys(bands)]
    runs = dict(zip(dict.fromkeys(bands), dry_runs(model, manager, shapes, ranks), strict=True))
    return [runs[of_rank] for of_rank in bands]


def _levels(
    heights: Iterable[int], manager: DomainParallelManager, runs: Sequence[DryRun]
) -> tuple[Level, ...]:
    """The levels from the finest on; every rank's run counts the same for all ranks."""
    sent, least = (runs[0].sent_bytes, runs[0].least_bytes) if runs else ({}, {})
    return tuple(
        Level(h, manager.bands[h].sizes, sent.get(h, 0), least.get(h, 0))
        for h in sorted(heights, reverse=True)
    )


def _layers(model: nn.Module, run: DryRun) -> tuple[LayerTraffic, ...]:
    """The layers in the model's order; what is sent outside them last, if it is anything."""
    paths = [path for path in run.forward if path != ELSEWHERE]
    if any(sent != Sent() for sent in (*run.forward[ELSEWHERE], *run.backward[ELSEWHERE])):
        paths.append(ELSEWHERE)
    kinds = {path: layer.title for path, layer in row_layers(model).items()}
    return tuple(
        LayerTraffic(path, kinds.get(path, ""), run.forward[path], run.backward[path])
        for path in paths
    )

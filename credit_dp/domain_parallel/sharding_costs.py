"""The plan report: bands, memory and traffic of a sharded model, for any number of ranks.

`plan_report` converts a copy of the model, plans it, and runs one training step on tensors without
data (`dry_runs`) in this process. As exchanges know what all ranks need, the step of a single rank
counts the messages of all; the other ranks run for their memory only. `TrafficLowerBound` adds up
what the layers would have to send at least, for comparison.

A model that can't be converted layer by layer runs through the global view, if that is allowed: its
costs are those of trial runs (`view.trial`), and nothing is known of the least that it could send.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from credit_dp.domain_parallel.convert import Conversion, Converter
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.functional import attached_contexts, in_backward
from credit_dp.domain_parallel.halo_exchange import row_bytes
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.planning.audit import AuditError
from credit_dp.domain_parallel.planning.model_plan import (
    Shape,
    as_shapes,
    find_heights,
    is_banded,
    plan_model,
    too_few_rows_message,
)
from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo, tensors_in
from credit_dp.domain_parallel.planning.trace import (
    ModelSnapshot,
    PlanningMode,
    copy_model,
    dtype_and_device,
    launches_kernel,
    named_leaves,
)
from credit_dp.domain_parallel.recomputation import (
    RecomputationCounter,
    SavedTensors,
    checkpointed,
    count_recomputation,
)
from credit_dp.domain_parallel.view.attach import attached_view, detach_view
from credit_dp.domain_parallel.view.decisions import Decision, UnplannedError
from credit_dp.domain_parallel.view.trial import (
    TrialRun,
    WholeCall,
    trial_run,
)
from credit_dp.domain_parallel.view.view_plan import DEFAULT_LIMIT, plan_view
from credit_dp.errors import UserError


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
class PlanReport:
    """A model's sharding over `ranks` ranks, for one training step.

    `saved_bytes` estimates the activation memory of each rank: the tensors that autograd saves for
    backward. Temporary memory of operations, gradients and the optimiser come on top. Ranks with
    the same bands share one estimate. `recomputed_bytes` come on top if backward computes modules
    again: what the module with most saves meanwhile.

    `launches` is the number of kernels that one rank starts in forward and backward: operations on
    tensors, without views and allocations.

    `problems` has all reasons why the model can't be sharded like this. If there is any, `layers`
    is empty and `levels` have balanced bands.

    `unplanned` is the reason why nothing more is known of a model that can be trained.

    A model that computes through the global view has a `refusal`, the reason why its layers can't
    be converted. `whole_calls` are the functions that run whole on every rank, the largest
    first; `whole_bytes` is the part of the fullest rank's `saved_bytes` that it holds
    because of them, and `largest_gathered` the bytes of the largest tensor that is gathered.
    `decisions` are where it decides by data, with what the costs assume. Its `levels` are the
    bands of all that is exchanged, also of tokens and of columns.
    """

    input_shapes: tuple[Shape, ...]
    ranks: int
    levels: tuple[ResolutionLevel, ...]
    layers: tuple[LayerTraffic, ...]
    parameters: int
    parameter_bytes: int
    saved_bytes: tuple[int, ...]
    problems: tuple[str, ...]
    refusal: str = ""
    whole_calls: tuple[WholeCall, ...] = ()
    decisions: tuple[Decision, ...] = ()
    whole_bytes: int = 0
    largest_gathered: int = 0
    recomputed_bytes: tuple[int, ...] = ()
    launches: int = 0
    unplanned: str = ""

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


def plan_report(
    model: nn.Module,
    input_shape: Shape | Sequence[Shape],
    ranks: int,
    *,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
    recomputed: Sequence[str] = (),
) -> PlanReport:
    """Return a report on sharding a model; takes seconds and sends nothing.

    Args:
        model: a model that is not converted; it does not change. May be on the meta device.
        input_shape: shape of the whole globe's input, `(B, C, H, W)`, or a tuple of shapes.
        ranks: number of bands.
        custom_converters: see `convert_to_domain_parallel`.
        whole_ops: see `convert_to_domain_parallel`.
        whole_ops_limit: see `convert_to_domain_parallel`.
        recomputed: paths of the modules that backward computes again; "" stands for the model.

    Raises:
        UserError: `ranks` is below 1 or `input_shape` is empty. Reasons why a model can't be
            sharded are in `problems` instead.
    """
    if ranks < 1:
        raise UserError(f"ranks: needs at least 1, got {ranks}.")
    shapes = as_shapes(input_shape)
    report = _layer_report(model, shapes, ranks, custom_converters or {}, recomputed)
    if whole_ops == "allow" and report.problems:
        with checkpointed(model, recomputed):
            return _view_report(model, report, whole_ops_limit)
    return report


def _layer_report(
    model: nn.Module,
    shapes: tuple[Shape, ...],
    ranks: int,
    custom_converters: Mapping[type[nn.Module], Converter],
    recomputed: Sequence[str],
) -> PlanReport:
    """Return the report on a model whose layers are converted."""
    manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
    conversion = _CollectingConversion(manager, custom_converters)
    try:
        sharded = copy_model(model)
    except Exception as error:  # noqa: BLE001 - modules may forbid copies in any way
        problem = (
            f"{type(model).__name__}: can't be copied, which the plan of its layers needs "
            f"({type(error).__name__}: {error})."
        )
        return _empty_report(model, shapes, ranks, (problem,))
    sharded = conversion.apply(sharded)  # in place
    heights, refusals = _heights_and_refusals(sharded, shapes, conversion)
    problems = conversion.problems + refusals
    runs: list[DryRun] = []
    if not problems:
        sharded = sharded if ranks > 1 else model  # one rank runs the plain model
        try:
            with checkpointed(sharded, recomputed):
                runs = _dry_runs_by_rank(sharded, manager, shapes, heights)
        except UserError as error:
            problems.append(str(error))
    return replace(
        _empty_report(model, shapes, ranks, tuple(problems)),
        levels=_levels(heights, manager, runs),
        layers=_layer_traffic(sharded, runs[0]) if runs else (),
        saved_bytes=tuple(run.saved_bytes for run in runs),
        recomputed_bytes=tuple(run.recomputed_bytes for run in runs),
        launches=runs[0].launches if runs else 0,
    )


def _empty_report(
    model: nn.Module, shapes: tuple[Shape, ...], ranks: int, problems: tuple[str, ...]
) -> PlanReport:
    return PlanReport(
        input_shapes=shapes,
        ranks=ranks,
        levels=(),
        layers=(),
        parameters=sum(p.numel() for p in model.parameters()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        saved_bytes=(),
        problems=problems,
    )


def _view_report(model: nn.Module, refused: PlanReport, limit: float | None) -> PlanReport:
    """Return the report on a model through the global view, whose layers were refused.

    Problems are the view's, followed by those of the layers.
    """
    ranks, shapes = refused.ranks, refused.input_shapes
    manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
    try:
        trial = plan_view(model, manager, shapes, limit, backward=True, training=True)
        saved_bytes, recomputed_bytes = _saved_bytes_by_rank(model, manager, shapes, trial)
    except UserError as error:
        return replace(refused, problems=(str(error), *refused.problems))
    except UnplannedError as error:
        return replace(refused, problems=(), refusal=refused.problems[0], unplanned=str(error))
    bands = {manager.partition(s[ROW_DIM]): 0 for s in shapes if is_banded(s)} | dict(
        trial.sent_bytes
    )
    levels = [ResolutionLevel(p.height, p.sizes, sent) for p, sent in bands.items()]
    return replace(
        refused,
        levels=tuple(sorted(levels, key=lambda level: -level.rows)),
        layers=tuple(
            LayerTraffic(path or "model", trial.types[path], sent, trial.backward[path])
            for path, sent in trial.forward.items()
            if any(traffic != RankTraffic() for traffic in (*sent, *trial.backward[path]))
        ),
        saved_bytes=saved_bytes,
        recomputed_bytes=recomputed_bytes,
        launches=trial.launches,
        problems=(),
        refusal=refused.problems[0],
        whole_calls=trial.whole_calls,
        decisions=trial.decisions,
        whole_bytes=trial.whole_bytes,
        largest_gathered=trial.largest_gathered,
    )


def _saved_bytes_by_rank(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Shape], trial: TrialRun
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what each rank saves, and what it saves while a module is computed again.

    Ranks with as many rows of the inputs share a run.
    """
    partitions = [manager.partition(s[ROW_DIM]) for s in shapes if is_banded(s)]
    saved: dict[tuple[int, ...], tuple[int, int]] = {}
    by_rank = []
    for rank in range(manager.domain_parallel_size):
        bands = tuple(partition.sizes[rank] for partition in partitions)
        if bands not in saved:
            is_known = rank == trial.rank
            run = trial if is_known else trial_run(model, manager, shapes, rank=rank, training=True)
            saved[bands] = run.saved_bytes, run.recomputed_bytes
        by_rank.append(saved[bands])
    kept, again = zip(*by_rank, strict=True)
    return kept, again


@final
class _CollectingConversion(Conversion):
    """A conversion that collects modules without a rule as problems instead of raising."""

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


def _heights_and_refusals(
    model: nn.Module, shapes: tuple[Shape, ...], conversion: _CollectingConversion
) -> tuple[Collection[int], list[str]]:
    """Plan a converted model; return the heights of its fields and the reasons for a refusal.

    If there is no plan, a separate run on the globe finds all levels with too few rows.
    """
    ranks = conversion.manager.domain_parallel_size
    refusals: list[str] = []
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
    return heights, _too_few_rows_messages(heights, ranks) or refusals


def _too_few_rows_messages(heights: Mapping[int, str], ranks: int) -> list[str]:
    most = min(heights, default=ranks)
    return [
        too_few_rows_message(path or "model", rows, ranks, most)
        for rows, path in heights.items()
        if rows < ranks
    ]


def _dry_runs_by_rank(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    heights: Iterable[int],
) -> list[DryRun]:
    """Return a run for each rank; ranks with equal bands at all heights share one.

    Only the first run counts messages, those of all ranks; the others count saved tensors.
    """
    sizes = [manager.bands[height].sizes for height in heights]
    bands = list(zip(*sizes, strict=True)) or [()] * manager.domain_parallel_size
    ranks = [bands.index(rank_bands) for rank_bands in dict.fromkeys(bands)]
    runs = dict(zip(dict.fromkeys(bands), dry_runs(model, manager, shapes, ranks), strict=True))
    return [runs[rank_bands] for rank_bands in bands]


def _levels(
    heights: Iterable[int], manager: DomainParallelManager, runs: Sequence[DryRun]
) -> tuple[ResolutionLevel, ...]:
    """Return the levels, finest first; the traffic is in the first run, for all ranks."""
    sent, least = (runs[0].sent_bytes, runs[0].least_bytes) if runs else ({}, {})
    return tuple(
        ResolutionLevel(h, manager.bands[h].sizes, sent.get(h, 0), least.get(h, 0))
        for h in sorted(heights, reverse=True)
    )


def _layer_traffic(model: nn.Module, run: DryRun) -> tuple[LayerTraffic, ...]:
    """Return the traffic of layers in the model's order, then that outside of layers, if any."""
    paths = [path for path in run.forward if path != OUTSIDE_LAYERS]
    if any(
        sent != RankTraffic()
        for sent in (*run.forward[OUTSIDE_LAYERS], *run.backward[OUTSIDE_LAYERS])
    ):
        paths.append(OUTSIDE_LAYERS)
    titles = {path: layer.title for path, layer in row_layers(model).items()}
    return tuple(
        LayerTraffic(path, titles.get(path, ""), run.forward[path], run.backward[path])
        for path in paths
    )


# The entry for messages outside the layers, such as those of a module from `custom_converters`.
OUTSIDE_LAYERS = "(elsewhere)"


@final
@dataclass(frozen=True)
class DryRun:
    """Traffic of all ranks in one step, by layer, and the bytes that one rank saves for backward.

    `sent_bytes` and their lower bound `least_bytes` count rows, over all ranks and the whole step,
    by the global height of the layer's input. `recomputed_bytes` and `launches`: see `PlanReport`.
    """

    forward: dict[str, tuple[RankTraffic, ...]]
    backward: dict[str, tuple[RankTraffic, ...]]
    saved_bytes: int
    sent_bytes: Mapping[int, int]
    least_bytes: Mapping[int, int]
    recomputed_bytes: int = 0
    launches: int = 0


def dry_run(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    rank: int,
) -> DryRun:
    """Run a planned model's training step as one of the ranks, on tensors without data.

    Args:
        model: a converted and planned model; it does not change.
        manager: the manager that it was converted with.
        shapes: shapes of the whole globe's inputs, which need no gradient.
        rank: the rank to run as.
    """
    if attached_view(model) is not None:
        return _view_dry_run(model, manager, shapes, rank)
    return dry_runs(model, manager, shapes, [rank])[0]


def _view_dry_run(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Shape], rank: int
) -> DryRun:
    """Run the step of a model that computes through the global view, as `dry_run`."""
    copied = copy_to_meta(model)
    detach_view(copied)
    trial = trial_run(copied, manager, shapes, rank=rank, backward=True, training=True)
    sent_bytes: Counter[int] = Counter()
    for partition, size in trial.sent_bytes.items():
        sent_bytes[partition.height] += size
    return DryRun(
        trial.forward,
        trial.backward,
        trial.saved_bytes,
        sent_bytes,
        {},
        trial.recomputed_bytes,
        trial.launches,
    )


def dry_runs(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    ranks: Sequence[int],
) -> list[DryRun]:
    """Run the step of `dry_run` as each of these ranks.

    Only the first rank runs a backward, which counts the messages of all ranks, and its launches.
    The tensors saved for backward are known after a forward.
    """
    saved = manager.rank, manager.transport
    runs: list[DryRun] = []
    try:
        with use_meta_tensors() as mode:
            meta_model = copy_to_meta(model)
            snapshot = ModelSnapshot(meta_model)
            for rank in ranks:
                manager.rank = rank
                runs.append(_run_step(meta_model, manager, shapes, mode, backward=not runs))
                snapshot.restore()
    finally:
        manager.rank, manager.transport = saved
    return runs


def _run_step(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    mode: MetaTensorMode,
    backward: bool,
) -> DryRun:
    model.train()
    dtype, _ = dtype_and_device(model)
    bands = [_band_shape(shape, manager) for shape in shapes]
    inputs = [torch.empty(band, dtype=dtype, device="meta") for band in bands]
    held = [*model.parameters(), *model.buffers()]
    saved = SavedTensors(held)
    again = RecomputationCounter(saved.add, held, lambda: mode.launches)
    launched = mode.launches
    with _count_by_layer(model, manager) as counters, count_recomputation(again):
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
            outputs = [x for _, x in named_leaves(model(*inputs)) if isinstance(x, Tensor)]
        forward = counters.by_layer()
        outputs = [x for x in outputs if x.requires_grad]
        if outputs and backward:
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    # Counters only grow: the backward is the difference to the counts after the forward.
    backward_traffic = {
        name: tuple(a - b for a, b in zip(sent, forward[name], strict=True))
        for name, sent in counters.by_layer().items()
    }
    return DryRun(
        forward,
        backward_traffic,
        saved.bytes + again.received,
        counters.by_height(),
        counters.lower_bound.bytes,
        again.recomputed,
        mode.launches - launched + again.repeated,
    )


def _band_shape(shape: Shape, manager: DomainParallelManager) -> Shape:
    if not is_banded(shape):
        return shape
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    return (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])


@final
class _LayerCounters:
    """One counting transport for each layer and input height, and one for all other code."""

    def __init__(self, names: Iterable[str], manager: DomainParallelManager) -> None:
        self.manager = manager
        self.lower_bound = TrafficLowerBound()
        self.outside_layers = self._new_counter()
        self._counters: dict[str, dict[int | None, CountingTransport]] = {
            name: {} for name in names
        }

    def enter(self, name: str, height: int | None) -> None:
        """Count for a layer until `leave`.

        Its backward counts there, too, as autograd functions keep the transport of their forward.
        """
        by_height = self._counters[name]
        if height not in by_height:
            by_height[height] = self._new_counter()
        self.manager.transport = by_height[height]

    def leave(self) -> None:
        """Count for no layer from now on."""
        self.manager.transport = self.outside_layers

    def by_layer(self) -> dict[str, tuple[RankTraffic, ...]]:
        """Return the traffic of each rank so far, by layer and outside of layers."""
        no_traffic = (RankTraffic(),) * self.manager.domain_parallel_size
        sums = {
            name: [t.sent for t in by_height.values()] for name, by_height in self._counters.items()
        }
        return {OUTSIDE_LAYERS: self.outside_layers.sent} | {
            name: tuple(
                sum(of_rank, RankTraffic()) for of_rank in zip(no_traffic, *sent, strict=True)
            )
            for name, sent in sums.items()
        }

    def by_height(self) -> dict[int, int]:
        """Return the bytes of rows that all ranks have sent, by the layer's global input height."""
        sums: Counter[int] = Counter()
        for by_height in self._counters.values():
            for height, counter in by_height.items():
                if height is not None:
                    sums[height] += sum(sent.bytes for sent in counter.sent)
        return sums

    def _new_counter(self) -> CountingTransport:
        manager = self.manager
        return CountingTransport(
            manager.rank, manager.domain_parallel_size, manager.bands.planned_partitions
        )


@contextmanager
def _count_by_layer(model: nn.Module, manager: DomainParallelManager) -> Iterator[_LayerCounters]:
    """Count the traffic of each layer while the model runs."""
    layers = row_layers(model)
    counters = _LayerCounters(layers, manager)
    counters.leave()
    with ExitStack() as stack:
        for name, layer in layers.items():
            layer.forget_exchanges()

            def enter(layer: RowLayer, args: tuple[Any, ...], name: str = name) -> None:
                bands = _bands_of_call(layer, args)
                counters.enter(name, None if bands is None else bands.input.height)

            def leave(layer: RowLayer, args: tuple[Any, ...], outputs: Any) -> None:
                counters.leave()
                bands = _bands_of_call(layer, args)
                if bands is not None:
                    counters.lower_bound.add(layer, bands, args[0], outputs)

            stack.callback(layer.register_forward_pre_hook(enter).remove)
            # always_call: activation checkpointing stops recomputing inside a layer, by an
            # exception, once it has the last tensor that it needs.
            hook = layer.register_forward_hook(leave, always_call=True)
            stack.callback(hook.remove)
        yield counters


def _bands_of_call(layer: RowLayer, args: tuple[Any, ...]) -> Bands | None:
    """Return the bands of a call; None if the layer couples no rows."""
    return layer.bands(*args) if args and layer._planned_heights else None


def row_layers(model: nn.Module) -> dict[str, RowLayer]:
    """Return the sharded layers of a planned model by path; those of `functional` by call."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}
    calls = (items for context in attached_contexts(model) for items in context.layers.items())
    return layers | {call: layer for (call, _), layer in calls}


@contextmanager
def use_meta_tensors() -> Iterator[MetaTensorMode]:
    """Run code on tensors without data; torch's random state does not change."""
    mode = MetaTensorMode()
    with mode, torch.random.fork_rng(devices=[]):
        yield mode


@final
class MetaTensorMode(PlanningMode):
    """Moves operands to the meta device if an operation combines CPU and meta tensors.

    Attributes:
        launches: number of kernels that the operations on the meta device start.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self._memo = ShapeMemo()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, on the meta device if one of its operands is there."""
        operands = (args, kwargs or {})
        devices = {x.is_meta for values in (args, operands[1].values()) for x in tensors_in(values)}
        if len(devices) > 1:
            operands = tree_map_only(Tensor, lambda x: x if x.is_meta else _to_meta(x), operands)
        result = self._memo.run(func, *operands)
        if launches_kernel(func):
            self.launches += True in devices or any(x.is_meta for x in tensors_in([result]))
        return result


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy with all tensors on the meta device."""
    return copy.deepcopy(model, {id(x): _to_meta(x) for x in tensors_of(model)})


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and plain tensor attributes of all modules of a model."""
    modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in modules:
        if module is not None:
            tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return tensors


def _to_meta(x: Tensor) -> Tensor:
    empty = torch.empty_like(x, device="meta", requires_grad=False)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


# A global row and the rank that receives it.
RowTransfer = tuple[int, int]


@final
class TrafficLowerBound:
    """Sums the bytes that the layers have to send at least in one step, over all ranks.

    `bytes`: by the global height of a layer's input. Layers that activation checkpointing computes
    again in backward fetch their rows again.
    """

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()
        # The transfers of each tensor so far, by `id`. The tensors are kept alive, as Python would
        # reuse the `id` of a freed one.
        self._transferred: dict[object, set[RowTransfer]] = defaultdict(set)
        self._tensors: list[Tensor] = []

    def add(self, layer: RowLayer, bands: Bands, x: Tensor, output: object) -> None:
        """Add one call of a layer with first input `x`."""
        height = bands.input.height
        if isinstance(layer, DepthwiseLayer) and layer.transposes(height):
            to_channels, to_rows = layer.transpose_pair(bands)
            self._add(
                height, to_channels.total_rows_sent(to_channels=True), _channel_row_bytes(x), x
            )
            if isinstance(output, Tensor):
                self._add(
                    height,
                    to_rows.total_rows_sent(to_channels=False),
                    _channel_row_bytes(output),
                    output,
                )
            return
        row_size = row_bytes(x, layer.dim)
        if not isinstance(layer, DomainParallelRowGroups):
            self._add(
                height,
                len(self._not_yet_transferred(required_transfers(layer, bands), x)),
                row_size,
                x,
            )
            return
        # Whole groups move to one rank and their output moves back to the owners of the rows.
        rows = min_rows_moved(layer, bands.input)
        self._add(height, rows, row_size, x)
        if isinstance(output, Tensor):  # the output rows are returned
            self._add(height, rows, row_bytes(output, layer.dim), output)

    def _add(self, height: int, rows: int, row_size: int, x: Tensor) -> None:
        """Add `rows` rows of `x`, twice if their gradients are returned in backward."""
        # Activation checkpointing runs a forward again within backward: it fetches again, but its
        # gradients were counted the first time.
        directions = 2 if x.requires_grad and not in_backward() else 1
        self.bytes[height] += rows * row_size * directions

    def _not_yet_transferred(self, transfers: set[RowTransfer], x: Tensor) -> set[RowTransfer]:
        """Return new transfers only: layers that read the same tensor can share them."""
        self._tensors.append(x)
        transferred = self._transferred[id(x), x._version, in_backward()]
        new = transfers - transferred
        transferred |= new
        return new


def required_transfers(layer: RowLayer, bands: Bands) -> set[RowTransfer]:
    """Return every row that a rank needs for its output and does not own."""
    if isinstance(layer, ReductionLayer):  # sends statistics, no rows
        return set()
    return {
        (row, rank)
        for rank, ranges in enumerate(layer.exchange(bands).required_rows)
        for rows in ranges
        if not rows.zero_filled
        for row in range(rows.start, rows.stop)
        if bands.input.owner(row) != rank
    }


def min_rows_moved(layer: DomainParallelRowGroups, bands: RowPartition) -> int:
    """Return the rows to send if each group is processed by the rank that owns most of its rows."""
    groups = layer.wrapped.groups(bands.height)
    rows_moved = 0
    for first in range(0, len(groups.order), groups.size):
        group = groups.order[first : first + groups.size]
        owners = Counter(bands.owner(row) for row in group if row is not None)
        rows_moved += owners.total() - max(owners.values(), default=0)
    return rows_moved


def _channel_row_bytes(x: Tensor) -> int:
    """Return the bytes of one row of one channel, over all samples."""
    return x.shape[:-3].numel() * x.shape[-1] * x.element_size()

"""What a sharded model takes, for any number of ranks, and the least that it could send."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.convert import Conversion, Converter
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.functional import attached_contexts, in_backward
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.planning.audit import AuditError
from credit_dp.domain_parallel.planning.plan import (
    Shape,
    as_shapes,
    find_heights,
    is_banded,
    plan_model,
    too_few_rows_message,
)
from credit_dp.domain_parallel.planning.trace import (
    ModelSnapshot,
    ShapeMemo,
    copy_model,
    tensors_in,
)
from credit_dp.errors import UserError

# A global row, and the rank that gets it.
RowTransfer = tuple[int, int]


@final
class TrafficLowerBound:
    """Adds up what the layers of a step would have to send at least, all ranks together.

    `bytes`: by the global rows of a layer's input. What is computed again in backward, to save
    memory, is fetched again.
    """

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()
        # What has crossed of each tensor. The tensors are held: the address of a freed one would
        # be given out again.
        self._transferred: dict[object, set[RowTransfer]] = defaultdict(set)
        self._tensors: list[Tensor] = []

    def add(self, layer: RowLayer, bands: Bands, x: Tensor, made: object) -> None:
        """Add one call of a layer: of `x`, whose rows are where its plan says."""
        height = bands.input.height
        if isinstance(layer, DepthwiseLayer) and layer.transposes(height):
            there, back = layer.transpose_pair(bands)
            self._add(height, there.total_rows_sent(to_channels=True), _channel_row_bytes(x), x)
            if isinstance(made, Tensor):
                self._add(
                    height, back.total_rows_sent(to_channels=False), _channel_row_bytes(made), made
                )
            return
        size = row_bytes(x, layer.dim)
        if not isinstance(layer, DomainParallelRowGroups):
            self._add(
                height, len(self._not_yet_transferred(required_transfers(layer, bands), x)), size, x
            )
            return
        rows = min_rows_moved(layer, bands.input)
        self._add(height, rows, size, x)
        if isinstance(made, Tensor):  # the rows go home again
            self._add(height, rows, row_bytes(made, layer.dim), made)

    def _add(self, height: int, rows: int, size: int, x: Tensor) -> None:
        """Add rows of `x` of some bytes, there and, if it needs a gradient, back."""
        directions = 2 if x.requires_grad and not in_backward() else 1
        self.bytes[height] += rows * size * directions

    def _not_yet_transferred(self, crossings: set[RowTransfer], x: Tensor) -> set[RowTransfer]:
        """Return what hasn't crossed yet, for another layer that reads this tensor."""
        self._tensors.append(x)
        crossed = self._transferred[id(x), x._version, in_backward()]
        new = crossings - crossed
        crossed |= new
        return new


def required_transfers(layer: RowLayer, bands: Bands) -> set[RowTransfer]:
    """Return each row that a rank needs for its output and doesn't own."""
    if isinstance(layer, ReductionLayer):  # whose rows stay where they are
        return set()
    return {
        (row, rank)
        for rank, runs in enumerate(layer.exchange(bands).required_rows)
        for run in runs
        if not run.zero_filled
        for row in range(run.start, run.stop)
        if bands.input.owner(row) != rank
    }


def min_rows_moved(layer: DomainParallelRowGroups, bands: RowPartition) -> int:
    """Return how many rows must leave home if each group is treated where most of its rows are."""
    groups = layer.wrapped.groups(bands.height)
    away = 0
    for first in range(0, len(groups.order), groups.size):
        group = groups.order[first : first + groups.size]
        owners = Counter(bands.owner(row) for row in group if row is not None)
        away += owners.total() - max(owners.values(), default=0)
    return away


def _channel_row_bytes(x: Tensor) -> int:
    """Return the bytes of one row of one channel, of all samples."""
    return x.shape[:-3].numel() * x.shape[-1] * x.element_size()


def row_bytes(x: Tensor, dim: int) -> int:
    """Return the bytes of one row, which is in the negative dimension `dim`."""
    return x.shape[:dim].numel() * x.shape[dim:][1:].numel() * x.element_size()


# Messages outside the layers: of a module from `custom_converters`, say.
OUTSIDE_LAYERS = "(elsewhere)"


@final
@dataclass(frozen=True)
class DryRun:
    """What all ranks send in a step, by layer, and the bytes that one rank saves for backward.

    `sent_bytes` of rows, and the `least_bytes` that could be, are of all ranks in the whole step,
    by the global rows of the input of the layers that send them.
    """

    forward: dict[str, tuple[RankTraffic, ...]]
    backward: dict[str, tuple[RankTraffic, ...]]
    saved_bytes: int
    sent_bytes: Mapping[int, int]
    least_bytes: Mapping[int, int]


def dry_run(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    rank: int,
) -> DryRun:
    """Run a planned model's training step as one of the ranks, on tensors without data.

    Args:
        model: converted and planned; left as it is.
        manager: the one that it was converted with.
        shapes: of the whole globe's inputs, which need no gradient.
        rank: whose band is taken.
    """
    return dry_runs(model, manager, shapes, [rank])[0]


def dry_runs(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    ranks: Sequence[int],
) -> list[DryRun]:
    """Run the step of `dry_run` as each of these ranks.

    Only the first one's has a backward, which sends for all ranks. What is saved for it is known
    before.
    """
    place = manager.rank, manager.transport
    found: list[DryRun] = []
    try:
        with use_meta_tensors():
            empty = copy_to_meta(model)
            before = ModelSnapshot(empty)
            for rank in ranks:
                manager.rank = rank
                found.append(_run_step(empty, manager, shapes, backward=not found))
                before.restore()
    finally:
        manager.rank, manager.transport = place
    return found


@contextmanager
def use_meta_tensors() -> Iterator[None]:
    """Let code run on tensors without data; torch's random numbers stay where they were."""
    mode = _MetaTensorMode()
    with mode, torch.random.fork_rng(devices=[]):
        yield


@final
class _MetaTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets tensors that code makes on the CPU meet those that have no data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memo = ShapeMemo()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while planning: spare every operation torch's check of that."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation without data if one of its operands has none."""
        given = (args, kwargs or {})
        devices = {
            x.is_meta for operands in (args, given[1].values()) for x in tensors_in(operands)
        }
        if len(devices) > 1:
            given = tree_map_only(Tensor, lambda x: x if x.is_meta else _to_meta(x), given)
        return self._memo.run(func, *given)


def _run_step(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Shape], backward: bool
) -> DryRun:
    model.train()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    bands = [_band_shape(shape, manager) for shape in shapes]
    inputs = [torch.empty(band, dtype=dtype, device="meta") for band in bands]
    saved = SavedTensors([*model.parameters(), *model.buffers()])
    with _count_by_layer(model, manager) as tallies:
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
            made = [x for x in tree_leaves(model(*inputs)) if isinstance(x, Tensor)]
        forward = tallies.by_layer()
        made = [x for x in made if x.requires_grad]
        if made and backward:
            torch.autograd.backward(made, [torch.empty_like(x) for x in made])
    back = {
        name: tuple(a - b for a, b in zip(sent, forward[name], strict=True))
        for name, sent in tallies.by_layer().items()
    }
    return DryRun(forward, back, saved.bytes, tallies.by_height(), tallies.lower_bound.bytes)


def _band_shape(shape: Shape, manager: DomainParallelManager) -> Shape:
    if not is_banded(shape):
        return shape
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    return (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])


@final
class _LayerCounters:
    """A transport for each layer and each height of its input, and one for what is elsewhere."""

    def __init__(self, names: Iterable[str], manager: DomainParallelManager) -> None:
        self.manager = manager
        self.lower_bound = TrafficLowerBound()
        self.outside_layers = self._new_counter()
        self._counters: dict[str, dict[int | None, CountingTransport]] = {
            name: {} for name in names
        }

    def enter(self, name: str, height: int | None) -> None:
        """Count for a layer from now on; backward counts where its forward did."""
        known = self._counters[name]
        if height not in known:
            known[height] = self._new_counter()
        self.manager.transport = known[height]

    def leave(self) -> None:
        """Count for no layer."""
        self.manager.transport = self.outside_layers

    def by_layer(self) -> dict[str, tuple[RankTraffic, ...]]:
        """Return what each rank has sent so far for each layer, and elsewhere."""
        nothing = (RankTraffic(),) * self.manager.domain_parallel_size
        sums = {name: [t.sent for t in known.values()] for name, known in self._counters.items()}
        return {OUTSIDE_LAYERS: self.outside_layers.sent} | {
            name: tuple(sum(of_rank, RankTraffic()) for of_rank in zip(nothing, *sent, strict=True))
            for name, sent in sums.items()
        }

    def by_height(self) -> dict[int, int]:
        """Return the bytes of rows that all ranks have sent, by the rows of the layer's input."""
        sums: Counter[int] = Counter()
        for known in self._counters.values():
            for height, tally in known.items():
                if height is not None:
                    sums[height] += sum(sent.bytes for sent in tally.sent)
        return sums

    def _new_counter(self) -> CountingTransport:
        manager = self.manager
        return CountingTransport(
            manager.rank, manager.domain_parallel_size, manager.bands.planned_partitions
        )


@contextmanager
def _count_by_layer(model: nn.Module, manager: DomainParallelManager) -> Iterator[_LayerCounters]:
    """Count what each layer sends while the model runs."""
    layers = row_layers(model)
    tallies = _LayerCounters(layers, manager)
    tallies.leave()
    with ExitStack() as stack:
        for name, layer in layers.items():
            layer.forget_exchanges()

            def enter(layer: RowLayer, args: tuple[Any, ...], name: str = name) -> None:
                bands = _bands_of_call(layer, args)
                tallies.enter(name, None if bands is None else bands.input.height)

            def leave(layer: RowLayer, args: tuple[Any, ...], made: Any) -> None:
                tallies.leave()
                bands = _bands_of_call(layer, args)
                if bands is not None:
                    tallies.lower_bound.add(layer, bands, args[0], made)

            stack.callback(layer.register_forward_pre_hook(enter).remove)
            # Always: what is computed again stops at the last tensor needed, inside a layer.
            hook = layer.register_forward_hook(leave, always_call=True)
            stack.callback(hook.remove)
        yield tallies


def _bands_of_call(layer: RowLayer, args: tuple[Any, ...]) -> Bands | None:
    """Return the bands of a call; None if no rows meet in it."""
    return layer.bands(*args) if args and layer._planned_heights else None


def row_layers(model: nn.Module) -> dict[str, RowLayer]:
    """Return the sharded layers of a planned model by path, and those of `functional` by call."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}
    calls = (items for current in attached_contexts(model) for items in current.layers.items())
    return layers | {call: layer for (call, _), layer in calls}


@final
class SavedTensors:
    """The bytes of all tensors saved for backward, each storage once, those of `own` left out."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        # Holds on to the storages: the address of a freed one would be given out again.
        self._storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in own}
        self.bytes = 0

    def add(self, x: Tensor) -> Tensor:
        """Count one."""
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self.bytes += storage.nbytes()
        return x


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters, buffers and other tensors have shapes only."""
    return copy.deepcopy(model, {id(x): _to_meta(x) for x in tensors_of(model)})


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters, buffers and other tensors that modules of a model hold."""
    modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in modules:
        if module is not None:
            tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return tensors


def _to_meta(x: Tensor) -> Tensor:
    empty = torch.empty_like(x, device="meta", requires_grad=False)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


@final
@dataclass(frozen=True)
class ResolutionLevel:
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
    forward: tuple[RankTraffic, ...]
    backward: tuple[RankTraffic, ...]


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
    levels: tuple[ResolutionLevel, ...]
    layers: tuple[LayerTraffic, ...]
    parameters: int
    parameter_bytes: int
    saved_bytes: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def forward(self) -> tuple[RankTraffic, ...]:
        """What each rank sends in a forward."""
        return self._total([layer.forward for layer in self.layers])

    @property
    def backward(self) -> tuple[RankTraffic, ...]:
        """What each rank sends in a backward."""
        return self._total([layer.backward for layer in self.layers])

    def _total(self, parts: Sequence[tuple[RankTraffic, ...]]) -> tuple[RankTraffic, ...]:
        return tuple(sum((p[rank] for p in parts), RankTraffic()) for rank in range(self.ranks))


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
    manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
    conversion = _CollectingConversion(manager, custom_converters or {})
    sharded = conversion.apply(copy_model(model))
    heights, refusals = _heights_and_refusals(sharded, shapes, conversion)
    problems = conversion.problems + refusals
    runs: list[DryRun] = []
    if not problems:
        sharded = sharded if ranks > 1 else model  # one rank runs the plain model
        try:
            runs = _dry_runs_by_rank(sharded, manager, shapes, heights)
        except UserError as error:
            problems.append(str(error))
    return PlanReport(
        shapes,
        ranks,
        _levels(heights, manager, runs),
        _layer_traffic(sharded, runs[0]) if runs else (),
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() * p.element_size() for p in model.parameters()),
        tuple(run.saved_bytes for run in runs),
        tuple(problems),
    )


@final
class _CollectingConversion(Conversion):
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


def _heights_and_refusals(
    model: nn.Module, shapes: tuple[Shape, ...], conversion: _CollectingConversion
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
) -> tuple[ResolutionLevel, ...]:
    """The levels from the finest on; every rank's run counts the same for all ranks."""
    sent, least = (runs[0].sent_bytes, runs[0].least_bytes) if runs else ({}, {})
    return tuple(
        ResolutionLevel(h, manager.bands[h].sizes, sent.get(h, 0), least.get(h, 0))
        for h in sorted(heights, reverse=True)
    )


def _layer_traffic(model: nn.Module, run: DryRun) -> tuple[LayerTraffic, ...]:
    """The layers in the model's order; what is sent outside them last, if it is anything."""
    paths = [path for path in run.forward if path != OUTSIDE_LAYERS]
    if any(
        sent != RankTraffic()
        for sent in (*run.forward[OUTSIDE_LAYERS], *run.backward[OUTSIDE_LAYERS])
    ):
        paths.append(OUTSIDE_LAYERS)
    kinds = {path: layer.title for path, layer in row_layers(model).items()}
    return tuple(
        LayerTraffic(path, kinds.get(path, ""), run.forward[path], run.backward[path])
        for path in paths
    )

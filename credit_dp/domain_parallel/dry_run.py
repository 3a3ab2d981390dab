"""A dry run of a sharded model's step: as one rank, without data and messages.

Tensors have shapes only, and the transport counts what all ranks would send. A recorder notes which
module runs, what it sends, what autograd saves and the kernels that are started; and of a model
that computes through the global domain, which calls run whole and for which line of its code.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from math import lcm
from operator import add, itemgetter
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from credit_dp.domain_parallel.assumed_values import (
    AssumedValue,
    Assumptions,
    EndlessLoopError,
    KnownValues,
    UnplannedError,
)
from credit_dp.domain_parallel.band_tensor.boundary import (
    attach_domain,
    attached_domain,
    detach_domain,
    rows_outside,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    Band,
    BandTensor,
    Domain,
    is_band,
    local_of,
    tensors_in,
)
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.lower_bound import TrafficLowerBound
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition, is_banded
from credit_dp.domain_parallel.planning.model_plan import (
    GlobalForwardError,
    InputFactory,
    Shape,
    empty_inputs,
    failure_message,
)
from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo
from credit_dp.domain_parallel.planning.trace import (
    DATA_DEPENDENT_ERRORS,
    PlanningMode,
    launches_kernel,
    preserve_model,
    reads_values,
    tensor_leaves,
    use_fake_tensors,
)
from credit_dp.domain_parallel.recomputation import RecomputationCounter, count_recomputation
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    FakeTensor,
    UnsupportedOperatorException,
    backward_pass,
    next_node_number,
    running_node_number,
)

# How torch says that an operator wants the data of a tensor that has none, or of a sparse one.
READS_MEMORY = ("Cannot access data pointer of Tensor", "Cannot access storage of Sparse")
# How it says so of a field, which is not that of the globe anywhere.
HAS_NO_MEMORY = "its data is not allocated yet"
# How functions of `torch.func` say that they can't be watched for what they save.
IS_NOT_WATCHED = "don't yet support saved tensor hooks"
# A smaller excess is never refused: no memory needs protection from it.
SMALL_EXCESS = 256 * 2**20
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Frames in these folders are not the model's code; our own models are in one of them, but are.
LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, PACKAGE, contextlib.__file__)
EINOPS = f"{os.sep}einops{os.sep}"
MODELS = PACKAGE + "models" + os.sep


@final
@dataclass(frozen=True)
class WholeCall:
    """The calls of one function, in one line of a model's code, that run whole on every rank.

    Attributes:
        location: file and line of the model's code; empty if it has none, as a `Sequential`.
        gathered_bytes: of the rows that a rank gathers in a forward, its own among them.
        saved_bytes: of what a rank holds for backward because the function runs whole.
        work: share of the forward's floating-point operations on a rank, which every rank repeats;
            None if torch can't count those of this function.
    """

    path: str
    location: str
    function: str
    calls: int
    gathered_bytes: int
    saved_bytes: int
    work: float | None


class OutputSpec(NamedTuple):
    """An output of a model: its global shape, its dtype, and whether it has a gradient."""

    shape: Shape
    dtype: torch.dtype
    has_gradient: bool


@final
@dataclass(frozen=True)
class DryRun:
    """What a step costs on one rank; messages are those of all ranks.

    Attributes:
        whole_calls: functions that run whole, the largest first; of models in the domain only.
        saved_bytes: tensors saved for backward.
        whole_bytes: the part of `saved_bytes` that is held whole.
        largest_gathered: bytes of the largest tensor that is gathered.
        forward: traffic of each rank by the path of the module; empty paths are the model itself.
        sent_bytes: of rows, over all ranks and the whole step, by the bands of what is sent; those
            of a converted layer by the bands of its input.
        least_sent_bytes: a lower bound for what converted layers send, by the same bands.
        recomputed_bytes: what the module with most saves when backward computes it again.
        launches: number of kernels that the rank starts; of the forward only if that alone was run.
        assumed: where the model decides by data; the costs are those of what was assumed there.
        levels: the numbers of rows of a model in the domain, each with a number of which its bands
            should be multiples, as windows have.
    """

    ranks: int
    rank: int
    layers: tuple[str, ...]
    whole_calls: tuple[WholeCall, ...]
    saved_bytes: int
    whole_bytes: int
    largest_gathered: int
    forward: dict[str, tuple[RankTraffic, ...]]
    backward: dict[str, tuple[RankTraffic, ...]]
    types: Mapping[str, str]
    sent_bytes: Mapping[RowPartition, int]
    least_sent_bytes: Mapping[RowPartition, int]
    outputs: tuple[OutputSpec, ...]
    recomputed_bytes: int
    launches: int
    assumed: tuple[AssumedValue, ...] = ()
    levels: Mapping[int, int] = field(default_factory=dict)

    @property
    def forward_bytes(self) -> int:
        """Return what all ranks send in the forward."""
        return sum(traffic.bytes for sent in self.forward.values() for traffic in sent)

    @property
    def least_bytes(self) -> int:
        """Return what the rank would save if every operation had a rule for bands."""
        return self.saved_bytes - self.whole_bytes + self.whole_bytes // self.ranks

    def is_within(self, limit: float) -> bool:
        """Return whether the rank saves at most `limit` times the least, or little more than it."""
        excess = self.saved_bytes - self.least_bytes
        return excess <= SMALL_EXCESS or self.saved_bytes <= limit * self.least_bytes


@final
@dataclass
class _Costs:
    """A `WholeCall` under construction."""

    calls: int = 0
    gathered_bytes: int = 0
    saved_bytes: int = 0
    flops: int = 0
    is_counted: bool = False


class _CallSite(NamedTuple):
    """The module, line of the model's code and function of whole calls, which share one entry."""

    path: str
    location: str
    function: str


class _CounterKey(NamedTuple):
    """What messages are counted for: a module, and the input's bands if it is a converted layer."""

    path: str
    bands: RowPartition | None = None


@final
class _DryRunMode(PlanningMode):
    """Runs operations once for equal operands, counts their work, and notes what whole calls make.

    Below autograd: what an operation saves is created in here.
    """

    def __init__(
        self,
        recorder: _Recorder,
        memo: ShapeMemo,
        known: KnownValues,
        assumptions: Assumptions,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._memo = memo
        self._known = known
        self._assumptions = assumptions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if BandTensor in types:  # its rules call operators of what a rank holds
            self.recorder.follow_backward()
            return NotImplemented
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        try:
            result = self._memo.run(func, args, kwargs)
        except DATA_DEPENDENT_ERRORS:
            result = self._known.decide(func, args, kwargs)
            if result is None:
                result = self._assumptions.assume(func, args, model_line())
            if result is None:
                raise
        self._known.note(func, args, kwargs, result)
        packet = func.overloadpacket
        if packet in flop_registry and backward_pass() < 0:
            self.recorder.add_work(int(flop_registry[packet](*args, **kwargs, out_val=result)))
        if launches_kernel(func) and any(
            type(x) is FakeTensor for x in tensors_in([args, list(kwargs.values()), result])
        ):
            self.recorder.launches += 1
        if self.recorder.costs is not None:
            self.recorder.add_whole_results([args, list(kwargs.values())], [result])
        return result


@final
class _Recorder:
    """Notes what happens in a dry run; the domain calls `whole_call` of it.

    Attributes:
        costs: of the whole call that runs now.
        whole: storages that hold all rows, by address, with the costs of the call that made them.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.costs: _Costs | None = None
        self.costs_by_site: dict[_CallSite, _Costs] = defaultdict(_Costs)
        self.whole: dict[int, tuple[torch.UntypedStorage, _Costs]] = {}
        self.flops = self.launches = 0
        self.largest_gathered = 0
        self.saved_bytes = self.whole_bytes = self.recomputed_bytes = 0
        self.running: list[_CounterKey] = []  # outermost first
        self.types: dict[str, str] = {}
        self.layers: dict[str, RowLayer] = {}
        self.counters: dict[_CounterKey, CountingTransport] = {}
        self.lower_bound = TrafficLowerBound()
        self.known: KnownValues | None = None
        self.levels: dict[int, int] = {}
        self._unpadded: dict[int, int] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._saved_fields: dict[int, BandTensor] = {}
        # The number of the first node of the graph since which a module runs.
        self._by_node: list[tuple[int, _CounterKey]] = []

    def value_of(self, x: Tensor) -> Tensor | None:
        return None if self.known is None else self.known.value_of(x)

    @contextmanager
    def whole_call(self, name: str, tensors: Sequence[BandTensor]) -> Iterator[None]:
        """Note a call that runs whole; what it makes is held whole on every rank.

        Also one without bands, if it gets what another whole call returned.
        """
        bands = [x for x in tensors if is_band(x)]
        if (
            backward_pass() >= 0
            or self.costs is not None
            or not (bands or any(id(x.local.untyped_storage()) in self.whole for x in tensors))
        ):
            yield
            return
        self.costs = self.costs_by_site[_CallSite(self.module, model_line(), name)]
        self.costs.calls += 1
        sizes = [x.numel() * x.element_size() for x in bands]
        self.costs.gathered_bytes += sum(sizes)
        self.largest_gathered = max([self.largest_gathered, *sizes])
        try:
            yield
        finally:
            self.costs = None

    def add_whole_results(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        assert self.costs is not None
        known = {id(x.untyped_storage()) for x in tensors_in(operands)}
        for x in tensors_in(results):
            storage = x.untyped_storage()
            if id(storage) not in known:
                self.whole[id(storage)] = (storage, self.costs)

    def add_work(self, flops: int) -> None:
        self.flops += flops
        if self.costs is not None:
            self.costs.flops += flops
            self.costs.is_counted = True

    def add_level(self, height: int) -> None:
        self.levels.setdefault(height, 1)

    def add_windows(self, height: int, size: int) -> None:
        if size > 1:
            height = self._unpadded.get(height, height)
            self.levels[height] = lcm(self.levels.get(height, 1), size)

    def add_padding(self, height: int, padded: int) -> None:
        self._unpadded.setdefault(padded, height)

    def exclude(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            self._saved[id(x.untyped_storage())] = x.untyped_storage()

    def save(self, x: Tensor) -> Tensor:
        if type(x) is BandTensor:
            self._saved_fields[id(x)] = x
        self._add_saved(local_of(x))
        return x

    def _add_saved(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if id(storage) in self._saved:
            return
        # Kept alive, as the address of a freed storage would be reused.
        self._saved[id(storage)] = storage
        self.saved_bytes += storage.nbytes()
        if id(storage) in self.whole:
            self.whole_bytes += storage.nbytes()
            self.whole[id(storage)][1].saved_bytes += storage.nbytes()

    def save_what_fields_keep(self) -> None:
        """Count what saved fields keep of other ranks, fetched after autograd has saved them."""
        for x in self._saved_fields.values():
            for kept in kept_by(x):
                self._add_saved(kept)

    @property
    def module(self) -> str:
        return self.running[-1].path if self.running else ""

    @property
    def where(self) -> str:
        return f"{self.module or 'model'} ({self.types.get(self.module, '')})"

    def count_for(self, path: str, bands: RowPartition | None = None) -> None:
        key = _CounterKey(path, bands)
        if key not in self.counters:
            manager = self.manager
            self.counters[key] = CountingTransport(
                manager.domain_rank,
                manager.domain_parallel_size,
                manager.bands.planned_partitions,
            )
        self.manager.transport = self.counters[key]
        self._by_node.append((next_node_number(), key))

    def follow_backward(self) -> None:
        """Count messages for the module in which the node was made whose backward runs now."""
        number = running_node_number()
        if number < 0:
            return
        at = bisect_right(self._by_node, number, key=itemgetter(0))
        key = self._by_node[max(at - 1, 0)][1]
        if self.manager.transport is not self.counters[key]:
            self.manager.transport = self.counters[key]

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator[None]:
        """Follow which module runs, and count what it sends."""
        layers = self.layers = row_layers(model)
        for path in ("", *layers):
            self.count_for(path)
        self.count_for("")
        # What a layer wraps gets no hooks: it would compute otherwise, to call them.
        wrapped = {m for layer in layers.values() for m in layer.modules() if m is not layer}
        with ExitStack() as stack:
            for path, module in (dict(model.named_modules()) | layers).items():
                if module in wrapped:
                    continue
                is_layer = isinstance(module, RowLayer)
                self.types[path] = module.title if is_layer else type(module).__name__
                if isinstance(module, torch.jit.ScriptModule):
                    continue

                def enter(module: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
                    self.running.append(_CounterKey(path))
                    bands = _bands_of_call(module, args)
                    self.running[-1] = _CounterKey(path, bands.input if bands else None)
                    self.count_for(*self.running[-1])

                def leave(
                    module: nn.Module, args: tuple[Any, ...], output: Any, path: str = path
                ) -> None:
                    # After an error the failed module stays the innermost. If the model handled the
                    # error, the modules above it are still in the list.
                    failed = output is None and backward_pass() < 0
                    if failed and isinstance(module, RowLayer):
                        self.count_for(*(self.running[-2:-1] or [_CounterKey("")])[0])
                        return
                    while self.running and self.running.pop().path != path:
                        pass
                    self.count_for(*(self.running[-1:] or [_CounterKey("")])[0])
                    bands = _bands_of_call(module, args)
                    if bands is not None and isinstance(module, RowLayer):
                        self.lower_bound.add(module, bands, args[0], output)

                enter_hook = module.register_forward_pre_hook(enter, prepend=True)
                stack.callback(enter_hook.remove)
                # Activation checkpointing stops recomputing inside a layer, by an exception, once
                # it has the last tensor that it needs.
                leave_hook = module.register_forward_hook(leave, always_call=is_layer)
                stack.callback(leave_hook.remove)
            yield

    def traffic(self) -> dict[str, tuple[RankTraffic, ...]]:
        sent: dict[str, tuple[RankTraffic, ...]] = {}
        for (path, _), counter in self.counters.items():
            sent[path] = tuple(map(add, sent[path], counter.sent)) if path in sent else counter.sent
        return sent

    def sent_bytes(self) -> Counter[RowPartition]:
        sums: Counter[RowPartition] = Counter()
        for (_, bands), counter in self.counters.items():
            if not self.layers:
                sums += counter.row_bytes
            elif bands is not None:
                sums[bands] += sum(sent.bytes for sent in counter.sent)
        return sums

    def whole_calls(self) -> tuple[WholeCall, ...]:
        total = max(self.flops, 1)
        calls = [
            WholeCall(
                *site,
                costs.calls,
                costs.gathered_bytes,
                costs.saved_bytes,
                costs.flops / total if costs.is_counted else None,
            )
            for site, costs in self.costs_by_site.items()
        ]
        return tuple(sorted(calls, key=lambda c: -max(c.gathered_bytes, c.saved_bytes)))


def dry_run(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    inputs: InputFactory | None = None,
    *,
    rank: int = 0,
    on_globe: bool | None = None,
    backward: bool = False,
    training: bool | None = None,
    stage: int | None = None,
    memo: ShapeMemo | None = None,
) -> DryRun:
    """Run a model's step as one of the ranks, without data and messages.

    Args:
        model: it does not change, and need not be copied.
        manager: this rank's position in the mesh, with the planned bands; the one that the model
            was converted with.
        inputs: returns the arguments of the call; by default one tensor of each shape.
        on_globe: whether to run through the global domain, or as the model is, with its converted
            layers; None for the way in which the model computes.
        backward: whether to run the backward, too; memory is known without it.
        training: the mode of the model; None for its own.
        stage: the number of the stage of a pipeline that the model is, if it is one. What it saves
            is then with its outputs, and without the inputs that another stage has sent.

    Raises:
        UserError: the model fails, or can't be computed on bands.
        UnplannedError: what it does depends on data, or on an operator without a fake kernel.
    """
    assumptions = Assumptions()
    first: Exception | None = None
    if on_globe is None:
        on_globe = attached_domain(model) is not None
    while True:
        assumptions.begin()
        try:
            with _as_rank(model, manager, rank, shapes, on_globe, stage) as (ranked, domain):
                return _run(
                    model,
                    ranked,
                    domain,
                    shapes,
                    assumptions,
                    inputs=inputs,
                    backward=backward,
                    training=training,
                    stage=stage,
                    memo=memo,
                )
        except (UserError, UnplannedError) as error:
            first = first or error
            if not assumptions.change(error):
                raise first from None


@contextmanager
def _as_rank(
    model: nn.Module,
    manager: DomainParallelManager,
    rank: int,
    shapes: Sequence[Shape],
    on_globe: bool,
    stage: int | None,
) -> Iterator[tuple[DomainParallelManager, Domain | None]]:
    before = manager.rank, manager.transport
    ranks = manager.domain_parallel_size
    with preserve_model(model):
        try:
            if not on_globe:
                if rank != manager.domain_rank:
                    manager.rank = rank
                for layer in row_layers(model).values():
                    layer.forget_exchanges()
                yield manager, None
                return
            ranked = DomainParallelManager(ranks, ranks, transport=CountingTransport(rank, ranks))
            for partition in manager.bands.planned_partitions:
                ranked.bands.register(partition)
            detach_domain(model)
            domain = attach_domain(model, ranked, shapes, is_stage=stage is not None)
            try:
                yield ranked, domain
            finally:
                detach_domain(model)
        finally:
            manager.rank, manager.transport = before


def _run(
    model: nn.Module,
    manager: DomainParallelManager,
    domain: Domain | None,
    shapes: Sequence[Shape],
    assumptions: Assumptions,
    *,
    inputs: InputFactory | None,
    backward: bool,
    training: bool | None,
    stage: int | None,
    memo: ShapeMemo | None,
) -> DryRun:
    def local_shape(shape: Shape) -> Shape:
        is_cut = is_banded(shape)
        if domain is not None and stage is not None:
            is_cut = isinstance(rows_outside(shape, domain), Band)
        if not is_cut:
            return shape
        rows = manager.partition(shape[ROW_DIM]).sizes[manager.domain_rank]
        return (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])

    recorder = _Recorder(manager)
    buffers = dict(model.named_buffers())
    if domain is not None:
        domain.recorder = recorder
    with use_fake_tensors(model) as mode, recorder.follow(model):
        memo = memo or ShapeMemo()
        memo.mode = mode
        if training is not None:
            model.train(training)
        make = inputs or empty_inputs(model, shapes)
        args, kwargs = make(local_shape)
        if domain is None and manager.domain_parallel_size > 1:
            given, inputs_name = (args, kwargs), f"rank {manager.domain_rank}'s band of the input"
        else:
            given, inputs_name = make(lambda shape: shape), "the whole globe's input"
        errors = partial(_errors_of_model, recorder, inputs_name, tensor_leaves(given))
        held = [*model.parameters(), *model.buffers()]
        recorder.exclude(held)
        if stage is not None and stage > 0:  # another stage has sent the inputs
            recorder.exclude(tensor_leaves([args, kwargs]))
        again = RecomputationCounter(recorder.save, held, lambda: recorder.launches)
        known = recorder.known = KnownValues(buffers, dict(model.named_buffers()))
        dry_run_mode = _DryRunMode(recorder, memo, known, assumptions)
        with torch.enable_grad(), dry_run_mode, count_recomputation(again):
            with errors():
                outputs = _forward(model, args, kwargs, recorder)
            specs = tuple(_output_spec(x, domain) for x in outputs)
            if stage is not None:
                for x in outputs:
                    recorder.save(x)
            recorder.save_what_fields_keep()
            forward = recorder.traffic()
            outputs = [x for x in outputs if x.requires_grad]
            if outputs and backward:
                with errors():
                    gradients = [torch.empty_like(x) for x in outputs]
                    torch.autograd.backward(outputs, gradients)
        recorder.saved_bytes += again.received
        recorder.recomputed_bytes = again.recomputed
        recorder.launches += again.repeated
    assumed = tuple(starmap(AssumedValue, assumptions.assumed.items()))
    return _result(recorder, forward, specs, assumed)


def row_layers(model: nn.Module) -> dict[str, RowLayer]:
    """Return the converted layers of a model by path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}


def _bands_of_call(module: nn.Module, args: tuple[Any, ...]) -> Bands | None:
    """Return the bands of a call of a converted layer; None if it couples no rows."""
    if not args or not isinstance(module, RowLayer) or not module._planned_heights:
        return None
    return module.bands(*args)


def _output_spec(x: Tensor, domain: Domain | None) -> OutputSpec:
    # None if a hook has replaced it, or the model runs inside of another one.
    rows = None if domain is None or domain.outputs is None else domain.outputs.get(x)
    shape = list(x.shape)
    if isinstance(rows, Band):
        shape[ROW_DIM] = rows.size
    return OutputSpec(tuple(shape), x.dtype, x.requires_grad)


def _result(
    recorder: _Recorder,
    forward: dict[str, tuple[RankTraffic, ...]],
    outputs: tuple[OutputSpec, ...],
    assumed: tuple[AssumedValue, ...],
) -> DryRun:
    ranks = recorder.manager.domain_parallel_size
    no_traffic = (RankTraffic(),) * ranks
    # Counters only grow: the backward is the difference to the counts after the forward.
    step = recorder.traffic()
    forward = {path: forward.get(path, no_traffic) for path in step}
    backward = {
        path: tuple(a - b for a, b in zip(sent, forward[path], strict=True))
        for path, sent in step.items()
    }
    return DryRun(
        ranks=ranks,
        rank=recorder.manager.domain_rank,
        layers=tuple(recorder.layers),
        whole_calls=recorder.whole_calls(),
        saved_bytes=recorder.saved_bytes,
        whole_bytes=recorder.whole_bytes,
        largest_gathered=recorder.largest_gathered,
        forward=forward,
        backward=backward,
        types=recorder.types,
        sent_bytes=recorder.sent_bytes(),
        least_sent_bytes=recorder.lower_bound.bytes,
        outputs=outputs,
        recomputed_bytes=recorder.recomputed_bytes,
        launches=recorder.launches,
        assumed=assumed,
        levels=recorder.levels,
    )


def _forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    recorder: _Recorder,
) -> list[Tensor]:
    with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda x: x):
        return tensor_leaves(model(*args, **kwargs))


@contextmanager
def _errors_of_model(
    recorder: _Recorder, inputs_name: str, inputs: Sequence[Tensor]
) -> Iterator[None]:
    """Name the module and the line of the model that failed in errors.

    Args:
        inputs: of the model, with the shapes that its code sees.

    Raises:
        GlobalForwardError: the model fails.
        UserError: it can't be computed on bands.
        UnplannedError: shapes depend on data, an operator can't run on tensors without data, or
            torch does not say what is saved.
        EndlessLoopError: see `Assumptions`.
    """
    try:
        yield
    except EndlessLoopError:
        raise
    except Exception as error:  # the model's code may raise anything
        where = ", ".join(filter(None, [recorder.where, _failed_line(error)]))
        if isinstance(error, UserError):
            raise UserError(f"{where}: {error}") from error
        if reads_values(error):
            raise UnplannedError(
                f"{where}: reads values of tensors, by which shapes or control flow may be decided."
            ) from error
        if HAS_NO_MEMORY in str(error):
            raise UserError(
                f"{where}: an operator reads the memory of a field, of which a rank has rows only. "
                "Give it numbers that tolist() returns."
            ) from error
        if IS_NOT_WATCHED in str(error):
            raise UnplannedError(
                f"{where}: torch does not say what its functions of torch.func save for backward."
            ) from error
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
            reason = first_line.rstrip(".") or f"{getattr(error, 'func', 'a custom operator')}"
            raise UnplannedError(
                f"{where}: an operator has no fake kernel ({reason}). Register one with "
                "torch.library.register_fake."
            ) from error
        if str(error).startswith(READS_MEMORY):
            raise UnplannedError(
                f"{where}: an operator reads the memory of its tensors, as those of sparse ones do."
            ) from error
        raise GlobalForwardError(failure_message(where, error, inputs_name, inputs)) from error


def kept_by(x: BandTensor) -> list[Tensor]:
    """Return what a field keeps beside what the rank holds of it: rows, or all, of other ranks."""
    rows = () if x.fetched is None else x.fetched.rows
    others = () if x.others is None else tuple(x.others.parts.values())
    return [*rows, *others, *(x.kept or ())]


def _is_model_code(path: str) -> bool:
    is_library = path.startswith(LIBRARIES) or EINOPS in path
    return path.startswith(MODELS) or not is_library


def model_line() -> str:
    """Return the innermost line of the model that runs now, in a dry run; empty if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _forward.__code__:
        if _is_model_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _failed_line(error: BaseException) -> str:
    """Return the innermost line of the model in an error's traceback; empty if there is none."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_model_code(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else ""

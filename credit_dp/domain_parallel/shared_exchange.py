"""One exchange for several layers that read one tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.exchange import (
    RowExchange,
    empty_rows_like,
    return_gradients,
    rows_with_poles,
    start_fetching,
)
from credit_dp.domain_parallel.layers.base import StencilLayer
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.planning.trace import Trace
from credit_dp.domain_parallel.transport import Transport

if TYPE_CHECKING:
    from credit_dp.domain_parallel.layers.base import StencilLayer


# The rows of one reader within those fetched: the first and how many.
Window = tuple[int, int]


@final
@dataclass
class _FetchedRows:
    """What was fetched of a tensor, and how often each reader has still to take it."""

    x: Tensor
    version: int
    grad_enabled: bool
    rows: tuple[Tensor, ...]
    remaining_uses: list[int]

    def is_valid_for(self, x: Tensor, reader: int) -> bool:
        """Return whether these rows are what a reader of `x` needs now."""
        same = self.x is x and self.version == x._version
        return (
            same
            and self.grad_enabled == torch.is_grad_enabled()
            and self.remaining_uses[reader] > 0
        )


@final
class SharedExchange:
    """What several layers need of the tensor that they read, in one exchange.

    The first of them to be called fetches for all. Whether one fetches is decided by which tensor
    it is called with, and so alike on all ranks. This happens only while the module around the
    layers runs: then nothing is held afterwards. Elsewhere each layer fetches for itself.

    Args:
        readers: planned for the same heights, with the same rows beyond the poles.
        uses: how often each reads one tensor.
    """

    def __init__(self, readers: tuple[StencilLayer, ...], uses: tuple[int, ...]) -> None:
        self.readers = readers
        self.uses = uses
        self._open_count = 0
        self._fetched: _FetchedRows | None = None
        self._plans: dict[tuple[RowPartition, int], tuple[RowExchange, tuple[Window, ...]]] = {}

    def open(self) -> None:
        """Fetch for all from now on."""
        self._open_count, self._fetched = self._open_count + 1, None

    def close(self) -> None:
        """Undo one `open`, if there was one, and hold nothing.

        A plan made in the module's first forward comes too late to open.
        """
        self._open_count, self._fetched = max(0, self._open_count - 1), None

    def fetch(self, layer: StencilLayer, x: Tensor) -> Tensor | None:
        """Return the rows that one of the readers needs; None if it has to fetch them itself."""
        if (
            not self._open_count or x.is_inference()
        ):  # which does not tell if it was written to since
            return None
        reader = next(i for i, other in enumerate(self.readers) if other is layer)
        held = self._fetched
        if held is None or not held.is_valid_for(x, reader):
            rows = self._fetch_for_all(layer, x)
            held = _FetchedRows(x, x._version, torch.is_grad_enabled(), rows, list(self.uses))
        held.remaining_uses[reader] -= 1
        self._fetched = held if any(held.remaining_uses) else None
        return held.rows[reader]

    def _fetch_for_all(self, layer: StencilLayer, x: Tensor) -> tuple[Tensor, ...]:
        plan = layer.bands(x).input, layer.manager.domain_rank
        if plan not in self._plans:
            self._plans[plan] = self._make_plan(x)
        exchange, windows = self._plans[plan]
        transport = layer.manager.transport
        rows: tuple[Tensor, ...] = _SharedExchangeFunction.apply(  # type: ignore[no-untyped-call]
            x, exchange, transport, layer.dim, windows
        )
        return rows

    def _make_plan(self, x: Tensor) -> tuple[RowExchange, tuple[Window, ...]]:
        bands = [reader.bands(x) for reader in self.readers]
        taken, manager, mode = bands[0].input, self.readers[0].manager, self.readers[0].pole_mode
        needs, windows = [], []
        for rank in range(taken.ranks):
            spans = [
                reader.input_span(its.output.rows(rank), taken.height)
                for reader, its in zip(self.readers, bands, strict=True)
            ]
            first, stop = min(span[0] for span in spans), max(span[1] for span in spans)
            needs.append(rows_with_poles(first, stop, taken.height, mode))
            windows.append(tuple((span[0] - first, span[1] - span[0]) for span in spans))
        rank = manager.domain_rank
        return RowExchange(taken, tuple(needs), rank), windows[rank]


@final
class _SharedExchangeFunction(torch.autograd.Function):
    """Forward: each reader's rows, as views of those of all. Backward: one exchange for all."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plan: RowExchange,
        transport: Transport,
        dim: int,
        windows: tuple[Window, ...],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.transport, ctx.dim, ctx.windows = plan, transport, dim, windows
        rows = start_fetching(x, plan, transport, dim)()
        return tuple(rows.narrow(dim, *window) for window in windows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(g, at) for g, at in zip(grads, ctx.windows, strict=True) if g is not None]
        if not given:
            return (None,) * 5
        rows = empty_rows_like(given[0][0], ctx.dim, ctx.plan.length).zero_()
        for grad, window in given:
            rows.narrow(ctx.dim, *window).add_(grad)
        home = return_gradients(rows, ctx.plan, ctx.transport, ctx.dim)
        return home, None, None, None, None


@final
@dataclass(frozen=True)
class _OpenHook:
    shared: SharedExchange

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.shared.open()


@final
@dataclass(frozen=True)
class _CloseHook:
    shared: SharedExchange

    def __call__(self, module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        self.shared.close()


def attach_shared_exchange(scope: nn.Module, shared: SharedExchange) -> None:
    """Let layers fetch together while `scope`, a module around them, runs."""
    for reader in shared.readers:
        reader.shared_exchange = shared
    scope.register_forward_pre_hook(_OpenHook(shared))
    scope.register_forward_hook(_CloseHook(shared), always_call=True)


def detach_shared_exchanges(model: nn.Module) -> None:
    """Let every layer of a model fetch for itself."""
    for module in model.modules():
        holders: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        for hooks in holders:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _OpenHook | _CloseHook):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
                    for reader in hook.shared.readers:
                        reader.shared_exchange = None


# The names of layers that were called with one tensor, once per call.
ReaderGroup = tuple[str, ...]


def reader_groups(trace: Trace) -> frozenset[ReaderGroup]:
    """Return what was called with each tensor in the run of the whole globe."""
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for step in trace.steps:
        place = step.arguments.get("label")
        if step.op is None and isinstance(place, str) and step.arguments["inputs"]:
            by_tensor[step.arguments["inputs"][0].number].append(place)
    return frozenset(tuple(sorted(names)) for names in by_tensor.values())


def share_exchanges(model: nn.Module, runs: Iterable[frozenset[ReaderGroup]]) -> None:
    """Let layers that always read the same tensors together fetch together.

    `runs` are the readings of each planned run: a model may do other things while training.
    """
    detach_shared_exchanges(model)
    modules = dict(model.named_modules())
    layers = {
        name: m
        for name, m in modules.items()
        if isinstance(m, StencilLayer) and _fetches_windows(m)
    }
    found = [_shareable_groups(readings, layers) for readings in runs]
    for names in frozenset.intersection(*found):
        uses = Counter(names)
        readers = tuple(layers[name] for name in uses)
        attach_shared_exchange(
            _innermost_common_module(list(uses), modules),
            SharedExchange(readers, tuple(uses.values())),
        )


def _shareable_groups(
    readings: frozenset[ReaderGroup], layers: dict[str, StencilLayer]
) -> frozenset[ReaderGroup]:
    """Return readings by several layers that could fetch together and never read otherwise."""
    groups: set[ReaderGroup] = set()
    for names in readings:
        by_setting: dict[object, list[str]] = defaultdict(list)
        for name in names:
            if name in layers:
                by_setting[_sharing_key(layers[name])].append(name)
        groups.update(map(tuple, by_setting.values()))
    membership = Counter(name for group in groups for name in set(group))
    return frozenset(
        group
        for group in groups
        if len(set(group)) > 1
        and all(membership[name] == 1 for name in group)
        and _windows_leave_no_gap([layers[name] for name in set(group)])
    )


def _sharing_key(layer: StencilLayer) -> object:
    return layer.pole_mode, layer.dim, tuple(sorted(layer.planned_heights))


def _fetches_windows(layer: StencilLayer) -> bool:
    """Return whether a layer gets its rows as window layers do, and gets any from others."""
    plain = (
        type(layer).required_rows is StencilLayer.required_rows
        and type(layer).fetch is StencilLayer.fetch
    )
    plain = plain and all(map(layer.fetches_halo, layer.planned_heights))
    bands = (layer.planned_bands(height) for height in layer.planned_heights)
    return plain and any(not layer.exchange(its).is_identity for its in bands)


def _windows_leave_no_gap(layers: list[StencilLayer]) -> bool:
    """Return whether every rank's windows leave no gap, whose rows would be sent for nothing."""
    for height in layers[0].planned_heights:
        bands = [layer.planned_bands(height) for layer in layers]
        for rank in range(bands[0].input.ranks):
            spans = sorted(
                layer.input_span(its.output.rows(rank), height)
                for layer, its in zip(layers, bands, strict=True)
            )
            reached = spans[0][1]
            for first, stop in spans[1:]:
                if first > reached:
                    return False
                reached = max(reached, stop)
    return True


def _innermost_common_module(names: list[str], modules: dict[str, nn.Module]) -> nn.Module:
    """Return the innermost module around all of these that is called itself."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and type(modules[".".join(shared)]).forward is nn.Module.forward:
        shared.pop()
    return modules[".".join(shared)]

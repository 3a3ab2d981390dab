"""One exchange for several layers that read the same tensor.

Layers that are called with the same tensor, as the branches of a block, need overlapping rows of
it. Instead of one exchange each, the first layer that is called fetches the rows of all of them:

1. After planning, `share_exchanges` finds such layers in the runs without data, and attaches a
   `SharedExchange` to each group of them.
2. Hooks open it while the innermost module around the layers runs, and close it afterwards, so that
   no rows are kept longer than needed.
3. Backward, the gradients of all layers are returned in one exchange as well.

All ranks have to decide alike whether a layer fetches. They do, because this depends only on which
tensor object the layer is called with, and all ranks run the same code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import RowExchange, rows_with_poles
from credit_dp.domain_parallel.halo_exchange import (
    add_to_owners,
    empty_rows_like,
    fetch_rows,
    start_fetching,
)
from credit_dp.domain_parallel.layers.base import Bands, StencilLayer
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.planning.comparison import LayerRead
from credit_dp.domain_parallel.transport import Transport
from credit_dp.torch_private import forward_pre_hooks, remove_hooks, version_of

# The rows of one reader within the fetched rows: the first one and their number.
Window = tuple[int, int]


@final
@dataclass
class _ReaderRows:
    """The fetched rows of a tensor.

    Attributes:
        version: its version counter at the time of the exchange, which torch increments whenever
            the tensor is written to.
        remaining_uses: for each reader the number of calls that are still to come.
    """

    x: Tensor
    version: int
    grad_enabled: bool
    rows: tuple[Tensor, ...]
    remaining_uses: list[int]

    def is_valid_for(self, x: Tensor, reader: int) -> bool:
        is_unchanged = self.x is x and self.version == _version_of(x)
        return (
            is_unchanged
            and self.grad_enabled == torch.is_grad_enabled()
            and self.remaining_uses[reader] > 0
        )


def _version_of(x: Tensor) -> int:
    # torch's compiler does not know it. It traces what was planned: readers of which the plan has
    # seen that nobody writes to the tensor in between.
    return 0 if torch.compiler.is_dynamo_compiling() else version_of(x)


@final
class SharedExchange:
    """The exchange of several layers that read the same tensor.

    The first of them to be called fetches the rows of all, while the exchange is open; otherwise
    each layer fetches its own rows.

    Args:
        readers: layers that are planned for the same heights and have the same pole mode.
        uses: for each reader the number of calls with the same tensor.
    """

    def __init__(self, readers: tuple[StencilLayer, ...], uses: tuple[int, ...]) -> None:
        self.readers = readers
        self.uses = uses
        self._open_count = 0
        self._fetched: _ReaderRows | None = None
        self._by_bands: dict[tuple[RowPartition, int], tuple[RowExchange, tuple[Window, ...]]] = {}
        # The same by height, for compiled code.
        self._by_height: dict[int, tuple[RowExchange, tuple[Window, ...]]] = {}

    def open(self) -> None:
        """Let the first reader fetch for all from now on."""
        # Counted, because the module around the layers may be entered again before it is left.
        self._open_count += 1
        self._fetched = None

    def close(self) -> None:
        """Undo one `open` and drop the fetched rows.

        It may not have been open: a plan in the first forward attaches the hooks when the module is
        running already.
        """
        self._open_count = max(0, self._open_count - 1)
        self._fetched = None

    def fetch(self, layer: StencilLayer, x: Tensor) -> Tensor | None:
        """Return the rows that one of the readers needs; None if it has to fetch them itself."""
        # Tensors of inference mode have no version counter.
        is_compiling = torch.compiler.is_dynamo_compiling()
        if not self._open_count or (not is_compiling and x.is_inference()):
            return None
        reader = next(i for i, other in enumerate(self.readers) if other is layer)
        fetched = self._fetched
        if fetched is None or not fetched.is_valid_for(x, reader):
            rows = self._fetch_for_all(layer, x)
            fetched = _ReaderRows(x, _version_of(x), torch.is_grad_enabled(), rows, list(self.uses))
        fetched.remaining_uses[reader] -= 1
        # After the last use the rows would only keep memory.
        self._fetched = fetched if any(fetched.remaining_uses) else None
        return fetched.rows[reader]

    def prepare_height(self, height: int) -> None:
        """Collect what compiled code needs of the plan at one height."""
        bands = [reader.planned_bands(height) for reader in self.readers]
        self._by_height[height] = self._exchange_and_windows(bands)

    def _fetch_for_all(self, layer: StencilLayer, x: Tensor) -> tuple[Tensor, ...]:
        input_bands = layer.bands(x).input
        transport = layer.manager.transport
        if torch.compiler.is_dynamo_compiling():
            exchange, windows = self._by_height[input_bands.height]
            fetched = fetch_rows(x, exchange, transport, layer.dim)
            return tuple(fetched.narrow(layer.dim, *window) for window in windows)
        # Dry runs assign the manager to one rank after the other: the rank is part of the key.
        key = input_bands, layer.manager.domain_rank
        if key not in self._by_bands:
            self._by_bands[key] = self._exchange_and_windows(
                [reader.bands(x) for reader in self.readers]
            )
        exchange, windows = self._by_bands[key]
        rows: tuple[Tensor, ...] = _SharedExchangeFunction.apply(  # type: ignore[no-untyped-call]
            x, exchange, transport, layer.dim, windows
        )
        return rows

    def _exchange_and_windows(self, bands: list[Bands]) -> tuple[RowExchange, tuple[Window, ...]]:
        input_bands = bands[0].input
        required_rows = []
        windows = []
        for rank in range(input_bands.ranks):
            spans = [
                reader.input_span(reader_bands.output.rows(rank), input_bands.height)
                for reader, reader_bands in zip(self.readers, bands, strict=True)
            ]
            first = min(start for start, _ in spans)
            last = max(stop for _, stop in spans)
            pole_mode = self.readers[0].pole_mode
            required_rows.append(rows_with_poles(first, last, input_bands.height, pole_mode))
            windows.append(tuple((start - first, stop - start) for start, stop in spans))
        rank = self.readers[0].manager.domain_rank
        return RowExchange(input_bands, tuple(required_rows), rank), windows[rank]


@final
class _SharedExchangeFunction(torch.autograd.Function):
    """Forward: each reader's rows, as views of the fetched rows. Backward: one exchange for all."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: RowExchange,
        transport: Transport,
        dim: int,
        windows: tuple[Window, ...],
    ) -> tuple[Tensor, ...]:
        # A reader whose output is not part of the loss gets None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        ctx.transport = transport
        ctx.dim = dim
        ctx.windows = windows
        rows = start_fetching(x, exchange, transport, dim)()
        return tuple(rows.narrow(dim, *window) for window in windows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(grads, ctx.windows, strict=True)
        row_grads = [(grad, window) for grad, window in pairs if grad is not None]
        if not row_grads:
            return (None,) * 5
        # The windows overlap: rows that several readers share sum up their gradients.
        total = empty_rows_like(row_grads[0][0], ctx.dim, ctx.exchange.length).zero_()
        for grad, window in row_grads:
            total.narrow(ctx.dim, *window).add_(grad)
        band_grad = add_to_owners(total, ctx.exchange, ctx.transport, ctx.dim)
        return band_grad, None, None, None, None


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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.shared.close()


def attach_shared_exchange(scope: nn.Module, shared: SharedExchange) -> None:
    """Let layers share an exchange while `scope`, a module around them, runs."""
    for reader in shared.readers:
        reader.shared_exchange = shared
    scope.register_forward_pre_hook(_OpenHook(shared))
    scope.register_forward_hook(_CloseHook(shared), always_call=True)


def open_hooks(scope: nn.Module) -> list[SharedExchange]:
    """Return the exchanges that are opened when a module is called."""
    hooks = forward_pre_hooks(scope).values()
    return [hook.shared for hook in hooks if isinstance(hook, _OpenHook)]


def detach_shared_exchanges(model: nn.Module) -> None:
    """Let every layer of a model fetch its own rows."""
    for module in model.modules():
        for shared in open_hooks(module):
            detach_shared_exchange(module, shared)


def detach_shared_exchange(scope: nn.Module, shared: SharedExchange) -> None:
    """Undo `attach_shared_exchange`."""
    remove_hooks(scope, lambda x: isinstance(x, _OpenHook | _CloseHook) and x.shared is shared)
    for reader in shared.readers:
        reader.shared_exchange = None


# The names of layers that were called with the same tensor, once per call.
ReaderGroup = tuple[str, ...]


def reader_groups(reads: Iterable[LayerRead]) -> frozenset[ReaderGroup]:
    """Return for each tensor the layers that were called with it in a run.

    A tensor that is written to counts as another one.
    """
    by_tensor: dict[tuple[int, int], list[str]] = defaultdict(list)
    for read in reads:
        by_tensor[read.tensor, read.version].append(read.name)
    return frozenset(tuple(sorted(names)) for names in by_tensor.values())


def share_exchanges(model: nn.Module, runs: Iterable[frozenset[ReaderGroup]]) -> None:
    """Let layers share an exchange if they read the same tensor in every planned run.

    Args:
        runs: the reader groups of each planned run, as the model may behave differently in training
            and evaluation.
    """
    detach_shared_exchanges(model)
    modules = dict(model.named_modules())
    layers = {
        name: m
        for name, m in modules.items()
        if isinstance(m, StencilLayer) and _fetches_windows(m)
    }
    shareable = [_shareable_groups(groups, layers) for groups in runs]
    for names in frozenset.intersection(*shareable):
        uses = Counter(names)
        readers = tuple(layers[name] for name in uses)
        attach_shared_exchange(
            _innermost_common_module(list(uses), modules),
            SharedExchange(readers, tuple(uses.values())),
        )


def _shareable_groups(
    groups: frozenset[ReaderGroup], layers: dict[str, StencilLayer]
) -> frozenset[ReaderGroup]:
    """Return the groups of several layers that could share an exchange.

    A layer that is in several groups, because it reads several tensors, can't share.
    """
    candidates: set[ReaderGroup] = set()
    for names in groups:
        by_key: dict[object, list[str]] = defaultdict(list)
        for name in names:
            layer = layers.get(name)
            if layer is not None:  # what layers have to have in common for one exchange
                key = layer.pole_mode, layer.dim, tuple(sorted(layer.planned_heights))
                by_key[key].append(name)
        candidates.update(map(tuple, by_key.values()))
    membership = Counter(name for group in candidates for name in set(group))
    return frozenset(
        group
        for group in candidates
        if len(set(group)) > 1
        and all(membership[name] == 1 for name in group)
        and _windows_leave_no_gap([layers[name] for name in set(group)])
    )


def _fetches_windows(layer: StencilLayer) -> bool:
    overrides_fetching = (
        type(layer).required_rows is not StencilLayer.required_rows
        or type(layer).fetch is not StencilLayer.fetch
    )
    if overrides_fetching or not all(map(layer.fetches_halo, layer.planned_heights)):
        return False
    bands_by_height = (layer.planned_bands(height) for height in layer.planned_heights)
    return any(not layer.exchange(bands).is_identity for bands in bands_by_height)


def _windows_leave_no_gap(layers: list[StencilLayer]) -> bool:
    for height in layers[0].planned_heights:
        bands = [layer.planned_bands(height) for layer in layers]
        for rank in range(bands[0].input.ranks):
            spans = sorted(
                layer.input_span(layer_bands.output.rows(rank), height)
                for layer, layer_bands in zip(layers, bands, strict=True)
            )
            covered = spans[0][1]
            for first, stop in spans[1:]:
                if first > covered:
                    return False
                covered = max(covered, stop)
    return True


def _innermost_common_module(names: list[str], modules: dict[str, nn.Module]) -> nn.Module:
    path = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        path.append(parts[0])
    # A ModuleList has no forward: its hooks would never run.
    while path and type(modules[".".join(path)]).forward is nn.Module.forward:
        path.pop()
    return modules[".".join(path)]

"""Halo exchange: rows of other bands, fetched forward; their gradients, returned backward.

Rows travel as a `RowExchange` of `exchange.py` says, whether `HaloExchange` in users' code asks for
them or a domain-parallel layer or function. One exchange happens in this order:

1. `start_fetching` allocates what will be received, packs what the others need, and starts all
   messages at once; what it returns waits for them and assembles the result.
2. In the backward pass `start_returning_gradients` sends the gradients of fetched rows back to the
   ranks that own these rows, which add them up: the adjoint of step 1.

`_HaloExchangeFunction` does both; `fetch_rows` calls it. `_BandConv` of `layers/conv_bands.py` and
`_SharedExchangeFunction` of `shared_exchange.py` call the steps themselves. In compiled code the
operators `credit_dp::fetch_rows` and `credit_dp::return_gradients` do the same work; they find
their exchange by a name that says what it does.

`shard_tensor` and `shard_batch` return bands of global fields, `gather_tensor` joins bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import (
    RowCopy,
    RowExchange,
    RowMessage,
    RowRange,
    named_in_graphs,
    rows_with_poles,
)
from credit_dp.domain_parallel.manager import DomainParallelManager, default_manager
from credit_dp.domain_parallel.partition import FIELD_DIMS, too_few_rows_messages
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.transport import Transport, keep_order, transport_named
from credit_dp.errors import UserError
from credit_dp.torch_private import is_view


@final
class HaloExchange(nn.Module):
    """Adds `halo_width` rows of each neighbour to a band, and zeros beyond the poles.

    Args:
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, W)` -> `(..., H_local + 2 * halo_width, W)` for `dim=-2`.

    Raises:
        UserError: a band has fewer rows than the halo; raised on all ranks.
    """

    def __init__(
        self, halo_width: int, dim: int = -2, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__()
        self.halo_width = halo_width
        self.dim = dim
        self._manager = manager

    @property
    def manager(self) -> DomainParallelManager:
        """Return the given manager, or the default one."""
        if self._manager is not None:
            return self._manager
        manager = default_manager()
        if manager.world_size > 1:  # else a manager of several ranks may be initialised later
            self._manager = manager
        return manager

    def adopt_manager(self, manager: DomainParallelManager) -> None:
        """Use this manager if none was given."""
        self._manager = self._manager or manager

    def forward(self, x: Tensor) -> Tensor:
        """Return the band with its halos, after gathering every rank's number of rows."""
        if active_planner() is not None:  # planning needs the shape only, and must not send
            return F.pad(x.movedim(self.dim, -1), (self.halo_width,) * 2).movedim(-1, self.dim)
        exchange = _halo_rows(x.shape[self.dim], self.halo_width, self.manager)
        dim = self.dim if self.dim < 0 else self.dim - x.ndim
        return fetch_rows(x, exchange, self.manager.transport, dim)

    @staticmethod
    def trim(x: Tensor, halo_before: int, halo_after: int, dim: int = -2) -> Tensor:
        """Return `x` without its first `halo_before` and last `halo_after` rows."""
        return x.narrow(dim, halo_before, x.shape[dim] - halo_before - halo_after)


def _halo_rows(rows: int, width: int, manager: DomainParallelManager) -> RowExchange:
    partition = manager.gather_partition(rows)
    # All ranks see all sizes, so that they raise together and none waits for another's rows.
    if partition.ranks > 1 and min(partition.sizes) < width:
        raise UserError(
            f"HaloExchange: halo_width {width} needs as many rows in every band, but "
            f"the bands have {partition.sizes}. Lower halo_width or parallel.domain."
        )
    bounds = partition.bounds
    required_rows = tuple(
        rows_with_poles(bounds[r] - width, bounds[r + 1] + width, partition.height, "zeros")
        for r in range(partition.ranks)
    )
    return RowExchange(partition, required_rows, manager.domain_rank)


@final
class _HaloExchangeFunction(torch.autograd.Function):
    """Forward: owners send the rows that others need. Backward: their gradients are sent back.

    Code outside of this package calls `apply(x, halo_width, dim, manager)`.
    Saves no tensor: activation checkpointing ends a recomputation after as many saved tensors as
    the forward pass had, so that their number has to be the same on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        halo: int | RowExchange,
        dim: int,
        manager: DomainParallelManager | Transport,
    ) -> Tensor:
        if isinstance(manager, DomainParallelManager):
            halo = _halo_rows(x.shape[dim], halo, manager) if isinstance(halo, int) else halo
            manager = manager.transport
        ctx.exchange, ctx.transport, ctx.dim = halo, manager, dim % x.ndim - x.ndim
        rows = start_fetching(x, ctx.exchange, ctx.transport, ctx.dim)()
        # Autograd forbids writes to a view that a function returns.
        return rows.detach() if is_view(rows) else rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the band, to which all ranks that fetched its rows contribute."""
        function = add_to_owners if gradients_need_graph() else return_gradients
        return function(grad, ctx.exchange, ctx.transport, ctx.dim), None, None, None


@final
class _ReturnGradientsFunction(torch.autograd.Function):
    """The backward of `_HaloExchangeFunction`, whose own backward is its forward."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, exchange: RowExchange, transport: Transport, dim: int
    ) -> Tensor:
        ctx.arguments = (exchange, dim, transport)
        return return_gradients(grad, exchange, transport, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _HaloExchangeFunction.apply(grad, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


def fetch_rows(x: Tensor, exchange: RowExchange, transport: Transport, dim: int = -2) -> Tensor:
    """Return the rows that this rank needs; differentiable, called by all ranks together.

    Args:
        dim: the row dimension, negative. Rotated ranges rotate the last dimension.

    Shapes:
        `(..., H_local, W)` -> `(..., exchange.length, W)` for `dim=-2`.
    """
    if torch.compiler.is_dynamo_compiling():
        name = exchange.graph_name()
        rows: Tensor = _fetch_rows_operator(x, name, transport.name, dim) if name else x
        return rows
    # Equal on all ranks, so that they skip the exchange together.
    if exchange.is_identity:
        return x
    return _HaloExchangeFunction.apply(x, exchange, dim, transport)  # type: ignore[no-any-return, no-untyped-call]


def add_to_owners(x: Tensor, exchange: RowExchange, transport: Transport, dim: int = -2) -> Tensor:
    """Return this rank's band of rows that all ranks have parts of; the adjoint of `fetch_rows`.

    Args:
        x: the rows that this rank needs, whose values are added up by the owners of the rows.

    Shapes:
        `(..., exchange.length, W)` -> `(..., H_local, W)` for `dim=-2`.
    """
    return _ReturnGradientsFunction.apply(x, exchange, transport, dim)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("credit_dp::fetch_rows", mutates_args=())
def _fetch_rows_operator(x: Tensor, exchange: str, transport: str, dim: int) -> Tensor:
    return start_fetching(x, named_in_graphs(exchange), transport_named(transport), dim)()


@_fetch_rows_operator.register_fake
def _(x: Tensor, exchange: str, transport: str, dim: int) -> Tensor:
    return empty_rows_like(x, dim, named_in_graphs(exchange).length)


@torch.library.custom_op("credit_dp::return_gradients", mutates_args=())
def _return_gradients_operator(grad: Tensor, exchange: str, transport: str, dim: int) -> Tensor:
    return return_gradients(grad, named_in_graphs(exchange), transport_named(transport), dim)


@_return_gradients_operator.register_fake
def _(grad: Tensor, exchange: str, transport: str, dim: int) -> Tensor:
    row_exchange: RowExchange = named_in_graphs(exchange)
    return empty_rows_like(grad, dim, row_exchange.partition.sizes[row_exchange.rank])


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.exchange = inputs


def _fetch_rows_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _return_gradients_operator(grad, *ctx.exchange), None, None, None


_fetch_rows_operator.register_autograd(_fetch_rows_gradient, setup_context=_keep_exchange)
keep_order(_fetch_rows_operator, _return_gradients_operator)


def start_fetching(
    x: Tensor, exchange: RowExchange, transport: Transport, dim: int
) -> Callable[[], Tensor]:
    """Send the rows that others need; return a function that waits for this rank's rows.

    Whatever is computed before that function is called overlaps with the messages. Not
    differentiable: see `start_returning_gradients`.
    """
    received = {message.peer: _empty_rows(x, dim, message.length) for message in exchange.receives}
    send = [(message.peer, _pack_rows(x, message, dim)) for message in exchange.sends]
    transport.announce_exchange(exchange, x, dim, backward=False)
    wait = transport.start(send, list(received.items()))
    # Zeros and this rank's own rows are copied while the messages are under way.
    result = empty_rows_like(x, dim, exchange.length)
    for start, length in exchange.zero_ranges:
        result.narrow(dim, start, length).zero_()
    _copy_rows_from(result, x, exchange, exchange.rank, dim)

    def finish() -> Tensor:
        wait()
        with torch.no_grad():  # they are rows of the exchange, not a change of its result
            for peer, rows in received.items():
                _copy_rows_from(result, rows, exchange, peer, dim)
        return result

    return finish


def return_gradients(grad: Tensor, exchange: RowExchange, transport: Transport, dim: int) -> Tensor:
    """Send the gradients of fetched rows to their owners, and return those of this rank's band.

    The adjoint of `start_fetching`: a row that is copied several times gets the sum of its copies'
    gradients.
    """
    finish = start_returning_gradients(grad, exchange, transport, dim)
    local_band = exchange.local_band
    if local_band is None:
        total = empty_rows_like(grad, dim, exchange.partition.sizes[exchange.rank]).zero_()
    else:
        # Most of the gradient stays on this rank: one copy is cheaper than adding it to zeros.
        band = grad.narrow(dim, local_band.result_start, local_band.stop - local_band.start)
        total = band.clone(memory_format=memory_format_of(grad))
    finish(total, local_band)
    return total


class GradientAccumulator(Protocol):
    """Adds to a band's gradient its own copies and what other ranks returned."""

    def __call__(self, total: Tensor, already_added: RowCopy | None = None) -> None:
        """Add to `total` the gradients of every copy except `already_added`."""


def start_returning_gradients(
    grad: Tensor, exchange: RowExchange, transport: Transport, dim: int
) -> GradientAccumulator:
    """Send the gradients of fetched rows to their owners; return what adds up this rank's.

    Whatever is computed before the result is called overlaps with the messages.
    """
    # Messages run in the opposite direction: for each forward message received, send one gradient
    # row per row of it, even if the row was copied several times.
    send = [
        (message.peer, _pack_gradients(grad, exchange, message, dim))
        for message in exchange.receives
    ]
    received = [
        (message.peer, _empty_rows(grad, dim, message.length)) for message in exchange.sends
    ]
    transport.announce_exchange(exchange, grad, dim, backward=True)
    wait = transport.start(send, received)

    def finish(total: Tensor, already_added: RowCopy | None = None) -> None:
        local_copies = exchange.copies_from(exchange.rank)
        remaining = [copy for copy in local_copies if copy != already_added]
        _accumulate_rows(total, grad, remaining, dim)
        wait()
        # Always in the order of ranks, not of arrival: sums are the same bits in every run.
        for message, (_, rows) in zip(exchange.sends, received, strict=True):
            _unpack_add(total, rows, message, dim)

    return finish


def _pack_rows(x: Tensor, message: RowMessage, dim: int) -> Tensor:
    parts = [x.narrow(dim, start, length) for start, length in message.ranges]
    return (torch.cat(parts, dim) if len(parts) > 1 else parts[0]).contiguous()


def _pack_gradients(grad: Tensor, exchange: RowExchange, message: RowMessage, dim: int) -> Tensor:
    """Return the gradients of a received message's rows, each the sum of the row's copies."""
    first, *others = exchange.copies_from(message.peer)
    if not others and first.stop - first.start == message.length:  # each row was copied once
        rows = grad.narrow(dim, first.result_start, message.length)
        return _flip_and_rotate(rows, first.row_range, dim, -1).contiguous()
    outgoing = _empty_rows(grad, dim, message.length).zero_()
    _accumulate_rows(outgoing, grad, (first, *others), dim)
    return outgoing


def _unpack_add(total: Tensor, rows: Tensor, message: RowMessage, dim: int) -> None:
    offset = 0
    for start, length in message.ranges:
        total.narrow(dim, start, length).add_(_narrow(rows, dim, offset, length))
        offset += length


def _copy_rows_from(
    result: Tensor, rows: Tensor, exchange: RowExchange, source_rank: int, dim: int
) -> None:
    for copy in exchange.copies_from(source_rank):
        length = copy.stop - copy.start
        source = _flip_and_rotate(_narrow(rows, dim, copy.start, length), copy.row_range, dim, 1)
        result.narrow(dim, copy.result_start, length).copy_(source)


def _accumulate_rows(total: Tensor, grad: Tensor, copies: Iterable[RowCopy], dim: int) -> None:
    for copy in copies:
        length = copy.stop - copy.start
        source = _flip_and_rotate(
            grad.narrow(dim, copy.result_start, length), copy.row_range, dim, -1
        )
        total.narrow(dim, copy.start, length).add_(source)


CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels last if each sample of a tensor has that layout, otherwise contiguous."""
    channels_last = CHANNELS_LAST_FORMATS.get(x.ndim)
    if channels_last is None or x.is_contiguous():
        return torch.contiguous_format
    # A band that is a slice of a larger tensor has gaps between its samples, not within them:
    # torch calls such a tensor contiguous in no format, but its first sample is.
    sample = x[:1]
    # With one channel or one pixel a sample is contiguous in both formats: then rows win.
    is_channels_last = (
        sample.is_contiguous(memory_format=channels_last) and not sample.is_contiguous()
    )
    return channels_last if is_channels_last else torch.contiguous_format


def row_bytes(x: Tensor, dim: int) -> int:
    """Return the bytes of one row, of all samples, channels and columns; `dim` is negative."""
    # Not x.nbytes / rows: a rank may need no row at all, as one beyond a pole.
    return x.shape[:dim].numel() * x.shape[dim:][1:].numel() * x.element_size()


def _empty_rows(
    x: Tensor, dim: int, rows: int, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Allocate a tensor as `x` with other rows; by default with the same layout on all ranks.

    Messages are bytes: sender and receiver have to agree on the layout, whatever that of their
    bands is.
    """
    shape = list(x.shape)
    shape[dim] = rows
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)


def empty_rows_like(x: Tensor, dim: int, rows: int) -> Tensor:
    """Allocate a tensor as `x` with other rows and the memory format of `x`."""
    return _empty_rows(x, dim, rows, memory_format_of(x))


def _narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x if length == x.shape[dim] else x.narrow(dim, start, length)


def _flip_and_rotate(rows: Tensor, row_range: RowRange, dim: int, direction: int) -> Tensor:
    """Flip and rotate rows as a range says; `direction` is 1, or -1 for the inverse."""
    if row_range.flipped:
        rows = rows.flip(dim)
    # With an odd number of columns a rotation is not its own inverse: hence the direction.
    return rows.roll(direction * (rows.shape[-1] // 2), -1) if row_range.rotated else rows


def gradients_need_graph() -> bool:
    """Return whether the gradients of the backward that calls this are to be differentiated again.

    Compiled code is differentiated once.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling()


def gradients_with_graph(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of those inputs of a function that need them, with a graph of their own.

    For the backward of a function whose gradients are to be differentiated again: `function`
    computes the same in terms of functions that are differentiable any number of times.
    """
    # Views, as one input may depend on another one: that gradient is not of this function.
    views = [None if x is None else x.view_as(x) for x in inputs]
    y = function(*views)
    wanted = [x for x, needs in zip(views, needs_grad, strict=True) if needs and x is not None]
    grad = grad.to(y.dtype)
    gradients = iter(torch.autograd.grad(y, wanted, grad, create_graph=True) if wanted else ())
    return [next(gradients) if needs else None for needs in needs_grad]


def shard_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return this rank's band of a tensor that every rank holds completely; on one rank, itself.

    Shapes:
        `(..., H_global, W)` -> `(..., H_local, W)` for `dim=-2`.

    Raises:
        UserError: fewer rows than ranks.
    """
    manager = manager or default_manager()
    if manager.domain_parallel_size == 1:
        return x
    height = x.shape[dim]
    for message in too_few_rows_messages({height: "shard_tensor"}, manager.domain_parallel_size):
        raise UserError(message)
    rows = manager.rows(height)
    return x.narrow(dim, rows.start, rows.stop - rows.start).contiguous()


def gather_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return the global tensor on every rank, from any bands; called by all ranks together.

    Differentiable: the gradient of a band is the sum of all ranks' gradients of its rows.

    Shapes:
        `(..., H_local, W)` -> `(..., H_global, W)` for `dim=-2`.
    """
    manager = manager or default_manager()
    if manager.domain_parallel_size == 1:
        return x
    # The bands need not be those of the plan: ask all ranks.
    partition = manager.gather_partition(x.shape[dim])
    global_rows = (RowRange(0, partition.height),)
    exchange = RowExchange(partition, (global_rows,) * partition.ranks, manager.domain_rank)
    return fetch_rows(x, exchange, manager.transport, dim if dim < 0 else dim - x.ndim)


def shard_batch(batch: Any, dim: int = -2, manager: DomainParallelManager | None = None) -> Any:
    """Return the batch with this rank's band of every field.

    A field is a tensor with at least three dimensions and more than one row. Fields are found in
    mappings (which become dicts), lists and tuples; anything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        is_field = batch.ndim >= FIELD_DIMS and batch.shape[dim] > 1
        return shard_tensor(batch, dim, manager) if is_field else batch
    if isinstance(batch, Mapping):
        return {key: shard_batch(value, dim, manager) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(shard_batch(value, dim, manager) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(shard_batch(value, dim, manager) for value in batch)
    return batch

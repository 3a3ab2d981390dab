"""The exchange of rows between ranks: every rank names the global rows it needs and receives them.

A `RowExchange` is computed on every rank from the same numbers, so that all ranks know all messages
without asking. One exchange then happens in this order:

1. `start_fetching` allocates what will be received, packs what the others need, and starts all
   messages at once; what it returns waits for them and assembles the result.
2. In the backward pass `start_returning_gradients` sends the gradients of fetched rows back to the
   ranks that own these rows, which add them up: the adjoint of step 1.

`RowExchange.apply` does both, as a differentiable function of the band. `_BandConv` of
`layers/conv_bands.py` and `_SharedExchangeFunction` of `shared_exchange.py` call the steps
themselves. In compiled code the operators `credit_dp::fetch_rows` and `credit_dp::return_gradients`
do the same work; they find their exchange by a name that says what it does.
`rows_with_poles` returns the rows that a padding mode shows beyond the poles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from credit_dp.constants import constant_when_compiled
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Transport, keep_order, transport_named
from credit_dp.errors import UserError

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


class RowRange(NamedTuple):
    """Consecutive rows `start` to `stop - 1` of the globe, as a layer needs them.

    Attributes:
        start: first global row.
        stop: global row after the last.
        flipped: the rows come in the order from south to north.
        rotated: the rows are rotated by half the longitudes (`W // 2` columns), as the rows beyond
            a pole are.
        zero_filled: zeros instead of rows, as many as `start` and `stop` say.
    """

    start: int
    stop: int
    flipped: bool = False
    rotated: bool = False
    zero_filled: bool = False

    @property
    def length(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


class RowCopy(NamedTuple):
    """Rows to copy from one source into the result.

    Attributes:
        source_rank: the rank that owns the rows; this rank's own band is a source, too.
        start: first row within what the source sends, or within this rank's band.
        stop: row after the last.
        result_start: row of the result at which they begin.
        row_range: the range that they are part of, which says whether to flip and rotate them.
    """

    source_rank: int
    start: int
    stop: int
    result_start: int
    row_range: RowRange


class RowMessage(NamedTuple):
    """The rows of one message between this rank and a peer, as ranges of global rows."""

    peer: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Return the number of rows in the message."""
        return sum(stop - start for start, stop in self.ranges)


@final
@dataclass(frozen=True)
class RowExchange:
    """The rows that every rank needs of a tensor that is sharded by `partition`.

    A row that a rank needs several times is sent to it once, and all rows from one rank to another
    travel in one message.

    Attributes:
        partition: the bands of the tensor.
        required_rows: for each rank the ranges that it needs, in the order of its result.
        rank: the rank that this object belongs to. Partition and required rows are the same on all
            ranks, so that senders and receivers agree on every message.
    """

    partition: RowPartition
    required_rows: tuple[tuple[RowRange, ...], ...]
    rank: int

    @cached_property
    def is_identity(self) -> bool:
        """Return whether every rank needs exactly the rows that it owns."""
        bands = (self.partition.rows(r) for r in range(self.partition.ranks))
        return self.required_rows == tuple((RowRange(band.start, band.stop),) for band in bands)

    @property
    def length(self) -> int:
        """Return the number of rows in this rank's result."""
        return sum(row_range.length for row_range in self.required_rows[self.rank])

    @cached_property
    def greatest_length(self) -> int:
        """Return the number of rows in the result of the rank that needs most."""
        return max(sum(rows.length for rows in ranges) for ranges in self.required_rows)

    @cached_property
    def receives(self) -> tuple[RowMessage, ...]:
        """Return the forward messages to this rank, by sender; backward goes the other way."""
        owner = self.partition.owner
        owners: set[int] = set()
        for row_range in self.required_rows[self.rank]:
            if not row_range.zero_filled and row_range.length:
                owners.update(range(owner(row_range.start), owner(row_range.stop - 1) + 1))
        senders = sorted(owners - {self.rank})
        messages = (RowMessage(r, self._rows_needed_from(self.rank, r)) for r in senders)
        # An empty band between two others is in the interval of owners, but sends nothing.
        return tuple(message for message in messages if message.ranges)

    @cached_property
    def sends(self) -> tuple[RowMessage, ...]:
        """Return the forward messages from this rank, by receiver; backward goes the other way."""
        peers = (r for r in range(self.partition.ranks) if r != self.rank)
        messages = (RowMessage(peer, self._rows_needed_from(peer, self.rank)) for peer in peers)
        return tuple(message for message in messages if message.ranges)

    @cached_property
    def copies(self) -> tuple[RowCopy, ...]:
        """Return the copies that assemble this rank's result, without the rows of zeros."""
        copies: list[RowCopy] = []
        result_start = 0
        for row_range in self.required_rows[self.rank]:
            if not row_range.zero_filled:
                copies += self._split_by_owner(row_range, result_start)
            result_start += row_range.length
        return tuple(copies)

    @cached_property
    def zero_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return where this rank's result is zero: first row and number of rows."""
        ranges: list[tuple[int, int]] = []
        result_start = 0
        for row_range in self.required_rows[self.rank]:
            if row_range.zero_filled:
                ranges.append((result_start, row_range.length))
            result_start += row_range.length
        return tuple(ranges)

    def _rows_needed_from(self, rank: int, owner: int) -> tuple[tuple[int, int], ...]:
        """Return the rows that `rank` needs from `owner`, each once, from north to south."""
        band = self.partition.rows(owner)
        clipped = (
            (max(row_range.start, band.start), min(row_range.stop, band.stop))
            for row_range in self.required_rows[rank]
            if not row_range.zero_filled
        )
        overlaps = sorted((start, stop) for start, stop in clipped if start < stop)
        merged: list[tuple[int, int]] = []
        for start, stop in overlaps:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return tuple(merged)

    def _split_by_owner(self, row_range: RowRange, result_start: int) -> list[RowCopy]:
        """Split a range where its rows change owner."""
        copies = []
        global_rows = range(row_range.start, row_range.stop)
        for owner, group in groupby(global_rows, key=self.partition.owner):
            rows = list(group)
            # A flipped range begins with its southernmost row.
            flipped_offset = row_range.stop - 1 - rows[-1]
            offset = flipped_offset if row_range.flipped else rows[0] - row_range.start
            start = self._source_index(owner, rows[0])
            copies.append(
                RowCopy(owner, start, start + len(rows), result_start + offset, row_range)
            )
        return copies

    def _source_index(self, owner: int, row: int) -> int:
        """Return the index of a global row in its owner's message or in this rank's band."""
        if owner == self.rank:
            return row - self.partition.bounds[owner]
        ranges = next(message.ranges for message in self.receives if message.peer == owner)
        return sum(min(stop, row) - start for start, stop in ranges if start <= row)

    def copies_from(self, source_rank: int) -> list[RowCopy]:
        """Return the copies of rows that one rank owns."""
        return self._copies_by_source.get(source_rank, [])

    @cached_property
    def _copies_by_source(self) -> dict[int, list[RowCopy]]:
        by_source: dict[int, list[RowCopy]] = {}
        for copy in self.copies:
            by_source.setdefault(copy.source_rank, []).append(copy)
        return by_source

    def is_local_band(self, copy: RowCopy) -> bool:
        """Return whether a copy is this rank's complete band, neither flipped nor rotated."""
        if copy.source_rank != self.rank or copy.row_range.flipped or copy.row_range.rotated:
            return False
        return copy.stop - copy.start == self.partition.sizes[self.rank]

    def local_ranges(self, message: RowMessage) -> list[tuple[int, int]]:
        """Return the rows of this rank's band in a message: first local row and number of rows."""
        first = self.partition.bounds[self.rank]
        return [(start - first, stop - start) for start, stop in message.ranges]

    def apply(self, x: Tensor, transport: Transport, dim: int = -2) -> Tensor:
        """Return the rows that this rank needs; differentiable, called by all ranks together.

        Args:
            x: this rank's band.
            transport: sends the messages.
            dim: the row dimension, negative. Rotated ranges rotate the last dimension.

        Shapes:
            `(..., H_local, W)` -> `(..., length, W)` for `dim=-2`.
        """
        if torch.compiler.is_dynamo_compiling():
            name = self.graph_name()
            rows: Tensor = _fetch_rows_operator(x, name, transport.name, dim) if name else x
            return rows
        # Equal on all ranks, so that they skip the exchange together.
        if self.is_identity:
            return x
        return _RowExchangeFunction.apply(x, self, transport, dim)  # type: ignore[no-any-return, no-untyped-call]

    def start(
        self, x: Tensor, transport: Transport, dim: int = -2
    ) -> tuple[Tensor, Callable[[], None]]:
        """Return the rows of `apply`, and a function that waits for them; called by all ranks.

        Until it has returned, the rows are not filled.
        """
        waits: list[Callable[[], None]] = []
        rows: Tensor = _RowExchangeFunction.apply(x, self, transport, dim, waits)  # type: ignore[no-untyped-call]
        return rows, waits[0]

    def add_to_owners(self, x: Tensor, transport: Transport, dim: int = -2) -> Tensor:
        """Return this rank's band of rows that all ranks have parts of; the adjoint of `apply`.

        Args:
            x: the rows that this rank needs, whose values are added up by the owners of the rows.
            transport: sends the messages.
            dim: the row dimension, negative.

        Shapes:
            `(..., length, W)` -> `(..., H_local, W)` for `dim=-2`.
        """
        return _ReturnGradientsFunction.apply(x, self, transport, dim)  # type: ignore[no-any-return, no-untyped-call]

    @constant_when_compiled
    def graph_name(self) -> str:
        """Return the name by which compiled code finds this exchange; empty if it is the identity.

        The name stands for the contents: torch keeps compiled code on disk, for other ranks and
        runs.
        """
        return "" if self.is_identity else register_for_graphs(self)


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
    """Return some rows of `x`; without an operation if these are all."""
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


class _RowExchangeFunction(torch.autograd.Function):
    """Forward: owners send the rows that others need. Backward: their gradients are sent back.

    Saves no tensor: activation checkpointing ends a recomputation after as many saved tensors as
    the forward pass had, so that their number has to be the same on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: RowExchange,
        transport: Transport,
        dim: int,
        waits: list[Callable[[], None]] | None = None,
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.transport = transport
        ctx.dim = dim
        rows, wait = _start_rows(x, exchange, transport, dim)
        if waits is None:
            wait()
        else:
            waits.append(wait)
            ctx.set_materialize_grads(False)  # their only reader may return them by itself
        # Autograd forbids writes to a view that a function returns.
        return rows.detach() if rows._is_view() else rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = (grad, ctx.exchange, ctx.transport, ctx.dim)
        if grad is None:
            grad_x = None
        elif gradients_need_graph():
            grad_x = _ReturnGradientsFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            grad_x = return_gradients(grad, ctx.exchange, ctx.transport, ctx.dim)
        return grad_x, None, None, None, None


class _ReturnGradientsFunction(torch.autograd.Function):
    """The backward of `_RowExchangeFunction`, whose own backward is its forward."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, exchange: RowExchange, transport: Transport, dim: int
    ) -> Tensor:
        ctx.arguments = (exchange, transport, dim)
        return return_gradients(grad, exchange, transport, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _RowExchangeFunction.apply(grad, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


# Exchanges, or what else an operator needs, by name. They are small and hold no tensor.
_by_graph_name: dict[str, Any] = {}


def register_for_graphs(value: Any) -> str:
    """Return the name by which `named_in_graphs` finds an object whose `repr` tells everything."""
    name = f"{type(value).__name__} {sha256(repr(value).encode()).hexdigest()[:24]}"
    _by_graph_name[name] = value
    return name


def named_in_graphs(name: str) -> Any:
    """Return the object of this name."""
    return _by_graph_name[name]


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
    rows, wait = _start_rows(x, exchange, transport, dim)

    def finish() -> Tensor:
        wait()
        return rows

    return finish


def _start_rows(
    x: Tensor, exchange: RowExchange, transport: Transport, dim: int
) -> tuple[Tensor, Callable[[], None]]:
    """Do what `start_fetching` does; return the rows, and a function that waits for them."""
    received = {message.peer: _empty_rows(x, dim, message.length) for message in exchange.receives}
    send = [(message.peer, _pack_rows(x, exchange, message, dim)) for message in exchange.sends]
    transport.announce_exchange(exchange, row_bytes(x, dim), backward=False)
    wait = transport.start(send, list(received.items()))
    # Zeros and this rank's own rows are copied while the messages are under way.
    result = empty_rows_like(x, dim, exchange.length)
    for start, length in exchange.zero_ranges:
        result.narrow(dim, start, length).zero_()
    _copy_rows_from(result, x, exchange, exchange.rank, dim)

    def finish() -> None:
        wait()
        with torch.no_grad():  # they are rows of the exchange, not a change of its result
            for peer, rows in received.items():
                _copy_rows_from(result, rows, exchange, peer, dim)

    return result, finish


def return_gradients(grad: Tensor, exchange: RowExchange, transport: Transport, dim: int) -> Tensor:
    """Send the gradients of fetched rows to their owners, and return those of this rank's band.

    The adjoint of `start_fetching`: a row that is copied several times gets the sum of its copies'
    gradients.
    """
    finish = start_returning_gradients(grad, exchange, transport, dim)
    local_band = next((copy for copy in exchange.copies if exchange.is_local_band(copy)), None)
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
    transport.announce_exchange(exchange, row_bytes(grad, dim), backward=True)
    wait = transport.start(send, received)

    def finish(total: Tensor, already_added: RowCopy | None = None) -> None:
        local_copies = exchange.copies_from(exchange.rank)
        remaining = [copy for copy in local_copies if copy != already_added]
        _accumulate_rows(total, grad, remaining, dim)
        wait()
        # Always in the order of ranks, not of arrival: sums are the same bits in every run.
        for message, (_, rows) in zip(exchange.sends, received, strict=True):
            _unpack_add(total, rows, exchange, message, dim)

    return finish


def _pack_rows(x: Tensor, exchange: RowExchange, message: RowMessage, dim: int) -> Tensor:
    """Return the rows of a message as one contiguous tensor."""
    parts = [x.narrow(dim, start, length) for start, length in exchange.local_ranges(message)]
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


def _unpack_add(
    total: Tensor, rows: Tensor, exchange: RowExchange, message: RowMessage, dim: int
) -> None:
    """Add the gradients of a message to those of the band; the adjoint of `_pack_rows`."""
    offset = 0
    for start, length in exchange.local_ranges(message):
        total.narrow(dim, start, length).add_(_narrow(rows, dim, offset, length))
        offset += length


def _copy_rows_from(
    result: Tensor, rows: Tensor, exchange: RowExchange, source_rank: int, dim: int
) -> None:
    """Copy all rows of one rank to their positions in the result."""
    for copy in exchange.copies_from(source_rank):
        length = copy.stop - copy.start
        source = _flip_and_rotate(_narrow(rows, dim, copy.start, length), copy.row_range, dim, 1)
        result.narrow(dim, copy.result_start, length).copy_(source)


def _accumulate_rows(total: Tensor, grad: Tensor, copies: Iterable[RowCopy], dim: int) -> None:
    """Add the gradients of copies to those of their source rows; adjoint of `_copy_rows_from`."""
    for copy in copies:
        length = copy.stop - copy.start
        source = _flip_and_rotate(
            grad.narrow(dim, copy.result_start, length), copy.row_range, dim, -1
        )
        total.narrow(dim, copy.start, length).add_(source)


# The rows that each mode shows at rows -2, -1 | 0, 1, ... (0 is the northernmost row):
#   zeros 0, 0     replicate 0, 0     circular H-2, H-1     reflect 2, 1     mirror 1, 0
#   earth 1, 0, rotated by half the longitudes: the rows that follow on the way across the pole
POLE_MODES = ("zeros", "replicate", "circular", "reflect", "mirror", "earth")


def rows_with_poles(start: int, stop: int, height: int, mode: str) -> tuple[RowRange, ...]:
    """Return the rows `start` to `stop - 1`, padded beyond the poles.

    Args:
        start: first row; rows below 0 are north of the globe.
        stop: row after the last; rows from `height` on are south of the globe.
        height: rows of the globe.
        mode: one of `POLE_MODES`.

    Raises:
        UserError: the padding is wider than the rows that the mode can show.
    """
    widest = height if mode in ("circular", "mirror", "earth") else height - 1
    if mode not in ("zeros", "replicate") and max(-start, stop - height) > widest:
        raise UserError(
            f"padding: {max(-start, stop - height)} rows beyond a pole need as many on the globe, "
            f"which has {height}. Use a finer grid or less padding."
        )
    ranges = (
        *_beyond_north_pole(start, min(stop, 0), height, mode),
        RowRange(max(start, 0), min(stop, height)),
        *_beyond_south_pole(max(start, height), stop, height, mode),
    )
    return tuple(row_range for row_range in ranges if row_range.length > 0)


def merge_zeros(ranges: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Return ranges with zeros that follow each other as one range."""
    merged: list[RowRange] = []
    for rows in ranges:
        if merged and rows.zero_filled and merged[-1].zero_filled:
            merged[-1] = RowRange(0, merged[-1].length + rows.length, zero_filled=True)
        else:
            merged.append(rows)
    return tuple(merged)


def _beyond_north_pole(start: int, stop: int, height: int, mode: str) -> tuple[RowRange, ...]:
    match mode:
        case "zeros":
            return (RowRange(0, stop - start, zero_filled=True),)
        case "replicate":
            return (RowRange(0, 1),) * (stop - start)
        case "circular":
            return (RowRange(height + start, height + stop),)
        case "reflect":
            return (RowRange(1 - stop, 1 - start, flipped=True),)
        case _:
            return (RowRange(-stop, -start, flipped=True, rotated=mode == "earth"),)


def _beyond_south_pole(start: int, stop: int, height: int, mode: str) -> tuple[RowRange, ...]:
    match mode:
        case "zeros":
            return (RowRange(0, stop - start, zero_filled=True),)
        case "replicate":
            return (RowRange(height - 1, height),) * (stop - start)
        case "circular":
            return (RowRange(start - height, stop - height),)
        case "reflect":
            return (RowRange(2 * height - 1 - stop, 2 * height - 1 - start, flipped=True),)
        case _:
            first, last = 2 * height - stop, 2 * height - start
            return (RowRange(first, last, flipped=True, rotated=mode == "earth"),)

"""The one communication primitive: every rank names the global rows it needs and gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Channels last where each sample of a tensor has them so, else row by row."""
    last = CHANNELS_LAST_FORMATS.get(x.ndim)
    if last is None or x.is_contiguous():
        return torch.contiguous_format
    one = x[:1]  # of bands cut from larger ones only single samples are without gaps
    lies_last = one.is_contiguous(memory_format=last) and not one.is_contiguous()
    return last if lies_last else torch.contiguous_format


class RowRange(NamedTuple):
    """Consecutive rows `start` to `stop - 1` of the globe, as a layer wants to see them.

    `flipped`: south to north. `turned`: rotated by half the longitudes (`W // 2` columns), as rows
    beyond a pole are. `blank`: as many rows of zeros.
    """

    start: int
    stop: int
    flipped: bool = False
    rotated: bool = False
    zero_filled: bool = False

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class RowCopy(NamedTuple):
    """Rows `start` to `stop - 1` of what came from `source`, placed at row `at` of the result."""

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
        """Number of rows in the message."""
        return sum(stop - start for start, stop in self.ranges)


@final
@dataclass(frozen=True)
class RowExchange:
    """What every rank needs of a tensor cut by `partition`, seen from `rank`.

    `needs[r]` are the runs of rank `r`, in the order in which it wants them. A row that a rank
    needs several times reaches it once, and one message per pair of ranks carries all its rows.
    """

    partition: RowPartition
    required_rows: tuple[tuple[RowRange, ...], ...]
    rank: int

    @property
    def is_identity(self) -> bool:
        """Whether every rank needs exactly the rows it owns."""
        bands = (self.partition.rows(r) for r in range(self.partition.ranks))
        return self.required_rows == tuple((RowRange(band.start, band.stop),) for band in bands)

    @property
    def length(self) -> int:
        """Number of rows that this rank ends up with."""
        return sum(run.length for run in self.required_rows[self.rank])

    @cached_property
    def receives(self) -> tuple[RowMessage, ...]:
        """What this rank gets from others."""
        owner = self.partition.owner
        needed = (
            run for run in self.required_rows[self.rank] if not run.zero_filled and run.length
        )
        owners = {r for run in needed for r in range(owner(run.start), owner(run.stop - 1) + 1)}
        others = sorted(owners - {self.rank})
        routes = (RowMessage(other, self._rows_needed_from(self.rank, other)) for other in others)
        return tuple(route for route in routes if route.ranges)

    @cached_property
    def sends(self) -> tuple[RowMessage, ...]:
        """What others get from this rank."""
        peers = (r for r in range(self.partition.ranks) if r != self.rank)
        routes = (RowMessage(peer, self._rows_needed_from(peer, self.rank)) for peer in peers)
        return tuple(route for route in routes if route.ranges)

    @cached_property
    def copies(self) -> tuple[RowCopy, ...]:
        """How the result is put together, blank rows left out."""
        pieces: list[RowCopy] = []
        at = 0
        for run in self.required_rows[self.rank]:
            if not run.zero_filled:
                pieces += self._split_by_owner(run, at)
            at += run.length
        return tuple(pieces)

    @cached_property
    def zero_ranges(self) -> tuple[tuple[int, int], ...]:
        """Where the result is zero: first row and number of rows."""
        blanks: list[tuple[int, int]] = []
        at = 0
        for run in self.required_rows[self.rank]:
            if run.zero_filled:
                blanks.append((at, run.length))
            at += run.length
        return tuple(blanks)

    def _rows_needed_from(self, rank: int, owner: int) -> tuple[tuple[int, int], ...]:
        """Rows that `rank` needs of `owner`, each once, from north to south."""
        band = self.partition.rows(owner)
        clipped = (
            (max(run.start, band.start), min(run.stop, band.stop))
            for run in self.required_rows[rank]
            if not run.zero_filled
        )
        wanted = sorted((start, stop) for start, stop in clipped if start < stop)
        merged: list[tuple[int, int]] = []
        for start, stop in wanted:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return tuple(merged)

    def _split_by_owner(self, run: RowRange, at: int) -> list[RowCopy]:
        """Split a run where its rows change owner."""
        pieces = []
        for owner, group in groupby(range(run.start, run.stop), key=self.partition.owner):
            rows = list(group)
            offset = run.stop - 1 - rows[-1] if run.flipped else rows[0] - run.start
            start = self._source_index(owner, rows[0])
            pieces.append(RowCopy(owner, start, start + len(rows), at + offset, run))
        return pieces

    def _source_index(self, owner: int, row: int) -> int:
        """Return where a global row lies in what came from its owner."""
        if owner == self.rank:
            return row - self.partition.bounds[owner]
        ranges = next(route.ranges for route in self.receives if route.peer == owner)
        return sum(min(stop, row) - start for start, stop in ranges if start <= row)

    def copies_from(self, source: int) -> list[RowCopy]:
        """The pieces that come from one rank."""
        return self._copies_by_source.get(source, [])

    @cached_property
    def _copies_by_source(self) -> dict[int, list[RowCopy]]:
        found: dict[int, list[RowCopy]] = {}
        for piece in self.copies:
            found.setdefault(piece.source_rank, []).append(piece)
        return found

    def is_local_band(self, piece: RowCopy) -> bool:
        """Whether a piece is this rank's whole band as it is."""
        own = (
            piece.source_rank == self.rank
            and not piece.row_range.flipped
            and not piece.row_range.rotated
        )
        return own and piece.stop - piece.start == self.partition.sizes[self.rank]

    def local_ranges(self, route: RowMessage) -> list[tuple[int, int]]:
        """Return the rows that a route takes from this rank's band: first local row and number."""
        first = self.partition.bounds[self.rank]
        return [(start - first, stop - start) for start, stop in route.ranges]

    def apply(self, x: Tensor, transport: Transport, dim: int = -2) -> Tensor:
        """Return the rows that this rank needs; differentiable, reached by all ranks together.

        Shapes:
            `x` has this rank's rows of the partition along the negative `dim`; the result has
            `length` rows there. `turned` runs rotate the last dimension.
        """
        if self.is_identity:
            return x
        return _RowExchangeFunction.apply(x, self, transport, dim)  # type: ignore[no-any-return, no-untyped-call]


def _row_bytes(x: Tensor, dim: int) -> int:
    """Bytes of one row: of all samples, channels and columns."""
    # Of a tensor without any row too: beyond a pole a rank may need none.
    return x.shape[:dim].numel() * x.shape[dim:][1:].numel() * x.element_size()


def _empty_rows(
    x: Tensor, dim: int, rows: int, lie: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Room for rows that travel, which lie alike on all ranks."""
    shape = list(x.shape)
    shape[dim] = rows
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=lie)


def empty_rows_like(x: Tensor, dim: int, rows: int) -> Tensor:
    """Room for rows that a layer gets, which lie as `x` does."""
    return _empty_rows(x, dim, rows, memory_format_of(x))


def _flip_and_rotate(rows: Tensor, run: RowRange, dim: int, turn: int) -> Tensor:
    """Flip and rotate rows as a run asks for; `turn` is 1 to do and -1 to undo."""
    if run.flipped:
        rows = rows.flip(dim)
    return rows.roll(turn * (rows.shape[-1] // 2), -1) if run.rotated else rows


class _RowExchangeFunction(torch.autograd.Function):
    """Forward: owners send the rows that others need. Backward: their cotangents travel home.

    Saves no tensor, so that activation checkpointing counts the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RowExchange, transport: Transport, dim: int) -> Tensor:
        ctx.plan, ctx.transport, ctx.dim = plan, transport, dim
        return start_fetching(x, plan, transport, dim)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        return return_gradients(grad, ctx.plan, ctx.transport, ctx.dim), None, None, None


def start_fetching(
    x: Tensor, plan: RowExchange, transport: Transport, dim: int
) -> Callable[[], Tensor]:
    """Send what others need; the result waits for what this rank needs and returns it.

    What is called in between overlaps with the messages. Not differentiable: see
    `start_returning_gradients`.
    """
    came = {route.peer: _empty_rows(x, dim, route.length) for route in plan.receives}
    send = [(route.peer, _pack_rows(x, plan, route, dim)) for route in plan.sends]
    transport.announce_exchange(plan, _row_bytes(x, dim), back=False)
    wait = transport.start(send, list(came.items()))
    result = empty_rows_like(x, dim, plan.length)
    for at, length in plan.zero_ranges:
        result.narrow(dim, at, length).zero_()
    _copy_rows_from(result, x, plan, plan.rank, dim)

    def finish() -> Tensor:
        wait()
        for peer, rows in came.items():
            _copy_rows_from(result, rows, plan, peer, dim)
        return result

    return finish


def return_gradients(grad: Tensor, plan: RowExchange, transport: Transport, dim: int) -> Tensor:
    """Send home the cotangents of fetched rows, and return those of this rank's rows.

    The adjoint of `start_fetching`.
    """
    finish = start_returning_gradients(grad, plan, transport, dim)
    whole = next((piece for piece in plan.copies if plan.is_local_band(piece)), None)
    if whole is None:
        total = empty_rows_like(grad, dim, plan.partition.sizes[plan.rank]).zero_()
    else:  # most of it: copied once instead of added to zeros
        band = grad.narrow(dim, whole.result_start, whole.stop - whole.start)
        total = band.clone(memory_format=memory_format_of(grad))
    finish(total, whole)
    return total


class GradientAccumulator(Protocol):
    """Adds to the cotangents of a rank's rows those that are on their way."""

    def __call__(self, total: Tensor, done: RowCopy | None = None) -> None:
        """Add to `total` all but those of the piece that is `done`."""


def start_returning_gradients(
    grad: Tensor, plan: RowExchange, transport: Transport, dim: int
) -> GradientAccumulator:
    """Send home the cotangents of fetched rows; the result adds all ranks' to this rank's rows.

    What is called in between overlaps with the messages.
    """
    send = []
    for route in plan.receives:
        home = _empty_rows(grad, dim, route.length).zero_()
        _accumulate_rows(home, grad, plan.copies_from(route.peer), dim)
        send.append((route.peer, home))
    came = [(route.peer, _empty_rows(grad, dim, route.length)) for route in plan.sends]
    transport.announce_exchange(plan, _row_bytes(grad, dim), back=True)
    wait = transport.start(send, came)

    def finish(total: Tensor, done: RowCopy | None = None) -> None:
        _accumulate_rows(
            total, grad, [piece for piece in plan.copies_from(plan.rank) if piece != done], dim
        )
        wait()
        for route, (_, rows) in zip(plan.sends, came, strict=True):
            _unpack_add(total, rows, plan, route, dim)

    return finish


def _pack_rows(x: Tensor, plan: RowExchange, route: RowMessage, dim: int) -> Tensor:
    strips = [x.narrow(dim, *at) for at in plan.local_ranges(route)]
    return (torch.cat(strips, dim) if len(strips) > 1 else strips[0]).contiguous()


def _unpack_add(
    total: Tensor, rows: Tensor, plan: RowExchange, route: RowMessage, dim: int
) -> None:
    at = 0
    for start, length in plan.local_ranges(route):
        total.narrow(dim, start, length).add_(rows.narrow(dim, at, length))
        at += length


def _copy_rows_from(result: Tensor, rows: Tensor, plan: RowExchange, source: int, dim: int) -> None:
    """Copy every piece of one source to where the result wants it."""
    for piece in plan.copies_from(source):
        length = piece.stop - piece.start
        stretch = _flip_and_rotate(rows.narrow(dim, piece.start, length), piece.row_range, dim, 1)
        result.narrow(dim, piece.result_start, length).copy_(stretch)


def _accumulate_rows(total: Tensor, grad: Tensor, pieces: Iterable[RowCopy], dim: int) -> None:
    """Add the cotangents of pieces of one source to those of the rows they came from."""
    for piece in pieces:
        length = piece.stop - piece.start
        stretch = _flip_and_rotate(
            grad.narrow(dim, piece.result_start, length), piece.row_range, dim, -1
        )
        total.narrow(dim, piece.start, length).add_(stretch)


# What each mode shows at rows -2, -1 | 0, 1, ... (0 is the pole's row):
#   zeros 0, 0     replicate 0, 0     circular H-2, H-1     reflect 2, 1     mirror 1, 0
#   earth 1, 0 rotated by half the longitudes, as a walk across the pole sees them
POLE_MODES = ("zeros", "replicate", "circular", "reflect", "mirror", "earth")


def rows_with_poles(start: int, stop: int, height: int, mode: str) -> tuple[RowRange, ...]:
    """Return the rows `start` to `stop - 1`, where those below 0 or from `height` on are padding.

    Raises:
        UserError: the padding is wider than what the mode can show.
    """
    widest = height if mode in ("circular", "mirror", "earth") else height - 1
    if mode not in ("zeros", "replicate") and max(-start, stop - height) > widest:
        raise UserError(
            f"padding: {max(-start, stop - height)} rows beyond a pole need as many on the globe, "
            f"which has {height}. Use a finer grid or less padding."
        )
    runs = (
        *_beyond_north_pole(start, min(stop, 0), height, mode),
        RowRange(max(start, 0), min(stop, height)),
        *_beyond_south_pole(max(start, height), stop, height, mode),
    )
    return tuple(run for run in runs if run.length > 0)


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
            turned = mode == "earth"
            return (RowRange(2 * height - stop, 2 * height - start, flipped=True, rotated=turned),)

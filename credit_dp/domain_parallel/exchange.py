"""Which rows travel: every rank names the global rows that it needs of a field cut into bands.

A `RowExchange` is computed on every rank from the same numbers, so that all ranks know all messages
without asking. `halo_exchange.py` sends them, and returns gradients the other way.
`rows_with_poles` returns the rows that a padding mode shows beyond the poles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple, final

from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.torch_private import constant_when_compiled


class RowRange(NamedTuple):
    """Consecutive rows `start` to `stop - 1` of the globe, as a layer needs them.

    Attributes:
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
        row_range: the range that they are part of, which says whether to flip and rotate them.
    """

    source_rank: int
    start: int
    stop: int
    result_start: int
    row_range: RowRange


class RowMessage(NamedTuple):
    """The rows of one message between this rank and a peer.

    Attributes:
        ranges: in the band of the rank that owns the rows: first row and number of rows.
    """

    peer: int
    ranges: tuple[tuple[int, int], ...]
    length: int


@final
@dataclass(frozen=True)
class RowExchange:
    """The rows that every rank needs of a tensor that is sharded by `partition`.

    A row that a rank needs several times is sent to it once, and all rows from one rank to another
    travel in one message.

    Attributes:
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

    @cached_property
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
        messages = (self._message(r, self.rank, r) for r in senders)
        # An empty band between two others is in the interval of owners, but sends nothing.
        return tuple(message for message in messages if message.ranges)

    @cached_property
    def sends(self) -> tuple[RowMessage, ...]:
        """Return the forward messages from this rank, by receiver; backward goes the other way."""
        peers = (r for r in range(self.partition.ranks) if r != self.rank)
        messages = (self._message(peer, peer, self.rank) for peer in peers)
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

    def _message(self, peer: int, rank: int, owner: int) -> RowMessage:
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
        ranges = tuple((start - band.start, stop - start) for start, stop in merged)
        return RowMessage(peer, ranges, sum(length for _, length in ranges))

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
        row -= self.partition.bounds[owner]
        if owner == self.rank:
            return row
        ranges = next(message.ranges for message in self.receives if message.peer == owner)
        return sum(min(length, row - start) for start, length in ranges if start <= row)

    def copies_from(self, source_rank: int) -> list[RowCopy]:
        """Return the copies of rows that one rank owns."""
        return self._copies_by_source.get(source_rank, [])

    @cached_property
    def _copies_by_source(self) -> dict[int, list[RowCopy]]:
        by_source: dict[int, list[RowCopy]] = {}
        for copy in self.copies:
            by_source.setdefault(copy.source_rank, []).append(copy)
        return by_source

    @cached_property
    def local_band(self) -> RowCopy | None:
        """Return the first copy of this rank's complete band, neither flipped nor rotated."""
        rows = self.partition.sizes[self.rank]
        for copy in self.copies_from(self.rank):
            is_plain = not (copy.row_range.flipped or copy.row_range.rotated)
            if is_plain and copy.stop - copy.start == rows:
                return copy
        return None

    @constant_when_compiled
    def graph_name(self) -> str:
        """Return the name by which compiled code finds this exchange; empty if it is the identity.

        The name stands for the contents: torch keeps compiled code on disk, for other ranks and
        runs.
        """
        return "" if self.is_identity else register_for_graphs(self)


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


# The rows that each mode shows at rows -2, -1 | 0, 1, ... (0 is the northernmost row):
#   zeros 0, 0     replicate 0, 0     circular H-2, H-1     reflect 2, 1     mirror 1, 0
#   earth 1, 0, rotated by half the longitudes: the rows that follow on the way across the pole
POLE_MODES = ("zeros", "replicate", "circular", "reflect", "mirror", "earth")


def rows_with_poles(start: int, stop: int, height: int, mode: str) -> tuple[RowRange, ...]:
    """Return the rows `start` to `stop - 1`, padded beyond the poles.

    Args:
        start: first row; rows below 0 are north of the globe.
        stop: row after the last; rows from `height` on are south of the globe.
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
    # As beyond the north pole of the globe turned over, on which row `i` is row `height - 1 - i`.
    turned = _beyond_north_pole(height - stop, height - start, height, mode)
    return tuple(
        rows
        if rows.zero_filled
        else rows._replace(start=height - rows.stop, stop=height - rows.start)
        for rows in turned
    )

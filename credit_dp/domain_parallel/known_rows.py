"""Rows of other bands that convolutions have fetched, kept with the tensor for the next ones.

Several convolutions may read one tensor, as the branches of a block do. With a plan they share one
exchange (`shared_exchange.py`). In the global view nobody knows which functions will read a tensor:
there the first convolution leaves the rows that it has fetched in the tensor's `KnownRows`, and the
next one fetches only what is missing. So each row crosses once, and so does its gradient: autograd
adds up what all readers return to the exchange that fetched it. That exchange keeps no tensor for
backward: readers may be in the graphs of several losses, each with a backward pass of its own.

All ranks compute what all ranks have and miss, from the same numbers: so they decide alike whether
there is an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import empty_rows_like, fetch_rows_later
from credit_dp.domain_parallel.transport import Transport
from credit_dp.torch_private import backward_pass, version_of


class _Segment(NamedTuple):
    """Rows of a result: `length` rows of a source from `start` on; zeros if the source is -1."""

    source: int
    start: int
    length: int


@final
@dataclass(frozen=True)
class Assembly:
    """How this rank's rows are put together from what it has: band 0, then the known rows."""

    segments: tuple[_Segment, ...]

    def join(self, sources: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
        """Return the rows; differentiable, with all sources on every rank.

        A source of which this rank needs no rows counts, too: in the backward pass all ranks have
        to reach the exchanges that the sources come from, in the same order.
        """
        used = {segment.source for segment in self.segments}
        parts = [
            empty_rows_like(like, dim, length).zero_()
            if source < 0
            else sources[source].narrow(dim, start, length)
            for source, start, length in self.segments
        ]
        parts += [x.narrow(dim, 0, 0) for i, x in enumerate(sources) if i not in used]
        return torch.cat(parts, dim)

    def gradients(self, grad: Tensor, lengths: Sequence[int], dim: int) -> list[Tensor]:
        """Return the gradients of the known rows, of which the band is no part.

        The adjoint of `join`; `lengths` are the numbers of rows of each source but the band.
        """
        totals = [empty_rows_like(grad, dim, length).zero_() for length in lengths]
        first = 0
        for source, start, length in self.segments:
            if source > 0:
                total = totals[source - 1].narrow(dim, start, length)
                total.add_(grad.narrow(dim, first, length))
            first += length
        return totals


@lru_cache(4096)
def find_rows(
    wanted: RowExchange, known: tuple[RowExchange, ...]
) -> tuple[RowExchange | None, Assembly]:
    """Return the exchange of what is missing on any rank, if it is, and where all rows are then."""
    missing = []
    for rank in range(wanted.partition.ranks):
        band = wanted.partition.rows(rank)
        there = set(range(band.start, band.stop)).union(
            *(_plain_rows(exchange.required_rows[rank]) for exchange in known)
        )
        missing.append(_as_ranges(sorted(_plain_rows(wanted.required_rows[rank]) - there)))
    exchange = RowExchange(wanted.partition, tuple(missing), wanted.rank) if any(missing) else None
    sources: dict[int, tuple[int, int]] = {}  # of each row: which source, and where in it
    for i, other in enumerate((*known, *([exchange] if exchange else []))):
        first = 0
        for rows in other.required_rows[wanted.rank]:
            if not rows.zero_filled:
                for offset, row in enumerate(range(rows.start, rows.stop)):
                    sources.setdefault(row, (i + 1, first + offset))
            first += rows.length
    band = wanted.partition.rows(wanted.rank)
    sources.update({row: (0, row - band.start) for row in range(band.start, band.stop)})
    segments: list[_Segment] = []
    for rows in wanted.required_rows[wanted.rank]:
        if rows.zero_filled:
            segments.append(_Segment(-1, 0, rows.length))
            continue
        for row in range(rows.start, rows.stop):
            source, start = sources[row]
            last = segments[-1] if segments else _Segment(-1, 0, 0)
            if (source, start) == (last.source, last.start + last.length):
                segments[-1] = last._replace(length=last.length + 1)
            else:
                segments.append(_Segment(source, start, 1))
    return exchange, Assembly(tuple(segments))


def _plain_rows(ranges: tuple[RowRange, ...]) -> set[int]:
    return {row for r in ranges if not r.zero_filled for row in range(r.start, r.stop)}


def _as_ranges(rows: list[int]) -> tuple[RowRange, ...]:
    """Return sorted rows as ranges."""
    ranges: list[RowRange] = []
    for row in rows:
        if ranges and ranges[-1].stop == row:
            ranges[-1] = ranges[-1]._replace(stop=row + 1)
        else:
            ranges.append(RowRange(row, row + 1))
    return tuple(ranges)


@final
@dataclass
class _Readers:
    """The convolutions that have read the known rows of a field so far."""

    number: int = 0


class FoundRows(NamedTuple):
    """Where the rows that a convolution wants are.

    Attributes:
        assembly: how they are put together from the band and `rows`.
        rows: all rows that are known, with their history; the last ones may be on their way.
        wait: waits for these.
        is_first: whether this convolution has fetched all its rows, as the first of a field.
        readers: of these rows, later ones too.
    """

    assembly: Assembly
    rows: list[Tensor]
    wait: Callable[[], None]
    is_first: bool
    readers: _Readers

    @property
    def has_one_reader(self) -> bool:
        """Whether no other convolution has read rows of the field so far; the same on all ranks."""
        return self.is_first and self.readers.number == 1


@final
class KnownRows:
    """Rows of other bands that this rank has of one tensor, as convolutions have fetched them.

    Args:
        x: this rank's band.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._state = self._current_state()
        self._exchanges: list[RowExchange] = []
        self._rows: list[Tensor] = []
        self._readers = _Readers()

    def is_valid(self, dtype: torch.dtype) -> bool:
        """Return whether the rows are still those of the tensor, in at least this precision."""
        is_precise = all(torch.promote_types(x.dtype, dtype) == x.dtype for x in self._rows)
        return is_precise and self._state == self._current_state()

    def _current_state(self) -> tuple[Any, ...]:
        """Return what must not have changed: values, and what backward reaches.

        Rows that were fetched before `requires_grad_()` return no gradients. Those of a forward are
        not for what its backward pass computes again.
        """
        return (
            version_of(self._x),
            self._x.requires_grad,
            torch.is_grad_enabled(),
            backward_pass(),
        )

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, exchange: RowExchange, rows: Tensor) -> None:
        """Add the rows that a convolution has fetched in an exchange."""
        self._exchanges.append(exchange)
        self._rows.append(rows)
        self._readers.number += 1

    def find(self, wanted: RowExchange, x: Tensor, transport: Transport, dim: int) -> FoundRows:
        """Return where wanted rows are among the band and all known rows; starts to fetch others.

        A collective if a rank misses any. `x` is the band in the precision of the layer.
        """
        is_first = not self
        exchange, assembly = find_rows(wanted, tuple(self._exchanges))
        if exchange is None:
            self._readers.number += 1
            wait = do_nothing
        else:
            rows, wait = fetch_rows_later(x, exchange, transport, dim)
            self.add(exchange, rows)
        known = [rows.to(x.dtype) for rows in self._rows]
        return FoundRows(assembly, known, wait, is_first, self._readers)


def do_nothing() -> None:
    """Wait for nothing."""

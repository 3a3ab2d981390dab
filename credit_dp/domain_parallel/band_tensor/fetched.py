"""Rows of other bands, fetched once for all operators that read one tensor.

The rows that an operator fetches stay with the tensor until it is written to: the next operator
fetches only what is missing, and so does the backward of each. Where several operators have read
the rows, the gradients of these are not sent one by one: they stay with the gradient of the tensor
(`BandTensor.unsent`), which autograd adds up, and are sent once it is read.

All ranks compute what all ranks have and miss, from the same numbers: so they decide alike whether
there is an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.pointwise import pointwise
from credit_dp.domain_parallel.band_tensor.tensor import (
    BandTensor,
    FetchedRows,
    Part,
    Unsent,
    rule_for,
    wrap,
    write_count,
)
from credit_dp.domain_parallel.bands.indices import ranges_of
from credit_dp.domain_parallel.bands.rows import is_wide
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import (
    empty_rows_like,
    return_gradients,
    start_fetching,
)
from credit_dp.torch_private import backward_pass


class _Segment(NamedTuple):
    """Rows of a result: `length` rows of a source from `start` on; zeros if the source is -1."""

    source: int
    start: int
    length: int


@final
@dataclass(frozen=True)
class Assembly:
    """How this rank's rows are put together from what it has: band 0, then the fetched rows."""

    segments: tuple[_Segment, ...]

    def join(self, sources: Sequence[Tensor], dim: int) -> Tensor:
        """Return rows from those of the band, which is the first source, and of exchanges."""
        local = sources[0]
        parts = [
            empty_rows_like(local, dim, length).zero_()
            if source < 0
            else sources[source].narrow(dim, start, length)
            for source, start, length in self.segments
        ]
        if not parts:
            return local.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def band_gradient(self, grad: Tensor, rows: int, dim: int) -> Tensor:
        """Return the part of a gradient that the band has; the adjoint of `join`."""
        starts = accumulate((length for _, _, length in self.segments), initial=0)
        each = zip(self.segments, starts, strict=False)
        own = [(segment, first) for segment, first in each if segment.source == 0]
        if len(own) == 1 and own[0][0].length == rows:
            return grad.narrow(dim, own[0][1], rows)
        total = empty_rows_like(grad, dim, rows).zero_()
        for (_, start, length), first in own:
            total.narrow(dim, start, length).add_(grad.narrow(dim, first, length))
        return total

    def gradients(self, grad: Tensor, lengths: Sequence[int], dim: int) -> list[Tensor]:
        """Return the gradients of the fetched rows, of which the band is no part.

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
    wanted: RowExchange, fetched: tuple[RowExchange, ...]
) -> tuple[RowExchange | None, Assembly]:
    """Return the exchange of what is missing on any rank, if it is, and where all rows are then."""
    missing = []
    for rank in range(wanted.partition.ranks):
        band = wanted.partition.rows(rank)
        there = set(range(band.start, band.stop)).union(
            *(_plain_rows(exchange.required_rows[rank]) for exchange in fetched)
        )
        missing.append(ranges_of(sorted(_plain_rows(wanted.required_rows[rank]) - there)))
    exchange = RowExchange(wanted.partition, tuple(missing), wanted.rank) if any(missing) else None
    sources: dict[int, tuple[int, int]] = {}  # of each row: which source, and where in it
    for i, other in enumerate((*fetched, *([exchange] if exchange else []))):
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


def start_reading(
    x: BandTensor, wanted: RowExchange, keeps_wide: bool = False
) -> Callable[[], Tensor]:
    """Start to fetch the rows of an exchange that are missing; return what waits for all rows.

    A collective if a rank misses any. In contrast to `start_fetching` the rows stay with `x`.

    Args:
        x: a band whose local tensor is up to date.
        keeps_wide: whether to keep rows, too, that take more memory than the band.
    """
    if wanted.is_identity:
        return lambda: x.local
    local, dim = x.local, x.band.dim
    fetched = _fetched_rows(x)
    exchanges, rows = ((), ()) if fetched is None else (fetched.exchanges, fetched.rows)
    missing, assembly = find_rows(wanted, exchanges)
    if fetched is not None:
        fetched.readers += 1
    if missing is None:
        return lambda: assembly.join((local, *rows), dim)
    finish = start_fetching(local, missing, x.domain.transport, dim)

    def read() -> Tensor:
        new = finish()
        if fetched is not None and (keeps_wide or not is_wide(missing)):
            fetched.exchanges = (*exchanges, missing)
            fetched.rows = (*rows, new)
        return assembly.join((local, *rows, new), dim)

    return read


class AvailableRows(NamedTuple):
    """Rows of an exchange that a rank has."""

    assembly: Assembly
    fetched: FetchedRows

    def rows(self, x: BandTensor) -> Tensor:
        """Return the rows."""
        return self.assembly.join((x.local, *self.fetched.rows), x.band.dim)

    @property
    def is_shared(self) -> bool:
        """Return whether several operators have read rows; the same on all ranks."""
        return self.fetched.readers > 1

    def unsent(self, grad: Tensor, dim: int) -> Unsent:
        """Return the gradients of the rows that others own, of all rows' gradients."""
        lengths = [x.shape[dim] for x in self.fetched.rows]
        gradients = self.assembly.gradients(grad, lengths, dim)
        return tuple(zip(self.fetched.exchanges, gradients, strict=True))


def available_rows(x: BandTensor, wanted: RowExchange) -> AvailableRows | None:
    """Return the rows of an exchange if no rank misses any."""
    fetched = _fetched_rows(x)
    if fetched is None:
        return None
    missing, assembly = find_rows(wanted, fetched.exchanges)
    return AvailableRows(assembly, fetched) if missing is None else None


def band_gradient(x: BandTensor, grad: Tensor, wanted: RowExchange) -> Part:
    """Return the gradient of a band from that of the rows of an exchange; a collective.

    Nothing is sent yet if several operators have read rows of the band, and nothing at all if no
    rank needs rows of another one.
    """
    band = x.band
    if wanted.is_identity:
        return Part(grad, band)
    available = available_rows(x, wanted)
    if available is None or (available.fetched.rows and not available.is_shared):
        return Part(return_gradients(grad, wanted, x.domain.transport, band.dim), band)
    own = available.assembly.band_gradient(grad, band.sizes(x.domain.rank), band.dim)
    return Part(own, band, unsent=available.unsent(grad, band.dim))


def _fetched_rows(x: BandTensor) -> FetchedRows | None:
    """Return the rows that are valid, maybe none yet; None where writes are not counted."""
    if x.is_inference():
        return None
    uncounted = x.domain.uncounted
    if uncounted and x.local.untyped_storage() in uncounted:
        return None
    version = write_count(x)
    if x.fetched is None or x.fetched.version != version:
        x.fetched = FetchedRows(version)
    return x.fetched


@rule_for("add.Tensor")
def add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add tensors, as pointwise operators do; gradients, before the ranks send parts of them.

    A gradient is marked if plain tensors are among them, see `parameters.take_share`.
    """
    x, y = args[:2]
    if type(x) is not BandTensor or type(y) is not BandTensor or x.has_plain or y.has_plain:
        total = wrap(func, args, kwargs, pointwise(func, args, kwargs))
        has_plain = isinstance(x, Tensor) and isinstance(y, Tensor)
        total.has_plain = has_plain and backward_pass() >= 0
        return total
    is_sum = (x.unsent or y.unsent) and x.rows == y.rows and x.shape == y.shape and not kwargs
    if not is_sum or x.origin is not None or y.origin is not None:
        return pointwise(func, args, kwargs)
    unsent = {id(exchange): (exchange, grad) for exchange, grad in x.unsent}
    for exchange, grad in y.unsent:
        _, other = unsent.get(id(exchange), (exchange, None))
        unsent[id(exchange)] = exchange, grad if other is None else other + grad
    return Part(x.local + y.local, x.rows, unsent=tuple(unsent.values()))

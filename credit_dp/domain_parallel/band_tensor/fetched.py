"""Rows of other bands, fetched once for all operators that read one tensor.

The rows that an operator fetches stay with the tensor until it is written to: the next operator
fetches only what is missing, and so does the backward of each. Where several operators have read
the rows, the gradients of these are not sent one by one: they stay with the gradient of the tensor
(`BandTensor.unsent`), which autograd adds up, and are sent once it is read.

All ranks compute what all ranks have and miss, from the same numbers: so they decide alike whether
there is an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.pointwise import pointwise
from credit_dp.domain_parallel.band_tensor.tensor import (
    Band,
    BandTensor,
    FetchedRows,
    Part,
    Unsent,
    rule_for,
    write_count,
)
from credit_dp.domain_parallel.bands.rows import is_wide
from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.halo_exchange import (
    empty_rows_like,
    return_gradients,
    start_fetching,
)
from credit_dp.domain_parallel.known_rows import Assembly, find_rows


def start_reading(
    x: BandTensor, wanted: RowExchange, keeps_wide: bool = False
) -> Callable[[], Tensor]:
    """Start to fetch the rows of an exchange that are missing; return what waits for all rows.

    A collective if a rank misses any. In contrast to `start_fetching` the rows stay with `x`.

    Args:
        x: a band whose local tensor is up to date.
        wanted: the rows.
        keeps_wide: whether to keep rows, too, that take more memory than the band.
    """
    assert isinstance(x.rows, Band)
    if wanted.is_identity:
        return lambda: x.local
    local, dim = x.local, x.rows.dim
    fetched = _fetched_rows(x)
    exchanges, rows = ((), ()) if fetched is None else (fetched.exchanges, fetched.rows)
    missing, assembly = find_rows(wanted, exchanges)
    if fetched is not None:
        fetched.readers += 1
    if missing is None:
        return lambda: _join(assembly, (local, *rows), dim)
    finish = start_fetching(local, missing, x.domain.transport, dim)

    def read() -> Tensor:
        new = finish()
        if fetched is not None and (keeps_wide or not is_wide(missing)):
            fetched.exchanges = (*exchanges, missing)
            fetched.rows = (*rows, new)
        return _join(assembly, (local, *rows, new), dim)

    return read


class Known(NamedTuple):
    """Rows of an exchange that a rank has.

    Attributes:
        assembly: how they are put together.
        fetched: what from.
    """

    assembly: Assembly
    fetched: FetchedRows

    def rows(self, x: BandTensor) -> Tensor:
        """Return the rows."""
        assert isinstance(x.rows, Band)
        return _join(self.assembly, (x.local, *self.fetched.rows), x.rows.dim)

    @property
    def is_shared(self) -> bool:
        """Return whether several operators have read rows; the same on all ranks."""
        return self.fetched.readers > 1

    def unsent(self, grad: Tensor, dim: int) -> Unsent:
        """Return the gradients of the rows that others own, of all rows' gradients."""
        lengths = [x.shape[dim] for x in self.fetched.rows]
        gradients = self.assembly.gradients(grad, lengths, dim)
        return tuple(zip(self.fetched.exchanges, gradients, strict=True))


def known_rows(x: BandTensor, wanted: RowExchange) -> Known | None:
    """Return the rows of an exchange if no rank misses any."""
    fetched = _fetched_rows(x)
    if fetched is None:
        return None
    missing, assembly = find_rows(wanted, fetched.exchanges)
    return Known(assembly, fetched) if missing is None else None


def gradient_of_band(x: BandTensor, grad: Tensor, wanted: RowExchange) -> Part:
    """Return the gradient of a band from that of the rows of an exchange; a collective.

    Nothing is sent yet if several operators have read rows of the band, and nothing at all if no
    rank needs rows of another one.
    """
    band = x.rows
    assert isinstance(band, Band)
    if wanted.is_identity:
        return Part(grad, band)
    known = known_rows(x, wanted)
    if known is None or (known.fetched.rows and not known.is_shared):
        return Part(return_gradients(grad, wanted, x.domain.transport, band.dim), band)
    own = _gradient_of_own_rows(known.assembly, grad, band.sizes(x.domain.rank), band.dim)
    return Part(own, band, unsent=known.unsent(grad, band.dim))


def _fetched_rows(x: BandTensor) -> FetchedRows | None:
    """Return the rows that are valid, maybe none yet; None where writes are not counted."""
    if x.is_inference():
        return None
    uncounted = x.domain.uncounted
    if uncounted and x.local.untyped_storage().data_ptr() in uncounted:
        return None
    version = write_count(x)
    if x.fetched is None or x.fetched.version != version:
        x.fetched = FetchedRows(version)
    return x.fetched


def _join(assembly: Assembly, sources: tuple[Tensor, ...], dim: int) -> Tensor:
    """Return rows from those of the band, which is the first source, and of exchanges."""
    local = sources[0]
    parts = [
        empty_rows_like(local, dim, length).zero_()
        if source < 0
        else sources[source].narrow(dim, start, length)
        for source, start, length in assembly.segments
    ]
    if not parts:
        return local.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _gradient_of_own_rows(assembly: Assembly, grad: Tensor, rows: int, dim: int) -> Tensor:
    """Return the part of a band's gradient that this rank has; the adjoint of `_join`."""
    starts = accumulate((length for _, _, length in assembly.segments), initial=0)
    own = [(s, first) for s, first in zip(assembly.segments, starts, strict=False) if s.source == 0]
    if len(own) == 1 and own[0][0].length == rows:
        return grad.narrow(dim, own[0][1], rows)
    total = empty_rows_like(grad, dim, rows).zero_()
    for (_, start, length), first in own:
        total.narrow(dim, start, length).add_(grad.narrow(dim, first, length))
    return total


@rule_for("add.Tensor")
def add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add tensors, as pointwise operators do; gradients, before the ranks send parts of them."""
    x, y = args[:2]
    if type(x) is not BandTensor or type(y) is not BandTensor:
        return pointwise(func, args, kwargs)
    is_sum = (x.unsent or y.unsent) and x.rows == y.rows and x.shape == y.shape and not kwargs
    if not is_sum or x.origin is not None or y.origin is not None:
        return pointwise(func, args, kwargs)
    unsent = {id(exchange): (exchange, grad) for exchange, grad in x.unsent}
    for exchange, grad in y.unsent:
        _, other = unsent.get(id(exchange), (exchange, None))
        unsent[id(exchange)] = exchange, grad if other is None else other + grad
    return Part(x.local + y.local, x.rows, unsent=tuple(unsent.values()))

"""How a tensor of the globe changes its layout: rows are sent, cut, or summed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.strides import describe
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    OtherLayouts,
    Rows,
    ViewOrigin,
    is_partial,
    write_count,
)
from credit_dp.domain_parallel.bands.moves import CutDimension, exchange_blocks
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import (
    return_gradients,
    start_fetching,
    start_returning_gradients,
)
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import keeps_messages
from credit_dp.errors import UserError
from credit_dp.torch_private import backward_pass, is_view, schema_of

Required = tuple[tuple[RowRange, ...], ...]  # for each rank the rows that it needs


@lru_cache(65536)
def exchange_of(bounds: tuple[int, ...], required: Required, rank: int) -> RowExchange:
    """Return the exchange of a rank."""
    return RowExchange(RowPartition(bounds), required, rank)


@lru_cache(4096)
def all_rows(height: int, ranks: int) -> Required:
    """Return that each rank needs all rows."""
    return ((RowRange(0, height),),) * ranks


@lru_cache(4096)
def band_rows(bounds: tuple[int, ...]) -> Required:
    """Return that each rank needs the rows of its band."""
    return tuple((RowRange(a, b),) for a, b in pairwise(bounds))


@lru_cache(4096)
def band_entries(band: Band) -> Required:
    """Return for each rank the entries of its band, of a dimension with others before the rows."""
    starts = range(0, band.size, max(band.height, 1))
    return tuple(
        tuple([RowRange(start + a, start + b) for start in starts if a < b])
        for a, b in pairwise(band.bounds)
    )


@lru_cache(8192)
def unfolded_rows(band: Band, required: Required) -> tuple[Band, Required]:
    """Return bands of one entry after the other, and what ranks require of them.

    Args:
        band: of a dimension that may have other entries before the rows.
        required: entries of that dimension, of which a rank has some in several places. As its
            memory has them in one, entries are counted rank by rank in what is returned.
    """
    if band.outer == 1:
        return band, required
    parts = []  # the first entry and the one after the last, and where the first is
    for outer in range(band.outer):
        for first, stop in pairwise(band.bounds):
            start = outer * band.height + first
            parts.append((start, start + stop - first, band.outer * first + outer * (stop - first)))

    def found(entries: RowRange) -> list[RowRange]:
        if entries.zero_filled:
            return [entries]
        ranges = []
        for start, stop, position in parts:
            a, b = max(entries.start, start), min(entries.stop, stop)
            if a < b:
                moved = a - start + position
                ranges.append(entries._replace(start=moved, stop=moved + b - a))
        return ranges[::-1] if entries.flipped else ranges

    bounds = tuple(bound * band.outer for bound in band.bounds)
    ranges = tuple(tuple(x for entries in each for x in found(entries)) for each in required)
    return Band(band.dim, 1, bounds), ranges


def unfolded(x: Tensor, band: Band, rows: int) -> Tensor:
    """Return a tensor with its rows in the dimension `band.dim`, apart from what is before them."""
    if band.outer == 1:
        return x
    dim = x.ndim + band.dim
    return x.reshape(*x.shape[:dim], band.outer, rows, *x.shape[dim + 1 :])


def folded(x: Tensor, band: Band) -> Tensor:
    """Undo `unfolded`."""
    return x if band.outer == 1 else x.flatten(band.dim - 1, band.dim)


def fetch(x: Tensor, band: Band, required: Required, domain: Domain) -> Tensor:
    """Return the rows that this rank needs of a band's local tensor; a collective."""
    exchange = exchange_of(band.bounds, required, domain.rank)
    if exchange.is_identity:
        return x
    rows = unfolded(x, band, band.sizes(domain.rank))
    return folded(start_fetching(rows, exchange, domain.transport, band.dim)(), band)


def give_back(grad: Tensor, band: Band, required: Required, domain: Domain) -> Tensor:
    """Return a band that gets the sum of what all ranks have for its rows: `fetch`'s adjoint."""
    exchange = exchange_of(band.bounds, required, domain.rank)
    if exchange.is_identity:
        return grad
    rows = unfolded(grad, band, exchange.length)
    return folded(return_gradients(rows, exchange, domain.transport, band.dim), band)


@lru_cache(4096)
def _counted_from_0(band: Band, ndim: int) -> CutDimension:
    return ndim + band.dim, band.outer, RowPartition(band.bounds)


def moved(x: Tensor, have: Band, wanted: Band, domain: Domain) -> Tensor:
    """Return this rank's part of a tensor whose bands move to another dimension; a collective.

    Each rank sends every other one what that one will hold: nothing is gathered.
    """
    source, target = _counted_from_0(have, x.ndim), _counted_from_0(wanted, x.ndim)
    return exchange_blocks(x, source, target, domain.transport)


def whole(x: Any, is_read_again: bool = False) -> Any:
    """Return the globe's tensor; a collective if it is cut or partial. Others as they are.

    Args:
        is_read_again: whether backward needs it, too: see `other_layouts`.
    """
    if type(x) is not BandTensor:
        return x
    refresh(x)
    return x.local if x.rows is WHOLE else _in_layout(x, WHOLE, is_read_again)


def part_or_whole(grad: Any) -> tuple[Tensor, Rows]:
    """Return a gradient for an operator that is linear in it, and how it is held.

    That is this rank's part of a sum, of which the operator's result is a part, or all of it.
    """
    refresh_all(grad)
    return (grad.local, PARTIAL) if is_partial(grad) else (whole(grad), WHOLE)


def _in_layout(x: BandTensor, rows: Rows, is_read_again: bool) -> Tensor:
    others = other_layouts(x)
    found = None if others is None else others.parts.get(rows)
    if found is not None:
        return found
    local = _moved_to(x, rows)
    if others is not None and _is_kept(x, is_read_again):
        others.parts[rows] = local
    return_gradient(x)
    return local


def _moved_to(x: BandTensor, rows: Rows) -> Tensor:
    """Return the local tensor in another layout: rows are sent, or parts are summed up."""
    have, domain = x.rows, x.domain
    if have is PARTIAL:
        if isinstance(rows, Band):  # each rank sums up its rows only
            return give_back(x.local, rows, all_rows(rows.height, domain.ranks), domain)
        return summed_parts(x)
    assert isinstance(have, Band)
    if not isinstance(rows, Band):
        everywhere = fetch(x.local, have, all_rows(have.height, domain.ranks), domain)
        # Views of it, and of its entries in memory, are those of the globe's tensor.
        ordered: Tensor = describe(x).in_order(everywhere)
        return ordered
    if is_same_field(have, rows):
        return fetch(x.local, have, band_rows(rows.bounds), domain)
    if have.dim != rows.dim:
        return moved(x.local, have, rows, domain)
    return fetch(x.local, *unfolded_rows(have, band_entries(rows)), domain)


def summed_parts(x: BandTensor) -> Tensor:
    """Return the sum of all ranks' parts; a collective, of each entry that is repeated once."""
    part = x.local
    for dim, stride in enumerate(x.stride()):  # the globe's: alike on all ranks
        if stride == 0:
            part = part.narrow(dim, 0, min(1, x.shape[dim]))
    total = x.domain.transport.all_reduce(part.contiguous()).expand(x.shape)
    ordered: Tensor = describe(x).in_order(total)
    return ordered


def other_layouts(x: BandTensor) -> OtherLayouts | None:
    """Return what is known of a tensor in other layouts; None if nothing may be kept.

    Autograd saves an operator's operands as they are, and backward would move them again.
    """
    # torch counts no writes in inference; and a part of a model that is computed again with the
    # messages that it kept has to make the same calls as before.
    if x.is_inference() or keeps_messages():
        return None
    uncounted = x.domain.uncounted
    if uncounted and x.local.untyped_storage() in uncounted:
        return None
    version = write_count(x)
    if x.others is None or x.others.version != version:
        x.others = OtherLayouts(version)
    return x.others


def is_held_by(x: BandTensor, local: Tensor) -> bool:
    """Return whether a tensor may hold what `with_rows` has returned of it."""
    has_others = x.others is not None and bool(x.others.parts)
    return local is x.local or x.rows is WHOLE or has_others


def _is_kept(x: BandTensor, is_read_again: bool) -> bool:
    """Return whether a tensor keeps another layout, for as long as it exists.

    Sums of parts, what backward reads again, and in backward gradients: several operators read
    them, and then they are gone.
    """
    if x.rows is PARTIAL or (is_read_again and torch.is_grad_enabled()):
        return True
    return backward_pass() >= 0 and not x.requires_grad


# ---------------------------------------------------------------- gradients of what is moved


class Return(torch.autograd.Function):
    """Move a gradient to other bands where its own gradient may be wanted."""

    @staticmethod
    def forward(ctx: Any, grad: BandTensor, rows: Band) -> BandTensor:
        """Return the same tensor in other bands."""
        return rebanded(grad, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient in whatever layout it is."""
        return grad, None


def return_gradient(x: BandTensor) -> None:
    """Let the gradient of a tensor whose rows are moved come back to its bands.

    What has computed the tensor has saved fields in these bands. A gradient in other ones would be
    moved for each of them, and the fields, too.
    """
    rows = x.rows
    if x.returns or not x.requires_grad or backward_pass() >= 0:
        return
    # Of a view whose base was written torch would compute the node anew, which it can't in here.
    if (is_view(x) and write_count(x) > 0) or x.grad_fn is None:
        return
    if not isinstance(rows, Band):
        return
    x.returns = True

    def returned(grad: Tensor) -> Tensor | None:
        if type(grad) is not BandTensor or grad.rows == rows:
            return None
        if torch.is_grad_enabled():
            return Return.apply(grad, rows)  # type: ignore[no-untyped-call, no-any-return]
        return rebanded(grad, rows)

    x.register_hook(returned)  # type: ignore[no-untyped-call]


def cut(x: Tensor, band: Band, rank: int) -> Tensor:
    """Return this rank's rows of a globe's tensor; a view, unless they are folded below others."""
    a, b = band.bounds[rank], band.bounds[rank + 1]
    rows = unfolded(x, band, band.height).narrow(band.dim, a, b - a)
    return folded(rows, band)


def among_zeros(x: Tensor, band: Band, rank: int) -> Tensor:
    """Return a tensor of the globe's shape with this rank's rows, and zeros in the others."""
    shape = list(x.shape)
    shape[band.dim] = band.size
    result = x.new_zeros(shape)
    # Of rows that are folded below others `cut` returns a copy.
    a, b = band.bounds[rank], band.bounds[rank + 1]
    rows = unfolded(result, band, band.height).narrow(band.dim, a, b - a)
    rows.copy_(unfolded(x, band, b - a))
    return result


def with_rows(x: Any, rows: Rows, domain: Domain, is_read_again: bool = False) -> Tensor:
    """Return the local tensor of a value in another layout: bands or whole.

    A tensor that broadcasts along the rows is not cut. A collective if rows have to be sent, which
    layouts alone decide.

    Args:
        is_read_again: whether backward needs it, too: see `other_layouts`.
    """
    if type(x) is BandTensor:
        refresh(x)
        if x.rows == rows:
            return x.local
        if x.rows is not WHOLE and isinstance(rows, Band) and not broadcasts(x, rows):
            return _in_layout(x, rows, is_read_again)
    local: Tensor = whole(x, is_read_again)
    if not isinstance(rows, Band) or broadcasts(local, rows):
        return local
    return cut(local, rows, domain.rank)


def rebanded(x: BandTensor, rows: Band) -> BandTensor:
    """Return a tensor in other bands; a collective if rows have to be sent."""
    like = describe(x)
    strides = None if 0 in like.strides else like.strides
    local = with_rows(x, rows, x.domain)
    return BandTensor(local if strides is None else like.in_order(local), rows, x.domain, strides)


def is_same_field(a: Band, b: Band) -> bool:
    """Return whether two tensors have their rows in the same places, but for the bounds."""
    return a[:2] == b[:2] and a.height == b.height


def broadcasts(x: Tensor, band: Band) -> bool:
    """Return whether a whole tensor has one entry for all rows."""
    return x.ndim < -band.dim or (x.shape[band.dim] == 1 and band.size != 1)


# ---------------------------------------------------------------- copies that torch takes for views


def refresh(x: BandTensor) -> None:
    """Bring what a rank holds up to date; a collective if something is missing.

    A gradient gets what is unsent. A copy is computed anew if its base was written: all views share
    torch's count of writes.
    """
    if x.unsent:
        unsent, x.unsent = x.unsent, ()
        for exchange, grad in unsent:
            finish = start_returning_gradients(grad, exchange, x.domain.transport, x.band.dim)
            finish(x.local)
    if x.origin is None:
        return
    if not x.is_inference() and (x.seen_version != write_count(x) or _has_uncounted_base(x)):
        compute_again(x)
    if x.is_late:
        origin = _checked(x.origin)
        refresh(origin.base)
        x.local = describe(x).in_order(LOADERS[origin.func](origin))
        x.is_late = False


def refresh_all(*values: Any) -> None:
    """Bring up to date what a rank holds of the tensors of the globe among some values."""
    for x in values:
        if type(x) is BandTensor:
            refresh(x)


def _has_uncounted_base(x: BandTensor) -> bool:
    uncounted, origin = x.domain.uncounted, x.origin
    if not uncounted:
        return False
    while origin is not None and type(origin.base) is BandTensor:
        if origin.is_copy and origin.base.local.untyped_storage() in uncounted:
            return True
        origin = origin.base.origin
    return False


def compute_again(x: BandTensor) -> None:
    """Compute a view from its base, of which it then is a view, or a copy."""
    assert x.origin is not None
    base, func, args, kwargs, part, _ = _checked(x.origin)
    new = BandTensor.__torch_dispatch__(func, (), (base, *args), kwargs)
    if part is not None:
        new = new[part]
    x.local, x.rows, x.seen_version = new.local, new.rows, write_count(x)
    x.origin, x.is_open, x.is_late = new.origin, new.is_open, new.is_late


# What a rank holds of a copy that is late, by the operator that has returned it.
LOADERS: dict[Any, Callable[[ViewOrigin], Tensor]] = {}

# How operators that return views write these to a part of their base, without all of it: they get
# the origin of a view, and its values.
Writer = Callable[[ViewOrigin, BandTensor], None]
WRITERS: dict[Any, Writer] = {}


def write_back(x: BandTensor) -> None:
    """Write what was written to a copy to its base, from which other views are computed anew."""
    origin = x.origin
    if origin is None:
        return
    x.seen_version = write_count(x) + 1  # torch counts the write after it
    x.is_late = False
    if not origin.is_copy:
        write_back(_checked(origin).base)
        return
    # Not to be computed anew.
    values = BandTensor(x.local, x.rows, x.domain)
    refresh(origin.base)
    write = WRITERS.get(origin.func)
    if write is None:
        if overlaps(x.shape, x.stride()):
            raise UserError(
                f"{schema_of(origin.func).name.removeprefix('aten::')}: its result, to which is "
                "written, has entries of a field at several places. Write to a clone() of it."
            )
        write = write_whole
    write(_checked(origin), values)


def write_whole(origin: ViewOrigin, values: BandTensor) -> None:
    """Write a view to its base as one process does; a collective."""
    target = in_memory(origin.base)
    view = origin.func(target, *origin.args, **origin.kwargs)
    (view if origin.part is None else view[origin.part]).copy_(whole(values))
    put(origin.base, target)


def in_memory(x: BandTensor) -> Tensor:
    """Return a copy of the globe's tensor in the memory of one process; a collective."""
    copy: Tensor = describe(x).empty()
    values = whole(x)
    part = copy
    for dim, stride in enumerate(x.stride()):
        if stride == 0:  # entries that are shown several times are written once
            part, values = part.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if x.numel():
        part.copy_(values)
    return copy


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor may have the same entry in memory at several places."""
    last = 0
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and stride <= last:
            return True
        last += (n - 1) * stride
    return False


def _checked(origin: ViewOrigin) -> ViewOrigin:
    """Return where a copy came from."""
    if origin.base.has_changed_shape:
        raise UserError(
            "A field that is a view, or has views, changed its shape in place, by a function as "
            "`transpose_`, and is written to. Use the function without the underscore."
        )
    return origin


def put(x: BandTensor, values: Tensor) -> None:
    """Write values of the globe to a tensor, in its layout and its memory, which views share."""
    if x.is_open:
        BandTensor.prepare_write(None, (x,), {})
    x.others = None
    if x.rows is not PARTIAL:
        x.local.copy_(with_rows(values, x.rows, x.domain))
    else:  # the sum of the ranks' parts
        everywhere = whole(values)
        x.local.zero_()
        if x.domain.rank == 0:
            x.local.copy_(everywhere)
    write_back(x)

"""Indices: entries are read, written and added where the rows are, or rows move once.

Along other dimensions each rank computes on its band. Along the rows, indices that every rank knows
say which rows to send (`bands.indices`). Points, of which rows and columns are named together, are
read from bands of another dimension. What is added at indices with rows is a sum of ranks' parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.filling import BANDS_WRITTEN, at_the_same_place
from credit_dp.domain_parallel.band_tensor.moving import (
    Required,
    all_rows,
    fetch,
    give_back,
    put,
    refresh,
    refresh_all,
    unfolded_rows,
    whole,
    with_rows,
    write_back,
)
from credit_dp.domain_parallel.band_tensor.pointwise import common_rows
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    domain_of,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.values import has_no_data, same_values
from credit_dp.domain_parallel.band_tensor.views import at, copy_to_write, dim_of, take_row
from credit_dp.domain_parallel.bands.indices import (
    is_balanced,
    rank_ranges,
    source_bounds,
    taken_bounds,
)
from credit_dp.torch_private import backward_pass

aten = torch.ops.aten
Indices = list[Any]  # for each dimension a tensor, or None for all entries


class Places(NamedTuple):
    """Where dimensions of a tensor are after it was indexed.

    Attributes:
        dims: those with an index.
        first: where the dimensions of the indices begin in the result.
        shape: of the indices, broadcast against each other.
    """

    dims: tuple[int, ...]
    first: int
    shape: tuple[int, ...]
    ndim: int

    def dim_after(self, dim: int) -> int:
        """Return where a dimension without an index is in the result."""
        before = dim - sum(d < dim for d in self.dims)
        return before if before < self.first else before + len(self.shape)

    def band_after(self, band: Band) -> Band:
        """Return bands of the result, for those of the indices."""
        return at(band, self.first + len(self.shape) + band.dim, self.ndim)


def places(indices: Indices, ndim: int) -> Places:
    """Return where dimensions are after a tensor was indexed."""
    tensors = [i for i in indices if i is not None]
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    shape = torch.broadcast_shapes(*[i.shape for i in tensors])  # type: ignore[no-untyped-call]
    are_neighbours = dims[-1] - dims[0] == len(dims) - 1
    first = dims[0] if are_neighbours else 0
    return Places(dims, first, tuple(shape), ndim - len(dims) + len(shape))


def is_mask(x: Any) -> bool:
    """Return whether an index is a mask."""
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def index_values(index: Any, domain: Domain, size: int = 1) -> Any:
    """Return an index of which all ranks know the values: these decide what is sent.

    A dry run may not know them. Then it counts messages as if the index named all rows of a
    dimension of `size`, in their order; of a mask torch raises that the number of entries depends
    on data.
    """
    local = same_values(index, domain)
    if not isinstance(local, Tensor) or not has_no_data(local):
        return local
    found = None if domain.recorder is None else domain.recorder.value_of(local)
    if found is None and is_mask(local):
        return local
    return torch.arange(local.numel()).view(local.shape) % size if found is None else found


def check_masks(shape: Sequence[int], indices: Indices) -> None:
    """Raise torch's error where a mask has another shape: it does not broadcast."""
    dim = 0
    for index in indices:
        for d, size in enumerate(index.shape if index is not None and is_mask(index) else ()):
            if dim + d < len(shape) and shape[dim + d] != size:
                assert index is not None
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {d} does not match the "
                    f"shape of the indexed tensor {list(shape)} at index {dim + d}"
                )
        dim += index.ndim if index is not None and is_mask(index) else 1


def without_masks(indices: Indices, domain: Domain) -> Indices:
    """Return indices with those of the entries that masks select, on all ranks; a collective."""
    result: Indices = []
    for i in indices:
        if is_mask(i):
            for numbers in index_values(i, domain).nonzero().unbind(1):
                result.append(BandTensor(numbers, WHOLE, domain, numbers.stride()))
        else:
            result.append(i)
    return result


# ---------------------------------------------------------------- rows that an index names


class Taking(NamedTuple):
    """How rows are taken from bands.

    Attributes:
        here: whether all of them are on their rank already.
        required: for each rank the rows that are sent to it, in the order in which ranks hold
            them; None if these are so many that all are sent.
        held: the bands in that order.
    """

    bounds: tuple[int, ...]
    here: bool
    required: Required | None
    held: tuple[int, ...]


# More ranges than that are copied one by one for longer than all rows take to be sent.
MOST_RANGES = 1024
MOST_ENTRIES = 8192  # for which ranges are looked for


def taking(entries: Tensor, rows: Band, bounds: tuple[int, ...] | None, usual: Any) -> Taking:
    """Return how entries of a dimension are taken from bands.

    Args:
        entries: numbers from 0, on the CPU.
        bounds: those in which the entries shall lie; None if that is free.
        usual: the bands of as many entries.
    """
    if len(entries) <= MOST_ENTRIES:
        return taking_few(tuple(entries.tolist()), rows.outer, rows.bounds, bounds, usual)
    if bounds is None and rows.outer == 1 and bool((entries.diff() >= 0).all()):
        here = tuple(torch.searchsorted(entries, torch.tensor(rows.bounds)).tolist())
        if is_balanced(here):
            return Taking(here, True, None, rows.bounds)
    return Taking(bounds or usual, False, None, rows.bounds)


@lru_cache(256)
def taking_few(
    entries: tuple[int, ...], outer: int, source: tuple[int, ...], bounds: Any, usual: Any
) -> Taking:
    """Return the same of entries that are few enough to be a key."""
    if outer == 1:
        bounds = bounds or taken_bounds(entries, source, usual)
        ends = list(pairwise(source))
        parts = [entries[a:b] for a, b in pairwise(bounds)]
        here = all(a <= i < b for part, (a, b) in zip(parts, ends, strict=True) for i in part)
        required = rank_ranges(entries, bounds)
        held = source
    else:
        bounds, here = bounds or usual, False
        band, required = unfolded_rows(Band(-1, outer, source), rank_ranges(entries, bounds))
        held = band.bounds
    are_many = max(map(len, required)) > MOST_RANGES
    return Taking(bounds, here, None if are_many else required, held)


def numbers_from_0(index: Tensor, size: int) -> Tensor:
    """Return an index without negative numbers.

    Raises:
        IndexError: an entry is not in the dimension.
    """
    index = index.long()
    if index.numel() and not bool(((index >= -size) & (index < size)).all()):
        raise IndexError(f"index: an index is out of bounds for dimension with size {size}.")
    return torch.where(index < 0, index + size, index)


def take(local: Tensor, entries: Tensor, rows: Band, how: Taking, domain: Domain) -> Tensor:
    """Return this rank's part of the entries that are taken; a collective if some are sent."""
    dim, own = rows.dim, entries[how.bounds[domain.rank] : how.bounds[domain.rank + 1]]
    if how.here:
        own = own - rows.bounds[domain.rank]
        return local.index_select(dim, own.to(local.device))
    if how.required is not None:
        part = fetch(local, Band(dim, 1, how.held), how.required, domain)
        return part.clone() if part is local else part
    everything = fetch(local, rows, all_rows(rows.height, domain.ranks), domain)
    return everything.index_select(dim, own.to(local.device))


def add_taken(local: Tensor, entries: Tensor, rows: Band, how: Taking, domain: Domain) -> Tensor:
    """Return bands of the sums of what all ranks have for entries: the adjoint of `take`."""
    dim, own = rows.dim, entries[how.bounds[domain.rank] : how.bounds[domain.rank + 1]]
    if how.required is not None and not how.here:
        return give_back(local, Band(dim, 1, how.held), how.required, domain)
    sizes = list(local.shape)
    sizes[dim] = rows.sizes(domain.rank) if how.here else rows.size
    if how.here:
        own = own - rows.bounds[domain.rank]
    sums = local.new_zeros(sizes).index_add_(dim, own.to(local.device), local)
    return sums if how.here else give_back(sums, rows, all_rows(rows.height, domain.ranks), domain)


def own_entries(index: Tensor, rows: Band, rank: int) -> tuple[Tensor, Tensor]:
    """Return which numbers of a vector name entries of this rank, and which those are here."""
    index = numbers_from_0(index, rows.size)
    first, stop = rows.bounds[rank], rows.bounds[rank + 1]
    before, row = index // rows.height, index % rows.height
    own = ((row >= first) & (row < stop)).nonzero().flatten()
    return own, (before * (stop - first) + row - first)[own]


# ---------------------------------------------------------------- reading


@rule_for("index.Tensor", "_unsafe_index.Tensor")
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the entries that indices name."""
    x, indices = args[0], list(args[1])
    domain = domain_of(args)
    if any(map(is_mask, indices)):
        check_masks(x.shape, indices)
        indices = without_masks(indices, domain)
        return BandTensor.__torch_dispatch__(func, (), (x, indices))
    refresh_all(x, *indices)
    where = places(indices, x.ndim)
    if is_band(x) and dim_of(x) not in where.dims:
        local = func(x.local, [whole(i) for i in indices])
        return Part(local, at(x.rows, where.dim_after(dim_of(x)), where.ndim))
    rows = common_rows([i for i in indices if i is not None])
    if not isinstance(rows, Band) and not is_band(x):
        local, layout = (x.local, x.rows) if type(x) is BandTensor else (x, WHOLE)
        return Part(func(local, [whole(i) for i in indices]), layout)
    if not isinstance(rows, Band) and len(where.dims) == 1:
        (dim,) = where.dims
        return index_rows(x, index_values(indices[dim], domain, x.shape[dim]), where)
    if not isinstance(rows, Band):
        # Points: each rank reads those of its part of another dimension, or some points.
        free = [(n, -d) for d, n in enumerate(x.shape) if d not in where.dims and n >= domain.ranks]
        if free:
            dim = -max(free)[1]
            band = Band(dim - x.ndim, 1, domain.bounds(x.shape[dim]))
            domain.note_read(("points", tuple(x.shape), where.dims), x.rows)
            local = func(with_rows(x, band, domain), [whole(i) for i in indices])
            return Part(local, at(band, where.dim_after(dim), where.ndim))
        dim = max(range(len(where.shape)), key=where.shape.__getitem__, default=0)
        if where.shape:
            size = where.shape[dim]
            rows = Band(dim - len(where.shape), 1, domain.bounds(size))
    if not isinstance(rows, Band):
        return Part(func(whole(x), [whole(i) for i in indices]), WHOLE)
    local = func(whole(x), [i if i is None else with_rows(i, rows, domain) for i in indices])
    return Part(local, where.band_after(rows))


def index_rows(x: BandTensor, index: Tensor, where: Places) -> Part:
    """Return the rows that an index of any shape names."""
    rows, domain = x.band, x.domain
    dim = dim_of(x)
    if not index.numel():
        sizes = list(x.local.shape)
        sizes[dim : dim + 1] = index.shape
        return Part(x.local.new_empty(sizes), WHOLE)
    entries = numbers_from_0(index, rows.size).cpu()
    if not index.ndim:
        return Part(take_row(x, int(entries)).squeeze(dim), WHOLE)
    inner = entries.numel() // len(entries)
    usual = domain.bounds(len(entries))
    bounds = None if inner == 1 else tuple(bound * inner for bound in usual)
    entries = entries.flatten()
    how = taking(entries, rows, bounds, usual)
    domain.note_read(index_key(entries, rows.size), rows)
    local = take(x.local, entries, rows, how, domain)
    ends = tuple(bound // inner for bound in how.bounds)
    if index.ndim > 1:
        shape, own = local.shape, ends[domain.rank + 1] - ends[domain.rank]
        local = local.reshape(*shape[:dim], own, *index.shape[1:], *shape[dim + 1 :])
    return Part(local, at(Band(-1, 1, ends), dim, where.ndim))


@rule_for("index_select.default")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the entries of a dimension that a vector names."""
    x, dim, vector = args
    refresh_all(x, vector)
    dim = dim % max(x.ndim, 1)
    if is_band(x):
        if dim == dim_of(x):
            vector = index_values(vector, x.domain, x.shape[dim]).reshape(-1)
            return index_rows(x, vector, Places((dim,), dim, tuple(vector.shape), x.ndim))
        return Part(func(x.local, dim, whole(vector)), x.rows)
    if is_band(vector) and x.ndim:
        return Part(func(whole(x), dim, vector.local), at(vector.rows, dim, x.ndim))
    local, layout = (x.local, x.rows) if type(x) is BandTensor else (x, WHOLE)
    return Part(func(local, dim, whole(vector)), layout)


# ---------------------------------------------------------------- writing


def in_place_on_copy(in_place: Any) -> Any:
    """Return the rule of an operator that writes to a copy of its first argument."""

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = copy_to_write(args[0], domain_of((args, kwargs)))
        BandTensor.__torch_dispatch__(in_place, (), (y, *args[1:]), kwargs)
        return Part(y.local, y.rows)

    return rule


def put_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a tensor that each rank has, or has a part of; a collective for what is cut."""
    x = args[0]
    local = whole(x)
    others = [[whole(i) for i in a] if isinstance(a, list | tuple) else whole(a) for a in args[1:]]
    func(local, *others, **{name: whole(value) for name, value in kwargs.items()})
    if x.rows is PARTIAL:
        put(x, local)
    else:
        write_back(x)
    return x


@rule_for("index_put_.default", "_index_put_impl_.default")
def put_at_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to the entries that indices name, or add to them."""
    x, indices, values = args[0], list(args[1]), args[2]
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if type(x) is not BandTensor:
        return run_whole(func, args, kwargs)
    domain = x.domain
    named = [i for i in indices if i is not None]
    if len(named) == 1 and is_mask(named[0]) and values.numel() == 1 and not adds:
        check_masks(x.shape, indices)
        return fill_masked(x, named[0], len(indices) - 1, values)
    if any(map(is_mask, indices)):
        check_masks(x.shape, indices)
        indices = without_masks(indices, domain)
    refresh_all(x, values, *indices)
    where = places(indices, x.ndim)
    rows = x.rows
    if not isinstance(rows, Band):
        points = point_band(values, indices, where)
        if adds and x.is_open and x.origin is None and points is not None:
            return add_points(x, indices, values, where, points)
        return put_whole(aten.index_put_.default, (x, indices, values, adds), {})
    dim = dim_of(x)
    if dim not in where.dims:
        band = at(rows, where.dim_after(dim), where.ndim)
        aten.index_put_.default(
            x.local, [whole(i) for i in indices], with_rows(values, band, domain), adds
        )
    elif is_taken(values, indices, where) and (adds or rows.outer == 1):
        put_taken(x, index_values(indices[dim], domain, x.shape[dim]), values, where, adds)
    else:
        put_own(x, indices, values, where, adds)
    write_back(x)
    return x


@rule_for("index_put.default", "_unsafe_index_put.default")
def put_on_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a copy; a gradient of a field of which points were read gets its bands."""
    part = in_place_on_copy(aten.index_put_.default)(func, args, kwargs)
    dims = tuple([d for d, i in enumerate(args[1]) if i is not None])
    domain = domain_of((args, kwargs))
    return returned(part, domain.rows_read(("points", tuple(args[0].shape), dims)), domain)


def returned(part: Part, rows: Band | None, domain: Domain) -> Part:
    """Return a gradient in the bands of the field of which an operator has read parts."""
    if rows is None or not isinstance(part.rows, Band):
        return part
    return Part(with_rows(BandTensor(part.local, part.rows, domain), rows, domain), rows)


def fill_masked(x: BandTensor, mask: Tensor, first: int, value: Tensor) -> Any:
    """Fill where a mask of some dimensions is true, of which one is the `first`."""
    mask = mask.to(x.device).to(torch.bool)
    for _ in range(x.ndim - first - mask.ndim):
        mask = mask.unsqueeze(-1)
    masked_fill = aten.masked_fill_.Tensor
    return BandTensor.__torch_dispatch__(masked_fill, (), (x, mask, value.reshape(())))


def point_band(values: Any, indices: Indices, where: Places) -> Band | None:
    """Return in which bands indices are that are added at; None if all ranks have all of them."""
    if not is_band(values):
        rows = common_rows([i for i in indices if i is not None])
        return rows if isinstance(rows, Band) else None
    dim = where.ndim + values.rows.dim - where.first
    count = len(where.shape)
    is_point = 0 <= dim < count and where.shape[dim] == values.rows.size
    return values.rows._replace(dim=dim - count) if is_point else None


def add_points(
    x: BandTensor, indices: Indices, values: Any, where: Places, points: Band
) -> BandTensor:
    """Add values with rows at indices to a tensor that becomes the sum of the ranks' parts."""
    domain = x.domain
    if domain.rank:
        x.local.zero_()
    local = [i if i is None else with_rows(i, points, domain) for i in indices]
    value = with_rows(values, where.band_after(points), domain)
    aten.index_put_.default(x.local, local, value, True)
    x.rows, x.is_open, x.others = PARTIAL, False, None
    return x


def band_to_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Band | None:
    """Return in which bands of a tensor rows of values are written that indices name."""
    x, indices, values = args[0], list(args[1]), args[2]
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not is_band(values) or any(map(is_mask, indices)):
        return None
    refresh(values)
    if not is_band(values):
        return None
    where = places(indices, x.ndim)
    dim = where.ndim + values.rows.dim
    for d in range(x.ndim):
        if d not in where.dims and where.dim_after(d) == dim and x.shape[d] == values.rows.size:
            return at(values.rows, d, x.ndim)
    if not is_taken(values, indices, where):
        return None
    (dim,) = where.dims
    size, domain = x.shape[dim], x.domain
    entries = numbers_from_0(index_values(indices[dim], domain, size), size).cpu().flatten()
    is_gradient = adds and backward_pass() >= 0
    if is_gradient and domain.rows_read(index_key(entries, size)) is None:
        return None  # the gradient of a table that all ranks have: a sum of parts
    _, band = flat_values(values, where)
    return source_band(entries, band, at(band, dim, x.ndim), size, domain)


def index_key(entries: Tensor, size: int) -> Any:
    """Return what says which rows of how many an index names."""
    return "index", size, tuple(entries.tolist()) if len(entries) <= MOST_ENTRIES else len(entries)


def source_band(entries: Tensor, taken: Band, band: Band, size: int, domain: Domain) -> Band:
    """Return in which bands rows were, most likely, that lie in others now.

    Args:
        entries: the rows that lie there.
        taken: the bands in which they lie.
        band: any bands in the dimension of the result.
    """
    read, usual = domain.rows_read(index_key(entries, size)), domain.bounds(size)
    if read is not None and read.outer == 1:
        return band._replace(outer=1, bounds=read.bounds)
    if len(entries) <= MOST_ENTRIES:
        usual = source_bounds(tuple(entries.tolist()), taken.bounds, usual)
    return band._replace(outer=1, bounds=usual)


BANDS_WRITTEN[aten.index_put_.default] = band_to_put
BANDS_WRITTEN[torch.ops.aten._index_put_impl_.default] = band_to_put


def is_taken(values: Any, indices: Indices, where: Places) -> bool:
    """Return whether values have rows for the first dimension of the only index."""
    if len(where.dims) != 1 or not is_band(values) or not where.shape or 0 in where.shape:
        return False
    dim = where.first - where.ndim
    has_all = values.ndim >= -dim and tuple(
        values.shape[values.ndim + dim :][: len(where.shape)]
    ) == tuple(where.shape)
    is_known = not is_band(indices[where.dims[0]])
    return has_all and is_known and values.rows[:2] == (dim, 1)


def flat_values(values: BandTensor, where: Places) -> tuple[Tensor, Band]:
    """Return values with one dimension for those of the index, and their bands."""
    rows, count = values.band, len(where.shape)
    inner = 1
    for size in where.shape[1:]:
        inner *= size
    dim = rows.dim + count - 1
    local = values.local.flatten(rows.dim, dim) if count > 1 else values.local
    return local, Band(dim, 1, tuple(bound * inner for bound in rows.bounds))


def put_taken(x: BandTensor, index: Tensor, values: BandTensor, where: Places, adds: bool) -> None:
    """Write rows of a field to the rows that an index names; a collective."""
    rows, domain = x.band, x.domain
    entries = numbers_from_0(index, rows.size).cpu().flatten()
    local, band = flat_values(values, where)
    if adds:
        how = taking(entries, rows, band.bounds, domain.bounds(len(entries)))
        x.local.add_(add_taken(local, entries, rows._replace(dim=band.dim), how, domain))
        return
    # An entry that is named several times keeps the last value, as it does on one process.
    last = {entry: i for i, entry in enumerate(entries.tolist())}
    named = torch.tensor(sorted(last), dtype=torch.long)
    order = torch.tensor([last[entry] for entry in sorted(last)], dtype=torch.long)
    bounds = tuple(torch.searchsorted(named, torch.tensor(rows.bounds)).tolist())
    part = take(local, order, band, taking(order, band, bounds, bounds), domain)
    first, stop = rows.bounds[domain.rank], rows.bounds[domain.rank + 1]
    own = named[(named >= first) & (named < stop)] - first
    row_index = [*[None] * dim_of(x), own.to(x.device)]
    aten.index_put_.default(x.local, row_index, part)


def put_own(x: BandTensor, indices: Indices, values: Any, where: Places, adds: bool) -> None:
    """Write those of some values to a band whose rows it has; a collective if values are cut."""
    rows, domain = x.band, x.domain
    everywhere = [
        None if i is None else whole(i).to(x.device).expand(where.shape).flatten() for i in indices
    ]
    row_numbers = everywhere[dim_of(x)]
    assert row_numbers is not None
    own, here = own_entries(row_numbers, rows, domain.rank)
    local = [None if i is None else i[own] for i in everywhere]
    local[dim_of(x)] = here
    value = whole(values)
    if value.numel() == 1:
        value = value.reshape(())
    else:
        sizes = [n for d, n in enumerate(x.local.shape) if d not in where.dims]
        sizes[where.first : where.first] = where.shape
        first, stop = where.first, where.first + len(where.shape)
        value = value.expand(sizes)
        value = value.flatten(first, stop - 1) if where.shape else value.unsqueeze(first)
        value = value.index_select(first, own)
    aten.index_put_.default(x.local, local, value, adds)


# ---------------------------------------------------------------- vectors of indices


WRITES_AT_VECTOR = ("index_add", "index_copy", "index_fill", "index_reduce")


@rule_for(
    "index_add_.default", "index_copy_.default", "index_reduce_.default",
    "index_fill_.int_Scalar", "index_fill_.int_Tensor",
)  # fmt: skip
def write_at_vector(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to entries of a dimension that a vector names, or add to them."""
    x, dim, vector, source, *others = args
    if type(x) is not BandTensor or not x.ndim:
        return run_whole(func, args, kwargs)
    refresh_all(x, vector, source)
    domain, dim = x.domain, dim % x.ndim
    rows, is_field = x.rows, isinstance(source, Tensor) and source.ndim == x.ndim
    if not isinstance(rows, Band):
        return put_whole(func, args, kwargs)
    vector = vector if is_band(vector) else index_values(vector, domain, x.shape[dim]).reshape(-1)
    if dim != dim_of(x):
        source = with_rows(source, rows, domain) if is_field else whole(source)
        func(x.local, dim, whole(vector), source, *others, **kwargs)
    elif func is aten.index_add_.default and is_field and is_in_bands_of(source, dim, vector):
        alpha = kwargs.get("alpha", 1)
        entries = numbers_from_0(vector, rows.size).cpu()
        how = taking(entries, rows, source.rows.bounds, domain.bounds(len(entries)))
        x.local.add_(add_taken(source.local, entries, rows, how, domain), alpha=alpha)
    elif (
        func is aten.index_copy_.default
        and is_field
        and rows.outer == 1
        and is_in_bands_of(source, dim, vector)
    ):
        put_taken(x, vector, source, Places((dim,), dim, tuple(vector.shape), x.ndim), False)
    else:
        own, here = own_entries(whole(vector).reshape(-1), rows, domain.rank)
        source = whole(source).index_select(dim, own) if is_field else whole(source)
        func(x.local, dim, here, source, *others, **kwargs)
    write_back(x)
    return x


def is_in_bands_of(x: Any, dim: int, vector: Tensor) -> bool:
    """Return whether a tensor is cut along a dimension that a vector of all ranks names."""
    return is_band(x) and dim_of(x) == dim and x.rows.outer == 1 and not is_band(vector)


def band_at_vector(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Band | None:
    """Return in which bands of a tensor rows are written that a vector names."""
    x, dim, vector, source = args[:4]
    if type(source) is BandTensor and source.ndim == x.ndim:
        refresh(source)
        dim, size = dim % x.ndim, x.shape[dim]
        if is_in_bands_of(source, dim, vector) and isinstance(source.rows, Band):
            entries = numbers_from_0(index_values(vector, x.domain, size).reshape(-1), size).cpu()
            return source_band(entries, source.rows, at(source.rows, dim, x.ndim), size, x.domain)
    return at_the_same_place(args, kwargs)


for name in WRITES_AT_VECTOR:
    for overload in ("default", "int_Scalar", "int_Tensor"):
        if overload in getattr(aten, name).overloads():
            written = getattr(getattr(aten, f"{name}_"), overload)
            rule_for(f"{name}.{overload}")(in_place_on_copy(written))
            BANDS_WRITTEN[written] = band_at_vector

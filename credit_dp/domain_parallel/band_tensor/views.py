"""Views of fields: local views where rows stay where they are, copies where they have to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    LOADERS,
    WRITERS,
    Writer,
    cut,
    fetch,
    put,
    refresh,
    unfolded_rows,
    whole,
    with_rows,
    write_back,
    write_whole,
)
from credit_dp.domain_parallel.band_tensor.pointwise import copy
from credit_dp.domain_parallel.band_tensor.rules import run_whole, short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    RULES,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rule,
    ViewOrigin,
    domain_of,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.bands.indices import (
    rank_ranges,
    sliced_bounds,
)
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import FIELD_DIMS, LARGEST_IMBALANCE, RowPartition
from credit_dp.errors import UserError
from credit_dp.torch_private import backward_pass, schema_of

aten = torch.ops.aten


def view_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for views of bands; other tensors are viewed as they are."""

    def register(rule: Rule) -> Rule:
        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0]
            if type(x) is not BandTensor:
                return run_whole(func, args, kwargs)
            refresh(x)
            if isinstance(x.rows, Band):
                return rule(func, args, kwargs)
            if x.rows is PARTIAL and func is aten.view.dtype:  # bits of parts don't add up
                return run_whole(func, args, kwargs)
            views = func(x.local, *args[1:], **kwargs)
            if isinstance(views, list | tuple):
                return [Part(y, x.rows) for y in views]
            return Part(views, x.rows)

        return rule_for(*names)(call)

    return register


def dim_of(x: BandTensor) -> int:
    """Return the dimension of the rows, from 0."""
    return x.ndim + x.band.dim


def at(band: Band, dim: int, ndim: int) -> Band:
    """Return the same bands in another dimension, given from 0."""
    return band._replace(dim=dim - ndim)


@lru_cache(4096)
def moved_band(func: Any, band: Band, ndim: int, args: Any) -> Band:
    """Return bands whose dimension a function moves, or puts another one beside."""
    # The same function of a tensor of which each dimension has its own size says where they go.
    sizes = func(torch.empty([n + 2 for n in range(ndim)], device="meta"), *args).shape
    return at(band, sizes.index(ndim + band.dim + 2), len(sizes))


@view_rule("permute.default", "transpose.int", "t.default", "unsqueeze.default")
def move_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give dimensions another order, or one more."""
    x, *others = args
    key = tuple([tuple(each) if isinstance(each, list) else each for each in others])
    return Part(func(x.local, *others), moved_band(func, x.rows, x.ndim, key))


@view_rule("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave out dimensions of one entry; a single row is then whole."""
    x = args[0]
    wanted = range(x.ndim) if len(args) == 1 else args[1]
    wanted = [wanted] if isinstance(wanted, int) else list(wanted)
    gone = sorted({d % x.ndim for d in wanted if x.shape[d] == 1})
    if dim_of(x) in gone:
        return Part(func(whole(x), *args[1:]), WHOLE, is_copy=True)
    dim = dim_of(x) - sum(d < dim_of(x) for d in gone)
    local = x.local.squeeze(gone)
    return Part(local, at(x.rows, dim, local.ndim))


@view_rule("expand.default")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat dimensions of one entry; a single row that is repeated is whole."""
    x, sizes = args[0], list(args[1])
    dim = x.rows.dim
    if x.shape[dim] == 1 and sizes[dim] not in (1, -1):
        return Part(whole(x).expand(sizes), WHOLE, is_copy=True)
    sizes[dim] = x.local.shape[dim]
    return Part(x.local.expand(sizes), x.rows)


rule_for("lift.default", "lift_fresh.default")(copy)

# ---------------------------------------------------------------- other shapes


@lru_cache(65536)
def viewed_band(
    shape: tuple[int, ...], band: Band, new: tuple[int, ...]
) -> tuple[Band, int] | None:
    """Return where rows are after a reshape, and of how many rows bands must be multiples.

    None: the rows are not in one dimension then.
    """
    after = prod(shape[len(shape) + band.dim + 1 :])
    block = band.height * after  # entries of all rows
    below = 1
    for dim in reversed(range(len(new))):
        if new[dim] > 1 and below * new[dim] >= block:
            break
        below *= new[dim]
    else:
        return None
    if block % below or new[dim] * below % block:
        return None
    unit = below // gcd(below, after)
    outer = new[dim] * below // block
    bounds = tuple(bound * after // below for bound in band.bounds)
    return Band(dim - len(new), outer, bounds), unit


@lru_cache(65536)
def sizes_before_view(
    shape: tuple[int, ...], new: tuple[int, ...]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the sizes of the dimensions that each dimension of a view is made of.

    There are none if it is made of parts of dimensions: a view of bands of these can't be undone.
    If several dimensions have one size, the one that is made of most counts.

    Returns:
        (size of the dimension, entries of the tensor) -> the sizes.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    numel = prod(shape)

    def note(size: int, before: tuple[int, ...]) -> None:
        if len(before) != 1 or len(found.get((size, numel), before)) == 1:
            found[size, numel] = before

    first = start = 0
    # Groups of old and new dimensions that have the same entries.
    while first < len(shape) or start < len(new):
        stop, end = first, start
        entries = others = 1
        while stop == first or end == start or entries != others:
            if (entries <= others and stop < len(shape)) or end == len(new):
                if stop == len(shape):
                    break
                entries, stop = entries * shape[stop], stop + 1
            else:
                others, end = others * new[end], end + 1
        before = tuple(n for n in shape[first:stop] if n > 1)
        after = [n for n in new[start:end] if n > 1]
        if len(after) == 1:
            note(after[0], before)
        else:
            for n in after:
                note(n, (n,) if len(before) == 1 else ())
        first, start = stop, end
    return found


@view_rule("view.default", "_unsafe_view.default", "_reshape_alias.default")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give entries another shape."""
    x, sizes = args[0], list(args[1])
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // max(1, -prod(sizes))
    shape, new, domain = tuple(x.shape), tuple(sizes), x.domain
    domain.sizes_before.update(sizes_before_view(shape, new))
    rows = folded_as_before(x, new) or band_to_view(shape, x.rows, new, domain.ranks)
    if rows is None:
        with domain.whole_call("view", [x]):
            return cut_anywhere(whole(x).reshape(sizes), domain)
    found = viewed_band(shape, rows, new)
    assert found is not None
    band, unit = found
    if domain.recorder is not None:
        domain.recorder.add_windows(rows.height, unit)
    sizes[band.dim] = band.outer * band.sizes(domain.rank)
    if rows == x.rows:
        # Of every second row, say, a rank may have fewer than those of its memory.
        has_gaps = x.stride(rows.dim) != prod(shape[len(shape) + rows.dim + 1 :])
        if has_gaps and band.outer > rows.outer:
            return Part(x.local.reshape(sizes).clone(), band, is_copy=True)
        return Part(x.local.view(sizes), band)
    return Part(with_rows(x, rows, domain).reshape(sizes), band, is_copy=True)


def folded_as_before(x: BandTensor, new: tuple[int, ...]) -> Band | None:
    """Return bands of folded rows, for the gradient of such a field that is to be unfolded."""
    rows, domain = x.band, x.domain
    height = domain.folds.get(rows.size)
    if height is None or rows.outer > 1 or backward_pass() < 0:
        return None
    band = Band(rows.dim, rows.size // height, domain.bounds(height))
    found = viewed_band(tuple(x.shape), band, new)
    return None if found is None or found[1] > 1 else band


@lru_cache(65536)
def band_to_view(
    shape: tuple[int, ...], band: Band, new: tuple[int, ...], ranks: int
) -> Band | None:
    """Return in which bands rows are in one dimension of a view; None if in none.

    Windows of rows are on one rank each. A few of them would leave ranks without any: then bands
    are in another dimension, in which each rank gets a part of the view. Whole windows come first,
    as they stay where they are in attention, then the largest dimension.
    """
    if 0 in shape:
        return None
    found = viewed_band(shape, band, new)
    with_rows_now = sum(a < b for a, b in pairwise(band.bounds))
    if found is not None and (found[1] == 1 or -(-band.height // found[1]) >= with_rows_now):
        return in_units(band, found[1])
    choices: dict[Band, tuple[bool, int]] = {}
    for dim, size in enumerate(shape):
        other = Band(dim - len(shape), 1, RowPartition.balanced(size, ranks).bounds)
        on_globe = viewed_band(shape, other, new)
        if other.dim == band.dim or on_globe is None or -(-size // on_globe[1]) < ranks:
            continue
        windows = size // on_globe[1]
        are_alike = -(-windows // ranks) * ranks <= LARGEST_IMBALANCE * windows
        choices[in_units(other, on_globe[1])] = (on_globe[1] > 1 and are_alike, size)
    if choices:
        return max(choices, key=choices.__getitem__)
    return None if found is None else in_units(band, found[1])


@lru_cache(8192)
def in_units(band: Band, unit: int) -> Band:
    """Return bands whose bounds are multiples of a number of rows: the nearest ones."""
    if unit == 1 or all(bound % unit == 0 for bound in band.bounds):
        return band
    return band._replace(bounds=RowPartition(band.bounds).moved_to_multiples_of(unit).bounds)


def cut_anywhere(x: Tensor, domain: Domain) -> Part:
    """Return a copy of a globe's tensor with bands in the largest dimension but the last."""
    sizes = [(size, -dim) for dim, size in enumerate(x.shape[:-1]) if size >= domain.ranks]
    if not sizes:
        return Part(x, WHOLE, is_copy=True)
    size, dim = max(sizes)
    band = Band(-dim - x.ndim, 1, domain.bounds(size))
    return Part(cut(x, band, domain.rank), band, is_copy=True)


def writer_for(*names: str) -> Callable[[Writer], Writer]:
    """Register how a copy that torch takes for the view of an operator is written to its base."""

    def register(write: Writer) -> Writer:
        for name in names:
            packet, _, overload = name.partition(".")
            WRITERS[getattr(getattr(aten, packet), overload)] = write
        return write

    return register


@writer_for(
    *("view.default", "_unsafe_view.default", "_reshape_alias.default"),
    *("squeeze.default", "squeeze.dim", "squeeze.dims"),
)
def write_view(origin: ViewOrigin, values: BandTensor) -> None:
    """Write a view of all entries to its base."""
    base, domain = origin.base, values.domain
    rows = None
    if isinstance(values.rows, Band):
        rows = viewed_band(tuple(values.shape), values.rows, tuple(base.shape))
        if rows is not None and any(bound % rows[1] for bound in values.rows.bounds):
            rows = None
    if rows is None:
        values = BandTensor(whole(values).reshape(base.shape), WHOLE, domain)
    else:
        sizes = list(base.shape)
        sizes[rows[0].dim] = rows[0].outer * rows[0].sizes(domain.rank)
        values = BandTensor(values.local.reshape(sizes), rows[0], domain)
    put(base, values)


@writer_for("expand.default")
def write_expanded(origin: ViewOrigin, values: BandTensor) -> None:
    """Write what is shown several times to the single row that it is."""
    local = whole(values)
    for dim, size in enumerate(origin.base.shape[::-1], 1):
        local = local.narrow(-dim, 0, size)
    for _ in range(local.ndim - origin.base.ndim):
        local = local[0]
    put(origin.base, local)


@view_rule("view.dtype")
def view_as_type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Show the memory of entries as other numbers."""
    x = args[0]
    local = func(x.local, *args[1:])
    if local.shape == x.local.shape or x.rows.dim != -1:
        return Part(local, x.rows)
    return run_whole(func, args, kwargs)


@view_rule("view_as_real.default", "view_as_complex.default")
def view_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Show complex numbers as pairs of real ones, and back."""
    x = args[0]
    dim = x.rows.dim + (1 if func is aten.view_as_complex.default else -1)
    if dim == 0:
        return run_whole(func, args, kwargs)
    return Part(func(x.local), x.rows._replace(dim=dim))


# ---------------------------------------------------------------- parts of a dimension


def slice_arguments(args: Sequence[Any], kwargs: dict[str, Any], size: int) -> range:
    """Return the entries that a slice takes."""
    names = ("start", "end", "step")
    given = dict(zip(names, args, strict=False)) | kwargs
    step = given.get("step", 1)
    return range(size)[slice(given.get("start"), given.get("end"), step)]


@view_rule("slice.Tensor")
def slice_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take a part of a dimension."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    kwargs = {name: value for name, value in kwargs.items() if name != "dim"}
    if dim % x.ndim != dim_of(x):
        return Part(func(x.local, dim, *args[2:], **kwargs), x.rows)
    wanted = slice_arguments(args[2:], kwargs, x.shape[dim])
    if len(wanted) == x.shape[dim]:
        return Part(func(x.local, dim), x.rows)
    if not wanted:
        rows = x.rows._replace(outer=1, bounds=(0,) * len(x.rows.bounds))
        return Part(x.local.narrow(dim, 0, 0), rows)
    if x.rows.outer > 1:
        return slice_folded(x, dim, wanted)
    domain, size = x.domain, x.shape[dim]
    part = slice_band(x.local, x.rows, wanted, domain.rank)
    domain.note_read(("slice", size, wanted), x.rows)
    joined = domain.rows_read(("part", size, wanted.start, wanted.stop))
    if wanted.step != 1 or joined is None:
        return part
    # The gradient of a part of a joint field.
    rows = x.rows._replace(bounds=joined.bounds)
    local = with_rows(BandTensor(part.local, part.rows, domain), rows, domain)
    return Part(local, rows, is_copy=rows != part.rows)


def slice_band(local: Tensor, rows: Band, wanted: range, rank: int) -> Part:
    """Take some rows, which stay where they are."""
    bounds = sliced_bounds(rows.bounds, wanted.start, wanted.stop, wanted.step)
    count = bounds[rank + 1] - bounds[rank]
    first = wanted.start + bounds[rank] * wanted.step - rows.bounds[rank]
    stop = first + (count - 1) * wanted.step + 1
    if not count:
        return Part(local.narrow(rows.dim, 0, 0), rows._replace(bounds=bounds))
    part = aten.slice.Tensor(local, rows.dim, first, stop, wanted.step)
    return Part(part, rows._replace(bounds=bounds))


def slice_folded(x: BandTensor, dim: int, wanted: range) -> Part:
    """Take some entries of folded rows; they stay where they are if all rows are, or one copy."""
    rows, domain = x.band, x.domain
    height, here = rows.height, rows.sizes(domain.rank)
    domain.folds[rows.size] = height
    first, last = wanted[0] // height, wanted[-1] // height
    if first == last:
        local = x.local.narrow(dim, first * here, here)
        start = wanted.start - first * height
        inner = range(start, min(start + len(wanted) * wanted.step, height), wanted.step)
        return slice_band(local, rows._replace(outer=1), inner, domain.rank)
    if wanted.step == 1 and wanted.start % height == 0 and wanted.stop % height == 0:
        local = x.local.narrow(dim, first * here, (last + 1 - first) * here)
        return Part(local, rows._replace(outer=last + 1 - first))
    band = Band(rows.dim, 1, domain.bounds(len(wanted)))
    return Part(take_entries(x, tuple(wanted), band.bounds), band, is_copy=True)


def take_entries(x: BandTensor, entries: tuple[int, ...], bounds: tuple[int, ...]) -> Tensor:
    """Return those of some entries of the dimension with rows that are in this rank's band.

    A collective. `bounds` cuts the entries.
    """
    rows = x.band
    return fetch(x.local, *unfolded_rows(rows, rank_ranges(entries, bounds)), x.domain)


@rule_for("slice_backward.default", "select_backward.default")
def slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return zeros around the gradient of a part."""
    grad, shape, dim = args[0], list(args[1]), args[2] % len(args[1])
    refresh(grad)
    domain, rows, size = grad.domain, grad.rows, shape[dim]
    is_select = func is aten.select_backward.default
    if not is_select and grad.shape[dim] == size:  # of all entries
        return Part(grad.local.clone(), rows)
    wanted = range(size)[slice(*args[3:])]
    if is_select:
        wanted = range(args[3] % size, args[3] % size + 1)
    if not isinstance(rows, Band):
        # Of a few rows of a field that all ranks have no rank makes a globe.
        is_field = len(shape) >= FIELD_DIMS and size >= domain.ranks
        if not is_field or grad.numel() * domain.ranks > prod(shape):
            return Part(func(grad.local, shape, *args[2:]), rows)
        band = Band(dim - len(shape), 1, domain.bounds(size))
        everywhere = whole(grad).unsqueeze(dim) if is_select else whole(grad)
        return _among_zeros(
            cut(everywhere, _sliced(band, wanted), domain.rank), band, wanted, domain
        )
    if is_select:
        row_dim = dim_of(grad)
        rows = at(rows, row_dim + (dim <= row_dim), len(shape))
    if dim != len(shape) + rows.dim:
        shape[rows.dim] = rows.outer * rows.sizes(domain.rank)
        return Part(func(grad.local, shape, *args[2:]), rows)
    height = rows.height
    if rows.outer > 1 and wanted.step == 1 and wanted.start % height == size % height == 0:
        here = rows.sizes(domain.rank)
        shape[dim] = size // height * here
        result = grad.local.new_zeros(shape)
        start, length = wanted.start // height * here, grad.local.shape[dim]
        result.narrow(dim, start, length).copy_(grad.local)
        return Part(result, rows._replace(outer=size // height))
    before, height = 0, domain.folds.get(size, size)
    if rows.outer == 1 and wanted and wanted[0] // height == wanted[-1] // height:
        # Only one of the copies of folded rows has a gradient that is not zero.
        before = wanted[0] // height
        first, stop = wanted[0] - before * height, wanted[-1] + 1 - before * height
        wanted = range(first, stop, wanted.step)
    else:
        height = size
    read = domain.rows_read(("slice", height, wanted))
    bounds = domain.bounds(height) if read is None else read.bounds
    band = Band(rows.dim, 1, bounds)
    local = with_rows(grad, _sliced(band, wanted), domain)
    return _among_zeros(local, band, wanted, domain, size // height, before)


def _sliced(band: Band, wanted: range) -> Band:
    bounds = sliced_bounds(band.bounds, wanted.start, wanted.stop, wanted.step)
    return band._replace(bounds=bounds)


def _among_zeros(
    local: Tensor, band: Band, wanted: range, domain: Domain, outer: int = 1, before: int = 0
) -> Part:
    """Return bands of zeros, with what this rank has of some rows of one of several copies."""
    sizes, here = list(local.shape), band.sizes(domain.rank)
    sizes[band.dim] = outer * here
    result = local.new_zeros(sizes)
    copy = result.narrow(band.dim, before * here, here)
    slice_band(copy, band, wanted, domain.rank).local.copy_(local)
    return Part(result, band._replace(outer=outer))


@view_rule("select.int")
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take one entry of a dimension; a row is whole then."""
    x, dim, index = args
    dim %= x.ndim
    if dim != dim_of(x):
        left = dim_of(x) - (dim < dim_of(x))
        return Part(x.local.select(dim, index), at(x.rows, left, x.ndim - 1))
    if not -x.shape[dim] <= index < x.shape[dim]:
        return run_whole(func, args, kwargs)  # torch says what is wrong
    sizes = [n for d, n in enumerate(x.shape) if d != dim]
    return Part(x.local.new_empty(sizes), WHOLE, is_copy=True, is_late=True)


def load_row(origin: ViewOrigin) -> Tensor:
    """Return a row that was selected, on all ranks; a collective."""
    base, (dim, index) = origin.base, origin.args
    dim %= base.ndim
    if not is_band(base):  # any more
        everywhere: Tensor = whole(base)
        return everywhere.select(dim, index)
    return take_row(base, index % base.shape[dim]).select(dim, 0)


LOADERS[aten.select.int] = load_row


def take_row(x: BandTensor, row: int) -> Tensor:
    """Return one entry of the dimension with rows, on all ranks; a collective."""
    rows = x.band
    required = ((RowRange(row, row + 1),),) * x.domain.ranks
    return fetch(x.local, *unfolded_rows(rows, required), x.domain)


@writer_for("select.int", "unbind.int")
def write_row(origin: ViewOrigin, values: BandTensor) -> None:
    """Write one entry of the dimension with rows, which one rank has."""
    base, rows, rank = origin.base, origin.base.rows, values.domain.rank
    if not isinstance(rows, Band):
        write_whole(origin, values)
        return
    named = dict(zip(("dim", "index"), origin.args, strict=False)) | origin.kwargs
    index = origin.part if origin.part is not None else named["index"] % rows.size
    before, row = divmod(index, rows.height)
    local = whole(values)
    if rows.bounds[rank] <= row < rows.bounds[rank + 1]:
        here = before * rows.sizes(rank) + row - rows.bounds[rank]
        base.local.select(rows.dim, here).copy_(local)
    write_back(base)


@view_rule("split.Tensor", "split_with_sizes.default", "unbind.int", "unsafe_split.Tensor")
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take all parts of a dimension."""
    x = args[0]
    is_unbind = func is aten.unbind.int
    place = 1 if is_unbind else 2
    dim = (args[place] if len(args) > place else kwargs.get("dim", 0)) % x.ndim
    if dim != dim_of(x):
        rows = x.rows
        if is_unbind:
            rows = at(rows, dim_of(x) - (dim < dim_of(x)), x.ndim - 1)
        return [Part(y, rows) for y in func(x.local, *args[1:], **kwargs)]
    if is_unbind:
        return [Part(row, WHOLE, is_copy=True) for row in whole(x).unbind(dim)]
    size = x.shape[dim]
    sizes = args[1]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - first) for first in range(0, size, sizes)]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [slice_rows(aten.slice.Tensor, (x, dim, a, b), {}) for a, b in pairwise(edges)]


@rule_for("narrow_copy.default")
def narrow_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a part of a dimension."""
    x, dim, start, length = args
    start = start + x.shape[dim] if start < 0 else start
    if type(x) is not BandTensor or start + length > x.shape[dim]:
        return run_whole(func, args, kwargs)
    part = RULES[aten.slice.Tensor](aten.slice.Tensor, (x, dim, start, start + length), {})
    return Part(part.local.clone(), part.rows)


# ---------------------------------------------------------------- diagonals and triangles


class Diagonal(NamedTuple):
    """Where the entries of a diagonal are among rows.

    Attributes:
        first: the row of the first one; each of the next rows has one.
        offset: of the diagonal in this rank's part.
    """

    first: int
    band: Band
    offset: int


def band_diagonal(
    shape: Sequence[int], rows: Band, offset: int, dims: tuple[int, int], rank: int
) -> Diagonal:
    """Return where the diagonal of two dimensions is, of which one has rows."""
    sizes = [shape[d] for d in dims]
    is_first = dims[0] == len(shape) + rows.dim
    length = max(0, min(sizes[0] + min(offset, 0), sizes[1] - max(offset, 0)))
    first = max(-offset, 0) if is_first else max(offset, 0)
    bounds = tuple(min(max(bound - first, 0), length) for bound in rows.bounds)
    before = rows.bounds[rank]
    return Diagonal(first, Band(-1, 1, bounds), offset + before if is_first else offset - before)


def diagonal_arguments(args: Sequence[Any], kwargs: dict[str, Any], ndim: int) -> tuple[int, ...]:
    """Return the offset and both dimensions of a diagonal, from 0."""
    given = dict(zip(("offset", "dim1", "dim2"), args, strict=False)) | kwargs
    dims = given.get("dim1", 0) % ndim, given.get("dim2", 1) % ndim
    return given.get("offset", 0), *dims


@view_rule("diagonal.default")
def diagonal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the diagonal of two dimensions."""
    x = args[0]
    offset, *dims = diagonal_arguments(args[1:], kwargs, x.ndim)
    if dim_of(x) not in dims:
        dim = dim_of(x) - sum(d < dim_of(x) for d in dims)
        return Part(func(x.local, offset, *dims), at(x.rows, dim, x.ndim - 1))
    if x.rows.outer > 1:
        return run_whole(func, args, kwargs)
    found = band_diagonal(x.shape, x.rows, offset, (dims[0], dims[1]), x.domain.rank)
    return Part(x.local.diagonal(found.offset, *dims), found.band)


@rule_for("diagonal_backward.default")
def diagonal_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return zeros around the gradient of a diagonal."""
    grad, shape = args[0], list(args[1])
    refresh(grad)
    rows, domain = grad.rows, grad.domain
    if not isinstance(rows, Band):
        return Part(func(grad.local, *args[1:]), rows)
    offset, *dims = diagonal_arguments(args[2:], kwargs, len(shape))
    if rows.dim != -1:
        dim = [d for d in range(len(shape)) if d not in dims][dim_of(grad)]
        shape[dim] = grad.local.shape[rows.dim]
        return Part(func(grad.local, shape, *args[2:]), at(rows, dim, len(shape)))
    band = Band(dims[0] - len(shape), 1, domain.bounds(shape[dims[0]]))
    found = band_diagonal(shape, band, offset, (dims[0], dims[1]), domain.rank)
    local = with_rows(grad, found.band, domain)
    shape[dims[0]] = band.sizes(domain.rank)
    return Part(func(local, shape, found.offset, *dims), band)


@rule_for("diag_embed.default")
def diag_embed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return matrices of zeros, with the entries of the last dimension as a diagonal."""
    x, ndim = args[0], args[0].ndim + 1
    refresh(x)
    given = {"dim1": -2, "dim2": -1} | dict(zip(("offset", "dim1", "dim2"), args[1:], strict=False))
    given |= kwargs
    if not isinstance(x.rows, Band):
        return Part(func(x.local, **given), x.rows)
    if x.rows.dim == -1:
        return run_whole(func, args, kwargs)
    dims = {given["dim1"] % ndim, given["dim2"] % ndim}
    dim = [d for d in range(ndim) if d not in dims][dim_of(x)]
    return Part(func(x.local, **given), at(x.rows, dim, ndim))


@rule_for("tril.default", "triu.default", "tril_.default", "triu_.default")
def triangle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep a triangle of matrices."""
    x, offset = args[0], args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    is_in_place = schema_of(func).is_mutable
    if not is_band(x):
        return run_whole(func, args, kwargs)
    refresh(x)
    if not isinstance(x.rows, Band) or (x.rows.outer > 1 and x.rows.dim >= -2):
        return run_whole(func, args, kwargs)
    # The first row of this band is not that of the matrix, nor is the first column.
    before = x.rows.bounds[x.domain.rank]
    offset += {-2: before, -1: -before}.get(x.rows.dim, 0)
    local = func(x.local, offset)
    if not is_in_place:
        return Part(local, x.rows)
    write_back(x)
    return x


# ---------------------------------------------------------------- what is written to parts


PARTS = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


@rule_for("slice_scatter.default", "select_scatter.default", "diagonal_scatter.default")
def write_to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor, and write to a part of the copy."""
    x, source, *others = args
    y = copy_to_write(x, domain_of(args))
    dispatch = BandTensor.__torch_dispatch__
    part = dispatch(PARTS[func], (), (y, *others), kwargs)
    dispatch(aten.copy_.default, (), (part, source))
    return Part(y.local, y.rows)


def copy_to_write(x: Any, domain: Domain) -> BandTensor:
    """Return a copy of a tensor, open if it is or if all ranks have it."""
    local = x
    if type(x) is BandTensor:
        refresh(x)
        local = whole(x) if x.rows is PARTIAL else x.local
    rows = x.rows if is_band(x) else WHOLE
    is_open = is_band(x) and x.is_open
    y = BandTensor(local if is_open else local.clone(), rows, domain, x.stride())
    y.is_open = is_open or (rows is WHOLE and y.ndim > 0)
    return y


@rule_for("set_", "resize_", "resize_as_")
def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse to change memory."""
    raise UserError(
        f"{short_name(func)}: changes the memory of a tensor, which is not that of the globe where "
        "rows are sharded. Use functions that return new tensors."
    )

"""Views of fields: local views where rows stay where they are, copies where they have to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import fetch, refresh, whole, with_rows
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    Rule,
    domain_of,
    rule_for,
)
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import RowPartition

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
            views = func(x.local, *args[1:], **kwargs)
            if isinstance(views, list | tuple):
                return [Part(y, x.rows) for y in views]
            return Part(views, x.rows)

        return rule_for(*names)(call)

    return register


def dim_of(x: BandTensor) -> int:
    """Return the dimension of the rows, from 0."""
    assert isinstance(x.rows, Band)
    return x.ndim + x.rows.dim


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
def sizes_before_view(shape: tuple[int, ...], new: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return of the size of each new dimension the sizes of those that it is made of.

    None if it has parts of dimensions: a view can't be undone of bands of these.
    """
    found: dict[int, tuple[int, ...]] = {}
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
            found[after[0]] = before
        elif len(before) == 1:
            found |= {n: (n,) for n in after}
        else:
            found |= dict.fromkeys(after, ())
        first, start = stop, end
    return found


@view_rule("view.default", "_unsafe_view.default", "_reshape_alias.default")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give entries another shape."""
    x, sizes = args[0], list(args[1])
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // max(1, -prod(sizes))
    x.domain.sizes_before.update(sizes_before_view(tuple(x.shape), tuple(sizes)))
    found = viewed_band(tuple(x.shape), x.rows, tuple(sizes)) if x.numel() else None
    if found is None:
        with x.domain.whole_call("view", [x]):
            return Part(whole(x).reshape(sizes), WHOLE, is_copy=True)
    band, unit = found
    if x.domain.recorder is not None:
        x.domain.recorder.add_windows(x.rows.height, unit)
    local, moves = x.local, any(bound % unit for bound in x.rows.bounds)
    if moves:  # windows of rows: each is on one rank
        domain = x.domain
        bounds = RowPartition.in_multiples_of(x.rows.height, domain.ranks, unit).bounds
        rows = x.rows._replace(bounds=bounds)
        local = with_rows(x, rows, domain)
        found = viewed_band(tuple(x.shape), rows, tuple(sizes))
        assert found is not None
        band = found[0]
    sizes[band.dim] = band.outer * band.sizes(x.domain.rank)
    if moves:
        return Part(local.reshape(sizes), band, is_copy=True)
    return Part(local.view(sizes), band)


# ---------------------------------------------------------------- parts of a dimension


@lru_cache(65536)
def sliced_bounds(bounds: tuple[int, ...], start: int, stop: int, step: int) -> tuple[int, ...]:
    """Return the bands of the rows start, start + step, ... of bands; rows stay where they are."""
    return tuple(len(range(start, min(bound, stop), step)) for bound in bounds)


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
    if x.rows.outer > 1:
        return run_whole(func, args, kwargs)
    rows, domain = x.rows, x.domain
    bounds = sliced_bounds(rows.bounds, wanted.start, wanted.stop, wanted.step)
    count = bounds[domain.rank + 1] - bounds[domain.rank]
    first = wanted.start + bounds[domain.rank] * wanted.step - rows.bounds[domain.rank]
    stop = first + (count - 1) * wanted.step + 1
    local = func(x.local, dim, first, stop, wanted.step) if count else x.local.narrow(dim, 0, 0)
    return Part(local, rows._replace(bounds=bounds))


@rule_for("slice_backward.default", "select_backward.default")
def slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return zeros around the gradient of a part."""
    grad, shape, dim = args[0], list(args[1]), args[2] % len(args[1])
    refresh(grad)
    domain, rows = grad.domain, grad.rows
    if not isinstance(rows, Band):
        return Part(func(grad.local, shape, *args[2:]), rows)
    is_select = func is aten.select_backward.default
    row_dim = dim_of(grad)
    if is_select:
        row_dim += dim <= row_dim
        rows = at(rows, row_dim, len(shape))
    if dim != row_dim:
        shape[row_dim] = rows.outer * rows.sizes(domain.rank)
        return Part(func(grad.local, shape, *args[2:]), rows)
    if rows.outer > 1:
        return run_whole(func, args, kwargs)
    wanted = range(shape[dim])[slice(*args[3:])]
    bounds = domain.bounds(shape[dim])
    inner = sliced_bounds(bounds, wanted.start, wanted.stop, wanted.step)
    local = with_rows(grad, rows._replace(bounds=inner), domain)
    shape[dim] = bounds[domain.rank + 1] - bounds[domain.rank]
    result = local.new_zeros(shape)
    first = wanted.start + inner[domain.rank] * wanted.step - bounds[domain.rank]
    if local.shape[dim]:
        stop = first + (local.shape[dim] - 1) * wanted.step + 1
        aten.slice.Tensor(result, dim, first, stop, wanted.step).copy_(local)
    return Part(result, rows._replace(bounds=bounds))


@view_rule("select.int")
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take one entry of a dimension; a row is whole then."""
    x, dim, index = args
    dim %= x.ndim
    if dim != dim_of(x):
        left = dim_of(x) - (dim < dim_of(x))
        return Part(x.local.select(dim, index), at(x.rows, left, x.ndim - 1))
    if x.rows.outer > 1 or not -x.shape[dim] <= index < x.shape[dim]:
        return run_whole(func, args, kwargs)
    row = index % x.shape[dim]
    required = ((RowRange(row, row + 1),),) * x.domain.ranks
    local = fetch(x.local, x.rows, required, x.domain)
    return Part(local.select(dim, 0), WHOLE, is_copy=True)


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
    if is_unbind or x.rows.outer > 1:
        return run_whole(func, args, kwargs)
    size = x.shape[dim]
    sizes = args[1]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - first) for first in range(0, size, sizes)]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [slice_rows(aten.slice.Tensor, (x, dim, a, b), {}) for a, b in pairwise(edges)]


# ---------------------------------------------------------------- joined


@rule_for("cat.default", "stack.default")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join tensors along a dimension."""
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    domain = domain_of(tensors)
    for x in tensors:
        if type(x) is BandTensor:
            refresh(x)
    bands = [x for x in tensors if type(x) is BandTensor and isinstance(x.rows, Band)]
    if not bands:
        return Part(func([whole(x) for x in tensors], dim), WHOLE)
    first, band = bands[0], bands[0].rows
    assert isinstance(band, Band)
    is_stack = func is aten.stack.default
    ndim = first.ndim + is_stack
    dim %= ndim
    row_dim = dim_of(first)
    if is_stack:
        rows = at(band, row_dim + (dim <= row_dim), ndim)
        return Part(func([with_rows(x, band, domain) for x in tensors], dim), rows)
    # torch takes an empty tensor of one dimension for none.
    tensors = [x for x in tensors if not (x.ndim == 1 and x.numel() == 0 and ndim > 1)]
    if dim != row_dim:
        return Part(func([with_rows(x, band, domain) for x in tensors], dim), band)
    if band.outer > 1 or any(not is_alike(x.rows, band) for x in bands):
        return run_whole(func, args, kwargs)
    bounds = domain.bounds(sum(x.shape[dim] for x in tensors))
    parts, start = [], 0
    for x in tensors:
        inner = tuple(min(max(bound - start, 0), x.shape[dim]) for bound in bounds)
        parts.append(_part(x, band._replace(bounds=inner), domain))
        start += x.shape[dim]
    return Part(func(parts, dim), band._replace(bounds=bounds))


def is_alike(rows: Rows, band: Band) -> bool:
    """Return whether rows are in the same dimension, with as much folded before them."""
    return isinstance(rows, Band) and rows[:2] == band[:2]


def _part(x: Tensor, rows: Band, domain: Domain) -> Tensor:
    """Return this rank's rows, also of a single row, which does not broadcast in a joint field."""
    if type(x) is BandTensor and isinstance(x.rows, Band):
        return with_rows(x, rows, domain)
    first, stop = rows.bounds[domain.rank], rows.bounds[domain.rank + 1]
    return whole(x).narrow(rows.dim, first, stop - first)  # type: ignore[no-any-return]

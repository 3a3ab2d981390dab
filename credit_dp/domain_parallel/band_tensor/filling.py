"""Tensors that a model makes and fills: the first band that is written decides how they are held.

`out = x.new_zeros(...)` is one number, in any bands. Such a tensor is open. Before
`out[..., :5] = x` is written it is cut where the rows of `x` come to lie, and its views, which know
that they are, are computed anew. What is written without bands leaves it open, if it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import compute_again, cut, refresh
from credit_dp.domain_parallel.band_tensor.strides import describe
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.bands.indices import bounds_around
from credit_dp.torch_private import tree_leaves

aten = torch.ops.aten


@rule_for("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
    """Return an open tensor: in the bands of another one where it is as large, or whole."""
    x, sizes = args[0], list(args[1])
    refresh(x)
    values = args[2:]
    if func is aten.new_empty_strided.default:  # the strides are those of the result anyway
        func, values = aten.new_empty.default, ()
    value = func(x.local, [], *values, **kwargs)
    rows = WHOLE
    if is_band(x) and len(sizes) == x.ndim and sizes[x.rows.dim] == x.rows.size:
        rows = x.rows
    return open_part(value, sizes, rows, x.domain)


def open_part(value: Tensor, sizes: Sequence[int], rows: Rows, domain: Domain) -> Part:
    """Return an open tensor that has one number in all entries, without memory for each."""
    sizes = list(sizes)
    if isinstance(rows, Band):
        sizes[rows.dim] = rows.outer * rows.sizes(domain.rank)
    return Part(value.expand(sizes), rows, is_open=bool(sizes))


def is_one_number(local: Tensor) -> bool:
    """Return whether a tensor shows one entry of memory in all places."""
    return all(n == 1 or stride == 0 for n, stride in zip(local.shape, local.stride(), strict=True))


# ---------------------------------------------------------------- before a write

# In which bands of the first argument an operator writes rows of others; None if in none.
FindBand = Callable[[tuple[Any, ...], dict[str, Any]], Band | None]
BANDS_WRITTEN: dict[Any, FindBand] = {}


def at_the_same_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Band | None:
    """Return bands in the dimension of the first argument with rows, counted from the last."""
    x = args[0]
    for y in tree_leaves((args[1:], kwargs)):
        if not is_band(y):
            continue
        refresh(y)
        if is_band(y) and y.ndim <= x.ndim and (y.rows.size > 1 or x.shape[y.rows.dim] == 1):
            return with_height(y.rows, x.shape[y.rows.dim], x.domain)
    return None


def with_height(band: Band, size: int, domain: Domain) -> Band:
    """Return bands of a dimension of any size: those of others if they have as many rows."""
    return band if band.size == size else Band(band.dim, 1, domain.bounds(size))


def lay_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give an open tensor memory of its own before it is written to, and bands if it gets some."""
    x = args[0]
    chain = [x]
    while chain[-1].origin is not None and type(chain[-1].origin.base) is BandTensor:
        chain.append(chain[-1].origin.base)
    root = chain[-1]
    band = None
    if root.is_open:
        band = BANDS_WRITTEN.get(func, at_the_same_place)(args, kwargs)
        band = band and band_of_base(x, band, root)
    is_new, local = is_one_number(root.local), root.local
    if root.is_open and band is not None and band != root.rows:
        if is_new:
            local = open_part(local.as_strided([], []), root.shape, band, root.domain).local
        else:
            local = cut(local, band, root.domain.rank)
        root.rows, root.others = band, None
    elif root.is_open and not is_new:
        return
    if root.is_open:
        hold(root, local)
    for y in chain:
        y.is_open = root.is_open and root.rows is WHOLE
    for y in reversed(chain[:-1]):
        compute_again(y)


def keep_whole(x: BandTensor) -> None:
    """Let an open tensor stay whole: something else shares its memory from now on."""
    if x.is_open:
        lay_out(None, (x,), {})
    root = x
    while root.origin is not None and type(root.origin.base) is BandTensor:
        root = root.origin.base
    close(root)


def close(x: BandTensor) -> None:
    """Let a tensor and its views be whole."""
    x.is_open = False
    for view in list(x.views.values()) if x.views else ():
        if view.origin is not None and view.origin.base is x:
            compute_again(view)
            close(view)


BandTensor.lay_out = staticmethod(lay_out)
BandTensor.keep_whole = staticmethod(keep_whole)


def hold(x: BandTensor, local: Tensor) -> None:
    """Let a tensor hold a copy of a local tensor, ordered as on one process."""
    local = local.clone(memory_format=torch.contiguous_format)
    x.local = describe(x).in_order(local)


def band_of_base(x: BandTensor, band: Band, base: BandTensor) -> Band | None:
    """Return bands of a base whose view has others; None if they are in no dimension of it.

    Strides say which dimension that is, and which part of it the view shows.
    """
    if x is base:
        return band
    stride, count, dims = x.stride(band.dim), x.shape[band.dim], range(base.ndim)
    found = [
        d
        for d in dims
        if count > 1 and base.shape[d] > 1 and 0 < base.stride(d) <= stride
        if stride % base.stride(d) == 0 and stride < base.stride(d) * base.shape[d]
    ]
    if not found:
        return None
    dim = max(found, key=base.stride)
    size, unit = base.shape[dim], base.stride(dim)
    step = stride // unit
    if size == count and step == 1:
        return band._replace(dim=dim - base.ndim)
    first = (int(x.storage_offset()) - int(base.storage_offset())) // unit % size
    if band.outer > 1 or first + (count - 1) * step >= size:
        return None
    usual = base.domain.bounds(size)
    around = bounds_around(band.bounds, first, step, usual)
    return Band(dim - base.ndim, 1, usual if around is None else around)

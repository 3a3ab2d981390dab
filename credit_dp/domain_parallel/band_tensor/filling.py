"""Tensors that a model makes and fills: the first band that is written decides how they are held.

`out = x.new_zeros(...)` is one number, in any bands. Such a tensor is open. Before
`out[..., :5] = x` is written it is cut where the rows of `x` come to lie, and its views, which know
that they are, are computed anew. What is written without bands leaves it open, if it is whole.

`torch.zeros(...)` would be torch's own tensor, which every rank has all of, and which no write can
turn into another one. While a model runs, `OpenTensors` lets it be open, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credit_dp.domain_parallel.band_tensor.fused import FUNCTIONS
from credit_dp.domain_parallel.band_tensor.moving import compute_again, cut, refresh, whole
from credit_dp.domain_parallel.band_tensor.strides import describe
from credit_dp.domain_parallel.band_tensor.tensor import (
    DATA,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    OtherLayouts,
    Part,
    Rows,
    is_band,
    rule_for,
    write_count,
)
from credit_dp.domain_parallel.bands.indices import bounds_around
from credit_dp.torch_private import FakeTensor, tree_leaves

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


# Functions that make a tensor of a shape, whatever the values of others are.
CREATORS = frozenset(
    getattr(place, name)
    for name in (
        *("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    )
    for place in (torch, Tensor)
    if hasattr(place, name)
)
SET_DATA = DATA.__set__


class OpenTensors(TorchFunctionMode):
    """Sees the functions of torch that a model calls: numbers that it makes are open tensors.

    Integers and masks stay torch's own, as indices are. So do tensors that have a gradient, and
    those of torch's own code, as the buffers of data parallelism are.
    """

    def __init__(self, domain: Domain) -> None:
        super().__init__()
        self.domain = domain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and type(args[1]) is BandTensor and type(args[0]) is not BandTensor:
            # torch would let a tensor take memory that a tensor of the globe does not have.
            keep_whole(args[1])
            return func(args[0], whole(args[1]))
        function = FUNCTIONS.get(func, func)
        result = function(*args, **(kwargs or {}))
        is_new = func in CREATORS and not (kwargs and kwargs.get("out") is not None)
        if is_new and type(result) in (Tensor, FakeTensor):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("torch.nn.") or not caller.startswith("torch."):
                return self.opened(result)
        return result

    def opened(self, x: Tensor) -> Tensor:
        """Return a tensor that has one number in all entries as an open one."""
        is_number = x.is_floating_point() or x.is_complex()
        is_dense = x.layout is torch.strided
        if not (is_number and is_dense and x.ndim and x.numel()) or x.requires_grad:
            return x
        value = x.as_strided([], []).clone()  # not the memory of all entries
        y = BandTensor(value.expand(x.shape), WHOLE, self.domain, x.stride())
        y.is_open = True
        return y


_domain: ContextVar[Domain | None] = ContextVar("whose tensors are open", default=None)


@contextmanager
def open_tensors(domain: Domain | None) -> Iterator[None]:
    """Let tensors be open that a model makes inside of the context; no change without a domain."""
    if domain is None:
        yield
        return
    token = _domain.set(domain)
    try:
        with OpenTensors(domain):
            yield
    finally:
        _domain.reset(token)


def open_as_now() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context in which a part of a forward may be computed again."""
    return partial(open_tensors, _domain.get())


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


def prepare_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give an open tensor memory of its own before it is written to, and bands if it gets some."""
    x = args[0]
    chain = [x]
    while chain[-1].origin is not None and type(chain[-1].origin.base) is BandTensor:
        chain.append(chain[-1].origin.base)
    root = chain[-1]
    band = None
    if root.is_open:
        band = BANDS_WRITTEN.get(func, at_the_same_place)(args, kwargs)
        band = band and base_band(x, band, root)
    is_new, local = is_one_number(root.local), root.local
    spectrum = None
    if band is not None and x is not root and root.is_zero and root.dtype.is_complex:
        spectrum = spectrum_band(x, args[1], root)
        band = spectrum or band
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
        root.is_zero = False
        if spectrum is not None:
            note_zeros(root, spectrum, x.shape[spectrum.dim], write_count(root) + 1)
    for y in chain:
        y.is_open = root.is_open and root.rows is WHOLE
    for y in reversed(chain[:-1]):
        compute_again(y)


def spectrum_band(x: BandTensor, values: Any, base: BandTensor) -> Band | None:
    """Return bands of zeros to whose first entries the others of a spectrum are written.

    No entry moves, though one rank gets all of the zeros: the transform that reads them sends none.
    None if it is another view that is written to.
    """
    if not is_band(values) or values.rows.outer > 1 or values.ndim != base.ndim:
        return None
    rows: Band = values.rows
    dim, count = rows.dim, rows.height
    shape = list(base.shape)
    shape[dim] = count
    is_first = x.storage_offset() == base.storage_offset() and x.stride() == base.stride()
    if not is_first or tuple(shape) != x.shape or x.shape != values.shape:
        return None
    return rows._replace(bounds=(*rows.bounds[:-1], base.shape[dim]))


def note_zeros(x: BandTensor, rows: Band, count: int, version: int) -> None:
    """Note that all rows are zero but for the first ones."""
    bounds = (*rows.bounds[:-1], count)
    first = rows._replace(bounds=bounds)
    x.others = OtherLayouts(version)
    x.others.parts[first] = x.local.narrow(rows.dim, 0, first.sizes(x.domain.rank))


def keep_whole(x: BandTensor) -> None:
    """Let an open tensor stay whole: something else shares its memory from now on."""
    if x.is_open:
        prepare_write(None, (x,), {})
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


BandTensor.prepare_write = staticmethod(prepare_write)
BandTensor.keep_whole = staticmethod(keep_whole)


def hold(x: BandTensor, local: Tensor) -> None:
    """Let a tensor hold a copy of a local tensor, ordered as on one process."""
    local = local.clone(memory_format=torch.contiguous_format)
    x.local = describe(x).in_order(local)


def base_band(x: BandTensor, band: Band, base: BandTensor) -> Band | None:
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

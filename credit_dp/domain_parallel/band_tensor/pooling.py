"""Pools and sliding windows, with rows in any dimension: each rank fetches the rows of its windows.

`bands/pooling.py` has the mathematics, which layers use, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.band_tensor.fetched import band_gradient, start_reading
from credit_dp.domain_parallel.band_tensor.moving import (
    exchange_of,
    give_back,
    part_or_whole,
    rebanded,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.rules import (
    named_arguments,
    run_whole,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Part,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.bands.pooling import (
    adaptive_span,
    adaptive_window_rows,
    count_factors,
    first_maximum,
    global_flat_indices,
    has_wrong_gradient,
    local_flat_indices,
    maximum_gradient,
)
from credit_dp.domain_parallel.bands.rows import (
    Windows,
    fill_beyond_poles,
    pad_rows,
    rows_on_globe,
)
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.partition import RowPartition

Sizes = tuple[int, ...]


class NeededRows(NamedTuple):
    """Which rows a rank needs of a band.

    Attributes:
        first, stop: these rows, and those beyond poles.
        factors: by what to multiply averages, see `count_factors`.
    """

    out: Band
    wanted: RowExchange
    first: int
    stop: int
    is_empty: bool
    factors: tuple[float, ...] | None = None


@lru_cache(65536)
def _needed_rows(
    band: Band, out_bounds: Sizes, windows: Windows, fills: bool, counts_padding: bool, rank: int
) -> NeededRows:
    """Return the rows of windows; with zeros beyond the poles, or without if a pool fills them."""
    height = band.height
    outs = [slice(a, b) for a, b in pairwise(out_bounds)]

    def wanted(out: slice) -> tuple[RowRange, ...]:
        if out.start == out.stop:
            return ()
        if fills:
            return rows_on_globe(*windows.span(out), height)
        return windows.rows_between(*windows.span(out), out, height, "zeros")

    exchange = exchange_of(band.bounds, tuple(map(wanted, outs)), rank)
    out = outs[rank]
    factors = None
    if not fills:
        factors = count_factors(windows, out, out_bounds[-1], height, counts_padding)
    is_empty = out.start == out.stop
    first, stop = (0, 0) if is_empty else windows.span(out)
    return NeededRows(band._replace(bounds=out_bounds), exchange, first, stop, is_empty, factors)


def _find_needed_rows(
    x: BandTensor,
    windows: Windows,
    out_height: int,
    fills: bool = False,
    counts_padding: bool = True,
) -> NeededRows:
    band = x.band
    bounds = band.bounds
    if out_height != band.height or windows.stride != 1:
        bounds = x.domain.bounds(out_height)
    return _needed_rows(band, bounds, windows, fills, counts_padding, x.domain.rank)


def _expanded(values: Any, count: int, default: Sequence[int]) -> list[int]:
    found: list[int] = list(values or default)
    return found * count if len(found) == 1 else found


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    refresh_all(*args)
    return named_arguments(func, args, kwargs)


def _columns(x: Tensor, dim: int) -> int:
    return x.shape[dim:][1:].numel()


def _resized(x: Tensor, dim: int, sizes: Sequence[int], rows: int | None = None) -> list[int]:
    """Return the shape of a local tensor with other sizes of the last dimensions, and of rows."""
    shape = [*x.shape[: x.ndim - len(sizes)], *sizes]
    if rows is not None:
        shape[dim] = rows
    return shape


def _in_bands(x: BandTensor, count: int) -> BandTensor:
    band = x.band
    if band.outer == 1 or band.dim < -count:
        return x
    return rebanded(x, Band(band.dim, 1, x.domain.bounds(x.shape[band.dim])))


class Pool(NamedTuple):
    """Settings of a pool, one number for each dimension of the kernel.

    Attributes:
        others: of an average: whether padding counts, and the divisor.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool
    others: tuple[Any, ...] = ()

    @classmethod
    def of(cls, given: dict[str, Any], count: int) -> Pool:
        """Return the settings of a call with so many dimensions of the kernel."""
        kernel = _expanded(given["kernel_size"], count, ())
        is_average = "count_include_pad" in given
        return cls(
            kernel,
            _expanded(given["stride"], count, kernel),
            _expanded(given["padding"], count, [0]),
            _expanded(given.get("dilation"), count, [1]),
            given["ceil_mode"],
            (given["count_include_pad"], given["divisor_override"]) if is_average else (),
        )

    def arguments(self, dim: int | None = None) -> list[Any]:
        """Return what torch's functions take, for rows in `dim` that have their padding."""
        padding = list(self.padding)
        if dim is not None:
            padding[dim] = 0
        dilation = [] if self.others else [self.dilation]
        return [self.kernel, self.stride, padding, *dilation, self.ceil_mode, *self.others]

    def along(self, dim: int) -> Windows:
        """Return the windows along a dimension."""
        return Windows(self.kernel[dim], self.stride[dim], self.padding[dim], self.dilation[dim])

    def out_sizes(self, x: Tensor) -> list[int]:
        """Return the sizes of the result along the dimensions of the kernel."""
        return [
            self.along(dim).out_height(x.shape[dim], self.padding[dim], self.ceil_mode)
            for dim in range(-len(self.kernel), 0)
        ]

    def needed(self, x: BandTensor) -> NeededRows:
        """Return which rows a rank needs of a band."""
        dim, fills = x.band.dim, not self.others
        windows = self.along(dim)
        height = windows.out_height(x.shape[dim], windows.north, self.ceil_mode)
        return _find_needed_rows(x, windows, height, fills, fills or self.others[0])

    def rescaled(self, x: Tensor, needed: NeededRows) -> Tensor:
        """Return averages, or their gradients, divided by the rows that count in their windows."""
        has_divisor = self.others[1] is not None
        if has_divisor or needed.factors is None:
            return x
        factors = cached_constant(list, needed.factors, x.device, x.dtype)
        return x * factors.view(-1, *[1] * (-needed.out.dim - 1))


def _gradient_elsewhere(
    x: Any, count: int, compute: Callable[..., Any], grad: Any, *others: Any
) -> Part | None:
    """Return the gradient of what has no rows in the dimensions of a kernel; else None.

    Args:
        compute: returns a gradient of `grad`, `x` and `others`.
        others: tensors as large as it.
    """
    if not is_band(x):
        local, rows = part_or_whole(grad)
        return Part(compute(local, whole(x), *map(whole, others)), rows)
    if x.rows.dim >= -count:
        return None
    local, *others_here = (with_rows(each, x.rows, x.domain) for each in (grad, *others))
    if x.local.numel() == 0:
        return Part(torch.empty_like(x.local), x.rows)
    return Part(compute(local, x.local, *others_here), x.rows)


# ---------------------------------------------------------------- maxima


def _clamped(span: tuple[int, int, int]) -> list[int]:
    first, stop, height = span
    return [min(max(row, 0), height - 1) for row in range(first, stop)]


@rule_for("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the maxima of windows and their indices into the globe."""
    given = _arguments(func, args, kwargs)
    x, count = given["self"], 3 if func is torch.ops.aten.max_pool3d_with_indices.default else 2
    pool = Pool.of(given, count)
    sizes = pool.out_sizes(x)
    if not is_band(x) or min(sizes) < 1:
        return run_whole(func, args, kwargs)
    x = _in_bands(x, count)
    dim, height = x.band.dim, x.band.height
    if dim < -count:
        if x.local.numel() == 0:
            y = x.local.new_empty(_resized(x.local, dim, sizes))
            return Part(y, x.rows), Part(y.long(), x.rows)
        return tuple(Part(y, x.rows) for y in func(x.local, *pool.arguments()))
    needed = pool.needed(x)
    rows = start_reading(x, needed.wanted)()
    if needed.is_empty:
        y = rows.new_empty(_resized(rows, dim, sizes, 0))
        return Part(y, needed.out), Part(y.long(), needed.out)
    span = needed.first, needed.stop
    lowest = -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    filled = fill_beyond_poles(rows, dim, *span, height, lowest)
    maxima, indices = func(filled, *pool.arguments(dim))
    # A filled row holds the maximum only if all rows of the globe are -inf; clamping then gives
    # the first of these, as in torch.
    globe = cached_constant(_clamped, (*span, height), x.device, torch.int64)
    indices = global_flat_indices(indices, globe, _columns(x, dim), height)
    return Part(maxima, needed.out), Part(indices, needed.out)


@rule_for("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def max_pool_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of what a pool has taken maxima of."""
    given = _arguments(func, args, kwargs)
    grad, x, indices = given["grad_output"], given["self"], given["indices"]
    count = 3 if func is torch.ops.aten.max_pool3d_with_indices_backward.default else 2
    pool = Pool.of(given, count)

    def compute(grad: Tensor, x: Tensor, indices: Tensor) -> Any:
        return func(grad, x, *pool.arguments(), indices)

    x = _in_bands(x, count) if is_band(x) else x
    found = _gradient_elsewhere(x, count, compute, grad, indices)
    if found is not None:
        return found
    dim, height = x.band.dim, x.band.height
    needed = pool.needed(x)
    grad, places = (with_rows(each, needed.out, x.domain) for each in (grad, indices))
    if needed.is_empty:
        return band_gradient(x, x.local.narrow(dim, 0, 0), needed.wanted)
    rows = needed.stop - needed.first
    places = local_flat_indices(places, needed.first, rows, _columns(x, dim), height)
    like = torch.Size(_resized(x.local, dim, (), rows)), memory_format_of(x.local)
    row_grad = maximum_gradient(grad, places, like, pool.arguments(dim))
    cropped = pad_rows(row_grad, dim, min(needed.first, 0), min(height - needed.stop, 0))
    return band_gradient(x, cropped, needed.wanted)


@rule_for("max_unpool2d.default", "max_unpool3d.default")
def max_unpool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put values to indices of their channel, which may be in any row of it: it has to be whole."""
    given = _arguments(func, args, kwargs)
    x, indices = given["self"], given["indices"]
    count = 3 if func is torch.ops.aten.max_unpool3d.default else 2
    band = next((each.rows for each in (x, indices) if is_band(each)), None)
    domain = x.domain if type(x) is BandTensor else indices.domain
    if band is not None and band.dim >= -count:  # all rows of some channels or samples
        size, dim = max((n, -d) for d, n in enumerate(x.shape[:-count]))
        moved = Band(-dim - x.ndim, 1, RowPartition.balanced(size, domain.ranks).bounds)
        band = moved if size >= domain.ranks else None
    if band is None:
        return run_whole(func, args, kwargs)
    values, places = (with_rows(each, band, domain) for each in (x, indices))
    if values.numel() == 0:
        return Part(values.new_empty(_resized(values, band.dim, given["output_size"])), band)
    return Part(func(values, places, *args[2:]), band)


# ---------------------------------------------------------------- averages


@rule_for("avg_pool2d.default", "avg_pool3d.default")
def avg_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the averages of windows."""
    given = _arguments(func, args, kwargs)
    x, count = given["self"], 3 if func is torch.ops.aten.avg_pool3d.default else 2
    pool = Pool.of(given, count)
    sizes = pool.out_sizes(x)
    if not is_band(x) or min(sizes) < 1 or not x.is_floating_point():
        return run_whole(func, args, kwargs)
    x = _in_bands(x, count)
    dim = x.band.dim
    if dim < -count:
        if x.local.numel() == 0:
            return Part(x.local.new_empty(_resized(x.local, dim, sizes)), x.rows)
        return Part(func(x.local, *pool.arguments()), x.rows)
    needed = pool.needed(x)
    rows = start_reading(x, needed.wanted)()
    if needed.is_empty:
        return Part(rows.new_empty(_resized(rows, dim, sizes, 0)), needed.out)
    return Part(pool.rescaled(func(rows, *pool.arguments(dim)), needed), needed.out)


@rule_for("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def avg_pool_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of what a pool has averaged."""
    given = _arguments(func, args, kwargs)
    grad, x = given["grad_output"], given["self"]
    count = 3 if func is torch.ops.aten.avg_pool3d_backward.default else 2
    pool = Pool.of(given, count)

    def compute(grad: Tensor, x: Tensor) -> Any:
        return func(grad, x, *pool.arguments())

    x = _in_bands(x, count) if is_band(x) else x
    found = _gradient_elsewhere(x, count, compute, grad)
    if found is not None:
        return found
    dim, needed = x.band.dim, pool.needed(x)
    grad = with_rows(grad, needed.out, x.domain)
    if needed.is_empty:
        return band_gradient(x, x.local.narrow(dim, 0, 0), needed.wanted)
    settings = pool.arguments(dim)
    # Nothing but the shape is used of the rows.
    shape = _resized(x.local, dim, (), needed.stop - needed.first)
    memory_format = memory_format_of(x.local)
    rows = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    if count == 2 and x.ndim == 4 and any(settings[2]) and has_wrong_gradient(rows):
        rows, grad = rows.contiguous(), grad.contiguous()
    row_grad = func(pool.rescaled(grad, needed), rows, *settings)
    return band_gradient(x, row_grad, needed.wanted)


# ---------------------------------------------------------------- adaptive maxima


@lru_cache(4096)
def _adaptive_rows(band: Band, out_bounds: Sizes, rank: int) -> NeededRows:
    height, out_height = band.height, out_bounds[-1]
    outs = [slice(a, b) for a, b in pairwise(out_bounds)]
    spans = [
        adaptive_span(out, out_height, height) if out.start < out.stop else (0, 0) for out in outs
    ]
    required = tuple((RowRange(*span),) if span[0] < span[1] else () for span in spans)
    exchange = exchange_of(band.bounds, required, rank)
    out = outs[rank]
    return NeededRows(
        band._replace(bounds=out_bounds), exchange, *spans[rank], is_empty=out.start == out.stop
    )


def _find_adaptive_rows(x: BandTensor, out_height: int) -> NeededRows:
    band = x.band
    bounds = band.bounds if out_height == band.height else x.domain.bounds(out_height)
    return _adaptive_rows(band, bounds, x.domain.rank)


@rule_for("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the maxima of as many windows as the result has entries, and their indices."""
    given = _arguments(func, args, kwargs)
    x, count = given["self"], 3 if func is torch.ops.aten.adaptive_max_pool3d.default else 2
    sizes = _expanded(given["output_size"], count, ())
    if not is_band(x) or min(sizes) < 1:
        return run_whole(func, args, kwargs)
    x = _in_bands(x, count)
    dim, height = x.band.dim, x.band.height
    if dim < -count:
        if x.local.numel() == 0:
            y = x.local.new_empty(_resized(x.local, dim, sizes))
            return Part(y, x.rows), Part(y.long(), x.rows)
        return tuple(Part(y, x.rows) for y in func(x.local, sizes))
    if sizes[dim] == 1:
        return _maximum_of_all_rows(func, x, sizes)
    needed = _find_adaptive_rows(x, sizes[dim])
    rows = start_reading(x, needed.wanted)()
    if needed.is_empty:
        y = rows.new_empty(_resized(rows, dim, sizes, 0))
        return Part(y, needed.out), Part(y.long(), needed.out)
    rank = x.domain.rank
    out = slice(needed.out.bounds[rank], needed.out.bounds[rank + 1])
    window_rows = adaptive_window_rows(out, sizes[dim], height)
    globe = cached_constant(list, window_rows, x.device, torch.int64)
    if height % sizes[dim]:  # else the windows do not overlap
        rows = rows.index_select(dim, globe - needed.first)
    sizes[dim] = out.stop - out.start
    maxima, indices = func(rows, sizes)
    indices = global_flat_indices(indices, globe, _columns(x, dim), height)
    return Part(maxima, needed.out), Part(indices, needed.out)


def _maximum_of_all_rows(func: Any, x: BandTensor, sizes: Sequence[int]) -> tuple[Part, Part]:
    band, local = x.band, x.local
    if local.numel():
        maxima, indices = func(local, list(sizes))
        first, stop = band.bounds[x.domain.rank : x.domain.rank + 2]
        globe = torch.arange(first, stop, device=x.device)
        indices = global_flat_indices(indices, globe, _columns(x, band.dim), band.height)
    else:
        maxima = local.new_full(_resized(local, band.dim, sizes), -torch.inf)
        indices = maxima.new_full(maxima.shape, torch.inf, dtype=torch.float64)
    maxima, indices = first_maximum(maxima, indices, x.domain.transport)
    return Part(maxima, WHOLE), Part(indices, WHOLE)


@rule_for("adaptive_max_pool2d_backward.default", "adaptive_max_pool3d_backward.default")
def adaptive_max_pool_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of what an adaptive pool has taken maxima of."""
    given = _arguments(func, args, kwargs)
    grad, x, indices = given["grad_output"], given["self"], given["indices"]
    count = 3 if func is torch.ops.aten.adaptive_max_pool3d_backward.default else 2
    x = _in_bands(x, count) if is_band(x) else x
    found = _gradient_elsewhere(x, count, func, grad, indices)
    if found is not None:
        return found
    dim, height = x.band.dim, x.band.height
    if indices.shape[dim] == 1:
        return _gradient_of_all_rows(func, grad, x, indices)
    needed = _find_adaptive_rows(x, indices.shape[dim])
    grad, places = (with_rows(each, needed.out, x.domain) for each in (grad, indices))
    length = needed.stop - needed.first
    rows = x.local.new_empty(_resized(x.local, dim, (), length))
    if needed.is_empty:
        return band_gradient(x, rows, needed.wanted)
    places = local_flat_indices(places, needed.first, length, _columns(x, dim), height)
    return band_gradient(x, func(grad, rows, places), needed.wanted)


def _gradient_of_all_rows(func: Any, grad: Any, x: BandTensor, indices: Any) -> Part:
    band, local = x.band, x.local
    grad, indices = whole(grad), whole(indices)
    if not local.numel():
        return Part(torch.empty_like(local), band)
    first, stop = band.bounds[x.domain.rank : x.domain.rank + 2]
    columns = _columns(x, band.dim)
    row = indices // columns % band.height
    is_local = (row >= first) & (row < stop)
    places = local_flat_indices(indices, first, stop - first, columns, band.height)
    return Part(func(grad * is_local, local, places.where(is_local, 0)), band)


# ---------------------------------------------------------------- sliding windows


class Image(NamedTuple):
    """Windows of a convolution along rows and columns, of images of one size."""

    rows: Windows
    columns: Windows
    counts: tuple[int, int]

    @classmethod
    def of(cls, given: dict[str, Any], sizes: Sequence[int]) -> Image:
        """Return the windows of a call."""
        names = ("kernel_size", "stride", "padding", "dilation")
        along = [Windows(*values) for values in zip(
            *(_expanded(given[name], 2, ()) for name in names), strict=True
        )]  # fmt: skip
        counts = [w.out_height(n, w.north) for w, n in zip(along, sizes, strict=True)]
        return cls(along[0], along[1], (counts[0], counts[1]))

    @property
    def points(self) -> int:
        """Return the number of points of a window."""
        return self.rows.size * self.columns.size

    def along(self, dim: int) -> Windows:
        """Return the windows along the rows, -2, or along the columns, -1."""
        return self.rows if dim == -2 else self.columns

    def settings(self, dim: int | None) -> tuple[list[int], ...]:
        """Return kernel size, dilation, padding and stride, without padding along a dimension."""
        along = [self.rows, self.columns]
        if dim is not None:
            along[dim] = along[dim]._replace(north=0)
        a, b = along
        return (
            [a.size, b.size],
            [a.dilation, b.dilation],
            [a.north, b.north],
            [a.stride, b.stride],
        )


@rule_for("im2col.default")
def unfold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return all windows of images `([B,] C, H, W)`, one column each."""
    given = _arguments(func, args, kwargs)
    x = given["self"]
    image = Image.of(given, x.shape[-2:])
    if not is_band(x) or min(image.counts) < 1:
        return run_whole(func, args, kwargs)
    x = _in_bands(x, 2)
    band, length = x.band, prod(image.counts)
    if band.dim < -2:
        rows = band._replace(dim=band.dim + 1)
        if band.dim == -3:
            bounds = tuple(bound * image.points for bound in band.bounds)
            rows = rows._replace(bounds=bounds)
        if x.local.numel() == 0:
            *batch, channels = x.local.shape[:-2]
            return Part(x.local.new_empty([*batch, channels * image.points, length]), rows)
        return Part(func(x.local, *image.settings(None)), rows)
    needed = _find_needed_rows(x, image.along(band.dim), image.counts[band.dim])
    local = start_reading(x, needed.wanted)()
    if band.dim == -2:
        bounds = tuple(bound * image.counts[1] for bound in needed.out.bounds)
        rows = Band(-1, 1, bounds)
    else:
        rows = Band(-1, image.counts[0], needed.out.bounds)
    if needed.is_empty:
        *batch, channels = x.local.shape[:-2]
        return Part(x.local.new_empty([*batch, channels * image.points, 0]), rows)
    return Part(func(local, *image.settings(band.dim)), rows)


@rule_for("col2im.default")
def fold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sums of windows `([B,] C * points, windows)` as images."""
    given = _arguments(func, args, kwargs)
    x, sizes = given["self"], _expanded(given["output_size"], 2, ())
    image = Image.of(given, sizes)
    if not is_band(x) or min(image.counts) < 1 or x.shape[-1] != prod(image.counts):
        return run_whole(func, args, kwargs)
    if x.rows.dim == -1:
        return _fold_rows(func, x, image, sizes)
    band, points = x.rows, image.points
    if band.dim == -2:
        # A channel of the images is on one rank.
        if band.height % points:
            band = Band(-2, 1, (*x.domain.bounds(x.shape[-2])[:-1], x.shape[-2]))
        if any(bound % points for bound in band.bounds):
            channels = RowPartition.in_multiples_of(band.height, x.domain.ranks, points)
            band = band._replace(bounds=channels.bounds)
        x = rebanded(x, band)
        band = band._replace(bounds=tuple(bound // points for bound in band.bounds))
    local, rows = x.local, band._replace(dim=band.dim - 1)
    if local.numel() == 0:
        *batch, count = local.shape[:-1]
        return Part(local.new_empty([*batch, count // points, *sizes]), rows)
    return Part(func(local, sizes, *image.settings(None)), rows)


def _fold_rows(func: Any, x: BandTensor, image: Image, sizes: Sequence[int]) -> Part:
    """Return the sums of windows of which each rank has some along rows, or along columns."""
    band, domain = x.band, x.domain
    height, width = image.counts
    if (band.outer, band.height) == (height, width):
        dim, bounds, local = -1, band.bounds, x.local
    else:
        if band.outer > 1 or any(bound % width for bound in band.bounds):
            units = RowPartition.in_multiples_of(x.shape[-1], domain.ranks, width)
            band = Band(-1, 1, units.bounds)
        dim, bounds = -2, tuple(bound // width for bound in band.bounds)
        local = with_rows(x, band, domain)
    windows = image.along(dim)
    target = Band(dim, 1, domain.bounds(sizes[dim]))
    if sizes[dim] == bounds[-1] and windows.stride == 1:
        target = target._replace(bounds=bounds)
    required, length = _rows_of_windows(bounds, windows, sizes[dim], domain.rank)
    local_sizes = list(sizes)
    local_sizes[dim] = length
    if length:
        local = func(local, local_sizes, *image.settings(dim))
    else:
        *batch, channels = local.shape[:-1]
        local = local.new_empty([*batch, channels // image.points, *local_sizes])
    return Part(give_back(local, target, required, domain), target)


@lru_cache(4096)
def _rows_of_windows(
    bounds: Sizes, windows: Windows, height: int, rank: int
) -> tuple[tuple[tuple[RowRange, ...], ...], int]:
    required = []
    for a, b in pairwise(bounds):
        out = slice(a, b)
        rows = windows.rows_between(*windows.span(out), out, height, "zeros") if a < b else ()
        required.append(rows)
    return tuple(required), sum(rows.length for rows in required[rank])

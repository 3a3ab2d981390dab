"""Convolutions and their gradients, with rows in any spatial dimension or in the batch.

Where the kernel reaches as far north as south of each row, large bands are convolved while their
halo travels; otherwise the rows under the kernel are fetched first. `bands/convolutions.py`
computes both, as it does for layers; `fetched.py` keeps the rows for other convolutions of the same
tensor and for gradients. Each rank's gradient of the weight is a part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.fetched import (
    AvailableRows,
    available_rows,
    band_gradient,
    start_reading,
)
from credit_dp.domain_parallel.band_tensor.moving import (
    exchange_of,
    fetch,
    part_or_whole,
    rebanded,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    Band,
    BandTensor,
    Domain,
    Part,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.bands.convolutions import (
    NO_PADDING,
    ConvSettings,
    Halo,
    TransposedRows,
    band_gradients,
    convolve_transposed,
    convolve_with_halo,
    transposed_rows,
    transposed_span,
)
from credit_dp.domain_parallel.bands.rows import Windows, pad_rows
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import empty_rows_like
from credit_dp.domain_parallel.layers import base

Sizes = tuple[int, ...]
Mask = tuple[bool, bool, bool]
NO_ROWS: tuple[RowRange, ...] = ()


class Settings(NamedTuple):
    """Settings of a convolution, one number for each spatial dimension."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int

    @classmethod
    def of(cls, values: Sequence[Any], ndim: int) -> Settings:
        """Return settings as an operator takes them, where one number may stand for all."""
        stride, padding, dilation, transposed, output_padding, groups = values
        stride, padding, dilation, output_padding = (
            tuple(x) * ndim if len(x) == 1 else tuple(x)
            for x in (stride, padding, dilation, output_padding)
        )
        return cls(stride, padding, dilation, transposed, output_padding, groups)

    def along_rows(self, taps: int, dim: int) -> Windows:
        """Return the windows of a kernel with so many taps along the rows."""
        return Windows(taps, self.stride[dim], self.padding[dim], self.dilation[dim])

    def out_size(self, size: int, taps: int, dim: int) -> int:
        """Return the size of the result along a spatial dimension."""
        windows = self.along_rows(taps, dim)
        if not self.transposed:
            return windows.out_height(size, windows.north)
        extra = windows.extent + self.output_padding[dim] - 2 * windows.north
        return (size - 1) * windows.stride + extra

    def with_rows(self, dim: int, padding: int, output_padding: int = 0) -> Settings:
        """Return settings with other padding along the rows."""
        values, outer = list(self.padding), list(self.output_padding)
        values[dim], outer[dim] = padding, output_padding
        return self._replace(padding=tuple(values), output_padding=tuple(outer))


class NeededRows(NamedTuple):
    """How a rank convolves a band.

    Attributes:
        wanted: all rows that this rank's result depends on.
        cut: of a transposed convolution: where the result is in what these rows reach.
        halo: the rows beside the band, if it can be convolved while they travel.
    """

    out: Band
    wanted: RowExchange
    settings: Settings
    cut: TransposedRows | None
    halo: RowExchange | None
    halo_settings: ConvSettings
    is_empty: bool


@lru_cache(65536)
def _needed_rows(
    band: Band, out_bounds: Sizes, settings: Settings, taps: int, rank: int
) -> NeededRows:
    dim, height = band.dim, band.height
    windows = settings.along_rows(taps, dim)
    outs = [slice(a, b) for a, b in pairwise(out_bounds)]
    out, is_empty = outs[rank], outs[rank].start == outs[rank].stop
    cut = None
    if settings.transposed:
        inner = settings.with_rows(dim, 0)
        if not is_empty:
            cut = transposed_rows(windows, out.start, out.stop, height)
            inner = settings.with_rows(dim, cut.padding, cut.output_padding)

        def wanted(out: slice) -> tuple[RowRange, ...]:
            return (RowRange(*transposed_span(windows, out, height)),)
    else:
        inner = settings.with_rows(dim, 0)

        def wanted(out: slice) -> tuple[RowRange, ...]:
            return windows.rows_between(*windows.span(out), out, height, "zeros")

    required = tuple(wanted(each) if each.start < each.stop else NO_ROWS for each in outs)
    exchange = exchange_of(band.bounds, required, rank)
    stride, padding, dilation = settings[:3]
    halo_settings = ConvSettings(stride, padding, dilation, settings.groups, dim)
    halo = None
    if _can_overlap(windows, settings.transposed, band.bounds, out_bounds):
        halo = exchange_of(band.bounds, tuple(_halo(windows, each, height) for each in outs), rank)
    return NeededRows(
        band._replace(bounds=out_bounds), exchange, inner, cut, halo, halo_settings, is_empty
    )


def _can_overlap(windows: Windows, transposed: bool, bounds: Sizes, out_bounds: Sizes) -> bool:
    """Return whether bands can be convolved while their halo travels."""
    is_symmetric = windows.stride == 1 and 2 * windows.north == windows.extent - 1 > 0
    has_rows = all(a < b for a, b in pairwise(bounds))
    return is_symmetric and has_rows and not transposed and bounds == out_bounds


def _halo(windows: Windows, out: slice, height: int) -> tuple[RowRange, ...]:
    first, stop = windows.span(out)
    north = windows.rows_between(first, out.start, out, height, "zeros")
    return (*north, *windows.rows_between(out.stop, stop, out, height, "zeros"))


def _find_needed_rows(x: BandTensor, weight: Tensor, settings: Settings) -> NeededRows | None:
    band = x.band
    taps = weight.shape[band.dim]
    height = settings.out_size(band.height, taps, band.dim)
    if height < 1 or band.height < 1:
        return None
    bounds = band.bounds
    if height != band.height or settings.stride[band.dim] != 1:
        bounds = x.domain.bounds(height)
    return _needed_rows(band, bounds, settings, taps, x.domain.rank)


def _is_small(x: BandTensor) -> bool:
    band = x.band
    largest = max(b - a for a, b in zip(band.bounds, band.bounds[1:], strict=False))
    return x.numel() // band.height * largest <= base.SMALL_BAND_ENTRIES


def _in_spatial_bands(x: Any) -> Any:
    """Return bands of channels, or with folded rows, in bands of a spatial dimension.

    Bands of samples and other tensors stay as they are.
    """
    if not is_band(x) or x.ndim + x.rows.dim == 0:
        return x
    is_spatial = x.ndim + x.rows.dim > 1
    if is_spatial and x.rows.outer == 1:
        return x
    dim = x.rows.dim if is_spatial else -min(2, x.ndim - 2)
    return rebanded(x, Band(dim, 1, x.domain.bounds(x.shape[dim])))


def _is_local(x: BandTensor) -> bool:
    return isinstance(x.rows, Band) and x.ndim + x.rows.dim == 0


def _sizes_of_result(x: Tensor, weight: Tensor, settings: Settings) -> list[int]:
    channels = weight.shape[1] * settings.groups if settings.transposed else weight.shape[0]
    spatial = range(2 - x.ndim, 0)
    sizes = [settings.out_size(x.shape[d], weight.shape[d], d) for d in spatial]
    return [x.shape[0], channels, *sizes]


# ---------------------------------------------------------------- forward


@rule_for("convolution.default", "convolution_overrideable.default")
def convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convolve bands, or samples."""
    x, weight, bias, *values = args
    refresh_all(x, weight)
    settings = Settings.of(values, x.ndim - 2)
    if is_band(x) and is_band(weight):
        found = _contract_rows(func, x, weight, bias, settings)
        if found is not None:
            return found
    x = _in_spatial_bands(x)
    if not is_band(x):
        return run_whole(func, args, kwargs)
    weight, bias = whole(weight), whole(bias)
    if _is_local(x):
        if x.local.shape[0] == 0:
            return Part(x.local.new_empty(_sizes_of_result(x.local, weight, settings)), x.rows)
        return Part(func(x.local, weight, bias, *settings), x.rows)
    needed = _find_needed_rows(x, weight, settings)
    if needed is None:
        return run_whole(func, args, kwargs)
    return Part(_convolve(func, x, weight, bias, needed), needed.out)


def _convolve(
    func: Any, x: BandTensor, weight: Tensor, bias: Tensor | None, needed: NeededRows
) -> Tensor:
    dim, is_small = needed.out.dim, _is_small(x)
    if needed.halo is not None and not is_small:
        finish = start_reading(x, needed.halo)
        halo = Halo(needed.halo, x.domain.transport, NO_PADDING, dim)
        y, _ = convolve_with_halo(x.local, weight, bias, needed.halo_settings, halo, finish)
        return y
    rows = start_reading(x, needed.wanted, keeps_wide=is_small)()
    if needed.is_empty:
        sizes = _sizes_of_result(x, weight, needed.settings)
        sizes[dim] = 0
        return rows.new_empty(sizes)
    if needed.cut is None:
        y = func(rows, weight, bias, *needed.settings)
        assert isinstance(y, Tensor)
        return y

    def convolve(bias: Tensor | None) -> Tensor:
        return func(rows, weight, bias, *needed.settings)  # type: ignore[no-any-return]

    return convolve_transposed(convolve, bias, needed.cut, dim, x.ndim - 2)


def _contract_rows(
    func: Any, x: BandTensor, weight: BandTensor, bias: Any, settings: Settings
) -> Part | None:
    """Return a convolution with a kernel that has rows, too, as the gradient of a gradient has.

    Each rank computes the part of the sum that its rows of the kernel have. None if the rows of
    both do not meet.
    """
    rows, taps, domain = x.band, weight.band, x.domain
    if settings.transposed or settings.groups != 1 or rows.outer != 1 or taps.outer != 1:
        return None
    dim, first, stop = rows.dim, *taps.bounds[domain.rank : domain.rank + 2]
    sizes = _sizes_of_result(x, weight, settings)
    if dim != taps.dim or x.ndim + dim < 1:
        return None
    if x.ndim + dim == 1:  # rows are channels of both
        local = with_rows(x, taps, domain)
        inner = settings
    else:
        if sizes[dim] < 1:
            return None
        required = _rows_under_taps(taps.bounds, rows.height, settings, dim, sizes[dim])
        local = fetch(x.local, rows, required, domain)
        inner = settings.with_rows(dim, 0)
    bias = whole(bias)
    if domain.rank > 0:  # added once
        bias = None
    if first == stop:
        y = local.new_zeros(sizes)
        return Part(y if bias is None else y + bias.reshape(-1, *(1,) * (x.ndim - 2)), PARTIAL)
    return Part(func(local, weight.local, bias, *inner), PARTIAL)


@lru_cache(4096)
def _rows_under_taps(
    bounds: Sizes, height: int, settings: Settings, dim: int, out_height: int
) -> tuple[tuple[RowRange, ...], ...]:
    """Return for each rank the rows under its taps, for all rows of the result."""
    required = []
    for a, b in pairwise(bounds):
        # A kernel of the rank's taps alone begins at its first one.
        windows = settings.along_rows(b - a, dim)
        windows = windows._replace(north=windows.north - a * windows.dilation)
        out = slice(0, out_height)
        rows = windows.rows_between(*windows.span(out), out, height, "zeros") if a < b else ()
        required.append(rows)
    return tuple(required)


# ---------------------------------------------------------------- backward


@rule_for("convolution_backward.default")
def convolution_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of input, weight and bias."""
    grad, x, weight, bias_sizes, *values, needs = args
    refresh_all(grad, x, weight)
    settings = Settings.of(values, x.ndim - 2)

    def compute(grad: Tensor, x: Tensor, settings: Settings, needs: Sequence[bool]) -> Any:
        return func(grad, x, weight, bias_sizes, *settings, list(needs))

    domain = next(each.domain for each in (grad, x, weight) if type(each) is BandTensor)
    x = _in_spatial_bands(x)
    if not is_band(x):
        if is_band(weight):
            return run_whole(func, args, kwargs)
        x = _cut_like(grad, x, domain)
    weight = whole(weight)
    if not is_band(x):
        local, rows = part_or_whole(grad)
        return [_part(part, rows) for part in compute(local, whole(x), settings, needs)]
    if _is_local(x):
        local = with_rows(grad, x.rows, domain)
        if local.shape[0] == 0:
            grad_x = torch.empty_like(x.local)
            return _no_gradients(Part(grad_x, x.rows), weight, bias_sizes, needs)
        grad_x, *others = compute(local, x.local, settings, needs)
        return [_part(grad_x, x.rows), *(_part(part, PARTIAL) for part in others)]
    needed = _find_needed_rows(x, weight, settings)
    if needed is None:
        return run_whole(func, args, kwargs)
    local = with_rows(grad, needed.out, domain)
    if needed.halo is not None and not _is_small(x):
        return _gradients_with_halo(local, x, weight, needed, needs)
    return _gradients(compute, local, x, weight, bias_sizes, needed, needs)


def _cut_like(grad: Any, x: Any, domain: Domain) -> Any:
    """Return a whole input in bands, if its gradient has rows in a spatial dimension or samples."""
    if not is_band(grad) or grad.rows.outer != 1 or grad.ndim + grad.rows.dim == 1:
        return x
    dim = grad.rows.dim
    band = Band(dim, 1, domain.bounds(x.shape[dim]))
    return BandTensor(with_rows(x, band, domain), band, domain, x.stride())


def _part(x: Tensor | None, rows: Any) -> Part | None:
    return None if x is None else Part(x, rows)


def _no_gradients(
    grad_x: Part, weight: Tensor, bias_sizes: Sequence[int] | None, needs: Sequence[bool]
) -> list[Part | None]:
    return [
        grad_x if needs[0] else None,
        Part(torch.zeros_like(weight), PARTIAL) if needs[1] else None,
        Part(weight.new_zeros(bias_sizes or ()), PARTIAL) if needs[2] else None,
    ]


def _gradients_with_halo(
    grad: Tensor, x: BandTensor, weight: Tensor, needed: NeededRows, needs: Sequence[bool]
) -> list[Part | None]:
    """Return gradients; those of the halo travel while those of the band are computed."""
    band, exchange = needed.out, needed.halo
    assert exchange is not None
    halo = Halo(exchange, x.domain.transport, NO_PADDING, band.dim)
    available = available_rows(x, exchange)
    rows = None if available is None else available.rows(x)
    unsent: list[tuple[RowExchange, Tensor]] = []

    def keep_gradients(available: AvailableRows) -> Callable[[Tensor], Callable[[Tensor], None]]:
        def keep(grad_halo: Tensor) -> Callable[[Tensor], None]:
            unsent.extend(available.unsent(grad_halo, band.dim))
            return lambda grad_band: None

        return keep

    is_shared = available is not None and available.is_shared
    return_gradients = (
        keep_gradients(available) if available and is_shared else halo.return_gradients
    )
    mask: Mask = (needs[0], needs[1], needs[2])
    grad_x, grad_weight, grad_bias = band_gradients(
        grad, x.local, weight, rows, mask, needed.halo_settings, halo, return_gradients
    )
    return [
        Part(grad_x, band, unsent=tuple(unsent)) if needs[0] and grad_x is not None else None,
        _part(grad_weight, PARTIAL) if needs[1] else None,
        _part(grad_bias, PARTIAL) if needs[2] else None,
    ]


def _gradients(
    compute: Callable[[Tensor, Tensor, Settings, Sequence[bool]], Any],
    grad: Tensor,
    x: BandTensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    needed: NeededRows,
    needs: Sequence[bool],
) -> list[Part | None]:
    dim = needed.out.dim
    available = available_rows(x, needed.wanted)
    if needed.wanted.is_identity:
        rows = x.local
    elif available is not None:
        rows = available.rows(x)
    elif needs[1]:
        rows = fetch(x.local, x.band, needed.wanted.required_rows, x.domain)
    else:  # only the gradient of the weight needs values
        rows = empty_rows_like(x.local, dim, needed.wanted.length)
    if needed.is_empty:
        grad_x: Tensor | None = rows
        gradients = _no_gradients(Part(rows, needed.out), weight, bias_sizes, needs)
    else:
        grad_bias = None
        if needed.cut is not None:
            if needs[2] and not needed.cut.is_reached:
                grad_bias = grad.sum([d for d in range(grad.ndim) if d != 1])
            grad = pad_rows(grad, dim, -needed.cut.north, -needed.cut.south)
        mask = (needs[0], needs[1], needs[2] and grad_bias is None)
        grad_x, grad_weight, found = compute(grad, rows, needed.settings, mask)
        grad_bias = found if grad_bias is None else grad_bias
        gradients = [None, _part(grad_weight, PARTIAL), _part(grad_bias, PARTIAL)]
    if needs[0] and grad_x is not None:
        gradients[0] = band_gradient(x, grad_x, needed.wanted)
    return gradients

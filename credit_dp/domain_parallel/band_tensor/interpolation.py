"""Interpolation, adaptive averages, pixel shuffles and samples of grids.

Rows are combined as a table says (`bands.interpolation`), other dimensions by torch's operator. Of
both that comes first which makes rows shorter, before they are sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    all_rows,
    fetch,
    give_back,
    part_or_whole,
    refresh,
    unfolded_rows,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.rules import run_whole, short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    domain_of,
    local_of,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.views import in_units
from credit_dp.domain_parallel.bands.interpolation import (
    ADAPTIVE_AVERAGE,
    NEAREST_MODES,
    RowOperator,
    interpolation_rows,
    interpolation_weights,
    is_identity,
    own_row_weights,
)

aten = torch.ops.aten

UPSAMPLINGS = (
    *(f"{kind}{n}d" for kind in NEAREST_MODES for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
AVERAGES = (f"{ADAPTIVE_AVERAGE}2d", f"{ADAPTIVE_AVERAGE}3d")


def rows_of(x: Any) -> Rows:
    """Return the layout of a tensor; those of torch's own are whole."""
    if type(x) is not BandTensor:
        return WHOLE
    refresh(x)
    return x.rows


def call_or_empty(func: Any, x: Tensor, shape: Sequence[int], *args: Any) -> Tensor:
    """Return a function of a tensor; zeros, if any, of one without entries, which torch refuses."""
    result: Tensor = func(x, *args) if x.numel() else x.new_zeros(list(shape))
    return result


# ---------------------------------------------------------------- interpolation and averages


@final
class Resampling(NamedTuple):
    """An interpolation or an adaptive average of the globe.

    Attributes:
        shape: of the input, without samples and channels.
        sizes: of the output, without samples and channels.
        settings: whether corners are aligned, if the operator asks that.
        scales: the factors that torch computes positions with, None for ratios of sizes.
        operator: what it does along rows.
    """

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    settings: tuple[bool, ...]
    scales: tuple[float | None, ...]
    dim: int
    operator: RowOperator

    @property
    def changes_columns(self) -> bool:
        """Return whether it does anything but along rows."""
        sizes = zip(self.shape, self.sizes, self.scales, strict=True)
        changes = [a != b or scale not in (None, 1.0) for a, b, scale in sizes]
        changes[self.dim] = False
        return any(changes)

    @property
    def has_columns_first(self) -> bool:
        """Return whether rows get no longer by what is done to other dimensions."""
        after = prod(self.sizes) // self.sizes[self.dim]
        return after <= prod(self.shape) // self.shape[self.dim]

    @property
    def is_turned(self) -> bool:
        """Return whether rows and columns are exchanged before torch's operator is called.

        It returns wrong rows of a single column with antialias on a CPU in torch 2.13.
        """
        return self.name.endswith("_aa") and self.dim == -1

    def columns(self, x: Tensor) -> Tensor:
        """Apply the operator to all dimensions but the rows, of which there may be any number."""
        if not self.changes_columns:
            return x
        func = getattr(aten, self.name).default
        sizes, arguments = self._arguments(self.sizes, x.shape[self.dim])
        x = x.mT if self.is_turned else x
        shape = (*x.shape[: -len(sizes)], *sizes)
        y = call_or_empty(func, x, shape, sizes, *arguments)
        return y.mT if self.is_turned else y

    def columns_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of what `columns` gets, given that of what it returns."""
        if not self.changes_columns:
            return grad
        func = getattr(aten, f"{self.name}_backward").default
        sizes, arguments = self._arguments(self.sizes, grad.shape[self.dim])
        in_sizes, _ = self._arguments(self.shape, grad.shape[self.dim])
        grad = grad.mT if self.is_turned else grad
        shape = [*grad.shape[: -len(sizes)], *in_sizes]
        if self.name in AVERAGES:
            result = call_or_empty(func, grad, shape, grad.new_empty(shape))
        else:
            result = call_or_empty(func, grad, shape, sizes, shape, *arguments)
        return result.mT if self.is_turned else result

    def _arguments(self, sizes: Sequence[int], rows: int) -> tuple[list[int], list[Any]]:
        sizes, scales = list(sizes), list(self.scales)
        sizes[self.dim], scales[self.dim] = rows, None
        if self.is_turned:
            sizes, scales = sizes[::-1], scales[::-1]
        return sizes, [] if self.name in AVERAGES else [*self.settings, *scales]


@lru_cache(8192)
def resampling(
    name: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    settings: tuple[Any, ...],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Resampling | None:
    """Return what an operator does; None if it has to run whole.

    Args:
        shape: of the globe's input, without samples and channels.
        sizes: of the globe's output, without samples and channels.
    """
    kind = re.sub(r"\dd", "", name)
    # torch rounds integers, and see `is_turned`.
    is_linear = dtype.is_floating_point or kind in NEAREST_MODES
    if not is_linear or (name.endswith("_aa") and 1 in sizes):
        return None
    asks_corners = "linear" in name or "cubic" in name
    corners, given = settings[:asks_corners], settings[asks_corners:]
    scales = (*given, *[None] * (len(sizes) - len(given)))
    operator = RowOperator(kind, shape[dim], sizes[dim], corners, scales[dim], dtype, device)
    return Resampling(name, shape, sizes, corners, scales, dim, operator)


def resample(x: BandTensor, call: Resampling, domain: Domain) -> Part:
    """Return this rank's rows of an interpolation or an average."""
    rows = x.band
    operator = call.operator
    local = call.columns(x.local) if call.has_columns_first else x.local
    if is_identity(operator):
        out = rows
    else:
        out = Band(rows.dim, 1, domain.bounds(operator.out_height))
        band, required = unfolded_rows(rows, interpolation_rows(operator, out.bounds))
        local = fetch(local, band, required, domain)
        weights = interpolation_weights(operator, out.bounds, domain.rank, call.dim)
        local = local if weights is None else weights.apply(local)
    local = local if call.has_columns_first else call.columns(local)
    return Part((local.clone() if local is x.local else local).to(x.dtype), out)


def resample_backward(grad: Tensor, out: Band, call: Resampling, domain: Domain) -> Part:
    """Return the gradient of an input, given rows of that of the output in any bands."""
    operator = call.operator._replace(is_backward=True)
    columns_after = call.has_columns_first
    local = grad if columns_after else call.columns_backward(grad)
    rows = out
    if not is_identity(operator):
        rows = out._replace(bounds=domain.bounds(operator.height))
        required = interpolation_rows(operator, out.bounds)
        weights = interpolation_weights(operator, out.bounds, domain.rank, call.dim)
        if weights is not None:
            local = weights.adjoint(local, required[domain.rank][0].length)
        local = give_back(local.to(grad.dtype), rows, required, domain)
    local = call.columns_backward(local) if columns_after else local
    return Part(local.clone() if local is grad else local, rows)


@rule_for(*(f"{name}.default" for name in UPSAMPLINGS))
def upsample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Interpolate rows and other dimensions."""
    x, sizes, *settings = args
    rows, count = rows_of(x), len(sizes)
    if not isinstance(rows, Band):
        return Part(func(x.local, *args[1:]), rows)
    if rows.dim < -count:
        shape = (*x.local.shape[:-count], *sizes)
        return Part(call_or_empty(func, x.local, shape, *args[1:]), rows)
    shape = tuple(x.shape[-count:])
    key = short_name(func), shape, tuple(sizes), tuple(settings), rows.dim, x.dtype, x.device
    call = resampling(*key)
    return run_whole(func, args, kwargs) if call is None else resample(x, call, x.domain)


@rule_for(*(f"{name}_backward.default" for name in UPSAMPLINGS))
def upsample_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of an interpolation's input."""
    grad, sizes, shape, *settings = args
    rows, count = rows_of(grad), len(sizes)
    if not isinstance(rows, Band):
        return Part(func(grad.local, *args[1:]), rows)
    if rows.dim < -count:
        shape = [*grad.local.shape[:-count], *shape[-count:]]
        return Part(call_or_empty(func, grad.local, shape, sizes, shape, *settings), rows)
    name = short_name(func).removesuffix("_backward")
    key = name, tuple(shape[-count:]), tuple(sizes), tuple(settings), rows.dim
    call = resampling(*key, grad.dtype, grad.device)
    if call is None or rows.outer > 1:
        return run_whole(func, args, kwargs)
    return resample_backward(grad.local, rows, call, grad.domain)


def is_added_up(call: Resampling, rows: Band) -> bool:
    """Return whether ranks add their rows to those of an average, of which there are fewer."""
    return rows.outer == 1 and call.operator.out_height < len(rows.bounds) - 1


@rule_for(*(f"{name}.default" for name in AVERAGES))
def average(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Average windows of rows and other dimensions."""
    x, sizes = args
    rows, count = rows_of(x), len(sizes)
    if not isinstance(rows, Band):
        return Part(func(x.local, sizes), rows)
    if rows.dim < -count:
        shape = (*x.local.shape[:-count], *sizes)
        return Part(call_or_empty(func, x.local, shape, sizes), rows)
    call, domain = _average(func, x, tuple(sizes), rows), x.domain
    if call is None:
        return run_whole(func, args, kwargs)
    if not is_added_up(call, rows):
        return resample(x, call, domain)
    # Each rank adds its rows to those of the result, of which there are fewer than ranks.
    weights = own_row_weights(call.operator, rows.bounds, domain.rank, rows.dim)
    local = call.columns(x.local) if call.has_columns_first else x.local
    if weights is None:
        sizes = list(local.shape)
        sizes[rows.dim] = call.operator.out_height
        wide = torch.promote_types(local.dtype, torch.float32)
        total = local.new_zeros(sizes, dtype=wide)
    else:
        total = weights.adjoint(local, call.operator.out_height)
    total = domain.transport.all_reduce(total.contiguous())
    total = total if call.has_columns_first else call.columns(total)
    return Part(total.to(x.dtype), WHOLE)


@rule_for(*(f"{name}_backward.default" for name in AVERAGES))
def average_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of an average's input."""
    grad, x = args
    domain, rows = domain_of(args), rows_of(x)
    count = int(short_name(func)[len(ADAPTIVE_AVERAGE)])
    if not isinstance(rows, Band):
        local, held = part_or_whole(grad)
        return Part(func(local, local_of(x)), held)
    if rows.dim < -count:
        local = with_rows(grad, rows, domain)
        return Part(call_or_empty(func, local, x.local.shape, x.local), rows)
    call = _average(func, x, tuple(grad.shape[-count:]), rows)
    if call is None:
        return run_whole(func, args, kwargs)
    if not is_added_up(call, rows):
        out = Band(rows.dim, 1, domain.bounds(call.operator.out_height))
        return resample_backward(with_rows(grad, out, domain), out, call, domain)
    weights = own_row_weights(call.operator, rows.bounds, domain.rank, rows.dim)
    local = whole(grad)
    local = local if call.has_columns_first else call.columns_backward(local)
    local = local.narrow(rows.dim, 0, 0) if weights is None else weights.apply(local)
    local = local.to(grad.dtype)
    return Part(call.columns_backward(local) if call.has_columns_first else local, rows)


def _average(func: Any, x: BandTensor, sizes: tuple[int, ...], rows: Band) -> Resampling | None:
    name, shape = short_name(func).removesuffix("_backward"), tuple(x.shape[-len(sizes) :])
    return resampling(name, shape, sizes, (), rows.dim, x.dtype, x.device)


# ---------------------------------------------------------------- pixel shuffles

CHANNEL_DIM = -3  # pixel shuffles move entries between this one and the last two


@rule_for("pixel_shuffle.default", "pixel_unshuffle.default")
def pixel_shuffle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make rows and columns of channels, or channels of them: rows stay where they are."""
    x, factor = args
    rows = rows_of(x)
    if not isinstance(rows, Band) or rows.dim < CHANNEL_DIM:
        return Part(_shuffled(func, x.local, factor), rows)
    if rows.dim == CHANNEL_DIM:
        return run_whole(func, args, kwargs)
    if func is aten.pixel_shuffle.default:
        bounds = tuple(bound * factor for bound in rows.bounds)
        return Part(_shuffled(func, x.local, factor), rows._replace(bounds=bounds))
    if rows.height % factor:
        return run_whole(func, args, kwargs)
    if x.domain.recorder is not None:
        x.domain.recorder.add_windows(rows.height, factor)
    rows = in_units(rows, factor)
    bounds = tuple(bound // factor for bound in rows.bounds)
    local = _shuffled(func, with_rows(x, rows, x.domain), factor)
    return Part(local, rows._replace(bounds=bounds))


def _shuffled(func: Any, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    if func is aten.pixel_shuffle.default:
        shape = [*batch, channels // factor**2, height * factor, width * factor]
    else:
        shape = [*batch, channels * factor**2, height // factor, width // factor]
    return call_or_empty(func, x, shape, factor)


@rule_for("channel_shuffle.default")
def channel_shuffle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Exchange channels."""
    x, groups = args
    rows = rows_of(x)
    if isinstance(rows, Band) and rows.dim == 1 - x.ndim:
        return run_whole(func, args, kwargs)
    return Part(func(x.local, groups), rows)


# ---------------------------------------------------------------- samples of grids

GRID_ROWS = -3  # of a grid `(B, H, W, 2)`, which are the rows -2 of the samples
SAMPLE_ROWS = -2


@rule_for("grid_sampler_2d.default")
def sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sample a field at positions with rows: it is gathered, as a position may be anywhere."""
    x, grid, *settings = args
    rows = rows_of(grid)
    if not isinstance(rows, Band) or rows.dim != GRID_ROWS:
        return run_whole(func, args, kwargs)
    field = whole(x, is_read_again=x.requires_grad or grid.requires_grad)
    return Part(func(field, grid.local, *settings), rows._replace(dim=SAMPLE_ROWS))


@rule_for("grid_sampler_2d_backward.default")
def sample_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a field, of which each rank has a part, and of positions."""
    grad, x, grid, *settings, mask = args
    rows, domain = rows_of(grid), domain_of(args)
    if not isinstance(rows, Band) or rows.dim != GRID_ROWS:
        return run_whole(func, args, kwargs)
    local = with_rows(grad, rows._replace(dim=SAMPLE_ROWS), domain)
    grad_field, grad_grid = func(local, whole(x), grid.local, *settings, mask)
    parts = [None, Part(grad_grid, rows) if mask[1] else None]
    if mask[0]:
        height = x.shape[SAMPLE_ROWS]
        band = Band(SAMPLE_ROWS, 1, domain.bounds(height))
        parts[0] = Part(give_back(grad_field, band, all_rows(height, domain.ranks), domain), band)
    return tuple(parts)

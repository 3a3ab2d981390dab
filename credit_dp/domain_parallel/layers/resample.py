"""Interpolation, adaptive pooling and pixel shuffle on one band of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.base import Bands, RowLayer, StencilLayer
from credit_dp.domain_parallel.layers.pool import (
    ADAPTIVE_SPATIAL_NDIM,
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    global_flat_indices,
    output_size_along,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError

# Unit rows that are sent through the operator at a time.
UNIT_ROWS_PER_CALL = 256

Operator = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class InterpolationTable:
    """Row `i` of the output is the sum over `k` of `weights[i, k]` x input row `sources[i, k]`.

    Shapes:
        `sources`, `weights`: `(H_out, K)`, rows of the globe. Rows with fewer sources repeat one
        with weight 0. `weights` is None where every output row is a copy of one input row.
    """

    sources: Tensor
    weights: Tensor | None

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return self.sources.shape[0]

    @cached_property
    def _source_lists(self) -> list[list[int]]:
        return self.sources.tolist()

    def is_identity(self, height: int) -> bool:
        """Whether the output is the input."""
        return self.weights is None and self._source_lists == [[row] for row in range(height)]

    def has_same_sources(self, other: InterpolationTable) -> bool:
        """Whether both copy the same rows."""
        return self._source_lists == other._source_lists

    def input_span(self, out: slice) -> tuple[int, int]:
        """Return the first input row that the output rows `out` need and the row after the last."""
        reached = self._source_lists[out]
        return min(map(min, reached)), max(map(max, reached)) + 1

    def apply(self, x: Tensor, dim: int, out: slice, first: int) -> Tensor:
        """Return the output rows `out`; the rows of `x` begin at input row `first`.

        Half precision becomes float32, unless rows are only copied.
        """
        places = (self.sources[out] - first).unbind(1)
        if self.weights is None:
            return x.index_select(dim, places[0])
        weights = self.weights[out].reshape(-1, *[1] * (-dim - 1), len(places)).unbind(-1)
        total = x.index_select(dim, places[0]) * weights[0]
        for place, weight in zip(places[1:], weights[1:], strict=True):
            total = torch.addcmul(total, x.index_select(dim, place).to(total.dtype), weight)
        return total


@_disable_dynamo  # as torch.compiler.disable, which takes a second to import
@torch.inference_mode(False)  # a table is kept, maybe for training
@torch.no_grad()
def interpolation_table_of(
    operator: Operator, height: int, dtype: torch.dtype, device: torch.device
) -> InterpolationTable:
    """Return the table of an operator that maps `(1, C, height, 1)` to `(1, C, H_out, 1)`.

    It has to be linear and to treat the channels alike.
    """
    dtype = torch.promote_types(dtype, torch.float32)  # as torch computes half precision
    if device.type == "meta":  # which rows are tapped, is read off numbers
        device = torch.device("cpu")
    made, taken, weight = [], [], []
    for start in range(0, height, UNIT_ROWS_PER_CALL):
        stop = min(start + UNIT_ROWS_PER_CALL, height)
        units = torch.zeros(stop - start, height, dtype=dtype, device=device)
        units.diagonal(start).fill_(1)
        with torch.autocast(device.type, enabled=False):
            matrix = operator(units[None, :, :, None])[0, :, :, 0].T
        rows, columns = matrix.nonzero(as_tuple=True)
        made.append(rows)
        taken.append(columns + start)
        weight.append(matrix[rows, columns])
    return _table_from_triples(
        torch.cat(made), torch.cat(taken), torch.cat(weight), matrix.shape[0]
    )


def _table_from_triples(
    made: Tensor, taken: Tensor, weight: Tensor, out_height: int
) -> InterpolationTable:
    """Put triples of output row, input row and weight into rows of one length."""
    order = made.argsort(stable=True)
    made, taken, weight = made[order], taken[order], weight[order]
    counts = made.bincount(minlength=out_height)
    begins = counts.cumsum(0) - counts
    nth = torch.arange(len(made), device=made.device) - begins[made]
    widest = int(counts.max())
    sources = taken[begins][:, None].repeat(1, widest)
    weights = weight.new_zeros(out_height, widest)
    sources[made, nth] = taken
    weights[made, nth] = weight
    copies = widest == 1 and bool((weights == 1).all())
    return InterpolationTable(sources, None if copies else weights)


# Samples and channels come before the dimensions of space.
NON_SPATIAL = 2


class DtypeAndDevice(NamedTuple):
    """Positions of taps are rounded: the rows needed may depend on these."""

    dtype: torch.dtype
    device: torch.device


class InterpolationLayer(RowLayer):
    """A layer that is a table of taps along rows and torch's own operator along all else.

    What makes fewer columns acts before rows travel, what makes more of them afterwards.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        shard_dim: int,
        manager: DomainParallelManager | None,
        *,
        ndim: int = 4,
    ) -> None:
        super().__init__(wrapped, shard_dim, manager, halo_width=1, ndim=ndim)
        self._table_cache: dict[tuple[int, int, DtypeAndDevice], InterpolationTable] = {}
        self._dtype_and_device = DtypeAndDevice(torch.float32, torch.device("cpu"))

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet wherever they are but among samples and channels."""
        return dim + ndim >= NON_SPATIAL

    def row_setting(self, value: Any) -> Any:
        """Return what a setting for all dimensions, or one of each, says about rows."""
        return value[self.dim] if isinstance(value, (tuple, list)) else value

    @abstractmethod
    def apply_along_rows(self, x: Tensor) -> Tensor:
        """Return the operator on `(1, C, H, 1)`, one column wide."""

    @abstractmethod
    def apply_along_other_dims(self, x: Tensor) -> Tensor:
        """Return the operator on a band along every dimension but the rows'."""

    def interpolation_table(self, height: int) -> InterpolationTable:
        """Return the table for a global height."""
        return self._cached_table(height, self._dtype_and_device)

    def gradient_table(self, height: int) -> InterpolationTable:
        """Return the table that gradients follow."""
        return self.interpolation_table(height)

    def _cached_table(self, height: int, kind: DtypeAndDevice) -> InterpolationTable:
        key = (self.dim, height, kind)
        if key not in self._table_cache:
            self._table_cache[key] = interpolation_table_of(self.apply_along_rows, height, *kind)
        return self._table_cache[key]

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return self.interpolation_table(height).out_height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows from the first to the last tap."""
        spans = [
            table.input_span(out)
            for table in (self.interpolation_table(height), self.gradient_table(height))
        ]
        return (RowRange(min(first for first, _ in spans), max(stop for _, stop in spans)),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        kind = DtypeAndDevice(x.dtype, x.device)
        if kind != self._dtype_and_device:
            self._dtype_and_device, self._exchanges = kind, {}
        with torch.no_grad():
            row = self.apply_along_other_dims(x.narrow(self.dim, 0, 1))
        if row.numel() <= x.narrow(self.dim, 0, 1).numel():
            return self._resample_rows(self.apply_along_other_dims(x), bands).to(row.dtype)
        return self.apply_along_other_dims(self._resample_rows(x, bands)).to(row.dtype)

    def _resample_rows(self, x: Tensor, bands: Bands) -> Tensor:
        height, out = bands.input.height, bands.output.rows(self.manager.domain_rank)
        taps, gradient_taps = self.interpolation_table(height), self.gradient_table(height)
        rows, first = self.fetch(x, bands), self.required_rows(out, height)[0].start
        if taps.is_identity(height):
            return rows
        made = gradient_taps.apply(rows, self.dim, out, first)
        if gradient_taps is taps:
            return made
        return made + (taps.apply(rows, self.dim, out, first) - made).detach()


NEAREST = ("nearest", "nearest-exact")
# Along one dimension these are the same operator.
LINEAR = ("linear", "bilinear", "trilinear")
MODES = (*NEAREST, *LINEAR, "bicubic", "area")


class _Interpolate(InterpolationLayer, ABC):
    """`F.interpolate` with the settings of an `nn.Upsample`."""

    def _check_dim(self) -> None:
        one_dimensional = self.dim == -1 and self.shard_dim == -1
        if not one_dimensional:
            super()._check_dim()

    def _interpolate(self, x: Tensor, size: Any, scale_factor: Any, mode: str) -> Tensor:
        return F.interpolate(
            x,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )

    def apply_along_rows(self, x: Tensor) -> Tensor:
        """Return the interpolation of one column."""
        mode = "bilinear" if self.mode in LINEAR else self.mode
        if self.size is not None:
            return self._interpolate(x, (self.row_setting(self.size), 1), None, mode)
        return self._interpolate(x, None, (self.row_setting(self.scale_factor), 1.0), mode)

    def apply_along_other_dims(self, x: Tensor) -> Tensor:
        """Return the interpolation along columns and levels."""
        setting = self.scale_factor if self.size is None else self.size
        one_for_all = isinstance(setting, (int, float))
        settings = [setting] * (x.ndim - NON_SPATIAL) if one_for_all else list(setting)
        settings[self.dim] = 1.0 if self.size is None else x.shape[self.dim]
        unchanged = [1.0] * len(settings) if self.size is None else list(x.shape[NON_SPATIAL:])
        if settings == unchanged:
            return x
        if self.size is None:
            return self._interpolate(x, None, settings, self.mode)
        return self._interpolate(x, settings, None, self.mode)

    def gradient_table(self, height: int) -> InterpolationTable:
        """Return the table that gradients follow.

        For float64 torch rounds nearest positions in float64 forward and in float32 backward, and
        one in 300 pairs of heights has rows where these differ.
        """
        taps = self.interpolation_table(height)
        if self.mode not in NEAREST or self._dtype_and_device.dtype != torch.float64:
            return taps
        coarse = self._cached_table(
            height, DtypeAndDevice(torch.float32, self._dtype_and_device.device)
        )
        return taps if coarse.has_same_sources(taps) else coarse


@final
class DomainParallelUpsample(_Interpolate):
    """An `nn.Upsample` on one band of rows, equal to that layer on the whole globe.

    Every mode, `size` or `scale_factor` up and down, `align_corners`, `recompute_scale_factor`.

    Args:
        upsample: the layer to shard; its `size` is the whole globe's.
        shard_dim: the row dimension of the input; -1 if it is `(B, C, H)`.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    def __init__(
        self,
        upsample: nn.Upsample,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(upsample, shard_dim, manager)


@final
class DomainParallelInterpolate(_Interpolate):
    """`F.interpolate` on one band of rows, equal to it on the whole globe.

    `size` is what it would be without sharding: that of the whole globe's output, never of a band.

    Args:
        size: rows and columns of the whole globe's output; None with `scale_factor`.
        mode: `nearest`, `nearest-exact`, `linear`, `bilinear`, `trilinear`, `bicubic` or `area`.
        shard_dim: the row dimension of the input; -1 if it is `(B, C, H)`.
        scale_factor: instead of `size`, for all dimensions or one for each.
        align_corners: see `torch.nn.functional.interpolate`.
        recompute_scale_factor: likewise.
        antialias: has to be False.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.

    Raises:
        UserError: the mode is unknown or antialiased; `size` has a band's rows where the globe has
            more (an `nn.Upsample` that makes so few rows of a globe is converted).
    """

    def __init__(
        self,
        size: int | tuple[int, ...] | None = None,
        mode: str = "bilinear",
        shard_dim: int = ROW_DIM,
        *,
        scale_factor: float | tuple[float, ...] | None = None,
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
        manager: DomainParallelManager | None = None,
    ) -> None:
        if mode not in MODES or antialias:
            came = f"{mode} with antialias" if antialias else mode
            raise UserError(
                f"DomainParallelInterpolate: mode has to be one of {', '.join(MODES)}, without "
                f"antialias, got {came}."
            )
        upsample = nn.Upsample(size, scale_factor, mode, align_corners, recompute_scale_factor)
        super().__init__(upsample, shard_dim, manager)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        rows = self.row_setting(self.size)
        if rows in bands.input.sizes and rows != bands.input.height:
            raise UserError(
                f"DomainParallelInterpolate: size is the whole globe's output, got {rows} rows, as "
                f"a band of the {bands.input.height} rows going in has. Give the globe's number, "
                "or convert an nn.Upsample if that is it."
            )
        return super().compute(x, bands)


@final
class DomainParallelPeriodicUpsample(StencilLayer):
    """A doubling of rows and columns around the globe on one band, equal to it on the whole globe.

    Args:
        upsample: a module that adds a row beyond each pole, which its `poles` describe, calls its
            `refine` for twice the rows and columns, and leaves out the two finer rows of each
            added one, as `credit_dp.models.unet.PeriodicUpsample` does.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, 2 * W)`, with `H_out = 2 * H`.
    """

    def __init__(
        self,
        upsample: Any,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(upsample, shard_dim, manager, halo_width=1)
        self.pole_mode = upsample.poles

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return twice the rows."""
        return 2 * height

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows around the output rows: row `i` becomes the rows `2 i` and `2 i + 1`."""
        return (out.start - 1) // 2, out.stop // 2 + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        out = bands.output.rows(self.manager.domain_rank)
        first, _ = self.input_span(out, bands.input.height)
        finer: Tensor = self.refine(self.fetch(x, bands))
        return finer.narrow(self.dim, out.start - 2 * first, out.stop - out.start)


class _AdaptivePool(RowLayer, ABC):
    """Pooling to a number of rows, each of a window that follows from the heights."""

    def __init__(
        self,
        pool: AdaptiveAvgPool | AdaptiveMaxPool,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        self._spatial_ndim = next(
            n for kind, n in ADAPTIVE_SPATIAL_NDIM.items() if isinstance(pool, kind)
        )
        dim = max(ROW_DIM, -self._spatial_ndim) if shard_dim is None else shard_dim
        super().__init__(pool, dim, manager, ndim=self._spatial_ndim + 2)

    def _check_dim(self) -> None:
        if (self.dim, self._spatial_ndim) != (-1, 1):
            super()._check_dim()

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet where the pool is.

        Raises:
            UserError: it makes one row of them.
        """
        wrapped = self.__dict__["wrapped"]
        if dim < -self._spatial_ndim:
            return False
        if output_size_along(wrapped, dim) == 1:
            raise UserError(
                f"{type(wrapped).__name__}: rows are in dimension {dim}, where output_size is 1. "
                f"It needs them in {max(ROW_DIM, -self._spatial_ndim)}. Move them there before "
                "this layer."
            )
        return True

    def _output_height(self, height: int) -> int:
        return output_size_along(self.__dict__["wrapped"], self.dim) or height

    def _pool_to_rows(self, x: Tensor, rows: int) -> Any:
        """Return torch's pool with another number of output rows."""
        size: list[int | None] = [
            output_size_along(self.__dict__["wrapped"], dim)
            for dim in range(-self._spatial_ndim, 0)
        ]
        size[self.dim] = rows
        indices = (True,) if getattr(self.__dict__["wrapped"], "return_indices", False) else ()
        name = f"adaptive_{self._pool_name}_pool{self._spatial_ndim}d"
        return getattr(nn.functional, name)(x, size if self._spatial_ndim > 1 else rows, *indices)

    _pool_name: str


@final
class DomainParallelAdaptiveAvgPool(_AdaptivePool, InterpolationLayer):
    """An `nn.AdaptiveAvgPool*d` to several rows, equal to that layer on the whole globe.

    Args:
        pool: the layer to shard; its output size is that of the whole globe, and not 1 along rows.
        shard_dim: the row dimension of the input; by default -2, or -1 of one-dimensional pools.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`, or another number of dimensions.
    """

    _pool_name = "avg"

    def apply_along_rows(self, x: Tensor) -> Tensor:
        """Return the pool of one column."""
        return nn.functional.adaptive_avg_pool2d(x, (self._output_height(x.shape[-2]), 1))

    def apply_along_other_dims(self, x: Tensor) -> Tensor:
        """Return the pool of all dimensions but the rows'."""
        made: Tensor = self._pool_to_rows(x, x.shape[self.dim])
        return made


@final
class DomainParallelAdaptiveMaxPool(_AdaptivePool, StencilLayer):
    """An `nn.AdaptiveMaxPool*d` to several rows, equal to that layer on the whole globe.

    `return_indices` returns positions on the whole globe. See `DomainParallelAdaptiveAvgPool` for
    arguments and shapes.
    """

    _pool_name = "max"

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return self._output_height(height)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows."""
        made = self._output_height(height)
        return out.start * height // made, -(-out.stop * height // made)

    def _window_rows(self, bands: Bands) -> list[int]:
        """Return the rows of this rank's windows one after another, each as long as the longest.

        Shorter windows repeat their last row.
        """
        height, out = bands.input.height, bands.output.rows(self.manager.domain_rank)
        spans = [self.input_span(slice(i, i + 1), height) for i in range(bands.output.height)]
        longest = max(stop - first for first, stop in spans)
        return [min(first + k, stop - 1) for first, stop in spans[out] for k in range(longest)]

    def compute(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output rows."""
        height, out = bands.input.height, bands.output.rows(self.manager.domain_rank)
        taken = constant_tensor(self._window_rows(bands), x.device)
        rows = self.fetch(x, bands)
        if height % bands.output.height:  # else the windows lie side by side
            rows = rows.index_select(self.dim, taken - self.input_span(out, height)[0])
        made = self._pool_to_rows(rows, out.stop - out.start)
        if not self.return_indices:
            return made  # type: ignore[no-any-return]
        maxima, indices = made
        columns = x.shape[self.dim :].numel() // x.shape[self.dim]
        return maxima, global_flat_indices(indices, taken, columns, height)


# Channels, rows and columns trade places: rows may be in either of the last two dimensions.
SPATIAL_DIMS = (-2, -1)
CHANNEL_DIM = -3


class _PixelShuffleLayer(RowLayer, ABC):
    """Rows and columns become channels, or the other way round."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet in the last two dimensions.

        Raises:
            UserError: rows are among the channels.
        """
        if dim == CHANNEL_DIM:
            raise UserError(
                f"{type(self).__name__}: rows are in the channels' dimension. Move them elsewhere."
            )
        return dim in SPATIAL_DIMS

    @abstractmethod
    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Shuffle whole groups of rows and crop to this rank's."""
        out = bands.output.rows(self.manager.domain_rank)
        (taken,) = self.required_rows(out, bands.input.height)
        made: Tensor = self.global_forward(self.fetch(x, bands))
        start = self.out_rows(slice(taken.start, taken.stop)).start
        return made.narrow(self.dim, out.start - start, out.stop - out.start)


@final
class DomainParallelPixelShuffle(_PixelShuffleLayer):
    """A `PixelShuffle` on one band of rows, equal to that layer on the whole globe.

    Where the bands line up nothing is sent.

    Args:
        shuffle: the layer to shard.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C * r ** 2, H_local, W)` -> `(B, C, H_out_local, W * r)`, with `H_out = H * r`.
    """

    def __init__(
        self,
        shuffle: nn.PixelShuffle,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(shuffle, shard_dim, manager)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return int(height * self.upscale_factor)

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of which these are made."""
        factor = self.upscale_factor
        return (RowRange(out.start // factor, -(-out.stop // factor)),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""
        return slice(rows.start * self.upscale_factor, rows.stop * self.upscale_factor)


@final
class DomainParallelPixelUnshuffle(_PixelShuffleLayer):
    """A `PixelUnshuffle` on one band of rows, equal to that layer on the whole globe.

    Where the bands line up nothing is sent.

    Args:
        unshuffle: the layer to shard.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C * r ** 2, H_out_local, W / r)`, with `H_out = H / r`.
    """

    def __init__(
        self,
        unshuffle: nn.PixelUnshuffle,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(unshuffle, shard_dim, manager)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return int(height // self.downscale_factor)

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of which these are made."""
        return (RowRange(out.start * self.downscale_factor, out.stop * self.downscale_factor),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""
        return slice(rows.start // self.downscale_factor, rows.stop // self.downscale_factor)

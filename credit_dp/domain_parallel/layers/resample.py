"""Interpolation, adaptive pooling and pixel shuffle on one band of rows.

Interpolation along rows is a table of input rows and weights (`bands.interpolation`), all other
dimensions are left to torch (`InterpolationLayer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.interpolation import (
    LINEAR,
    NEAREST,
    InterpolationTable,
    interpolation_table_of,
    nearest_gradient_table,
)
from credit_dp.domain_parallel.bands.rows import pad_rows
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.layers.base import Bands, RowLayer, StencilLayer
from credit_dp.domain_parallel.layers.pad import column_padding_of
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError
from credit_dp.torch_private import run_uncompiled

# The number of dimensions before the spatial ones: samples and channels.
NON_SPATIAL = 2


class DtypeAndDevice(NamedTuple):
    """The dtype and device of a table: torch rounds source positions differently for each."""

    dtype: torch.dtype
    device: torch.device


class InterpolationLayer(RowLayer):
    """A linear operator: a table along the rows, torch's own operator along other dimensions.

    Other dimensions are resampled before rows are sent if that shrinks a row, otherwise after.
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
        """Return whether `dim` is a spatial dimension."""
        return dim + ndim >= NON_SPATIAL

    def row_setting(self, value: Any) -> Any:
        """Return a setting along the rows, given one value or one for each dimension."""
        return value[self.dim] if isinstance(value, (tuple, list)) else value

    @abstractmethod
    def apply_along_rows(self, x: Tensor) -> Tensor:
        """Apply the operator to `(1, C, H, 1)`, a single column."""

    @abstractmethod
    def apply_along_other_dims(self, x: Tensor) -> Tensor:
        """Apply the operator to a band along all dimensions except the rows."""

    def interpolation_table(self, height: int) -> InterpolationTable:
        """Return the table for a global height."""
        key = (self.dim, height, self._dtype_and_device)
        if key not in self._table_cache:
            self._table_cache[key] = interpolation_table_of(
                self.apply_along_rows, height, *self._dtype_and_device
            )
        return self._table_cache[key]

    def gradient_table(self, height: int) -> InterpolationTable:
        """Return the table of the backward pass."""
        return self.interpolation_table(height)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global output height."""
        return self.interpolation_table(height).out_height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows from the first to the last source of both tables."""
        # Forward and backward read the same fetched rows, so both tables have to fit.
        spans = [
            table.input_span(out)
            for table in (self.interpolation_table(height), self.gradient_table(height))
        ]
        return (RowRange(min(first for first, _ in spans), max(stop for _, stop in spans)),)

    def prepare_height(self, bands: Bands) -> None:
        """Collect nothing: compiled code calls this layer uncompiled."""

    @run_uncompiled  # which table applies depends on the dtype and device of each input
    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        dtype_and_device = DtypeAndDevice(x.dtype, x.device)
        if dtype_and_device != self._dtype_and_device:
            # Other source rows may be needed: cached exchanges are outdated.
            self._dtype_and_device = dtype_and_device
            self._exchanges = {}
        # Both steps keep channels last, except where torch itself does not: gradients of `bicubic`
        # and of three-dimensional `nearest`, and three-dimensional `area`, are contiguous.
        # Try the other dimensions on one row: if that shrinks rows, do it before they are sent.
        with torch.no_grad():
            resampled_row = self.apply_along_other_dims(x.narrow(self.dim, 0, 1))
        if resampled_row.numel() <= x.narrow(self.dim, 0, 1).numel():
            with_columns = self.apply_along_other_dims(x)
            y = self._resample_rows(with_columns, bands)
            height = bands.input.height
            if with_columns is x and self.interpolation_table(height).is_identity(height):
                y = y.clone()  # as torch does: either may be changed in place
            return y.to(resampled_row.dtype)
        return self.apply_along_other_dims(self._resample_rows(x, bands)).to(resampled_row.dtype)

    def _resample_rows(self, x: Tensor, bands: Bands) -> Tensor:
        height = bands.input.height
        out = bands.output.rows(self.manager.domain_rank)
        table = self.interpolation_table(height)
        gradient_table = self.gradient_table(height)
        rows = self.fetch(x, bands)
        first = self.required_rows(out, height)[0].start
        if table.is_identity(height):
            return rows
        y = gradient_table.apply(rows, self.dim, out, first)
        if gradient_table is table:
            return y
        value = table.apply(rows.detach(), self.dim, out, first)
        return _WithGradientOf.apply(y, value)  # type: ignore[no-any-return, no-untyped-call]


@final
class _WithGradientOf(torch.autograd.Function):
    """A value, with the gradient of another one."""

    @staticmethod
    def forward(ctx: Any, other: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


MODES = (*NEAREST, *LINEAR, "bicubic", "area")


def _input_ndim(upsample: nn.Upsample) -> int:
    spatial_dims = {"linear": 1, "trilinear": 3}
    for setting in (upsample.size, upsample.scale_factor):
        if isinstance(setting, (tuple, list)):
            return NON_SPATIAL + len(setting)
    return NON_SPATIAL + spatial_dims.get(upsample.mode, 2)


class _Interpolate(InterpolationLayer, ABC):
    def __init__(
        self,
        upsample: nn.Upsample,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        ndim = _input_ndim(upsample)
        dim = shard_dim if shard_dim < 0 else shard_dim - ndim
        super().__init__(upsample, dim, manager, ndim=ndim)
        self.shard_dim = shard_dim
        self._gradient_tables: dict[tuple[int, int, DtypeAndDevice], InterpolationTable] = {}

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
        mode = "bilinear" if self.mode in LINEAR else self.mode
        if self.size is not None:
            y = self._interpolate(x, (self.row_setting(self.size), 1), None, mode)
        else:
            y = self._interpolate(x, None, (self.row_setting(self.scale_factor), 1.0), mode)
        return y

    def apply_along_other_dims(self, x: Tensor) -> Tensor:
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
        table = self.interpolation_table(height)
        if self.mode not in NEAREST:
            return table
        key = (self.dim, height, self._dtype_and_device)
        if key not in self._gradient_tables:
            by_factor = self.size is None and not self.recompute_scale_factor
            scale = float(self.row_setting(self.scale_factor)) if by_factor else None
            self._gradient_tables[key] = nearest_gradient_table(
                self.mode, height, table, scale, *self._dtype_and_device
            )
        return self._gradient_tables[key]


@final
class DomainParallelUpsample(_Interpolate):
    """An `nn.Upsample` on one band of rows, equal to that layer on the whole globe.

    Supports every mode, `size` or `scale_factor` up and down, `align_corners` and
    `recompute_scale_factor`.

    Args:
        upsample: the layer to shard; its `size` is the whole globe's.
        shard_dim: the row dimension of the input; -1 if it is `(B, C, H)`.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """


@final
class DomainParallelInterpolate(_Interpolate):
    """`F.interpolate` on one band of rows, equal to it on the whole globe.

    `size` is the same as without sharding: that of the whole globe's output, never of a band.

    Args:
        size: rows and columns of the whole globe's output; None with `scale_factor`.
        mode: `nearest`, `nearest-exact`, `linear`, `bilinear`, `trilinear`, `bicubic` or `area`.
        shard_dim: the row dimension of the input; -1 if it is `(B, C, H)`.
        scale_factor: instead of `size`, one for all dimensions or one for each.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.

    Raises:
        UserError: the mode is unknown; or `size` has as many rows as an input
            band, which is most likely a mistake (convert an `nn.Upsample` if it is not).
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
        manager: DomainParallelManager | None = None,
    ) -> None:
        if mode not in MODES:
            raise UserError(
                f"DomainParallelInterpolate: mode must be one of {', '.join(MODES)}, got {mode}."
            )
        upsample = nn.Upsample(size, scale_factor, mode, align_corners, recompute_scale_factor)
        super().__init__(upsample, shard_dim, manager=manager)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        # A size that was computed from a band's shape would shrink the globe to a band unnoticed.
        rows = self.row_setting(self.size)
        if rows in bands.input.sizes and rows != bands.input.height:
            raise UserError(
                f"DomainParallelInterpolate: size is the whole globe's output, got {rows} rows, "
                f"as many as a band of the {bands.input.height} input rows has. Give the globe's "
                "number, or convert an nn.Upsample if this is it."
            )
        return super().compute(x, bands)


@final
class DomainParallelPeriodicUpsample(StencilLayer):
    """Doubling of rows and columns around the globe on one band, equal to it on the whole globe.

    Args:
        upsample: a module that adds a row beyond each pole in the mode `poles` and a column on both
            sides in the mode `column_mode` (by default `circular`), calls its `refine`, which
            doubles rows and columns, and crops the two finer rows and columns of each added one, as
            `credit_dp.models.unet.PeriodicUpsample` does.

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
        self.column_padding = column_padding_of(upsample, 1)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return twice the rows."""
        return 2 * height

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows around `out`: row `i` becomes the rows `2 i` and `2 i + 1`."""
        return (out.start - 1) // 2, out.stop // 2 + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        out = bands.output.rows(self.manager.domain_rank)
        first, stop = self.input_span(out, bands.input.height)
        finer = self.refine(self.column_padding.pad(self.fetch(x, bands)))
        # One copy crops rows and columns, and keeps the memory format.
        return F.pad(finer, (-2, -2, 2 * first - out.start, out.stop - 2 * stop))


SPATIAL_DIMS = (-2, -1)
CHANNEL_DIM = -3


class _PixelShuffleLayer(RowLayer, ABC):
    """Rows and columns become channels, or vice versa."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one of the last two."""
        if dim == CHANNEL_DIM:
            raise UserError(
                f"{type(self).__name__}: rows are in the channels' dimension. Move them elsewhere."
            )
        return dim in SPATIAL_DIMS

    @abstractmethod
    def out_rows(self, rows: slice) -> slice:
        """Return the output rows of complete input rows."""

    @abstractmethod
    def shuffle_in_channels_last(self, x: Tensor) -> Tensor:
        """Return what the wrapped layer does, with channels as the last dimension: `(B, H, W, C)`.

        Both ways are one copy.
        """

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        out = bands.output.rows(self.manager.domain_rank)
        # An input row becomes several output rows or vice versa. Bands may cut through such a
        # group, so complete groups are shuffled and the surplus is cropped.
        (in_rows,) = self.required_rows(out, bands.input.height)
        rows = self.fetch(x, bands)
        y: Tensor
        if memory_format_of(rows) is torch.channels_last:
            # torch's own operators return contiguous fields or gradients, except on CPUs.
            y = self.shuffle_in_channels_last(rows.movedim(1, -1)).movedim(-1, 1)
        else:
            y = self.global_forward(rows)
        complete = self.out_rows(slice(in_rows.start, in_rows.stop))
        return pad_rows(y, self.dim, complete.start - out.start, out.stop - complete.stop)


@final
class DomainParallelPixelShuffle(_PixelShuffleLayer):
    """A `PixelShuffle` on one band of rows, equal to that layer on the whole globe.

    Nothing is sent where the bands line up.

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
        """Return the global output height."""
        return int(height * self.upscale_factor)

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the input rows of the output rows `out`."""
        factor = self.upscale_factor
        return (RowRange(out.start // factor, -(-out.stop // factor)),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows of complete input rows."""
        return slice(rows.start * self.upscale_factor, rows.stop * self.upscale_factor)

    def shuffle_in_channels_last(self, x: Tensor) -> Tensor:
        """Return finer pixels with fewer channels."""
        factor = self.upscale_factor
        samples, rows, columns, _ = x.shape
        parts = x.reshape(samples, rows, columns, -1, factor, factor)
        finer = parts.permute(0, 1, 4, 2, 5, 3)
        return finer.reshape(samples, rows * factor, columns * factor, -1)


@final
class DomainParallelPixelUnshuffle(_PixelShuffleLayer):
    """A `PixelUnshuffle` on one band of rows, equal to that layer on the whole globe.

    Nothing is sent where the bands line up.

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
        """Return the global output height."""
        return int(height // self.downscale_factor)

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the input rows of the output rows `out`."""
        return (RowRange(out.start * self.downscale_factor, out.stop * self.downscale_factor),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows of complete input rows."""
        return slice(rows.start // self.downscale_factor, rows.stop // self.downscale_factor)

    def shuffle_in_channels_last(self, x: Tensor) -> Tensor:
        """Return coarser pixels with more channels."""
        factor = self.downscale_factor
        samples, rows, columns, channels = x.shape
        parts = x.reshape(samples, rows // factor, factor, columns // factor, factor, channels)
        return parts.permute(0, 1, 3, 5, 2, 4).flatten(3)

"""Interpolation to another grid, on one band of rows."""

from __future__ import annotations

from abc import ABC
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.row_taps import RowTaps
from credit_dp.domain_parallel.layers.tap_layer import NON_SPATIAL, Kind, TapLayer
from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError

NEAREST = ("nearest", "nearest-exact")
# Along one dimension these are the same operator.
LINEAR = ("linear", "bilinear", "trilinear")
MODES = (*NEAREST, *LINEAR, "bicubic", "area")


class _Interpolation(TapLayer, ABC):
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

    def along_rows(self, x: Tensor) -> Tensor:
        """Return the interpolation of one column."""
        mode = "bilinear" if self.mode in LINEAR else self.mode
        if self.size is not None:
            return self._interpolate(x, (self.row_setting(self.size), 1), None, mode)
        return self._interpolate(x, None, (self.row_setting(self.scale_factor), 1.0), mode)

    def along_others(self, x: Tensor) -> Tensor:
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

    def gradient_taps(self, height: int) -> RowTaps:
        """Return the table that gradients follow.

        For float64 torch rounds nearest positions in float64 forward and in float32 backward, and
        one in 300 pairs of heights has rows where these differ.
        """
        taps = self.taps(height)
        if self.mode not in NEAREST or self._kind.dtype != torch.float64:
            return taps
        coarse = self._table(height, Kind(torch.float32, self._kind.device))
        return taps if coarse.same_as(taps) else coarse


@final
class DomainParallelUpsample(_Interpolation):
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
class DomainParallelInterpolate(_Interpolation):
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
        if rows in bands.taken.sizes and rows != bands.taken.height:
            raise UserError(
                f"DomainParallelInterpolate: size is the whole globe's output, got {rows} rows, as "
                f"a band of the {bands.taken.height} rows going in has. Give the globe's number, "
                "or convert an nn.Upsample if that is it."
            )
        return super().compute(x, bands)


@final
class DomainParallelPeriodicUpsample(WindowLayer):
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

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows around the output rows: row `i` becomes the rows `2 i` and `2 i + 1`."""
        return (out.start - 1) // 2, out.stop // 2 + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        out = bands.made.rows(self.manager.domain_rank)
        first, _ = self.span(out, bands.taken.height)
        finer: Tensor = self.refine(self.fetch(x, bands))
        return finer.narrow(self.dim, out.start - 2 * first, out.stop - out.start)

"""Pooling on one band of rows.

Pools with a kernel (max, average, power) fetch the rows of their windows. Adaptive pools to one row
reduce over all bands with one collective; those to several rows are in `resample.py`.
"""

from __future__ import annotations

from abc import ABC
from math import isinf, prod
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.bands.pooling import (
    count_factors,
    first_maximum,
    global_flat_indices,
    has_wrong_gradient,
    maximum_gradient,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.bands.rows import Windows
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.layers.base import Bands, ConstantFillLayer, RowLayer, StencilLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AvgPool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
PowerPool = nn.LPPool1d | nn.LPPool2d | nn.LPPool3d
AdaptiveAvgPool = nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d
AdaptiveMaxPool = nn.AdaptiveMaxPool1d | nn.AdaptiveMaxPool2d | nn.AdaptiveMaxPool3d
SPATIAL_NDIM: dict[type[nn.Module], int] = {
    kind: ndim
    for kinds in (MaxPool, AvgPool, PowerPool, AdaptiveAvgPool, AdaptiveMaxPool)
    for ndim, kind in enumerate(kinds.__args__, start=1)
}


def spatial_ndim(pool: nn.Module) -> int:
    """Return the number of dimensions that a pool pools."""
    return next(ndim for pool_type, ndim in SPATIAL_NDIM.items() if isinstance(pool, pool_type))


class SpatialPool(RowLayer, ABC):
    """Base of the layers around a pool to several rows.

    Args:
        pool: the layer to shard.
        shard_dim: the row dimension of the input; by default -2, or -1 for one-dimensional pools.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
    """

    def __init__(
        self,
        pool: nn.Module,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        self._spatial_ndim = spatial_ndim(pool)
        dim = max(ROW_DIM, -self._spatial_ndim) if shard_dim is None else shard_dim
        super().__init__(pool, dim, manager, ndim=self._spatial_ndim + 2)

    def _check_dim(self) -> None:
        if (self.dim, self._spatial_ndim) != (-1, 1):
            super()._check_dim()


class PoolLayer(SpatialPool, StencilLayer):
    """Base of the layers around a pool with a kernel."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one of the kernel's dimensions."""
        return dim >= -self._spatial_ndim

    def setting(self, name: str) -> list[int]:
        """Return a setting of the pool, one number for each dimension of the kernel."""
        value: Any = getattr(self.__dict__["wrapped"], name)
        if value is None:  # the stride defaults to the kernel size
            return self.setting("kernel_size")
        values = [value] if isinstance(value, int) else list(value)
        return values * self._spatial_ndim if len(values) == 1 else values

    def padding_without_rows(self) -> list[int]:
        """Return the padding, with 0 along the rows."""
        values = self.setting("padding")
        values[self.dim] = 0
        return values

    @property
    def _kernel(self) -> int:
        return self.setting("kernel_size")[self.dim]

    @property
    def _stride(self) -> int:
        return self.setting("stride")[self.dim]

    @property
    def _padding(self) -> int:
        return self.setting("padding")[self.dim]

    @property
    def _windows(self) -> Windows:
        """The rows of each output row."""
        return Windows(self._kernel, self._stride, self._padding)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global output height."""
        return self._windows.out_height(height, self._padding, self.ceil_mode)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows, padding included."""
        return self._windows.span(out)


class _AveragePool(PoolLayer, ABC):
    """Averages over windows; rows beyond the poles are zeros."""

    _counts_padding = True
    _divisor: int | None = None

    def average(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the means of this rank's windows."""
        has_padding = hasattr(self.__dict__["wrapped"], "padding")
        padding = self.padding_without_rows() if has_padding else [0]
        settings: list[Any] = [
            self.setting("kernel_size"),
            self.setting("stride"),
            padding,
            self.ceil_mode,
            self._counts_padding,
        ]
        if self._divisor is not None:
            settings.append(self._divisor)
        rows = self.fetch(x, bands)
        copies = self._spatial_ndim == 2 and any(padding) and has_wrong_gradient(rows)
        if copies:
            rows = rows.clone(memory_format=torch.contiguous_format)
        means: Tensor = getattr(nn.functional, f"avg_pool{self._spatial_ndim}d")(rows, *settings)
        if copies:
            means = means.contiguous(memory_format=torch.channels_last)
        return self._rescale_by_count(means, bands)

    def _rescale_by_count(self, means: Tensor, bands: Bands) -> Tensor:
        """Return the means, divided by the rows that count instead of all rows of the kernel."""
        if self._divisor is not None:
            return means
        factors = count_factors(
            self._windows,
            bands.output.rows(self.manager.domain_rank),
            bands.output.height,
            bands.input.height,
            self._counts_padding,
        )
        if factors is None:
            return means
        constant = cached_constant(list, factors, means.device, means.dtype)
        return means * constant.view(-1, *[1] * (-self.dim - 1))


@final
class DomainParallelAvgPool(_AveragePool):
    """An `nn.AvgPool*d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride and padding, ceil mode, `count_include_pad` and
    `divisor_override`.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        return self.average(x, bands)

    @property
    def _counts_padding(self) -> bool:  # type: ignore[override]
        return bool(self.count_include_pad)

    @property
    def _divisor(self) -> int | None:  # type: ignore[override]
        return getattr(self.__dict__["wrapped"], "divisor_override", None)


@final
class DomainParallelPowerPool(_AveragePool):
    """An `nn.LPPool*d` on one band of rows, equal to that layer on the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.

    Raises:
        UserError: the power is infinite.
    """

    def __init__(
        self,
        pool: nn.Module,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager=manager)
        if isinf(self.norm_type):
            raise UserError(
                f"{type(pool).__name__}: norm_type has to be finite, got {self.norm_type}. "
                "Use a MaxPool of absolute values."
            )

    @property
    def _padding(self) -> int:
        return 0

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        means = self.average(x.pow(self.norm_type), bands)
        # The sum over a window is its mean times the kernel's size. Written like torch's lp_pool,
        # whose gradient is that of `sign * relu(abs)`.
        powers = means.sign() * means.abs().relu() * prod(self.setting("kernel_size"))
        return powers.pow(1 / self.norm_type)


@final
class _MaxPool(torch.autograd.Function):
    """Max pooling in two or three dimensions that keeps the indices only.

    torch's own keeps its input, too, though backward uses nothing but the shape. The fetched rows
    are a copy of the band, which is kept besides where other layers need it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ndim: int, settings: tuple[Any, ...]) -> Tensor:
        pool = getattr(nn.functional, f"max_pool{ndim}d")
        maxima, indices = pool(rows, *settings, return_indices=True)
        ctx.save_for_backward(indices)
        ctx.settings = settings
        ctx.rows_like = rows.shape, memory_format_of(rows)
        return maxima  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return maximum_gradient(grad, indices, ctx.rows_like, ctx.settings), None, None


@final
class DomainParallelMaxPool(PoolLayer, ConstantFillLayer):
    """An `nn.MaxPool*d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride, padding and dilation, with and without ceil mode.
    `return_indices` returns flat indices into the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    @property
    def _windows(self) -> Windows:
        dilation = self.setting("dilation")[self.dim]
        return Windows(self._kernel, self._stride, self._padding, dilation)

    def compute(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output rows."""
        rows = self.fetch_with_fill(x, bands, -torch.inf)
        settings = (
            self.setting("kernel_size"),
            self.setting("stride"),
            self.padding_without_rows(),
            self.setting("dilation"),
            self.ceil_mode,
        )
        # A compiler chooses by itself what to keep.
        if self._spatial_ndim > 1 and not (
            self.return_indices or torch.compiler.is_dynamo_compiling()
        ):
            return _MaxPool.apply(rows, self._spatial_ndim, settings)  # type: ignore[no-any-return, no-untyped-call]
        function = getattr(nn.functional, f"max_pool{self._spatial_ndim}d")
        pooled = function(rows, *settings, return_indices=self.return_indices)
        if not self.return_indices:
            return pooled  # type: ignore[no-any-return]
        maxima, indices = pooled
        height = bands.input.height
        first, stop = self.input_span(bands.output.rows(self.manager.domain_rank), height)
        # A filled row holds the maximum only if all rows of the globe are -inf; clamping then gives
        # the first of these, as in torch.
        global_rows = torch.arange(first, stop, device=x.device).clamp(0, height - 1)
        columns = x.shape[self.dim :].numel() // x.shape[self.dim]
        return maxima, global_flat_indices(indices, global_rows, columns, height)


def output_size_along(pool: AdaptiveAvgPool | AdaptiveMaxPool, dim: int) -> int | None:
    """Return a pool's output size along the negative dimension `dim`; None keeps the input's."""
    size: Any = pool.output_size
    return size[dim] if isinstance(size, tuple | list) else size  # type: ignore[no-any-return]


class _GlobalPool(ReductionLayer, ABC):
    """Pooling of all bands to one row, which is the same on every rank."""

    output_is_banded = False

    def __init__(
        self,
        pool: AdaptiveAvgPool | AdaptiveMaxPool,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager)
        self._spatial_ndim = spatial_ndim(pool)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is pooled.

        Raises:
            UserError: it is pooled to more than one entry.
        """
        if dim < -self._spatial_ndim:
            return False
        if output_size_along(self.__dict__["wrapped"], dim) != 1:
            raise UserError(
                f"{type(self.__dict__['wrapped']).__name__}: rows are in dimension {dim}, where "
                f"output_size is {self.output_size}. Set it to 1 there."
            )
        return True


@final
class DomainParallelGlobalAvgPool(_GlobalPool):
    """An `AdaptiveAvgPool` to one row, equal to that layer on the whole globe.

    Args:
        pool: the layer to shard; its output size is 1 along the rows.
        shard_dim: the row dimension of the input; a plan may replace it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, 1, W_out)`, or another number of dimensions.
    """

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the mean of the bands' means, weighted by their rows."""
        rows = bands.input.sizes[self.manager.domain_rank]
        height = bands.input.height
        part = self.global_forward(x.to(accumulation_dtype(x))) * (rows / height)
        return sum_over_bands(part, self.manager.transport).to(x.dtype)


@final
class DomainParallelGlobalMaxPool(_GlobalPool):
    """An `AdaptiveMaxPool` to one row, equal to that layer on the whole globe.

    As in torch, the first of several equal maxima gets the gradient. `return_indices` returns its
    flat index into the whole globe. See `DomainParallelGlobalAvgPool` for arguments and shapes.
    """

    def reduce(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return the maximum of the bands' maxima."""
        wrapped = self.__dict__["wrapped"]
        pool = getattr(nn.functional, f"adaptive_max_pool{self._spatial_ndim}d")
        maxima, indices = pool(x, wrapped.output_size, return_indices=True)
        global_indices = self._to_global_indices(indices, x, bands.input)
        maximum, index = _FirstMax.apply(maxima, global_indices, self.manager.transport)  # type: ignore[no-untyped-call]
        return (maximum, index) if wrapped.return_indices else maximum

    def _to_global_indices(self, indices: Tensor, x: Tensor, partition: RowPartition) -> Tensor:
        """Return flat indices into a channel of the globe, given those into the band."""
        row_entries = x.shape[self.dim + 1 :].numel() if self.dim < -1 else 1
        level = indices // (x.shape[self.dim] * row_entries)
        other_rows = partition.height - x.shape[self.dim]
        north = partition.bounds[self.manager.domain_rank]
        return indices + (level * other_rows + north) * row_entries


class _FirstMax(torch.autograd.Function):
    """Maximum over bands; the first of several equal maxima gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any, maxima: Tensor, indices: Tensor, transport: Transport
    ) -> tuple[Tensor, Tensor]:
        maximum, first = first_maximum(maxima, indices, transport)
        ctx.save_for_backward(indices == first)
        ctx.transport = transport
        ctx.mark_non_differentiable(first)
        return maximum, first

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        # Every rank holds the maximum: its gradient is the sum of theirs, for the band that has it.
        (is_local,) = ctx.saved_tensors
        return sum_over_bands(grad, ctx.transport) * is_local, None, None

"""Pooling on one band of rows.

Pools with a kernel fetch the rows of their windows. Adaptive average pools to one row reduce over
all bands with one collective.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.bands.pooling import (
    count_factors,
    global_flat_indices,
    has_wrong_gradient,
    maximum_gradient,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.bands.rows import Windows
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.layers.base import (
    Bands,
    ConstantFillLayer,
    RowLayer,
    StencilLayer,
    torch_layer_type,
)
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM

DIMS_OF_POOLS = {nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool2d: 2, nn.AvgPool3d: 3}


class PoolLayer(StencilLayer):
    """Base of the layers around a pool with a kernel."""

    def __init__(
        self,
        pool: nn.Module,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        kind = torch_layer_type(type(pool))
        self._spatial_ndim = DIMS_OF_POOLS[kind or type(pool)]
        super().__init__(pool, shard_dim, manager, ndim=self._spatial_ndim + 2)

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
        return Windows(self._kernel, self._stride, self._padding)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global output height."""
        return self._windows.out_height(height, self._padding, self.ceil_mode)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows, padding included."""
        return self._windows.span(out)


@final
class DomainParallelAvgPool(PoolLayer):
    """An `nn.AvgPool*d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride and padding, ceil mode, `count_include_pad` and
    `divisor_override`.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`.
    """

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the means of this rank's windows; rows beyond the poles are zeros."""
        padding = self.padding_without_rows()
        rows = self.fetch(x, bands)
        copies = self._spatial_ndim == 2 and any(padding) and has_wrong_gradient(rows)
        if copies:
            rows = rows.clone(memory_format=torch.contiguous_format)
        average = getattr(nn.functional, f"avg_pool{self._spatial_ndim}d")
        means: Tensor = average(
            rows,
            self.setting("kernel_size"),
            self.setting("stride"),
            padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )
        if copies:
            means = means.contiguous(memory_format=torch.channels_last)
        return self._rescale_by_count(means, bands)

    def _rescale_by_count(self, means: Tensor, bands: Bands) -> Tensor:
        if self.divisor_override is not None:
            return means
        factors = count_factors(
            self._windows,
            bands.output.rows(self.manager.domain_rank),
            bands.output.height,
            bands.input.height,
            self.count_include_pad,
        )
        if factors is None:
            return means
        constant = cached_constant(list, factors, means.device, means.dtype)
        return means * constant.view(-1, *[1] * (-self.dim - 1))


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
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`.
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
        if not (self.return_indices or torch.compiler.is_dynamo_compiling()):
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


def output_size_along(pool: Any, dim: int) -> int | None:
    """Return a pool's output size along the negative dimension `dim`; None keeps the input's."""
    size: Any = pool.output_size
    return size[dim] if isinstance(size, tuple | list) else size  # type: ignore[no-any-return]


@final
class DomainParallelGlobalAvgPool(ReductionLayer):
    """An `AdaptiveAvgPool` to one row, equal to that layer on the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, 1, W_out)`, the same on every rank.
    """

    output_is_banded = False

    def __init__(
        self,
        pool: nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is pooled."""
        spatial_ndim = 3 if isinstance(self.__dict__["wrapped"], nn.AdaptiveAvgPool3d) else 2
        return dim >= -spatial_ndim and RowLayer.couples_rows(self, dim, ndim)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the mean of the bands' means, weighted by their rows."""
        rows = bands.input.sizes[self.manager.domain_rank]
        height = bands.input.height
        part = self.global_forward(x.to(accumulation_dtype(x))) * (rows / height)
        return sum_over_bands(part, self.manager.transport).to(x.dtype)

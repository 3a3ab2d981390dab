"""Pooling on one band of rows."""

from __future__ import annotations

from abc import ABC
from math import isinf, prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.layers.base import Bands, ConstantFillLayer, StencilLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer, accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AvgPool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
PowerPool = nn.LPPool1d | nn.LPPool2d | nn.LPPool3d
SPATIAL_NDIM: dict[type[nn.Module], int] = {
    kind: ndim
    for kinds in (MaxPool, AvgPool, PowerPool)
    for ndim, kind in enumerate(kinds.__args__, start=1)
}


def spatial_ndim(pool: nn.Module) -> int:
    """Return how many dimensions a pool's kernel has."""
    return next(ndim for kind, ndim in SPATIAL_NDIM.items() if isinstance(pool, kind))


class PoolLayer(StencilLayer):
    """A layer around a pool with a kernel.

    Args:
        pool: the layer to shard.
        shard_dim: the row dimension of the input; by default -2, or -1 of one-dimensional pools.
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

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet where the kernel reaches."""
        return dim >= -self._spatial_ndim

    def setting(self, name: str) -> list[int]:
        """Return a setting of the pool, one number for each dimension of the kernel."""
        value: Any = getattr(self.__dict__["wrapped"], name)
        if value is None:  # the stride
            return self.setting("kernel_size")
        values = [value] if isinstance(value, int) else list(value)
        return values * self._spatial_ndim if len(values) == 1 else values

    def setting_without_rows(self, name: str) -> list[int]:
        """Return a setting that is 0 along the rows."""
        values = self.setting(name)
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
    def _kernel_extent(self) -> int:
        """Rows from the kernel's first to its last."""
        return self._kernel

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output.

        In ceil mode the last window may reach over the padding, but has to start before its end.
        """
        spare = height + 2 * self._padding - self._kernel_extent
        if not self.ceil_mode:
            return spare // self._stride + 1
        last = -(-spare // self._stride)
        return last + 1 if last * self._stride < height + self._padding else last

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows."""
        first = out.start * self._stride - self._padding
        return first, (out.stop - 1) * self._stride - self._padding + self._kernel_extent


class _AveragePool(PoolLayer, ABC):
    """Averages over windows; rows beyond the poles are zeros."""

    _counts_padding = True
    _divisor: int | None = None

    def average(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the means of this rank's windows."""
        settings: list[Any] = [
            self.setting("kernel_size"),
            self.setting("stride"),
            self.setting_without_rows("padding")
            if hasattr(self.__dict__["wrapped"], "padding")
            else 0,
            self.ceil_mode,
            self._counts_padding,
        ]
        if self._divisor is not None:
            settings.append(self._divisor)
        rows = self.fetch(x, bands)
        made: Tensor = getattr(nn.functional, f"avg_pool{self._spatial_ndim}d")(rows, *settings)
        return self._rescale_by_count(made, bands)

    def _rescale_by_count(self, made: Tensor, bands: Bands) -> Tensor:
        """Divide by the rows that count in each window, where all of the kernel's were."""
        height, kernel = bands.input.height, self._kernel
        counts = [self._counted_rows(i, height) for i in range(bands.output.height)]
        if self._divisor is not None or set(counts) == {kernel}:  # on every rank alike
            return made
        out = counts[bands.output.rows(self.manager.domain_rank)]
        shares = [kernel / count if count > 0 else 0.0 for count in out]
        factors = constant_tensor(shares, made.device, made.dtype)
        return made * factors.view(-1, *[1] * (-self.dim - 1))

    def _counted_rows(self, out: int, height: int) -> int:
        """Return how many rows of the window of an output row count."""
        first, stop = self.input_span(slice(out, out + 1), height)
        if self._counts_padding:
            return min(stop, height + self._padding) - first
        return min(stop, height) - max(first, 0)


@final
class DomainParallelAvgPool(_AveragePool):
    """An `nn.AvgPool*d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride and padding, ceil mode, `count_include_pad` and `divisor_override`.

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
        powers = means.sign() * means.abs().relu() * prod(self.setting("kernel_size"))
        return powers.pow(1 / self.norm_type)


def global_flat_indices(indices: Tensor, rows: Tensor, columns: int, height: int) -> Tensor:
    """Return positions in a channel of the globe, in row-major order.

    Args:
        indices: positions in a channel of these rows, in row-major order.
        rows: the global row of each of the rows.
        columns: entries of a row; 1 if rows are the last dimension.
        height: rows of the globe.
    """
    level = indices // (len(rows) * columns)
    row = rows[indices // columns % len(rows)]
    return (level * height + row) * columns + indices % columns


@final
class DomainParallelMaxPool(PoolLayer, ConstantFillLayer):
    """An `nn.MaxPool*d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, padding and dilation, with or without ceil mode. `return_indices` returns
    positions on the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    @property
    def _kernel_extent(self) -> int:
        return self.setting("dilation")[self.dim] * (self._kernel - 1) + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output rows."""
        rows = self.fetch_with_fill(x, bands, -torch.inf)
        made = getattr(nn.functional, f"max_pool{self._spatial_ndim}d")(
            rows,
            self.setting("kernel_size"),
            self.setting("stride"),
            self.setting_without_rows("padding"),
            self.setting("dilation"),
            self.ceil_mode,
            return_indices=self.return_indices,
        )
        if not self.return_indices:
            return made  # type: ignore[no-any-return]
        maxima, indices = made
        height = bands.input.height
        first, stop = self.input_span(bands.output.rows(self.manager.domain_rank), height)
        # Where all rows of the globe are -inf the first of them counts, as in torch.
        taken = torch.arange(first, stop, device=x.device).clamp(0, height - 1)
        columns = x.shape[self.dim :].numel() // x.shape[self.dim]
        return maxima, global_flat_indices(indices, taken, columns, height)


AdaptiveAvgPool = nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d
AdaptiveMaxPool = nn.AdaptiveMaxPool1d | nn.AdaptiveMaxPool2d | nn.AdaptiveMaxPool3d
ADAPTIVE_SPATIAL_NDIM: dict[type[nn.Module], int] = {
    kind: ndim
    for kinds in (AdaptiveAvgPool, AdaptiveMaxPool)
    for ndim, kind in enumerate(kinds.__args__, start=1)
}


def output_size_along(pool: AdaptiveAvgPool | AdaptiveMaxPool, dim: int) -> int | None:
    """Return a pool's output size in a negative dimension; None keeps the input's."""
    size: Any = pool.output_size
    return size[dim] if isinstance(size, tuple | list) else size  # type: ignore[no-any-return]


class _GlobalPool(ReductionLayer, ABC):
    """Pooling of all bands to one row, the same on every rank."""

    output_is_banded = False

    def __init__(
        self,
        pool: AdaptiveAvgPool | AdaptiveMaxPool,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager)
        self._spatial_ndim = next(
            n for kind, n in ADAPTIVE_SPATIAL_NDIM.items() if isinstance(pool, kind)
        )

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet where the pool is."""
        if dim < -self._spatial_ndim:
            return False
        if output_size_along(self.__dict__["wrapped"], dim) != 1:
            raise UserError(
                f"{type(self.__dict__['wrapped']).__name__}: rows are in dimension {dim}, where "
                f"output_size is {self.output_size}. Make it 1 there."
            )
        return True


@final
class DomainParallelGlobalAvgPool(_GlobalPool):
    """An `AdaptiveAvgPool` to one row, equal to that layer on the whole globe.

    Args:
        pool: the layer to shard; its output size is 1 along the rows.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, 1, W_out)`, or another number of dimensions.
    """

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Weigh the means of all bands by their rows."""
        rows, height = bands.input.sizes[self.manager.domain_rank], bands.input.height
        part = self.global_forward(x.to(accumulation_dtype(x))) * (rows / height)
        return sum_over_bands(part, self.manager.transport).to(x.dtype)


@final
class DomainParallelGlobalMaxPool(_GlobalPool):
    """An `AdaptiveMaxPool` to one row, equal to that layer on the whole globe.

    As in torch, the first of several equal maxima gets the gradient, and `return_indices` returns
    where it is in the whole globe. See `DomainParallelGlobalAvgPool` for arguments and shapes.
    """

    def reduce(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return the largest of all bands' maxima."""
        wrapped = self.__dict__["wrapped"]
        pool = getattr(nn.functional, f"adaptive_max_pool{self._spatial_ndim}d")
        part, indices = pool(x, wrapped.output_size, return_indices=True)
        first = self._to_global_indices(indices, x, bands.input)
        top, place = _FirstMax.apply(part, first, self.manager.transport)  # type: ignore[no-untyped-call]
        return (top, place) if wrapped.return_indices else top

    def _to_global_indices(self, indices: Tensor, x: Tensor, taken: RowPartition) -> Tensor:
        """Turn positions in a channel of the band, in row-major order, into those in the globe."""
        beyond = x.shape[self.dim + 1 :].numel() if self.dim < -1 else 1
        outer = indices // (x.shape[self.dim] * beyond)
        missing = taken.height - x.shape[self.dim]
        north = taken.bounds[self.manager.domain_rank]
        return indices + (outer * missing + north) * beyond


class _FirstMax(torch.autograd.Function):
    """The maximum of all bands' maxima, of equal ones the first; that one gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, place: Tensor, transport: Transport
    ) -> tuple[Tensor, Tensor]:
        # float64 holds both exactly: one collective serves.
        parts, places = transport.all_gather(torch.stack([part.double(), place.double()])).unbind(1)
        top = parts.amax(0)
        first = torch.where((parts == top) | parts.isnan(), places, torch.inf).amin(0)
        ctx.save_for_backward(place == first)
        ctx.transport = transport
        place = first.long()
        ctx.mark_non_differentiable(place)
        return top.to(part.dtype), place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        (mine,) = ctx.saved_tensors
        return ctx.transport.sum(grad.contiguous()) * mine, None, None

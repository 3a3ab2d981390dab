"""Adaptive pooling that leaves one row of the whole globe."""

from __future__ import annotations

from abc import ABC
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import (
    StatisticsLayer,
    sum_of_bands,
    wide_dtype,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

AvgPool = nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d
MaxPool = nn.AdaptiveMaxPool1d | nn.AdaptiveMaxPool2d | nn.AdaptiveMaxPool3d
AREA_DIMS: dict[type[nn.Module], int] = {
    kind: ndim for kinds in (AvgPool, MaxPool) for ndim, kind in enumerate(kinds.__args__, start=1)
}


def size_along(pool: AvgPool | MaxPool, dim: int) -> int | None:
    """Return a pool's output size in a negative dimension; None keeps the input's."""
    size: Any = pool.output_size
    return size[dim] if isinstance(size, tuple | list) else size  # type: ignore[no-any-return]


class _GlobalPool(StatisticsLayer, ABC):
    """Pooling of all bands to one row, the same on every rank."""

    makes_rows = False

    def __init__(
        self,
        pool: AvgPool | MaxPool,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager)
        self._area = next(n for kind, n in AREA_DIMS.items() if isinstance(pool, kind))

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet where the pool is."""
        if dim < -self._area:
            return False
        if size_along(self.__dict__["wrapped"], dim) != 1:
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
        rows, height = bands.taken.sizes[self.manager.domain_rank], bands.taken.height
        part = self.whole(x.to(wide_dtype(x))) * (rows / height)
        return sum_of_bands(part, self.manager.transport).to(x.dtype)


@final
class DomainParallelGlobalMaxPool(_GlobalPool):
    """An `AdaptiveMaxPool` to one row, equal to that layer on the whole globe.

    As in torch, the first of several equal maxima gets the gradient, and `return_indices` returns
    where it is in the whole globe. See `DomainParallelGlobalAvgPool` for arguments and shapes.
    """

    def reduce(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return the largest of all bands' maxima."""
        wrapped = self.__dict__["wrapped"]
        pool = getattr(nn.functional, f"adaptive_max_pool{self._area}d")
        part, indices = pool(x, wrapped.output_size, return_indices=True)
        first = self._on_globe(indices, x, bands.taken)
        top, place = _FirstMax.apply(part, first, self.manager.transport)  # type: ignore[no-untyped-call]
        return (top, place) if wrapped.return_indices else top

    def _on_globe(self, indices: Tensor, x: Tensor, taken: RowPartition) -> Tensor:
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
        parts, places = transport.gather(torch.stack([part.double(), place.double()])).unbind(1)
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

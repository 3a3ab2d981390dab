"""Mean, sum and maximum over dimensions that may hold the globe's rows."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import (
    StatisticsLayer,
    as_autocast_takes,
    sum_of_bands,
    wide_dtype,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport


@final
class Reduction(nn.Module):
    """One of torch's reductions as a module."""

    def __init__(
        self, function: Callable[..., Tensor], dims: tuple[int, ...], keepdim: bool
    ) -> None:
        super().__init__()
        self.function = function
        self.dims = dims
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """Reduce `x` over its dimensions, all if none is named."""
        return self.function(x, self.dims, self.keepdim)

    def extra_repr(self) -> str:
        """Name the reduction and its dimensions."""
        return f"{self.function.__name__}, dims={self.dims or 'all'}, keepdim={self.keepdim}"


class _DomainParallelReduction(StatisticsLayer, ABC):
    """A reduction over all bands: the same result on every rank.

    Where the rows are not among the dimensions it is an ordinary reduction.

    Args:
        dims: dimensions to reduce, counted from the start or the end; none means all.
        keepdim: whether they stay, with one entry each.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.

    Shapes:
        `(..., H_local, ...)` -> the shape of the whole globe's result.
    """

    makes_rows = False
    function: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        dims: int | tuple[int, ...] | None = None,
        keepdim: bool = False,
        *,
        manager: DomainParallelManager | None = None,
        shard_dim: int = -2,
    ) -> None:
        named = (dims,) if isinstance(dims, int) else tuple(dims or ())
        super().__init__(Reduction(type(self).function, named, keepdim), shard_dim, manager)
        self.dims = named
        self.keepdim = keepdim

    def mixes(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one of the dimensions to reduce."""
        return not self.dims or dim % ndim in {d % ndim for d in self.dims}


@final
class DomainParallelSum(_DomainParallelReduction):
    """The sum over dimensions of the whole globe.

    See `DomainParallelMean` for arguments and shapes.
    """

    function = torch.sum

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Add up the sums of all bands."""
        x = as_autocast_takes(x)
        wide = wide_dtype(x) if x.is_floating_point() else None
        part = x.sum(self.dims, self.keepdim, dtype=wide)
        total = sum_of_bands(part, self.manager.transport)
        return total.to(x.dtype) if x.is_floating_point() else total


@final
class DomainParallelMean(_DomainParallelReduction):
    """The mean over dimensions of the whole globe, however many rows each band has.

    Args:
        dims: dimensions to reduce, counted from the start or the end; none means all.
        keepdim: whether they stay, with one entry each.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.

    Shapes:
        `(..., H_local, ...)` -> the shape of the whole globe's mean, the same on every rank. The
        ordinary mean where rows are not among `dims`.
    """

    function = torch.mean

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Weigh the means of all bands by their rows."""
        rows, height = bands.taken.sizes[self.manager.domain_rank], bands.taken.height
        part = x.mean(self.dims, self.keepdim, dtype=wide_dtype(x)) * (rows / height)
        return sum_of_bands(part, self.manager.transport).to(x.dtype)


@final
class DomainParallelMax(_DomainParallelReduction):
    """The maximum over dimensions of the whole globe; equal maxima share the gradient evenly.

    See `DomainParallelMean` for arguments and shapes, `torch.amax` for the gradient.
    """

    function = torch.amax

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the largest of all bands' maxima."""
        part = x.amax(self.dims, True)
        ties = (x.detach() == part.detach()).sum(self.dims, True)
        top: Tensor = _MaxOfBands.apply(part, ties, self.manager.transport)  # type: ignore[no-untyped-call]
        return top if self.keepdim else top.squeeze(self.dims or tuple(range(x.ndim)))


class _MaxOfBands(torch.autograd.Function):
    """The maximum of all bands' maxima; each band's cotangent is weighed by its ties with it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ties: Tensor, transport: Transport) -> Tensor:
        # float64 holds both exactly: one collective serves.
        mine = torch.stack([part.double(), ties.double()])
        parts, counts = transport.gather(mine).unbind(1)
        top = parts.amax(0)
        total = torch.where(parts == top, counts, 0.0).sum(0)
        ctx.save_for_backward(torch.where(mine[0] == top, mine[1], 0.0) / total)
        ctx.transport = transport
        return top.to(part.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return ctx.transport.sum(grad.contiguous()) * share.to(grad.dtype), None, None

"""Softmax over the globe's rows."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import (
    StatisticsLayer,
    as_autocast_takes,
    wide_dtype,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport


@final
class DomainParallelSoftmax(StatisticsLayer):
    """A `Softmax`, `LogSoftmax` or `Softmin` over rows, equal to that layer on the whole globe.

    One collective forward and one backward, each of one slice or two of the band; none where the
    rows are in another dimension than the layer's.

    Args:
        layer: the layer to shard.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, ...)` -> the same.
    """

    def __init__(
        self,
        layer: nn.Softmax | nn.LogSoftmax | nn.Softmin,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(layer, shard_dim, manager)
        self.logarithm = isinstance(layer, nn.LogSoftmax)
        self.sign = -1 if isinstance(layer, nn.Softmin) else 1

    def mixes(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is the layer's; without one torch takes the first or second."""
        own = self.__dict__["wrapped"].dim
        if own is None:
            own = 0 if ndim in (0, 1, 3) else 1
        return bool(dim % ndim == own % ndim)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band's share of the globe's softmax."""
        x = as_autocast_takes(x)
        wide = self.sign * x.to(wide_dtype(x))
        y: Tensor = _Softmax.apply(wide, self.dim, self.logarithm, self.manager.transport)  # type: ignore[no-untyped-call]
        return y.to(x.dtype)


@final
class _Softmax(torch.autograd.Function):
    """Exponentials relative to the globe's maximum; backward sums over all bands once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, logarithm: bool, transport: Transport) -> Tensor:
        top = x.amax(dim, True)
        # A band without any finite entry adds nothing.
        y = (x - torch.where(top.isneginf(), 0.0, top)).exp_()
        tops, sums = transport.gather(torch.stack([top, y.sum(dim, True)])).unbind(1)
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)
        if logarithm:
            y = (x - highest).sub_(total.log())
        else:
            y.mul_((top - highest).exp_().div_(total))
        ctx.save_for_backward(y)
        ctx.dim, ctx.logarithm, ctx.transport = dim, logarithm, transport
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        share = grad if ctx.logarithm else grad * y
        total = ctx.transport.sum(share.sum(ctx.dim, True))
        grad_x = grad - y.exp() * total if ctx.logarithm else share.sub_(y * total)
        return grad_x, None, None, None

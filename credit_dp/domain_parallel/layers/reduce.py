"""Reductions and softmax over dimensions that may hold the globe's rows, and stochastic depth."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.layers.norm import (
    ReductionLayer,
    accumulation_dtype,
    cast_for_autocast,
    sum_over_bands,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError


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


class _DomainParallelReduction(ReductionLayer, ABC):
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

    output_is_banded = False
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

    def couples_rows(self, dim: int, ndim: int) -> bool:
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
        x = cast_for_autocast(x)
        wide = accumulation_dtype(x) if x.is_floating_point() else None
        part = x.sum(self.dims, self.keepdim, dtype=wide)
        total = sum_over_bands(part, self.manager.transport)
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
        rows, height = bands.input.sizes[self.manager.domain_rank], bands.input.height
        part = x.mean(self.dims, self.keepdim, dtype=accumulation_dtype(x)) * (rows / height)
        return sum_over_bands(part, self.manager.transport).to(x.dtype)


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
        top: Tensor = _MaxOverBands.apply(part, ties, self.manager.transport)  # type: ignore[no-untyped-call]
        return top if self.keepdim else top.squeeze(self.dims or tuple(range(x.ndim)))


class _MaxOverBands(torch.autograd.Function):
    """The maximum of all bands' maxima; each band's cotangent is weighed by its ties with it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ties: Tensor, transport: Transport) -> Tensor:
        # float64 holds both exactly: one collective serves.
        mine = torch.stack([part.double(), ties.double()])
        parts, counts = transport.all_gather(mine).unbind(1)
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


@final
class DomainParallelSoftmax(ReductionLayer):
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

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is the layer's; without one torch takes the first or second."""
        own = self.__dict__["wrapped"].dim
        if own is None:
            own = 0 if ndim in (0, 1, 3) else 1
        return bool(dim % ndim == own % ndim)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band's share of the globe's softmax."""
        x = cast_for_autocast(x)
        wide = self.sign * x.to(accumulation_dtype(x))
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
        tops, sums = transport.all_gather(torch.stack([top, y.sum(dim, True)])).unbind(1)
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


@final
class DomainParallelStochasticDepth(RowLayer):
    """Drops branches of samples as the layer on the whole globe does.

    Args:
        layer: has a `rate` and `draws`, one number for each sample, None until they are set.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, ...)`, rows in any dimension but the first -> the same.

    Raises:
        UserError: in training, nobody has set the numbers: each rank would draw its own.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, ROW_DIM, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """All ranks have to draw alike wherever rows are, but among the samples.

        Raises:
            UserError: rows are in the samples' dimension.
        """
        if dim == -ndim:
            raise UserError(
                f"{type(self).__name__}: rows are in the samples' dimension. Move them elsewhere."
            )
        return True

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the same rows."""
        return (RowRange(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the branches that stay."""
        if self.training and self.rate and self.draws is None and not x.is_meta:
            raise UserError(
                f"{type(self).__name__}: the ranks of a globe have to drop the same branches. "
                "Call credit_dp.models.blocks.draw_stochastic_depths before each training step."
            )
        return self.global_forward(x)  # type: ignore[no-any-return]

"""Sum, mean, maximum and softmax over dimensions with the globe's rows, and stochastic depth.

Each rank reduces its band; one collective combines the results, and one more in backward sums their
gradients, as each rank's output depends on all bands.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.reductions import (
    accumulation_dtype,
    softmax_backward,
    softmax_forward,
    sum_over_bands,
)
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.base import Bands, FunctionModule, RowLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer, cast_for_autocast
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError
from credit_dp.torch_private import FakeTensor


class _DomainParallelReduction(ReductionLayer, ABC):
    """A reduction over all bands, with the same result on every rank.

    See `DomainParallelMean` for arguments and shapes.
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
        dims_tuple = (dims,) if isinstance(dims, int) else tuple(dims or ())
        module = FunctionModule(type(self).function, dims_tuple, keepdim)
        super().__init__(module, shard_dim, manager)
        self.dims = dims_tuple
        self.keepdim = keepdim

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one of the dimensions to reduce."""
        return not self.dims or dim % ndim in {d % ndim for d in self.dims}


def sum_of_entries(
    x: Tensor,
    dims: list[int] | tuple[int, ...],
    keepdim: bool,
    transport: Transport,
    divisor: int = 1,
) -> Tensor:
    """Return the sum of all bands' entries, over all dimensions if `dims` is empty; a collective.

    Divided by their number it is the mean. In at least float32, as torch does: a sum of halves
    would overflow before it is divided.
    """
    wide = accumulation_dtype(x) if x.is_floating_point() else None
    total = sum_over_bands(x.sum(dims, keepdim, dtype=wide), transport)
    total = total if divisor == 1 else total / divisor
    return total if wide is None else total.to(x.dtype)


@final
class DomainParallelSum(_DomainParallelReduction):
    """The sum over dimensions of the whole globe.

    See `DomainParallelMean` for arguments and shapes.
    """

    function = torch.sum

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the sum of the bands' sums."""
        x = cast_for_autocast(x)
        return sum_of_entries(x, self.dims, self.keepdim, self.manager.transport)


@final
class DomainParallelMean(_DomainParallelReduction):
    """The mean over dimensions of the whole globe, however many rows each band has.

    Args:
        dims: dimensions to reduce, counted from the start or the end; None means all.
        keepdim: whether reduced dimensions stay, with size 1.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        shard_dim: the row dimension of the input; a plan may replace it.

    Shapes:
        `(..., H_local, ...)` -> the shape of the whole globe's mean, the same on every rank. It is
        the ordinary mean of the band if the row dimension is not one of `dims`.
    """

    function = torch.mean

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the sum of the bands' sums, divided by the entries of the globe."""
        sizes = list(x.shape)
        sizes[self.dim] = bands.input.height
        count = prod([sizes[d] for d in self.dims] if self.dims else sizes)
        return sum_of_entries(x, self.dims, self.keepdim, self.manager.transport, count)


@final
class DomainParallelMax(_DomainParallelReduction):
    """The maximum over dimensions of the whole globe; equal maxima share the gradient evenly.

    See `DomainParallelMean` for arguments and shapes, `torch.amax` for the gradient.
    """

    function = torch.amax

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the maximum of the bands' maxima."""
        return max_over_bands(x, self.dims, self.keepdim, self.manager.transport)


def max_over_bands(x: Tensor, dims: tuple[int, ...], keepdim: bool, transport: Transport) -> Tensor:
    """Return the maximum of all bands, over all dimensions if `dims` is empty; a collective."""
    maxima = x.amax(dims, True)
    counts = (x.detach() == maxima.detach()).sum(dims or tuple(range(x.ndim)), True)
    maximum: Tensor = _MaxOverBands.apply(maxima, counts, transport)  # type: ignore[no-untyped-call]
    return maximum if keepdim else maximum.squeeze(dims or tuple(range(x.ndim)))


class _MaxOverBands(torch.autograd.Function):
    """Maximum over bands; equal maxima, `counts` of them in a band, share the gradient."""

    @staticmethod
    def forward(ctx: Any, maxima: Tensor, counts: Tensor, transport: Transport) -> Tensor:
        # One collective for both: float64 holds counts up to 2**53 and all values exactly. torch
        # shares the gradient among equal maxima; the number of these is that of the whole globe.
        local = torch.stack([maxima.double(), counts.double()])
        all_maxima, all_counts = transport.all_gather(local).unbind(1)
        maximum = all_maxima.amax(0)
        total = torch.where(all_maxima == maximum, all_counts, 0.0).sum(0)
        ctx.save_for_backward(torch.where(local[0] == maximum, local[1], 0.0) / total)
        ctx.transport = transport
        return maximum.to(maxima.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Every rank holds the maximum: its gradient is the sum of theirs.
        (share,) = ctx.saved_tensors
        return sum_over_bands(grad, ctx.transport) * share.to(grad.dtype), None, None


@final
class DomainParallelSoftmax(ReductionLayer):
    """A `Softmax`, `LogSoftmax` or `Softmin` over rows, equal to that layer on the whole globe.

    One collective in forward, of two rows, and one in backward, of one row. None if the rows are in
    another dimension than that of the softmax.

    Args:
        layer: the layer to shard.
        shard_dim: the row dimension of the input; a plan may replace it.
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
        """Return whether `dim` is that of the softmax."""
        softmax_dim = self.__dict__["wrapped"].dim
        if softmax_dim is None:  # torch's deprecated default
            softmax_dim = 0 if ndim in (0, 1, 3) else 1
        return bool(dim % ndim == softmax_dim % ndim)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this band of the softmax over the globe."""
        return softmax_over_bands(self.sign * x, self.dim, self.logarithm, self.manager.transport)


def softmax_over_bands(x: Tensor, dim: int, logarithm: bool, transport: Transport) -> Tensor:
    """Return a band of the softmax over a dimension of all bands, or its logarithm; a collective.

    Every rank needs a row.
    """
    x = cast_for_autocast(x)
    y: Tensor = _Softmax.apply(x.to(accumulation_dtype(x)), dim, logarithm, transport)  # type: ignore[no-untyped-call]
    return y.to(x.dtype)


@final
class _Softmax(torch.autograd.Function):
    """Softmax or its logarithm over all bands, relative to the globe's maximum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, logarithm: bool, transport: Transport) -> Tensor:
        y = softmax_forward(x, dim, logarithm, transport)
        ctx.save_for_backward(y)
        ctx.dim = dim
        ctx.logarithm = logarithm
        ctx.transport = transport
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        return softmax_backward(grad, y, ctx.dim, ctx.logarithm, ctx.transport), None, None, None


@final
class DomainParallelStochasticDepth(RowLayer):
    """Stochastic depth on one band of rows, with the same branches dropped on every rank.

    Args:
        layer: a module with a `rate` and `draws`: one random number per sample, or None before
            they are set.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, ...)`, with rows in any dimension except the first -> the same.

    Raises:
        UserError: `draws` is None in training: each rank would draw other numbers.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, ROW_DIM, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return True: all ranks that share a globe must drop the same branches.

        Raises:
            UserError: the rows are in the samples' dimension.
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
        """Return the output rows themselves: nothing is fetched."""
        return (RowRange(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the branches that are kept."""
        has_data = not (x.is_meta or isinstance(x, FakeTensor))  # a plan has no numbers to draw
        if self.training and self.rate and self.draws is None and has_data:
            raise UserError(
                f"{type(self).__name__}: all ranks of a globe have to drop the same branches. "
                "Call credit_dp.models.blocks.draw_stochastic_depths before each training step."
            )
        return self.global_forward(x)  # type: ignore[no-any-return]

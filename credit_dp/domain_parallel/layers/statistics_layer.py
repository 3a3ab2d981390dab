"""Layers that fetch no rows: of each band only statistics travel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.transport import Transport


class StatisticsLayer(RowLayer):
    """A layer that reduces over rows, wherever they are in its input."""

    def _check_dim(self) -> None:
        """Accept rows in any dimension."""

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows as they are."""
        return (Run(out.start, out.stop),)

    @abstractmethod
    def mixes(self, dim: int, ndim: int) -> bool:
        """Return whether the layer reduces over dimension `dim`."""

    def compute(self, x: Tensor, bands: Bands) -> Any:
        """Reduce over all bands; over this one alone where its rows stay apart."""
        if not self.mixes(self.dim, x.ndim):
            return self.whole(x)
        return self.reduce(x, bands)

    @abstractmethod
    def reduce(self, x: Tensor, bands: Bands) -> Any:
        """Return what the layer makes of this band with the statistics of all."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the type to reduce in, as torch does: half-precision sums are too coarse."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def as_autocast_takes(x: Tensor) -> Tensor:
    """Return `x` in the type in which autocast sums, takes a softmax or norms a layer.

    On GPUs it is float32; on CPUs autocast leaves these alone.
    """
    kind = x.device.type
    if kind == "cpu" or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(wide_dtype(x)) if torch.is_autocast_enabled(kind) else x


def sum_of_bands(part: Tensor, transport: Transport) -> Tensor:
    """Return the sum of every rank's part, on every rank; differentiable."""
    return _SumOfBands.apply(part, transport)  # type: ignore[no-any-return, no-untyped-call]


@final
class _SumOfBands(torch.autograd.Function):
    """The sum is on every rank, so that each part's cotangent is the sum of all ranks' ones."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        return transport.sum(part.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transport.sum(grad.contiguous()), None

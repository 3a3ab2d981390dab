"""Batch, instance, layer and root-mean-square norms with the statistics of the whole globe.

Each rank computes by `bands.norms`. `ReductionLayer` serves all layers that reduce over rows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from credit_dp.domain_parallel.bands.norms import (
    GlobalReduction,
    Moments,
    mean_and_variance,
    norm_backward,
    norm_forward,
    summed_to,
    update_running_statistics,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.halo_exchange import gradients_need_graph, gradients_with_graph
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.errors import UserError


class ReductionLayer(RowLayer):
    """A layer that reduces over rows, in any dimension of its input."""

    def _check_dim(self) -> None:
        """Accept rows in any dimension."""

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the output rows themselves: nothing is fetched."""
        return (RowRange(out.start, out.stop),)

    @abstractmethod
    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether the layer reduces over dimension `dim`."""

    def compute(self, x: Tensor, bands: Bands) -> Any:
        """Reduce over all bands, or apply the wrapped layer if it couples no rows."""
        if not self.couples_rows(self.dim, x.ndim):
            return self.global_forward(x)
        return self.reduce(x, bands)

    @abstractmethod
    def reduce(self, x: Tensor, bands: Bands) -> Any:
        """Return this band's output, with statistics of all bands; a collective."""


def normalise(
    x: Tensor,
    moments: Moments,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    reduction: GlobalReduction,
    parameter_shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias`.

    `moments` have to be those of `x`: backward also differentiates through them and is a
    collective. `weight` and `bias` broadcast against `x`, or `reduction.by_group(x)`: in
    `parameter_shape` if that is given, else they may be those of this band's rows.
    """
    mean, variance = moments
    rstd = (variance + eps).rsqrt_()
    y: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, rstd, reduction, eps, parameter_shape
    )
    return y


@final
class _Normalise(torch.autograd.Function):
    """Normalisation; backward sums the gradients of the moments over all bands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        reduction: GlobalReduction,
        eps: float,
        parameter_shape: tuple[int, ...] | None,
    ) -> Tensor:
        # The standardised input is computed again in backward: it is as large as the input.
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.reduction = reduction
        ctx.eps = eps
        ctx.parameter_shape = parameter_shape
        ctx.likes = [None if p is None else (p.shape, p.dtype) for p in (weight, bias)]
        return norm_forward(x, (mean, rstd), weight, bias, reduction, parameter_shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        reduction: GlobalReduction = ctx.reduction
        shape = ctx.parameter_shape
        needs = ctx.needs_input_grad[:3]
        if gradients_need_graph():

            def scaled_standard(x: Tensor, weight: Tensor | None) -> Tensor:
                y = differentiable_standard(x, mean is not None, ctx.eps, reduction)
                y = y if weight is None else y * (weight if shape is None else weight.view(shape))
                return reduction.ungroup(y)

            grads = gradients_with_graph(scaled_standard, (x, weight), needs[:2], grad)
            if needs[2]:
                by_group = reduction.by_group(grad.to(rstd.dtype))
                grads.append(_like(summed_to(by_group, shape or ctx.likes[1][0]), ctx.likes[1]))
            return *grads, *(None,) * (8 - len(grads))
        # Gradients of parameters are this band's share; the trainer sums them over the domain.
        # That of the input is a collective, and needed on every rank or on none.
        moments = (mean, rstd)
        grad_x, *grads = norm_backward(grad, x, moments, weight, reduction, shape, needs=needs)
        return grad_x, *map(_like, grads, ctx.likes), *(None,) * 5


def _like(grad: Tensor | None, like: tuple[torch.Size, torch.dtype]) -> Tensor | None:
    return None if grad is None else grad.view(like[0]).to(like[1])


def differentiable_standard(
    x: Tensor, centred: bool, eps: float, reduction: GlobalReduction
) -> Tensor:
    """Return `x`, less its mean if `centred`, over its standard deviation; collectives.

    In terms of functions that can be differentiated any number of times, as a second derivative
    needs it. Half precision becomes float32.
    """
    x = reduction.by_group(x.to(accumulation_dtype(x)))
    count = reduction.count(x)

    def mean_of(values: Tensor) -> Tensor:
        return sum_over_bands(values.sum(reduction.dims, True), reduction.transport) / count

    if centred:
        x = x - mean_of(x)
    return x * (mean_of(x.square()) + eps).rsqrt()


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
class DomainParallelBatchNorm(ReductionLayer):
    """A `BatchNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward; none where running statistics are used.
    Running statistics are those of the whole globe, the same on all ranks that share it.

    Shapes:
        `(B, C, ..., H_local, ...)` -> the same.

    Source: Ioffe & Szegedy 2015, algorithm 1.
    """

    def __init__(self, norm: BatchNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return True: statistics cover all dimensions except the channels."""
        if dim + ndim == 1:
            raise UserError("BatchNorm: rows are in the channels' dimension. Move them elsewhere.")
        return True

    def global_forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Normalise the whole globe, or a band by running statistics; planning needs the shape."""
        # Torch takes this one apart on tensors without data, which would be half of a plan's time.
        if active_planner() is not None and self._accepts(x):
            return torch.empty_like(x)
        if not self._is_tracking or self.momentum is not None:
            return super().global_forward(x, *others)  # type: ignore[no-any-return]
        # With momentum=None torch reads num_batches_tracked as a Python number, which has no value
        # on fake tensors during planning.
        y = functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        variance, mean = torch.var_mean(x.detach(), self._reduced_dims(x), correction=0)
        self._update_running_statistics((mean, variance), x[:, 0].numel())
        return y

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.running_mean is not None:
            return self.global_forward(x)  # with running statistics, entries are independent
        reduction = GlobalReduction(
            self._reduced_dims(x), self.dim, bands.input.sizes, self.manager.transport
        )
        moments = mean_and_variance(x, reduction)
        if self._is_tracking:
            self._update_running_statistics(moments, reduction.count(x))
        # Parameters broadcast against `(B, C, ...)`.
        per_channel = (x.shape[1], *(1,) * (x.ndim - 2))
        return normalise(x, moments, self.eps, self.weight, self.bias, reduction, per_channel)

    def _accepts(self, x: Tensor) -> bool:
        """Return whether torch would normalise this without an error."""
        has_channels = x.ndim > 1 and x.shape[1] == self.num_features
        return has_channels and (x.numel() > x.shape[1] or not self.training)

    @property
    def _is_tracking(self) -> bool:
        return bool(self.training and self.track_running_stats)

    def _reduced_dims(self, x: Tensor) -> tuple[int, ...]:
        return tuple(dim for dim in range(-x.ndim, 0) if dim != 1 - x.ndim)

    def _update_running_statistics(self, moments: tuple[Tensor, Tensor], count: int) -> None:
        """Count the batch and move the running statistics towards its moments."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        update_running_statistics((self.running_mean, self.running_var), moments, count, momentum)


InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
INSTANCE_NORMS = get_args(InstanceNorm)  # by their numbers of dimensions


@final
class DomainParallelInstanceNorm(ReductionLayer):
    """An `InstanceNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward; none where running statistics are used.

    Shapes:
        `(B, C, ..., H_local, ...)` or `(C, ..., H_local, ...)` -> the same.

    Source: Ulyanov, Vedaldi & Lempitsky 2016, eq. 1.
    """

    def __init__(self, norm: InstanceNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)
        # Number of dimensions of one channel of a sample.
        self._spatial_ndim = 1 + [isinstance(norm, kind) for kind in INSTANCE_NORMS].index(True)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one that each channel is averaged over."""
        if dim == -self._spatial_ndim - 1:
            raise UserError(
                "InstanceNorm: rows are in the channels' dimension. Move them elsewhere."
            )
        if dim < -self._spatial_ndim and self.track_running_stats:
            raise UserError(
                "InstanceNorm: rows are in the samples' dimension, over which running statistics "
                "are averaged. Move them elsewhere or set track_running_stats=False."
            )
        return dim >= -self._spatial_ndim

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.track_running_stats:
            return self.global_forward(x)  # type: ignore[no-any-return]
        dims = tuple(range(-self._spatial_ndim, 0))
        reduction = GlobalReduction(dims, self.dim, bands.input.sizes, self.manager.transport)
        moments = mean_and_variance(x, reduction)
        if self.running_mean is not None:
            # As in torch, batches are not counted: momentum=None means no update.
            momentum = self.momentum or 0.0
            running = (self.running_mean, self.running_var)
            update_running_statistics(running, moments, reduction.count(x), momentum)
        per_channel = (self.num_features, *(1,) * self._spatial_ndim)
        return normalise(x, moments, self.eps, self.weight, self.bias, reduction, per_channel)

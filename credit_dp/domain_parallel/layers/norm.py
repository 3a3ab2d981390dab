"""Batch, instance, layer and root-mean-square norms with the statistics of the whole globe.

Forward: each rank computes the moments of its band, one collective gathers them, and every rank
combines them in the same way (`mean_and_variance`, `mean_square`). Backward: the output also
depends on `x` through the moments, so the sums that this term needs go through one more collective
(`_Normalise`). `ReductionLayer` serves all layers that reduce over rows.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any, NamedTuple, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.halo_exchange import gradients_need_graph, gradients_with_graph
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError
from credit_dp.torch_private import AUTOCAST_WIDENS_RMS_NORM


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


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to reduce in: at least float32, as in torch."""
    # Not by `promote_types`, which is an operation to a plan.
    is_narrow = x.is_floating_point() and x.dtype != torch.float64
    return torch.float32 if is_narrow else x.dtype


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which autocast runs sums, softmax and layer norm.

    On GPUs that is at least float32; on CPUs autocast does not change these operations.
    """
    device_type = x.device.type
    if device_type == "cpu" or not torch.amp.is_autocast_available(device_type):
        return x
    return x.to(accumulation_dtype(x)) if torch.is_autocast_enabled(device_type) else x


def cast_for_rms_norm(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which autocast runs RMS norms with this version of torch."""
    return cast_for_autocast(x) if AUTOCAST_WIDENS_RMS_NORM else x


def sum_over_bands(part: Tensor, transport: Transport) -> Tensor:
    """Return the sum of all ranks' `part` on every rank; a differentiable collective."""
    if torch.compiler.is_dynamo_compiling():  # differentiable by itself
        return transport.all_reduce(part)
    return _SumOverBands.apply(part, transport)  # type: ignore[no-any-return, no-untyped-call]


@final
class _SumOverBands(torch.autograd.Function):
    """All-reduce whose backward is an all-reduce, too.

    The sum is replicated: each rank's loss depends on it, so the gradient of a part is the sum of
    the gradients that all ranks have for the sum.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        return transport.all_reduce(part.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if gradients_need_graph():
            return sum_over_bands(grad, ctx.transport), None
        return ctx.transport.all_reduce(grad.contiguous()), None


def row_shares(rows: tuple[int, ...]) -> list[float]:
    """Return the share of each rank's rows in all rows."""
    return [count / sum(rows) for count in rows]


class GlobalReduction(NamedTuple):
    """A reduction of all bands over the negative dimensions `dims`, which include `row_dim`.

    `rows` is the number of rows of each rank. With `groups` the moments are those of groups of
    channels, and `dims` and moments belong to the view that `by_group` returns.
    """

    dims: tuple[int, ...]
    row_dim: int
    rows: tuple[int, ...]
    transport: Transport
    groups: int | None = None

    def by_group(self, x: Tensor) -> Tensor:
        """Return `(B, C, ...)` as `(B, groups, C / groups, ...)`, if there are groups."""
        if self.groups is None:
            return x
        samples, channels, *sizes = x.shape
        return x.view(samples, self.groups, channels // self.groups, *sizes)

    def ungroup(self, by_group: Tensor) -> Tensor:
        """Return `(B, C, ...)` of what `by_group` has returned."""
        return by_group if self.groups is None else by_group.flatten(1, 2)

    def count(self, x: Tensor) -> int:
        """Return the number of entries of the globe in each moment."""
        # A list, as torch's compiler can't pass a generator to `prod`.
        area = prod([x.shape[dim] for dim in self.dims if dim != self.row_dim])
        return area * sum(self.rows)


# Mean (None means 0) and variance about it, with size 1 in every reduced dimension.
Moments = tuple[Tensor | None, Tensor]


@torch.no_grad()
def mean_and_variance(x: Tensor, reduction: GlobalReduction) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the globe; a collective.

    E[x^2] - E[x]^2 would cancel where the mean is large, as for geopotential or temperature.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    x = reduction.by_group(x)
    mean = x.mean(reduction.dims, True, dtype=accumulation_dtype(x))
    centered = x - mean
    # On CPUs torch sums entries one after the other if channels are last, or in compiled code. Then
    # the mean has a rounding error, which is the mean of what is centered.
    if x.is_cpu and (torch.compiler.is_dynamo_compiling() or not x.is_contiguous()):
        error = centered.mean(reduction.dims, True)
        mean = mean + error
        centered -= error
    variance = centered.square_().mean(reduction.dims, True)
    # One message for both moments. All ranks combine the same numbers in the same order, so their
    # results are equal bit by bit.
    parts = reduction.transport.all_gather(torch.stack([mean, variance]))
    return combine_moments(parts, reduction.rows)


def combine_moments(parts: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of N parts `(N, 2, ...)`, weighted by their sizes.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    # Differences from the first mean keep the digits of a large mean, and return equal means
    # without rounding.
    if len(sizes) == 2:  # in half as many operations
        first, second = parts.unbind()
        share = sizes[1] / sum(sizes)
        mean, variance = torch.lerp(first, second, share).unbind()
        difference = (second - first)[0]
        return mean, variance.addcmul_(difference, difference, value=share * (1 - share))
    means, variances = parts.unbind(1)
    shares = _shares_like(means, sizes)
    first = means[0]
    mean = first + (shares * (means - first)).sum(0)
    difference = means - mean
    return mean, (shares * torch.addcmul(variances, difference, difference)).sum(0)


@torch.no_grad()
def mean_square(x: Tensor, reduction: GlobalReduction) -> Moments:
    """Return the mean square of the globe, without a mean; a collective."""
    part = x.to(accumulation_dtype(x)).square().mean(reduction.dims, True)
    parts = reduction.transport.all_gather(part)
    return None, (_shares_like(parts, reduction.rows) * parts).sum(0)


def _shares_like(parts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the share of each part in the sum of all sizes, to multiply `parts` with."""
    shares = cached_constant(row_shares, sizes, parts.device, parts.dtype)
    return shares.view(-1, *(1,) * (parts.ndim - 1))


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
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        # Whether the parameters are the same in all entries of a moment, on all ranks.
        ctx.is_uniform = parameter_shape is not None and all(
            [parameter_shape[d] == 1 for d in reduction.dims if -d <= len(parameter_shape)]
        )
        y = _standardise(reduction.by_group(x), mean, rstd)
        if weight is not None:
            y = y.mul_(_reshaped(weight, parameter_shape))
        if bias is not None:
            y = y.add_(_reshaped(bias, parameter_shape))
        # Autograd forbids writes to a view that a function returns; a detached one may be changed.
        return reduction.ungroup(y).detach().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        reduction: GlobalReduction = ctx.reduction
        shape = ctx.parameter_shape
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.to(rstd.dtype)
        by_group = reduction.by_group(grad)
        grad_x = grad_weight = grad_bias = None
        if gradients_need_graph():

            def scaled_standard(x: Tensor, weight: Tensor | None) -> Tensor:
                y = differentiable_standard(x, mean is not None, ctx.eps, reduction)
                y = y if weight is None else y * _reshaped(weight, shape)
                return reduction.ungroup(y)

            grad_x, grad_weight = gradients_with_graph(
                scaled_standard, (x, weight), (needs_x, needs_weight), grad
            )
            if needs_bias:
                grad_bias = _summed_to(by_group, shape, *ctx.bias_like)
            return grad_x, grad_weight, grad_bias, *(None,) * 5
        standard = _standardise(reduction.by_group(x), mean, rstd)
        product = by_group * standard
        parts = [product, by_group]
        if ctx.is_uniform:  # then parameters and moments need the same sums
            parts = [part.sum(reduction.dims, True) for part in parts]
        # Gradients of parameters are this band's share; the trainer sums them over the domain.
        if needs_weight:
            grad_weight = _summed_to(parts[0], shape, weight.shape, weight.dtype)
        if needs_bias:
            grad_bias = _summed_to(parts[1], shape, *ctx.bias_like)
        if needs_x:  # the same on every rank, as the input's gradient is a collective
            scale = rstd
            if weight is not None and ctx.is_uniform:  # it may be multiplied last
                scale = rstd * _reshaped(weight, shape)
            elif weight is not None:
                by_group = by_group * _reshaped(weight, shape)
                product = by_group * standard
                parts = [product, by_group]
            # With `g` the scaled gradient and `s` the standardised input, both over N entries of
            # the globe: `g - s * sum(g * s) / N - sum(g) / N`, the last term only if the mean was
            # subtracted. One all-reduce for both sums, which cover all bands.
            parts = [part.sum_to_size(rstd.shape) for part in parts[: 1 if mean is None else 2]]
            totals = reduction.transport.all_reduce(torch.stack(parts)) / reduction.count(by_group)
            grad_x = torch.addcmul(by_group, standard, totals[0], value=-1, out=product)
            if mean is not None:
                grad_x.sub_(totals[1])
            grad_x = reduction.ungroup(grad_x.mul_(scale)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, *(None,) * 5


def _reshaped(parameter: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    return parameter if shape is None else parameter.view(shape)


def _summed_to(
    grad: Tensor, shape: tuple[int, ...] | None, parameter_shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the sum of gradients over all entries that have the same entry of a parameter."""
    shape = shape or parameter_shape
    leading = (1,) * (grad.ndim - len(shape))  # else it adds up dimensions of size one, too
    return grad.sum_to_size(*leading, *shape).view(parameter_shape).to(dtype)


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


def _standardise(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return x * rstd if mean is None else (x - mean).mul_(rstd)


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
class DomainParallelBatchNorm(ReductionLayer):
    """A `BatchNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward; none where running statistics are used.
    Running statistics are those of the whole globe, the same on all ranks that share it.

    Args:
        norm: the layer to shard; parameters and buffers are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, ..., H_local, ...)` -> the same.

    Source: Ioffe & Szegedy 2015, algorithm 1.
    """

    def __init__(self, norm: BatchNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return True: statistics cover all dimensions except the channels.

        Raises:
            UserError: the rows are in the channels' dimension.
        """
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


@torch.no_grad()
def update_running_statistics(
    running: tuple[Tensor, Tensor],
    moments: tuple[Tensor, Tensor],
    count: int,
    momentum: float | Tensor,
) -> None:
    """Move running mean and variance towards `moments`, averaged over samples, in place.

    `count` is the number of entries in each moment.
    """
    mean, variance = moments
    # As in torch, the running variance is the unbiased one.
    for statistic, moment in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        of_samples = moment.reshape(-1, *statistic.shape)
        average = of_samples[0] if of_samples.shape[0] == 1 else of_samples.mean(0)
        statistic.mul_(1 - momentum).add_(average.to(statistic.dtype) * momentum)


InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
INSTANCE_NORMS = get_args(InstanceNorm)  # by their numbers of dimensions


@final
class DomainParallelInstanceNorm(ReductionLayer):
    """An `InstanceNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward; none where running statistics are used.

    Args:
        norm: the layer to shard; parameters and buffers are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, ..., H_local, ...)` or `(C, ..., H_local, ...)` -> the same.

    Source: Ulyanov, Vedaldi & Lempitsky 2016, eq. 1.
    """

    def __init__(self, norm: InstanceNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)
        # Number of dimensions of one channel of a sample.
        self._spatial_ndim = 1 + [isinstance(norm, kind) for kind in INSTANCE_NORMS].index(True)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one that each channel is averaged over.

        Raises:
            UserError: the rows are in the dimension of the channels, or in that of the samples with
                running statistics.
        """
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


class _TrailingNorm(ReductionLayer):
    """Normalisation over the last dimensions, with a `normalized_shape` of the whole globe."""

    _cast = staticmethod(cast_for_autocast)

    def __init__(
        self,
        norm: nn.LayerNorm | nn.RMSNorm,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(norm, shard_dim, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one of the normalised dimensions."""
        return -dim <= len(self.normalized_shape)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments, with its rows of the parameters."""
        if self.normalized_shape[self.dim] != bands.input.height:
            raise UserError(
                f"{type(self).__name__}: the globe has {bands.input.height} rows, normalized_shape "
                f"is {tuple(self.normalized_shape)}. Set its dimension {self.dim} to that height."
            )
        x = self._cast(x)
        dims = tuple(range(-len(self.normalized_shape), 0))
        reduction = GlobalReduction(dims, self.dim, bands.input.sizes, self.manager.transport)
        weight, bias = (self._local_rows(p, bands) for p in (self.weight, self._bias()))
        return normalise(x, self._moments(x, reduction), self._eps(x), weight, bias, reduction)

    def _local_rows(self, parameter: Tensor | None, bands: Bands) -> Tensor | None:
        """Return a view of this rank's rows of a parameter.

        Autograd gives the other rows a gradient of zero, so the sum over ranks is the gradient.
        """
        if parameter is None:
            return None
        rows = bands.input.rows(self.manager.domain_rank)
        return parameter.narrow(self.dim, rows.start, rows.stop - rows.start)

    @abstractmethod
    def _moments(self, x: Tensor, reduction: GlobalReduction) -> Moments: ...

    @abstractmethod
    def _eps(self, x: Tensor) -> float: ...

    def _bias(self) -> Tensor | None:
        return None


@final
class DomainParallelLayerNorm(_TrailingNorm):
    """A `LayerNorm` over rows on one band, equal to that layer on the whole globe.

    Parameters keep the globe's shape; each rank uses its rows of them. One small collective in
    forward and one in backward.

    Args:
        norm: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input; a plan may replace it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, ...)` -> the same; `normalized_shape` has `H_global`.

    Raises:
        UserError: `normalized_shape` has another number of rows than the globe.

    Source: Ba, Kiros & Hinton 2016, eq. 4.
    """

    def _moments(self, x: Tensor, reduction: GlobalReduction) -> Moments:
        return mean_and_variance(x, reduction)

    def _eps(self, x: Tensor) -> float:
        return float(self.eps)

    def _bias(self) -> Tensor | None:
        bias: Tensor | None = self.bias
        return bias


@final
class DomainParallelRMSNorm(_TrailingNorm):
    """An `RMSNorm` over rows on one band, equal to that layer on the whole globe.

    See `DomainParallelLayerNorm` for arguments, shapes and errors.

    Source: Zhang & Sennrich 2019, eq. 4.
    """

    _cast = staticmethod(cast_for_rms_norm)

    def _moments(self, x: Tensor, reduction: GlobalReduction) -> Moments:
        return mean_square(x, reduction)

    def _eps(self, x: Tensor) -> float:
        # As in torch, None means the machine epsilon of the dtype it computes in.
        return torch.finfo(accumulation_dtype(x)).eps if self.eps is None else float(self.eps)

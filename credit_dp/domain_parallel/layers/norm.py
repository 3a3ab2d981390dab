"""Batch, instance, layer and root-mean-square norms with the statistics of the whole globe."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError


class ReductionLayer(RowLayer):
    """A layer that reduces over rows, wherever they are in its input."""

    def _check_dim(self) -> None:
        """Accept rows in any dimension."""

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows as they are."""
        return (RowRange(out.start, out.stop),)

    @abstractmethod
    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether the layer reduces over dimension `dim`."""

    def compute(self, x: Tensor, bands: Bands) -> Any:
        """Reduce over all bands; over this one alone where its rows stay apart."""
        if not self.couples_rows(self.dim, x.ndim):
            return self.global_forward(x)
        return self.reduce(x, bands)

    @abstractmethod
    def reduce(self, x: Tensor, bands: Bands) -> Any:
        """Return what the layer makes of this band with the statistics of all."""


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the type to reduce in, as torch does: half-precision sums are too coarse."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return `x` in the type in which autocast sums, takes a softmax or norms a layer.

    On GPUs it is float32; on CPUs autocast leaves these alone.
    """
    kind = x.device.type
    if kind == "cpu" or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(accumulation_dtype(x)) if torch.is_autocast_enabled(kind) else x


def sum_over_bands(part: Tensor, transport: Transport) -> Tensor:
    """Return the sum of every rank's part, on every rank; differentiable."""
    return _SumOverBands.apply(part, transport)  # type: ignore[no-any-return, no-untyped-call]


@final
class _SumOverBands(torch.autograd.Function):
    """The sum is on every rank, so that each part's cotangent is the sum of all ranks' ones."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        return transport.sum(part.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transport.sum(grad.contiguous()), None


class GlobalReduction(NamedTuple):
    """What moments are taken over: negative `dims`, one of them that of the rows.

    `rows` are those of each rank.
    """

    dims: tuple[int, ...]
    row_dim: int
    rows: tuple[int, ...]
    transport: Transport

    def count(self, x: Tensor) -> int:
        """Return how many entries of the globe each moment is made of."""
        area = prod(x.shape[dim] for dim in self.dims if dim != self.row_dim)
        return area * sum(self.rows)

    def weighted_mean(self, parts: Tensor) -> Tensor:
        """Return the mean of all bands' means, the first dimension, each weighed by its rows."""
        share = constant_tensor(self.rows, parts.device, parts.dtype) / sum(self.rows)
        return (share.view(-1, *(1,) * (parts.ndim - 1)) * parts).sum(0)


# Mean (None: taken to be 0) and variance about it, with one entry in every reduced dimension.
Moments = tuple[Tensor | None, Tensor]


@torch.no_grad()
def mean_and_variance(x: Tensor, spread: GlobalReduction) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the globe; a collective. Never E[x^2] - E[x]^2.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    wide = accumulation_dtype(x)
    mean = x.mean(spread.dims, True, dtype=wide)
    variance = (x - mean).square_().mean(spread.dims, True)
    means, variances = spread.transport.all_gather(torch.stack([mean, variance])).unbind(1)
    mean = means[0] + spread.weighted_mean(
        means - means[0]
    )  # differences keep a large mean's digits
    return mean, spread.weighted_mean(variances + (means - mean).square())


@torch.no_grad()
def mean_square(x: Tensor, spread: GlobalReduction) -> Moments:
    """Return the mean of the globe's squares; a collective."""
    part = x.to(accumulation_dtype(x)).square().mean(spread.dims, True)
    return None, spread.weighted_mean(spread.transport.all_gather(part))


def normalise(
    x: Tensor,
    moments: Moments,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    spread: GlobalReduction,
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias`.

    Differentiable also through the moments, which must be those of `x`: backward is a collective.
    `weight` and `bias` broadcast against `x`.
    """
    mean, variance = moments
    rstd = (variance + eps).rsqrt_()
    return _Normalise.apply(x, weight, bias, mean, rstd, spread)  # type: ignore[no-any-return, no-untyped-call]


@final
class _Normalise(torch.autograd.Function):
    """Normalisation; backward sums the moments' cotangents over all bands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        spread: GlobalReduction,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.spread = spread
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        y = _standardise(x, mean, rstd)
        if weight is not None:
            y = y.mul_(weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.to(rstd.dtype)
        standard = _standardise(x, mean, rstd)
        grad_x = grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = (grad * standard).sum_to_size(weight.shape).to(weight.dtype)
        if needs_bias:
            shape, dtype = ctx.bias_like
            grad_bias = grad.sum_to_size(shape).to(dtype)
        if needs_x:
            scaled = grad if weight is None else grad * weight
            grad_x = _gradient_through_moments(scaled, standard, mean is not None, ctx.spread)
            grad_x = grad_x.mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _standardise(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return x * rstd if mean is None else (x - mean).mul_(rstd)


def _gradient_through_moments(
    scaled: Tensor, standard: Tensor, centred: bool, spread: GlobalReduction
) -> Tensor:
    """Take from a cotangent what moving mean and spread takes from it; a collective."""
    product = scaled * standard
    parts = [product.sum(spread.dims, True)]
    if centred:
        parts.append(scaled.sum(spread.dims, True))
    totals = spread.transport.sum(torch.stack(parts)) / spread.count(scaled)
    grad = torch.addcmul(scaled, standard, totals[0], value=-1, out=product)
    return grad.sub_(totals[1]) if centred else grad


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
class DomainParallelBatchNorm(ReductionLayer):
    """A `BatchNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward; none where running statistics are used. Running
    statistics are those of the whole globe, the same on every rank of a domain.

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
        """Rows meet in every dimension but the channels'."""
        if dim + ndim == 1:
            raise UserError("BatchNorm: rows are in the channels' dimension. Move them elsewhere.")
        return True

    def global_forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Normalise a tensor where no rows meet."""
        if not self._is_tracking or self.momentum is not None:
            return super().global_forward(x, *others)  # type: ignore[no-any-return]
        # torch would read the number of batches, which is no number yet while planning.
        y = functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        variance, mean = torch.var_mean(x.detach(), self._reduced_dims(x), correction=0)
        self._update_running_statistics((mean, variance), x[:, 0].numel())
        return y

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.running_mean is not None:
            return self.global_forward(x)
        spread = GlobalReduction(
            self._reduced_dims(x), self.dim, bands.input.sizes, self.manager.transport
        )
        moments = mean_and_variance(x, spread)
        if self._is_tracking:
            self._update_running_statistics(moments, spread.count(x))
        per_channel = (-1, *(1,) * (x.ndim - 2))
        weight, bias = (p if p is None else p.view(per_channel) for p in (self.weight, self.bias))
        return normalise(x, moments, self.eps, weight, bias, spread)

    @property
    def _is_tracking(self) -> bool:
        return bool(self.training and self.track_running_stats)

    def _reduced_dims(self, x: Tensor) -> tuple[int, ...]:
        return tuple(dim for dim in range(-x.ndim, 0) if dim != 1 - x.ndim)

    def _update_running_statistics(self, moments: tuple[Tensor, Tensor], count: int) -> None:
        """Count the batch and move the running statistics towards it."""
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
    """Move running mean and variance towards moments of `count` entries, averaged over samples."""
    mean, variance = moments
    for old, new in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        average = new.reshape(-1, len(old)).mean(0).to(old.dtype)
        old.mul_(1 - momentum).add_(average * momentum)


InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


@final
class DomainParallelInstanceNorm(ReductionLayer):
    """An `InstanceNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward; none where running statistics are used.

    Args:
        norm: the layer to shard; parameters and buffers are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, ..., H_local, ...)` or `(C, ..., H_local, ...)` -> the same.

    Source: Ulyanov, Vedaldi & Lempitsky 2016, eq. 1.
    """

    def __init__(self, norm: InstanceNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)
        # Dimensions of one channel of a sample.
        self._spatial_ndim = norm._get_no_batch_dim() - 1

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet where a channel's entries are."""
        if dim == -self._spatial_ndim - 1:
            raise UserError(
                "InstanceNorm: rows are in the channels' dimension. Move them elsewhere."
            )
        if dim < -self._spatial_ndim and self.track_running_stats:
            raise UserError(
                "InstanceNorm: rows are among the samples, over which running statistics are "
                "averaged. Move them elsewhere or set track_running_stats=False."
            )
        return dim >= -self._spatial_ndim

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.track_running_stats:
            return self.global_forward(x)  # type: ignore[no-any-return]
        dims = tuple(range(-self._spatial_ndim, 0))
        spread = GlobalReduction(dims, self.dim, bands.input.sizes, self.manager.transport)
        moments = mean_and_variance(x, spread)
        if self.running_mean is not None:
            # As torch does: batches are not counted, so that no momentum means no update.
            momentum = self.momentum or 0.0
            running = (self.running_mean, self.running_var)
            update_running_statistics(running, moments, spread.count(x), momentum)
        per_channel = (-1, *(1,) * self._spatial_ndim)
        weight, bias = (p if p is None else p.view(per_channel) for p in (self.weight, self.bias))
        return normalise(x, moments, self.eps, weight, bias, spread)


class _TrailingNorm(ReductionLayer):
    """Normalisation over the last dimensions of a shape that is the whole globe's."""

    def __init__(
        self,
        norm: nn.LayerNorm | nn.RMSNorm,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(norm, shard_dim, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet where they are among the normalised dimensions."""
        return -dim <= len(self.normalized_shape)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments, scaled by its rows' parameters."""
        if self.normalized_shape[self.dim] != bands.input.height:
            raise UserError(
                f"{type(self).__name__}: the globe has {bands.input.height} rows, normalized_shape "
                f"is {tuple(self.normalized_shape)}. Make dimension {self.dim} of it that number."
            )
        x = cast_for_autocast(x)
        dims = tuple(range(-len(self.normalized_shape), 0))
        spread = GlobalReduction(dims, self.dim, bands.input.sizes, self.manager.transport)
        weight, bias = (self._local_rows(p, bands) for p in (self.weight, self._bias()))
        return normalise(x, self._moments(x, spread), self._eps(x), weight, bias, spread)

    def _local_rows(self, parameter: Tensor | None, bands: Bands) -> Tensor | None:
        """View this rank's rows: the gradient of the others' is zero, and the ranks' sum whole."""
        if parameter is None:
            return None
        rows = bands.input.rows(self.manager.domain_rank)
        return parameter.narrow(self.dim, rows.start, rows.stop - rows.start)

    @abstractmethod
    def _moments(self, x: Tensor, spread: GlobalReduction) -> Moments: ...

    @abstractmethod
    def _eps(self, x: Tensor) -> float: ...

    def _bias(self) -> Tensor | None:
        return None


@final
class DomainParallelLayerNorm(_TrailingNorm):
    """A `LayerNorm` over rows on one band of them, equal to that layer on the whole globe.

    Parameters stay those of the whole globe; each rank uses its rows of them. One small collective
    forward and one backward.

    Args:
        norm: the layer to shard; parameters are shared with it.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, ...)` -> the same; `normalized_shape` has `H_global`.

    Raises:
        UserError: the globe's rows are not those of `normalized_shape`.

    Source: Ba, Kiros & Hinton 2016, eq. 4.
    """

    def _moments(self, x: Tensor, spread: GlobalReduction) -> Moments:
        return mean_and_variance(x, spread)

    def _eps(self, x: Tensor) -> float:
        return float(self.eps)

    def _bias(self) -> Tensor | None:
        bias: Tensor | None = self.bias
        return bias


@final
class DomainParallelRMSNorm(_TrailingNorm):
    """An `RMSNorm` over rows on one band of them, equal to that layer on the whole globe.

    See `DomainParallelLayerNorm` for arguments, shapes and errors.

    Source: Zhang & Sennrich 2019, eq. 4.
    """

    def _moments(self, x: Tensor, spread: GlobalReduction) -> Moments:
        return mean_square(x, spread)

    def _eps(self, x: Tensor) -> float:
        # As torch does: that of the type it computes in.
        return torch.finfo(accumulation_dtype(x)).eps if self.eps is None else float(self.eps)

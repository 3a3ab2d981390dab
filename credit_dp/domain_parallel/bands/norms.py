"""Moments of the globe, and norms by them: of batches, instances, layers, and root mean squares.

Forward: each rank computes the moments of its band, one collective gathers them, and every rank
combines them in the same way (`mean_and_variance`, `mean_square`). Backward: the output also
depends on `x` through the moments, so the sums that this term needs go through one more collective
(`normalise_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype
from credit_dp.domain_parallel.transport import Transport


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

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    moments = local_moments(reduction.by_group(x), reduction.dims)
    # One message for both moments. All ranks combine the same numbers in the same order, so their
    # results are equal bit by bit.
    return combine_moments(reduction.transport.all_gather(moments), reduction.rows)


def local_moments(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return mean and variance of a band, `(2, ...)`; NaN if it is empty.

    E[x^2] - E[x]^2 would cancel where the mean is large, as for geopotential or temperature.
    """
    mean = x.mean(dims, True, dtype=accumulation_dtype(x))
    centered = x - mean
    # On CPUs torch sums entries one after the other if channels are last, or in compiled code. Then
    # the mean has a rounding error, which is the mean of what is centered.
    if x.is_cpu and (torch.compiler.is_dynamo_compiling() or not x.is_contiguous()):
        error = centered.mean(dims, True)
        mean = mean + error
        centered -= error
    return torch.stack([mean, centered.square_().mean(dims, True)])


def combine_moments(parts: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of N parts `(N, 2, ...)`, weighted by their sizes.

    Parts of size 0 may have any moments.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    parts, sizes = _without_empty(parts, sizes)
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
    parts, rows = _without_empty(reduction.transport.all_gather(part), reduction.rows)
    return None, (_shares_like(parts, rows) * parts).sum(0)


def _without_empty(parts: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return the parts that are not empty, and their sizes."""
    if 0 not in sizes:
        return parts, sizes
    kept = [index for index, size in enumerate(sizes) if size]
    return parts[kept], tuple([sizes[index] for index in kept])


def _shares_like(parts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the share of each part in the sum of all sizes, to multiply `parts` with."""
    shares = cached_constant(row_shares, sizes, parts.device, parts.dtype)
    return shares.view(-1, *(1,) * (parts.ndim - 1))


def norm_forward(
    x: Tensor,
    moments: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    reduction: GlobalReduction,
    parameter_shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return `(x - mean) * rstd * weight + bias`.

    Args:
        moments: mean and `rstd`, the reciprocal of the standard deviation.
        parameter_shape: in which parameters broadcast against `reduction.by_group(x)`; None: they
            have an entry for each one of the reduced dimensions of this band.
    """
    y = _standardise(reduction.by_group(x), *moments)
    if weight is not None:
        y = y.mul_(_reshaped(weight, parameter_shape))
    if bias is not None:
        y = y.add_(_reshaped(bias, parameter_shape))
    # Autograd forbids writes to a view that a function returns; a detached one may be changed.
    return reduction.ungroup(y).detach().to(x.dtype)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    moments: Moments,
    weight: Tensor | None,
    reduction: GlobalReduction,
    parameter_shape: tuple[int, ...] | None = None,
    *,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a norm's input, weight and bias; a collective if the input needs one.

    Those of parameters are this band's share, of the moments' dtype and not yet in the parameters'
    shape.

    Args:
        grad: that of `norm_forward`'s result; others are its arguments.
        needs: which of the three are needed, the first the same on every rank.
    """
    mean, rstd = moments
    needs_x, needs_weight, needs_bias = needs
    # Whether the parameters are the same in all entries of a moment, on all ranks.
    is_uniform = parameter_shape is not None and all(
        [parameter_shape[d] == 1 for d in reduction.dims if -d <= len(parameter_shape)]
    )
    shape = parameter_shape or x.shape[x.ndim - len(reduction.dims) :]
    by_group = reduction.by_group(grad.to(rstd.dtype))
    standard = _standardise(reduction.by_group(x), mean, rstd)
    product = by_group * standard
    parts = [product, by_group]
    if is_uniform:  # then parameters and moments need the same sums
        parts = [part.sum(reduction.dims, True) for part in parts]
    grad_x = None
    grad_weight = summed_to(parts[0], shape) if needs_weight else None
    grad_bias = summed_to(parts[1], shape) if needs_bias else None
    if needs_x:
        scale = rstd
        if weight is not None and is_uniform:  # it may be multiplied last
            scale = rstd * _reshaped(weight, parameter_shape)
        elif weight is not None:
            by_group = by_group * _reshaped(weight, parameter_shape)
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
    return grad_x, grad_weight, grad_bias


def _standardise(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return x * rstd if mean is None else (x - mean).mul_(rstd)


def _reshaped(parameter: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    return parameter if shape is None else parameter.view(shape)


def summed_to(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sum of gradients over all entries that have the same entry of a parameter."""
    leading = (1,) * (grad.ndim - len(shape))  # else it adds up dimensions of size one, too
    return grad.sum_to_size(*leading, *shape)


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
        by_sample = moment.reshape(-1, *statistic.shape)
        average = by_sample[0] if by_sample.shape[0] == 1 else by_sample.mean(0)
        statistic.mul_(1 - momentum).add_(average.to(statistic.dtype) * momentum)

"""Mean and variance of the whole globe, and normalisation by them."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_dp.constants import constant
from credit_dp.domain_parallel.layers.statistics_layer import wide_dtype
from credit_dp.domain_parallel.transport import Transport


class Spread(NamedTuple):
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

    def weighted(self, parts: Tensor) -> Tensor:
        """Return the mean of all bands' means, the first dimension, each weighed by its rows."""
        share = constant(self.rows, parts.device, parts.dtype) / sum(self.rows)
        return (share.view(-1, *(1,) * (parts.ndim - 1)) * parts).sum(0)


# Mean (None: taken to be 0) and variance about it, with one entry in every reduced dimension.
Moments = tuple[Tensor | None, Tensor]


@torch.no_grad()
def centred_moments(x: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the globe; a collective. Never E[x^2] - E[x]^2.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, for any number of parts.
    """
    wide = wide_dtype(x)
    mean = x.mean(spread.dims, True, dtype=wide)
    variance = (x - mean).square_().mean(spread.dims, True)
    means, variances = spread.transport.gather(torch.stack([mean, variance])).unbind(1)
    mean = means[0] + spread.weighted(means - means[0])  # differences keep a large mean's digits
    return mean, spread.weighted(variances + (means - mean).square())


@torch.no_grad()
def mean_square(x: Tensor, spread: Spread) -> Moments:
    """Return the mean of the globe's squares; a collective."""
    part = x.to(wide_dtype(x)).square().mean(spread.dims, True)
    return None, spread.weighted(spread.transport.gather(part))


def normalise(
    x: Tensor,
    moments: Moments,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    spread: Spread,
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
        spread: Spread,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.spread = spread
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        y = _standardised(x, mean, rstd)
        if weight is not None:
            y = y.mul_(weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.to(rstd.dtype)
        standard = _standardised(x, mean, rstd)
        grad_x = grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = (grad * standard).sum_to_size(weight.shape).to(weight.dtype)
        if needs_bias:
            shape, dtype = ctx.bias_like
            grad_bias = grad.sum_to_size(shape).to(dtype)
        if needs_x:
            scaled = grad if weight is None else grad * weight
            grad_x = _through_moments(scaled, standard, mean is not None, ctx.spread)
            grad_x = grad_x.mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _standardised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return x * rstd if mean is None else (x - mean).mul_(rstd)


def _through_moments(scaled: Tensor, standard: Tensor, centred: bool, spread: Spread) -> Tensor:
    """Take from a cotangent what moving mean and spread takes from it; a collective."""
    product = scaled * standard
    parts = [product.sum(spread.dims, True)]
    if centred:
        parts.append(scaled.sum(spread.dims, True))
    totals = spread.transport.sum(torch.stack(parts)) / spread.count(scaled)
    grad = torch.addcmul(scaled, standard, totals[0], value=-1, out=product)
    return grad.sub_(totals[1]) if centred else grad

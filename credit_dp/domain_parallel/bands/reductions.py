"""Sums over all bands, and the softmax of a dimension that is cut into bands."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.halo_exchange import gradients_need_graph
from credit_dp.domain_parallel.transport import Transport


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to reduce in: at least float32, as in torch."""
    # Not by `promote_types`, which is an operation to a plan.
    is_narrow = x.is_floating_point() and x.dtype != torch.float64
    return torch.float32 if is_narrow else x.dtype


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


def softmax_forward(x: Tensor, dim: int, logarithm: bool, transport: Transport) -> Tensor:
    """Return a band of the softmax over a dimension of all bands, or its logarithm; a collective.

    Relative to the globe's maximum.
    """
    local_max = x.amax(dim, True) if x.shape[dim] else x.sum(dim, True).fill_(-torch.inf)
    # A band that is -inf everywhere contributes exp(-inf) = 0; -inf - (-inf) would be NaN.
    y = (x - torch.where(local_max.isneginf(), 0.0, local_max)).exp_()
    # Each band's sum is relative to its own maximum; one message carries both, and the sums are
    # then scaled to the maximum of the globe. exp() never overflows.
    local_maxima, local_sums = transport.all_gather(
        torch.stack([local_max, y.sum(dim, True)])
    ).unbind(1)
    maximum = local_maxima.amax(0)
    total = (local_sums * (local_maxima - maximum).exp()).sum(0)
    if logarithm:
        return (x - maximum).sub_(total.log())
    return y.mul_((local_max - maximum).exp_().div_(total))


def softmax_backward(
    grad: Tensor, y: Tensor, dim: int, logarithm: bool, transport: Transport
) -> Tensor:
    """Return the gradient of a band before `softmax_forward`, whose result is `y`; a collective."""
    share = grad if logarithm else grad * y
    total = sum_over_bands(share.sum(dim, True), transport)
    return grad - y.exp() * total if logarithm else share.sub_(y * total)

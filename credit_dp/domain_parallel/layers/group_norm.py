"""Group normalisation with the statistics of the whole globe.

By `bands.group_norm`; small bands on CPUs and compiled code are normalised as in `norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.bands import group_norm as kernels
from credit_dp.domain_parallel.bands.norms import GlobalReduction, mean_and_variance
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype
from credit_dp.domain_parallel.halo_exchange import gradients_need_graph, gradients_with_graph
from credit_dp.domain_parallel.layers import base
from credit_dp.domain_parallel.layers.base import Bands, largest_band_entries
from credit_dp.domain_parallel.layers.norm import (
    ReductionLayer,
    differentiable_standard,
    normalise,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


@final
class DomainParallelGroupNorm(ReductionLayer):
    """A `GroupNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward. Rows may be in any dimension except the
    channels'. The output has the dtype and the memory format of the input, also under autocast on
    GPUs, where torch's own group norm returns float32. Statistics of half-precision input are
    float32, and backward keeps no float32 copy of it.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_local, W)`.

    Source: Wu & He 2018, eq. 1; moments combined as in Chan, Golub & LeVeque 1983.
    """

    def __init__(self, norm: nn.GroupNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)
        self.num_groups = norm.num_groups
        self.num_channels = norm.num_channels
        self.eps = norm.eps
        self.affine = norm.affine

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether `dim` is one that groups are averaged over: not that of the samples."""
        if dim + ndim == 1:
            raise UserError("GroupNorm: rows are in the channels' dimension. Move them elsewhere.")
        return dim + ndim > 1

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments."""
        dtype = accumulation_dtype(x)
        weight, bias = (p if p is None else p.to(dtype) for p in (self.weight, self.bias))
        # Over all dimensions from the channels of a group on.
        dims = tuple(range(1 - x.ndim, 0))
        rows = bands.input.sizes
        reduction = GlobalReduction(dims, self.dim, rows, self.manager.transport, self.num_groups)
        # On a CPU, one operation after the other takes less time than torch's kernels up to 2^16
        # entries, or 2^13 if channels are last; at 2^14 it takes a tenth more there.
        entries = largest_band_entries(x, self.dim, bands.input)
        is_small = kernels.is_chunked(x) and entries <= base.SMALL_BAND_ENTRIES // 4
        if is_small or torch.compiler.is_dynamo_compiling():
            moments = mean_and_variance(x, reduction)
            # By the channels of `x`, so that parameters for others are an error.
            shape = (self.num_groups, x.shape[1] // self.num_groups, *(1,) * (x.ndim - 2))
            return normalise(x, moments, self.eps, weight, bias, reduction, shape)
        area = x.shape[2:].numel() // x.shape[self.dim] * bands.input.height
        y: Tensor = _GlobalGroupNorm.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, self.num_groups, self.eps, area, reduction
        )
        return y


class _GlobalGroupNorm(torch.autograd.Function):
    """Normalisation by global moments; backward sums the moments' gradients over all bands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        area: int,
        reduction: GlobalReduction,
    ) -> Tensor:
        moments = kernels.group_moments(x, groups, reduction.rows, reduction.transport)
        moments = kernels.repeat_per_channel(moments, x)
        ctx.save_for_backward(x, weight, moments)
        ctx.groups = groups
        ctx.eps = eps
        ctx.area = area
        ctx.reduction = reduction
        return kernels.group_norm_forward(x, moments, weight, bias, groups, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, moments = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        grads: Sequence[Tensor | None]
        if gradients_need_graph():
            grads = _gradients_with_graph(
                grad, x, weight, needs, groups=ctx.groups, eps=ctx.eps, reduction=ctx.reduction
            )
        else:
            grads = kernels.group_norm_backward(
                grad, x, moments, weight, ctx.groups, ctx.eps,
                area=ctx.area, transport=ctx.reduction.transport, needs=needs,
            )  # fmt: skip
        return *grads, *(None,) * 4


def _gradients_with_graph(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    needs_grad: Sequence[bool],
    *,
    groups: int,
    eps: float,
    reduction: GlobalReduction,
) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias that can be differentiated again."""

    def scaled_standard(x: Tensor, weight: Tensor | None) -> Tensor:
        y = reduction.ungroup(differentiable_standard(x, True, eps, reduction))
        return y if weight is None else y * weight.view(-1, *(1,) * (x.ndim - 2))

    grads = gradients_with_graph(scaled_standard, (x, weight), needs_grad[:2], grad)
    dims = [d for d in range(x.ndim) if d != 1]
    return [*grads, grad.sum(dims) if needs_grad[2] else None]

"""Group normalisation with the statistics of the whole globe."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError


@final
class DomainParallelGroupNorm(RowLayer):
    """A `GroupNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward.

    Args:
        norm: the layer to shard; parameters are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

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

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows as they are: only moments travel."""
        return (Run(out.start, out.stop),)

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet wherever they are but among the samples."""
        if dim + ndim == 1:
            raise UserError("GroupNorm: rows are in the channels' dimension. Move them elsewhere.")
        return dim + ndim > 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments."""
        # As torch does: half-precision numbers are too coarse, and may overflow, as moments.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (p if p is None else p.to(wide) for p in (self.weight, self.bias))
        y: Tensor = _GlobalGroupNorm.apply(  # type: ignore[no-untyped-call]
            x.to(wide),
            weight,
            bias,
            self.num_groups,
            self.eps,
            bands.taken.sizes,
            x[0, 0].numel() // x.shape[self.dim] * bands.taken.height,
            self.manager.transport,
        )
        return y.to(x.dtype)


def _local_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each sample's groups, `(B, G)`."""
    samples, channels = x.shape[:2]
    area = x[0, 0].numel()
    # eps 0 makes this one stable pass; a constant group has an infinite rstd.
    _, mean, rstd = torch.native_group_norm(
        x.contiguous(), None, None, samples, channels, area, groups, 0.0
    )
    return mean, torch.where(rstd.isinf(), 0.0, rstd.pow(-2))


def _global_moments(
    x: Tensor, groups: int, rows: tuple[int, ...], transport: Transport
) -> tuple[Tensor, Tensor]:
    """Mean and variance over all bands: per-band ones weighed by rows, never E[x^2] - E[x]^2."""
    parts = transport.gather(torch.stack(_local_moments(x, groups)))
    share = parts.new_tensor(rows)[:, None, None] / sum(rows)
    means, variances = parts.unbind(1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


class _GlobalGroupNorm(torch.autograd.Function):
    """Normalisation by global moments; backward sums the two moments' cotangents over all bands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        rows: tuple[int, ...],
        area: int,
        transport: Transport,
    ) -> Tensor:
        mean, variance = _global_moments(x, groups, rows, transport)
        rstd = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.transport = groups, transport
        ctx.area = area
        per_channel = x.shape[1] // groups
        scale = rstd.repeat_interleave(per_channel, 1)
        shift = -mean.repeat_interleave(per_channel, 1) * scale
        if weight is not None:
            scale, shift = scale * weight, shift * weight
        if bias is not None:
            shift = shift + bias
        return torch.addcmul(_as_field(shift, x), x, _as_field(scale, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        per_channel = x.shape[1] // ctx.groups
        mean, rstd = (_as_field(m.repeat_interleave(per_channel, 1), x) for m in (mean, rstd))
        standard = (x - mean) * rstd
        area = tuple(range(2, x.ndim))
        sums = torch.stack([grad.sum(area), (grad * standard).sum(area)])
        grad_bias, grad_weight = sums.sum(1)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = None
        if needs_x:  # the same on every rank: so is what is sent
            weighted = sums if weight is None else sums * weight
            grouped = weighted.view(2, len(x), ctx.groups, per_channel)
            totals = ctx.transport.sum(grouped.sum(3))
            count = per_channel * ctx.area
            of_mean, of_std = (
                _as_field((t / count).repeat_interleave(per_channel, 1), x) for t in totals
            )
            scaled = grad if weight is None else grad * weight.view(-1, *(1,) * (x.ndim - 2))
            grad_x = rstd * (scaled - of_mean - standard * of_std)
        return (
            grad_x,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *(None,) * 5,
        )


def _as_field(values: Tensor, x: Tensor) -> Tensor:
    """View `(B, C)` so that it broadcasts over the rows and columns of `x`."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))

"""Group normalisation with the statistics of the whole globe."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.exchange import memory_format_of
from credit_dp.domain_parallel.layers.base import Bands
from credit_dp.domain_parallel.layers.norm import ReductionLayer, accumulation_dtype
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

# As many numbers are taken at a time: what is made of them on the way stays in a core's cache.
CHUNK_ENTRIES = 2**19


@final
class DomainParallelGroupNorm(ReductionLayer):
    """A `GroupNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward. Rows may be in any dimension but the samples' and
    the channels'; half-precision input has float32 statistics, without a float32 copy of it.

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

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet wherever they are but among the samples."""
        if dim + ndim == 1:
            raise UserError("GroupNorm: rows are in the channels' dimension. Move them elsewhere.")
        return dim + ndim > 1

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments."""
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.float()  # what autocast does with a GroupNorm there, and not on a CPU
        wide = accumulation_dtype(x)
        weight, bias = (p if p is None else p.to(wide) for p in (self.weight, self.bias))
        rows, transport = bands.input.sizes, self.manager.transport
        area = x.shape[2:].numel() // x.shape[self.dim] * bands.input.height
        made: Tensor = _GlobalGroupNorm.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, self.num_groups, self.eps, rows, area, transport
        )
        return made


class _Chunk(NamedTuple):
    """Some samples and groups of a batch, the channels of those groups, and a slab of these.

    Slabs are cut from the first dim after the channels.
    """

    samples: slice = slice(None)
    groups: slice = slice(None)
    channels: slice = slice(None)
    slab: slice = slice(None)

    def select(self, field: Tensor) -> Tensor:
        """Its part of `(B, C, ...)`."""
        return field if self is FULL_CHUNK else field[self.samples, self.channels, self.slab]

    def select_channels(self, values: Tensor) -> Tensor:
        """Its part of `(B, C)`, one after the other."""
        return (values if self is FULL_CHUNK else values[self.samples, self.channels]).flatten()


FULL_CHUNK = _Chunk()


def _chunks(x: Tensor, groups: int) -> list[_Chunk]:
    """Cut a batch into samples and groups that fit in the cache; or into slabs of each sample.

    Of two passes one goes backwards: it starts with what the one before has left in the cache.
    """
    samples, channels = x.shape[:2]
    if _is_channels_last(x):
        return [_Chunk(slice(s, s + 1), slab=slab) for s in range(samples) for slab in _slabs(x)]
    width = channels // groups
    at_once = max(1, CHUNK_ENTRIES * groups // max(1, x.shape[1:].numel()))
    if 0 < samples * groups <= at_once or x.is_meta:  # all fits, or there is nothing in memory
        return [FULL_CHUNK]
    some_groups, some_samples = min(groups, at_once), max(1, at_once // groups)
    return [
        _Chunk(
            slice(s, s + some_samples),
            slice(g, min(g + some_groups, groups)),
            slice(g * width, min(g + some_groups, groups) * width),
        )
        for s in range(0, samples, some_samples)
        for g in range(0, groups, some_groups)
    ]


def _slabs(x: Tensor) -> list[slice]:
    """Cut the first dim after the channels so that a sample's slab fits in the cache."""
    height = x.shape[2]
    at_once = max(1, CHUNK_ENTRIES * height // x.shape[1:].numel())
    return [slice(h, min(h + at_once, height)) for h in range(0, height, at_once)]


def _memory_format(x: Tensor) -> torch.memory_format:
    """How a field is normalised: as it lies, but row by row on a GPU."""
    return memory_format_of(x) if x.is_cpu else torch.contiguous_format


def _is_channels_last(x: Tensor) -> bool:
    return _memory_format(x) is not torch.contiguous_format


def _local_moments(x: Tensor, groups: int) -> Tensor:
    """Mean and variance of each sample's groups, `(2, B, G)`."""
    wide = accumulation_dtype(x)
    if _is_channels_last(x):
        slabs = _slabs(x)
        sizes = tuple(slab.stop - slab.start for slab in slabs)
        found = []
        for sample in range(len(x)):
            parts = (x[sample : sample + 1, :, slab] for slab in slabs)
            of_parts = [_moments_of_slab(part.to(wide), groups) for part in parts]
            found.append(torch.stack(_combine_moments(torch.stack(of_parts), sizes)))
        return torch.cat(found, 1)
    (samples, channels), area = x.shape[:2], x.shape[2:].numel()
    moments = x.new_empty((2, samples, groups), dtype=wide)
    mean, inverse = moments.unbind()
    for piece in reversed(_chunks(x, groups)):
        part = piece.select(x).to(wide).contiguous()
        (some, its), at = part.shape[:2], (piece.samples, piece.groups)
        # eps 0 makes this one stable pass; a constant group has an infinite rstd: a variance of 0.
        _, mean[at], inverse[at] = torch.native_group_norm(
            part, None, None, some, its, area, its * groups // channels, 0.0
        )
    inverse.pow_(-2)
    return moments


def _moments_of_slab(x: Tensor, groups: int) -> Tensor:
    """Mean and variance of one sample's groups, `(2, 1, G)`, where channels lie last.

    There torch's own pass takes E[x^2] - E[x]^2.
    """

    def mean_of(field: Tensor) -> Tensor:
        return field.mean(0).view(groups, -1).mean(1)

    flat = x.movedim(1, -1).reshape(-1, x.shape[1])
    mean = mean_of(flat)
    centered = flat - mean.repeat_interleave(x.shape[1] // groups)
    off = mean_of(centered)  # what rounding left of it
    variance = mean_of(centered.square_()) - off.square()
    return torch.stack([mean + off, variance])[:, None]


def _global_moments(
    x: Tensor, groups: int, rows: tuple[int, ...], transport: Transport
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each sample's groups over all bands, `(B, G)`."""
    return _combine_moments(transport.all_gather(_local_moments(x, groups)), rows)


def _combine_moments(parts: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance of all of `(N, 2, B, G)`, weighed by size, never E[x^2] - E[x]^2."""
    share = constant_tensor([[[size / sum(sizes)]] for size in sizes], parts.device, parts.dtype)
    means, variances = parts.unbind(1)
    # From one part's mean on: equal means give exactly that one.
    mean = means[0] + (share * (means - means[0])).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


class _Factors(NamedTuple):
    """What channels are centered, scaled and shifted by: `(B, C)` each, of one type."""

    center: Tensor
    scale: Tensor
    shift: Tensor


def _apply_affine(
    x: Tensor, groups: int, by: _Factors, added: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return `(x - center) * scale + shift`, plus a field times its factors if there is one."""
    last = _is_channels_last(x)
    made = torch.empty_like(x, memory_format=_memory_format(x))
    ones, unused = torch.ones_like(by.center), [by.center.new_empty(0) for _ in range(2)]
    for piece in _chunks(x, groups):
        center, scale, shift, one = map(piece.select_channels, (*by, ones))
        part = piece.select(made)
        # What a batch norm does that is evaluated, in one pass.
        torch.native_batch_norm(
            _as_one_sample(piece.select(x), last), scale, shift, center, one, False, 0.0, 0.0,
            out=(_as_one_sample(part, last), *unused),
        )  # fmt: skip
        if added is not None:
            factor = piece.select_channels(added[1]).view(part.shape[:2])
            part.addcmul_(piece.select(added[0]), _as_field(factor, x))
    return made


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
        moments = torch.stack([mean, (variance + eps).rsqrt()])
        ctx.save_for_backward(x, weight, moments)
        ctx.groups, ctx.transport, ctx.area = groups, transport, area
        center, rstd = _repeat_per_channel(moments, x).unbind()
        scale = rstd if weight is None else rstd * weight
        shift = torch.zeros_like(scale) if bias is None else bias.expand_as(scale)
        return _apply_affine(x, groups, _Factors(center, scale, shift))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, moments = ctx.saved_tensors
        if _is_channels_last(x):
            grad = grad.contiguous(memory_format=_memory_format(x))
        center, rstd = _repeat_per_channel(moments, x).unbind()
        sums = _channel_gradient_sums(grad, x, center, rstd, ctx.groups)
        grad_weight, grad_bias = sums.sum(1).unbind()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = None
        if needs_x:  # the same on every rank: so is what is sent
            weighted = sums if weight is None else sums * weight
            totals = ctx.transport.sum(weighted.unflatten(2, (ctx.groups, -1)).sum(3))
            totals /= -(x.shape[1] // ctx.groups * ctx.area)
            of_std, of_mean = _repeat_per_channel(totals, x) * rstd
            by = _Factors(center, of_std * rstd, of_mean)
            scale = rstd if weight is None else rstd * weight
            grad_x = _apply_affine(x, ctx.groups, by, (grad, scale))
        return (
            grad_x,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *(None,) * 5,
        )


def _channel_gradient_sums(
    grad: Tensor, x: Tensor, centers: Tensor, rstd: Tensor, groups: int
) -> Tensor:
    """Each channel's sum of `grad` times standardised `x`, and of `grad`: `(2, B, C)`."""
    last = _is_channels_last(x)
    sums, ones = centers.new_zeros((2, *x.shape[:2])), torch.ones_like(centers)
    for piece in reversed(_chunks(x, groups)):
        part = piece.select(x)
        center, one = map(piece.select_channels, (centers, ones))
        # The gradients of what `_apply_affine` scales and shifts by; unlike a group norm's,
        # centered.
        _, *made = torch.ops.aten.native_batch_norm_backward(
            _as_one_sample(piece.select(grad), last), _as_one_sample(part, last),
            one, center, one, None, None, False, 0.0, [False, True, True],
        )  # fmt: skip
        its = torch.stack(made).view(2, *part.shape[:2])
        sums[:, piece.samples, piece.channels] += its
    sums[0] *= rstd
    return sums


def _as_one_sample(x: Tensor, last: bool) -> Tensor:
    """View each sample's channels as those of one, `(1, B * C, ...)`; channels last are of one."""
    return x if last else x.reshape(1, x.shape[0] * x.shape[1], -1)


def _repeat_per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Spread `(..., B, G)` over the channels of each group: `(..., B, C)`."""
    return values.repeat_interleave(x.shape[1] // values.shape[-1], -1)


def _as_field(values: Tensor, x: Tensor) -> Tensor:
    """View `(B, C)` so that it broadcasts over the rows and columns of `x`."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))

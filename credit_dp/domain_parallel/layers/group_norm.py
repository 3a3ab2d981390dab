"""Group normalisation with the statistics of the whole globe.

torch's own group norm can't be used on a band, as it takes the statistics of its input. Here
forward gathers each band's moments (one collective) and normalises each channel by the globe's;
backward sums the gradients of both moments over all bands (one collective). Both passes use torch's
batch-norm kernels with given statistics. On CPUs they take a chunk at a time that fits in the
cache; on GPUs, where starting a kernel costs more than what the cache saves, the whole band (with
channels last: one sample at a time). Small bands on CPUs and compiled code are normalised as in
`norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.halo_exchange import (
    gradients_need_graph,
    gradients_with_graph,
    memory_format_of,
)
from credit_dp.domain_parallel.layers import base
from credit_dp.domain_parallel.layers.base import (
    Bands,
    computes_on_cpu,
    entries_of_largest_band,
)
from credit_dp.domain_parallel.layers.norm import (
    GlobalReduction,
    ReductionLayer,
    accumulation_dtype,
    combine_moments,
    differentiable_standard,
    mean_and_variance,
    normalise,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError

# Entries that are processed at a time, so that intermediate results stay in a core's cache.
CHUNK_ENTRIES = 2**19


@final
class DomainParallelGroupNorm(ReductionLayer):
    """A `GroupNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective in forward and one in backward. Rows may be in any dimension except the
    channels'. The output has the dtype and the memory format of the input, also under autocast on
    GPUs, where torch's own group norm returns float32. Statistics of half-precision input are
    float32, and backward keeps no float32 copy of it.

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
        """Return whether `dim` is one that groups are averaged over: not that of the samples.

        Raises:
            UserError: the rows are in the channels' dimension.
        """
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
        entries = entries_of_largest_band(x, self.dim, bands.input)
        is_small = is_chunked(x) and entries <= base.SMALL_BAND_ENTRIES // 4
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


class _Chunk(NamedTuple):
    """A part of a batch: samples, groups, the channels of these groups, and a slab.

    A slab is a range of the first dimension after the channels.
    """

    samples: slice = slice(None)
    groups: slice = slice(None)
    channels: slice = slice(None)
    slab: slice = slice(None)

    def select(self, field: Tensor) -> Tensor:
        """Return this part of `(B, C, ...)`."""
        return field if self is FULL_CHUNK else field[self.samples, self.channels, self.slab]

    def select_channels(self, values: Tensor) -> Tensor:
        """Return this part of `(B, C)`, flattened."""
        return (values if self is FULL_CHUNK else values[self.samples, self.channels]).flatten()


FULL_CHUNK = _Chunk()


def is_chunked(x: Tensor) -> bool:
    """Return whether to process a field by chunks that fit in a core's cache: only on CPUs."""
    return computes_on_cpu(x)


def _chunks(x: Tensor, groups: int) -> list[_Chunk]:
    """Return chunks that fit in the cache: samples and groups, or slabs if channels are last.

    Of two consecutive passes one runs in reverse: it starts with the chunk that the other has just
    left in the cache. Elsewhere than on CPUs the field is one chunk. If channels are last each
    sample is one, as samples have their own factors but are not adjacent channels.
    """
    samples, channels = x.shape[:2]
    if not is_chunked(x):
        if samples == 1 or (samples and not _is_channels_last(x)):
            return [FULL_CHUNK]
        return [_Chunk(slice(sample, sample + 1)) for sample in range(samples)]
    if _is_channels_last(x):
        return [
            _Chunk(slice(sample, sample + 1), slab=slab)
            for sample in range(samples)
            for slab in _slabs(x)
        ]
    group_channels = channels // groups
    groups_at_once = max(1, CHUNK_ENTRIES * groups // max(1, x.shape[1:].numel()))
    if 0 < samples * groups <= groups_at_once:  # it all fits
        return [FULL_CHUNK]
    group_step = min(groups, groups_at_once)
    sample_step = max(1, groups_at_once // groups)
    return [
        _Chunk(
            slice(sample, sample + sample_step),
            slice(group, min(group + group_step, groups)),
            slice(group * group_channels, min(group + group_step, groups) * group_channels),
        )
        for sample in range(0, samples, sample_step)
        for group in range(0, groups, group_step)
    ]


def _slabs(x: Tensor) -> list[slice]:
    """Return ranges of the first dimension after the channels that fit in the cache."""
    height = x.shape[2]
    rows_at_once = max(1, CHUNK_ENTRIES * height // x.shape[1:].numel())
    return [slice(row, min(row + rows_at_once, height)) for row in range(0, height, rows_at_once)]


def _is_channels_last(x: Tensor) -> bool:
    return memory_format_of(x) is not torch.contiguous_format


def _local_moments(x: Tensor, groups: int) -> Tensor:
    """Return mean and variance of each sample's groups on this band, `(2, B, G)`."""
    dtype = accumulation_dtype(x)
    if not is_chunked(x) and len(x):
        # One stable pass. The copy in float32, if x has half precision, lives until it ends.
        by_group = torch.unflatten(x.to(dtype), 1, (groups, -1))
        dims = tuple(range(2, by_group.ndim))
        variance, mean = torch.var_mean(by_group, dims, correction=0)
        return torch.stack([mean, variance])
    if _is_channels_last(x):
        slabs = _slabs(x)
        sizes = tuple(slab.stop - slab.start for slab in slabs)
        of_samples = []
        for sample in range(len(x)):
            slab_values = (x[sample : sample + 1, :, slab] for slab in slabs)
            of_slabs = [_moments_of_slab(values.to(dtype), groups) for values in slab_values]
            of_samples.append(torch.stack(combine_moments(torch.stack(of_slabs), sizes)))
        return torch.cat(of_samples, 1)
    chunks = _chunks(x, groups)
    if chunks == [FULL_CHUNK]:
        return _moments_of_groups(x.to(dtype), groups)
    moments = x.new_empty((2, len(x), groups), dtype=dtype)
    for chunk in reversed(chunks):
        values = chunk.select(x).to(dtype)
        of_chunk = _moments_of_groups(values, values.shape[1] * groups // x.shape[1])
        moments[:, chunk.samples, chunk.groups] = of_chunk
    return moments


def _moments_of_groups(x: Tensor, groups: int) -> Tensor:
    """Return mean and variance of each sample's groups, `(2, B, G)`."""
    samples, channels, *sizes = x.shape
    # torch's group norm computes both moments in one stable pass. With eps=0 it returns
    # 1 / sqrt(variance): infinite for a constant group, whose variance below is 0 again.
    _, mean, rstd = torch.native_group_norm(
        x.contiguous(), None, None, samples, channels, prod(sizes), groups, 0.0
    )
    return torch.stack([mean, rstd.pow_(-2)])


def _moments_of_slab(x: Tensor, groups: int) -> Tensor:
    """Return mean and variance of one sample's groups, `(2, 1, G)`, for channels last.

    In that format torch's own pass computes E[x^2] - E[x]^2, which cancels for a large mean.
    """

    def mean_of(field: Tensor) -> Tensor:
        return field.mean(0).view(groups, -1).mean(1)

    flat = x.movedim(1, -1).reshape(-1, x.shape[1])
    mean = mean_of(flat)
    centered = flat - mean.repeat_interleave(x.shape[1] // groups)
    mean_error = mean_of(centered)  # the rounding error of `mean`
    variance = mean_of(centered.square_()) - mean_error.square()
    return torch.stack([mean + mean_error, variance])[:, None]


def _global_moments(
    x: Tensor, groups: int, rows: tuple[int, ...], transport: Transport
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each sample's groups over all bands, `(B, G)`; a collective."""
    return combine_moments(transport.all_gather(_local_moments(x, groups)), rows)


class _Factors(NamedTuple):
    """Factors of each sample's channels, `(B, C)` each, of one dtype."""

    scale: Tensor
    shift: Tensor
    center: Tensor
    variance: Tensor


def _apply_affine(
    x: Tensor,
    groups: int,
    factors: _Factors,
    eps: float,
    addend: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return `(x - center) / sqrt(variance + eps) * scale + shift`.

    With an addend, `addend[0]` times the factors `addend[1]` is added.
    """
    channels_last = _is_channels_last(x)
    y = torch.empty_like(x, memory_format=memory_format_of(x))
    empty_statistics = [factors.center.new_empty(0) for _ in range(2)]
    for chunk in _chunks(x, groups):
        out = chunk.select(y)
        scale, shift, center, variance = map(chunk.select_channels, factors)
        # An evaluating batch norm computes this in one pass. Samples are made channels, as each
        # sample has its own factors.
        torch.native_batch_norm(
            _as_one_sample(chunk.select(x), channels_last),
            scale, shift, center, variance, False, 0.0, eps,
            out=(_as_one_sample(out, channels_last), *empty_statistics),
        )  # fmt: skip
        if addend is not None:
            factor = chunk.select_channels(addend[1]).view(out.shape[:2])
            out.addcmul_(chunk.select(addend[0]), _as_field(factor, x))
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
        moments = torch.stack(_global_moments(x, groups, reduction.rows, reduction.transport))
        moments = _repeat_per_channel(moments, x)
        ctx.save_for_backward(x, weight, moments)
        ctx.groups = groups
        ctx.eps = eps
        ctx.area = area
        ctx.reduction = reduction
        center, variance = moments.unbind()
        scale = torch.ones_like(center) if weight is None else weight.expand_as(center)
        shift = torch.zeros_like(center) if bias is None else bias.expand_as(center)
        return _apply_affine(x, groups, _Factors(scale, shift, center, variance), eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, moments = ctx.saved_tensors
        if gradients_need_graph():
            grads = _gradients_with_graph(
                grad,
                x,
                weight,
                ctx.needs_input_grad[:3],
                groups=ctx.groups,
                eps=ctx.eps,
                reduction=ctx.reduction,
            )
            return *grads, *(None,) * 4
        if _is_channels_last(x):
            grad = grad.contiguous(memory_format=memory_format_of(x))
        center, variance = moments.unbind()
        sums = _channel_gradient_sums(grad, x, ctx.groups, moments, ctx.eps)
        grad_weight, grad_bias = sums.sum(1).unbind()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = None
        if needs_x:  # the same on every rank, so that all of them call the collective
            weighted = sums if weight is None else sums * weight
            parts = weighted.unflatten(2, (ctx.groups, -1)).sum(3)
            totals = ctx.reduction.transport.all_reduce(parts)
            # Gradients of the standardised output with respect to x through standard deviation and
            # mean: minus the means of `grad * standardised x` and of `grad` over the group.
            totals /= -(x.shape[1] // ctx.groups * ctx.area)
            rstd = (variance + ctx.eps).rsqrt_()
            grad_std, grad_mean = (_repeat_per_channel(totals, x) * rstd).unbind()
            factors = _Factors(grad_std, grad_mean, center, variance)
            scale = rstd if weight is None else rstd * weight
            grad_x = _apply_affine(x, ctx.groups, factors, ctx.eps, (grad, scale))
        return (
            grad_x,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *(None,) * 4,
        )


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


def _channel_gradient_sums(
    grad: Tensor, x: Tensor, groups: int, moments: Tensor, eps: float
) -> Tensor:
    """Return each channel's sums of `grad` times standardised `x` and of `grad`, `(2, B, C)`.

    They are the gradients of `scale` and `shift` in `_apply_affine`. The backward of torch's group
    norm would sum uncentered `x`, which cancels for a large mean. `moments` are center and
    variance, `(2, B, C)`.
    """
    center, variance = moments.unbind()
    channels_last = _is_channels_last(x)
    nothing = center.new_empty(0)  # statistics of training, for which GPUs do not take None

    def sums_of(chunk: _Chunk) -> Tensor:
        values = chunk.select(x)
        of_channels = [chunk.select_channels(moment) for moment in (center, variance)]
        _, *grads = torch.ops.aten.native_batch_norm_backward(
            _as_one_sample(chunk.select(grad), channels_last),
            _as_one_sample(values, channels_last),
            of_channels[0],  # no weight: only the gradient of `x` would depend on it
            *of_channels, nothing, nothing, False, eps, [False, True, True],
        )  # fmt: skip
        return torch.stack(grads).view(2, *values.shape[:2])

    chunks = _chunks(x, groups)
    if chunks == [FULL_CHUNK]:
        return sums_of(FULL_CHUNK)
    sums = torch.zeros_like(moments)
    for chunk in reversed(chunks):
        sums[:, chunk.samples, chunk.channels] += sums_of(chunk)
    return sums


def _as_one_sample(x: Tensor, channels_last: bool) -> Tensor:
    """Return `(B, C, ...)` as `(1, B * C, -1)`; channels last have one sample a chunk already."""
    return x if channels_last else x.reshape(1, x.shape[0] * x.shape[1], -1)


def _repeat_per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return `(..., B, G)` repeated for the channels of each group, `(..., B, C)`."""
    # As `repeat_interleave`, which takes twice as long for so few values. Contiguous, as torch's
    # kernels for CPUs read statistics without their strides: of one group they would be a view.
    channels = values[..., None].expand(*values.shape, x.shape[1] // values.shape[-1])
    return channels.flatten(-2).contiguous()


def _as_field(values: Tensor, x: Tensor) -> Tensor:
    """Return a view of `(B, C)` that broadcasts against `x`."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))

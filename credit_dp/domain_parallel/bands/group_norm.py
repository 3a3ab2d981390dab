"""Group normalisation with the statistics of the whole globe.

torch's own group norm can't be used on a band, as it takes the statistics of its input. Here
forward gathers each band's moments (one collective) and normalises each channel by the globe's;
backward sums the gradients of both moments over all bands (one collective). Both passes use torch's
batch-norm kernels with given statistics. On CPUs they take a chunk at a time that fits in the
cache; on GPUs, where starting a kernel costs more than what the cache saves, the whole band (with
channels last: one sample at a time).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.norms import combine_moments
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.transport import Transport
from credit_dp.torch_private import FakeTensor

# Entries that are processed at a time, so that intermediate results stay in a core's cache.
CHUNK_ENTRIES = 2**19


class _Chunk(NamedTuple):
    """A part of a batch: samples, groups, the channels of these groups, and a slab.

    A slab is a range of the first dimension after the channels.
    """

    samples: slice = slice(None)
    groups: slice = slice(None)
    channels: slice = slice(None)
    slab: slice = slice(None)

    def select(self, field: Tensor) -> Tensor:
        return field if self is FULL_CHUNK else field[self.samples, self.channels, self.slab]

    def select_channels(self, values: Tensor) -> Tensor:
        return (values if self is FULL_CHUNK else values[self.samples, self.channels]).flatten()


FULL_CHUNK = _Chunk()


def is_chunked(x: Tensor) -> bool:
    """Return whether to process a field by chunks that fit in a core's cache: only on CPUs.

    Not in a dry run, which counts the kernels of a GPU.
    """
    return x.is_cpu and not isinstance(x, FakeTensor)


def _chunks(x: Tensor, groups: int) -> list[_Chunk]:
    """Return chunks that fit in the cache: samples and groups, or slabs if channels are last.

    One of two consecutive passes runs in reverse: it starts with the chunk that the other has just
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
        samples = []
        for sample in range(len(x)):
            slab_values = (x[sample : sample + 1, :, slab] for slab in slabs)
            slab_moments = [_moments_of_slab(values.to(dtype), groups) for values in slab_values]
            samples.append(torch.stack(combine_moments(torch.stack(slab_moments), sizes)))
        return torch.cat(samples, 1)
    chunks = _chunks(x, groups)
    if chunks == [FULL_CHUNK]:
        return _moments_of_groups(x.to(dtype), groups)
    moments = x.new_empty((2, len(x), groups), dtype=dtype)
    for chunk in reversed(chunks):
        values = chunk.select(x).to(dtype)
        chunk_moments = _moments_of_groups(values, values.shape[1] * groups // x.shape[1])
        moments[:, chunk.samples, chunk.groups] = chunk_moments
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


def group_moments(x: Tensor, groups: int, rows: tuple[int, ...], transport: Transport) -> Tensor:
    """Return mean and variance of each sample's groups of all bands, `(2, B, G)`; a collective."""
    if x.numel():
        moments = _local_moments(x, groups)
    else:
        moments = x.new_zeros((2, len(x), groups), dtype=accumulation_dtype(x))
    return torch.stack(combine_moments(transport.all_gather(moments), rows))


def group_norm_forward(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> Tensor:
    """Return the band, normalised by mean and variance of each sample's channels, `(2, B, C)`."""
    center, variance = moments.unbind()
    scale = torch.ones_like(center) if weight is None else weight.expand_as(center)
    shift = torch.zeros_like(center) if bias is None else bias.expand_as(center)
    return _apply_affine(x, groups, _Factors(scale, shift, center, variance), eps)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    *,
    area: int,
    transport: Transport,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; a collective if the input needs one.

    Those of parameters are this band's share.

    Args:
        grad: that of `group_norm_forward`'s result; others are its arguments.
        area: entries of the globe in a channel.
        needs: which of the three are needed, the first the same on every rank.
    """
    if _is_channels_last(x):
        grad = grad.contiguous(memory_format=memory_format_of(x))
    center, variance = moments.unbind()
    sums = _channel_gradient_sums(grad, x, groups, moments, eps)
    grad_weight, grad_bias = sums.sum(1).unbind()
    needs_x, needs_weight, needs_bias = needs
    grad_x = None
    if needs_x:  # the same on every rank, so that all of them call the collective
        weighted = sums if weight is None else sums * weight
        parts = torch.unflatten(weighted, 2, (groups, -1)).sum(3)
        totals = transport.all_reduce(parts)
        # Gradients of the standardised output with respect to x through standard deviation and
        # mean: minus the means of `grad * standardised x` and of `grad` over the group.
        totals /= -(x.shape[1] // groups * area)
        rstd = (variance + eps).rsqrt_()
        grad_std, grad_mean = (repeat_per_channel(totals, x) * rstd).unbind()
        factors = _Factors(grad_std, grad_mean, center, variance)
        scale = rstd if weight is None else rstd * weight
        grad_x = _apply_affine(x, groups, factors, eps, (grad, scale))
    return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None


class _Factors(NamedTuple):
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
    if not x.numel():
        return y
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


def _channel_gradient_sums(
    grad: Tensor, x: Tensor, groups: int, moments: Tensor, eps: float
) -> Tensor:
    """Return each channel's sums of `grad` times standardised `x` and of `grad`, `(2, B, C)`.

    They are the gradients of `scale` and `shift` in `_apply_affine`. The backward of torch's group
    norm would sum uncentered `x`, which cancels for a large mean. `moments` are center and
    variance, `(2, B, C)`.
    """
    if not x.numel():
        return torch.zeros_like(moments)
    center, variance = moments.unbind()
    channels_last = _is_channels_last(x)
    nothing = center.new_empty(0)  # statistics of training, for which GPUs do not take None

    def sums_of(chunk: _Chunk) -> Tensor:
        values = chunk.select(x)
        channel_moments = [chunk.select_channels(moment) for moment in (center, variance)]
        _, *grads = torch.ops.aten.native_batch_norm_backward(
            _as_one_sample(chunk.select(grad), channels_last),
            _as_one_sample(values, channels_last),
            channel_moments[0],  # no weight: only the gradient of `x` would depend on it
            *channel_moments, nothing, nothing, False, eps, [False, True, True],
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


def repeat_per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return `(..., B, G)` repeated for the channels of each group, `(..., B, C)`."""
    # As `repeat_interleave`, which takes twice as long for so few values. Contiguous, as torch's
    # kernels for CPUs read statistics without their strides: of one group they would be a view.
    channels = values[..., None].expand(*values.shape, x.shape[1] // values.shape[-1])
    return channels.flatten(-2).contiguous()


def _as_field(values: Tensor, x: Tensor) -> Tensor:
    """Return a view of `(B, C)` that broadcasts against `x`."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))

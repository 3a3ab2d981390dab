"""Norms, with the moments of the whole globe where they are over rows, and their gradients.

What is saved for backward, mean and reciprocal standard deviation, is the same on every rank then.
Gradients of parameters are each rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import put, rebanded, refresh, whole, with_rows
from credit_dp.domain_parallel.band_tensor.rules import (
    named_arguments,
    run_whole,
    short_name,
)
from credit_dp.domain_parallel.band_tensor.strides import describe
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    rule_for,
)
from credit_dp.domain_parallel.bands import group_norm as kernels
from credit_dp.domain_parallel.bands.norms import (
    GlobalReduction,
    Moments,
    mean_and_variance,
    mean_square,
    norm_backward,
    norm_forward,
    update_running_statistics,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.layers import base
from credit_dp.torch_private import schema_of

aten = torch.ops.aten
Result = tuple[Part | None, ...]


def _reduction(x: BandTensor, dims: Sequence[int], groups: int | None = None) -> GlobalReduction:
    band = x.band
    rows = tuple([band.outer * band.sizes(rank) for rank in range(x.domain.ranks)])
    return GlobalReduction(tuple(dims), band.dim, rows, x.domain.transport, groups)


def _row_dim(x: Any) -> int | None:
    """Return the dimension of the rows, from 0; None if there are none."""
    if type(x) is not BandTensor:
        return None
    refresh(x)
    return x.ndim + x.rows.dim if isinstance(x.rows, Band) else None


def _by_rows(x: BandTensor) -> BandTensor:
    dim = -1 if x.ndim == 3 else -2  # not that of the channels
    rows = Band(dim, 1, x.domain.bounds(x.shape[dim]))
    local = describe(x).in_order(with_rows(x, rows, x.domain, is_read_again=True))
    return BandTensor(local, rows, x.domain, x.stride())


def _share(grad: Tensor | None, like: Tensor | None, shape: Sequence[int], rows: Rows) -> Any:
    """Return a parameter's gradient as a part, in the parameter's shape and type."""
    if grad is None:
        return None
    return Part(grad.view(shape).to(grad.dtype if like is None else like.dtype), rows)


# ---------------------------------------------------------------- groups


@rule_for("native_group_norm.default")
def group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise groups of channels."""
    x, weight, bias, samples, channels, area, groups, eps = args
    row_dim = _row_dim(x)
    if row_dim is None:
        return run_whole(func, args, kwargs)
    domain, band, local = x.domain, x.rows, x.local
    if row_dim == 0:
        results = func(local, whole(weight), whole(bias), len(local), channels, area, groups, eps)
        return _sample_results(results, band)
    if row_dim == 1:
        if _bands_of_groups(band, channels // groups) is None:
            return group_norm(func, (_by_rows(x), *args[1:]), kwargs)
        return _groups_of_rows(args, func)
    dtype = accumulation_dtype(local)
    weight, bias = (None if p is None else whole(p).to(dtype) for p in (weight, bias))
    reduction = _reduction(x, range(1 - x.ndim, 0), groups)
    if _is_small(x):
        mean, variance = mean_and_variance(local, reduction)
        rstd = (variance + eps).rsqrt_()
        shape = _grouped_shape(x, groups)
        y = norm_forward(local, (mean, rstd), weight, bias, reduction, shape)
    else:
        moments = kernels.group_moments(local, groups, reduction.rows, domain.transport)
        channel_rows = kernels.repeat_per_channel(moments, local)
        y = kernels.group_norm_forward(local, channel_rows, weight, bias, groups, eps)
        mean, variance = moments.unbind()
        rstd = (variance + eps).rsqrt_()
    size = (samples, groups)
    return Part(y, band), Part(mean.reshape(size), WHOLE), Part(rstd.reshape(size), WHOLE)


def _sample_results(results: Sequence[Tensor], band: Band) -> Result:
    """Return results of samples that are rows: the field, and (samples, groups) of statistics."""
    y, mean, rstd = results
    rows = band._replace(dim=-2)
    return Part(y, band), Part(mean, rows), Part(rstd, rows)


def _is_small(x: BandTensor) -> bool:
    # On a CPU that takes less time than torch's kernels up to 2^16 entries, or 2^13 if channels are
    # last; at 2^14 it takes a tenth more there.
    band = x.band
    entries = x.numel() // max(1, band.height) * max(map(band.sizes, range(x.domain.ranks)))
    return kernels.is_chunked(x.local) and entries <= base.SMALL_BAND_ENTRIES // 4


def _grouped_shape(x: BandTensor, groups: int) -> tuple[int, ...]:
    return (groups, x.shape[1] // groups, *(1,) * (x.ndim - 2))


def _bands_of_groups(band: Band, each: int) -> tuple[Band, Band] | None:
    """Return bands of parameters and of groups where channels are rows; None if groups are cut."""
    if any(bound % each for bound in band.bounds) or has_empty(band):
        return None
    channels = band._replace(dim=-1)
    return channels, channels._replace(bounds=tuple([bound // each for bound in band.bounds]))


def has_empty(band: Band) -> bool:
    """Return whether a rank has no rows."""
    return any([a == b for a, b in pairwise(band.bounds)])


def _groups_of_rows(args: tuple[Any, ...], func: Any) -> Any:
    """Normalise groups of channels that are rows, where each group is on one rank."""
    x, weight, bias, samples, channels, area, groups, eps = args
    each = channels // groups
    bands = _bands_of_groups(x.rows, each)
    assert bands is not None
    parameters = [p if p is None else with_rows(p, bands[0], x.domain) for p in (weight, bias)]
    count = x.local.shape[1]
    results = func(x.local, *parameters, samples, count, area, count // each, eps)
    return tuple(map(Part, results, (x.rows, bands[1], bands[1])))


@rule_for("native_group_norm_backward.default")
def group_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a field, weight and bias."""
    grad, x, mean, rstd, weight, samples, channels, area, groups, mask = args
    row_dim = _row_dim(x)
    if row_dim is None:
        return run_whole(func, args, kwargs)
    if row_dim == 1 and _bands_of_groups(x.rows, channels // groups) is None:
        return group_norm_backward(func, (grad, _by_rows(x), *args[2:]), kwargs)
    domain, band, local = x.domain, x.rows, x.local
    grad = _in_order_of(local, grad, band, domain)
    if row_dim == 0:
        rows = band._replace(dim=-2)
        sample_moments = [with_rows(y, rows, domain).contiguous() for y in (mean, rstd)]
        grad_x, *shares = func(
            grad, local, *sample_moments, whole(weight), len(local), channels, area, groups, mask
        )
        return _gradients(grad_x, shares, weight, (channels,), band)
    if row_dim == 1:
        return _gradients_of_groups_of_rows(args, func)
    mean, rstd = whole(mean), whole(rstd)
    dtype = rstd.dtype
    wide = None if weight is None else whole(weight).to(dtype)
    if _is_small(x):
        view = (samples, groups, *(1,) * (x.ndim - 1))
        reduction = _reduction(x, range(1 - x.ndim, 0), groups)
        grad_x, *shares = norm_backward(
            grad, local, (mean.view(view), rstd.view(view)), wide, reduction,
            _grouped_shape(x, groups), needs=mask,
        )  # fmt: skip
    else:
        # The variance with what was added to it.
        moments = kernels.repeat_per_channel(torch.stack([mean, rstd.pow(-2)]), local)
        grad_x, *shares = kernels.group_norm_backward(
            grad, local, moments, wide, groups, 0.0,
            area=area, transport=domain.transport, needs=mask,
        )  # fmt: skip
    return _gradients(grad_x, shares, weight, (channels,), band)


def _in_order_of(x: Tensor, grad: Tensor, band: Band, domain: Domain) -> Tensor:
    """Return this rank's rows of a gradient in the memory format of a field.

    torch's kernels take it for granted, as autograd has seen to it for the globe's tensors.
    """
    local = with_rows(grad, band, domain)
    return local.contiguous(memory_format=memory_format_of(x))


def _gradients(
    grad_x: Tensor | None,
    shares: Sequence[Tensor | None],
    weight: Tensor | None,
    shape: Sequence[int],
    band: Band,
    rows: Rows = PARTIAL,
) -> Result:
    """Return the gradients of a field in its bands, and of parameters of a shape."""
    parameter_grads = [_share(share, weight, shape, rows) for share in shares]
    return None if grad_x is None else Part(grad_x, band), *parameter_grads


def _gradients_of_groups_of_rows(args: tuple[Any, ...], func: Any) -> Any:
    grad, x, mean, rstd, weight, samples, channels, area, groups, mask = args
    each, domain = channels // groups, x.domain
    bands = _bands_of_groups(x.rows, each)
    assert bands is not None
    grad = _in_order_of(x.local, grad, x.rows, domain)
    moments = [with_rows(y, bands[1], domain).contiguous() for y in (mean, rstd)]
    scale = None if weight is None else with_rows(weight, bands[0], domain)
    count = x.local.shape[1]
    grad_x, *shares = func(
        grad, x.local, *moments, scale, samples, count, area, count // each, mask
    )
    return _gradients(grad_x, shares, weight, (count,), x.rows, bands[0])


# ---------------------------------------------------------------- batches

# They return new running statistics instead of writing to those that they get.
FUNCTIONAL = ("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional")
# They return what their backward needs, beside the field and its statistics.
WITH_RESERVE = ("cudnn_batch_norm", "_batch_norm_with_update", "_batch_norm_with_update_functional")
RUNNING = ("running_mean", "running_var")


@rule_for(
    "native_batch_norm.default", "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit_no_training.default", "_batch_norm_with_update.default",
    "_batch_norm_with_update_functional.default", "_batch_norm_no_update.default",
    "cudnn_batch_norm.default", "miopen_batch_norm.default",
)  # fmt: skip
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise channels by the moments of all samples and rows, or by running statistics."""
    given, name = named_arguments(func, args, kwargs), short_name(func)
    x = given["input"]
    row_dim = _row_dim(x)
    running = [given.get(each) for each in RUNNING]
    for each in running:
        if type(each) is BandTensor and each.is_open:
            BandTensor.keep_whole(each)
    training = given.get("training", "with_update" in name)
    if row_dim == 1 and not _is_local_by_channels(x.rows, name, running):
        return batch_norm(func, (), given | {"input": _by_rows(x)})
    if row_dim is None:
        # torch does not say that it writes to running statistics.
        copies = {
            key: BandTensor(whole(x).clone(), WHOLE, x.domain, x.stride())
            for key in RUNNING
            if type(x := given.get(key)) is BandTensor
        }
        results = run_whole(func, (), given | copies)
        for key, copy in copies.items():
            if name not in FUNCTIONAL:
                put(given[key], copy)
        return results
    band, domain, local = x.rows, x.domain, x.local
    if row_dim == 1 or not training:
        rows = band._replace(dim=-1) if row_dim == 1 else WHOLE
        operands = _with_local(given, band, rows, domain)
        if local.numel():
            y, *others = func(**operands)
        else:  # torch's kernels divide by the number of entries
            y, *others = local.clone(), *[local.new_empty(0)] * (len(schema_of(func).returns) - 1)
        return Part(y, band), *(Part(each, rows if each.numel() else WHOLE) for each in others)
    reduction = _reduction(x, _all_but_channels(x))
    mean, variance = mean_and_variance(local, reduction)
    new_running: list[Tensor] = []
    if running[0] is not None:
        targets = [whole(each) for each in running]
        if name in FUNCTIONAL:
            targets = new_running = [each.clone() for each in targets]
        momentum = given["momentum" if "momentum" in given else "exponential_average_factor"]
        count = reduction.count(local)
        update_running_statistics((targets[0], targets[1]), (mean, variance), count, momentum)
        for each, target in zip(running, targets, strict=True):
            if type(each) is BandTensor and not new_running:
                put(each, target)
    rstd = (variance + given["eps" if "eps" in given else "epsilon"]).rsqrt_()
    weight, bias = whole(given["weight"]), whole(given["bias"])
    y = norm_forward(local, (mean, rstd), weight, bias, reduction, _channel_shape(x))
    others = [mean.flatten(), rstd.flatten()]
    if name in WITH_RESERVE:
        others.append(local.new_empty(0, dtype=torch.uint8))
    return Part(y, band), *(Part(each, WHOLE) for each in [*others, *new_running])


def _is_local_by_channels(band: Band, name: str, running: Sequence[Any]) -> bool:
    return running[0] is None and name not in WITH_RESERVE and not has_empty(band)


def _with_local(
    given: dict[str, Any], band: Band, channel_rows: Rows, domain: Domain
) -> dict[str, Any]:
    """Return arguments with local tensors of fields and of what has an entry for each channel."""
    return {
        name: with_rows(x, band if x.ndim > 1 else channel_rows, domain)
        if isinstance(x, Tensor)
        else x
        for name, x in given.items()
    }


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return -x.ndim, *range(2 - x.ndim, 0)


def _channel_shape(x: Tensor) -> tuple[int, ...]:
    return x.shape[1], *(1,) * (x.ndim - 2)


@rule_for(
    "native_batch_norm_backward.default", "batch_norm_backward.default",
    "cudnn_batch_norm_backward.default", "miopen_batch_norm_backward.default",
)  # fmt: skip
def batch_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a field, weight and bias."""
    given = named_arguments(func, args, kwargs)
    x, weight = given["input"], given["weight"]
    grad = given["grad_out" if "grad_out" in given else "grad_output"]
    row_dim = _row_dim(x)
    grad_dim = _row_dim(grad)
    if row_dim is None and type(x) is BandTensor and grad_dim is not None:
        x = given["input"] = _by_rows(x) if grad_dim == 1 else rebanded(x, grad.rows)
        row_dim = _row_dim(x)
    if row_dim is None:
        return run_whole(func, args, kwargs)
    running = [given.get(each) for each in RUNNING]
    if row_dim == 1 and not _is_local_by_channels(x.rows, short_name(func), running):
        return batch_norm_backward(func, (), given | {"input": _by_rows(x)})
    band, domain = x.rows, x.domain
    # Those of cuDNN and MIOpen are for training alone.
    training = given.get("train", given.get("update", True))
    if row_dim == 1 or not training:
        rows: Rows = band._replace(dim=-1) if row_dim == 1 else WHOLE
        operands = _with_local(given, band, rows, domain)
        if x.local.numel():
            grad_x, *shares = func(**operands)
        else:
            grad_x, *shares = x.local.clone(), *[x.local.new_zeros(x.shape[1])] * 2
        count = band.outer * band.sizes(domain.rank) if row_dim == 1 else x.shape[1]
        rows = rows if row_dim == 1 else PARTIAL
        return _gradients(grad_x, shares, weight, (count,), band, rows)
    grad = with_rows(grad, band, domain)
    shape = _channel_shape(x)
    mean = whole(given["save_mean"]).view(shape)
    rstd = whole(given["save_invstd" if "save_invstd" in given else "save_var"]).view(shape)
    reduction = _reduction(x, _all_but_channels(x))
    mask = given.get("output_mask", (True, True, True))
    grad_x, *shares = norm_backward(
        grad, x.local, (mean, rstd), whole(weight), reduction, shape, needs=mask
    )
    return _gradients(grad_x, shares, weight, (x.shape[1],), band)


# ---------------------------------------------------------------- layers


def _trailing(x: Any, shape: Sequence[int]) -> GlobalReduction | None:
    """Return the reduction over the last dimensions; None if the rows are in another one."""
    row_dim = _row_dim(x)
    if row_dim is None or row_dim < x.ndim - len(shape):
        return None
    return _reduction(x, range(-len(shape), 0))


def _own_rows(p: Any, x: BandTensor) -> Any:
    """Return this rank's entries of a parameter that has some for each row, in at least float32."""
    return None if p is None else with_rows(p, x.rows, x.domain).to(accumulation_dtype(x.local))


@rule_for("native_layer_norm.default", "_fused_rms_norm.default")
def layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise the last dimensions, with rows in any of them or in another one."""
    given = named_arguments(func, args, kwargs)
    x, shape = given["input"], given["normalized_shape"]
    reduction = _trailing(x, shape)
    if reduction is None:
        if _row_dim(x) is None:
            return run_whole(func, args, kwargs)
        results = func(x.local, *[whole(each) for each in args[1:]], **kwargs)
        return tuple(Part(each, x.rows) for each in results)
    eps: Any = given["eps"]
    moments: Moments
    if func is aten.native_layer_norm.default:
        moments = mean_and_variance(x.local, reduction)
    else:
        moments = mean_square(x.local, reduction)
        eps = torch.finfo(accumulation_dtype(x.local)).eps if eps is None else eps
    mean, variance = moments
    rstd = (variance + eps).rsqrt_()
    weight, bias = (_own_rows(p, x) for p in (given["weight"], given.get("bias")))
    y = norm_forward(x.local, (mean, rstd), weight, bias, reduction)
    return Part(y, x.rows), *(Part(each, WHOLE) for each in (mean, rstd) if each is not None)


@rule_for("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def layer_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a field, weight and bias."""
    given = named_arguments(func, args, kwargs)
    x, shape, weight = given["input"], given["normalized_shape"], given["weight"]
    reduction = _trailing(x, shape)
    if reduction is None and _row_dim(x) is None:
        return run_whole(func, args, kwargs)
    band, domain = x.rows, x.domain
    given["grad_out"] = grad = with_rows(given["grad_out"], band, domain)
    if reduction is None:
        given["grad_out"] = grad.contiguous()
        for name in ("mean", "rstd"):
            if name in given:
                given[name] = with_rows(given[name], band, domain).contiguous()
        given |= {"input": x.local, "weight": whole(weight)}
        if "bias" in given:
            given["bias"] = whole(given["bias"])
        grad_x, *shares = func(**given)
        return _gradients(grad_x, shares, weight, shape, band)
    mean, rstd = whole(given.get("mean")), whole(given["rstd"])
    mask = given["output_mask"]
    grad_x, *shares = norm_backward(
        grad, x.local, (mean, rstd), _own_rows(weight, x), reduction, needs=[*mask, False][:3]
    )
    own_shape = x.local.shape[x.ndim - len(shape) :]
    return _gradients(grad_x, shares[: len(mask) - 1], weight, own_shape, band, band)

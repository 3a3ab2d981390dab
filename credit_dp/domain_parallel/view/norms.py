"""Rules of norms, with the moments of the whole globe where they are over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.norms import (
    GlobalReduction,
    Moments,
    mean_and_variance,
    mean_square,
    update_running_statistics,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype
from credit_dp.domain_parallel.layers.norm import (
    cast_for_autocast,
    cast_for_rms_norm,
    normalise,
)
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.layers import call_layer, weights_of, with_spatial_rows
from credit_dp.domain_parallel.view.shapes import with_rows_everywhere
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    local_of,
    with_layout,
    wrap,
)


def _reduction(x: GlobalTensor, layout: Layout, dims: list[int]) -> GlobalReduction:
    """Return the reduction of a band over dimensions, from 0, that include its rows.

    Raises:
        NoRuleError: a rank has no rows.
    """
    ndim, rows = x.ndim, layout.partition.sizes
    if 0 in rows:
        raise NoRuleError
    if layout.outer != 1:
        rows = tuple([layout.outer * count for count in rows])
    from_end = tuple([d - ndim for d in dims])
    return GlobalReduction(from_end, layout.dim - ndim, rows, x.view_.manager.transport)


def _moments_and_statistics(
    x: GlobalTensor, reduction: GlobalReduction, running: tuple[Any, Any], momentum: float
) -> Moments:
    """Return mean and variance of the globe, and update running statistics; a collective."""
    mean, variance = _moments(mean_and_variance, x.local, reduction, x.view_)
    if running[0] is not None and x.view_.recorder is None:
        assert mean is not None
        moments = mean, variance
        update_running_statistics(running, moments, reduction.count(x.local), momentum)
    return mean, variance


def _moments(
    compute: Callable[[Tensor, GlobalReduction], Moments],
    x: Tensor,
    reduction: GlobalReduction,
    view: GlobalView,
) -> Moments:
    """Return the moments of the globe; a collective.

    A dry run only counts their message: a model has many norms, and half of the operations of its
    plan would be those of moments without values.
    """
    if view.recorder is None:
        return compute(x, reduction)
    shape = [1 if d - x.ndim in reduction.dims else size for d, size in enumerate(x.shape)]
    moments = x.new_empty((1 if compute is mean_square else 2, *shape), dtype=accumulation_dtype(x))
    reduction.transport.all_gather(moments if len(moments) == 2 else moments[0])
    mean, variance = moments.new_empty(shape), moments.new_empty(shape)
    return None if compute is mean_square else mean, variance


NORM: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5}
BATCH_NORM_TENSORS = ("input", "running_mean", "running_var", "weight", "bias")
TORCH_BATCH_NORM_TENSORS = ("input", "weight", "bias", "running_mean", "running_var")


@rule_for("batch_norm")
def batch_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Normalise by the moments of each channel, and update running statistics."""
    # torch.batch_norm has one parameter more than that of torch.nn.functional, in another order.
    names = BATCH_NORM_TENSORS if func is F.batch_norm else TORCH_BATCH_NORM_TENSORS
    arguments = NORM | {"training": False, "momentum": 0.1}
    arguments |= bind((*names, "training", "momentum", "eps", "cudnn_enabled"), args, kwargs)
    x = with_spatial_rows(arguments["input"], arguments["input"].ndim - 2)
    training, eps = arguments["training"], arguments["eps"]
    layout = layout_of(x)
    require_whole(arguments["weight"], arguments["bias"])
    running = (arguments["running_mean"], arguments["running_var"])
    if not training and running[0] is not None:
        weight, bias = local_of(arguments["weight"]), local_of(arguments["bias"])
        result = F.batch_norm(x.local, *running, weight, bias, False, 0.0, eps)
        return wrap(result, layout, x.view_)
    x = with_rows_everywhere(x)
    layout = layout_of(x)
    reduction = _reduction(x, layout, [0, *range(2, x.ndim)])
    moments = _moments_and_statistics(x, reduction, running, arguments["momentum"])
    weight, bias = local_of(arguments["weight"]), local_of(arguments["bias"])
    per_channel = (x.shape[1], *(1,) * (x.ndim - 2))
    result = normalise(x.local, moments, eps, weight, bias, reduction, per_channel)
    return wrap(result, layout, x.view_)


@rule_for("group_norm")
def group_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Group norm."""
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    arguments = NORM | bind(names, args, kwargs)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    require_whole(weight, bias)
    layout = layout_of(x)
    if layout.dim == 0:
        local = func(
            x.local, arguments["num_groups"], *map(local_of, (weight, bias, arguments["eps"]))
        )
        return wrap(local, layout, x.view_)
    if layout.dim == 1:
        x = with_spatial_rows(x, x.ndim - 2)
        return group_norm(func, (x,), {name: arguments[name] for name in names[1:5]})
    if weight is None and bias is not None:
        weight = torch.ones_like(local_of(bias))
    if bias is None and weight is not None:
        bias = torch.zeros_like(local_of(weight))
    arguments |= {"weight": weight, "bias": bias}
    settings = {
        "num_groups": arguments["num_groups"],
        "num_channels": x.shape[1],
        "eps": arguments["eps"],
        "affine": weight is not None,
    }
    return call_layer(_no_function, x, nn.GroupNorm, settings, weights_of(arguments))


def _no_function(x: Tensor) -> Any:
    """Stand for the function on a band alone where there is none, as all rows are coupled.

    Raises:
        NoRuleError: always.
    """
    raise NoRuleError


@rule_for("instance_norm")
def instance_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Instance norm, with running statistics or without."""
    if func is not F.instance_norm:
        raise NoRuleError
    names = (*BATCH_NORM_TENSORS, "use_input_stats", "momentum", "eps")
    defaults = {"running_mean": None, "running_var": None, "use_input_stats": True}
    arguments = NORM | defaults | {"momentum": 0.1} | bind(names, args, kwargs)
    x = arguments["input"]
    layout = layout_of(x)
    running = (arguments["running_mean"], arguments["running_var"])
    parameters = (arguments["weight"], arguments["bias"])
    require_whole(running, parameters)
    if layout.dim <= 1 or x.ndim < 3:
        raise NoRuleError
    if not arguments["use_input_stats"]:
        mean, variance, weight, bias = map(local_of, (*running, *parameters))
        result = F.batch_norm(x.local, mean, variance, weight, bias, False, 0.0, arguments["eps"])
        return wrap(result, layout, x.view_)
    x = with_rows_everywhere(x)
    layout = layout_of(x)
    reduction = _reduction(x, layout, list(range(2, x.ndim)))
    moments = _moments_and_statistics(x, reduction, running, arguments["momentum"])
    weight, bias = map(local_of, parameters)
    per_channel = (x.shape[1], *(1,) * (x.ndim - 2))
    result = normalise(x.local, moments, arguments["eps"], weight, bias, reduction, per_channel)
    return wrap(result, layout, x.view_)


@rule_for("layer_norm", "rms_norm")
def layer_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Norms over the last dimensions, with rows in any of them or in another one."""
    is_rms = func.__name__ == "rms_norm"
    names = ("weight", "eps") if is_rms else ("weight", "bias", "eps", "cudnn_enable")
    defaults = NORM | {"eps": None} if is_rms else NORM
    arguments = defaults | bind(("input", "normalized_shape", *names), args, kwargs)
    x, shape, eps = arguments["input"], tuple(arguments["normalized_shape"]), arguments["eps"]
    layout, view = layout_of(x), x.view_
    weight, bias = arguments["weight"], arguments["bias"]
    require_whole(weight, bias)
    first = x.ndim - len(shape)
    if tuple(x.shape[first:]) != shape:
        raise NoRuleError
    if layout.dim < first:
        parameters = (weight,) if is_rms else (weight, bias)
        return wrap(func(x.local, shape, *map(local_of, parameters), eps), layout, view)
    x = with_rows_everywhere(x)
    layout = layout_of(x)
    reduction = _reduction(x, layout, list(range(first, x.ndim)))
    local = (cast_for_rms_norm if is_rms else cast_for_autocast)(x.local)
    moments = _moments(mean_square if is_rms else mean_and_variance, local, reduction, view)
    # Parameters have an entry for each row: each rank takes those of its band.
    entries = layout.at(layout.dim - first)
    weight, bias = (None if p is None else with_layout(p, entries, view) for p in (weight, bias))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    return wrap(normalise(local, moments, eps, weight, bias, reduction), layout, view)

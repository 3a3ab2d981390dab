"""The table of rules: how a layer is computed on bands of rows.

The rule of a type of module gets the module and returns its domain-parallel replacement, or the
module itself. The rule of a custom operator gets the operator and its arguments; those of torch's
operators are in `band_tensor`. Users add rules with `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from credit_dp.channel_parallel import DistributedDepthwiseConv2d
from credit_dp.domain_parallel.layers import (
    DomainParallelAvgPool,
    DomainParallelBatchNorm,
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelConvTranspose2d,
    DomainParallelConvTranspose3d,
    DomainParallelDepthwiseConv2d,
    DomainParallelDistributedDepthwiseConv2d,
    DomainParallelGlobalAvgPool,
    DomainParallelGroupNorm,
    DomainParallelInstanceNorm,
    DomainParallelLongRangeConv2d,
    DomainParallelMatchRows,
    DomainParallelMaxPool,
    DomainParallelPadLayer,
    DomainParallelPeriodicConv2d,
    DomainParallelPeriodicUpsample,
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
    DomainParallelPolePad,
    DomainParallelRowGroups,
    DomainParallelStochasticDepth,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.layers.conv import Conv, is_pointwise
from credit_dp.domain_parallel.layers.pad import PAD_LAYERS
from credit_dp.domain_parallel.layers.pool import output_size_along
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError
from credit_dp.models.blocks import PolePad, StochasticDepth
from credit_dp.models.crossformer import LongDistanceAttention, ShortDistanceAttention
from credit_dp.models.pangu import EarthAttention
from credit_dp.models.swin import CosineAttention
from credit_dp.models.unet import LongRangeConv2d, MatchRows, PeriodicConv2d, PeriodicUpsample
from credit_dp.torch_private import OpOverload, operator_of, padding_widths

Rule = Callable[[Any], nn.Module]
AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])


# Compatibility: these four functions decide nothing here, the rules below do.
def _needs_halo_conv2d(conv: nn.Conv2d) -> bool:
    return conv.kernel_size[0] > 1


def _needs_halo_conv3d(conv: nn.Conv3d) -> bool:
    return conv.kernel_size[1] > 1


def _needs_halo_conv_transpose2d(conv: nn.ConvTranspose2d) -> bool:
    return conv.kernel_size[0] > conv.stride[0]


def _needs_halo_conv_transpose3d(conv: nn.ConvTranspose3d) -> bool:
    return conv.kernel_size[1] > conv.stride[1]


def _conv_rule(wrapper: Rule) -> Rule:
    """Return the rule for a kind of convolution, transposed or not.

    Only pointwise convolutions stay. One whose kernel is as large as its stride is wrapped as well:
    its windows don't overlap, but the edge of a band may cut one. Where bands line up, a transposed
    one is put back (`RowLayer.wrapped_is_exact`).
    """

    def rule(conv: Conv) -> nn.Module:
        is_kept = is_pointwise(conv, padding_widths(conv), ROW_DIM)
        return conv if is_kept else wrapper(conv)

    return rule


def _shard_conv2d(conv: nn.Conv2d) -> nn.Module:
    depthwise = conv.groups == conv.in_channels > 1
    return DomainParallelDepthwiseConv2d(conv) if depthwise else DomainParallelConv2d(conv)


def _shard_distributed_depthwise(layer: DistributedDepthwiseConv2d) -> nn.Module:
    return DomainParallelDistributedDepthwiseConv2d(layer) if layer.kernel_size[0] > 1 else layer


def _shard_adaptive_pool(pool: nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d) -> nn.Module:
    return DomainParallelGlobalAvgPool(pool) if output_size_along(pool, ROW_DIM) == 1 else pool


# Keys of modules are exact types. A subclass gets the rule of its torch layer unless it overrides
# some of that layer's behaviour. Other modules stay: the plan compares what they do. If no rows
# meet where a wrapped layer is called, it computes what the original layer computes.
RULES: dict[Any, Any] = {
    nn.Conv2d: _conv_rule(_shard_conv2d),  # fetch rows when kernels reach over an edge
    nn.Conv3d: _conv_rule(DomainParallelConv3d),
    nn.ConvTranspose2d: _conv_rule(DomainParallelConvTranspose2d),
    nn.ConvTranspose3d: _conv_rule(DomainParallelConvTranspose3d),
    DistributedDepthwiseConv2d: _shard_distributed_depthwise,
    nn.GroupNorm: DomainParallelGroupNorm,  # statistics over all bands
    **dict.fromkeys((nn.BatchNorm2d, nn.BatchNorm3d), DomainParallelBatchNorm),
    **dict.fromkeys((nn.InstanceNorm2d, nn.InstanceNorm3d), DomainParallelInstanceNorm),
    **dict.fromkeys(
        (nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d), DomainParallelUpsample
    ),
    nn.PixelShuffle: DomainParallelPixelShuffle,
    nn.PixelUnshuffle: DomainParallelPixelUnshuffle,
    **dict.fromkeys((nn.MaxPool2d, nn.MaxPool3d), DomainParallelMaxPool),
    **dict.fromkeys((nn.AvgPool2d, nn.AvgPool3d), DomainParallelAvgPool),
    **dict.fromkeys(PAD_LAYERS, DomainParallelPadLayer),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), _shard_adaptive_pool),
    PeriodicConv2d: DomainParallelPeriodicConv2d,
    PeriodicUpsample: DomainParallelPeriodicUpsample,
    LongRangeConv2d: DomainParallelLongRangeConv2d,
    MatchRows: DomainParallelMatchRows,
    PolePad: DomainParallelPolePad,
    StochasticDepth: DomainParallelStochasticDepth,
    **dict.fromkeys(
        (CosineAttention, EarthAttention, LongDistanceAttention, ShortDistanceAttention),
        DomainParallelRowGroups,
    ),
}  # fmt: skip
REGISTERED: set[Any] = set()  # keys of rules that `register` has added


def register(key: Any) -> Callable[[AnyRule], AnyRule]:
    """Add a rule to the table, as a decorator or by `register(key)(rule)`.

    Args:
        key: an exact type of module, whose rule gets the module and returns its replacement; or an
            operator of `torch.library.custom_op`, whose rule gets the operator, its arguments and
            its keyword arguments, as the rules in `band_tensor` do. A rule is trusted.

    Raises:
        UserError: the key is none of these, or has a rule.
    """
    is_type = isinstance(key, type)
    key = operator_of(key)
    is_known = isinstance(key, OpOverload) and key.namespace != "aten"
    if not (issubclass(key, nn.Module) if is_type else is_known):
        cure = "Write @register(TYPE) above the rule."
        if callable(key) and not is_type:
            cure = "Call an operator of torch.library.custom_op instead, and register that."
        raise UserError(
            f"register: needs a type of module or a custom operator, got "
            f"{getattr(key, '__name__', repr(key))}. {cure}"
        )

    def add(rule: AnyRule) -> AnyRule:
        if key in RULES and _source(RULES[key]) != _source(rule):
            cure = "Keep one of the two."
            if is_type:
                cure = "Register a type of your own, or pass yours in custom_converters."
            raise UserError(
                f"register: {getattr(key, '__name__', key)} has a rule already, "
                f"{_source(RULES[key])}. {cure}"
            )
        RULES[key] = rule
        REGISTERED.add(key)
        return rule

    return add


def _source(rule: Any) -> str:
    while isinstance(rule, partial):
        rule = rule.func
    kind = type(rule)
    name = getattr(rule, "__qualname__", kind.__qualname__)
    code = getattr(rule, "__code__", None)  # tells two lambdas apart
    line = f", line {code.co_firstlineno}" if code else ""
    return f"{getattr(rule, '__module__', kind.__module__)}.{name}{line}"

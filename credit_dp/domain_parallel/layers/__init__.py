"""Layers that couple rows, on one band of rows; equal to the same layers on the whole globe."""

from credit_dp.domain_parallel.layers.conv import (
    DomainParallelConv1d,
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelPeriodicConv2d,
)
from credit_dp.domain_parallel.layers.conv_transpose import (
    DomainParallelConvTranspose1d,
    DomainParallelConvTranspose2d,
    DomainParallelConvTranspose3d,
)
from credit_dp.domain_parallel.layers.depthwise import (
    DomainParallelDepthwiseConv2d,
    DomainParallelDistributedDepthwiseConv2d,
    DomainParallelLongRangeConv2d,
)
from credit_dp.domain_parallel.layers.group_norm import DomainParallelGroupNorm
from credit_dp.domain_parallel.layers.norm import (
    DomainParallelBatchNorm,
    DomainParallelInstanceNorm,
    DomainParallelLayerNorm,
    DomainParallelRMSNorm,
)
from credit_dp.domain_parallel.layers.pad import (
    DomainParallelMatchRows,
    DomainParallelPad,
    DomainParallelPadLayer,
    DomainParallelPolePad,
    DomainParallelRoll,
)
from credit_dp.domain_parallel.layers.pool import (
    DomainParallelAvgPool,
    DomainParallelGlobalAvgPool,
    DomainParallelGlobalMaxPool,
    DomainParallelMaxPool,
    DomainParallelPowerPool,
)
from credit_dp.domain_parallel.layers.reduce import (
    DomainParallelMax,
    DomainParallelMean,
    DomainParallelSoftmax,
    DomainParallelStochasticDepth,
    DomainParallelSum,
)
from credit_dp.domain_parallel.layers.resample import (
    DomainParallelAdaptiveAvgPool,
    DomainParallelAdaptiveMaxPool,
    DomainParallelInterpolate,
    DomainParallelPeriodicUpsample,
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups

__all__ = [
    "DomainParallelAdaptiveAvgPool",
    "DomainParallelAdaptiveMaxPool",
    "DomainParallelAvgPool",
    "DomainParallelBatchNorm",
    "DomainParallelConv1d",
    "DomainParallelConv2d",
    "DomainParallelConv3d",
    "DomainParallelConvTranspose1d",
    "DomainParallelConvTranspose2d",
    "DomainParallelConvTranspose3d",
    "DomainParallelDepthwiseConv2d",
    "DomainParallelDistributedDepthwiseConv2d",
    "DomainParallelGlobalAvgPool",
    "DomainParallelGlobalMaxPool",
    "DomainParallelGroupNorm",
    "DomainParallelInstanceNorm",
    "DomainParallelInterpolate",
    "DomainParallelLayerNorm",
    "DomainParallelLongRangeConv2d",
    "DomainParallelMatchRows",
    "DomainParallelMax",
    "DomainParallelMaxPool",
    "DomainParallelMean",
    "DomainParallelPad",
    "DomainParallelPadLayer",
    "DomainParallelPeriodicConv2d",
    "DomainParallelPeriodicUpsample",
    "DomainParallelPixelShuffle",
    "DomainParallelPixelUnshuffle",
    "DomainParallelPolePad",
    "DomainParallelPowerPool",
    "DomainParallelRMSNorm",
    "DomainParallelRoll",
    "DomainParallelRowGroups",
    "DomainParallelSoftmax",
    "DomainParallelStochasticDepth",
    "DomainParallelSum",
    "DomainParallelUpsample",
]

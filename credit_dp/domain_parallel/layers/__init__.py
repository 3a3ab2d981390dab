"""Layers that couple rows, on one band of rows; equal to the same layers on the whole globe."""

from credit_dp.domain_parallel.layers.conv import (
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelPeriodicConv2d,
)
from credit_dp.domain_parallel.layers.conv_transpose import (
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
)
from credit_dp.domain_parallel.layers.pad import (
    DomainParallelMatchRows,
    DomainParallelPadLayer,
    DomainParallelPolePad,
)
from credit_dp.domain_parallel.layers.pool import (
    DomainParallelAvgPool,
    DomainParallelGlobalAvgPool,
    DomainParallelMaxPool,
)
from credit_dp.domain_parallel.layers.resample import (
    DomainParallelInterpolate,
    DomainParallelPeriodicUpsample,
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.layers.stochastic_depth import (
    DomainParallelStochasticDepth,
)

__all__ = [
    "DomainParallelAvgPool",
    "DomainParallelBatchNorm",
    "DomainParallelConv2d",
    "DomainParallelConv3d",
    "DomainParallelConvTranspose2d",
    "DomainParallelConvTranspose3d",
    "DomainParallelDepthwiseConv2d",
    "DomainParallelDistributedDepthwiseConv2d",
    "DomainParallelGlobalAvgPool",
    "DomainParallelGroupNorm",
    "DomainParallelInstanceNorm",
    "DomainParallelInterpolate",
    "DomainParallelLongRangeConv2d",
    "DomainParallelMatchRows",
    "DomainParallelMaxPool",
    "DomainParallelPadLayer",
    "DomainParallelPeriodicConv2d",
    "DomainParallelPeriodicUpsample",
    "DomainParallelPixelShuffle",
    "DomainParallelPixelUnshuffle",
    "DomainParallelPolePad",
    "DomainParallelRowGroups",
    "DomainParallelStochasticDepth",
    "DomainParallelUpsample",
]

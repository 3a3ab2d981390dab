"""Layers that mix rows, on one band each, equal to the layer on the whole globe."""

from credit_dp.domain_parallel.layers.adaptive_pool import (
    DomainParallelAdaptiveAvgPool,
    DomainParallelAdaptiveMaxPool,
)
from credit_dp.domain_parallel.layers.avg_pool import (
    DomainParallelAvgPool,
    DomainParallelPowerPool,
)
from credit_dp.domain_parallel.layers.batch_norm import DomainParallelBatchNorm
from credit_dp.domain_parallel.layers.conv import (
    DomainParallelConv1d,
    DomainParallelConv2d,
    DomainParallelConv3d,
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
from credit_dp.domain_parallel.layers.global_pool import (
    DomainParallelGlobalAvgPool,
    DomainParallelGlobalMaxPool,
)
from credit_dp.domain_parallel.layers.group_norm import DomainParallelGroupNorm
from credit_dp.domain_parallel.layers.instance_norm import DomainParallelInstanceNorm
from credit_dp.domain_parallel.layers.interpolate import (
    DomainParallelInterpolate,
    DomainParallelPeriodicUpsample,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.layers.layer_norm import (
    DomainParallelLayerNorm,
    DomainParallelRMSNorm,
)
from credit_dp.domain_parallel.layers.match_rows import DomainParallelMatchRows
from credit_dp.domain_parallel.layers.max_pool import DomainParallelMaxPool
from credit_dp.domain_parallel.layers.pad import DomainParallelPad, DomainParallelPadLayer
from credit_dp.domain_parallel.layers.periodic_conv import DomainParallelPeriodicConv2d
from credit_dp.domain_parallel.layers.pole_pad import DomainParallelPolePad
from credit_dp.domain_parallel.layers.reduce import (
    DomainParallelMax,
    DomainParallelMean,
    DomainParallelSum,
)
from credit_dp.domain_parallel.layers.roll import DomainParallelRoll
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.layers.shuffle import (
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
)
from credit_dp.domain_parallel.layers.softmax import DomainParallelSoftmax
from credit_dp.domain_parallel.layers.stochastic_depth import DomainParallelStochasticDepth

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

"""Layers that mix rows, on one band each, equal to the layer on the whole globe."""

from credit_dp.domain_parallel.layers.conv import (
    DomainParallelConv2d,
    DomainParallelPeriodicConv2d,
)
from credit_dp.domain_parallel.layers.conv_transpose import DomainParallelConvTranspose2d
from credit_dp.domain_parallel.layers.group_norm import DomainParallelGroupNorm
from credit_dp.domain_parallel.layers.match_rows import DomainParallelMatchRows

__all__ = [
    "DomainParallelConv2d",
    "DomainParallelConvTranspose2d",
    "DomainParallelGroupNorm",
    "DomainParallelMatchRows",
    "DomainParallelPeriodicConv2d",
]

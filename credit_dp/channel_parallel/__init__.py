"""Ranks that share channels: a depthwise convolution, and the way from rows to channels and back.

Nothing in here is about models or configs: `credit_dp.domain_parallel` builds on it.
"""

from credit_dp.channel_parallel.depthwise import DistributedDepthwiseConv2d
from credit_dp.channel_parallel.transpose import (
    TransposePlan,
    channel_slice,
    channels_per_rank,
    channels_to_rows,
    rows_to_channels,
)

__all__ = [
    "DistributedDepthwiseConv2d",
    "TransposePlan",
    "channels_per_rank",
    "channels_to_rows",
    "rows_to_channels",
    "channel_slice",
]

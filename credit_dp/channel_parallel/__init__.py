"""Ranks that share channels: a depthwise convolution, and the way from rows to channels and back.

Nothing in here is about models or configs: `credit_dp.domain_parallel` builds on it.
"""

from credit_dp.channel_parallel.depthwise import DistributedDepthwiseConv2d
from credit_dp.channel_parallel.transpose import (
    Transpose,
    channel_shares,
    channels_to_rows,
    rows_to_channels,
    share_of,
)

__all__ = [
    "DistributedDepthwiseConv2d",
    "Transpose",
    "channel_shares",
    "channels_to_rows",
    "rows_to_channels",
    "share_of",
]

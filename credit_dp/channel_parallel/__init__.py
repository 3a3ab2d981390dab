"""Channel parallelism: ranks that share channels, and transposes between rows and channels.

Independent of models and configs: `credit_dp.domain_parallel` imports this package.
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
    "channel_slice",
    "channels_per_rank",
    "channels_to_rows",
    "rows_to_channels",
]

"""A level of the CrossFormer: an embedding and blocks of short- and long-distance attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from credit_dp.model_config import CrossFormerConfig
from credit_dp.models.blocks import drop_depth
from credit_dp.models.cross_attention import LongAttention, ShortAttention
from credit_dp.models.cross_embedding import CrossScaleEmbedding


@final
class Branch(nn.Module):
    """A normalised branch beside a shortcut.

    Shapes:
        `(B, H, W, channels)` -> the same.
    """

    def __init__(self, channels: int, inner: nn.Module, depth_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.inner = inner
        self.depth = drop_depth(depth_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the branch adds."""
        return x + self.depth(self.inner(self.norm(x)))  # type: ignore[no-any-return]


def _feed_forward(channels: int, ratio: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, ratio * channels),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(ratio * channels, channels),
        nn.Dropout(dropout),
    )


def _block(config: CrossFormerConfig, level: int, depth_rate: float) -> nn.Sequential:
    """Short-distance attention, feed-forward, long-distance attention, feed-forward."""
    channels, heads, dropout = config.channels[level], config.head_channels, config.dropout
    short = ShortAttention(channels, config.local_windows[level], heads, dropout)
    distant = LongAttention(channels, config.global_windows[level], heads, dropout)
    feeds = [_feed_forward(channels, config.mlp_ratio, dropout) for _ in range(2)]
    branches = (short, feeds[0], distant, feeds[1])
    return nn.Sequential(*(Branch(channels, branch, depth_rate) for branch in branches))


def cross_level(
    config: CrossFormerConfig, level: int, in_channels: int, depth_rates: Sequence[float]
) -> nn.ModuleDict:
    """Return one level: an `embedding` of patches of several sizes, and `blocks` of attention.

    Args:
        config: of the model.
        level: which level, 0 the finest.
        in_channels: channels of the finer level, or of the model's input.
        depth_rates: of the blocks, see `StochasticDepth`.

    Shapes:
        embedding: `(B, in_channels, H, W)` -> `(B, channels, H / stride, W / stride)`. A block has
        channels last, where linear layers and norms want them: `(B, H, W, channels)` -> the same.
    """
    channels, stride = config.channels[level], config.strides[level]
    embedding = CrossScaleEmbedding(
        in_channels, channels, config.kernels[level], stride, config.poles
    )
    blocks = nn.ModuleList(_block(config, level, rate) for rate in depth_rates)
    return nn.ModuleDict({"embedding": embedding, "blocks": blocks})

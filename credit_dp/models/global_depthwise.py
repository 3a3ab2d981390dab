"""A block that mixes far apart places: one very large depthwise convolution, then channels."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.model_config import UNetConfig
from credit_dp.models.blocks import StochasticDepth
from credit_dp.models.global_means import SqueezeExcite

# Channels between the two pointwise layers, for each that comes out.
EXPANSION = 4


@final
class LongRangeConv2d(nn.Conv2d):
    """A depthwise convolution, around the globe in longitude, with zeros beyond the poles.

    Kernels of `2 * H - 1` rows reach from every row to every other; more change nothing.

    Args:
        channels: of the input.
        kernel: rows and columns, odd. More columns than the globe has go around several times.

    Shapes:
        `(B, channels, H, W)` -> the same.
    """

    def __init__(self, channels: int, kernel: tuple[int, int]) -> None:
        rows, columns = kernel
        super().__init__(channels, channels, kernel, padding=(rows // 2, 0), groups=channels)
        self.reach = columns // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        left = self.reach
        while left:  # by a whole globe at most: what is around it then repeats it, too
            turn = min(left, x.shape[-1])
            x = F.pad(x, (turn, turn, 0, 0), mode="circular")
            left -= turn
        return super().forward(x)


@final
class GlobalDepthwiseBlock(nn.Module):
    """A long-range convolution of every channel and two pointwise layers, beside a shortcut.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        config: size of the kernel, groups of the norm, dropout, and whether there is a gate.
        rate: of samples that lose all but the shortcut in a training step.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Liu et al. 2022, with kernels as large as those of Ding et al. 2022.
    """

    def __init__(
        self, in_channels: int, out_channels: int, config: UNetConfig, rate: float
    ) -> None:
        super().__init__()
        rows, columns = config.kernel
        hidden = EXPANSION * out_channels
        self.norm = nn.GroupNorm(config.groups, in_channels)
        self.mix = LongRangeConv2d(in_channels, (rows, columns))
        self.expand = nn.Conv2d(in_channels, hidden, 1)
        self.project = nn.Conv2d(hidden, out_channels, 1)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.gate = SqueezeExcite(out_channels) if config.squeeze_excite else None
        self.depth = StochasticDepth(rate) if rate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = F.gelu(self.expand(self.mix(self.norm(x))))
        for layer in (self.dropout, self.project, self.gate, self.depth):
            y = y if layer is None else layer(y)
        return self.shortcut(x) + y  # type: ignore[no-any-return]

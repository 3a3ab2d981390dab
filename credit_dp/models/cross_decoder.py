"""The way back up of the CrossFormer: finer points from the channels of coarser ones."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from credit_dp.models.unet import PeriodicConv2d


@final
class SubPixelConv(nn.Module):
    """A convolution whose channels become the `factor` x `factor` finer points of each point.

    At first all finer points of a point are equal, so that no checkerboard has to be unlearnt.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        factor: how many times finer the output is.
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Shi et al. 2016; first weights as in Aitken et al. 2017.
    """

    def __init__(self, in_channels: int, out_channels: int, factor: int, poles: str) -> None:
        super().__init__()
        self.conv = PeriodicConv2d(in_channels, out_channels * factor**2, poles=poles)
        self.shuffle = nn.PixelShuffle(factor)
        with torch.no_grad():
            for parameter in self.conv.parameters():
                first = parameter[:: factor**2].clone()
                parameter.copy_(first.repeat_interleave(factor**2, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field."""
        return self.shuffle(self.conv(x))  # type: ignore[no-any-return]


@final
class UpBlock(nn.Module):
    """A finer field, and what two convolutions of it add.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of `groups`.
        factor: how many times finer the output is.
        groups: of the norms.
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Schreck et al. 2024.
    """

    def __init__(
        self, in_channels: int, out_channels: int, factor: int, groups: int, poles: str
    ) -> None:
        super().__init__()
        self.up = SubPixelConv(in_channels, out_channels, factor, poles)
        stages = (
            layer
            for _ in range(2)
            for layer in (
                PeriodicConv2d(out_channels, out_channels, poles=poles),
                nn.GroupNorm(groups, out_channels),
                nn.SiLU(),
            )
        )
        self.residual = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field plus what the convolutions add."""
        x = self.up(x)
        return x + self.residual(x)  # type: ignore[no-any-return]

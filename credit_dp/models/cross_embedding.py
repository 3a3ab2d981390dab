"""Patches of several sizes around the same points: how a level of the CrossFormer begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from credit_dp.models.unet import PeriodicConv2d


@final
class CrossScaleEmbedding(nn.Module):
    """Convolutions of several kernel sizes with one stride, side by side in the channels.

    The smallest kernel makes half of the channels, the next one a quarter, and so on: large kernels
    are expensive. The last one makes what is left.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernels: their sizes; each has the parity of the stride.
        stride: step in rows and columns.
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H / stride, W / stride)`.

    Source: Wang et al. 2021, section 3.1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernels: Sequence[int],
        stride: int,
        poles: str,
    ) -> None:
        super().__init__()
        shares = split_in_halves(out_channels, len(kernels))
        self.branches = nn.ModuleList(
            PeriodicConv2d(in_channels, share, kernel, stride, poles)
            for kernel, share in zip(sorted(kernels), shares, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches of all sizes."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def split_in_halves(channels: int, parts: int) -> list[int]:
    """Return a half, a quarter, ... of the channels, and in the last part what is left."""
    shares = [channels // 2 ** (part + 1) for part in range(parts - 1)]
    return [*shares, channels - sum(shares)]

"""A residual U-Net on the globe: periodic in longitude, padded across the poles in latitude."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config import UNetConfig
from credit_dp.models.padding import pad_poles


@final
class PeriodicConv2d(nn.Module):
    """A convolution on the globe: circular in longitude, `poles` in latitude.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: odd number of rows and columns.
        stride: step in rows and columns.
        poles: what lies beyond the first and last row. `reflect`: the rows before it without the
            last one; `zeros`; `mirror`: the rows before it; `earth`: those, rotated by half the
            longitudes, as a walk across the pole meets them.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, ceil(H / stride), ceil(W / stride))`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        poles: str = "reflect",
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"PeriodicConv2d: kernel_size has to be odd, got {kernel_size}")
        self.padding = kernel_size // 2
        self.poles = poles
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        x = pad_poles(x, self.padding, self.poles)
        x = F.pad(x, (self.padding, self.padding, 0, 0), mode="circular")
        return self.conv(x)  # type: ignore[no-any-return]


@final
class MatchRows(nn.Module):
    """Crops to the rows and columns of a reference, from the south and the east.

    Shapes:
        `(B, C, H, W)`, `(B, D, h, w)` -> `(B, C, h, w)`.
    """

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        """Return the crop."""
        return x[..., : reference.shape[-2], : reference.shape[-1]]


@final
class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut (He et al. 2016, pre-activation).

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
    """

    def __init__(self, in_channels: int, out_channels: int, groups: int, poles: str) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = PeriodicConv2d(in_channels, out_channels, poles=poles)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = PeriodicConv2d(out_channels, out_channels, poles=poles)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))  # type: ignore[no-any-return]


def _blocks(first: int, channels: int, config: UNetConfig) -> nn.Sequential:
    widths = [first] + [channels] * config.blocks
    pairs = pairwise(widths)
    return nn.Sequential(*(ResidualBlock(a, b, config.groups, config.poles) for a, b in pairs))


@final
class UNet(nn.Module):
    """Predicts the tendency of the prognostic channels over one step.

    Any number of rows and columns: a level has half of the finer one's, rounded up, and the way
    back up crops to it.

    Args:
        config: channels of each level, finest first; blocks per level; groups of the norms; poles.
        in_channels: prognostic, forcing and static channels.
        out_channels: prognostic channels.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Ronneberger, Fischer & Brox 2015, with residual blocks.
    """

    row_rules: ClassVar[dict[type[nn.Module], str]] = {
        PeriodicConv2d: "periodic_conv",
        MatchRows: "match_rows",
    }

    def __init__(self, config: UNetConfig, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widths, poles = config.channels, config.poles
        steps = list(pairwise(widths))  # (finer, coarser), finest first
        self.stem = PeriodicConv2d(in_channels, widths[0], poles=poles)
        self.encoder = nn.ModuleList(_blocks(w, w, config) for w in widths)
        self.down = nn.ModuleList(PeriodicConv2d(a, b, stride=2, poles=poles) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in steps)
        self.crop = MatchRows()
        self.decoder = nn.ModuleList(_blocks(2 * a, a, config) for a, _ in steps)
        self.norm = nn.GroupNorm(config.groups, widths[0])
        self.head = nn.Conv2d(widths[0], out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tendency."""
        x = self.encoder[0](self.stem(x))
        skips = []
        for down, encoder in zip(self.down, self.encoder[1:], strict=True):
            skips.append(x)
            x = encoder(down(x))
        levels = zip(self.up, self.decoder, skips, strict=True)
        for up, decoder, skip in reversed(list(levels)):
            x = decoder(torch.cat([self.crop(up(x), skip), skip], 1))
        return self.head(F.silu(self.norm(x)))  # type: ignore[no-any-return]

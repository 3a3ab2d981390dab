"""What the whole globe says about channels: gates, and the conditioning of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REDUCTION = 16
FEWEST = 4  # hidden channels of a gate


@final
class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1) that all channels' global means decide on.

    Shapes:
        `(B, channels, H, W)` -> the same.

    Source: Hu et al. 2018.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(FEWEST, channels // REDUCTION)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Linear(channels, hidden)
        self.expand = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated channels."""
        means = self.pool(x)[..., 0, 0]
        gate = torch.sigmoid(self.expand(F.relu(self.reduce(means))))
        return x * gate[..., None, None]


@final
class GlobalConditioning(nn.Module):
    """Turns the global means of one field into a scale and a shift for channels of others.

    Args:
        channels: of the field that is averaged.
        conditioned: channels of each field that is to be scaled and shifted.

    Shapes:
        `(B, channels, H, W)` -> for each of `conditioned`, `(B, 2 * its channels, 1, 1)`; see
        `condition`.

    Source: Perez et al. 2018, with global means as what conditions.
    """

    def __init__(self, channels: int, conditioned: Sequence[int]) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.hidden = nn.Linear(channels, channels)
        self.heads = nn.ModuleList(nn.Linear(channels, 2 * width) for width in conditioned)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return scales and shifts."""
        known = F.silu(self.hidden(self.pool(x)[..., 0, 0]))
        return [head(known)[..., None, None] for head in self.heads]


def condition(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    """Return `x * (1 + scale) + shift`.

    Shapes:
        `(B, C, H, W)`, `(B, 2 * C, 1, 1)` -> `(B, C, H, W)`.
    """
    scale, shift = scale_and_shift.chunk(2, 1)
    return x * (1 + scale) + shift

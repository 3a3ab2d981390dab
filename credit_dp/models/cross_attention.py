"""Attention among the points of a window, or among points far apart, on the globe's grid."""

from __future__ import annotations

from abc import ABC
from itertools import pairwise
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.models.row_groups import GroupedRows, RowGroups, dilated, windows

# Where a group's own columns are in `(B, groups, rows, columns, columns, C)`.
FIRST, SECOND = 3, 4


@final
class PositionBias(nn.Module):
    """What attention between two points of a group gains from where they are to each other.

    A small network makes it of the offset, in rows and columns of the group, for all heads alike.

    Args:
        size: rows, and columns, of a group.
        channels: width of the network.

    Shapes:
        nothing -> `(size ** 2, size ** 2)`, a row of it for each point that asks.

    Source: Wang et al. 2021, section 3.3.
    """

    offsets: Tensor
    index: Tensor

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        widths = (2, channels, channels, channels)
        stages = (
            layer
            for before, after in pairwise(widths)
            for layer in (nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU())
        )
        self.layers = nn.Sequential(*stages, nn.Linear(channels, 1))
        steps = torch.arange(1.0 - size, size)
        self.register_buffer("offsets", torch.cartesian_prod(steps, steps), persistent=False)
        points = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        apart = points[:, None] - points[None] + size - 1
        index = apart[..., 0] * (2 * size - 1) + apart[..., 1]
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """Return the bias of every pair of points."""
        biases: Tensor = self.layers(self.offsets)
        return biases.flatten()[self.index]


class CrossAttention(GroupedRows, ABC):
    """Multi-head attention of every point to the `size` x `size` points of its group.

    Rows and columns are grouped in the same manner. Channels are last, where linear layers and
    norms want them.

    Args:
        channels: of the input and the output.
        size: rows, and columns, of a group; has to divide those of the globe.
        head_channels: channels of one head.
        dropout: rate after the projection.

    Shapes:
        `(B, H, W, channels)` -> the same.
    """

    row_dim: ClassVar[int] = -3
    own_columns: ClassVar[int]  # FIRST: a group has every n-th; SECOND: neighbouring ones

    def __init__(self, channels: int, size: int, head_channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.size, self.heads = size, channels // head_channels
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.position_bias = PositionBias(size, max(1, channels // 4))
        self.project = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)

    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return what the points of these groups of rows see of each other."""
        batch, _, columns, channels = x.shape
        count, size = groups.stop - groups.start, self.size
        others = columns // size
        parts = (size, others) if self.own_columns == FIRST else (others, size)
        # Sizes are written out: of no groups, torch can't tell what -1 stands for.
        x = x.reshape(batch, count, size, *parts, channels)
        x = x.movedim((2, self.own_columns), (-3, -2))
        made = self._attend(x.reshape(batch * count * others, size**2, channels))
        made = made.reshape(x.shape).movedim((-3, -2), (2, self.own_columns))
        return made.reshape(batch, count * size, columns, channels)

    def _attend(self, x: Tensor) -> Tensor:
        """Attend among the points of each group, `(groups, points, channels)`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, x.shape[-1] // self.heads))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        bias = self.position_bias().to(query.dtype)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.dropout(self.project(seen.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@final
class ShortAttention(CrossAttention):
    """Attention among the points of a window of `size` x `size`.

    Source: Wang et al. 2021, section 3.2, short-distance attention.
    """

    own_columns: ClassVar[int] = SECOND

    def groups(self, height: int) -> RowGroups:
        """Return windows of neighbouring rows."""
        return windows(height, self.size)


@final
class LongAttention(CrossAttention):
    """Attention among `size` x `size` points as far from each other as the globe allows.

    Source: Wang et al. 2021, section 3.2, long-distance attention.
    """

    own_columns: ClassVar[int] = FIRST

    def groups(self, height: int) -> RowGroups:
        """Return rows a fixed distance apart."""
        return dilated(height, self.size)

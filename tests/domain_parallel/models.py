"""Small models that several tests shard: moved rows, a CNN, attention in row groups."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel.layers import DomainParallelRowGroups
from credit_dp.models.row_groups import GroupedRows, dilated, windows

# Ways to move the rows of (B, C, H, W) to another dimension, and back.
MOVE = {
    "nothing": lambda x: x,
    "columns": lambda x: x.permute(0, 3, 1, 2).flatten(0, 1),
    "samples": lambda x: x.transpose(1, 2).flatten(0, 1),
    "tokens": lambda x: x.flatten(2),
    "turned": lambda x: x.transpose(-1, -2),
    "times": lambda x: x[:, :, :, None],
    "channels": lambda x: x.transpose(1, 2),
}
MOVE_BACK = {
    "nothing": lambda x, y: y,
    "columns": lambda x, y: y.unflatten(0, (len(x), x.shape[3])).permute(0, 2, 3, 1),
    "samples": lambda x, y: y.unflatten(0, (len(x), x.shape[2])).transpose(1, 2),
    "tokens": lambda x, y: y.unflatten(2, (-1, x.shape[3])),
    "turned": lambda x, y: y.transpose(-1, -2),
    "times": lambda x, y: y.flatten(3, 4),
    "channels": lambda x, y: y.transpose(1, 2),
}


class Moved(nn.Module):
    """Calls `conv` with its rows moved to another dimension."""

    def __init__(self, conv: nn.Module, move: str) -> None:
        super().__init__()
        self.conv, self.move = conv, move

    def forward(self, x):
        return MOVE_BACK[self.move](x, self.conv(MOVE[self.move](x)))


def small_cnn():
    """Return two convolutions, a norm and a pair that halves and doubles the rows."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 1),
        nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2)),
    )


class RowGroupAttention(GroupedRows):
    """Attention within groups of rows and all columns, with a bias for each group."""

    def __init__(self, kind, size, shift, height, channels=3):
        super().__init__()
        self.kind, self.size, self.shift = kind, size, shift
        self.project = nn.Linear(channels, 3 * channels)
        self.bias = nn.Parameter(torch.randn(self.groups(height).count, size, size))

    def groups(self, height):
        if self.kind == "dilated":
            return dilated(height, self.size)
        return windows(height, self.size, self.shift)

    def treat(self, x, groups, height):
        b, c, _, w = x.shape
        count = groups.stop - groups.start
        tokens = x.view(b, c, count, self.size, w).permute(0, 4, 2, 3, 1)
        q, k, v = self.project(tokens).chunk(3, -1)
        bias = self.bias[groups].expand(b, w, -1, -1, -1)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return made.permute(0, 4, 2, 3, 1).reshape(b, c, count * self.size, w)


class RowGroupModel(nn.Module):
    """Convolutions around a layer of row groups that is called twice."""

    converters: ClassVar = {RowGroupAttention: DomainParallelRowGroups}

    def __init__(self, kind, size, shift, height):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.attention = RowGroupAttention(kind, size, shift, height)
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        x = F.silu(self.first(x))
        x = x + self.attention(x)
        return self.last(x + self.attention(x))

"""A model that moves rows to another dimension, calls a layer and moves them back."""

from __future__ import annotations

from torch import nn

# From (B, C, H, W) to columns as samples, rows as samples, tokens, longitudes as rows, ...
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

"""Attention in three-dimensional windows, with biases that know where on the globe they are."""

from __future__ import annotations

from math import prod
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.models.row_groups import GroupedRows, RowGroups, windows

Size = tuple[int, int, int]  # levels, rows, columns


def bias_index(window: Size) -> Tensor:
    """Return which entry of a window's table is the bias of each pair of its tokens.

    It depends on the levels and rows of both, and on how many columns lie between them.

    Shapes:
        `(T * T,)` for `T` tokens, the query's number first; entries of a table of
        `levels^2 * rows^2 * (2 * columns - 1)`.

    Source: Bi et al. 2023, Earth-specific positional bias.
    """
    levels, rows, columns = window
    level, row, column = torch.unravel_index(torch.arange(prod(window)), window)
    pairs = level[:, None] * levels + level
    pairs = (pairs * rows + row[:, None]) * rows + row
    return (pairs * (2 * columns - 1) + column[:, None] - column + columns - 1).flatten()


def window_columns(window: int, columns: int) -> int:
    """Return the columns of a window, at most `window`, for a globe of so many.

    As many as divide the globe's, so that shifted windows go around it evenly; where that
    leaves less than half of the window, all of it, and zeros in the east make the globe a multiple.
    """
    widest = min(window, columns)
    whole = max(size for size in range(1, widest + 1) if columns % size == 0)
    return whole if 2 * whole >= widest else widest


@final
class EarthAttention(GroupedRows):
    """Multi-head self-attention in windows of levels, rows and columns.

    Each window of levels and rows has a table of biases of its own, which those along a circle of
    latitude share. A window that is larger than the globe is as large as the globe, and of fewer
    columns where that divides the globe's (see `window_columns`).

    Args:
        width: channels.
        heads: of the attention; divides `width`.
        globe: levels, rows and columns of the globe. Zeros in the last level, in the south and in
            the east make it a multiple of the window; they are attended to, too.
        window: levels, rows and columns.
        shifted: windows begin half a window later in each dimension that has several. Around the
            globe goes longitude; what is at its other end in the others is not attended to.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Bi et al. 2023; Liu et al. 2021 for windows and their shift.
    """

    row_dim: ClassVar[int] = -3

    def __init__(self, width: int, heads: int, globe: Size, window: Size, shifted: bool) -> None:
        super().__init__()
        self.heads = heads
        self.globe = globe
        levels, rows = map(min, window[:2], globe[:2])
        columns = window_columns(window[2], globe[2])
        self.window: Size = (levels, rows, columns)
        several = tuple(w < extent for w, extent in zip(self.window, globe, strict=True))
        self.shift = tuple(
            w // 2 if shifted and many else 0 for w, many in zip(self.window, several, strict=True)
        )
        self.counts = tuple(-(-e // w) for e, w in zip(globe, self.window, strict=True))
        entries = levels**2 * rows**2 * (2 * columns - 1)
        self.table = nn.Parameter(torch.empty(*self.counts[:2], heads, entries))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("index", bias_index(self.window), persistent=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def groups(self, height: int) -> RowGroups:
        """Return the windows of rows.

        Raises:
            ValueError: the globe has other rows than this was built for.
        """
        if height != self.globe[1]:
            raise ValueError(
                f"EarthAttention: was built for {self.globe[1]} rows and has biases for each, "
                f"got {height}. Build the model for this grid."
            )
        return windows(height, self.window[1], self.shift[1])

    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return the output of the windows of rows of these numbers.

        Shapes:
            `(B, levels, rows, columns, width)` -> the same; rows of whole windows.
        """
        levels, _, columns = self.globe
        beyond = [n * w - e for n, w, e in zip(self.counts, self.window, self.globe, strict=True)]
        if beyond[0] or beyond[2]:
            x = F.pad(x, (0, 0, 0, beyond[2], 0, 0, 0, beyond[0]))
        rolled = (self.shift[0], self.shift[2])
        if any(rolled):
            x = x.roll((-rolled[0], -rolled[1]), (1, 3))
        x = self._attend(self.qkv(x), groups)
        if any(rolled):
            x = x.roll(rolled, (1, 3))
        return self.projection(x[:, :levels, :, :columns])  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, groups: slice) -> Tensor:
        """Return what each token takes from its window.

        Windows along a circle of latitude share their biases: they count as samples, and all
        others as heads, so that biases are spread over samples without a copy.

        Shapes:
            `(B, levels, rows, columns, 3 * width)` -> `(B, levels, rows, columns, width)`.
        """
        batch, levels, rows, columns, channels = qkv.shape
        window, heads = self.window, self.heads
        each = channels // (3 * heads)
        high, deep, wide = levels // window[0], groups.stop - groups.start, columns // window[2]
        qkv = qkv.reshape(
            batch, high, window[0], deep, window[1], wide, window[2], 3, heads, each
        ).permute(7, 0, 5, 1, 3, 8, 2, 4, 6, 9)
        folded = (batch * wide, high * deep * heads, prod(window), each)
        query, key, value = qkv.reshape(3, *folded).unbind(0)
        bias = self.bias(groups).to(query.dtype)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
        x = x.reshape(batch, wide, high, deep, heads, *window, each)
        x = x.permute(0, 2, 5, 3, 6, 1, 7, 4, 8)
        return x.reshape(batch, levels, rows, columns, heads * each)

    def bias(self, groups: slice) -> Tensor:
        """Return what is added to the logits of each pair of tokens, minus infinity apart.

        Shapes:
            `(windows of levels * windows of rows * heads, T, T)`, for some windows of rows.
        """
        tokens = prod(self.window)
        table = self.table[:, groups].flatten(0, 2)
        bias = table.index_select(1, cast(Tensor, self.index)).view(len(table), tokens, tokens)
        if not any(self.shift[:2]):
            return bias
        return bias.masked_fill(self._apart(groups), float("-inf"))

    def _apart(self, groups: slice) -> Tensor:
        """Return which pairs of tokens share a window, but are no neighbours on the globe.

        Only the last window of levels, or rows, goes around: its last `shift` ones are the first.

        Shapes:
            as `bias`.
        """
        levels, rows = (
            (torch.arange(n * w, device=self.table.device) >= n * w - s).view(n, w)
            for n, w, s in zip(self.counts[:2], self.window[:2], self.shift[:2], strict=True)
        )
        rows = rows[groups]
        side = levels[:, None, None, :, None, None] + 2 * rows[None, :, None, None, :, None]
        each = (len(levels) * len(rows), 1, *self.window)
        side = side.expand(-1, -1, -1, -1, -1, self.window[2]).reshape(each).flatten(2)
        side = side.expand(-1, self.heads, -1).flatten(0, 1)
        return side[:, :, None] != side[:, None]

"""Transformers with attention in shifted windows, at two resolutions: what Pangu and Swin share.

First attention, then patches, blocks and changes of resolution, and at the end
`WindowTransformer`. Its forward, in segments: the embedding of patches as tokens; stages of blocks,
all but the first and the last at half the resolution; the recovery of fields from the tokens before
the resolution was halved and those of the last stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config.model import WindowsConfig
from credit_dp.errors import UserError
from credit_dp.fields import GridShape
from credit_dp.models.blocks import (
    NoiseModulation,
    run_block,
    stochastic_depth_or_identity,
    stochastic_depth_rates,
)
from credit_dp.models.row_groups import GroupedRows, RowGroups, windows
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState

Size = tuple[int, int, int]  # levels, rows, columns


def window_columns(window: int, columns: int) -> int:
    """Return the columns of a window, at most `window`, on a globe of `columns` columns.

    The largest divisor of the globe's columns, so that shifted windows wrap around it without a
    gap. If that is less than half of `window`, the full window: the globe is padded in the east.
    On a region, too: a divisor needs no padding.
    """
    widest = min(window, columns)
    divisor = max(size for size in range(1, widest + 1) if columns % size == 0)
    return divisor if 2 * divisor >= widest else widest


class WindowAttention(GroupedRows, ABC):
    """Multi-head self-attention in windows of levels, rows and columns.

    A subclass defines in `pair_bias` what is added to the logits. A window is at most as large as
    the globe (for columns see `window_columns`).

    Args:
        heads: of the attention; divides `width`.
        globe: levels, rows and columns of the globe. Zeros after the last level, in the south and
            in the east pad it to a multiple of the window, and take part in the attention.
        shifted: whether windows begin half a window later, in each dim with several windows. They
            wrap around in longitude. In levels and rows, and in columns that do not go round the
            globe, the last window wraps around as well, but tokens of opposite ends are masked from
            each other.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Liu et al. 2021.
    """

    row_dim: ClassVar[int] = -3
    qkv_bias: ClassVar[bool] = True  # whether queries, keys and values have biases

    def __init__(
        self,
        width: int,
        heads: int,
        globe: Size,
        window: Size,
        shifted: bool,
        is_periodic: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.is_periodic = is_periodic
        self.globe = globe
        levels, rows = map(min, window[:2], globe[:2])
        columns = window_columns(window[2], globe[2])
        self.window: Size = (levels, rows, columns)
        several = tuple(w < extent for w, extent in zip(self.window, globe, strict=True))
        self.shift = tuple(
            w // 2 if shifted and many else 0 for w, many in zip(self.window, several, strict=True)
        )
        self.counts = tuple(-(-e // w) for e, w in zip(globe, self.window, strict=True))
        self.add_biases()
        self.qkv = nn.Linear(width, 3 * width, bias=self.qkv_bias)
        self.projection = nn.Linear(width, width)

    @abstractmethod
    def add_biases(self) -> None:
        """Add the parameters and buffers that `pair_bias` needs."""

    @abstractmethod
    def pair_bias(self, groups: slice) -> Tensor:
        """Return the bias of the logits of each pair of tokens.

        Shapes:
            `(windows of levels * windows of rows * heads, T, T)`, for these windows of rows.
        """

    def scale_pairs(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is multiplied, and divided by the root of its width, for the logits.

        Shapes:
            `(B * windows of columns, windows of levels * windows of rows * heads, T, width)`.
        """
        return query, key

    def groups(self, height: int) -> RowGroups:
        """Return the windows of rows."""
        if height != self.globe[1]:
            raise ValueError(
                f"{type(self).__name__}: was built for {self.globe[1]} rows, got {height}. Build "
                "the model for this grid."
            )
        return windows(height, self.window[1], self.shift[1])

    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return the attention in these windows of rows; see `GroupedRows.treat`.

        Shapes:
            `(B, levels, rows, columns, width)` -> the same; rows of complete windows.
        """
        levels, _, columns = self.globe
        padding = [n * w - e for n, w, e in zip(self.counts, self.window, self.globe, strict=True)]
        if padding[0] or padding[2]:
            x = F.pad(x, (0, 0, 0, padding[2], 0, 0, 0, padding[0]))
        # Levels and columns are shifted here; rows come shifted and padded from `groups`.
        shift = (self.shift[0], self.shift[2])
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 3))
        # Rows that are sharded move to whole windows before they have three times the channels.
        rows = torch.unflatten(x, 2, (groups.stop - groups.start, self.window[1]))
        x = self._attend(self.qkv(rows), groups)
        if any(shift):
            x = x.roll(shift, (1, 3))
        return self.projection(x[:, :levels, :, :columns])  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, groups: slice) -> Tensor:
        """Return the attention of each token to those of its window.

        Shapes:
            `(B, levels, windows of rows, rows of one, columns, 3 * width)` ->
            `(B, levels, rows, columns, width)`.
        """
        batch, levels, row_windows, _, columns, channels = qkv.shape
        window = self.window
        heads = self.heads
        head_width = channels // (3 * heads)
        level_windows = levels // window[0]
        column_windows = columns // window[2]
        qkv = qkv.reshape(
            batch,
            *(level_windows, window[0]),
            *(row_windows, window[1]),
            *(column_windows, window[2]),
            *(3, heads, head_width),
        )
        # To (3, B, column windows, level windows, row windows, heads, tokens of a window, width).
        # Windows along a circle of latitude share their biases: folded into the samples, they get
        # them by broadcasting, without a copy. All others are folded into the heads.
        qkv = qkv.permute(7, 0, 5, 1, 3, 8, 2, 4, 6, 9)
        folded = (level_windows * row_windows * heads, prod(window), head_width)
        qkv = qkv.reshape(3, batch * column_windows, *folded)
        if self.is_periodic or not self.shift[2]:
            x = self._attend_in_windows(qkv, groups)
        else:
            # Only the last window of columns has tokens of both ends: its mask is another.
            windows = qkv.view(3, batch, column_windows, *folded)
            parts = [
                self._attend_in_windows(part.flatten(1, 2), groups, splits_columns).view(
                    batch, part.shape[2], *folded
                )
                for part, splits_columns in (
                    (windows[:, :, :-1], False),
                    (windows[:, :, -1:], True),
                )
            ]
            x = torch.cat(parts, dim=1)
        x = x.reshape(batch, column_windows, level_windows, row_windows, heads, *window, head_width)
        x = x.permute(0, 2, 5, 3, 6, 1, 7, 4, 8)
        return x.reshape(batch, levels, row_windows * window[1], columns, heads * head_width)

    def _attend_in_windows(
        self, qkv: Tensor, groups: slice, splits_columns: bool = False
    ) -> Tensor:
        """Return the attention in windows of columns; see `bias` for the arguments.

        Shapes:
            `(3, B * column windows, ...)` -> `(B * column windows, ...)`.
        """
        query, key, value = qkv.unbind(0)
        query, key = self.scale_pairs(query, key)
        bias = self.bias(groups, splits_columns).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])

    def bias(self, groups: slice, splits_columns: bool = False) -> Tensor:
        """Return `pair_bias`, with minus infinity for masked pairs.

        Args:
            splits_columns: whether to mask tokens of a region's opposite ends in columns.

        Shapes:
            as `pair_bias`.
        """
        bias = self.pair_bias(groups)
        if not any(self.shift[:2]) and not splits_columns:
            return bias
        masked = self._masked_pairs(groups, splits_columns, bias.device)
        return bias.masked_fill(masked, float("-inf"))

    def _masked_pairs(self, groups: slice, splits_columns: bool, device: torch.device) -> Tensor:
        """Return which pairs of tokens share a shifted window, but are not adjacent on the globe.

        Shapes:
            as `bias`.
        """
        # Only the last window of levels, rows or columns wraps around: its last `shift` levels,
        # rows or columns are the globe's first ones. True marks these.
        dims = 3 if splits_columns else 2
        levels, rows, *columns = (
            (torch.arange(n * w, device=device) >= n * w - s).view(n, w)
            for n, w, s in zip(self.counts[:dims], self.window, self.shift, strict=False)
        )
        rows = rows[groups]
        # A number from 0 to 7 for each token: pairs with different numbers are masked.
        region = levels[:, None, None, :, None, None] + 2 * rows[None, :, None, None, :, None]
        for marked in columns:
            region = region + 4 * marked[-1]
        per_window = (len(levels) * len(rows), 1, *self.window)
        region = region.expand(-1, -1, -1, -1, -1, self.window[2]).reshape(per_window).flatten(2)
        region = region.expand(-1, self.heads, -1).flatten(0, 1)
        return region[:, :, None] != region[:, None]


# By padding mode: on the globe zeros, on a region `model.edges`.
PAD_2D = {"zeros": nn.ZeroPad2d, "replicate": nn.ReplicationPad2d, "reflect": nn.ReflectionPad2d}
PAD_3D = {"zeros": nn.ZeroPad3d, "replicate": nn.ReplicationPad3d, "reflect": nn.ReflectionPad3d}


def patch_counts(size: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]:
    """Return the number of patches in each dim; the last one may reach beyond the grid."""
    return tuple(-(-s // p) for s, p in zip(size, patch, strict=True))


def patch_padding(size: Sequence[int], patch: Sequence[int], sign: int) -> tuple[int, ...]:
    """Return the padding to whole patches in torch's order, the last dim first.

    Args:
        size: of the grid, in each dim.
        sign: 1 to pad at the end of each dim, -1 to crop again.
    """
    counts = patch_counts(size, patch)
    missing = [sign * (n * p - s) for n, p, s in zip(counts, patch, size, strict=True)]
    return tuple(chain(*((0, pad) for pad in reversed(missing))))


def embed_patches(
    channels: int, width: int, grid: Sequence[int], patch: Sequence[int], edges: str
) -> nn.Sequential:
    """Return the embedding of patches of rows and columns, with padding `edges`.

    Shapes:
        `(B, channels, H, W)` -> `(B, width, rows, columns)` of patches.
    """
    rows, columns = patch
    pads = cast(tuple[int, int, int, int], patch_padding(grid, patch, 1))
    return nn.Sequential(
        PAD_2D[edges](pads), nn.Conv2d(channels, width, (rows, columns), (rows, columns))
    )


def recover_patches(
    width: int, channels: int, grid: Sequence[int], patch: Sequence[int]
) -> nn.Sequential:
    """Return the inverse of `embed_patches` in its shapes, cropped to the grid."""
    rows, columns = patch
    pads = cast(tuple[int, int, int, int], patch_padding(grid, patch, -1))
    return nn.Sequential(
        nn.ConvTranspose2d(width, channels, (rows, columns), (rows, columns)), nn.ZeroPad2d(pads)
    )


def check_patches(config: WindowsConfig, grid: GridShape) -> None:
    """Refuse a grid with fewer than three rows or columns of patches."""
    patch = config.patch[-2:]
    if min(patch_counts(grid, patch)) < 3:
        rows, columns = (2 * size + 1 for size in patch)
        raise UserError(
            f"model.patch: {list(config.patch)} needs a grid of at least {rows} rows and {columns} "
            f"columns, got {grid[0]}x{grid[1]}. Use a smaller model.patch{grid.or_finer}."
        )


CHANNELS_FIRST = (0, 1, 4, 2, 3)  # (B, levels, rows, columns, C) -> (B, levels, C, rows, columns)
CHANNELS_LAST = (0, 1, 3, 4, 2)
INITIAL_GAIN = 0.1  # initial weights of the norms at the end of a block's branches


def _noise_modulations(noise: int, channels: int) -> list[nn.Module]:
    return [NoiseModulation(noise, channels, dim=-1)] if noise else []


@final
class WindowBlock(nn.Module):
    """Attention in windows and an MLP, each normalised before it is added to its input.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Bi et al. 2023; norms after the branches as in Liu et al. 2022.
    """

    def __init__(
        self,
        attention: WindowAttention,
        width: int,
        config: WindowsConfig,
        rate: float,
    ) -> None:
        super().__init__()
        hidden = config.mlp_ratio * width
        self.attention = nn.Sequential(
            attention,
            nn.Dropout(config.dropout),
            nn.LayerNorm(width),
            *_noise_modulations(config.noise, width),
            stochastic_depth_or_identity(rate),
        )
        self.perceptron = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, width),
            nn.Dropout(config.dropout),
            nn.LayerNorm(width),
            *_noise_modulations(config.noise, width),
            stochastic_depth_or_identity(rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus both branches."""
        x = x + self.attention(x)
        return x + self.perceptron(x)  # type: ignore[no-any-return]


@final
class DownSample(nn.Module):
    """Halves the resolution: joins 2 x 2 tokens of a level into one of twice the channels.

    Odd rows and columns are padded by one more, by default of zeros.

    Shapes:
        `(B, levels, H, W, width)` -> `(B, levels, ceil(H / 2), ceil(W / 2), 2 * width)`.
    """

    def __init__(self, width: int, rows: int, columns: int, edges: str = "zeros") -> None:
        super().__init__()
        pad = PAD_3D[edges]((0, columns % 2, 0, rows % 2, 0, 0))  # of five dims, two come first
        self.join = nn.Sequential(pad, nn.PixelUnshuffle(2))
        self.mix = nn.Sequential(
            nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of the coarser resolution."""
        return self.mix(self.join(x.permute(CHANNELS_FIRST)).permute(CHANNELS_LAST))  # type: ignore[no-any-return]


@final
class UpSample(nn.Module):
    """Doubles the resolution: splits each token into 2 x 2 tokens of half the channels.

    Shapes:
        `(B, levels, ceil(H / 2), ceil(W / 2), 2 * width)` -> `(B, levels, H, W, width)`.
    """

    def __init__(self, width: int, rows: int, columns: int) -> None:
        super().__init__()
        self.widen = nn.Linear(2 * width, 4 * width, bias=False)
        self.split = nn.Sequential(
            nn.PixelShuffle(2), nn.ZeroPad2d((0, -(columns % 2), 0, -(rows % 2)))
        )
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of the finer resolution."""
        x = self.split(self.widen(x).permute(CHANNELS_FIRST))
        return self.mix(x.permute(CHANNELS_LAST))  # type: ignore[no-any-return]


class WindowTransformer(SegmentedModel, ABC):
    """A model of blocks at two resolutions, with one skip connection around the coarser one.

    A subclass sets its `embedding`, calls `build_stages`, and sets its `recovery`.

    Shapes:
        embedding: `(B, inputs, H, W)` -> `(B, width, levels, rows, columns)`;
        recovery: `(B, 2 * width, levels, rows, columns)` -> `(B, outputs, H, W)`.
    """

    embedding: nn.Module
    recovery: nn.Module

    def build_stages(
        self,
        config: WindowsConfig,
        grid: GridShape,
        attention: type[WindowAttention],
        fine: Size,
        window: Size,
    ) -> None:
        """Add the stages and what changes the resolution between them.

        Args:
            fine: levels, rows and columns of tokens at the finer resolution.
        """
        edges = "zeros" if grid.is_global else config.edges
        width = config.width
        self.checkpointing = config.activation_checkpointing
        globes = [fine, (fine[0], -(-fine[1] // 2), -(-fine[2] // 2))]
        rates = iter(stochastic_depth_rates(config.stochastic_depth, sum(config.depths)))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                WindowBlock(
                    attention(
                        factor * width,
                        config.heads[stage],
                        globes[factor - 1],
                        window,
                        shifted=block % 2 == 1,
                        is_periodic=grid.is_periodic,
                    ),
                    factor * width,
                    config,
                    next(rates),
                )
                for block in range(config.depths[stage])
            )
            for stage, factor in enumerate(config.factors)
        )
        self.down = DownSample(width, *fine[1:], edges)
        self.up = UpSample(width, *fine[1:])
        last = len(config.depths) - 1
        # By segment: the module that changes the resolution before it.
        self.changes = {
            "stages.1.0": "down",
            f"stages.{last}.0" if config.depths[last] else "recovery": "up",
        }

    def segments(self) -> list[Segment]:
        """Return the embedding, every block and the recovery.

        The state is the tokens and, from the second stage on, those before it as skip connection.
        """
        names = [
            f"stages.{stage}.{block}"
            for stage, blocks in enumerate(self.stages)
            for block in range(len(cast(nn.ModuleList, blocks)))
        ]
        return [
            Segment("embedding", self._embed, ("embedding",)),
            *(
                Segment(
                    name, partial(self._block, name), self._modules_of(name), is_recomputed=True
                )
                for name in names
            ),
            Segment("recovery", self._recover, self._modules_of("recovery")),
        ]

    def _modules_of(self, segment: str) -> tuple[str, ...]:
        change = self.changes.get(segment)
        return (change, segment) if change else (segment,)

    def _change_resolution(self, segment: str, state: SegmentState) -> SegmentState:
        x, *rest = state
        if change := self.changes.get(segment):
            rest = rest or [x]  # what comes before the second stage is the skip connection
            x = self.get_submodule(change)(x)
        return x, *rest

    def _embed(self, state: SegmentState) -> SegmentState:
        return (self.embedding(state[0]).permute(0, 2, 3, 4, 1),)

    def _block(self, name: str, state: SegmentState) -> SegmentState:
        x, *rest = self._change_resolution(name, state)
        return run_block(self.get_submodule(name), x, self.checkpointing), *rest

    def _recover(self, state: SegmentState) -> SegmentState:
        x, skip = self._change_resolution("recovery", state)
        return (self.recovery(torch.cat([skip, x], -1).permute(0, 4, 1, 2, 3)),)


def initialise(module: nn.Module) -> None:
    """Draw the initial weights of a layer."""
    # The branches of blocks end in a norm: with its usual weight of 1, a sum over many blocks would
    # leave little of the input.
    if isinstance(module, WindowBlock):
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm):
                nn.init.constant_(layer.weight, INITIAL_GAIN)
    # Scaled by the width: small models train slowly from the 0.02 that is usual in large ones.
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
    if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, NoiseModulation):
        module.reset_parameters()
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear | nn.ConvTranspose2d | nn.ConvTranspose3d) and bias is not None:
        nn.init.zeros_(bias)

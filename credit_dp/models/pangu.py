"""A Pangu-style transformer: Earth-specific attention in windows, at two resolutions.

First attention, then the embedding of cubes and its inverse, blocks and changes of resolution, and
at the end `Pangu`. Its forward, in segments: the embedding; four stages of blocks, the second and
third at half the resolution; the recovery of fields from the first and the last stage's tokens.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from math import prod
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config.model import PanguConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.blocks import (
    NoiseModulation,
    StochasticDepth,
    run_block,
    stochastic_depth_or_identity,
    stochastic_depth_rates,
)
from credit_dp.models.row_groups import GroupedRows, RowGroups, windows
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState

Size = tuple[int, int, int]  # levels, rows, columns


def bias_index(window: Size) -> Tensor:
    """Return the index into a window's bias table for each pair of its tokens.

    The bias depends on the levels and rows of both tokens, and on their distance in columns.

    Shapes:
        `(T * T,)` for `T` tokens, query by query; the table has
        `levels^2 * rows^2 * (2 * columns - 1)` entries.

    Source: Bi et al. 2023, Earth-specific positional bias.
    """
    levels, rows, columns = window
    level, row, column = torch.unravel_index(torch.arange(prod(window)), window)
    pairs = level[:, None] * levels + level
    pairs = (pairs * rows + row[:, None]) * rows + row
    return (pairs * (2 * columns - 1) + column[:, None] - column + columns - 1).flatten()


def window_columns(window: int, columns: int) -> int:
    """Return the columns of a window, at most `window`, on a globe of `columns` columns.

    The largest divisor of the globe's columns, so that shifted windows wrap around it without a
    gap. If that is less than half of `window`, the full window: the globe is padded in the east.
    On a region, too: a divisor needs no padding.
    """
    widest = min(window, columns)
    divisor = max(size for size in range(1, widest + 1) if columns % size == 0)
    return divisor if 2 * divisor >= widest else widest


@final
class EarthAttention(GroupedRows):
    """Multi-head self-attention in windows of levels, rows and columns.

    Windows on the same levels and rows share one bias table, whatever their longitude; others have
    different tables. A window is at most as large as the globe (for columns see `window_columns`).

    Args:
        width: channels.
        heads: of the attention; divides `width`.
        globe: levels, rows and columns of the globe. Zeros after the last level, in the south and
            in the east pad it to a multiple of the window, and take part in the attention.
        window: levels, rows and columns.
        shifted: whether windows begin half a window later, in each dim with several windows. They
            wrap around in longitude. In levels and rows, and in columns that do not go round the
            globe, the last window wraps around as well, but tokens of opposite ends are masked from
            each other.
        is_periodic: whether columns go round the globe.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Bi et al. 2023; Liu et al. 2021 for windows and their shift.
    """

    row_dim: ClassVar[int] = -3

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
        entries = levels**2 * rows**2 * (2 * columns - 1)
        self.table = nn.Parameter(torch.empty(*self.counts[:2], heads, entries))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("index", bias_index(self.window), persistent=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def groups(self, height: int) -> RowGroups:
        """Return the windows of rows.

        Raises:
            ValueError: the globe does not have the rows that the layer was built for.
        """
        if height != self.globe[1]:
            raise ValueError(
                f"EarthAttention: was built for {self.globe[1]} rows and has biases for each, "
                f"got {height}. Build the model for this grid."
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
        bias = self.bias(groups, splits_columns).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])

    def bias(self, groups: slice, splits_columns: bool = False) -> Tensor:
        """Return the bias of the logits of each pair of tokens; minus infinity for masked pairs.

        Args:
            groups: windows of rows.
            splits_columns: whether to mask tokens of a region's opposite ends in columns.

        Shapes:
            `(windows of levels * windows of rows * heads, T, T)`, for these windows of rows.
        """
        tokens = prod(self.window)
        table = self.table[:, groups].flatten(0, 2)
        bias = table.index_select(1, cast(Tensor, self.index)).view(len(table), tokens, tokens)
        if not any(self.shift[:2]) and not splits_columns:
            return bias
        return bias.masked_fill(self._masked_pairs(groups, splits_columns), float("-inf"))

    def _masked_pairs(self, groups: slice, splits_columns: bool) -> Tensor:
        """Return which pairs of tokens share a shifted window, but are not adjacent on the globe.

        Shapes:
            as `bias`.
        """
        # Only the last window of levels, rows or columns wraps around: its last `shift` levels,
        # rows or columns are the globe's first ones. True marks these.
        dims = 3 if splits_columns else 2
        levels, rows, *columns = (
            (torch.arange(n * w, device=self.table.device) >= n * w - s).view(n, w)
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


def cube_counts(size: Size, patch: Size) -> Size:
    """Return the number of cubes in each dim; the last one may reach beyond the globe."""
    return cast(Size, tuple(-(-s // p) for s, p in zip(size, patch, strict=True)))


def cube_padding(size: Size, patch: Size, sign: int) -> tuple[int, ...]:
    """Return the padding to whole cubes in torch's order: columns, rows, levels.

    Args:
        size: levels, rows and columns of the globe.
        patch: levels, rows and columns of a cube.
        sign: 1 to pad at the end of each dim, -1 to crop again.
    """
    counts = cube_counts(size, patch)
    missing = (sign * (n * p - s) for n, p, s in zip(counts, patch, size, strict=True))
    return tuple(chain(*((0, pad) for pad in reversed(tuple(missing)))))


# By padding mode: on the globe zeros, on a region `model.edges`.
PAD_2D = {"zeros": nn.ZeroPad2d, "replicate": nn.ReplicationPad2d, "reflect": nn.ReflectionPad2d}
PAD_3D = {"zeros": nn.ZeroPad3d, "replicate": nn.ReplicationPad3d, "reflect": nn.ReflectionPad3d}


@final
class CubeEmbedding(nn.Module):
    """Embeds cubes of upper-air fields, and patches of surface fields, as tokens.

    Surface fields, forcings and static fields become tokens of an additional last level, if there
    are any.

    Args:
        fields: layout of the channels.
        size: levels, rows and columns of the globe.
        patch: levels, rows and columns of a cube. Padding completes the last cubes.
        width: channels of a token.
        edges: the padding: `zeros`, `replicate` or `reflect`.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, width, levels, rows, columns)`.

    Source: Bi et al. 2023.
    """

    def __init__(
        self, fields: Fields, size: Size, patch: Size, width: int, edges: str = "zeros"
    ) -> None:
        super().__init__()
        starts = [frame * fields.states for frame in range(fields.frames)]
        upper = [start + channel for start in starts for channel in chain(*fields.upper)]
        surface = [start + channel for start in starts for channel in fields.surface]
        surface += range(fields.inputs - fields.others, fields.inputs)  # forcings and static fields
        self.levels = size[0]
        self.register_buffer("upper_channels", torch.tensor(upper), persistent=False)
        self.register_buffer("surface_channels", torch.tensor(surface), persistent=False)
        pads = cube_padding(size, patch, 1)
        self.upper = nn.Sequential(
            PAD_3D[edges](cast(tuple[int, int, int, int, int, int], pads)),
            nn.Conv3d(len(upper) // size[0], width, patch, patch),
        )
        self.surface = None
        if surface:
            self.surface = nn.Sequential(
                PAD_2D[edges](cast(tuple[int, int, int, int], pads[:4])),
                nn.Conv2d(len(surface), width, patch[1:], patch[1:]),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        upper = x.index_select(1, cast(Tensor, self.upper_channels))
        tokens = self.upper(torch.unflatten(upper, 1, (-1, self.levels)))
        if self.surface is None:
            return tokens  # type: ignore[no-any-return]
        surface = self.surface(x.index_select(1, cast(Tensor, self.surface_channels)))
        return torch.cat([tokens, surface[:, :, None]], 2)


@final
class CubeRecovery(nn.Module):
    """Turns tokens back into the output channels, in their order.

    Surface fields and diagnostic channels come from the tokens of the last level.

    Args:
        fields: layout of the channels.
        size: levels, rows and columns of the globe, to which the cubes are cropped.
        patch: levels, rows and columns of a cube.
        width: channels of a token.

    Shapes:
        `(B, width, levels, rows, columns)` -> `(B, fields.outputs, H, W)`.

    Source: Bi et al. 2023.
    """

    def __init__(self, fields: Fields, size: Size, patch: Size, width: int) -> None:
        super().__init__()
        surface = [*fields.surface, *range(fields.states, fields.outputs)]
        # `forward` has upper-air fields first; `order` sorts them by number of the channel.
        channels = [*chain(*fields.upper), *surface]
        order = sorted(range(len(channels)), key=channels.__getitem__)
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.levels = cube_counts(size, patch)[0]
        pads = cube_padding(size, patch, -1)
        self.upper = nn.Sequential(
            nn.ConvTranspose3d(width, len(fields.upper), patch, patch),
            nn.ZeroPad3d(cast(tuple[int, int, int, int, int, int], pads)),
        )
        self.surface = None
        if surface:
            self.surface = nn.Sequential(
                nn.ConvTranspose2d(width, len(surface), patch[1:], patch[1:]),
                nn.ZeroPad2d(cast(tuple[int, int, int, int], pads[:4])),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output channels."""
        y: Tensor = self.upper(x[:, :, : self.levels]).flatten(1, 2)
        if self.surface is not None:
            y = torch.cat([y, self.surface(x[:, :, -1])], 1)
        return y.index_select(1, cast(Tensor, self.order))


CHANNELS_FIRST = (0, 1, 4, 2, 3)  # (B, levels, rows, columns, C) -> (B, levels, C, rows, columns)
CHANNELS_LAST = (0, 1, 3, 4, 2)
# By (stage, block): the modules that change the resolution before this block.
RESOLUTION_CHANGES = {(1, 0): ("down",), (3, 0): ("up",)}
INITIAL_GAIN = 0.1  # initial weights of the norms at the end of a block's branches


def _noise_modulations(noise: int, channels: int) -> list[nn.Module]:
    """Return a layer of noise on the last dimension in a list, which is empty without noise."""
    return [NoiseModulation(noise, channels, dim=-1)] if noise else []


@final
class EarthBlock(nn.Module):
    """Attention in windows and an MLP, each normalised before it is added to its input.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Bi et al. 2023; norms after the branches as in Liu et al. 2022.
    """

    def __init__(self, attention: EarthAttention, width: int, config: PanguConfig, rate: float):
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


@final
class Pangu(SegmentedModel):
    """Predicts a state, or its tendency over one step, from cubes of fields on levels.

    Four stages: the first and the last at the resolution of the cubes, the others at half of it.

    Args:
        config: of the model.
        fields: layout of the channels, with the levels of each variable.
        grid: rows and columns.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: no variable is on levels, or the grid is too small.

    Source: Bi et al. 2023, Accurate medium-range global weather forecasting with 3D neural
    networks.
    """

    row_rules: ClassVar[dict[type[nn.Module], str]] = {
        EarthAttention: "row_groups",
        StochasticDepth: "stochastic_depth",
    }

    def __init__(self, config: PanguConfig, fields: Fields, grid: GridShape) -> None:
        super().__init__()
        _check_fit(config, fields, grid)
        edges = "zeros" if grid.is_global else config.edges
        size = (fields.levels, *grid)
        patch = cast(Size, tuple(config.patch))
        fine = cube_counts(size, patch)
        width = config.width
        self.checkpointing = config.activation_checkpointing
        self.embedding = CubeEmbedding(fields, size, patch, width, edges)
        levels = fine[0] + (self.embedding.surface is not None)
        # Levels, rows and columns of tokens at the finer and the coarser resolution.
        globes = [(levels, *fine[1:]), (levels, -(-fine[1] // 2), -(-fine[2] // 2))]
        rates = iter(stochastic_depth_rates(config.stochastic_depth, sum(config.depths)))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                EarthBlock(
                    EarthAttention(
                        factor * width,
                        config.heads[stage],
                        globes[factor - 1],
                        cast(Size, tuple(config.window)),
                        shifted=block % 2 == 1,
                        is_periodic=grid.is_periodic,
                    ),
                    factor * width,
                    config,
                    next(rates),
                )
                for block in range(config.depths[stage])
            )
            for stage, factor in enumerate((1, 2, 2, 1))
        )
        self.down = DownSample(width, *fine[1:], edges)
        self.up = UpSample(width, *fine[1:])
        self.recovery = CubeRecovery(fields, size, patch, 2 * width)
        self.apply(_initialise)

    def segments(self) -> list[Segment]:
        """Return the embedding, every block and the recovery.

        The state is the tokens and, from the second stage on, the first stage's as skip connection.
        """
        embedding = Segment("embedding", self._embed, ("embedding",))
        blocks = [
            Segment(
                f"stages.{stage}.{block}",
                partial(self._block, stage, block),
                (*RESOLUTION_CHANGES.get((stage, block), ()), f"stages.{stage}.{block}"),
                is_recomputed=True,
            )
            for stage, blocks in enumerate(self.stages)
            for block in range(len(cast(nn.ModuleList, blocks)))
        ]
        return [embedding, *blocks, Segment("recovery", self._recover, ("recovery",))]

    def _embed(self, state: SegmentState) -> SegmentState:
        return (self.embedding(state[0]).permute(0, 2, 3, 4, 1),)

    def _block(self, stage: int, block: int, state: SegmentState) -> SegmentState:
        x, *rest = state
        if (stage, block) in RESOLUTION_CHANGES:
            rest = rest or [x]  # the first stage's output is the skip connection
            for name in RESOLUTION_CHANGES[stage, block]:
                x = self.get_submodule(name)(x)
        layer = cast(nn.ModuleList, self.stages[stage])[block]
        return run_block(layer, x, self.checkpointing), *rest

    def _recover(self, state: SegmentState) -> SegmentState:
        x, skip = state
        return (self.recovery(torch.cat([skip, x], -1).permute(0, 4, 1, 2, 3)),)


def _check_fit(config: PanguConfig, fields: Fields, grid: GridShape) -> None:
    if not fields.levels:
        raise UserError(
            "model.name: pangu needs variables on levels, but data.prognostic has none. Add "
            "temperature, or another variable on levels, to data.prognostic, or use model=unet."
        )
    padding = cube_padding((fields.levels, *grid), cast(Size, tuple(config.patch)), 1)[-1]
    if not grid.is_global and config.edges == "reflect" and padding >= fields.levels:
        raise UserError(
            f"model.edges: reflect can't complete cubes of {config.patch[0]} levels from "
            f"{fields.levels}. Use a smaller model.patch or model.edges=replicate."
        )
    if min(-(-n // p) for n, p in zip(grid, config.patch[1:], strict=True)) < 3:
        rows, columns = (2 * patch + 1 for patch in config.patch[1:])
        raise UserError(
            f"model.patch: {list(config.patch)} needs a grid of at least {rows} rows and {columns} "
            f"columns, got {grid[0]}x{grid[1]}. Use a smaller model.patch{grid.or_finer}."
        )


def _initialise(module: nn.Module) -> None:
    """Draw the initial weights of a layer."""
    # The branches of blocks end in a norm: with its usual weight of 1, a sum over many blocks would
    # leave little of the input.
    if isinstance(module, EarthBlock):
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

"""The CrossFormer: a U-shaped transformer of short- and long-distance attention on the globe.

First its layers (embedding, attention, upsampling), then `CrossFormer`. Its forward, in segments:
padding to whole windows; each level's embedding and blocks, from the finest to the coarsest; the
decoder, joined with the output of each level; the head, and the crop to the grid.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import partial
from itertools import islice, pairwise
from math import prod
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from credit_dp.config.model import CrossFormerConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.blocks import (
    NoiseModulation,
    PolePad,
    padding_modes,
    pair_offsets,
    run_block,
    stochastic_depth_or_identity,
    stochastic_depth_rates,
)
from credit_dp.models.row_groups import GroupedRows, RowGroups, dilated, windows
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState
from credit_dp.models.unet import PeriodicConv2d


@final
class CrossScaleEmbedding(nn.Module):
    """Convolutions of several kernel sizes with one stride, concatenated in the channels.

    The smallest kernel yields half of the channels, the next one a quarter, and so on, because
    large kernels are expensive; the largest kernel yields the rest.

    Args:
        kernels: sizes of the kernels; each has the parity of the stride.
        poles, column_mode: padding beyond rows and columns, see `PolePad`.

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
        column_mode: str = "circular",
    ) -> None:
        super().__init__()
        shares = split_in_halves(out_channels, len(kernels))
        self.branches = nn.ModuleList(
            PeriodicConv2d(in_channels, share, kernel, stride, poles, column_mode)
            for kernel, share in zip(sorted(kernels), shares, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding of all kernels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def split_in_halves(channels: int, parts: int) -> list[int]:
    """Return a half, a quarter, ... of the channels, and the rest in the last of the parts."""
    shares = [channels // 2 ** (part + 1) for part in range(parts - 1)]
    return [*shares, channels - sum(shares)]


# Columns are split into two dims, `(B, groups, rows, dim 3, dim 4, C)`. The columns of one group
# are those along dim 3 if they are dilated (every n-th one), along dim 4 if they are adjacent.
DILATED_COLUMNS_DIM = 3
ADJACENT_COLUMNS_DIM = 4


@final
class PositionBias(nn.Module):
    """The position bias of the attention logits of each pair of points of a group.

    A small network computes it from the offset of the pair, in rows and columns of the group. It is
    the same for all heads.

    Shapes:
        no input -> `(size ** 2, size ** 2)`, with one row for each query.

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
        offsets, index = pair_offsets(size, size)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """Return the bias of every pair of points."""
        biases: Tensor = self.layers(self.offsets)
        return biases.flatten()[self.index]


class CrossAttention(GroupedRows, ABC):
    """Multi-head attention of every point to the `size` x `size` points of its group.

    Rows and columns are grouped in the same way. Channels are last, as linear layers and layer
    norms need them.

    Args:
        size: rows, and columns, of a group; has to divide those of the globe.

    Shapes:
        `(B, H, W, channels)` -> the same.
    """

    row_dim: ClassVar[int] = -3
    group_columns_dim: ClassVar[int]  # DILATED_COLUMNS_DIM or ADJACENT_COLUMNS_DIM

    def __init__(self, channels: int, size: int, head_channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.heads = channels // head_channels
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.position_bias = PositionBias(size, max(1, channels // 4))
        self.project = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)

    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return the attention within these groups of rows; see `GroupedRows.treat`."""
        batch, _, columns, channels = x.shape
        size = self.size
        row_groups = groups.stop - groups.start
        column_groups = columns // size
        is_dilated = self.group_columns_dim == DILATED_COLUMNS_DIM
        split_columns = (size, column_groups) if is_dilated else (column_groups, size)
        # All sizes are explicit: torch can't infer -1 for a rank without groups, whose tensor is
        # empty.
        x = x.reshape(batch, row_groups, size, *split_columns, channels)
        x = x.movedim((2, self.group_columns_dim), (-3, -2))
        y = self._attend(x.reshape(batch * row_groups * column_groups, size**2, channels))
        y = y.reshape(x.shape).movedim((-3, -2), (2, self.group_columns_dim))
        return y.reshape(batch, row_groups * size, columns, channels)

    def _attend(self, x: Tensor) -> Tensor:
        """Return the attention among the points of each group, `(groups, points, channels)`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, x.shape[-1] // self.heads))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        bias = self.position_bias().to(query.dtype)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.dropout(self.project(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@final
class ShortDistanceAttention(CrossAttention):
    """Attention among the adjacent points of each window of `size` x `size`.

    Source: Wang et al. 2021, section 3.2, short-distance attention.
    """

    group_columns_dim: ClassVar[int] = ADJACENT_COLUMNS_DIM

    def groups(self, height: int) -> RowGroups:
        """Return windows of adjacent rows."""
        return windows(height, self.size)


@final
class LongDistanceAttention(CrossAttention):
    """Attention among groups of `size` x `size` points, dilated as far as the globe allows.

    Source: Wang et al. 2021, section 3.2, long-distance attention.
    """

    group_columns_dim: ClassVar[int] = DILATED_COLUMNS_DIM

    def groups(self, height: int) -> RowGroups:
        """Return groups of rows a fixed distance apart."""
        return dilated(height, self.size)


@final
class ResidualBranch(nn.Module):
    """A residual branch: a layer norm, noise, an inner module, and a shortcut around all three.

    Shapes:
        `(B, H, W, channels)` -> the same.
    """

    def __init__(self, channels: int, inner: nn.Module, depth_rate: float, noise: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.noise = NoiseModulation(noise, channels, dim=-1) if noise else None
        self.inner = inner
        self.depth = stochastic_depth_or_identity(depth_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the branch."""
        y = self.norm(x)
        y = y if self.noise is None else self.noise(y)
        return x + self.depth(self.inner(y))  # type: ignore[no-any-return]


def _feed_forward(channels: int, ratio: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, ratio * channels),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(ratio * channels, channels),
        nn.Dropout(dropout),
    )


def _build_block(config: CrossFormerConfig, level: int, depth_rate: float) -> nn.Sequential:
    """Return a block: short-distance attention, MLP, long-distance attention, MLP."""
    channels = config.channels[level]
    head_channels = config.head_channels
    dropout = config.dropout
    short = ShortDistanceAttention(channels, config.local_windows[level], head_channels, dropout)
    long = LongDistanceAttention(channels, config.global_windows[level], head_channels, dropout)
    mlps = [_feed_forward(channels, config.mlp_ratio, dropout) for _ in range(2)]
    branches = (short, mlps[0], long, mlps[1])
    return nn.Sequential(
        *(ResidualBranch(channels, branch, depth_rate, config.noise) for branch in branches)
    )


def build_level(
    config: CrossFormerConfig,
    level: int,
    in_channels: int,
    depth_rates: Sequence[float],
    modes: tuple[str, str],
) -> nn.ModuleDict:
    """Return one level: its `embedding` and its `blocks` of attention.

    Args:
        level: its number; 0 is the finest.
        in_channels: channels of the finer level, or of the model's input.

    Shapes:
        embedding: `(B, in_channels, H, W)` -> `(B, channels, H / stride, W / stride)`;
        block, with channels last: `(B, H, W, channels)` -> the same.
    """
    channels = config.channels[level]
    stride = config.strides[level]
    embedding = CrossScaleEmbedding(in_channels, channels, config.kernels[level], stride, *modes)
    blocks = nn.ModuleList(_build_block(config, level, rate) for rate in depth_rates)
    return nn.ModuleDict({"embedding": embedding, "blocks": blocks})


@final
class SubPixelConv(nn.Module):
    """A convolution and a pixel shuffle: channels become the `factor` x `factor` finer points.

    With the initial weights all finer points of a point are equal, so training does not begin with
    a checkerboard.

    Args:
        poles, column_mode: padding beyond rows and columns, see `PolePad`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Shi et al. 2016; initial weights as in Aitken et al. 2017.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        factor: int,
        poles: str,
        column_mode: str = "circular",
    ) -> None:
        super().__init__()
        self.conv = PeriodicConv2d(in_channels, out_channels * factor**2, 3, 1, poles, column_mode)
        self.shuffle = nn.PixelShuffle(factor)
        # Pixel shuffle takes the factor**2 points of an output channel from consecutive channels of
        # the convolution: give these the same weights.
        with torch.no_grad():
            for parameter in self.conv.parameters():
                first = parameter[:: factor**2].clone()
                parameter.copy_(first.repeat_interleave(factor**2, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field."""
        return self.shuffle(self.conv(x))  # type: ignore[no-any-return]


@final
class UpBlock(nn.Module):
    """Upsamples a field and adds a residual branch of two convolutions.

    Args:
        out_channels: channels of the output, a multiple of `groups`.
        modes: of padding, see `padding_modes`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Schreck et al. 2024.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        factor: int,
        groups: int,
        modes: tuple[str, str],
    ) -> None:
        super().__init__()
        self.up = SubPixelConv(in_channels, out_channels, factor, *modes)
        stages = (
            layer
            for _ in range(2)
            for layer in (
                PeriodicConv2d(out_channels, out_channels, 3, 1, *modes),
                nn.GroupNorm(groups, out_channels),
                nn.SiLU(),
            )
        )
        self.residual = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field plus the residual branch."""
        x = self.up(x)
        return x + self.residual(x)  # type: ignore[no-any-return]


@final
class CrossFormer(SegmentedModel):
    """Predicts a state, or its tendency over one step, from the input channels.

    The grid is padded so that whole windows cover it at every level, and cropped at the end.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the grid has too few rows or columns for the padding or the kernels.

    Source: Wang et al. 2021; Schreck et al. 2024 (arXiv 2411.07814).
    """

    def __init__(self, config: CrossFormerConfig, fields: Fields, grid: GridShape) -> None:
        super().__init__()
        self.checkpointing = config.activation_checkpointing
        modes = padding_modes(config, grid)
        # `reflect` repeats all rows and columns but the outermost.
        unrepeated = int(modes[0] == "reflect")
        padded = _padded_grid(config, grid, unrepeated)
        _check_kernels(config, GridShape(padded, grid.is_global, grid.is_periodic), unrepeated)
        widths = config.channels
        strides = config.strides
        rates = iter(stochastic_depth_rates(config.stochastic_depth, sum(config.depths)))
        self.enlarge = _build_padding(grid, padded, modes)
        self.crop = _build_crop(grid, padded)
        self.levels = nn.ModuleList(
            build_level(
                config, level, in_channels, list(islice(rates, config.depths[level])), modes
            )
            for level, in_channels in enumerate([fields.inputs, *widths[:-1]])
        )
        # (channels of the coarser level, channels of the finer level, stride), finest first.
        steps = list(zip(widths[1:], widths[:-1], strides[1:], strict=True))
        coarsest = len(steps) - 1
        # Each step but the first gets the previous one's output and its skip connection.
        self.decoder = nn.ModuleList(
            UpBlock(a if index == coarsest else 2 * a, b, stride, config.groups, modes)
            for index, (a, b, stride) in reversed(list(enumerate(steps)))
        )
        last = 2 * widths[0] if steps else widths[0]
        self.head = nn.Sequential(
            SubPixelConv(last, fields.outputs, strides[0], *modes),
            PeriodicConv2d(fields.outputs, fields.outputs, 3, 1, *modes),
        )
        if config.spectral_norm:
            # Weights of noise stay small at first: divided like others, they would be large.
            noise = {m.linear for m in self.modules() if isinstance(m, NoiseModulation)}
            for layer in [m for m in self.modules() if isinstance(m, nn.Conv2d | nn.Linear)]:
                if layer not in noise:
                    spectral_norm(layer)

    def segments(self) -> list[Segment]:
        """Return every block, every step of the decoder and the head.

        The state is the field and the skip connections of finer levels, finest first.
        """
        blocks = [
            self._block_segment(level, block)
            for level in range(len(self.levels))
            for block in range(self._depth(level))
        ]
        steps = range(len(self.decoder))
        decoder = [
            Segment(f"decoder.{step}", partial(self._decode, step), (f"decoder.{step}",))
            for step in steps
        ]
        return [*blocks, *decoder, Segment("head", self._finish, ("head", "crop"))]

    def _depth(self, level: int) -> int:
        return len(cast(nn.ModuleList, cast(nn.ModuleDict, self.levels[level])["blocks"]))

    def _block_segment(self, level: int, block: int) -> Segment:
        name = f"levels.{level}.blocks.{block}"
        embedding = (f"levels.{level}.embedding",) if not block else ()
        padding = ("enlarge",) if not level and not block else ()
        modules = (*padding, *embedding, name)
        return Segment(name, partial(self._encode, level, block), modules, is_recomputed=True)

    def _encode(self, level: int, block: int, state: SegmentState) -> SegmentState:
        x, *skips = state
        parts = cast(nn.ModuleDict, self.levels[level])
        if not block:
            skips += [x] if level else []
            x = parts["embedding"](x if level else self.enlarge(x)).permute(0, 2, 3, 1)
        x = run_block(cast(nn.ModuleList, parts["blocks"])[block], x, self.checkpointing)
        if block == self._depth(level) - 1:
            x = x.permute(0, 3, 1, 2)
        return x, *skips

    def _decode(self, step: int, state: SegmentState) -> SegmentState:
        x, *skips = state
        return torch.cat([self.decoder[step](x), skips[-1]], 1), *skips[:-1]

    def _finish(self, state: SegmentState) -> SegmentState:
        return (self.crop(self.head(state[0])),)


def _padded_grid(config: CrossFormerConfig, grid: GridShape, unrepeated: int) -> tuple[int, int]:
    rows, columns = (-(-size // config.grid_multiple) * config.grid_multiple for size in grid)
    missing = [wide - size for wide, size in zip((rows, columns), grid, strict=True)]
    if any(-(-n // 2) > size - unrepeated for n, size in zip(missing, grid, strict=True)):
        raise UserError(
            f"model.local_windows: with model.global_windows and model.strides, whole windows need "
            f"a multiple of {config.grid_multiple} rows and columns, but the grid of "
            f"{grid[0]}x{grid[1]} is too small to be padded to {rows}x{columns}. Use smaller "
            f"windows{grid.or_finer}."
        )
    return rows, columns


def _check_kernels(config: CrossFormerConfig, padded: GridShape, unrepeated: int) -> None:
    if unrepeated and min(padded) == prod(config.strides):
        raise UserError(
            "model.edges: reflect needs at least two rows and columns at the coarsest level, which "
            "has one. Use model.edges=replicate."
        )
    for level, kernels in enumerate(config.kernels):
        size = min(padded) // prod(config.strides[:level]) - unrepeated
        if max(kernels) // 2 > size:
            raise UserError(
                f"model.kernels: those of level {level} can have up to {2 * size} rows on this "
                f"grid, got {max(kernels)}. Use smaller kernels{padded.or_finer}."
            )


def _build_padding(
    grid: tuple[int, int], padded: tuple[int, int], modes: tuple[str, str]
) -> nn.Sequential:
    if grid == padded:
        return nn.Sequential()
    missing = [wide - size for wide, size in zip(padded, grid, strict=True)]
    rows, columns = (-(-count // 2) for count in missing)
    # An odd number is rounded up, and the surplus cut off in the south or east.
    surplus = (0, -(missing[1] % 2), 0, -(missing[0] % 2))
    layers: list[nn.Module] = [PolePad(rows, modes[0], columns, modes[1])]
    return nn.Sequential(*layers, *([nn.ZeroPad2d(surplus)] if any(surplus) else []))


def _build_crop(grid: tuple[int, int], padded: tuple[int, int]) -> nn.Module:
    if grid == padded:
        return nn.Identity()
    (south, north), (east, west) = (
        ((wide - size) // 2, -(-(wide - size) // 2))
        for wide, size in zip(padded, grid, strict=True)
    )
    return nn.ZeroPad2d((-west, -east, -north, -south))

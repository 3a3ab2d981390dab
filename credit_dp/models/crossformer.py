"""The CrossFormer: a U-shaped transformer of short- and long-distance attention on the globe."""

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
from credit_dp.fields import Fields
from credit_dp.models.blocks import (
    PolePad,
    StochasticDepth,
    run_block,
    stochastic_depth_or_identity,
    stochastic_depth_rates,
)
from credit_dp.models.row_groups import GroupedRows, RowGroups, dilated, windows
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState
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
    group_columns_dim: ClassVar[int]  # FIRST: a group has every n-th; SECOND: neighbouring ones

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
        parts = (size, others) if self.group_columns_dim == FIRST else (others, size)
        # Sizes are written out: of no groups, torch can't tell what -1 stands for.
        x = x.reshape(batch, count, size, *parts, channels)
        x = x.movedim((2, self.group_columns_dim), (-3, -2))
        made = self._attend(x.reshape(batch * count * others, size**2, channels))
        made = made.reshape(x.shape).movedim((-3, -2), (2, self.group_columns_dim))
        return made.reshape(batch, count * size, columns, channels)

    def _attend(self, x: Tensor) -> Tensor:
        """Attend among the points of each group, `(groups, points, channels)`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, x.shape[-1] // self.heads))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        bias = self.position_bias().to(query.dtype)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.dropout(self.project(seen.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@final
class ShortDistanceAttention(CrossAttention):
    """Attention among the points of a window of `size` x `size`.

    Source: Wang et al. 2021, section 3.2, short-distance attention.
    """

    group_columns_dim: ClassVar[int] = SECOND

    def groups(self, height: int) -> RowGroups:
        """Return windows of neighbouring rows."""
        return windows(height, self.size)


@final
class LongDistanceAttention(CrossAttention):
    """Attention among `size` x `size` points as far from each other as the globe allows.

    Source: Wang et al. 2021, section 3.2, long-distance attention.
    """

    group_columns_dim: ClassVar[int] = FIRST

    def groups(self, height: int) -> RowGroups:
        """Return rows a fixed distance apart."""
        return dilated(height, self.size)


@final
class ResidualBranch(nn.Module):
    """A normalised branch beside a shortcut.

    Shapes:
        `(B, H, W, channels)` -> the same.
    """

    def __init__(self, channels: int, inner: nn.Module, depth_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.inner = inner
        self.depth = stochastic_depth_or_identity(depth_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the branch adds."""
        return x + self.depth(self.inner(self.norm(x)))  # type: ignore[no-any-return]


def _feed_forward(channels: int, ratio: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, ratio * channels),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(ratio * channels, channels),
        nn.Dropout(dropout),
    )


def _build_block(config: CrossFormerConfig, level: int, depth_rate: float) -> nn.Sequential:
    """Short-distance attention, feed-forward, long-distance attention, feed-forward."""
    channels, heads, dropout = config.channels[level], config.head_channels, config.dropout
    short = ShortDistanceAttention(channels, config.local_windows[level], heads, dropout)
    distant = LongDistanceAttention(channels, config.global_windows[level], heads, dropout)
    feeds = [_feed_forward(channels, config.mlp_ratio, dropout) for _ in range(2)]
    branches = (short, feeds[0], distant, feeds[1])
    return nn.Sequential(*(ResidualBranch(channels, branch, depth_rate) for branch in branches))


def build_level(
    config: CrossFormerConfig, level: int, in_channels: int, depth_rates: Sequence[float]
) -> nn.ModuleDict:
    """Return one level: an `embedding` of patches of several sizes, and `blocks` of attention.

    Args:
        config: of the model.
        level: which level, 0 the finest.
        in_channels: channels of the finer level, or of the model's input.
        depth_rates: of the blocks, see `StochasticDepth`.

    Shapes:
        embedding: `(B, in_channels, H, W)` -> `(B, channels, H / stride, W / stride)`. A block has
        channels last, where linear layers and norms want them: `(B, H, W, channels)` -> the same.
    """
    channels, stride = config.channels[level], config.strides[level]
    embedding = CrossScaleEmbedding(
        in_channels, channels, config.kernels[level], stride, config.poles
    )
    blocks = nn.ModuleList(_build_block(config, level, rate) for rate in depth_rates)
    return nn.ModuleDict({"embedding": embedding, "blocks": blocks})


@final
class SubPixelConv(nn.Module):
    """A convolution whose channels become the `factor` x `factor` finer points of each point.

    At first all finer points of a point are equal, so that no checkerboard has to be unlearnt.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        factor: how many times finer the output is.
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Shi et al. 2016; first weights as in Aitken et al. 2017.
    """

    def __init__(self, in_channels: int, out_channels: int, factor: int, poles: str) -> None:
        super().__init__()
        self.conv = PeriodicConv2d(in_channels, out_channels * factor**2, poles=poles)
        self.shuffle = nn.PixelShuffle(factor)
        with torch.no_grad():
            for parameter in self.conv.parameters():
                first = parameter[:: factor**2].clone()
                parameter.copy_(first.repeat_interleave(factor**2, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field."""
        return self.shuffle(self.conv(x))  # type: ignore[no-any-return]


@final
class UpBlock(nn.Module):
    """A finer field, and what two convolutions of it add.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of `groups`.
        factor: how many times finer the output is.
        groups: of the norms.
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H * factor, W * factor)`.

    Source: Schreck et al. 2024.
    """

    def __init__(
        self, in_channels: int, out_channels: int, factor: int, groups: int, poles: str
    ) -> None:
        super().__init__()
        self.up = SubPixelConv(in_channels, out_channels, factor, poles)
        stages = (
            layer
            for _ in range(2)
            for layer in (
                PeriodicConv2d(out_channels, out_channels, poles=poles),
                nn.GroupNorm(groups, out_channels),
                nn.SiLU(),
            )
        )
        self.residual = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field plus what the convolutions add."""
        x = self.up(x)
        return x + self.residual(x)  # type: ignore[no-any-return]


@final
class CrossFormer(SegmentedModel):
    """Predicts one state, or its tendency, from the input channels.

    The globe is padded until whole windows cover it at every level, and cropped at the end.

    Args:
        config: of the model.
        fields: channels of the input and the output.
        grid: rows and columns of the globe.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the globe has too few rows or columns to be padded, or for the kernels.

    Source: Wang et al. 2021; Schreck et al. 2024 (arXiv 2411.07814).
    """

    row_rules: ClassVar[dict[type[nn.Module], str]] = {
        PeriodicConv2d: "periodic_conv",
        PolePad: "pole_pad",
        ShortDistanceAttention: "row_groups",
        LongDistanceAttention: "row_groups",
        StochasticDepth: "stochastic_depth",
    }

    def __init__(self, config: CrossFormerConfig, fields: Fields, grid: tuple[int, int]) -> None:
        super().__init__()
        self.checkpointing = config.activation_checkpointing
        padded = _padded_grid(config, grid)
        _check_kernels(config, padded)
        widths, steps, poles = config.channels, config.strides, config.poles
        rates = iter(stochastic_depth_rates(config.stochastic_depth, sum(config.depths)))
        self.enlarge, self.crop = _build_padding(grid, padded, poles), _build_crop(grid, padded)
        self.levels = nn.ModuleList(
            build_level(config, level, first, list(islice(rates, config.depths[level])))
            for level, first in enumerate([fields.inputs, *widths[:-1]])
        )
        finer = list(zip(widths[1:], widths[:-1], steps[1:], strict=True))  # finest first
        coarsest = len(finer) - 1
        self.decoder = nn.ModuleList(
            UpBlock(a if at == coarsest else 2 * a, b, step, config.groups, poles)
            for at, (a, b, step) in reversed(list(enumerate(finer)))
        )
        last = 2 * widths[0] if finer else widths[0]
        self.head = nn.Sequential(
            SubPixelConv(last, fields.outputs, steps[0], poles),
            PeriodicConv2d(fields.outputs, fields.outputs, poles=poles),
        )
        if config.spectral_norm:
            for layer in [m for m in self.modules() if isinstance(m, nn.Conv2d | nn.Linear)]:
                spectral_norm(layer)

    def segments(self) -> list[Segment]:
        """Return every block, every step of the decoder and the head.

        The state is the field, and those of the levels passed, finest first.
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
        before = (f"levels.{level}.embedding",) if not block else ()
        first = ("enlarge",) if not level and not block else ()
        return Segment(name, partial(self._encode, level, block), (*first, *before, name))

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


def _padded_grid(config: CrossFormerConfig, grid: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (-(-size // config.grid_multiple) * config.grid_multiple for size in grid)
    if any(-(-(wide - size) // 2) > size for wide, size in zip((rows, columns), grid, strict=True)):
        raise UserError(
            f"model.local_windows: with model.global_windows and model.strides, whole windows need "
            f"a multiple of {config.grid_multiple} rows and columns; the grid has "
            f"{grid[0]}x{grid[1]}, "
            f"too few to fill {rows}x{columns}. Use smaller windows or a finer data.grid."
        )
    return rows, columns


def _check_kernels(config: CrossFormerConfig, padded: tuple[int, int]) -> None:
    """Refuse kernels that reach farther beyond a level's edge than the level is wide."""
    for level, kernels in enumerate(config.kernels):
        size = min(padded) // prod(config.strides[:level])
        if max(kernels) // 2 > size:
            raise UserError(
                f"model.kernels: those of level {level} can have up to {2 * size} rows on this "
                f"grid, got {max(kernels)}. Give smaller kernels or a finer data.grid."
            )


def _build_padding(grid: tuple[int, int], padded: tuple[int, int], poles: str) -> nn.Sequential:
    """Pad both sides alike; where one more than is missing, take it off in the south or east."""
    if grid == padded:
        return nn.Sequential()
    missing = [wide - size for wide, size in zip(padded, grid, strict=True)]
    rows, columns = (-(-count // 2) for count in missing)
    surplus = (0, -(missing[1] % 2), 0, -(missing[0] % 2))
    layers: list[nn.Module] = [PolePad(rows, poles, columns)]
    return nn.Sequential(*layers, *([nn.ZeroPad2d(surplus)] if any(surplus) else []))


def _build_crop(grid: tuple[int, int], padded: tuple[int, int]) -> nn.Module:
    """Undo what `_build_padding` does."""
    if grid == padded:
        return nn.Identity()
    (south, north), (east, west) = (
        ((wide - size) // 2, -(-(wide - size) // 2))
        for wide, size in zip(padded, grid, strict=True)
    )
    return nn.ZeroPad2d((-west, -east, -north, -south))

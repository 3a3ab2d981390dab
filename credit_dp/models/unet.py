"""A residual U-Net on the globe: periodic in longitude, padded across the poles in latitude.

First its layers and blocks, then `UNet`. Its forward, in segments: the stem; the blocks of each
level, from the finest to the coarsest; back to the finest, each level joined with its skip
connection; the head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config.model import UNetConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.blocks import (
    NoiseModulation,
    StochasticDepth,
    pad_columns,
    pad_poles,
    padding_modes,
    run_block,
    stochastic_depth_rates,
)
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState

logger = logging.getLogger(__name__)

# A U-Net with fewer than TINY_CHANNELS channels at its finest level gets a warning if the grid has
# more than TINY_ROWS rows.
TINY_CHANNELS = 64
TINY_ROWS = 200

# A gate has 1 / GATE_REDUCTION of the channels in its hidden layer, but at least this many.
GATE_REDUCTION = 16
MIN_GATE_CHANNELS = 4


@final
class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1), a function of the global means of all channels.

    Shapes:
        `(B, channels, H, W)` -> the same.

    Source: Hu et al. 2018.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(MIN_GATE_CHANNELS, channels // GATE_REDUCTION)
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
    """Computes scales and shifts for the channels of several fields from global means of one field.

    Args:
        conditioned: channels of each field to scale and shift.

    Shapes:
        `(B, channels, H, W)` -> for each of `conditioned`, `(B, 2 * its channels, 1, 1)`; see
        `modulate`.

    Source: Perez et al. 2018, conditioned on global means.
    """

    def __init__(self, channels: int, conditioned: Sequence[int]) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.hidden = nn.Linear(channels, channels)
        self.heads = nn.ModuleList(nn.Linear(channels, 2 * width) for width in conditioned)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the scale and shift of every field, the two joined in the channels."""
        hidden = F.silu(self.hidden(self.pool(x)[..., 0, 0]))
        return [head(hidden)[..., None, None] for head in self.heads]


def modulate(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    """Return `x * (1 + scale) + shift`.

    Shapes:
        `(B, C, H, W)`, `(B, 2 * C, 1, 1)` -> `(B, C, H, W)`.
    """
    scale, shift = scale_and_shift.chunk(2, 1)
    return x * (1 + scale) + shift


EXPANSION = 4  # hidden channels of a `GlobalDepthwiseBlock` per output channel


@final
class LongRangeConv2d(nn.Conv2d):
    """A depthwise convolution, by default periodic in longitude, with zeros beyond the poles.

    A kernel of `2 * H - 1` rows connects every row with every other; more rows have no effect.

    Args:
        kernel: odd numbers of rows and columns. More columns than the globe has wrap around it
            several times.
        column_mode: `circular`, or as `row_mode`.

    Shapes:
        `(B, channels, H, W)` -> the same.
    """

    def __init__(
        self,
        channels: int,
        kernel: tuple[int, int],
        row_mode: str = "zeros",
        column_mode: str = "circular",
    ) -> None:
        rows, columns = (size // 2 for size in kernel)
        is_circular = column_mode == "circular"
        super().__init__(
            channels,
            channels,
            kernel,
            padding=(rows, 0 if is_circular else columns),
            groups=channels,
            padding_mode=row_mode,  # type: ignore[arg-type]
        )
        self.column_padding = columns if is_circular else 0  # circular, added in `forward`

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        remaining = self.column_padding
        while remaining:
            # One call pads by the width of its input at most. The padded field is periodic as well,
            # so padding it again continues the globe.
            columns = min(remaining, x.shape[-1])
            x = pad_columns(x, columns)
            remaining -= columns
        return super().forward(x)


@final
class GlobalDepthwiseBlock(nn.Module):
    """A residual block: a long-range convolution of every channel, then two pointwise layers.

    Args:
        config: size of the kernel, groups of the norm, dropout, noise, and whether there is a gate.
        modes: of padding of rows and of columns, see `LongRangeConv2d`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Liu et al. 2022, with kernels as large as those of Ding et al. 2022.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        config: UNetConfig,
        rate: float,
        modes: tuple[str, str],
    ) -> None:
        super().__init__()
        rows, columns = config.kernel
        hidden = EXPANSION * out_channels
        self.norm = nn.GroupNorm(config.groups, in_channels)
        self.noise = NoiseModulation(config.noise, in_channels) if config.noise else None
        self.mix = LongRangeConv2d(in_channels, (rows, columns), *modes)
        self.expand = nn.Conv2d(in_channels, hidden, 1)
        self.project = nn.Conv2d(hidden, out_channels, 1)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.gate = SqueezeExcite(out_channels) if config.squeeze_excite else None
        self.depth = StochasticDepth(rate) if rate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = self.norm(x)
        y = y if self.noise is None else self.noise(y)
        y = F.gelu(self.expand(self.mix(y)))
        for layer in (self.dropout, self.project, self.gate, self.depth):
            y = y if layer is None else layer(y)
        return self.shortcut(x) + y  # type: ignore[no-any-return]


@final
class PeriodicConv2d(nn.Module):
    """A convolution on the globe: circular in longitude, `poles` in latitude.

    On a region `model.edges` takes the place of both, or of `poles` alone.

    Args:
        kernel_size: number of rows and columns; even ones need an even stride.
        poles: padding beyond the first and last row, see `PolePad`.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, ceil(H / stride), ceil(W / stride))`; rounded
        down for an even kernel.

    Raises:
        ValueError: an even kernel has an odd stride, so it would be centred on no output point.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        poles: str = "reflect",
        column_mode: str = "circular",
    ) -> None:
        super().__init__()
        is_odd = kernel_size % 2 == 1
        if not is_odd and (stride % 2 or kernel_size < stride):
            raise ValueError(f"PeriodicConv2d: kernel_size has to be odd, got {kernel_size}")
        self.padding = kernel_size // 2 if is_odd else (kernel_size - stride) // 2
        self.poles = poles
        self.column_mode = column_mode
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        x = pad_poles(x, self.padding, self.poles)
        x = pad_columns(x, self.padding, self.column_mode)
        return self.conv(x)  # type: ignore[no-any-return]


@final
class PeriodicUpsample(nn.Module):
    """Bilinear interpolation to twice the rows and columns, periodic and across the poles.

    Each point becomes four, a quarter of a grid spacing away from it. All four are means with the
    same set of weights, so there is no checkerboard.

    Args:
        poles: padding beyond the poles, see `PolePad`.

    Shapes:
        `(B, C, H, W)` -> `(B, C, 2 * H, 2 * W)`.
    """

    def __init__(self, poles: str = "reflect", column_mode: str = "circular") -> None:
        super().__init__()
        self.poles = poles
        self.column_mode = column_mode

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field."""
        # One more row or column on each side, and the two finer ones of each cut off again. Slices
        # would have gaps in memory, and gradients that lose the memory format.
        finer = self.refine(pad_columns(pad_poles(x, 1, self.poles), 1, self.column_mode))
        return F.pad(finer, (-2, -2, -2, -2))

    @staticmethod
    def refine(x: Tensor) -> Tensor:
        """Return twice the rows and columns; the outer two on each side lack a neighbour."""
        return F.interpolate(x, scale_factor=2, mode="bilinear")


@final
class MatchRows(nn.Module):
    """Crops a field to the rows and columns of a reference, at the south and the east.

    Shapes:
        `(B, C, H, W)`, `(B, D, h, w)` -> `(B, C, h, w)`.
    """

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        """Return the crop."""
        return x[..., : reference.shape[-2], : reference.shape[-1]]


@final
class ResidualBlock(nn.Module):
    """A residual block of two convolutions, each after a norm and an activation.

    Args:
        config: groups of the norms, dropout, noise, and whether there is a gate.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: He et al. 2016, pre-activation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        config: UNetConfig,
        rate: float,
        modes: tuple[str, str],
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, in_channels)
        self.conv1 = PeriodicConv2d(in_channels, out_channels, 3, 1, *modes)
        self.norm2 = nn.GroupNorm(config.groups, out_channels)
        self.conv2 = PeriodicConv2d(out_channels, out_channels, 3, 1, *modes)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        # None, not an identity, if an option is off: the model then has the same modules as models
        # built before the option existed.
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.gate = SqueezeExcite(out_channels) if config.squeeze_excite else None
        self.depth = StochasticDepth(rate) if rate else None
        self.noise1 = NoiseModulation(config.noise, in_channels) if config.noise else None
        self.noise2 = NoiseModulation(config.noise, out_channels) if config.noise else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = self.norm1(x)
        y = y if self.noise1 is None else self.noise1(y)
        y = self.norm2(self.conv1(F.silu(y)))
        y = F.silu(y if self.noise2 is None else self.noise2(y))
        for layer in (self.dropout, self.conv2, self.gate, self.depth):
            y = y if layer is None else layer(y)
        return self.shortcut(x) + y  # type: ignore[no-any-return]


# By `model.block`.
BLOCK_TYPES: dict[str, type[ResidualBlock] | type[GlobalDepthwiseBlock]] = {
    "residual": ResidualBlock,
    "global_depthwise": GlobalDepthwiseBlock,
}


def _build_level(
    first: int, channels: int, config: UNetConfig, rates: Sequence[float], modes: tuple[str, str]
) -> nn.Sequential:
    widths = pairwise([first] + [channels] * config.blocks)
    block_type = BLOCK_TYPES[config.block]
    blocks = zip(widths, rates, strict=True)
    return nn.Sequential(*(block_type(a, b, config, rate, modes) for (a, b), rate in blocks))


@final
class UNet(SegmentedModel):
    """Predicts a state, or its tendency over one step, from the input channels.

    Takes any number of rows and columns: each level has half of the finer one's, rounded up, and
    the decoder crops what it upsampled too far.

    Args:
        in_channels: prognostic, forcing and static channels.
        out_channels: prognostic and diagnostic channels.
        grid: of which only the edges count; by default the globe.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Ronneberger, Fischer & Brox 2015, with residual blocks.
    """

    def __init__(
        self,
        config: UNetConfig,
        in_channels: int,
        out_channels: int,
        grid: GridShape = GridShape((0, 0)),  # noqa: B008 (never changes)
    ) -> None:
        super().__init__()
        widths = config.channels
        modes = block_modes = padding_modes(config, grid)
        if grid.is_global and config.block == "global_depthwise":
            block_modes = ("zeros", modes[1])  # beyond the poles, where long kernels reach far
        steps = list(pairwise(widths))  # (finer, coarser), finest first
        encoder_rates, decoder_rates = _level_depth_rates(config)
        self.checkpointing = config.activation_checkpointing
        self.stem = PeriodicConv2d(in_channels, widths[0], 3, 1, *modes)
        self.encoder = nn.ModuleList(
            _build_level(w, w, config, rates, block_modes)
            for w, rates in zip(widths, encoder_rates, strict=True)
        )
        self.down = nn.ModuleList(PeriodicConv2d(a, b, 3, 2, *modes) for a, b in steps)
        self.up = nn.ModuleList(_build_upsampling(b, a, config.upsample, modes) for a, b in steps)
        # One layer for each height of the grid.
        self.crop = nn.ModuleList(MatchRows() for _ in steps)
        self.decoder = nn.ModuleList(
            _build_level(2 * a, a, config, rates, block_modes)
            for (a, _), rates in zip(steps, decoder_rates, strict=True)
        )
        self.norm = nn.GroupNorm(config.groups, widths[0])
        self.head = nn.Conv2d(widths[0], out_channels, 1)
        self.globe = _build_conditioning(config)

    def segments(self) -> list[Segment]:
        """Return the stem, every residual block and the head.

        The state is the field; the skip connections, finest first; and after the coarsest level the
        scales and shifts of the levels that are left, finest first.
        """
        stem = Segment("stem", lambda state: (self.stem(state[0]),), ("stem",))
        down = [
            self._encoder_segment(level, block)
            for level in range(len(self.encoder))
            for block in self._block_numbers(level)
        ]
        up = [
            self._decoder_segment(level, block)
            for level in reversed(range(len(self.decoder)))
            for block in self._block_numbers(level)
        ]
        return [stem, *down, *up, Segment("head", self._finish, ("norm", "head"))]

    def _block_numbers(self, level: int) -> range:
        return range(len(cast(nn.Sequential, self.encoder[level])))

    def _is_last(self, level: int, block: int) -> bool:
        return level == len(self.encoder) - 1 and block == self._block_numbers(level)[-1]

    def _encoder_segment(self, level: int, block: int) -> Segment:
        name = f"encoder.{level}.{block}"
        before = [f"down.{level - 1}"] if level and not block else []
        after = ["globe"] if self._is_last(level, block) else []
        modules = (*before, name, *after)
        return Segment(name, partial(self._encode, level, block), modules, is_recomputed=True)

    def _decoder_segment(self, level: int, block: int) -> Segment:
        name = f"decoder.{level}.{block}"
        before = [] if block else [f"up.{level}", f"crop.{level}"]
        modules = (*before, name)
        return Segment(name, partial(self._decode, level, block), modules, is_recomputed=True)

    def _encode(self, level: int, block: int, state: SegmentState) -> SegmentState:
        x, skips = state[0], list(state[1:])  # torch 2.11 compiles `x, *skips` as a tuple
        if level and not block:
            skips.append(x)
            x = self.down[level - 1](x)
        x = run_block(cast(nn.Sequential, self.encoder[level])[block], x, self.checkpointing)
        is_last = self._is_last(level, block)
        conditioning = self.globe(x) if is_last and self.globe is not None else []
        return x, *skips, *conditioning

    def _decode(self, level: int, block: int, state: SegmentState) -> SegmentState:
        x, rest = state[0], list(state[1:])
        # Both lists in `rest` are finest first, and levels run from the coarsest: this level's skip
        # connection is the last of those left, its scale and shift the last of all.
        if not block:
            skip = rest.pop(level)
            x = torch.cat([self.crop[level](self.up[level](x), skip), skip], 1)
        x = run_block(cast(nn.Sequential, self.decoder[level])[block], x, self.checkpointing)
        if self.globe is not None and block == self._block_numbers(level)[-1]:
            x = modulate(x, rest.pop())
        return x, *rest

    def _finish(self, state: SegmentState) -> SegmentState:
        return (self.head(F.silu(self.norm(state[0]))),)


def _build_upsampling(
    in_channels: int, out_channels: int, method: str, modes: tuple[str, str]
) -> nn.Module:
    if method == "transpose":
        return nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
    resize = nn.Upsample(scale_factor=2) if method == "nearest" else PeriodicUpsample(*modes)
    # The 1x1 convolution mixes the channels of a point, resizing mixes the points of a channel: the
    # two commute, except where zeros lie beyond an edge. Before resizing it costs a quarter.
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), resize)


def _level_depth_rates(config: UNetConfig) -> tuple[list[list[float]], list[list[float]]]:
    depth = len(config.channels)
    blocks = config.blocks
    rates = stochastic_depth_rates(config.stochastic_depth, (2 * depth - 1) * blocks)
    levels = [rates[start : start + blocks] for start in range(0, len(rates), blocks)]
    return levels[:depth], levels[:-depth:-1]  # both finest first; the decoder runs backwards


def _build_conditioning(config: UNetConfig) -> GlobalConditioning | None:
    if not config.global_conditioning:
        return None
    *finer, coarsest = config.channels
    return GlobalConditioning(coarsest, finer)


def build_unet(config: UNetConfig, fields: Fields, grid: GridShape) -> UNet:
    """Build the U-Net for these fields.

    Raises:
        UserError: the grid has too few rows or columns for the model's levels.
    """
    rows, columns = grid
    factor = 2 ** (len(config.channels) - 1)
    coarsest = -(-min(rows, columns) // factor)
    if coarsest < 2:
        raise UserError(
            f"model.channels: {len(config.channels)} levels need at least {factor + 1} rows and "
            f"columns, but the grid has {rows}x{columns}. Give fewer entries in model.channels"
            f"{grid.or_finer}."
        )
    is_reflected = not grid.is_global and config.edges == "reflect"
    widest = max(config.kernel[: 1 if grid.is_periodic else 2])
    if is_reflected and config.block == "global_depthwise" and widest > 2 * coarsest:
        raise UserError(
            f"model.kernel: can have up to {2 * coarsest - 1} rows and columns with model.edges="
            f"reflect, as the coarsest level has {coarsest}, got {widest}. Use a "
            "smaller model.kernel or model.edges=replicate."
        )
    if config.channels[0] < TINY_CHANNELS and rows > TINY_ROWS:
        logger.warning(
            "model=%s with %d channels is meant for small grids, but this one has %d rows; "
            "model=%s_base is meant for 721x1440",
            config.name,
            config.channels[0],
            rows,
            config.name,
        )
    return UNet(config, fields.inputs, fields.outputs, grid)

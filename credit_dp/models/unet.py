"""A residual U-Net on the globe: periodic in longitude, padded across the poles in latitude."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config.model import UNetConfig
from credit_dp.models.blocks import StochasticDepth, pad_poles, run_block, stochastic_depth_rates
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState

GATE_REDUCTION = 16
MIN_GATE_CHANNELS = 4  # hidden channels of a gate


@final
class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1) that all channels' global means decide on.

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


def modulate(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    """Return `x * (1 + scale) + shift`.

    Shapes:
        `(B, C, H, W)`, `(B, 2 * C, 1, 1)` -> `(B, C, H, W)`.
    """
    scale, shift = scale_and_shift.chunk(2, 1)
    return x * (1 + scale) + shift


# Channels between the two pointwise layers, for each that comes out.
EXPANSION = 4


@final
class LongRangeConv2d(nn.Conv2d):
    """A depthwise convolution, around the globe in longitude, with zeros beyond the poles.

    Kernels of `2 * H - 1` rows reach from every row to every other; more change nothing.

    Args:
        channels: of the input.
        kernel: rows and columns, odd. More columns than the globe has go around several times.

    Shapes:
        `(B, channels, H, W)` -> the same.
    """

    def __init__(self, channels: int, kernel: tuple[int, int]) -> None:
        rows, columns = kernel
        super().__init__(channels, channels, kernel, padding=(rows // 2, 0), groups=channels)
        self.column_padding = columns // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        left = self.column_padding
        while left:  # by a whole globe at most: what is around it then repeats it, too
            turn = min(left, x.shape[-1])
            x = F.pad(x, (turn, turn, 0, 0), mode="circular")
            left -= turn
        return super().forward(x)


@final
class GlobalDepthwiseBlock(nn.Module):
    """A long-range convolution of every channel and two pointwise layers, beside a shortcut.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        config: size of the kernel, groups of the norm, dropout, and whether there is a gate.
        rate: of samples that lose all but the shortcut in a training step.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Liu et al. 2022, with kernels as large as those of Ding et al. 2022.
    """

    def __init__(
        self, in_channels: int, out_channels: int, config: UNetConfig, rate: float
    ) -> None:
        super().__init__()
        rows, columns = config.kernel
        hidden = EXPANSION * out_channels
        self.norm = nn.GroupNorm(config.groups, in_channels)
        self.mix = LongRangeConv2d(in_channels, (rows, columns))
        self.expand = nn.Conv2d(in_channels, hidden, 1)
        self.project = nn.Conv2d(hidden, out_channels, 1)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.gate = SqueezeExcite(out_channels) if config.squeeze_excite else None
        self.depth = StochasticDepth(rate) if rate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = F.gelu(self.expand(self.mix(self.norm(x))))
        for layer in (self.dropout, self.project, self.gate, self.depth):
            y = y if layer is None else layer(y)
        return self.shortcut(x) + y  # type: ignore[no-any-return]


@final
class PeriodicConv2d(nn.Module):
    """A convolution on the globe: circular in longitude, `poles` in latitude.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: number of rows and columns; even ones need an even stride.
        stride: step in rows and columns.
        poles: what lies beyond the first and last row. `reflect`: the rows before it without the
            last one; `zeros`; `mirror`: the rows before it; `earth`: those, rotated by half the
            longitudes, as a walk across the pole meets them.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, ceil(H / stride), ceil(W / stride))`; rounded
        down for an even kernel.

    Raises:
        ValueError: an even kernel has an odd stride: then it is centred on no output point.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        poles: str = "reflect",
    ) -> None:
        super().__init__()
        odd = kernel_size % 2 == 1
        if not odd and (stride % 2 or kernel_size < stride):
            raise ValueError(f"PeriodicConv2d: kernel_size has to be odd, got {kernel_size}")
        self.padding = kernel_size // 2 if odd else (kernel_size - stride) // 2
        self.poles = poles
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        x = pad_poles(x, self.padding, self.poles)
        x = F.pad(x, (self.padding, self.padding, 0, 0), mode="circular")
        return self.conv(x)  # type: ignore[no-any-return]


@final
class PeriodicUpsample(nn.Module):
    """Bilinear interpolation to twice the rows and columns, around the globe and across the poles.

    Every point becomes four, a quarter of a spacing away from it. All of them are means with the
    same weights, so none stands out among the four: there is no checkerboard.

    Args:
        poles: what lies beyond the poles, see `PeriodicConv2d`.

    Shapes:
        `(B, C, H, W)` -> `(B, C, 2 * H, 2 * W)`.
    """

    def __init__(self, poles: str = "reflect") -> None:
        super().__init__()
        self.poles = poles

    def forward(self, x: Tensor) -> Tensor:
        """Return the finer field."""
        return self.refine(pad_poles(x, 1, self.poles))[..., 2:-2, :]

    @staticmethod
    def refine(x: Tensor) -> Tensor:
        """Return the finer rows; the first two and the last two lack what lies beyond them."""
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return F.interpolate(x, scale_factor=2, mode="bilinear")[..., 2:-2]


@final
class MatchRows(nn.Module):
    """Crops to the rows and columns of a reference, from the south and the east.

    Shapes:
        `(B, C, H, W)`, `(B, D, h, w)` -> `(B, C, h, w)`.
    """

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        """Return the crop."""
        return x[..., : reference.shape[-2], : reference.shape[-1]]


@final
class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut (He et al. 2016, pre-activation).

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        config: groups of the norms, poles, dropout, and whether there is a gate.
        rate: of samples that lose the convolutions in a training step.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, config: UNetConfig, rate: float
    ) -> None:
        super().__init__()
        groups, poles = config.groups, config.poles
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = PeriodicConv2d(in_channels, out_channels, poles=poles)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = PeriodicConv2d(out_channels, out_channels, poles=poles)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        # None where an option is off: then the model has the modules that it had without it.
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.gate = SqueezeExcite(out_channels) if config.squeeze_excite else None
        self.depth = StochasticDepth(rate) if rate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the convolutions add."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = F.silu(self.norm2(y))
        for layer in (self.dropout, self.conv2, self.gate, self.depth):
            y = y if layer is None else layer(y)
        return self.shortcut(x) + y  # type: ignore[no-any-return]


# By their names in `model.block`.
BLOCK_TYPES: dict[str, type[ResidualBlock] | type[GlobalDepthwiseBlock]] = {
    "residual": ResidualBlock,
    "global_depthwise": GlobalDepthwiseBlock,
}


def _build_level(
    first: int, channels: int, config: UNetConfig, rates: Sequence[float]
) -> nn.Sequential:
    """Return the blocks of one level."""
    pairs = pairwise([first] + [channels] * config.blocks)
    block = BLOCK_TYPES[config.block]
    blocks = zip(pairs, rates, strict=True)
    return nn.Sequential(*(block(a, b, config, rate) for (a, b), rate in blocks))


@final
class UNet(SegmentedModel):
    """Predicts the tendency of the prognostic channels over one step.

    Any number of rows and columns: a level has half of the finer one's, rounded up, and the way
    back up crops to it.

    Args:
        config: channels of each level, finest first; blocks per level and their kind; groups of
            the norms; poles; upsampling; what blocks have besides.
        in_channels: prognostic, forcing and static channels.
        out_channels: prognostic and diagnostic channels.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.

    Source: Ronneberger, Fischer & Brox 2015, with residual blocks.
    """

    row_rules: ClassVar[dict[type[nn.Module], str]] = {
        PeriodicConv2d: "periodic_conv",
        PeriodicUpsample: "periodic_upsample",
        LongRangeConv2d: "long_range_conv",
        MatchRows: "match_rows",
        StochasticDepth: "stochastic_depth",
    }

    def __init__(self, config: UNetConfig, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widths, poles = config.channels, config.poles
        steps = list(pairwise(widths))  # (finer, coarser), finest first
        encoder_rates, decoder_rates = _level_depth_rates(config)
        self.checkpointing = config.activation_checkpointing
        self.stem = PeriodicConv2d(in_channels, widths[0], poles=poles)
        self.encoder = nn.ModuleList(
            _build_level(w, w, config, rates)
            for w, rates in zip(widths, encoder_rates, strict=True)
        )
        self.down = nn.ModuleList(PeriodicConv2d(a, b, stride=2, poles=poles) for a, b in steps)
        self.up = nn.ModuleList(_build_upsampling(b, a, config) for a, b in steps)
        self.crop = nn.ModuleList(MatchRows() for _ in steps)  # one for each height
        self.decoder = nn.ModuleList(
            _build_level(2 * a, a, config, rates)
            for (a, _), rates in zip(steps, decoder_rates, strict=True)
        )
        self.norm = nn.GroupNorm(config.groups, widths[0])
        self.head = nn.Conv2d(widths[0], out_channels, 1)
        self.globe = _build_conditioning(config)

    def segments(self) -> list[Segment]:
        """Return the stem, every residual block and the head.

        The state is the field; the fields that go across, finest first; then, once the coarsest
        level is known, what conditions the levels that are left, finest first.
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
        return Segment(name, partial(self._encode, level, block), (*before, name, *after))

    def _decoder_segment(self, level: int, block: int) -> Segment:
        name = f"decoder.{level}.{block}"
        before = [] if block else [f"up.{level}", f"crop.{level}"]
        return Segment(name, partial(self._decode, level, block), (*before, name))

    def _encode(self, level: int, block: int, state: SegmentState) -> SegmentState:
        x, *skips = state
        if level and not block:
            skips.append(x)
            x = self.down[level - 1](x)
        x = run_block(cast(nn.Sequential, self.encoder[level])[block], x, self.checkpointing)
        is_last = self._is_last(level, block)
        known = self.globe(x) if is_last and self.globe is not None else []
        return x, *skips, *known

    def _decode(self, level: int, block: int, state: SegmentState) -> SegmentState:
        x, *rest = state
        if not block:
            skip = rest.pop(level)
            x = torch.cat([self.crop[level](self.up[level](x), skip), skip], 1)
        x = run_block(cast(nn.Sequential, self.decoder[level])[block], x, self.checkpointing)
        if self.globe is not None and block == self._block_numbers(level)[-1]:
            x = modulate(x, rest.pop())
        return x, *rest

    def _finish(self, state: SegmentState) -> SegmentState:
        return (self.head(F.silu(self.norm(state[0]))),)


def _build_upsampling(in_channels: int, out_channels: int, config: UNetConfig) -> nn.Module:
    """Return the module that doubles rows and columns and lowers the number of channels.

    The 1x1 convolution mixes the channels of a point, resizing mixes the points of a channel. Their
    order makes no difference but where zeros lie beyond the poles, and before resizing there are a
    quarter of the points.
    """
    if config.upsample == "transpose":
        return nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
    nearest = config.upsample == "nearest"
    resize = nn.Upsample(scale_factor=2) if nearest else PeriodicUpsample(config.poles)
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), resize)


def _level_depth_rates(config: UNetConfig) -> tuple[list[list[float]], list[list[float]]]:
    """Return the rates of each level's blocks, encoder and decoder, both finest first."""
    depth, blocks = len(config.channels), config.blocks
    rates = stochastic_depth_rates(config.stochastic_depth, (2 * depth - 1) * blocks)
    levels = [rates[at : at + blocks] for at in range(0, len(rates), blocks)]
    return levels[:depth], levels[:-depth:-1]  # the decoder is passed from the coarsest


def _build_conditioning(config: UNetConfig) -> GlobalConditioning | None:
    if not config.global_conditioning:
        return None
    *finer, coarsest = config.channels
    return GlobalConditioning(coarsest, finer)

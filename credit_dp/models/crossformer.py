"""The CrossFormer: a U-shaped transformer of short- and long-distance attention on the globe."""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import prod
from typing import ClassVar, cast, final

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.model_config import CrossFormerConfig
from credit_dp.models.blocks import StochasticDepth, depth_rates, run_block
from credit_dp.models.cross_attention import LongAttention, ShortAttention
from credit_dp.models.cross_decoder import SubPixelConv, UpBlock
from credit_dp.models.cross_level import cross_level
from credit_dp.models.padding import PolePad
from credit_dp.models.segments import Segment, SegmentedModel, State
from credit_dp.models.unet import PeriodicConv2d


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
        ShortAttention: "row_groups",
        LongAttention: "row_groups",
        StochasticDepth: "stochastic_depth",
    }

    def __init__(self, config: CrossFormerConfig, fields: Fields, grid: tuple[int, int]) -> None:
        super().__init__()
        self.again = config.activation_checkpointing
        padded = _padded_grid(config, grid)
        _check_kernels(config, padded)
        widths, steps, poles = config.channels, config.strides, config.poles
        rates = iter(depth_rates(config.stochastic_depth, sum(config.depths)))
        self.enlarge, self.crop = _enlarge(grid, padded, poles), _crop(grid, padded)
        self.levels = nn.ModuleList(
            cross_level(config, level, first, list(islice(rates, config.depths[level])))
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

    def _encode(self, level: int, block: int, state: State) -> State:
        x, *skips = state
        parts = cast(nn.ModuleDict, self.levels[level])
        if not block:
            skips += [x] if level else []
            x = parts["embedding"](x if level else self.enlarge(x)).permute(0, 2, 3, 1)
        x = run_block(cast(nn.ModuleList, parts["blocks"])[block], x, self.again)
        if block == self._depth(level) - 1:
            x = x.permute(0, 3, 1, 2)
        return x, *skips

    def _decode(self, step: int, state: State) -> State:
        x, *skips = state
        return torch.cat([self.decoder[step](x), skips[-1]], 1), *skips[:-1]

    def _finish(self, state: State) -> State:
        return (self.crop(self.head(state[0])),)


def _padded_grid(config: CrossFormerConfig, grid: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (-(-size // config.multiple) * config.multiple for size in grid)
    if any(-(-(wide - size) // 2) > size for wide, size in zip((rows, columns), grid, strict=True)):
        raise UserError(
            f"model.local_windows: with model.global_windows and model.strides, whole windows need "
            f"a multiple of {config.multiple} rows and columns; the grid has {grid[0]}x{grid[1]}, "
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


def _enlarge(grid: tuple[int, int], padded: tuple[int, int], poles: str) -> nn.Sequential:
    """Pad both sides alike; where one more than is missing, take it off in the south or east."""
    if grid == padded:
        return nn.Sequential()
    missing = [wide - size for wide, size in zip(padded, grid, strict=True)]
    rows, columns = (-(-count // 2) for count in missing)
    surplus = (0, -(missing[1] % 2), 0, -(missing[0] % 2))
    layers: list[nn.Module] = [PolePad(rows, poles, columns)]
    return nn.Sequential(*layers, *([nn.ZeroPad2d(surplus)] if any(surplus) else []))


def _crop(grid: tuple[int, int], padded: tuple[int, int]) -> nn.Module:
    """Undo what `_enlarge` does."""
    if grid == padded:
        return nn.Identity()
    (south, north), (east, west) = (
        ((wide - size) // 2, -(-(wide - size) // 2))
        for wide, size in zip(padded, grid, strict=True)
    )
    return nn.ZeroPad2d((-west, -east, -north, -south))

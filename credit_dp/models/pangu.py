"""A Pangu-style transformer: Earth-specific attention in windows, at two resolutions."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn

from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.model_config import PanguConfig
from credit_dp.models.blocks import StochasticDepth, depth_rates, drop_depth, run_block
from credit_dp.models.cube_embedding import CubeEmbedding, CubeRecovery, cubes
from credit_dp.models.earth_attention import EarthAttention, Size
from credit_dp.models.segments import Segment, SegmentedModel, State

CHANNELS_FIRST = (0, 1, 4, 2, 3)  # (B, levels, rows, columns, C) -> (B, levels, C, rows, columns)
CHANNELS_LAST = (0, 1, 3, 4, 2)
# Before which block of which stage the resolution changes, and by what.
CHANGES = {(1, 0): ("down",), (3, 0): ("up",)}
FIRST_GAIN = 0.1  # of the norms at the end of a block's branches


@final
class EarthBlock(nn.Module):
    """Attention in windows and a perceptron, each normalised before it is added to its input.

    Shapes:
        `(B, levels, H, columns, width)` -> the same.

    Source: Bi et al. 2023; the norm's place as in Liu et al. 2022.
    """

    def __init__(self, attention: EarthAttention, width: int, config: PanguConfig, rate: float):
        super().__init__()
        hidden = config.mlp_ratio * width
        self.attention = nn.Sequential(
            attention, nn.Dropout(config.dropout), nn.LayerNorm(width), drop_depth(rate)
        )
        self.perceptron = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, width),
            nn.Dropout(config.dropout),
            nn.LayerNorm(width),
            drop_depth(rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the two branches add."""
        x = x + self.attention(x)
        return x + self.perceptron(x)  # type: ignore[no-any-return]


@final
class Down(nn.Module):
    """Joins two by two tokens of a level to one of twice the channels.

    Shapes:
        `(B, levels, H, W, width)` -> `(B, levels, ceil(H / 2), ceil(W / 2), 2 * width)`.
    """

    def __init__(self, width: int, rows: int, columns: int) -> None:
        super().__init__()
        self.join = nn.Sequential(nn.ZeroPad2d((0, columns % 2, 0, rows % 2)), nn.PixelUnshuffle(2))
        self.mix = nn.Sequential(
            nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of the coarser resolution."""
        return self.mix(self.join(x.permute(CHANNELS_FIRST)).permute(CHANNELS_LAST))  # type: ignore[no-any-return]


@final
class Up(nn.Module):
    """Splits each token into two by two of half the channels.

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
    """Predicts the tendency of a state from cubes of its variables on levels and the surface.

    Four stages: the first and the last at the resolution of the cubes, the others at half of it.

    Args:
        config: widths, depths, heads, patches and windows.
        fields: which channels are on which levels.
        grid: rows and columns of the globe.

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

    def __init__(self, config: PanguConfig, fields: Fields, grid: tuple[int, int]) -> None:
        super().__init__()
        _check(config, fields, grid)
        size, patch = (fields.levels, *grid), cast(Size, tuple(config.patch))
        fine, width = cubes(size, patch), config.width
        self.checkpointing = config.activation_checkpointing
        self.embedding = CubeEmbedding(fields, size, patch, width)
        levels = fine[0] + (self.embedding.surface is not None)
        globes = [(levels, *fine[1:]), (levels, -(-fine[1] // 2), -(-fine[2] // 2))]
        rates = iter(depth_rates(config.stochastic_depth, sum(config.depths)))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                EarthBlock(
                    EarthAttention(
                        factor * width,
                        config.heads[stage],
                        globes[factor - 1],
                        cast(Size, tuple(config.window)),
                        shifted=block % 2 == 1,
                    ),
                    factor * width,
                    config,
                    next(rates),
                )
                for block in range(config.depths[stage])
            )
            for stage, factor in enumerate((1, 2, 2, 1))
        )
        self.down = Down(width, *fine[1:])
        self.up = Up(width, *fine[1:])
        self.recovery = CubeRecovery(fields, size, patch, 2 * width)
        self.apply(_initialise)

    def segments(self) -> list[Segment]:
        """Return the embedding, every block and the recovery.

        The state is the tokens and, from the second stage on, those of the first.
        """
        embedding = Segment("embedding", self._embed, ("embedding",))
        blocks = [
            Segment(
                f"stages.{stage}.{block}",
                partial(self._block, stage, block),
                (*CHANGES.get((stage, block), ()), f"stages.{stage}.{block}"),
            )
            for stage, blocks in enumerate(self.stages)
            for block in range(len(cast(nn.ModuleList, blocks)))
        ]
        return [embedding, *blocks, Segment("recovery", self._recover, ("recovery",))]

    def _embed(self, state: State) -> State:
        return (self.embedding(state[0]).permute(0, 2, 3, 4, 1),)

    def _block(self, stage: int, block: int, state: State) -> State:
        x, *rest = state
        if (stage, block) in CHANGES:
            rest = rest or [x]  # what the first stage made goes across
            for name in CHANGES[stage, block]:
                x = self.get_submodule(name)(x)
        layer = cast(nn.ModuleList, self.stages[stage])[block]
        return run_block(layer, x, self.checkpointing), *rest

    def _recover(self, state: State) -> State:
        x, skip = state
        return (self.recovery(torch.cat([skip, x], -1).permute(0, 4, 1, 2, 3)),)


def _check(config: PanguConfig, fields: Fields, grid: tuple[int, int]) -> None:
    if not fields.levels:
        raise UserError(
            "model.name: pangu needs variables on levels, but data.prognostic has none. Add "
            "temperature, or another one on levels, to data.prognostic, or choose model=unet."
        )
    if min(-(-n // p) for n, p in zip(grid, config.patch[1:], strict=True)) < 3:
        rows, columns = (2 * patch + 1 for patch in config.patch[1:])
        raise UserError(
            f"model.patch: {list(config.patch)} needs a grid of at least {rows} rows and {columns} "
            f"columns, got {grid[0]}x{grid[1]}. Give a smaller model.patch or a finer data.grid."
        )


def _initialise(module: nn.Module) -> None:
    """Draw what the layers of a model begin with.

    Of a sum of blocks that are normalised at their end little of the input would be left: they
    begin small. Weights go by the width, as small models train slowly from the 0.02 of large ones.
    """
    if isinstance(module, EarthBlock):
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm):
                nn.init.constant_(layer.weight, FIRST_GAIN)
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
    if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        nn.init.trunc_normal_(module.weight, std=0.02)
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear | nn.ConvTranspose2d | nn.ConvTranspose3d) and bias is not None:
        nn.init.zeros_(bias)

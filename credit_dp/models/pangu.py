"""A Pangu-style transformer: Earth-specific attention in windows, at two resolutions.

First attention, then the embedding of cubes and its inverse, and at the end `Pangu`, four stages of
a `WindowTransformer`.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import cast, final

import torch
from torch import Tensor, nn

from credit_dp.config.model import PanguConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.shifted_windows import (
    PAD_3D,
    Size,
    WindowAttention,
    WindowTransformer,
    check_patches,
    embed_patches,
    initialise,
    patch_counts,
    patch_padding,
    recover_patches,
)


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


@final
class EarthAttention(WindowAttention):
    """Attention in windows whose biases depend on the place on Earth.

    Windows on the same levels and rows share one bias table, whatever their longitude; others have
    different tables. For arguments and shapes see `WindowAttention`.

    Source: Bi et al. 2023.
    """

    def add_biases(self) -> None:
        """Add the tables."""
        levels, rows, columns = self.window
        entries = levels**2 * rows**2 * (2 * columns - 1)
        self.table = nn.Parameter(torch.empty(*self.counts[:2], self.heads, entries))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("index", bias_index(self.window), persistent=False)

    def pair_bias(self, groups: slice) -> Tensor:
        """Return the entries of the tables; see `WindowAttention.pair_bias`."""
        tokens = prod(self.window)
        table = self.table[:, groups].flatten(0, 2)
        return table.index_select(1, cast(Tensor, self.index)).view(len(table), tokens, tokens)


@final
class CubeEmbedding(nn.Module):
    """Embeds cubes of upper-air fields, and patches of surface fields, as tokens.

    Surface fields, forcings and static fields become tokens of an additional last level, if there
    are any.

    Args:
        patch: levels, rows and columns of a cube. Padding completes the last cubes.
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
        pads = cast(tuple[int, int, int, int, int, int], patch_padding(size, patch, 1))
        self.upper = nn.Sequential(
            PAD_3D[edges](pads), nn.Conv3d(len(upper) // size[0], width, patch, patch)
        )
        self.surface = None
        if surface:
            self.surface = embed_patches(len(surface), width, size[1:], patch[1:], edges)

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
        self.levels = patch_counts(size, patch)[0]
        pads = cast(tuple[int, int, int, int, int, int], patch_padding(size, patch, -1))
        self.upper = nn.Sequential(
            nn.ConvTranspose3d(width, len(fields.upper), patch, patch), nn.ZeroPad3d(pads)
        )
        self.surface = None
        if surface:
            self.surface = recover_patches(width, len(surface), size[1:], patch[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Return the output channels."""
        y: Tensor = self.upper(x[:, :, : self.levels]).flatten(1, 2)
        if self.surface is not None:
            y = torch.cat([y, self.surface(x[:, :, -1])], 1)
        return y.index_select(1, cast(Tensor, self.order))


@final
class Pangu(WindowTransformer):
    """Predicts a state, or its tendency over one step, from cubes of fields on levels.

    Four stages: the first and the last at the resolution of the cubes, the others at half of it.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: no variable is on levels, or the grid is too small.

    Source: Bi et al. 2023, Accurate medium-range global weather forecasting with 3D neural
    networks.
    """

    def __init__(self, config: PanguConfig, fields: Fields, grid: GridShape) -> None:
        super().__init__()
        _check_fit(config, fields, grid)
        edges = "zeros" if grid.is_global else config.edges
        size = (fields.levels, *grid)
        patch = cast(Size, tuple(config.patch))
        fine = cast(Size, patch_counts(size, patch))
        self.embedding = CubeEmbedding(fields, size, patch, config.width, edges)
        levels = fine[0] + (self.embedding.surface is not None)
        window = cast(Size, tuple(config.window))
        self.build_stages(config, grid, EarthAttention, (levels, *fine[1:]), window)
        self.recovery = CubeRecovery(fields, size, patch, 2 * config.width)
        self.apply(initialise)


def _check_fit(config: PanguConfig, fields: Fields, grid: GridShape) -> None:
    if not fields.levels:
        raise UserError(
            "model.name: pangu needs variables on levels, but data.prognostic has none. Add "
            "temperature, or another variable on levels, to data.prognostic, or use model=unet."
        )
    padding = patch_padding((fields.levels, *grid), config.patch, 1)[-1]
    if not grid.is_global and config.edges == "reflect" and padding >= fields.levels:
        raise UserError(
            f"model.edges: reflect can't complete cubes of {config.patch[0]} levels from "
            f"{fields.levels}. Use a smaller model.patch or model.edges=replicate."
        )
    check_patches(config, grid)

"""Between the channels of a state and cubes of levels, rows and columns, which are the tokens."""

from __future__ import annotations

from itertools import chain
from typing import cast, final

import torch
from torch import Tensor, nn

from credit_dp.fields import Fields
from credit_dp.models.earth_attention import Size


def cubes(size: Size, patch: Size) -> Size:
    """Return how many cubes there are in each dimension, with zeros beyond the last one."""
    return cast(Size, tuple(-(-s // p) for s, p in zip(size, patch, strict=True)))


def margin(size: Size, patch: Size, sign: int) -> tuple[int, ...]:
    """Return the pads to whole cubes in torch's order: in the east, the south, the last levels."""
    whole = cubes(size, patch)
    missing = (sign * (n * p - s) for n, p, s in zip(whole, patch, size, strict=True))
    return tuple(chain(*((0, pad) for pad in reversed(tuple(missing)))))


@final
class CubeEmbedding(nn.Module):
    """Makes one token of each cube of upper-air values, and of each patch at the surface.

    What is on no level, and forcings and statics, lies one level beyond the last one. If there is
    nothing of that kind, there is no such level.

    Args:
        fields: what the channels are.
        size: levels, rows and columns.
        patch: levels, rows and columns of a cube. Zeros at the end fill the last one.
        width: channels of a token.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, width, levels, rows, columns)`.

    Source: Bi et al. 2023.
    """

    def __init__(self, fields: Fields, size: Size, patch: Size, width: int) -> None:
        super().__init__()
        starts = [frame * fields.states for frame in range(fields.frames)]
        upper = [start + channel for start in starts for channel in chain(*fields.upper)]
        surface = [start + channel for start in starts for channel in fields.surface]
        surface += range(fields.inputs - fields.others, fields.inputs)
        self.levels = size[0]
        self.register_buffer("upper_channels", torch.tensor(upper), persistent=False)
        self.register_buffer("surface_channels", torch.tensor(surface), persistent=False)
        pads = margin(size, patch, 1)
        self.upper = nn.Sequential(
            nn.ZeroPad3d(cast(tuple[int, int, int, int, int, int], pads)),
            nn.Conv3d(len(upper) // size[0], width, patch, patch),
        )
        self.surface = None
        if surface:
            self.surface = nn.Sequential(
                nn.ZeroPad2d(cast(tuple[int, int, int, int], pads[:4])),
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
    """Makes a state of tokens, its channels in their order, and what only comes out after them.

    Whatever is on no level, and all that only comes out, is made of the last level of tokens.

    Args:
        fields: what the channels are.
        size: levels, rows and columns; what a cube has beyond them is cut off.
        patch: levels, rows and columns of a cube.
        width: channels of a token.

    Shapes:
        `(B, width, levels, rows, columns)` -> `(B, fields.outputs, H, W)`.

    Source: Bi et al. 2023.
    """

    def __init__(self, fields: Fields, size: Size, patch: Size, width: int) -> None:
        super().__init__()
        last = [*fields.surface, *range(fields.states, fields.outputs)]
        made = [*chain(*fields.upper), *last]
        order = sorted(range(len(made)), key=made.__getitem__)
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.levels = cubes(size, patch)[0]
        pads = margin(size, patch, -1)
        self.upper = nn.Sequential(
            nn.ConvTranspose3d(width, len(fields.upper), patch, patch),
            nn.ZeroPad3d(cast(tuple[int, int, int, int, int, int], pads)),
        )
        self.surface = None
        if last:
            self.surface = nn.Sequential(
                nn.ConvTranspose2d(width, len(last), patch[1:], patch[1:]),
                nn.ZeroPad2d(cast(tuple[int, int, int, int], pads[:4])),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the state."""
        made: Tensor = self.upper(x[:, :, : self.levels]).flatten(1, 2)
        if self.surface is not None:
            made = torch.cat([made, self.surface(x[:, :, -1])], 1)
        return made.index_select(1, cast(Tensor, self.order))

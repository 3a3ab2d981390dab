"""Padding on the globe: across the poles in latitude, around in longitude."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POLES = ("zeros", "replicate", "reflect", "mirror", "earth")


def pad_poles(x: Tensor, width: int, poles: str) -> Tensor:
    """Add `width` rows beyond each pole; see `PolePad` for what they hold.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W)`.

    Raises:
        ValueError: the globe has too few rows for what lies beyond its poles.
    """
    if not width:
        return x
    if poles == "zeros":
        return F.pad(x, (0, 0, width, width))
    if poles == "replicate":
        return F.pad(x, (0, 0, width, width), mode="replicate")
    rows = x.shape[-2]
    widest = rows - 1 if poles == "reflect" else rows
    if width > widest:
        raise ValueError(
            f"pad_poles: {width} rows beyond each pole need as many on the globe to show, which "
            f"has {widest} for poles={poles}. Use a finer grid or less padding."
        )
    if poles == "reflect":
        return F.pad(x, (0, 0, width, width), mode="reflect")
    north, south = x[..., :width, :].flip(-2), x[..., -width:, :].flip(-2)
    if poles == "earth":
        north, south = (beyond.roll(x.shape[-1] // 2, -1) for beyond in (north, south))
    return torch.cat([north, x, south], -2)


@final
class PolePad(nn.Module):
    """Pads a field on the globe: by what `poles` says in latitude, around in longitude.

    On the globe nothing ends at a pole: who walks across comes down on the other side, meets the
    rows of before in the opposite order, and finds each at the longitude turned by 180 degrees.
    That is `earth`. A scalar stays what it is there; the components of a vector change sign, which
    is left to the caller.

    Args:
        width: rows beyond each pole, up to all that the globe has.
        poles: what they hold. `earth`: the rows before them, turned by half the longitudes, which
            for an odd number of columns are `W // 2` to the east, half a column short of the
            opposite side; `mirror`: the rows before them; `reflect`: those without the last one,
            for grids with a row on the pole; `replicate`: the last one; `zeros`.
        columns: columns beyond the first and the last one; by default `width`.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W + 2 * columns)`.

    Raises:
        ValueError: `poles` is unknown, a width is negative, or the globe has too few rows.
    """

    def __init__(self, width: int, poles: str = "mirror", columns: int | None = None) -> None:
        super().__init__()
        if poles not in POLES:
            raise ValueError(f"PolePad: poles has to be one of {', '.join(POLES)}, got {poles}")
        self.width = width
        self.poles = poles
        self.columns = width if columns is None else columns
        if min(self.width, self.columns) < 0:
            raise ValueError(f"PolePad: widths can't be negative, got {self.extra_repr()}")

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded field."""
        x = pad_poles(x, self.width, self.poles)
        return F.pad(x, (self.columns, self.columns, 0, 0), mode="circular")

    def extra_repr(self) -> str:
        """Describe the widths."""
        return f"width={self.width}, poles={self.poles}, columns={self.columns}"

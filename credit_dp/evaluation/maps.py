"""What maps show, before anything is drawn: cells, coasts, and the fields of one.

Coasts are the Earth's, or those of a simulated planet. The Earth's are in `coastlines.npz`, which
`scripts/make_coastlines.py` makes: Natural Earth's land at 1:110 million (public domain), as the
npm package world-atlas (ISC) carries it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.quickstart.dynamics import TITLE
from credit_dp.data.sources.base import Source

LAND_MASK = "land_sea_mask"
FULL_CIRCLE = 360.0

Lines = NDArray[np.floating]  # (N, 2) longitude and latitude in degrees, NaN between lines
NO_LINES: Lines = np.empty((0, 2))


@final
@dataclass(frozen=True)
class MapGrid:
    """The cells of a map: latitude `(H,)` north first, longitude `(W,)`, in degrees; and coasts."""

    latitude: np.ndarray
    longitude: np.ndarray
    coasts: Lines


@final
@dataclass(frozen=True)
class FieldMap:
    """One field on the whole globe, and what there is to say about it.

    Shapes:
        forecast and truth `(H, W)`, in `unit`; bounds: the first row of each band, and H.
    """

    title: str
    unit: str
    forecast: np.ndarray
    truth: np.ndarray
    grid: MapGrid
    bounds: Sequence[int]


def coasts_of(source: Source) -> Lines:
    """The coasts of the planet that a store is about.

    That is the Earth, unless the store's title says that it is the quickstart's: that planet has
    land of its own, where its `land_sea_mask` is above one half, and without one no coasts are
    known. The mask is read on the whole globe.

    Raises:
        UserError: the mask can't be read.
    """
    if not source.title.startswith(TITLE):
        return earth_coasts()
    if LAND_MASK not in source.variables or source.variables[LAND_MASK].problem:
        return NO_LINES
    land = source.read([Channel(LAND_MASK)], slice(0, 1), slice(0, source.grid[0]))[0, 0]
    return outline(land, source.latitude, source.longitude)


@cache
def earth_coasts() -> Lines:
    """The Earth's coasts; longitudes run on where a line crosses 180 degrees."""
    with files(__package__).joinpath("coastlines.npz").open("rb") as file:
        points: Lines = np.load(file, allow_pickle=False)["points"]
    return points


def outline(land: NDArray[np.float32], latitude: Lines, longitude: Lines) -> Lines:
    """Where a field `(H, W)` is one half, once round the globe."""
    from matplotlib.figure import Figure  # not on ranks that draw nothing

    if not land.min() < 0.5 < land.max():
        return NO_LINES
    turns = np.append(np.unwrap(longitude, period=FULL_CIRCLE), np.nan)
    turns[-1] = turns[0] + np.sign(turns[1] - turns[0]) * FULL_CIRCLE
    closed = np.concatenate([land, land[:, :1]], axis=1)
    found = Figure().subplots().contour(turns, latitude, closed, levels=[0.5]).allsegs[0]
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for line in found for part in (line, gap)])

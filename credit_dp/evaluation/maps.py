"""The data of maps: grid cells, coasts and fields. `score_plots` draws them.

Coasts are the Earth's, or those of a simulated planet. The Earth's are in `coastlines.npz`, which
`scripts/make_coastlines.py` writes: Natural Earth's land at 1:110 million (public domain), from the
npm package world-atlas (ISC).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.grid import FULL_CIRCLE, Grid
from credit_dp.data.quickstart.dynamics import TITLE
from credit_dp.data.sources.source import Source

LAND_MASK = "land_sea_mask"

Lines = NDArray[np.floating]  # (N, 2) longitude and latitude in degrees, NaN between lines
NO_LINES: Lines = np.empty((0, 2))


@final
@dataclass(frozen=True)
class MapGrid:
    """The cells and coasts of a map; the northernmost row is the first."""

    cells: Grid
    coasts: Lines


@final
@dataclass(frozen=True)
class FieldMap:
    """Forecast and truth of one global field, with title and unit.

    Attributes:
        forecast, truth: `(H, W)`, in `unit`.
        bounds: the first row of each rank's band, then H.
    """

    title: str
    unit: str
    forecast: np.ndarray
    truth: np.ndarray
    grid: MapGrid
    bounds: Sequence[int]


def coasts_of(source: Source) -> Lines:
    """Return the coasts of a store's planet.

    A store is of the Earth, unless its title says that it is the quickstart's simulated climate:
    its land is where `land_sea_mask` exceeds one half; without a mask there are no coasts. Reads
    the mask on the whole globe.

    Raises:
        UserError: the mask can't be read.
    """
    if not source.title.startswith(TITLE):
        return earth_coasts()
    if not source.grid.is_global:
        return NO_LINES
    if LAND_MASK not in source.variables or source.variables[LAND_MASK].problem:
        return NO_LINES
    land = source.read([Channel(LAND_MASK)], slice(0, 1), slice(0, source.grid[0]))[0, 0]
    return outline(land, source.latitude, source.longitude)


@cache
def earth_coasts() -> Lines:
    """Return the Earth's coasts; longitudes continue past 180 degrees where a line crosses it."""
    with files(__package__).joinpath("coastlines.npz").open("rb") as file:
        points: Lines = np.load(file, allow_pickle=False)["points"]
    return points


def outline(land: NDArray[np.float32], latitude: Lines, longitude: Lines) -> Lines:
    """Return the contours of a field `(H, W)` at one half, once around the globe."""
    from matplotlib.figure import Figure  # imported only on the rank that draws

    if not land.min() < 0.5 < land.max():
        return NO_LINES
    # The first column once more, one turn further: contours have to cross the seam.
    turns = np.append(np.unwrap(longitude, period=FULL_CIRCLE), np.nan)
    turns[-1] = turns[0] + np.sign(turns[1] - turns[0]) * FULL_CIRCLE
    closed = np.concatenate([land, land[:, :1]], axis=1)
    lines = Figure().subplots().contour(turns, latitude, closed, levels=[0.5]).allsegs[0]
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for line in lines for part in (line, gap)])

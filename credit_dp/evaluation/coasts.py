"""The coasts that are drawn on maps: the Earth's, or those of a simulated planet.

The Earth's are in `coastlines.npz`, which `scripts/make_coastlines.py` makes: Natural Earth's land
at 1:110 million (public domain), as the npm package world-atlas (ISC) carries it.
"""

from functools import cache
from importlib.resources import files

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from credit_dp.data.quickstart.planet import TITLE
from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Source

MASK = "land_sea_mask"
FULL_CIRCLE = 360.0

Lines = NDArray[np.floating]  # (N, 2) longitude and latitude in degrees, NaN between lines
NONE: Lines = np.empty((0, 2))


def coasts_of(source: Source) -> Lines:
    """The coasts of the planet that a store is about.

    That is the Earth, unless the store's title says that it is the quickstart's: that planet has
    land of its own, where its `land_sea_mask` is above one half, and without one no coasts are
    known. The mask is read on the whole globe.

    Raises:
        UserError: the mask can't be read.
    """
    if not source.title.startswith(TITLE):
        return earth()
    if MASK not in source.variables or source.variables[MASK].problem:
        return NONE
    land = source.read([Channel(MASK)], slice(0, 1), slice(0, source.grid[0]))[0, 0]
    return outline(land, source.latitude, source.longitude)


@cache
def earth() -> Lines:
    """The Earth's coasts; longitudes run on where a line crosses 180 degrees."""
    with files(__package__).joinpath("coastlines.npz").open("rb") as file:
        points: Lines = np.load(file, allow_pickle=False)["points"]
    return points


def outline(land: NDArray[np.float32], latitude: Lines, longitude: Lines) -> Lines:
    """Where a field `(H, W)` is one half, once round the globe."""
    if not land.min() < 0.5 < land.max():
        return NONE
    turns = np.append(np.unwrap(longitude, period=FULL_CIRCLE), np.nan)
    turns[-1] = turns[0] + np.sign(turns[1] - turns[0]) * FULL_CIRCLE
    closed = np.concatenate([land, land[:, :1]], axis=1)
    found = Figure().subplots().contour(turns, latitude, closed, levels=[0.5]).allsegs[0]
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for line in found for part in (line, gap)])


def draw_coasts(axes: Axes, lines: Lines) -> None:
    """Draw coasts on a map that goes once round the globe, wherever its longitudes begin."""
    if not len(lines):
        return
    west, east = axes.get_xlim()
    # Lines are about one turn wide and may begin anywhere: what lies outside is not shown.
    first = np.floor((west - np.nanmax(lines[:, 0])) / FULL_CIRCLE)
    last = np.ceil((east - np.nanmin(lines[:, 0])) / FULL_CIRCLE)
    turned = [lines + np.array([turn * FULL_CIRCLE, 0.0]) for turn in np.arange(first, last + 1)]
    x, y = np.concatenate([part for line in turned for part in (line, [[np.nan, np.nan]])]).T
    axes.plot(x, y, color="black", linewidth=0.6, alpha=0.7, scalex=False, scaley=False)

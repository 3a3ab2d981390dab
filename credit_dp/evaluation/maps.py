"""The data of maps: grid cells, coasts and fields. `map_plots` draws them.

Coasts are the Earth's, or those of the quickstart's planet. The Earth's are in `coastlines.npz`,
which `scripts/make_coastlines.py` writes: Natural Earth's land at 1:110 million (public domain),
from the npm package world-atlas (ISC).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.grid import FULL_CIRCLE, Grid
from credit_dp.data.quickstart.dynamics import TITLE, land_fraction

EARTH = "earth"
SIMULATED = "simulated"  # the quickstart's planet
# In legends; the Earth's coasts need no words.
COAST_LABELS: Mapping[str, str] = MappingProxyType(
    {EARTH: "", SIMULATED: "land of the simulated planet"}
)

Lines = NDArray[np.floating]  # (N, 2) longitude and latitude in degrees, NaN between lines
NO_LINES: Lines = np.empty((0, 2))


@final
@dataclass(frozen=True)
class MapGrid:
    """The cells of a map, the northernmost row first, and whose coasts it has.

    Attributes:
        planet: a key of `COAST_LABELS`; empty for a map without coasts.
    """

    cells: Grid
    planet: str = EARTH


@final
@dataclass(frozen=True)
class FieldMap:
    """Forecast and truth of one field, with title and unit.

    Attributes:
        title: without the name of the field.
        forecast, truth: `(H, W)`, in `unit`.
        bounds: the first row of each rank's band, then H.
        channel: says how the field is shown.
    """

    title: str
    unit: str
    forecast: np.ndarray
    truth: np.ndarray
    grid: MapGrid
    bounds: Sequence[int]
    channel: Channel
    model_levels: bool = False


def planet_of(title: str) -> str:
    """Return whose coasts the maps of a store have, by its title."""
    return SIMULATED if title.startswith(TITLE) else EARTH


@cache
def coasts_of(planet: str) -> Lines:
    """Return the coasts of a planet; longitudes continue past 180 degrees where lines cross it."""
    if planet == EARTH:
        with files(__package__).joinpath("coastlines.npz").open("rb") as file:
            points: Lines = np.load(file, allow_pickle=False)["points"]
        return points
    if planet == SIMULATED:
        longitude, latitude = np.arange(0, FULL_CIRCLE, 1.5), np.linspace(90, -90, 181)
        return outline(land_fraction(longitude, latitude).T, latitude, longitude)
    return NO_LINES


def outline(land: NDArray[np.floating], latitude: Lines, longitude: Lines) -> Lines:
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

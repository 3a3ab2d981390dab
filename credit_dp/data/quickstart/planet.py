"""An invented planet: where it has land and mountains, and the climate it is pulled towards.

All of it is smooth functions of position, so that every grid and truncation sees the same planet.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from credit_dp.data.quickstart.spectral import Array

GRAVITY = 9.80665  # m s-2
DRY_AIR = 287.05  # J kg-1 K-1
RADIUS = 6.371e6  # m
ROTATION = 7.292e-5  # s-1
DAY = 86400.0  # s
YEAR_DAYS = 365.2425
LAPSE_RATE = 6.5e-3  # K m-1
COLDEST_DAY = 15.0  # of the year, in the north
TITLE = "Quasi-geostrophic quickstart climate"  # how the titles of its stores begin


@final
@dataclass(frozen=True)
class Bump:
    """A smooth hill or continent: centre and half widths in degrees."""

    longitude: float
    latitude: float
    width: float
    height: float

    def distance(self, longitude: Array, latitude: Array) -> Array:
        """Squared distance from the centre in half widths, on the outer product of both axes."""
        east = np.sin(np.radians(longitude - self.longitude) / 2)[:, None]
        east = 2 * np.degrees(np.arcsin(np.abs(east))) * np.cos(np.radians(latitude))[None, :]
        north = (latitude - self.latitude)[None, :]
        return np.asarray((east / self.width) ** 2 + (north / self.height) ** 2)


CONTINENTS = (
    Bump(80.0, 48.0, 42.0, 24.0),
    Bump(262.0, 50.0, 26.0, 22.0),
    Bump(20.0, 0.0, 20.0, 32.0),
    Bump(300.0, -15.0, 16.0, 30.0),
    Bump(134.0, -25.0, 16.0, 12.0),
    Bump(0.0, -90.0, 400.0, 20.0),
)
MOUNTAINS = (
    (3500.0, Bump(88.0, 36.0, 14.0, 9.0)),
    (2200.0, Bump(250.0, 44.0, 8.0, 13.0)),
    (1800.0, Bump(318.0, 73.0, 8.0, 8.0)),
    (1800.0, Bump(290.0, -24.0, 6.0, 18.0)),
    (900.0, Bump(30.0, -5.0, 10.0, 20.0)),
    (2500.0, Bump(0.0, -90.0, 400.0, 14.0)),
)


def land_fraction(longitude: Array, latitude: Array) -> Array:
    """Share of land, 0 to 1. Shapes: `(W,)` and `(L,)`, both in degrees, -> `(W, L)`."""
    sea = np.ones((len(longitude), len(latitude)))
    for continent in CONTINENTS:
        edge = np.sqrt(continent.distance(longitude, latitude)) - 1
        sea = sea * (0.5 + 0.5 * np.tanh(6 * edge))
    return np.asarray(1 - sea)


def terrain(longitude: Array, latitude: Array) -> Array:
    """Height of the ground in metres. Shapes as `land_fraction`."""
    height = np.zeros((len(longitude), len(latitude)))
    for peak, bump in MOUNTAINS:
        height += peak * np.exp(-bump.distance(longitude, latitude))
    return height


def winter(day_of_year: float) -> float:
    """1 in the depth of the northern winter, -1 half a year later."""
    return float(np.cos(2 * np.pi * (day_of_year - COLDEST_DAY) / YEAR_DAYS))

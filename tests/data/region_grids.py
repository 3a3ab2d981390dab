"""Coordinates of regional grids as their centres publish them, from the formulas of projections.

Source: Snyder 1987, "Map projections: a working manual", eqs. 14 and 15 (Lambert), 21 (polar
stereographic), all on a sphere.
"""

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

RADIUS = 6371229.0  # m
Field = NDArray[np.float64]


LAMBERT = MappingProxyType(
    {
        "grid_mapping_name": "lambert_conformal_conic",
        "standard_parallel": [38.5, 38.5],
        "longitude_of_central_meridian": -97.5,
        "latitude_of_projection_origin": 38.5,
        "earth_radius": RADIUS,
    }
)


class Lambert:
    """A Lambert conformal cone that touches the sphere at one parallel, as HRRR's."""

    parallel, meridian = 38.5, -97.5

    def __init__(self) -> None:
        phi = np.radians(self.parallel)
        self.n = np.sin(phi)
        self.f = RADIUS * np.cos(phi) * np.tan(np.pi / 4 + phi / 2) ** self.n / self.n
        self.origin = self.f / np.tan(np.pi / 4 + phi / 2) ** self.n

    def coordinates(self, y: Field, x: Field) -> tuple[Field, Field]:
        """Return latitudes and longitudes `(H, W)`, 0 to 360, of metres `(H,)` and `(W,)`."""
        x, y = np.meshgrid(x, self.origin - y)
        rho, theta = np.hypot(x, y), np.arctan2(x, y)
        latitude = 2 * np.arctan((self.f / rho) ** (1 / self.n)) - np.pi / 2
        return np.degrees(latitude), (np.degrees(theta / self.n) + self.meridian) % 360

    def scale(self, latitude: Field) -> Field:
        """Return metres on the map for each metre on the sphere."""
        phi, phi_1 = np.radians(latitude), np.radians(self.parallel)
        ratio = np.tan(np.pi / 4 + phi_1 / 2) / np.tan(np.pi / 4 + phi / 2)
        return np.cos(phi_1) / np.cos(phi) * ratio**self.n


def polar_stereographic(y: Field, x: Field) -> tuple[Field, Field, Field]:
    """Return latitudes, longitudes and map scale `(H, W)` of a plane that touches the pole."""
    x, y = np.meshgrid(x, y)
    rho = np.hypot(x, y)
    latitude = 90 - np.degrees(2 * np.arctan(rho / (2 * RADIUS)))
    return latitude, np.degrees(np.arctan2(x, -y)), 2 / (1 + np.sin(np.radians(latitude)))


def rotated(rlat: Field, rlon: Field, pole: tuple[float, float]) -> tuple[Field, Field]:
    """Return latitudes and longitudes `(H, W)` of degrees on a grid whose pole is elsewhere.

    The pole's latitude and longitude are as in CORDEX: EUR-44 has 39.25 and -162.
    """
    lam, phi = np.meshgrid(np.radians(rlon), np.radians(rlat))
    tilt = np.pi / 2 - np.radians(pole[0])
    x, y, z = np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)
    # The rotated equator's meridian 0 is opposite the pole's.
    x, z = x * np.cos(tilt) - z * np.sin(tilt), x * np.sin(tilt) + z * np.cos(tilt)
    return np.degrees(np.arcsin(z)), np.degrees(np.arctan2(y, x)) + pole[1] + 180

"""Where the points of projections are: conformal cones about the earth's axis, and rotated poles.

Source: Snyder 1987, "Map projections: a working manual", eqs. 5-7 to 5-10, 14-15 to 15-11 and 21-33
to 21-40; attributes are those of the CF conventions 1.11, appendix F.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credit_dp.data.grid import Degrees, degrees_east

EARTH_RADIUS = 6371229.0  # m, if the grid mapping has none
NEAR_POLE = 90 - 1e-4  # degrees: the scale there is that at the pole, where it would be 0 / 0
ROUNDS = 10  # each gains two digits of a latitude on an ellipsoid
Metres = NDArray[np.float64]


@final
class Cone(NamedTuple):
    """A Lambert conformal or, if the cone is flat, polar stereographic projection.

    Its plane has the tip of the cone at `x = y = 0` m, and the meridian below it.

    Attributes:
        n: the angle on the plane for each degree of longitude; negative if the tip is in the south.
        scale: distance from the tip, in metres, where `_tangent` is 1.
        meridian: longitude at `x = 0`.
        eccentricity: of the earth.
    """

    n: float
    scale: float
    meridian: float
    eccentricity: float

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Self:
        """Return the projection of CF's grid mapping.

        Raises:
            KeyError: it lacks an attribute.
            TypeError, ValueError: an attribute has not one or two numbers.
        """
        major = mapping.get("earth_radius", mapping.get("semi_major_axis", EARTH_RADIUS))
        minor = mapping.get("semi_minor_axis", major)
        eccentricity = float(np.sqrt(1 - (minor / major) ** 2))
        if mapping["grid_mapping_name"] == "polar_stereographic":
            n = float(np.sign(mapping["latitude_of_projection_origin"]))
            meridian = mapping["straight_vertical_longitude_from_pole"]
            first = n * min(abs(mapping.get("standard_parallel", 90)), NEAR_POLE)
        else:
            meridian = mapping["longitude_of_central_meridian"]
            first, second = np.broadcast_to(mapping["standard_parallel"], 2).tolist()  # of 1 or 2
            n = np.sin(np.deg2rad(first))
            if first != second:
                circles = [_circle(x, eccentricity) for x in (first, second)]
                tangents = [_tangent(x, eccentricity) for x in (first, second)]
                n = np.log(circles[0] / circles[1]) / np.log(tangents[0] / tangents[1])
        scale = major * _circle(first, eccentricity) / (n * _tangent(first, eccentricity) ** n)
        return cls(float(n), float(scale), float(meridian), eccentricity)

    def forward(self, latitude: ArrayLike, longitude: ArrayLike) -> tuple[Metres, Metres]:
        """Return x and y of points."""
        from_tip = self.scale * _tangent(latitude, self.eccentricity) ** self.n
        angle = np.deg2rad(self.n * degrees_east(np.asarray(longitude), self.meridian))
        return from_tip * np.sin(angle), -from_tip * np.cos(angle)

    def inverse(self, x: Metres, y: Metres) -> tuple[Degrees, Degrees]:
        """Return latitudes and longitudes of points; x and y are broadcast."""
        side = np.sign(self.n)
        with np.errstate(divide="ignore"):  # at the south pole
            tangent = (np.hypot(x, y) / abs(self.scale)) ** (1 / self.n)
        sine = 0 * tangent
        for _ in range(ROUNDS):
            latitude = np.pi / 2 - 2 * np.arctan(tangent * _flattening(sine, self.eccentricity))
            sine = np.sin(latitude)
        longitude = self.meridian + np.rad2deg(np.arctan2(side * x, -side * y)) / self.n
        return np.rad2deg(latitude), longitude


def unrotated(
    latitude: Degrees, longitude: Degrees, pole: tuple[float, float]
) -> tuple[Degrees, Degrees]:
    """Return latitudes and longitudes of points on a grid whose poles are elsewhere.

    Args:
        pole: latitude and longitude of its south pole.
    """
    phi, lam, tilt = (np.deg2rad(x) for x in (latitude, longitude, pole[0] + 90))
    x = np.cos(tilt) * np.cos(phi) * np.cos(lam) - np.sin(tilt) * np.sin(phi)
    z = np.sin(tilt) * np.cos(phi) * np.cos(lam) + np.cos(tilt) * np.sin(phi)
    y = np.cos(phi) * np.sin(lam)
    return np.rad2deg(np.arctan2(z, np.hypot(x, y))), np.rad2deg(np.arctan2(y, x)) + pole[1]


def _tangent(latitude: ArrayLike, eccentricity: float) -> NDArray[np.float64]:
    """Return the tangent of half the distance from the north pole, of conformal latitudes."""
    phi = np.deg2rad(latitude)
    flattening = _flattening(np.sin(phi), eccentricity)
    return np.asarray(np.tan(np.pi / 4 - phi / 2) / flattening, np.float64)


def _flattening(sine: NDArray[np.float64], eccentricity: float) -> NDArray[np.float64]:
    ratio = (1 - eccentricity * sine) / (1 + eccentricity * sine)
    return np.asarray(ratio ** (eccentricity / 2), np.float64)


def _circle(latitude: float, eccentricity: float) -> float:
    phi = np.deg2rad(latitude)
    return float(np.cos(phi) / np.sqrt(1 - (eccentricity * np.sin(phi)) ** 2))

"""Sunlight that reaches the top of the atmosphere, averaged over the hour before a time.

Source: the sun's place after Meeus, "Astronomical Algorithms", 2nd ed. 1998, chapters 22, 25 (low
accuracy, 0.01 degrees) and 28, as in the solar calculator of NOAA's Global Monitoring Laboratory;
the solar constant is that of Kopp & Lean 2011 (doi:10.1029/2010GL045777).
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

SOLAR_CONSTANT = 1361.0  # W m-2 at one astronomical unit
HOUR_ANGLE = np.pi / 12  # by which the earth turns in an hour
DAYS_PER_CENTURY = 36525.0
J2000 = np.datetime64("2000-01-01T12", "s")

Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Sun:
    """Where the sun stands at some times.

    Shapes:
        all `(T,)`.

    Attributes:
        declination: radians north of the equator.
        equation_of_time: radians by which the true sun is ahead of the mean one.
        distance: astronomical units.
    """

    declination: Array
    equation_of_time: Array
    distance: Array

    @classmethod
    def at(cls, times: NDArray[np.datetime64]) -> "Sun":
        """Where it stands at `times`, by universal time."""
        days = (times.astype("datetime64[s]") - J2000).astype(np.float64) / 86400
        t = days / DAYS_PER_CENTURY
        mean_longitude = np.deg2rad(280.46646 + t * (36000.76983 + t * 0.0003032))
        anomaly = np.deg2rad(357.52911 + t * (35999.05029 - t * 0.0001537))
        eccentricity = 0.016708634 - t * (0.000042037 + t * 0.0000001267)
        centre = np.deg2rad(
            (1.914602 - t * (0.004817 + t * 0.000014)) * np.sin(anomaly)
            + (0.019993 - t * 0.000101) * np.sin(2 * anomaly)
            + 0.000289 * np.sin(3 * anomaly)
        )
        node = np.deg2rad(125.04 - 1934.136 * t)
        longitude = mean_longitude + centre - np.deg2rad(0.00569 + 0.00478 * np.sin(node))
        arcseconds = 21.448 - t * (46.815 + t * (0.00059 - t * 0.001813))
        tilt = np.deg2rad(23 + 26 / 60 + arcseconds / 3600 + 0.00256 * np.cos(node))
        y = np.tan(tilt / 2) ** 2
        return cls(
            declination=np.arcsin(np.sin(tilt) * np.sin(longitude)),
            equation_of_time=y * np.sin(2 * mean_longitude)
            - 2 * eccentricity * np.sin(anomaly)
            + 4 * eccentricity * y * np.sin(anomaly) * np.cos(2 * mean_longitude)
            - y**2 / 2 * np.sin(4 * mean_longitude)
            - 5 / 4 * eccentricity**2 * np.sin(2 * anomaly),
            distance=1.000001018
            * (1 - eccentricity**2)
            / (1 + eccentricity * np.cos(anomaly + centre)),
        )


def insolation(times: NDArray[np.datetime64], latitude: Array, longitude: Array) -> Array:
    """The mean over the hour before each time, on a horizontal surface: `(T, rows, W)`.

    It is integrated exactly over the part of the hour in which the sun is up; declination and
    distance are those of the middle of the hour. ERA5's `toa_incident_solar_radiation` is the same
    times 3600 s.

    Shapes:
        `times`: `(T,)`; `latitude`: `(rows,)`; `longitude`: `(W,)`, both in degrees.

    Units:
        W m-2.
    """
    middle = (times - np.timedelta64(1800, "s")).astype("datetime64[s]")
    sun = Sun.at(middle)
    noon = middle.astype("datetime64[D]") + np.timedelta64(43200, "s")
    turned = (middle - noon).astype(np.float64) / 3600 * HOUR_ANGLE + sun.equation_of_time
    angle = turned[:, None] + np.deg2rad(longitude) - HOUR_ANGLE / 2
    start = (angle + np.pi) % (2 * np.pi) - np.pi
    declination, phi = sun.declination[:, None], np.deg2rad(latitude)
    constant = np.sin(phi) * np.sin(declination)
    swing = np.cos(phi) * np.cos(declination)
    # Where the sun neither rises nor sets, the day is a whole turn or nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        half_day = np.arccos(np.clip(-constant / swing, -1, 1))
    mean = _in_daylight(start, constant, swing, half_day)
    # An hour that runs over midnight may meet the next day's sunrise.
    over = start + HOUR_ANGLE > np.pi
    for time in np.flatnonzero(over.any(axis=1)):
        part = slice(time, time + 1)
        columns = over[time]
        later = start[part, columns] - 2 * np.pi
        mean[time][:, columns] += _in_daylight(later, constant[part], swing[part], half_day[part])[
            0
        ]
    flux = SOLAR_CONSTANT / sun.distance**2
    mean *= flux[:, None, None]
    return np.maximum(mean, 0, out=mean)


def _in_daylight(start: Array, constant: Array, swing: Array, half_day: Array) -> Array:
    """The mean over an hour of the sine of the sun's height, as long as it is up.

    That is `constant + swing cos(h)` at hour angle `h`; it is up for `-half_day < h < half_day`.

    Shapes:
        `start`: `(T, W)` hour angles; the others `(T, rows)` -> `(T, rows, W)`.
    """
    edge = half_day[:, :, None]
    first = np.clip(start[:, None], -edge, edge)
    last = np.clip(start[:, None] + HOUR_ANGLE, -edge, edge)
    total = constant[:, :, None] * (last - first)
    total += swing[:, :, None] * (np.sin(last) - np.sin(first))
    total /= HOUR_ANGLE
    return total

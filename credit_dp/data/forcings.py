"""Forcings that are computed: sunlight at the top of the atmosphere, time of year and of day."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
    mean = _mean_sun_height(start, constant, swing, half_day)
    # An hour that runs over midnight may meet the next day's sunrise.
    over = start + HOUR_ANGLE > np.pi
    for time in np.flatnonzero(over.any(axis=1)):
        part = slice(time, time + 1)
        columns = over[time]
        later = start[part, columns] - 2 * np.pi
        mean[time][:, columns] += _mean_sun_height(
            later, constant[part], swing[part], half_day[part]
        )[0]
    flux = SOLAR_CONSTANT / sun.distance**2
    mean *= flux[:, None, None]
    return np.maximum(mean, 0, out=mean)


def _mean_sun_height(start: Array, constant: Array, swing: Array, half_day: Array) -> Array:
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


def year_fraction(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """The part of its calendar year that has passed, 0 to 1, so that leap years keep the season.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    year = times.astype("datetime64[Y]")
    start = year.astype("datetime64[s]")
    end = (year + np.timedelta64(1, "Y")).astype("datetime64[s]")
    passed = (times.astype("datetime64[s]") - start).astype(np.float64)
    return np.asarray(passed / (end - start).astype(np.float64))


def day_fraction(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """The part of its day, by universal time, that has passed, 0 to 1.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    seconds = times.astype("datetime64[s]") - times.astype("datetime64[D]")
    return np.asarray(seconds.astype(np.float64) / 86400)


Degrees = NDArray[np.float64]
Times = NDArray[np.datetime64]
Values = NDArray[np.float64]

# Of times (T,), latitudes (rows,) and longitudes (W,): (T, rows, W).
Forcing = Callable[[Times, Degrees, Degrees], Values]
# Of latitudes (rows,) and longitudes (W,): (rows, W).
Static = Callable[[Degrees, Degrees], Values]


def _insolation(times: Times, latitude: Degrees, longitude: Degrees) -> Values:
    """In units of the solar constant: 0 to 1.03."""
    return insolation(times, latitude, longitude) / SOLAR_CONSTANT


def _of_season(function: Callable[[Values], Values]) -> Forcing:
    def forcing(times: Times, latitude: Degrees, longitude: Degrees) -> Values:
        values = function(2 * np.pi * year_fraction(times))
        shape = (len(times), len(latitude), len(longitude))
        return np.broadcast_to(values[:, None, None], shape)

    return forcing


def _of_local_time(function: Callable[[Values], Values]) -> Forcing:
    """The sun's mean time: it is noon where the mean sun stands highest."""

    def forcing(times: Times, latitude: Degrees, longitude: Degrees) -> Values:
        hour = day_fraction(times)[:, None] + longitude / 360
        values = function(2 * np.pi * hour)
        return np.broadcast_to(values[:, None], (len(times), len(latitude), len(longitude)))

    return forcing


def _of_latitude(function: Callable[[Values], Values]) -> Static:
    def static(latitude: Degrees, longitude: Degrees) -> Values:
        values = function(np.deg2rad(latitude))
        return np.broadcast_to(values[:, None], (len(latitude), len(longitude)))

    return static


def _of_longitude(function: Callable[[Values], Values]) -> Static:
    def static(latitude: Degrees, longitude: Degrees) -> Values:
        values = function(np.deg2rad(longitude))
        return np.broadcast_to(values, (len(latitude), len(longitude)))

    return static


COMPUTED_FORCINGS: Mapping[str, Forcing] = MappingProxyType(
    {
        "day_of_year_sin": _of_season(np.sin),
        "day_of_year_cos": _of_season(np.cos),
        "hour_of_day_sin": _of_local_time(np.sin),
        "hour_of_day_cos": _of_local_time(np.cos),
        "insolation": _insolation,
    }
)

COMPUTED_STATICS: Mapping[str, Static] = MappingProxyType(
    {
        "latitude_sin": _of_latitude(np.sin),
        "latitude_cos": _of_latitude(np.cos),
        "longitude_sin": _of_longitude(np.sin),
        "longitude_cos": _of_longitude(np.cos),
    }
)

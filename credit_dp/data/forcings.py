"""Forcings and statics that are computed: insolation, time of year, time of day and coordinates.

`COMPUTED_FORCINGS` and `COMPUTED_STATICS` give the function for each name of the config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, YEAR_LENGTHS, Calendar, Times
from credit_dp.data.grid import Degrees

SOLAR_CONSTANT = 1361.0  # W m-2 at one astronomical unit
HOUR_ANGLE = np.pi / 12  # rotation of the earth in one hour, radians
DAYS_PER_CENTURY = 36525.0
J2000 = np.datetime64("2000-01-01T12", "s")
EQUINOX_2000 = np.datetime64("2000-03-20T07:35", "s")  # of spring in the northern hemisphere
TROPICAL_YEAR = 365.24219  # days

Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Sun:
    """The position of the sun at some times.

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
    def at(cls, times: NDArray[np.datetime64], calendar: Calendar = STANDARD) -> "Sun":
        """Return the sun's position at `times` (UTC); see `days_since_j2000`."""
        days = days_since_j2000(times, calendar)
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


def days_since_j2000(times: NDArray[np.datetime64], calendar: Calendar) -> Array:
    """Return the days from noon of 2000-01-01 to times, at which the sun's position is computed.

    In the years of climate models, which drift from those of the sun, every year has the orbit of
    the year 2000, and the equinox of spring is at noon of 21 March of its calendar; in julian
    years, which have a leap day as those of the sun, in leap years.

    Source: Otto-Bliesner et al. 2017, "The PMIP4 contribution to CMIP6, part 2", for the equinox.
    """
    seconds = times.astype("datetime64[s]")
    if calendar.name not in YEAR_LENGTHS:
        return np.asarray((seconds - J2000).astype(np.float64) / 86400)
    equinox = calendar.parse("insolation", "2000-03-21T12")
    years = (seconds - equinox).astype(np.float64) / (86400 * YEAR_LENGTHS[calendar.name])
    first = float((EQUINOX_2000 - J2000).astype(np.float64)) / 86400
    return np.asarray(first + years % 1 * TROPICAL_YEAR)


def insolation(
    times: NDArray[np.datetime64],
    latitude: Array,
    longitude: Array,
    calendar: Calendar = STANDARD,
) -> Array:
    """Return the mean insolation of a horizontal surface over the hour before each time.

    It is integrated exactly over the part of the hour with the sun above the horizon; declination
    and distance are those at the middle of the hour. ERA5's `toa_incident_solar_radiation` is the
    same, multiplied by 3600 s.

    Shapes:
        `times`: `(T,)`; `latitude`: `(rows,)`; `longitude`: `(W,)`, both in degrees, or both
        `(rows, W)` -> `(T, rows, W)`.

    Units:
        W m-2.
    """
    mid_hour = (times - np.timedelta64(1800, "s")).astype("datetime64[s]")
    sun = Sun.at(mid_hour, calendar)
    noon = mid_hour.astype("datetime64[D]") + np.timedelta64(43200, "s")
    hour_angle = (mid_hour - noon).astype(np.float64) / 3600 * HOUR_ANGLE + sun.equation_of_time
    angle = hour_angle[:, None, None] + np.deg2rad(longitude) - HOUR_ANGLE / 2
    start = (angle + np.pi) % (2 * np.pi) - np.pi
    declination = sun.declination[:, None, None]
    phi = np.deg2rad(latitude.reshape(len(latitude), -1))
    constant = np.sin(phi) * np.sin(declination)
    swing = np.cos(phi) * np.cos(declination)
    # Where the sun neither rises nor sets, clipping gives a half day of pi or 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        half_day = np.arccos(np.clip(-constant / swing, -1, 1))
    mean = _mean_sun_height(start, constant, swing, half_day)
    # An hour that crosses local midnight may include the sunrise of the next day.
    crosses_midnight = start + HOUR_ANGLE > np.pi
    for index in np.flatnonzero(crosses_midnight.any(axis=(1, 2))):
        # Where rows differ, the hour of some points in these columns does not cross midnight: it
        # ends before -pi, and adds nothing.
        columns = np.flatnonzero(crosses_midnight[index].any(axis=0))
        of_points = columns if latitude.ndim == 2 else slice(None)
        mean[index][:, columns] += _mean_sun_height(
            start[index][:, columns] - 2 * np.pi,
            *(of[index][:, of_points] for of in (constant, swing, half_day)),
        )
    flux = SOLAR_CONSTANT / sun.distance**2
    mean *= flux[:, None, None]
    return np.maximum(mean, 0, out=mean)


def _mean_sun_height(start: Array, constant: Array, swing: Array, half_day: Array) -> Array:
    """Return the mean over an hour of the sine of the sun's elevation, zero below the horizon.

    The sine is `constant + swing cos(h)` at hour angle `h`; the sun is up for
    `-half_day < h < half_day`.

    Shapes:
        all broadcast to `(T, rows, W)`; `start` is in hour angles.
    """
    first = np.clip(start, -half_day, half_day)
    last = np.clip(start + HOUR_ANGLE, -half_day, half_day)
    integral = constant * (last - first)
    integral += swing * (np.sin(last) - np.sin(first))
    integral /= HOUR_ANGLE
    return integral


def year_fraction(
    times: NDArray[np.datetime64], calendar: Calendar = STANDARD
) -> NDArray[np.float64]:
    """Return the elapsed fraction of the calendar year, 0 to 1, also in leap years.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    year = calendar.years(times)
    start = calendar.starts(year).astype("datetime64[s]")
    end = calendar.starts(year + np.timedelta64(1, "Y")).astype("datetime64[s]")
    elapsed = (times.astype("datetime64[s]") - start).astype(np.float64)
    return np.asarray(elapsed / (end - start).astype(np.float64))


def day_fraction(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """Return the elapsed fraction of the day (UTC), 0 to 1.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    seconds = times.astype("datetime64[s]") - times.astype("datetime64[D]")
    return np.asarray(seconds.astype(np.float64) / 86400)


Values = NDArray[np.float64]

# Times (T,), latitudes (rows,), longitudes (W,), calendar of the times -> (T, rows, W). On a
# projection, latitudes and longitudes are (rows, W).
Forcing = Callable[[Times, Degrees, Degrees, Calendar], Values]
# Latitudes (rows,), longitudes (W,), or both (rows, W) -> (rows, W).
Static = Callable[[Degrees, Degrees], Values]


def _insolation(
    times: Times, latitude: Degrees, longitude: Degrees, calendar: Calendar = STANDARD
) -> Values:
    return insolation(times, latitude, longitude, calendar) / SOLAR_CONSTANT


def _season_forcing(function: Callable[[Values], Values]) -> Forcing:

    def forcing(
        times: Times, latitude: Degrees, longitude: Degrees, calendar: Calendar = STANDARD
    ) -> Values:
        values = function(2 * np.pi * year_fraction(times, calendar))
        shape = (len(times), len(latitude), longitude.shape[-1])
        return np.broadcast_to(values[:, None, None], shape)

    return forcing


def _local_time_forcing(function: Callable[[Values], Values]) -> Forcing:
    """Return a forcing by local mean solar time, with noon where the mean sun culminates."""

    def forcing(
        times: Times, latitude: Degrees, longitude: Degrees, _: Calendar = STANDARD
    ) -> Values:
        hour = day_fraction(times)[:, None, None] + longitude / 360
        values = function(2 * np.pi * hour)
        return np.broadcast_to(values, (len(times), len(latitude), longitude.shape[-1]))

    return forcing


def _latitude_static(function: Callable[[Values], Values]) -> Static:
    def static(latitude: Degrees, longitude: Degrees) -> Values:
        values = function(np.deg2rad(latitude.reshape(len(latitude), -1)))
        return np.broadcast_to(values, (len(latitude), longitude.shape[-1]))

    return static


def _longitude_static(function: Callable[[Values], Values]) -> Static:
    def static(latitude: Degrees, longitude: Degrees) -> Values:
        values = function(np.deg2rad(longitude))
        return np.broadcast_to(values, (len(latitude), longitude.shape[-1]))

    return static


COMPUTED_FORCINGS: Mapping[str, Forcing] = MappingProxyType(
    {
        "day_of_year_sin": _season_forcing(np.sin),
        "day_of_year_cos": _season_forcing(np.cos),
        "hour_of_day_sin": _local_time_forcing(np.sin),
        "hour_of_day_cos": _local_time_forcing(np.cos),
        "insolation": _insolation,
    }
)

COMPUTED_STATICS: Mapping[str, Static] = MappingProxyType(
    {
        "latitude_sin": _latitude_static(np.sin),
        "latitude_cos": _latitude_static(np.cos),
        "longitude_sin": _longitude_static(np.sin),
        "longitude_cos": _longitude_static(np.cos),
    }
)

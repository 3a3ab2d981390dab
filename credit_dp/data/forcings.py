"""Forcings and statics that are computed, by name; all others are read from the store.

They need no statistics: each is already of the size that a network likes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.season import day_fraction, year_fraction
from credit_dp.data.sun import SOLAR_CONSTANT, insolation

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


COMPUTED: Mapping[str, Forcing] = MappingProxyType(
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

"""Forcings that are computed from the time alone, by name; all others are read from the store."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.season import year_fraction

Forcing = Callable[[NDArray[np.datetime64]], NDArray[np.float64]]


def _day_of_year_sin(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    return np.sin(2 * np.pi * year_fraction(times))


def _day_of_year_cos(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    return np.cos(2 * np.pi * year_fraction(times))


# One number per time, the same on the whole globe, already of the size that a network likes.
COMPUTED: Mapping[str, Forcing] = MappingProxyType(
    {"day_of_year_sin": _day_of_year_sin, "day_of_year_cos": _day_of_year_cos}
)

"""What the coordinates of a store must look like, checked before any field is read."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from credit_dp.data.grid import FULL_CIRCLE, POLE
from credit_dp.errors import UserError

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "latitude": ("lat",),
    "longitude": ("lon",),
    "level": ("pressure_level",),
}
HORIZONTAL = ("latitude", "longitude")


def with_standard_names(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with its dims called time, level, latitude and longitude, in whatever order."""
    names = {
        other: standard
        for standard, others in OTHER_NAMES.items()
        for other in others
        if standard not in dataset.dims and other in dataset.dims
    }
    return dataset.rename(names)


def check_coordinates(dataset: xr.Dataset, where: str) -> None:
    """Refuse coordinates on which row, column or time numbers would mean something else.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotone, or longitude is not
            one whole circle in equal steps.
    """
    for dim in ("time", *HORIZONTAL):
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _error(
                where,
                f"needs one-dimensional coordinates time, latitude and longitude, but has "
                f"{', '.join(map(str, dataset.dims))}; {dim} is missing",
            )
    _check_time(dataset, where)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, where)
    _check_longitude(dataset["longitude"].values, where)


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if not np.issubdtype(times.dtype, np.datetime64):
        raise _error(where, "time is not in the standard calendar")
    if len(times) == 0 or np.isnat(times).any() or not np.all(np.diff(times) > np.timedelta64(0)):
        raise _error(where, "time does not rise throughout")


def _check_latitude(latitude: np.ndarray, where: str) -> None:
    """Weights and padding take the outermost rows to be next to the poles, and rows to be alike."""
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise _error(where, "latitude neither rises nor falls throughout")
    if np.abs(latitude).max() > POLE:
        raise _error(where, "latitude must lie within -90 to 90 degrees")
    if len(latitude) < 2:
        raise _error(where, "needs at least two rows of latitude, has one")
    widest = np.abs(steps).max()
    gap = POLE - min(abs(latitude[0]), abs(latitude[-1]))
    if latitude[0] * latitude[-1] >= 0 or gap > 1.5 * widest or widest > 2 * np.abs(steps).min():
        raise _error(
            where,
            f"latitude must cover the globe from pole to pole in rows of about one distance, but "
            f"goes from {latitude[0]:g} to {latitude[-1]:g} in steps of "
            f"{np.abs(steps).min():g} to {widest:g} degrees",
        )


def _check_longitude(longitude: np.ndarray, where: str) -> None:
    """Models take the last column to be next to the first, so the circle must close evenly."""
    steps = np.diff(np.append(longitude, longitude[0])) % FULL_CIRCLE
    signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
    even = np.abs(np.abs(signed) - FULL_CIRCLE / len(longitude)) < 1e-2 * FULL_CIRCLE / len(
        longitude
    )
    if len(longitude) > 2 and not (even.all() and len(set(np.sign(signed))) == 1):
        raise _error(
            where,
            f"longitude must go once round the globe in {len(longitude)} equal steps, without "
            f"repeating its first column, but goes from {longitude[0]} to {longitude[-1]}",
        )


def _error(where: str, what: str) -> UserError:
    return UserError(f"{where}: {what}. Change data.store.")

"""What the coordinates of a store must look like, checked before any field is read."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from credit_dp.data.grid import FULL_CIRCLE, POLE
from credit_dp.errors import UserError

MODEL_LEVELS = ("hybrid", "model_level", "model_level_number")  # dims
MODEL_LEVEL_NAMES = (  # standard names of their coordinate
    "model_level_number",
    "atmosphere_hybrid_sigma_pressure_coordinate",
    "atmosphere_hybrid_height_coordinate",
)
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "time": ("valid_time",),
    "latitude": ("lat",),
    "longitude": ("lon",),
    "level": ("pressure_level", "isobaricInhPa", "plev", *MODEL_LEVELS),
}
PASCALS = 100  # in one hPa
HORIZONTAL = ("latitude", "longitude")
GRID_TYPES = {  # as GRIB calls them
    "reduced_gg": "reduced Gaussian",
    "rotated_ll": "rotated regional",
    "lambert": "Lambert regional",
    "polar_stereographic": "polar stereographic regional",
    "healpix": "HEALPix",
}
CHUNKS = ("chunks", "shards", "chunksizes")  # in the encoding of a variable
CELLS = ("values", "cell", "cells", "ncells", "nCells", "grid_index")  # dims of all cells in a row


def with_standard_names(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """The dataset with its dims called time, level, latitude and longitude, in whatever order.

    Coordinates that are no dims, such as an ensemble member's number, are left out.

    Raises:
        UserError: its grid is not of rows and columns.
    """
    _check_grid(dataset, where)
    valid = dataset.coords.get("valid_time")
    along = None if valid is None or valid.ndim != 1 else str(valid.dims[0])
    if valid is not None and along in ("time", "step"):
        # The times that fields are for; GRIB's own time is that of the analysis or forecast run.
        dataset = dataset.drop_vars([x for x in ("time", along) if x in dataset.coords])
        dataset = dataset.rename({along: "time"} if along != "time" else {})
        dataset = dataset.assign_coords(time=("time", valid.values))
    dataset = dataset.drop_vars([name for name in dataset.coords if name not in dataset.dims])
    for standard, others in OTHER_NAMES.items():
        other = next((name for name in others if name in dataset.dims), None)
        if other is not None and standard not in dataset.dims:
            dataset = dataset.rename({other: standard})
    if "level" in dataset.coords and dataset["level"].attrs.get("units") == "Pa":
        dataset = dataset.assign_coords(level=dataset["level"].values / PASCALS)
    return dataset


def without_single_dims(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset without dims of length 1 such as GRIB's `number`, `step` or `surface`."""
    known = {*OTHER_NAMES, *(name for others in OTHER_NAMES.values() for name in others)}
    single = [dim for dim, size in dataset.sizes.items() if size == 1 and dim not in known]
    found = dataset.isel(dict.fromkeys(single, 0))
    for name, array in dataset.variables.items():
        kept = [axis for axis, dim in enumerate(array.dims) if dim not in single]
        for key in CHUNKS:
            if len(kept) < array.ndim and array.encoding.get(key):
                sizes = array.encoding[key]
                found[name].encoding[key] = tuple(sizes[axis] for axis in kept)
    return found


def scalar_level(dataset: xr.Dataset) -> int | None:
    """The pressure level, in hPa, that a dataset without a dim of levels says it is on."""
    for name in ("level", *OTHER_NAMES["level"]):
        if name in dataset.coords and name not in (*dataset.dims, *MODEL_LEVELS):
            level = dataset[name]
            if not level.ndim and np.issubdtype(level.dtype, np.number):
                return round(float(level) / (PASCALS if level.attrs.get("units") == "Pa" else 1))
    return None


def has_model_levels(dataset: xr.Dataset) -> bool:
    """Whether its levels are those of a model, by number, as names and attributes say.

    Give it the dataset as it came, before its dims are renamed.
    """
    if any(name in dataset.dims for name in MODEL_LEVELS):
        return True
    said = dataset["level"].attrs if "level" in dataset.coords else {}
    long_name = str(said.get("long_name", "")).lower()
    return said.get("standard_name") in MODEL_LEVEL_NAMES or "model level" in long_name


def _check_grid(dataset: xr.Dataset, where: str) -> None:
    """Refuse, by its name, a grid whose cells don't lie on rows and columns."""
    kinds = {str(array.attrs.get("GRIB_gridType", "")) for array in dataset.variables.values()}
    known = next((GRID_TYPES[kind] for kind in sorted(kinds) if kind in GRID_TYPES), None)
    dims = [str(dim) for dim in dataset.dims if dim in CELLS]
    for standard in HORIZONTAL:
        for name in (standard, *OTHER_NAMES[standard]):
            if name in dataset.variables and name not in dataset.dims:
                dims += [", ".join(map(str, dataset[name].dims))] if dataset[name].dims else []
    if known is None and not dims:
        return
    if known is None:
        known = "curvilinear or regional" if "," in dims[-1] else "reduced Gaussian or unstructured"
    raise _error(
        where,
        f"has a {known} grid{f' (cells along {dims[-1]})' if dims else ''}, but a grid with a row "
        "for each latitude and a column for each longitude is needed: regrid it first",
    )


def check_coordinates(dataset: xr.Dataset, where: str, timed: bool = True) -> None:
    """Refuse coordinates on which row, column or time numbers would mean something else.

    Args:
        dataset: with its standard names.
        where: as messages name it.
        timed: whether it needs times.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotone, or longitude is not
            one whole circle in equal steps.
    """
    for dim in ("time", *HORIZONTAL) if timed else HORIZONTAL:
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _error(
                where,
                f"needs one-dimensional coordinates time, latitude and longitude, but has "
                f"{', '.join(map(str, dataset.dims))}; {dim} is missing",
            )
    if timed:
        _check_time(dataset, where)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, where)
    _check_longitude(dataset["longitude"].values, where)


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if not np.issubdtype(times.dtype, np.datetime64):
        calendar = getattr(times.flat[0], "calendar", None) if times.size else None
        found = f", but in {calendar}" if calendar else ""
        raise _error(where, f"time is not in the standard calendar{found}")
    if len(times) == 0:
        raise _error(where, "has no times")
    if np.isnat(times).any():
        raise _error(where, "time has missing values")
    wrong = np.flatnonzero(np.diff(times) <= np.timedelta64(0))
    if len(wrong):
        one, other = times[wrong[0] : wrong[0] + 2].astype("datetime64[m]")
        raise _error(where, f"time does not rise throughout: after {one} comes {other}")


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
            f"{np.abs(steps).min():g} to {widest:g} degrees; a regional grid can't be used",
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
            f"repeating its first column, but goes from {longitude[0]:g} to {longitude[-1]:g}; "
            "a regional grid can't be used",
        )


def _error(where: str, what: str) -> UserError:
    return UserError(f"{where}: {what}. Change data.store.")

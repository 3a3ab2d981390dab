"""The coordinates of gridded datasets: how they are found, and what is refused.

Times, levels, latitudes and longitudes come under many names. `standardise_dims` brings them to one
form, `squeeze_other_dims` drops dims of length 1, and `check_coordinates` refuses coordinates with
which row, column or time indices would mean something else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE, POLE
from credit_dp.data.units import canonical_unit
from credit_dp.errors import UserError

PRESSURE_LEVELS = ("pressure_level", "isobaricInhPa", "plev")  # names of dims
MODEL_LEVELS = ("hybrid", "model_level", "model_level_number")  # names of dims
MODEL_LEVEL_NAMES = (  # CF standard names of the coordinate
    "model_level_number",
    "atmosphere_hybrid_sigma_pressure_coordinate",
    "atmosphere_hybrid_height_coordinate",
)
DIM_ALIASES: Mapping[str, tuple[str, ...]] = {
    "time": ("valid_time",),
    "latitude": ("lat",),
    "longitude": ("lon",),
    "level": (*PRESSURE_LEVELS, *MODEL_LEVELS),
}
NAMES_OF_TIME = ("time", "times", "date", "dates", "datetime")  # that are not read
PRESSURES = {"hPa": 1.0, "Pa": 0.01, "kPa": 10.0}  # factors to hPa
LARGEST_HPA = 2000  # levels beyond it are in Pa if the store gives no unit
HORIZONTAL = ("latitude", "longitude")
GRID_TYPES = {  # GRIB's names of grids that can't be read
    "reduced_gg": "reduced Gaussian",
    "rotated_ll": "rotated regional",
    "lambert": "Lambert regional",
    "polar_stereographic": "polar stereographic regional",
    "healpix": "HEALPix",
}
CHUNKS = ("chunks", "shards", "chunksizes")  # keys in the encoding of a variable
# Names of the one dim that unstructured grids have in place of latitude and longitude.
CELLS = ("values", "cell", "cells", "ncells", "nCells", "grid_index")


def standardise_dims(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """Rename the dims to time, level, latitude and longitude; their order stays.

    Coordinates that are not dims, such as the number of an ensemble member, are dropped.

    Raises:
        UserError: the grid does not consist of rows and columns.
    """
    _check_grid(dataset, where)
    valid = dataset.coords.get("valid_time")
    time_dim = None if valid is None or valid.ndim != 1 else str(valid.dims[0])
    if valid is not None and time_dim in ("time", "step"):
        # valid_time is the time of the fields; GRIB's `time` is when the analysis or forecast
        # started, and would repeat if the dim were `step`.
        dataset = dataset.drop_vars([x for x in ("time", time_dim) if x in dataset.coords])
        dataset = dataset.rename({time_dim: "time"} if time_dim != "time" else {})
        dataset = dataset.assign_coords(time=("time", valid.values))
    dataset = dataset.drop_vars([name for name in dataset.coords if name not in dataset.dims])
    for standard, aliases in DIM_ALIASES.items():
        alias = next((name for name in aliases if name in dataset.dims), None)
        if alias is not None and standard not in dataset.dims:
            dataset = dataset.rename({alias: standard})
    if "level" in dataset.coords:
        scale = _in_hpa(dataset["level"])
        if scale != 1:
            # Rounded because 70 hPa are 7.0 kPa, whose tenfold is not quite a whole number.
            dataset = dataset.assign_coords(level=(dataset["level"].values * scale).round(9))
    return dataset


def _in_hpa(level: xr.DataArray) -> float:
    """Return the factor to hPa, by the unit or, without one, by the size of the numbers."""
    unit = _unit(level)
    if unit in PRESSURES:
        return PRESSURES[unit]
    is_number = level.size > 0 and np.issubdtype(level.dtype, np.number)
    return PRESSURES["Pa" if not unit and is_number and level.max() > LARGEST_HPA else "hPa"]


def _unit(level: xr.DataArray) -> str:
    return canonical_unit(str(level.attrs.get("units", "")))


def squeeze_other_dims(dataset: xr.Dataset) -> xr.Dataset:
    """Drop dims of length 1 such as GRIB's `number`, `step` or `surface`."""
    known = {*DIM_ALIASES, *(name for aliases in DIM_ALIASES.values() for name in aliases)}
    single = [dim for dim, size in dataset.sizes.items() if size == 1 and dim not in known]
    squeezed = dataset.isel(dict.fromkeys(single, 0))
    for name, array in dataset.variables.items():
        # isel() keeps the encoding as it was: chunk shapes have to lose the same dims.
        kept = [axis for axis, dim in enumerate(array.dims) if dim not in single]
        for key in CHUNKS:
            if len(kept) < array.ndim and array.encoding.get(key):
                sizes = array.encoding[key]
                squeezed[name].encoding[key] = tuple(sizes[axis] for axis in kept)
    return squeezed


def scalar_level(dataset: xr.Dataset) -> int | None:
    """Return the pressure level in hPa of a dataset without a level dim; None if unknown."""
    for name in ("level", *DIM_ALIASES["level"]):
        if name in dataset.coords and name not in (*dataset.dims, *MODEL_LEVELS):
            level = dataset[name]
            if not level.ndim and np.issubdtype(level.dtype, np.number):
                return round(float(level) * _in_hpa(level))
    return None


def has_model_levels(dataset: xr.Dataset) -> bool | None:
    """Whether the levels are numbers of model levels; None if nothing says what they are.

    Their names and attributes say so, or numbers that can't be pressures, such as 1 to 137.

    Call this before `standardise_dims` renames the dims.
    """
    if any(name in dataset.dims for name in MODEL_LEVELS):
        return True
    name = next((name for name in ("level", *DIM_ALIASES["level"]) if name in dataset.coords), None)
    if name is None:
        return None
    level = dataset[name]
    long_name = str(level.attrs.get("long_name", "")).lower()
    standard_name = level.attrs.get("standard_name", "")
    if standard_name in MODEL_LEVEL_NAMES or "model level" in long_name:
        return True
    if name in PRESSURE_LEVELS or standard_name == "air_pressure" or _unit(level) in PRESSURES:
        return False
    is_number = level.ndim == 1 and level.dtype.kind in "iuf"
    return True if is_number and are_consecutive(level.values.tolist()) else None


def are_consecutive(levels: Sequence[float]) -> bool:
    """Whether levels are four or more numbers that follow each other, as no pressures do."""
    return len(levels) > 3 and bool((np.abs(np.diff(levels)) == 1).all())


def whole_number_levels(dataset: xr.Dataset, where: str, key: str) -> tuple[int, ...]:
    """Return the levels in the store's order; empty if it has no level dim.

    Args:
        dataset: with standard dims.
        where: name of the store in error messages.
        key: the key of the store in error messages.

    Raises:
        UserError: the level coordinate has no values, or they are not unique whole numbers.
    """
    if "level" not in dataset.dims:
        return ()
    if "level" not in dataset.coords:
        raise UserError(f"{where}: has a dim level, but no values for it. Change {key}.")
    values = dataset["level"].values
    is_numeric = np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()
    if not is_numeric or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change {key}."
        )
    if len(set(values.tolist())) < len(values):
        raise UserError(f"{where}: a level comes twice: {values.tolist()}. Change {key}.")
    return tuple(int(level) for level in values)


def chunk_length(array: xr.DataArray, dim: str) -> int:
    """Return the length of an array's chunks along a dim; 1 for an array without chunks."""
    # xarray has the chunks of zarr and of netCDF under different names.
    chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
    return int(chunks[array.dims.index(dim)]) if chunks else 1


def in_dim_order(values: NDArray[Any], dims: Sequence[str], order: Sequence[str]) -> NDArray[Any]:
    """Return values with their dims in this order; dims that they lack have the length 1."""
    missing = [dim for dim in order if dim not in dims]
    all_dims = [*missing, *dims]
    values = values.reshape((1,) * len(missing) + values.shape)
    return values.transpose([all_dims.index(dim) for dim in order])


def _check_grid(dataset: xr.Dataset, where: str) -> None:
    """Refuse a grid that does not consist of rows and columns, and name its type."""
    grid_types = {str(array.attrs.get("GRIB_gridType", "")) for array in dataset.variables.values()}
    grid_name = next(
        (GRID_TYPES[grid_type] for grid_type in sorted(grid_types) if grid_type in GRID_TYPES), None
    )
    dims = [str(dim) for dim in dataset.dims if dim in CELLS]
    for standard in HORIZONTAL:
        for name in (standard, *DIM_ALIASES[standard]):
            if name in dataset.variables and name not in dataset.dims:
                dims += [", ".join(map(str, dataset[name].dims))] if dataset[name].dims else []
    if grid_name is None and not dims:
        return
    if grid_name is None:
        grid_name = (
            "curvilinear or regional" if "," in dims[-1] else "reduced Gaussian or unstructured"
        )
    raise _store_error(
        where,
        f"has a {grid_name} grid{f' (cells along {dims[-1]})' if dims else ''}, but a grid with a "
        "row for each latitude and a column for each longitude is needed: regrid it first",
    )


def check_coordinates(dataset: xr.Dataset, where: str, timed: bool = True) -> None:
    """Refuse coordinates with which row, column or time indices would mean something else.

    Args:
        dataset: with standard names of dims.
        where: its address as messages show it.
        timed: whether it needs times.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotonic, or longitude does
            not go round the globe once in equal steps.
    """
    for dim in ("time", *HORIZONTAL) if timed else HORIZONTAL:
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _store_error(
                where,
                "needs one-dimensional coordinates time, latitude (or lat) and longitude (or lon), "
                f"but has {', '.join(map(str, dataset.dims))}; {dim} "
                + ("has no values" if dim in dataset.dims else "is missing"),
            )
    if timed:
        _check_time(dataset, where)
    else:
        _refuse_other_names_of_time(dataset, where)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, where)
    _check_longitude(dataset["longitude"].values, where)


def _refuse_other_names_of_time(dataset: xr.Dataset, where: str) -> None:
    """Refuse times under a name that is not read, whose variables would count as static fields."""
    for dim in map(str, dataset.dims):
        has_dates = dim in dataset.coords and np.issubdtype(dataset[dim].dtype, np.datetime64)
        if has_dates or dim.lower() in NAMES_OF_TIME:
            raise UserError(
                f"{where}: needs times named time (or valid_time), but they are named {dim}. "
                "Rename that dimension and its coordinate, or change data.store."
            )


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if np.issubdtype(times.dtype, np.number) or times.dtype.kind in "SU":
        kind = "texts" if times.dtype.kind in "SU" else "numbers without a unit"
        raise _store_error(
            where,
            f"time has {kind}, not dates: its attribute units has to be like "
            "'hours since 1900-01-01'",
        )
    if not np.issubdtype(times.dtype, np.datetime64):
        calendar = getattr(times.flat[0], "calendar", None) if times.size else None
        calendar_note = f", but in {calendar}" if calendar else ""
        raise _store_error(where, f"time is not in the standard calendar{calendar_note}")
    if len(times) == 0:
        raise _store_error(where, "has no times")
    if np.isnat(times).any():
        raise _store_error(where, "time has missing values")
    wrong = np.flatnonzero(np.diff(times) <= np.timedelta64(0, "D"))
    if len(wrong):
        earlier, later = times[wrong[0] : wrong[0] + 2].astype("datetime64[m]")
        raise _store_error(where, f"time must increase throughout, but {later} follows {earlier}")


def _check_latitude(latitude: np.ndarray, where: str) -> None:
    """Refuse latitudes that area weights and pole padding could not use.

    Both assume that the outermost rows are next to the poles, and that rows are equally wide.
    """
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise _store_error(where, "latitude must increase or decrease throughout")
    if np.abs(latitude).max() > POLE:
        raise _store_error(where, "latitude must lie within -90 to 90 degrees")
    if len(latitude) < 2:
        raise _store_error(where, "needs at least two rows of latitude, has one")
    widest = np.abs(steps).max()
    # Between the outermost row and its pole.
    gap = POLE - min(abs(latitude[0]), abs(latitude[-1]))
    if latitude[0] * latitude[-1] >= 0 or gap > 1.5 * widest or widest > 2 * np.abs(steps).min():
        raise _store_error(
            where,
            f"latitude must cover the globe from pole to pole in roughly equal steps, but "
            f"goes from {latitude[0]:g} to {latitude[-1]:g} in steps of "
            f"{np.abs(steps).min():g} to {widest:g} degrees; a regional grid can't be used",
        )


def _check_longitude(longitude: np.ndarray, where: str) -> None:
    """Refuse longitudes that don't close the circle: models pad the last column by the first."""
    steps = np.diff(np.append(longitude, longitude[0])) % FULL_CIRCLE
    # Columns may go east or west, but all of them the same way.
    signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
    is_even_step = np.abs(np.abs(signed) - FULL_CIRCLE / len(longitude)) < 1e-2 * FULL_CIRCLE / len(
        longitude
    )
    if len(longitude) > 2 and not (is_even_step.all() and len(set(np.sign(signed))) == 1):
        raise _store_error(
            where,
            f"longitude must go once round the globe in {len(longitude)} equal steps, without "
            f"repeating its first column, but goes from {longitude[0]:g} to {longitude[-1]:g}; "
            "a regional grid can't be used",
        )


def _store_error(where: str, problem: str) -> UserError:
    return UserError(f"{where}: {problem}. Change data.store.")

"""What a store must look like, checked by names and coordinates before any field is read."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from credit_dp.config import DataConfig
from credit_dp.data.forcings import COMPUTED
from credit_dp.data.grid import FULL_CIRCLE, POLE, parse_grid
from credit_dp.data.schema import suggestions
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


def check_coordinates(dataset: xr.Dataset, config: DataConfig) -> None:
    """Refuse coordinates on which row, column or time numbers would mean something else.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotone, or longitude is not
            one whole circle in equal steps.
    """
    for dim in ("time", *HORIZONTAL):
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _error(
                config,
                f"needs one-dimensional coordinates time, latitude and longitude, but has "
                f"{', '.join(map(str, dataset.dims))}; {dim} is missing",
                "data.store",
            )
    _check_time(dataset, config)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, config)
    _check_longitude(dataset["longitude"].values, config)
    if config.grid is not None:
        rows, columns = parse_grid(config.grid)
        if (rows, columns) != (len(latitude), dataset.sizes["longitude"]):
            raise _error(
                config,
                f"has {len(latitude)}x{dataset.sizes['longitude']} rows and columns, but "
                f"data.grid asks for {rows}x{columns}; a store is read as it is",
                "data.grid, to null,",
            )


def check_variables(dataset: xr.Dataset, config: DataConfig) -> None:
    """Refuse variables that are missing, named twice, or without the dims of their kind.

    Raises:
        UserError: naming the variable, the suggestions matches and the key to change.
    """
    seen: set[str] = set()
    for kind in ("prognostic", "forcing", "static"):
        names: list[str] = getattr(config, kind)
        for name in names:
            if name in seen:
                raise UserError(
                    f"data.{kind}: {name} is in another list of the data config already. "
                    f"Take it out of one."
                )
            seen.add(name)
            if kind == "forcing" and name in COMPUTED:
                continue
            _check_present(dataset, config, name, kind)
            _check_dims(dataset, config, name, kind)


def wanted_levels(dataset: xr.Dataset, config: DataConfig) -> list[int]:
    """The levels of the config, or all of the store's in rising order. Empty if it has none.

    Raises:
        UserError: a level is not in the store, or its levels are not whole numbers.
    """
    if "level" not in dataset.coords:
        if "level" in dataset.dims:
            raise _error(config, "has a dim level, but no values for it", "data.store")
        if config.levels:
            raise _error(config, "has no level coordinate", "data.levels, to null,")
        return []
    values = dataset["level"].values
    if not np.issubdtype(values.dtype, np.number) or (values != values.astype(int)).any():
        raise _error(
            config, f"levels must be whole numbers, but are {values.tolist()}", "data.store"
        )
    present = [int(level) for level in values]
    if config.levels is None:
        return sorted(present)
    if not config.levels:
        raise UserError("data.levels: needs at least one level, or null for all of the store's.")
    for level in config.levels:
        if level not in present:
            raise _error(
                config,
                f"has no level {level}. There are: {', '.join(map(str, sorted(present)))}",
                "data.levels",
            )
    return list(config.levels)


def _check_time(dataset: xr.Dataset, config: DataConfig) -> None:
    times = dataset["time"].values
    if not np.issubdtype(times.dtype, np.datetime64):
        raise _error(config, "time is not in the standard calendar", "data.store")
    if len(times) == 0 or np.isnat(times).any() or not np.all(np.diff(times) > np.timedelta64(0)):
        raise _error(config, "time does not rise throughout", "data.store")


def _check_latitude(latitude: np.ndarray, config: DataConfig) -> None:
    """Weights and padding take the outermost rows to be next to the poles, and rows to be alike."""
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise _error(config, "latitude neither rises nor falls throughout", "data.store")
    if np.abs(latitude).max() > POLE:
        raise _error(config, "latitude must lie within -90 to 90 degrees", "data.store")
    if len(latitude) < 2:
        raise _error(config, "needs at least two rows of latitude, has one", "data.store")
    widest = np.abs(steps).max()
    gap = POLE - min(abs(latitude[0]), abs(latitude[-1]))
    if latitude[0] * latitude[-1] >= 0 or gap > 1.5 * widest or widest > 2 * np.abs(steps).min():
        raise _error(
            config,
            f"latitude must cover the globe from pole to pole in rows of about one distance, but "
            f"goes from {latitude[0]:g} to {latitude[-1]:g} in steps of "
            f"{np.abs(steps).min():g} to {widest:g} degrees",
            "data.store",
        )


def _check_longitude(longitude: np.ndarray, config: DataConfig) -> None:
    """Models take the last column to be next to the first, so the circle must close evenly."""
    steps = np.diff(np.append(longitude, longitude[0])) % FULL_CIRCLE
    signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
    even = np.abs(np.abs(signed) - FULL_CIRCLE / len(longitude)) < 1e-2 * FULL_CIRCLE / len(
        longitude
    )
    if len(longitude) > 2 and not (even.all() and len(set(np.sign(signed))) == 1):
        raise _error(
            config,
            f"longitude must go once round the globe in {len(longitude)} equal steps, without "
            f"repeating its first column, but goes from {longitude[0]} to {longitude[-1]}",
            "data.store",
        )


def _check_present(dataset: xr.Dataset, config: DataConfig, name: str, kind: str) -> None:
    if name in dataset.data_vars:
        return
    available = [str(variable) for variable in dataset.data_vars]
    if kind == "forcing":
        available += list(COMPUTED)
    raise _error(config, f"no variable {name}. {suggestions(name, available)}", f"data.{kind}")


def _check_dims(dataset: xr.Dataset, config: DataConfig, name: str, kind: str) -> None:
    dims = tuple(str(dim) for dim in dataset[name].dims)
    needed = set(HORIZONTAL) if kind == "static" else {"time", *HORIZONTAL}
    allowed = needed | {"level"} if kind == "prognostic" else needed
    if needed <= set(dims) <= allowed:
        return
    advice = ""
    if kind == "static" and "time" in dims:
        advice = "; what changes in time belongs to data.forcing"
    if kind == "forcing" and "time" not in dims:
        advice = "; what has no time belongs to data.static"
    order = [dim for dim in ("time", "level", *HORIZONTAL) if dim in allowed]
    raise _error(
        config,
        f"{name} has the dims {', '.join(dims) or 'none'}, but a {kind} variable needs "
        f"{', '.join(order)}{' (level may be absent)' if 'level' in allowed else ''}{advice}",
        f"data.{kind} or data.store",
    )


def _error(config: DataConfig, what: str, keys: str) -> UserError:
    return UserError(f"{config.store}: {what}. Change {keys}.")

"""The zarr store: dimensions, chunks, names and units as in WeatherBench 2.

Dims are `time, level, latitude, longitude`, latitude from north to south. An inner chunk holds one
time step, all levels and a quarter of the rows, so that the balanced bands of 2 and 4 ranks begin
and end on chunk edges; one shard (a file) holds all rows of several steps of a single run.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.quickstart.model import LEVELS
from credit_dp.data.quickstart.spans import Run, Times, shard_steps
from credit_dp.data.quickstart.spectral import Array
from credit_dp.data.quickstart.synthesis import Synthesis

ON_LEVELS = {
    "geopotential": ("geopotential", "m**2 s**-2"),
    "temperature": ("air_temperature", "K"),
    "u_component_of_wind": ("eastward_wind", "m s**-1"),
    "v_component_of_wind": ("northward_wind", "m s**-1"),
}
AT_SURFACE = {
    "mean_sea_level_pressure": ("air_pressure_at_mean_sea_level", "Pa"),
    "2m_temperature": ("air_temperature", "K"),
}
STATICS = {
    "geopotential_at_surface": ("surface_geopotential", "m**2 s**-2"),
    "land_sea_mask": ("land_area_fraction", "1"),
}
BANDS = 4


def create(path: Path, synthesis: Synthesis, members: list[Run], title: str) -> None:
    """Makes the store at `path`: coordinates and statics written, the rest empty."""
    group = zarr.create_group(
        path, zarr_format=3, attributes={"title": title, "Conventions": "CF-1.11"}
    )
    _coordinates(group, synthesis, np.concatenate([run.times for run in members]))
    grid = (len(synthesis.latitude), len(synthesis.longitude))
    band = -(-grid[0] // BANDS)
    for name, values in synthesis.statics().items():
        standard_name, units = STATICS[name]
        _whole(group, name, values, ("latitude", "longitude"), standard_name, units)
    times = sum(run.steps for run in members)
    together = shard_steps(members[0].steps, grid)
    for name, (standard_name, units) in (ON_LEVELS | AT_SURFACE).items():
        levels = (len(LEVELS),) if name in ON_LEVELS else ()
        group.create_array(
            name,
            shape=(times, *levels, *grid),
            chunks=(1, *levels, band, grid[1]),
            shards=(together, *levels, band * -(-grid[0] // band), grid[1]),
            dtype=np.float32,
            fill_value=np.nan,
            compressors=None,
            dimension_names=("time", *(("level",) if levels else ()), "latitude", "longitude"),
            attributes={"standard_name": standard_name, "long_name": name, "units": units},
        )


def write(path: Path, first: int, fields: dict[str, Array]) -> None:
    """Writes whole shards: `fields` begin at time step `first`."""
    group = zarr.open_group(path, mode="r+", zarr_format=3, use_consolidated=False)
    for name, values in fields.items():
        array = group[name]
        if not isinstance(array, zarr.Array):
            raise TypeError(f"{path / name} is no array")
        array[first : first + len(values)] = values


def finish(path: Path) -> None:
    """Gathers all metadata in one file, so that opening reads one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        zarr.consolidate_metadata(path, zarr_format=3)


def _coordinates(group: zarr.Group, synthesis: Synthesis, times: Times) -> None:
    hours = (times - times[0]) // np.timedelta64(1, "h")
    since = f"hours since {np.datetime_as_string(times[0], unit='D')}"
    time = _whole(group, "time", hours.astype(np.int64), ("time",), "time", since)
    time.attrs["calendar"] = "proleptic_gregorian"
    level = np.array(LEVELS, np.int64)
    _whole(group, "level", level, ("level",), "air_pressure", "hPa").attrs["positive"] = "down"
    for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
        _whole(group, name, getattr(synthesis, name), (name,), name, units)


def _whole(
    group: zarr.Group,
    name: str,
    values: NDArray[Any],
    dims: tuple[str, ...],
    standard_name: str,
    units: str,
) -> zarr.Array[Any]:
    attributes: dict[str, Any] = {"standard_name": standard_name, "long_name": name, "units": units}
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=values.shape,
        dtype=values.dtype,
        compressors=None,
        dimension_names=dims,
        attributes=attributes,
    )
    array[...] = values
    return array

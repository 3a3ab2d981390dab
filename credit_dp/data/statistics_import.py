"""Statistics that others computed: datasets of means and standard deviations.

Two or three datasets (zarr or netCDF): of means, of standard deviations and, if there is one, of
standard deviations of the change over a step, each with the same variables; or one dataset, in
which NAME_mean (or NAME), NAME_std and NAME_tendency_std are those of NAME. A variable is a number
or has one dim, its levels.

Variables go by the names of ERA5 in WeatherBench 2, by ECMWF's short names, or by those of
miles-credit.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr
import zarr

from credit_dp.data.disk import open_disk
from credit_dp.data.schema import Channel
from credit_dp.data.sources.address import (
    check_address,
    is_remote,
    local_path,
    reason_of,
    without_secrets,
)
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.variable_names import CONSTANTS, SURFACE, UPPER

SUFFIXES = {"mean": ("_mean", ""), "std": ("_std",), "tendency_std": ("_tendency_std",)}

# The names of miles-credit's training data that are not ECMWF's; T500 and the like are one level.
MILES_CREDIT: Mapping[str, str] = MappingProxyType(
    {
        "U": "u_component_of_wind",
        "V": "v_component_of_wind",
        "T": "temperature",
        "Q": "specific_humidity",
        "Z": "geopotential",
        "W": "vertical_velocity",
        "SP": "surface_pressure",
        "MSL": "mean_sea_level_pressure",
        "SST": "sea_surface_temperature",
        "t2m": "2m_temperature",
        "d2m": "2m_dewpoint_temperature",
        "u10": "10m_u_component_of_wind",
        "v10": "10m_v_component_of_wind",
        "tsi": "toa_incident_solar_radiation",
        "Z_GDS4_SFC": "geopotential_at_surface",
        "LSM": "land_sea_mask",
    }
)


def read_foreign(entries: Sequence[str], store: Store) -> dict[str, dict[str, float]]:
    """The statistics of the store's channels, as far as the datasets have them.

    A row without `tendency_std` is of a variable of which no dataset says it; a range, which none
    of them has, is NaN. Forcings and statics that are in no dataset are left out.

    Raises:
        UserError: a dataset can't be read, or has no mean or std of a channel that comes out.
    """
    if len(entries) > len(SUFFIXES):
        raise UserError(
            "data.statistics: needs one file, or those of mean, std and tendency std, got "
            f"{len(entries)}"
        )
    datasets = [_opened(entry) for entry in entries]
    out = store.channels.out
    inputs = [Channel(name) for name in (*store.channels.forcing, *store.channels.static)]
    table = {}
    for channel in (*out, *inputs):
        row = {"minimum": float("nan"), "maximum": float("nan")}
        for place, number in enumerate(SUFFIXES):
            value = _number(entries, datasets, channel, number, place)
            if value is not None:
                row[number] = value
            elif channel in out and (number != "tendency_std" or len(entries) == len(SUFFIXES)):
                raise UserError(
                    f"{entries[min(place, len(entries) - 1)]}: has no {number} of {channel.name}. "
                    "Change data.statistics, to null for those of the training dates."
                )
        if {"mean", "std"} <= row.keys():
            table[channel.name] = row
    return table


def _number(
    entries: Sequence[str],
    datasets: Sequence[xr.Dataset],
    channel: Channel,
    number: str,
    place: int,
) -> float | None:
    """One number of a channel; None if the datasets do not have it."""
    alone = len(datasets) == 1
    if not alone and place >= len(datasets):
        return None
    dataset = datasets[0 if alone else place]
    where = entries[0 if alone else place]
    suffixes = SUFFIXES[number] if alone else ("",)
    for name in _names(channel.variable):
        for suffix in suffixes:
            flat = {f"{name}{channel.level}{suffix}", f"{name}_{channel.level}{suffix}"}
            for found in sorted(flat & set(map(str, dataset))):
                return _value(dataset[found], Channel(channel.variable), where)
            if name + suffix in dataset and not _is_another(dataset[name + suffix], name, channel):
                return _value(dataset[name + suffix], channel, where)
    return None


def _is_another(array: xr.DataArray, name: str, channel: Channel) -> bool:
    """Whether a short name stands for a variable on levels, where one off them is asked for.

    `z` is the geopotential, or that at the surface.
    """
    on_levels = any(dim in array.coords for dim in array.dims)
    return name != channel.variable and channel.level is None and on_levels


def _names(variable: str) -> list[str]:
    """What a variable may be called."""
    tables = (MILES_CREDIT, UPPER, SURFACE, CONSTANTS)
    return [variable, *(short for x in tables for short, long in x.items() if long == variable)]


def _value(array: xr.DataArray, channel: Channel, where: str) -> float | None:
    """The number of the channel's level; None if that level is not there."""
    array = array.squeeze()
    if channel.level is None and not array.ndim:
        return _finite(float(array.values), channel, where)
    dim = str(array.dims[0]) if array.ndim == 1 else ""
    if channel.level is None or array.ndim > 1 or (dim and dim not in array.coords):
        raise UserError(
            f"{where}: {array.name} needs to be a number for each level, with the levels' values, "
            f"but has the dims {', '.join(map(str, array.dims)) or 'none'}. Change data.statistics."
        )
    levels = array[dim].values if dim else _scalar_level(array, where)
    if not np.issubdtype(levels.dtype, np.number):
        raise UserError(
            f"{where}: {array.name} has levels that are no numbers. Change data.statistics."
        )
    places = np.flatnonzero(levels == channel.level)
    if not len(places):
        return None
    return _finite(float(np.atleast_1d(array.values)[places[0]]), channel, where)


def _scalar_level(array: xr.DataArray, where: str) -> np.ndarray[Any, Any]:
    """The level of a variable that has one only."""
    for coordinate in array.coords.values():
        if np.issubdtype(coordinate.dtype, np.number) and not coordinate.ndim:
            return np.atleast_1d(coordinate.values)
    raise UserError(
        f"{where}: {array.name} does not say of which level it is. Change data.statistics."
    )


def _finite(value: float, channel: Channel, where: str) -> float:
    if not np.isfinite(value):
        raise UserError(f"{where}: {channel.name} is {value}. Change data.statistics.")
    return value


def _opened(where: str) -> xr.Dataset:
    """The dataset at a path or address.

    Raises:
        UserError: there is none that can be read.
    """
    check_address(where)
    try:
        if not is_remote(where) and local_path(where).is_file():
            dataset = xr.open_dataset(local_path(where), engine="netcdf4")
        else:
            disk = open_disk(where)
            metadata = zarr.open_group(disk, mode="r").metadata
            consolidated = metadata.consolidated_metadata is not None
            dataset = xr.open_zarr(disk, chunks=None, consolidated=consolidated)
        with dataset:
            loaded: xr.Dataset = dataset.load()
        return loaded
    except Exception as error:
        raise UserError(
            f"{without_secrets(where)}: no statistics that can be read ({reason_of(error)}). "
            "Change data.statistics."
        ) from error

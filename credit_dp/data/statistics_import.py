"""Statistics that others computed: datasets of means and standard deviations.

Two or three datasets (zarr or netCDF): of means, of standard deviations and, if there is one, of
standard deviations of the change over a step, each with the same variables; or one dataset, in
which NAME_mean (or NAME), NAME_std and NAME_tendency_std are those of NAME. A variable is a number
or has one dim, its levels.

Variables go by any of their names, see `variable_names.py`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr
import zarr

from credit_dp.data.disk import open_disk
from credit_dp.data.forcings import COMPUTED, COMPUTED_STATICS
from credit_dp.data.schema import Channel
from credit_dp.data.sources.address import (
    check_address,
    is_remote,
    local_path,
    reason_of,
    without_secrets,
)
from credit_dp.data.sources.netcdf import no_garbage_collection
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.variable_names import long_name, names_of_meaning

SUFFIXES = {"mean": ("_mean", ""), "std": ("_std",), "tendency_std": ("_tendency_std",)}
# What a dataset has to have of a channel that comes out, by `normalise`; all of it for any other.
NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"none": (), "std": ("std",)})


def read_foreign(entries: Sequence[str], store: Store) -> dict[str, dict[str, float]]:
    """The statistics of the store's stored channels, as far as the datasets have them.

    A row lacks what no dataset says of its channel; a range, which none of them has, is NaN.

    Raises:
        UserError: a dataset can't be read, or a channel that comes out can't be normalised as the
            config wants it without what a dataset lacks.
    """
    if len(entries) > len(SUFFIXES):
        raise UserError(
            "data.statistics: needs one file, or those of mean, std and tendency std, got "
            f"{len(entries)}"
        )
    datasets = [_opened(entry) for entry in entries]
    out = store.channels.out
    names = (*store.channels.forcing, *store.channels.static)
    inputs = [Channel(x) for x in names if x not in COMPUTED and x not in COMPUTED_STATICS]
    table = {}
    for channel in (*out, *inputs):
        normalise = store.config.of(channel.variable).normalise
        needed = NEEDED.get(normalise, ("mean", "std", "tendency_std")) if channel in out else ()
        row = table[channel.name] = {"minimum": float("nan"), "maximum": float("nan")}
        for place, number in enumerate(SUFFIXES):
            value = _number(entries, datasets, channel, number, place)
            if value is not None:
                row[number] = value
            elif number in needed and (number != "tendency_std" or len(entries) == len(SUFFIXES)):
                raise UserError(
                    f"{entries[min(place, len(entries) - 1)]}: has no {number} of {channel.name}. "
                    "Change data.statistics, to null for those of the training dates, or "
                    f"data.variables.{channel.variable}.normalise to none."
                )
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
    long, level = long_name(channel.variable, channel.level)
    one = Channel(channel.variable, level)
    for name in dict.fromkeys([channel.variable, *names_of_meaning(long)]):
        for suffix in suffixes:
            flat = {f"{name}{level}{suffix}", f"{name}_{level}{suffix}"}
            for found in sorted(flat & set(map(str, dataset))):
                return _value(dataset[found], Channel(channel.variable), where)
            array = dataset.get(name + suffix)
            if array is not None and not _is_another(array, name, one):
                return _value(array, channel if name == channel.variable else one, where)
    return None


def _is_another(array: xr.DataArray, name: str, channel: Channel) -> bool:
    """Whether a short name stands for a variable on levels, where one off them is asked for.

    `z` is the geopotential, or that at the surface.
    """
    on_levels = any(dim in array.coords for dim in array.dims)
    return name != channel.variable and channel.level is None and on_levels


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
            with no_garbage_collection():
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

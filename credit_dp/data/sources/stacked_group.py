"""Zarr groups with one array for all channels: opened, and their small arrays read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray

from credit_dp.data.disk import CountingStore, open_disk, place, stamp
from credit_dp.data.sources.address import reason_of, without_secrets
from credit_dp.data.sources.complete import CompleteStore
from credit_dp.data.sources.intact import IntactStore
from credit_dp.data.sources.source import Source
from credit_dp.errors import UserError


def open_stacked(where: str, arrays: Sequence[str]) -> tuple[zarr.Group, CountingStore]:
    """The zarr group at a path or address, and its counter. All chunks of `arrays` must be there.

    Raises:
        UserError: there is nothing, or nothing that zarr can read.
    """
    disk = open_disk(where)
    try:
        blosc = [name for name, array in zarr.open_group(disk, mode="r").arrays() if _blosc(array)]
        group = zarr.open_group(CompleteStore(IntactStore(disk, blosc), arrays), mode="r")
    except Exception as error:
        raise UserError(
            f"{without_secrets(where)}: not a zarr group that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
    return group, disk


def array_of(group: zarr.Group, name: str, where: str) -> "zarr.Array[Any]":
    """One array of the group.

    Raises:
        UserError: it is missing.
    """
    found = group.get(name)
    if not isinstance(found, zarr.Array):
        raise UserError(f"{where}: has no array {name}. Change data.store.")
    return found


def values_of(group: zarr.Group, name: str, where: str) -> NDArray[Any]:
    """All values of a small array.

    Raises:
        UserError: it is missing, or can't be read.
    """
    array = array_of(group, name, where)
    try:
        return np.asarray(array[...])
    except Exception as error:
        raise UserError(
            f"{where}: its array {name} can't be read ({reason_of(error)}). Change data.store."
        ) from error


def coordinates(source: Source) -> xr.Dataset:
    """What `check_coordinates` looks at."""
    return xr.Dataset(
        coords={"time": source.times, "latitude": source.latitude, "longitude": source.longitude}
    )


def description_of(source: Source, address: str, variables: Sequence[str]) -> list[object]:
    """See `Source.description`."""
    described: list[object] = [place(address), stamp(address)]
    described += [source.latitude.tolist(), source.longitude.tolist()]
    for name in variables:
        variable = source.variables[name]
        described.append([name, variable.timed, list(variable.levels), variable.units])
    return described


def _blosc(array: "zarr.Array[Any]") -> bool:
    """Whether a chunk's file is a Blosc buffer."""
    codecs = array.compressors
    return array.shards is None and bool(codecs) and "Blosc" in type(codecs[-1]).__name__

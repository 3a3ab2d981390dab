"""Opens whatever `data.store` names."""

from collections.abc import Sequence
from itertools import pairwise

import zarr

from credit_dp.config import DataConfig
from credit_dp.data.disk import open_disk
from credit_dp.data.prepared_form import ATTRIBUTE
from credit_dp.data.sources.address import (
    check_address,
    expanded,
    is_remote,
    local_path,
    not_opened,
    without_secrets,
)
from credit_dp.data.sources.anemoi import AnemoiSource
from credit_dp.data.sources.files import FilesSource
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.joined import JoinedSource
from credit_dp.data.sources.netcdf import is_netcdf
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.data.sources.source import Source
from credit_dp.errors import UserError


def open_source(config: DataConfig) -> Source:
    """Open what `config.store` names, in whatever form it is.

    Several entries are joined: along time if none has a time of another, else by variables.

    Raises:
        UserError: there is nothing, nothing that can be read, or its coordinates are not as needed.
    """
    if not config.stores:
        raise UserError("data.store: needs the path of a zarr store, but is empty. Set it.")
    sources = [_open_entry(entry) for entry in config.stores]
    if len(sources) == 1:
        return sources[0]
    if _have_no_time_in_common(sources):
        return FilesSource(sources, without_secrets(", ".join(config.stores)))
    return JoinedSource(sources)


def open_one(where: str) -> Source:
    """Open the store at one path or address, in whatever form it is.

    Raises:
        UserError: there is none that can be read.
    """
    check_address(where)
    if is_netcdf(where):
        return GriddedSource.open(where)
    group = _group(where)
    if ATTRIBUTE in group.attrs:
        return PreparedSource.open(where)
    if _is_anemoi(group):
        return AnemoiSource.open(where)
    return GriddedSource.open(where)


def _open_entry(entry: str) -> Source:
    """One store, or all that a pattern stands for, along time."""
    found = expanded(entry)
    if len(found) == 1:
        return open_one(found[0])
    return FilesSource([open_one(where) for where in found], without_secrets(entry))


def _group(where: str) -> zarr.Group:
    """The zarr group at a path or address."""
    if not is_remote(where) and local_path(where).is_file():
        raise UserError(
            f"{where}: is a file, but not a netCDF file by its name (.nc). Set data.store to a "
            "zarr store or to a netCDF file."
        )
    disk = open_disk(where)
    try:
        return zarr.open_group(disk, mode="r")
    except Exception as error:
        raise not_opened(where, error) from error


def _is_anemoi(group: zarr.Group) -> bool:
    data = group.get("data")
    return isinstance(data, zarr.Array) and data.ndim == 4 and "dates" in group


def _have_no_time_in_common(sources: Sequence[Source]) -> bool:
    ordered = sorted(sources, key=lambda source: source.times[0])
    return all(later.times[0] > earlier.times[-1] for earlier, later in pairwise(ordered))

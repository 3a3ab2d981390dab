"""Arrays of a forecast on disk, read alike from zarr and netCDF, a field at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import netCDF4
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore

from credit_dp.data.sources.address import reason_of
from credit_dp.errors import UserError
from credit_dp.forecast.netcdf_file import LIBRARY


@final
@dataclass(frozen=True)
class StoredArray:
    """What is said of an array, and the array itself, from which values come by `[...]`."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    values: Any


@contextmanager
def stored_in(place: Path) -> Iterator[Mapping[str, StoredArray]]:
    """The arrays of a zarr store or a netCDF file, by name.

    Raises:
        UserError: it can't be opened.
    """
    if place.is_dir():
        yield _of_zarr(place)
        return
    with LIBRARY:
        try:
            file = netCDF4.Dataset(place)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{place}: can't be opened ({reason_of(error)}).") from error
        file.set_auto_maskandscale(False)
    try:
        yield {
            name: StoredArray(found.dimensions, found.shape, found.__dict__, found)
            for name, found in file.variables.items()
        }
    finally:
        with LIBRARY:
            file.close()


def read_field(array: StoredArray, place: tuple[Any, ...], where: str) -> NDArray[Any]:
    """The values at a place; every checksum is looked at.

    Args:
        where: what it is, for a message.

    Raises:
        UserError: they can't be decoded.
    """
    try:
        with LIBRARY if isinstance(array.values, netCDF4.Variable) else nullcontext():
            return np.asarray(array.values[place])
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{where}: can't be decoded ({reason_of(error)}).") from error


def _of_zarr(place: Path) -> dict[str, StoredArray]:
    found = {}
    for folder in sorted(path for path in place.iterdir() if path.is_dir()):
        try:
            array = zarr.open_array(LocalStore(place), path=folder.name, mode="r", zarr_format=3)
        except Exception as error:
            raise UserError(
                f"{folder}: has no metadata that can be read ({reason_of(error)})."
            ) from error
        dims = getattr(array.metadata, "dimension_names", None) or ()
        attributes = array.attrs.asdict()
        found[folder.name] = StoredArray(tuple(map(str, dims)), array.shape, attributes, array)
    return found

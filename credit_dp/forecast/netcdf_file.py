"""One netCDF-4 file of a forecast, or of a part of it: all but its fields."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import netCDF4
import numpy as np
from xarray.backends.locks import HDF5_LOCK, NETCDFC_LOCK, combine_locks

from credit_dp.forecast.form import Form, Variable
from credit_dp.forecast.writer import ATTRIBUTE, global_attributes, sync

ROWS = "credit_dp_rows"  # of a file: first row, the row after the last, rows of the globe
LEVEL: Final = 1  # of compression
# The libraries are not safe among threads, and stores may be netCDF, too.
LIBRARY = combine_locks([NETCDFC_LOCK, HDF5_LOCK])


def create(
    path: Path,
    form: Form,
    settings: Mapping[str, Any],
    parts: Mapping[str, slice],
    levels_apart: bool = False,
) -> netCDF4.Dataset:
    """Make a file, open to be written.

    Args:
        settings: what the file says of itself.
        parts: what of a dimension the file has; all where none is given.
        levels_apart: each level is a chunk of its own.
    """
    file = netCDF4.Dataset(path, "w", format="NETCDF4")
    rows = parts.get("latitude", slice(0, form.height))
    file.setncatts(global_attributes(settings))
    file.setncattr(ROWS, np.array([rows.start, rows.stop, form.height], np.int32))
    for name, coordinate in form.coordinates.items():
        values = coordinate.values[parts.get(name, slice(None))]
        file.createDimension(name, len(values))
        made = file.createVariable(name, values.dtype, (name,))
        made.setncatts(coordinate.attributes)
        made[:] = values
    for bounds in form.bounds:
        file.createDimension(bounds.dims[1], 2)
        made = file.createVariable(bounds.name, bounds.values.dtype, bounds.dims)
        made[:] = bounds.values
    for variable in form.variables:
        _make(file, variable, len(form.leading) + (levels_apart and variable.on_levels))
    return file


def _make(file: netCDF4.Dataset, variable: Variable, ones: int) -> None:
    """A variable with chunks of one place along the first `ones` dimensions."""
    sizes = [len(file.dimensions[dim]) for dim in variable.dims]
    made = file.createVariable(
        variable.name,
        "f4",
        variable.dims,
        compression="zlib",
        complevel=LEVEL,
        shuffle=True,
        fletcher32=True,
        chunksizes=[1] * ones + sizes[ones:],
        fill_value=float("nan"),
    )
    made.setncatts(variable.attributes)


def settle(growing: Path, path: Path) -> None:
    """Give a file that has been closed its name, once it is on the disk."""
    sync(growing)
    os.replace(growing, path)


def said_in(path: Path) -> Mapping[str, Any] | None:
    """What the file says of itself; None if it is none of ours, or can't be read."""
    try:
        with LIBRARY, as_os_error(), netCDF4.Dataset(path) as file:
            said: Mapping[str, Any] = json.loads(file.getncattr(ATTRIBUTE))
    except (OSError, AttributeError, ValueError, TypeError):
        return None
    return said


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise what the netCDF library says of a disk as an error of the system."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"netCDF: {error}") from error

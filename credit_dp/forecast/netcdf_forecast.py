"""Forecasts as netCDF-4: a folder of files, or one file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, final

import netCDF4
import numpy as np
from xarray.backends.locks import HDF5_LOCK, NETCDFC_LOCK, combine_locks

from credit_dp.data.sources.address import reason_of
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import write_bytes_atomic
from credit_dp.forecast.format import (
    SETTINGS_ATTRIBUTE,
    ForecastFormat,
    OutputVariable,
    global_attributes,
)
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.stored_forecast import (
    CopiedForecast,
    ForecastFile,
    MissingField,
    StoredArray,
    ZarrForecast,
)

ROWS_ATTRIBUTE = "credit_dp_rows"  # global attribute: first row, last row + 1, rows of the globe
COMPRESSION_LEVEL: Final = 1

# netCDF and HDF5 are not thread-safe. These are xarray's own locks: other threads may read files.
LIBRARY_LOCK = combine_locks([NETCDFC_LOCK, HDF5_LOCK])
MANIFEST = "forecast.json"
BOUNDS_KEY = "bounds"


class NetcdfForecast(CopiedForecast):
    """A forecast as one netCDF file, or several."""

    levels_apart: ClassVar[bool]  # whether each level is a chunk of its own

    @contextmanager
    def open_arrays(self, path: Path) -> Iterator[Mapping[str, StoredArray]]:
        """Open one file, and yield its variables by name."""
        try:
            file = netCDF4.Dataset(path)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: can't be opened ({reason_of(error)}).") from error
        with file:
            file.set_auto_maskandscale(False)  # values as stored, NaN instead of masks
            yield {
                name: StoredArray(array.dimensions, array.shape, array.__dict__, array)
                for name, array in file.variables.items()
            }

    def copy(self, file: ForecastFile, job: ForecastJob, lead: int, store: ZarrForecast) -> None:
        """Copy one lead time to a file, which is created if it does not exist."""
        with LIBRARY_LOCK, as_os_error():
            if not file.path.exists():
                create_file(file.path, self.form, self.settings, file.slices, self.levels_apart)
            with netCDF4.Dataset(file.path, "a") as data:
                for variable in self.form.variables:
                    for rows in file.bands:
                        index = file.field_index(self.form, job, lead, rows)
                        data[variable.name][index] = store.read(variable, job, lead, rows)


@final
class NetcdfFile(NetcdfForecast):
    """A forecast as one netCDF file."""

    levels_apart = True

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings in the file's attributes."""
        return read_file_settings(path)


@final
class NetcdfFolder(NetcdfForecast):
    """A forecast as a folder with one file for each band, initial time and member.

    `forecast.json` in the folder has the settings and the bands, from which all file names follow.
    """

    levels_apart = False

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings in `forecast.json`."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            settings: Mapping[str, Any] = manifest[SETTINGS_ATTRIBUTE]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return settings

    @cached_property
    def bands(self) -> list[slice]:
        """Return the rows of each file."""
        try:
            bounds = list(map(int, json.loads((self.path / MANIFEST).read_text())[BOUNDS_KEY]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path}: {MANIFEST} can't be read. Remove {self.path}."
            ) from error
        return [slice(*pair) for pair in pairwise(bounds)]

    def files(self) -> list[ForecastFile]:
        """Return a file for each forecast and band."""
        return [self._file(job, rows) for job in self.jobs for rows in self.bands]

    def missing(self) -> list[MissingField]:
        """Return all lead times of the files that are gone."""
        return [
            MissingField(file.jobs[0], lead, file.bands[0])
            for file in self.files()
            if not file.path.exists()
            for lead in range(len(self.form.hours))
        ]

    def create(self, bands: RowPartition) -> None:
        """Create the folder with `forecast.json`."""
        self.path.mkdir()
        content = {SETTINGS_ATTRIBUTE: self.settings, BOUNDS_KEY: list(bands.bounds)}
        write_bytes_atomic(self.path / MANIFEST, json.dumps(content).encode(), durable=True)

    def _file(self, job: ForecastJob, rows: slice) -> ForecastFile:
        member = f"_member-{job.member:03d}" if self.form.members else ""
        time = self.form.calendar.short_text(self.form.times[job.time]).replace(":", "")
        name = f"{time}{member}_rows-{rows.start:04d}-{rows.stop - 1:04d}.nc"
        slices = {
            "number": slice(job.member, job.member + 1),
            "time": slice(job.time, job.time + 1),
            self.form.horizontal_dims[0]: rows,
        }
        return ForecastFile(self.path / name, [job], [rows], slices)


def create_file(
    path: Path,
    form: ForecastFormat,
    settings: Mapping[str, Any],
    slices: Mapping[str, slice],
    levels_apart: bool = False,
) -> None:
    """Create a file with everything but the fields.

    Args:
        slices: the part of a dim that the file contains; dims not listed are complete.
        levels_apart: whether each level is a chunk of its own.
    """
    rows = slices.get(form.horizontal_dims[0], slice(0, form.height))
    with netCDF4.Dataset(path, "w", format="NETCDF4") as file:
        file.setncatts(global_attributes(settings))
        file.setncattr(ROWS_ATTRIBUTE, np.array([rows.start, rows.stop, form.height], np.int32))
        for name, dims, values, attributes in form.fixed_arrays:
            part = values[tuple(slices.get(dim, slice(None)) for dim in dims)]
            for dim, size in zip(dims, part.shape, strict=True):
                if dim not in file.dimensions:
                    file.createDimension(dim, size)
            array = file.createVariable(name, part.dtype, dims)
            array.setncatts(attributes)
            array[...] = part
        for variable in form.variables:
            unit_dims = len(form.leading_dims) + (levels_apart and variable.on_levels)
            _create_variable(file, variable, unit_dims)


def _create_variable(file: netCDF4.Dataset, variable: OutputVariable, unit_dims: int) -> None:
    """Create a variable whose chunks have the length 1 along the first `unit_dims` dims."""
    sizes = [len(file.dimensions[dim]) for dim in variable.dims]
    array = file.createVariable(
        variable.name,
        "f4",
        variable.dims,
        compression="zlib",
        complevel=COMPRESSION_LEVEL,
        shuffle=True,
        fletcher32=True,  # checksums, for `forecast check`
        # A chunk is one field, which is written and read at once.
        chunksizes=[1] * unit_dims + sizes[unit_dims:],
        fill_value=float("nan"),
    )
    array.setncatts(variable.attributes)


def read_file_settings(path: Path) -> Mapping[str, Any] | None:
    """Return the settings in a file; None if it has none, or can't be read."""
    try:
        with as_os_error(), netCDF4.Dataset(path) as file:
            settings: Mapping[str, Any] = json.loads(file.getncattr(SETTINGS_ATTRIBUTE))
    except (OSError, AttributeError, ValueError, TypeError):
        return None
    return settings


@contextmanager
def as_os_error() -> Iterator[None]:
    """Turn the RuntimeError that netCDF4 raises, for instance for a full disk, into an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"netCDF: {error}") from error

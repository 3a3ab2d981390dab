"""Write forecasts as netCDF-4, and read the arrays of any format back.

`NetcdfWriter` writes one file per band, initial time and member, so that no two ranks share a file.
`NetcdfFileWriter` writes a single file.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import netCDF4
import numpy as np
import zarr
from numpy.typing import NDArray
from xarray.backends.locks import HDF5_LOCK, NETCDFC_LOCK, combine_locks
from zarr.storage import LocalStore

from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.address import reason_of
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import (
    PARTIAL_SUFFIX,
    fsync_path,
    partial_path,
    write_bytes_atomic,
)
from credit_dp.forecast.format import ForecastFormat, OutputVariable, describe_difference
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    SETTINGS_ATTRIBUTE,
    ForecastPart,
    ForecastWriter,
    MissingField,
    global_attributes,
)
from credit_dp.forecast.zarr_writer import FileWriter

ROWS_ATTRIBUTE = "credit_dp_rows"  # global attribute: first row, last row + 1, rows of the globe
COMPRESSION_LEVEL: Final = 1

# netCDF and HDF5 are not thread-safe. These are xarray's own locks, because the store of initial
# states may be netCDF, too, and is read by another thread.
LIBRARY_LOCK = combine_locks([NETCDFC_LOCK, HDF5_LOCK])
MANIFEST = "forecast.json"
BOUNDS_KEY = "bounds"


@final
class NetcdfWriter(ForecastWriter):
    """Writes one file per band, initial time and member to a folder.

    `forecast.json` in the folder has the settings and the bands, from which all file names follow.
    """

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._open_files: dict[ForecastJob, tuple[netCDF4.Dataset, Path]] = {}

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            settings: Mapping[str, Any] = manifest[SETTINGS_ATTRIBUTE]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return settings

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Return the bands unchanged: each rank writes the rows that it computes."""
        # File names contain the rows: with other bands complete files would not be recognised.
        begun = self._bounds(self.partial)
        if begun != bands.bounds:
            raise UserError(
                f"{self.partial}: was begun with bands that end at rows {list(begun[1:])}, now "
                f"they end at {list(bands.bounds[1:])}. Set parallel.domain to {len(begun) - 1}, "
                "or remove it to start over."
            )
        return bands

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[FieldArray]) -> None:
        """See `ForecastWriter`; complete files are not written again."""
        final_path = self.partial / self._file_name(job, rows)
        if final_path.exists():
            return  # written before the forecast was resumed
        with LIBRARY_LOCK, as_os_error():
            if job not in self._open_files:
                new, part = partial_path(final_path), self._file_slices(job, rows)
                file = create_file(new, self.form, self.settings, part)
                self._open_files[job] = file, final_path
            file, _ = self._open_files[job]
            index = self.form.field_index(0, 0, lead)  # the file's only member and initial time
            for variable, values in zip(self.form.variables, fields, strict=True):
                file[variable.name][index] = values

    def close(self, job: ForecastJob) -> None:
        """See `ForecastWriter`."""
        if job not in self._open_files:
            return
        file, path = self._open_files.pop(job)
        with LIBRARY_LOCK, as_os_error():
            file.close()
        temporary = partial_path(path)
        fsync_path(temporary)
        # The content is on disk; the names of all files are flushed once, by `finish`.
        os.replace(temporary, path)

    def bands(self, path: Path) -> list[slice]:
        """See `ForecastWriter`."""
        return [slice(*pair) for pair in pairwise(self._bounds(path))]

    def missing(self, path: Path) -> list[MissingField]:
        """See `ForecastWriter`; files are complete, or all their lead times are missing."""
        bands = self.bands(path)
        return [
            MissingField(job, lead, rows)
            for job in self.jobs
            for rows in bands
            if not (path / self._file_name(job, rows)).exists()
            for lead in range(len(self.form.hours))
        ]

    def parts(self, path: Path) -> Iterator[ForecastPart]:
        """See `ForecastWriter`: the files that exist."""
        for job in self.jobs:
            for rows in self.bands(path):
                file = path / self._file_name(job, rows)
                if file.exists():
                    yield ForecastPart(file, self._file_slices(job, rows), [job], [rows])

    def create(self, path: Path, bands: RowPartition) -> None:
        """See `ForecastWriter`."""
        # Written before any field, so that missing files are known after a crash.
        content = {SETTINGS_ATTRIBUTE: self.settings, BOUNDS_KEY: list(bands.bounds)}
        write_bytes_atomic(path / MANIFEST, json.dumps(content).encode(), durable=True)

    def clean_up(self) -> None:
        """See `ForecastWriter`; refuse files of another forecast, which would stay as they are."""
        for leftover in self.partial.glob(f"*{PARTIAL_SUFFIX}"):
            leftover.unlink()
        for part in self.parts(self.partial):
            settings = read_file_settings(part.path)
            difference = describe_difference(settings or {}, self.settings)
            if difference:
                raise UserError(
                    f"{part.path}: is of another forecast, with {difference}. Remove this file, "
                    "and start again to write it."
                )

    def _bounds(self, path: Path) -> tuple[int, ...]:
        try:
            return tuple(map(int, json.loads((path / MANIFEST).read_text())[BOUNDS_KEY]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: {MANIFEST} can't be read. Remove {path}.") from error

    def _file_name(self, job: ForecastJob, rows: slice) -> str:
        member = f"_member-{job.member:03d}" if self.form.members else ""
        time = self.form.calendar.short_text(self.form.times[job.time]).replace(":", "")
        return f"{time}{member}_rows-{rows.start:04d}-{rows.stop - 1:04d}.nc"

    def _file_slices(self, job: ForecastJob, rows: slice) -> dict[str, slice]:
        """Return the part of each dimension that the file of a forecast contains."""
        return {
            "number": slice(job.member, job.member + 1),
            "time": slice(job.time, job.time + 1),
            self.form.horizontal_dims[0]: rows,
        }


@final
class NetcdfFileWriter(FileWriter):
    """Writes a single netCDF file, by way of a zarr store at `OUT.partial`."""

    @classmethod
    def read_file_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """See `FileWriter`."""
        return read_file_settings(path)

    def copy_lead_time(self, job: ForecastJob, lead: int, create: bool) -> None:
        """See `FileWriter`."""
        index = self.form.field_index(job.member, job.time, lead)
        with LIBRARY_LOCK, as_os_error():
            if create:
                create_file(
                    self.temporary_file, self.form, self.settings, {}, levels_apart=True
                ).close()
            with (
                open_arrays(self.partial) as stored,
                netCDF4.Dataset(self.temporary_file, "a") as file,
            ):
                for variable in self.form.variables:
                    where = f"{self.partial}: {variable.name} {self.form.describe_field(job, lead)}"
                    file[variable.name][index] = read_field(stored[variable.name], index, where)


def create_file(
    path: Path,
    form: ForecastFormat,
    settings: Mapping[str, Any],
    parts: Mapping[str, slice],
    levels_apart: bool = False,
) -> netCDF4.Dataset:
    """Create a file with everything but the fields, and return it open for writing.

    Args:
        settings: written as global attribute.
        parts: the part of a dimension that the file contains; dimensions not listed are complete.
        levels_apart: whether each level is a chunk of its own.
    """
    file = netCDF4.Dataset(path, "w", format="NETCDF4")
    rows = parts.get(form.horizontal_dims[0], slice(0, form.height))
    file.setncatts(global_attributes(settings))
    file.setncattr(ROWS_ATTRIBUTE, np.array([rows.start, rows.stop, form.height], np.int32))
    for name, coordinate in form.coordinates.items():
        values = coordinate.values[parts.get(name, slice(None))]
        file.createDimension(name, len(values))
        array = file.createVariable(name, values.dtype, (name,))
        array.setncatts(coordinate.attributes)
        array[:] = values
    for name, dims, values, attributes in form.auxiliary:
        part = values[tuple(parts.get(dim, slice(None)) for dim in dims)]
        for dim, size in zip(dims, part.shape, strict=True):
            if dim not in file.dimensions:
                file.createDimension(dim, size)
        array = file.createVariable(name, part.dtype, dims)
        array.setncatts(attributes)
        array[...] = part
    for variable in form.variables:
        _create_variable(
            file, variable, len(form.leading_dims) + (levels_apart and variable.on_levels)
        )
    return file


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
        with LIBRARY_LOCK, as_os_error(), netCDF4.Dataset(path) as file:
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


@final
@dataclass(frozen=True)
class StoredArray:
    """A zarr array or netCDF variable with its metadata; `values[...]` reads it."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    values: Any


@contextmanager
def open_arrays(path: Path) -> Iterator[Mapping[str, StoredArray]]:
    """Open a zarr store or a netCDF file and yield its arrays by name.

    Raises:
        UserError: it can't be opened.
    """
    if path.is_dir():
        yield _open_zarr_arrays(path)
        return
    # The lock is held for each call of the library, not while the caller works with the arrays.
    with LIBRARY_LOCK:
        try:
            file = netCDF4.Dataset(path)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: can't be opened ({reason_of(error)}).") from error
        file.set_auto_maskandscale(False)  # values as stored, NaN instead of masks
    try:
        yield {
            name: StoredArray(array.dimensions, array.shape, array.__dict__, array)
            for name, array in file.variables.items()
        }
    finally:
        with LIBRARY_LOCK:
            file.close()


def read_field(array: StoredArray, index: tuple[Any, ...], where: str) -> NDArray[Any]:
    """Read values; the libraries compare the checksums of all chunks that are read.

    Args:
        where: describes the field, for messages.

    Raises:
        UserError: the values can't be decoded.
    """
    try:
        with LIBRARY_LOCK if isinstance(array.values, netCDF4.Variable) else nullcontext():
            return np.asarray(array.values[index])
    except MemoryError:
        raise
    except Exception as error:  # codecs, checksums and HDF5 raise many types
        raise UserError(f"{where}: can't be decoded ({reason_of(error)}).") from error


def _open_zarr_arrays(path: Path) -> dict[str, StoredArray]:
    arrays = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        try:
            array = zarr.open_array(LocalStore(path), path=folder.name, mode="r", zarr_format=3)
        except Exception as error:
            raise UserError(
                f"{folder}: has no metadata that can be read ({reason_of(error)})."
            ) from error
        dims = getattr(array.metadata, "dimension_names", None) or ()
        attributes = array.attrs.asdict()
        arrays[folder.name] = StoredArray(tuple(map(str, dims)), array.shape, attributes, array)
    return arrays

"""Forecasts as netCDF-4: one file, or one for each band, initial time and member."""

import json
import os
import shutil
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

from credit_dp.data.rechunk.target import write_bytes_atomic
from credit_dp.data.sources.address import reason_of
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.forecast.format import ForecastFormat, Variable
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    PARTIAL_SUFFIX,
    SETTINGS_ATTRIBUTE,
    Fields,
    ForecastPart,
    ForecastWriter,
    MissingField,
    disk_errors,
    fsync_path,
    global_attributes,
)
from credit_dp.forecast.zarr import ZarrWriter

ROWS_ATTRIBUTE = "credit_dp_rows"  # of a file: first row, the row after the last, rows of the globe
COMPRESSION_LEVEL: Final = 1  # of compression
# The libraries are not safe among threads, and stores may be netCDF, too.
LIBRARY_LOCK = combine_locks([NETCDFC_LOCK, HDF5_LOCK])


def create_file(
    path: Path,
    form: ForecastFormat,
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
    file.setncattr(ROWS_ATTRIBUTE, np.array([rows.start, rows.stop, form.height], np.int32))
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
        _create_variable(
            file, variable, len(form.leading_dims) + (levels_apart and variable.on_levels)
        )
    return file


def _create_variable(file: netCDF4.Dataset, variable: Variable, ones: int) -> None:
    """A variable with chunks of one place along the first `ones` dimensions."""
    sizes = [len(file.dimensions[dim]) for dim in variable.dims]
    made = file.createVariable(
        variable.name,
        "f4",
        variable.dims,
        compression="zlib",
        complevel=COMPRESSION_LEVEL,
        shuffle=True,
        fletcher32=True,
        chunksizes=[1] * ones + sizes[ones:],
        fill_value=float("nan"),
    )
    made.setncatts(variable.attributes)


def publish_file(growing: Path, path: Path) -> None:
    """Give a file that has been closed its name, once it is on the disk."""
    fsync_path(growing)
    os.replace(growing, path)


def read_file_settings(path: Path) -> Mapping[str, Any] | None:
    """What the file says of itself; None if it is none of ours, or can't be read."""
    try:
        with LIBRARY_LOCK, as_os_error(), netCDF4.Dataset(path) as file:
            said: Mapping[str, Any] = json.loads(file.getncattr(SETTINGS_ATTRIBUTE))
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


MANIFEST = "forecast.json"
BOUNDS_KEY = "bounds"


@final
class NetcdfWriter(ForecastWriter):
    """See above. `forecast.json` in the folder says what there is to be."""

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._open_files: dict[ForecastJob, tuple[netCDF4.Dataset, Path]] = {}

    @classmethod
    def read_settings(cls, place: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        try:
            said: Mapping[str, Any] = json.loads((place / MANIFEST).read_text())[SETTINGS_ATTRIBUTE]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return said

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Those that the ranks have."""
        begun = self._bounds(self.partial)
        if begun != bands.bounds:
            raise UserError(
                f"{self.partial}: was begun with bands that end at rows {list(begun[1:])}, now "
                f"they end at {list(bands.bounds[1:])}. Set parallel.domain to {len(begun) - 1}, "
                "or remove it to begin anew."
            )
        return bands

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """See `ForecastWriter`; a file that is whole is left as it is."""
        final_path = self.partial / self._file_name(job, rows)
        if final_path.exists():
            return
        with LIBRARY_LOCK, as_os_error():
            if job not in self._open_files:
                self._open_files[job] = self._create_file(job, rows), final_path
            file, _ = self._open_files[job]
            place = self.form.place(0, 0, lead)
            for variable, values in zip(self.form.variables, fields, strict=True):
                file[variable.name][place] = values

    def close(self, job: ForecastJob) -> None:
        """See `ForecastWriter`."""
        if job not in self._open_files:
            return
        file, path = self._open_files.pop(job)
        with LIBRARY_LOCK, as_os_error():
            file.close()
        growing = path.with_name(path.name + PARTIAL_SUFFIX)
        publish_file(growing, path)

    def bands(self, place: Path) -> list[slice]:
        """See `ForecastWriter`."""
        return [slice(*pair) for pair in pairwise(self._bounds(place))]

    def missing(self, place: Path) -> list[MissingField]:
        """See `ForecastWriter`; of a file that is not there all lead times are missing."""
        bands = self.bands(place)
        return [
            MissingField(job, lead, rows)
            for job in self.jobs
            for rows in bands
            if not (place / self._file_name(job, rows)).exists()
            for lead in range(len(self.form.hours))
        ]

    def parts(self, place: Path) -> Iterator[ForecastPart]:
        """See `ForecastWriter`: the files that are there."""
        for job in self.jobs:
            for rows in self.bands(place):
                path = place / self._file_name(job, rows)
                if path.exists():
                    yield ForecastPart(path, _file_slices(job, rows), [job], [rows])

    def create(self, place: Path, bands: RowPartition) -> None:
        """See `ForecastWriter`."""
        content = {SETTINGS_ATTRIBUTE: self._settings, BOUNDS_KEY: list(bands.bounds)}
        write_bytes_atomic(place / MANIFEST, json.dumps(content).encode())

    def clean_up(self) -> None:
        """See `ForecastWriter`."""
        for leftover in self.partial.glob(f"*{PARTIAL_SUFFIX}"):
            leftover.unlink()

    def _bounds(self, place: Path) -> tuple[int, ...]:
        try:
            return tuple(map(int, json.loads((place / MANIFEST).read_text())[BOUNDS_KEY]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place}: {MANIFEST} can't be read. Remove {place}.") from error

    def _file_name(self, job: ForecastJob, rows: slice) -> str:
        member = f"_member-{job.member:03d}" if self.form.members else ""
        time = str(self.form.times[job.time].astype("M8[h]"))
        return f"{time}{member}_rows-{rows.start:04d}-{rows.stop - 1:04d}.nc"

    def _create_file(self, job: ForecastJob, rows: slice) -> netCDF4.Dataset:
        """A new file with all but its fields."""
        path = self.partial / (self._file_name(job, rows) + PARTIAL_SUFFIX)
        return create_file(path, self.form, self._settings, _file_slices(job, rows))


def _file_slices(job: ForecastJob, rows: slice) -> dict[str, slice]:
    """What a file has of each dimension of which it has not all."""
    member, time = slice(job.member, job.member + 1), slice(job.time, job.time + 1)
    return {"number": member, "time": time, "latitude": rows}


@final
@dataclass(frozen=True)
class StoredArray:
    """What is said of an array, and the array itself, from which values come by `[...]`."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    values: Any


@contextmanager
def open_arrays(place: Path) -> Iterator[Mapping[str, StoredArray]]:
    """The arrays of a zarr store or a netCDF file, by name.

    Raises:
        UserError: it can't be opened.
    """
    if place.is_dir():
        yield _open_zarr_arrays(place)
        return
    with LIBRARY_LOCK:
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
        with LIBRARY_LOCK:
            file.close()


def read_field(array: StoredArray, place: tuple[Any, ...], where: str) -> NDArray[Any]:
    """The values at a place; every checksum is looked at.

    Args:
        where: what it is, for a message.

    Raises:
        UserError: they can't be decoded.
    """
    try:
        with LIBRARY_LOCK if isinstance(array.values, netCDF4.Variable) else nullcontext():
            return np.asarray(array.values[place])
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{where}: can't be decoded ({reason_of(error)}).") from error


def _open_zarr_arrays(place: Path) -> dict[str, StoredArray]:
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


@final
class NetcdfFileWriter(ForecastWriter):
    """See above."""

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._zarr_writer = ZarrWriter(out, form, settings)
        self._temporary_file = out.with_name(f"{out.name}.file{PARTIAL_SUFFIX}")

    @classmethod
    def read_settings(cls, place: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        return ZarrWriter.read_settings(place) if place.is_dir() else read_file_settings(place)

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """See `ForecastWriter`."""
        return self._zarr_writer.bands_to_write(bands)

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """See `ForecastWriter`."""
        self._zarr_writer.write(job, lead, rows, fields)

    def close(self, job: ForecastJob) -> None:
        """Nothing is left to do: see `ZarrWriter`."""

    @property
    def piece_count(self) -> int:
        """See `ForecastWriter`: the lead times of all forecasts."""
        return len(self.jobs) * len(self.form.hours)

    def assemble_piece(self, piece: int) -> None:
        """See `ForecastWriter`: copy one lead time. The first piece begins the file anew."""
        job, lead = self.jobs[piece // len(self.form.hours)], piece % len(self.form.hours)
        with disk_errors(self.out):
            try:
                with LIBRARY_LOCK, as_os_error():
                    self._copy(job, lead, anew=piece == 0)
            except OSError:  # room for the store, which is needed more
                self._temporary_file.unlink(missing_ok=True)
                raise

    def _copy(self, job: ForecastJob, lead: int, anew: bool) -> None:
        if anew:
            create_file(
                self._temporary_file, self.form, self._settings, {}, levels_apart=True
            ).close()
        place = self.form.place(job.member, job.time, lead)
        with (
            open_arrays(self.partial) as stored,
            netCDF4.Dataset(self._temporary_file, "a") as file,
        ):
            for variable in self.form.variables:
                where = f"{self.partial}: {variable.name} {self.form.describe_field(job, lead)}"
                file[variable.name][place] = read_field(stored[variable.name], place, where)

    def finish(self) -> None:
        """See `ForecastWriter`."""
        self.check_complete()
        with disk_errors(self.out):
            publish_file(self._temporary_file, self.out)
            fsync_path(self.out.parent)
            shutil.rmtree(self.partial)

    def bands(self, place: Path) -> list[slice]:
        """See `ForecastWriter`."""
        return self._zarr_writer.bands(place) if place.is_dir() else [slice(0, self.form.height)]

    def missing(self, place: Path) -> list[MissingField]:
        """See `ForecastWriter`: a file is whole, for it has its name last."""
        return self._zarr_writer.missing(place) if place.is_dir() else []

    def create(self, place: Path, bands: RowPartition) -> None:
        """See `ForecastWriter`."""
        self._zarr_writer.create(place, bands)

    def clean_up(self) -> None:
        """See `ForecastWriter`."""
        self._temporary_file.unlink(missing_ok=True)
        self._zarr_writer.clean_up()

    def parts(self, place: Path) -> Iterator[ForecastPart]:
        """See `ForecastWriter`."""
        if place.is_dir():
            yield from self._zarr_writer.parts(place)
        else:
            yield ForecastPart(place, {}, self.jobs, self.bands(place))

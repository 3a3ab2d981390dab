"""A forecast on disk, and the zarr store (version 3) in which every forecast begins.

Ranks can write to one store without coordination only if no two of them write parts of the same
chunk. Zarr's chunks all have the same height, but bands do not: 721 rows on 4 ranks are 181, 180,
180 and 180. Therefore a chunk is as high as the highest of balanced bands, and the few rows by
which bands differ from chunks are sent to the rank that writes them (one and two of 180 here; none
if bands are equal, or only the last one is lower).

A chunk is one lead time of one forecast: all levels of one band. It is a file that is written
atomically and has a checksum: the files that exist are the record of what has been written.
"""

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore

from credit_dp.data.grid import FieldArray
from credit_dp.data.rechunk.target import CODECS, AtomicFileStore
from credit_dp.data.sources.address import reason_of
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import remove_temporaries
from credit_dp.forecast.format import (
    SETTINGS_ATTRIBUTE,
    FixedArray,
    ForecastFormat,
    OutputVariable,
    format_from_json,
    global_attributes,
)
from credit_dp.forecast.request import ForecastJob, all_jobs

CODEC = "zstd"


class MissingField(NamedTuple):
    """A field that has not been written; `lead` is the index of its lead time."""

    job: ForecastJob
    lead: int
    rows: slice


class ForecastFile(NamedTuple):
    """A store or file of a forecast.

    Attributes:
        jobs, bands: the forecasts and rows that it contains.
        slices: the part of a dim that it contains; dims not listed are complete.
    """

    path: Path
    jobs: Sequence[ForecastJob]
    bands: Sequence[slice]
    slices: Mapping[str, slice]

    def field_index(
        self, form: ForecastFormat, job: ForecastJob, lead: int, rows: slice
    ) -> tuple[Any, ...]:
        """Return the index of a field's rows in a variable of this file."""
        # A file of one member, time or band has it at index 0.
        if "number" in self.slices:
            job = job._replace(member=0)
        if "time" in self.slices:
            job = job._replace(time=0)
        if form.horizontal_dims[0] in self.slices:
            rows = slice(0, rows.stop - rows.start)
        return form.index(job, lead, rows)


class StoredArray(NamedTuple):
    """A zarr array or netCDF variable with its metadata; `values[...]` reads it."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    values: Any


class StoredForecast(ABC):
    """A forecast on disk in one format, complete or not.

    Attributes:
        path: of the store, file or folder.
        form: its dims, coordinates and variables.
        settings: everything that its values depend on, as JSON.
    """

    def __init__(self, path: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.form = form
        self.settings = settings

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open a forecast of this format; None if the path has none.

        Raises:
            UserError: its settings can't be read.
        """
        settings = cls.read_settings(path)
        return None if settings is None else cls(path, format_from_json(path, settings), settings)

    @classmethod
    @abstractmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings of a forecast on disk; None if it is not of this format."""

    @contextmanager
    def open_arrays(self, path: Path) -> Iterator[Mapping[str, StoredArray] | None]:
        """Open one of the files, and yield its arrays by name.

        None without arrays: `missing` reads all fields then.

        Raises:
            UserError: it can't be opened.
        """
        yield None

    @property
    def jobs(self) -> list[ForecastJob]:
        """Return all forecasts."""
        return all_jobs(len(self.form.times), max(1, self.form.members))

    @property
    def bands(self) -> list[slice]:
        """Return the rows of each field on disk."""
        return [slice(0, self.form.height)]

    def files(self) -> list[ForecastFile]:
        """Return the stores or files of a complete forecast."""
        return [ForecastFile(self.path, self.jobs, self.bands, {})]

    def missing(self) -> list[MissingField]:
        """Return the fields that have not been written, or are gone."""
        return []

    def describe(self, field: MissingField) -> str:
        """Return a missing field as text for messages."""
        rows = field.rows
        return (
            f"{self.form.describe_field(field.job, field.lead)}, rows {rows.start} to "
            f"{rows.stop - 1}"
        )


class CopiedForecast(StoredForecast):
    """A forecast in a format that is copied from the zarr store when that is complete.

    Each file is written by one rank, field after field.
    """

    def check(self) -> None:
        """Check that the format can hold the forecast.

        Raises:
            UserError: says what it can't hold.
        """

    def create(self, bands: RowPartition) -> None:
        """Create what all files need, for ranks with these bands."""

    @abstractmethod
    def copy(self, file: ForecastFile, job: ForecastJob, lead: int, store: "ZarrForecast") -> None:
        """Copy one lead time to a file, which is created if it does not exist.

        Raises:
            OSError: the disk is full.
            UserError: a field in the store is damaged.
        """


@final
class ZarrForecast(StoredForecast):
    """A forecast as one zarr store, to which all ranks can write."""

    def __init__(self, path: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(path, form, settings)
        self._arrays: dict[str, zarr.Array[Any]] = {}

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings in the store's attributes."""
        try:
            metadata = json.loads((path / "zarr.json").read_text())
            settings: Mapping[str, Any] = json.loads(metadata["attributes"][SETTINGS_ATTRIBUTE])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return settings

    @contextmanager
    def open_arrays(self, path: Path) -> Iterator[Mapping[str, StoredArray]]:
        """Yield the arrays of the layout that the store has."""
        names = [array.name for array in self.form.fixed_arrays]
        names += [variable.name for variable in self.form.variables]
        arrays = {name: self._open_array(name) for name in names if (path / name).is_dir()}
        yield {
            name: StoredArray(
                tuple(map(str, getattr(array.metadata, "dimension_names", None) or ())),
                array.shape,
                array.attrs.asdict(),
                array,
            )
            for name, array in arrays.items()
        }

    @property
    def bands(self) -> list[slice]:
        """Return the rows of each chunk."""
        height, rows = self.form.height, self.chunk_rows
        return [slice(row, min(row + rows, height)) for row in range(0, height, rows)]

    @cached_property
    def chunk_rows(self) -> int:
        """Return the rows, or cells, of a chunk."""
        chunk = self._open_array(self.form.variables[0].name).chunks
        return int(chunk[-len(self.form.horizontal_dims)])

    def missing(self) -> list[MissingField]:
        """Return the fields of which a chunk is missing."""
        chunks = list(enumerate(self.bands))
        written = {v.name: set(_nonempty_files(self.path / v.name)) for v in self.form.variables}
        return [
            MissingField(job, lead, rows)
            for job in self.jobs
            for lead in range(len(self.form.hours))
            for chunk, rows in chunks
            if any(
                self._chunk_name(variable, job, lead, chunk) not in written[variable.name]
                for variable in self.form.variables
            )
        ]

    def create(self, bands: RowPartition) -> None:
        """Create everything but the fields, for ranks with these bands."""
        group = zarr.create_group(
            LocalStore(self.path), attributes=global_attributes(self.settings)
        )
        rows = -(-bands.height // bands.ranks)  # the highest of balanced bands
        for variable in self.form.variables:
            self._create_variable(group, variable, rows)
        for array in self.form.fixed_arrays:
            _create_unchunked(group, array)
        # Zarr warns that its specification does not have consolidated metadata; readers know it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)
            zarr.consolidate_metadata(LocalStore(self.path))

    def _create_variable(self, group: zarr.Group, variable: OutputVariable, rows: int) -> None:
        shape = self.form.shape(variable)
        leading = len(self.form.leading_dims)
        row_dim = len(shape) - len(self.form.horizontal_dims)
        group.create_array(
            variable.name,
            shape=shape,
            chunks=(*(1,) * leading, *shape[leading:row_dim], rows, *shape[row_dim + 1 :]),
            compressors=(*CODECS[CODEC], Crc32cCodec()),  # the checksum is of the compressed bytes
            dtype=np.float32,
            fill_value=np.nan,
            dimension_names=variable.dims,
            attributes=variable.attributes,
            # With the separator "." all chunks of a variable are files of one folder.
            chunk_key_encoding={"name": "default", "separator": "."},
        )

    def remove_temporaries(self) -> None:
        """Remove what a killed process was writing."""
        for variable in self.form.variables:
            remove_temporaries(self.path / variable.name)

    def rows_to_write(self, ranks: int) -> RowPartition:
        """Return complete chunks, distributed over the ranks from north to south."""
        return RowPartition.in_multiples_of(self.form.height, ranks, self.chunk_rows)

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[FieldArray]) -> None:
        """Write the fields of one lead time; chunks that exist are not written again.

        Args:
            job: the forecast.
            lead: index of the lead time.
            rows: those of this rank in `rows_to_write`.
            fields: for each of the format's `variables`, `(rows, W)` or `(levels, rows, W)`;
                of cells without W.

        Raises:
            OSError: the fields can't be written.
        """
        if rows.start == rows.stop:
            return  # more ranks than chunks: the last ranks write nothing
        index = self.form.index(job, lead, rows)
        chunks = range(rows.start // self.chunk_rows, -(-rows.stop // self.chunk_rows))
        for variable, values in zip(self.form.variables, fields, strict=True):
            names = [self._chunk_name(variable, job, lead, chunk) for chunk in chunks]
            paths = [self.path / variable.name / name for name in names]
            # An empty file is no complete chunk, see `missing`.
            if not all(path.exists() and path.stat().st_size for path in paths):
                self._open_array(variable.name)[index] = values

    def read(
        self, variable: OutputVariable, job: ForecastJob, lead: int, rows: slice
    ) -> FieldArray:
        """Read rows of one field, `(rows, W)` or `(levels, rows, W)`.

        Raises:
            UserError: the field is damaged.
        """
        array = self._open_array(variable.name)
        where = f"{self.path}: {variable.name} {self.form.describe_field(job, lead)}"
        field: FieldArray = read_values(array, self.form.index(job, lead, rows), where)
        return field

    def _open_array(self, name: str) -> "zarr.Array[Any]":
        """Return an array to read, or to write complete chunks to; chunks of NaN become files, too.

        Raises:
            UserError: its metadata can't be read.
        """
        if name not in self._arrays:
            files = AtomicFileStore(LocalStore(self.path))
            try:
                array = zarr.open_array(files, path=name, mode="r+", zarr_format=3)
            except Exception as error:
                raise UserError(
                    f"{self.path / name}: has no metadata that can be read ({reason_of(error)})."
                ) from error
            # `open_array` ignores a config. By default zarr does not write chunks of fill values,
            # which `missing` would take for chunks that were never written.
            self._arrays[name] = array.with_config({"write_empty_chunks": True})
        return self._arrays[name]

    def _chunk_name(self, variable: OutputVariable, job: ForecastJob, lead: int, chunk: int) -> str:
        """Return the file name of one field's chunk, which has all levels and columns."""
        levels = [0] if variable.on_levels else []
        columns = [0] * (len(self.form.horizontal_dims) - 1)
        leading = self.form.leading_index(job, lead)
        return ".".join(map(str, ["c", *leading, *levels, chunk, *columns]))


def read_values(array: Any, index: Any, where: str) -> NDArray[Any]:
    """Read from a zarr array or netCDF variable, which compares the checksums of all chunks.

    Args:
        where: describes what is read, for messages.

    Raises:
        UserError: the values can't be decoded.
    """
    try:
        return np.asarray(array[index])
    except MemoryError:
        raise
    except Exception as error:  # codecs, checksums and HDF5 raise many types
        raise UserError(f"{where}: can't be decoded ({reason_of(error)}).") from error


def _create_unchunked(group: zarr.Group, array: FixedArray) -> None:
    """Create an array with its values in one chunk."""
    group.create_array(
        array.name,
        data=np.asarray(array.values, order="C"),
        chunks=array.values.shape,
        compressors=(Crc32cCodec(),),
        dimension_names=array.dims,
        attributes=array.attributes,
    )


def _nonempty_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that are not empty; [] without a folder."""
    if not folder.is_dir():
        return []
    # One listing instead of a call for each file; an empty file is not a complete chunk.
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.stat().st_size]

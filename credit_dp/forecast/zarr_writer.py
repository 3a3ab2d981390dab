"""Write a forecast to one zarr store (version 3); each rank writes complete chunks.

Processes can write to one store without coordination only if no two of them write parts of the same
chunk. Zarr's chunks all have the same height, but bands do not: 721 rows on 4 ranks are 181, 180,
180 and 180. Therefore a chunk is as high as the highest of balanced bands, and the few rows by
which bands differ from chunks are sent to the rank that writes them (one and two of 180 here; none
if bands are equal, or only the last one is lower).

A chunk is one lead time of one forecast: all levels of one band. It is a file that is written
atomically and has a checksum: the files that exist are the record of what has been written.

`FileWriter` is the base class of formats that are one file: fields go to a zarr store first, which
ranks can write in parallel and resume, and rank 0 copies them into the file at the end.
"""

import json
import os
import shutil
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore

from credit_dp.data.grid import FieldArray
from credit_dp.data.rechunk.target import CODECS, AtomicFileStore
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import PARTIAL_SUFFIX, fsync_path, remove_temporaries, rename_durably
from credit_dp.forecast.format import ForecastFormat, OutputVariable
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    SETTINGS_ATTRIBUTE,
    ForecastPart,
    ForecastWriter,
    MissingField,
    disk_errors,
    global_attributes,
)

CODEC = "zstd"


class ZarrWriter(ForecastWriter):
    """Writes a forecast as one zarr store."""

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._arrays: dict[str, zarr.Array[Any]] = {}

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        try:
            metadata = json.loads((path / "zarr.json").read_text())
            settings: Mapping[str, Any] = json.loads(metadata["attributes"][SETTINGS_ATTRIBUTE])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return settings

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Return complete chunks, distributed over the ranks from north to south."""
        return RowPartition.in_multiples_of(
            bands.height, bands.ranks, self._chunk_rows(self.partial)
        )

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[FieldArray]) -> None:
        """See `ForecastWriter`; chunks that exist are not written again."""
        if rows.start == rows.stop:
            return  # more ranks than chunks: the last ranks write nothing
        index = self.form.field_index(job.member, job.time, lead)
        for variable, values in zip(self.form.variables, fields, strict=True):
            array = self._open_array(variable.name)
            chunks = _chunk_range(rows, self._rows_of(array.chunks))
            names = self._chunk_names(variable, index, chunks)
            folder = self.partial / variable.name
            if not all((folder / name).exists() for name in names):
                selection: tuple[int | slice | EllipsisType, ...]
                selection = (*index, ..., *self.form.selection(rows))
                array[selection] = values

    def close(self, job: ForecastJob) -> None:
        """Do nothing: every chunk is a complete file."""

    def bands(self, path: Path) -> list[slice]:
        """See `ForecastWriter`."""
        chunk_rows = self._chunk_rows(path)
        height = self.form.height
        return [slice(row, min(row + chunk_rows, height)) for row in range(0, height, chunk_rows)]

    def missing(self, path: Path) -> list[MissingField]:
        """See `ForecastWriter`."""
        bands = list(enumerate(self.bands(path)))
        written = {v.name: set(_nonempty_files(path / v.name)) for v in self.form.variables}
        return [
            MissingField(job, lead, rows)
            for job in self.jobs
            for lead in range(len(self.form.hours))
            for band, rows in bands
            if any(
                name not in written[variable.name]
                for variable in self.form.variables
                for name in self._chunk_names(
                    variable,
                    self.form.field_index(job.member, job.time, lead),
                    range(band, band + 1),
                )
            )
        ]

    def parts(self, path: Path) -> Iterator[ForecastPart]:
        """See `ForecastWriter`: there is one store."""
        yield ForecastPart(path, {}, self.jobs, self.bands(path))

    def create(self, path: Path, bands: RowPartition) -> None:
        """See `ForecastWriter`."""
        group = zarr.create_group(LocalStore(path), attributes=global_attributes(self.settings))
        rows = -(-bands.height // bands.ranks)  # the highest of balanced bands
        for variable in self.form.variables:
            self._create_array(group, variable, rows)
        for name, coordinate in self.form.coordinates.items():
            _create_unchunked(group, name, (name,), *coordinate)
        for other in self.form.auxiliary:
            _create_unchunked(group, *other)
        # Zarr warns that its specification does not have consolidated metadata; readers know it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)
            zarr.consolidate_metadata(LocalStore(path))

    def _create_array(self, group: zarr.Group, variable: OutputVariable, rows: int) -> None:
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

    def clean_up(self) -> None:
        """See `ForecastWriter`."""
        for variable in self.form.variables:
            remove_temporaries(self.partial / variable.name)

    def _open_array(self, name: str) -> "zarr.Array[Any]":
        """Return an array to write complete chunks to; also chunks of NaN become files."""
        if name not in self._arrays:
            array = zarr.open_array(
                AtomicFileStore(LocalStore(self.partial)), path=name, mode="r+", zarr_format=3
            )
            # `open_array` ignores a config. By default zarr does not write chunks of fill values,
            # which `missing` would take for chunks that were never written.
            self._arrays[name] = array.with_config({"write_empty_chunks": True})
        return self._arrays[name]

    def _chunk_rows(self, path: Path) -> int:
        name = self.form.variables[0].name
        try:
            metadata = json.loads((path / name / "zarr.json").read_text())
            return int(self._rows_of(metadata["chunk_grid"]["configuration"]["chunk_shape"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: {name} can't be read. Remove it, and start again.") from error

    def _chunk_names(
        self, variable: OutputVariable, index: tuple[int, ...], bands: range
    ) -> list[str]:
        """Return the file names of bands of one field, which has all levels in one chunk."""
        leading = [*index, *([0] if variable.on_levels else [])]
        columns = [0] * (len(self.form.horizontal_dims) - 1)
        return [".".join(map(str, ["c", *leading, band, *columns])) for band in bands]

    def _rows_of(self, chunk: Sequence[int]) -> int:
        """Return the rows of a chunk of this shape, or its cells."""
        return chunk[-len(self.form.horizontal_dims)]


class FileWriter(ZarrWriter):
    """Writes a single file, by way of a zarr store at `OUT.partial`."""

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self.temporary_file = out.with_name(f"{out.name}.file{PARTIAL_SUFFIX}")

    @classmethod
    @abstractmethod
    def read_file_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings in a file; None if it has none, or is not of this format."""

    @abstractmethod
    def copy_lead_time(self, job: ForecastJob, lead: int, create: bool) -> None:
        """Copy one lead time from the store to the temporary file.

        Args:
            job, lead: which one.
            create: whether to create the file first, also if it exists.

        Raises:
            OSError: the disk is full.
            UserError: a field in the store is damaged.
        """

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        return super().read_settings(path) if path.is_dir() else cls.read_file_settings(path)

    @property
    def piece_count(self) -> int:
        """See `ForecastWriter`: one piece for each lead time of each forecast."""
        return len(self.jobs) * len(self.form.hours)

    def assemble_piece(self, piece: int) -> None:
        """See `ForecastWriter`: copy one lead time. The first piece creates the file again."""
        job = self.jobs[piece // len(self.form.hours)]
        lead = piece % len(self.form.hours)
        with disk_errors(self.out):
            try:
                self.copy_lead_time(job, lead, create=piece == 0)
            except OSError:
                # Frees space on a full disk. The store, which took the computing, stays.
                self.temporary_file.unlink(missing_ok=True)
                raise

    def finish(self) -> None:
        """See `ForecastWriter`."""
        self.check_complete()
        with disk_errors(self.out):
            # The store is removed only after the file is on disk under its final name.
            fsync_path(self.temporary_file)
            rename_durably(self.temporary_file, self.out)
            shutil.rmtree(self.partial, ignore_errors=True)  # its lock file is open

    def bands(self, path: Path) -> list[slice]:
        """See `ForecastWriter`."""
        return super().bands(path) if path.is_dir() else [slice(0, self.form.height)]

    def missing(self, path: Path) -> list[MissingField]:
        """See `ForecastWriter`: a file with its final name is complete."""
        return super().missing(path) if path.is_dir() else []

    def clean_up(self) -> None:
        """See `ForecastWriter`."""
        self.temporary_file.unlink(missing_ok=True)
        super().clean_up()


def _create_unchunked(
    group: zarr.Group,
    name: str,
    dims: tuple[str, ...],
    values: NDArray[Any],
    attributes: Mapping[str, Any],
) -> None:
    """Create an array with its values in one chunk."""
    group.create_array(
        name,
        data=np.asarray(values, order="C"),
        chunks=values.shape,
        compressors=(Crc32cCodec(),),
        dimension_names=dims,
        attributes=dict(attributes),
    )


def _chunk_range(rows: slice, chunk_rows: int) -> range:
    """Return the indices of the chunks of these rows, which start at a chunk boundary."""
    return range(rows.start // chunk_rows, -(-rows.stop // chunk_rows))


def _nonempty_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that are not empty; [] without a folder."""
    if not folder.is_dir():
        return []
    # One listing instead of a call for each file; an empty file is not a complete chunk.
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.stat().st_size]

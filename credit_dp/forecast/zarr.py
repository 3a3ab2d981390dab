"""A forecast as one zarr store (version 3), into which each rank writes whole chunks.

Several processes may write into one store without a word between them only if none of them ever
writes part of a chunk that another one writes, too. Zarr's chunks are all equally high, and bands
are not: 721 rows on 4 ranks are 181, 180, 180 and 180. So a chunk is as high as the highest of
balanced bands, and the few rows by which bands differ from that travel to the rank that writes them
(one and two of 180 here, none where bands are equal, or only the last one is lower).

A chunk is one lead time of one forecast: all levels, one band. Each is a file that is there whole
or not at all, and carries a checksum, so that the files are their own journal.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore

from credit_dp.data.rechunk.target import CODECS, AtomicFileStore, remove_leftovers
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.forecast.format import ForecastFormat, Variable
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    SETTINGS_ATTRIBUTE,
    Fields,
    ForecastPart,
    ForecastWriter,
    MissingField,
    global_attributes,
)

CODEC = "zstd"


@final
class ZarrWriter(ForecastWriter):
    """See above."""

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._arrays: dict[str, zarr.Array[Any]] = {}

    @classmethod
    def read_settings(cls, place: Path) -> Mapping[str, Any] | None:
        """See `ForecastWriter`."""
        try:
            metadata = json.loads((place / "zarr.json").read_text())
            said: Mapping[str, Any] = json.loads(metadata["attributes"][SETTINGS_ATTRIBUTE])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return said

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Whole chunks, dealt to the ranks from north to south."""
        return RowPartition.in_multiples_of(
            bands.height, bands.ranks, self._chunk_rows(self.partial)
        )

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """See `ForecastWriter`; what is there is left as it is."""
        if rows.start == rows.stop:
            return
        place = self.form.place(job.member, job.time, lead)
        for variable, values in zip(self.form.variables, fields, strict=True):
            array = self._open_array(variable.name)
            names = self._chunk_names(variable, place, _chunk_range(rows, array.chunks[-2]))
            folder = self.partial / variable.name
            if not all((folder / name).exists() for name in names):
                where: tuple[int | slice | EllipsisType, ...] = (*place, ..., rows, slice(None))
                array[where] = values

    def close(self, job: ForecastJob) -> None:
        """Nothing is left to do: chunks are files of their own."""

    def bands(self, place: Path) -> list[slice]:
        """See `ForecastWriter`."""
        high, height = self._chunk_rows(place), self.form.height
        return [slice(row, min(row + high, height)) for row in range(0, height, high)]

    def missing(self, place: Path) -> list[MissingField]:
        """See `ForecastWriter`."""
        bands = list(enumerate(self.bands(place)))
        there = {v.name: set(_nonempty_files(place / v.name)) for v in self.form.variables}
        return [
            MissingField(job, lead, rows)
            for job in self.jobs
            for lead in range(len(self.form.hours))
            for band, rows in bands
            if any(
                name not in there[variable.name]
                for variable in self.form.variables
                for name in self._chunk_names(
                    variable, self.form.place(job.member, job.time, lead), range(band, band + 1)
                )
            )
        ]

    def parts(self, place: Path) -> Iterator[ForecastPart]:
        """See `ForecastWriter`: it is one."""
        yield ForecastPart(place, {}, self.jobs, self.bands(place))

    def create(self, place: Path, bands: RowPartition) -> None:
        """See `ForecastWriter`."""
        group = zarr.create_group(LocalStore(place), attributes=global_attributes(self._settings))
        rows = -(-bands.height // bands.ranks)
        for variable in self.form.variables:
            self._create_array(group, variable, rows)
        for name, coordinate in self.form.coordinates.items():
            _create_unchunked(group, name, (name,), *coordinate)
        for bounds in self.form.bounds:
            _create_unchunked(group, *bounds, {})
        with warnings.catch_warnings():  # readers know it, if it is not in zarr's specification yet
            warnings.simplefilter("ignore", ZarrUserWarning)
            zarr.consolidate_metadata(LocalStore(place))

    def _create_array(self, group: zarr.Group, variable: Variable, rows: int) -> None:
        shape = self.form.shape(variable)
        leading = len(self.form.leading_dims)
        group.create_array(
            variable.name,
            shape=shape,
            chunks=(*(1,) * leading, *shape[leading:-2], rows, shape[-1]),
            compressors=(*CODECS[CODEC], Crc32cCodec()),
            dtype=np.float32,
            fill_value=np.nan,
            dimension_names=variable.dims,
            attributes=variable.attributes,
            # One folder of files for each variable.
            chunk_key_encoding={"name": "default", "separator": "."},
        )

    def clean_up(self) -> None:
        """See `ForecastWriter`."""
        for variable in self.form.variables:
            remove_leftovers(self.partial / variable.name)

    def _open_array(self, name: str) -> "zarr.Array[Any]":
        """To write whole chunks to; those that are NaN throughout are files, too."""
        if name not in self._arrays:
            array = zarr.open_array(
                AtomicFileStore(LocalStore(self.partial)), path=name, mode="r+", zarr_format=3
            )
            # Opening ignores a config.
            self._arrays[name] = array.with_config({"write_empty_chunks": True})
        return self._arrays[name]

    def _chunk_rows(self, place: Path) -> int:
        name = self.form.variables[0].name
        try:
            metadata = json.loads((place / name / "zarr.json").read_text())
            return int(metadata["chunk_grid"]["configuration"]["chunk_shape"][-2])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{place}: {name} can't be read. Remove it, and start again."
            ) from error

    def _chunk_names(self, variable: Variable, place: tuple[int, ...], bands: range) -> list[str]:
        """The files of some bands of one field, which has all levels in one chunk."""
        leading = [*place, *([0] if variable.on_levels else [])]
        return [".".join(map(str, ["c", *leading, band, 0])) for band in bands]


def _create_unchunked(
    group: zarr.Group,
    name: str,
    dims: tuple[str, ...],
    values: NDArray[Any],
    attributes: Mapping[str, Any],
) -> None:
    """An array in one chunk, with its values."""
    group.create_array(
        name,
        data=np.ascontiguousarray(values),
        chunks=values.shape,
        compressors=(Crc32cCodec(),),
        dimension_names=dims,
        attributes=dict(attributes),
    )


def _chunk_range(rows: slice, high: int) -> range:
    """The chunks that these rows are, which begin where one begins."""
    return range(rows.start // high, -(-rows.stop // high))


def _nonempty_files(folder: Path) -> list[str]:
    """The files in a folder that are not empty; none if it is not there."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.stat().st_size]

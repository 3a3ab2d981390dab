"""Writes a prepared store, so that a process killed at any point leaves nothing half done.

A store is created as `OUT.new.partial` with everything but its fields, then renamed to
`OUT.partial`. Its shards are added one by one, each under a temporary name first. The complete
store is renamed to `OUT`. A rename is atomic, so whatever exists under its final name is complete,
and what is missing can be written by anybody at any time.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from credit_dp.checks import expand_home
from credit_dp.data.cache import clear_new, new_path, remove_lock
from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.grid import Axis, FieldArray
from credit_dp.data.rechunk.field_selection import SelectedFields
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE
from credit_dp.errors import UserError
from credit_dp.files import PARTIAL_SUFFIX, partial_path, remove_temporaries, write_bytes_atomic

SETTINGS = "prepared"  # attribute with all that the content depends on, chunks and codec included


@final
class RechunkTarget:
    """The prepared store `OUT`, and `OUT.partial` while it is written.

    Shards that exist are complete, so the folder itself records the progress.

    Args:
        out: path of the prepared store.
        overwrite: whether a prepared store at `out` may be replaced.

    Raises:
        UserError: `out` can't be written, or exists.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        if not out or "://" in out:
            raise UserError(f"out: needs the path of a store to write, got {out!r}. Change out.")
        self.out = expand_home("out", out).absolute()
        self.partial = partial_path(self.out)
        self._overwrite = overwrite
        self._old = self.out.with_name(f"{self.out.name}.old{PARTIAL_SUFFIX}")
        folder = self.out.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            if folder.is_dir():
                raise UserError(f"{folder}: is not writable. Change its permissions, or out.")
            raise UserError(f"{folder}: there is no such folder. Make it, or change out.")
        if self.out.exists() and not self._replaceable():
            is_prepared = METADATA_ATTRIBUTE in (_read_attributes(self.out) or {})
            advice = ", or say overwrite=true" if is_prepared else ""
            raise UserError(f"{self.out}: exists already. Change out{advice}.")

    def settings(self) -> Mapping[str, Any] | None:
        """Return the settings of the partial store; None if there is none.

        Raises:
            UserError: `OUT.partial` exists and is something else.
        """
        if not self.partial.exists():
            return None
        attributes = _read_attributes(self.partial)
        if attributes is None or SETTINGS not in attributes:
            raise UserError(
                f"{self.partial}: is not a partial prepared store. Move it, or change out."
            )
        settings: Mapping[str, Any] = attributes[SETTINGS]
        return settings

    def begin(
        self, selected: SelectedFields, rows: int, codec: str, settings: Mapping[str, Any]
    ) -> None:
        """Create the partial store with everything but its fields, in one rename."""
        if self.partial.exists():  # with other settings; the lock file in it is kept
            shutil.rmtree(new_path(self.out), ignore_errors=True)
            os.replace(self.partial, new_path(self.out))
        new = clear_new(self.out)
        attributes = {METADATA_ATTRIBUTE: selected.metadata.attributes(), SETTINGS: dict(settings)}
        group = zarr.create_group(LocalStore(new), attributes=attributes)
        group.create_array(
            "fields",
            shape=selected.shape,
            dimension_names=("time", "channel", *selected.grid.dims),
            attributes=selected.grid.field_attributes,
            **shard_options(selected.shape, rows, codec),
        )
        _write_static(group, selected, rows, codec)
        _write_coordinates(group, selected)
        # The first moment at which another process sees the store: its metadata are complete.
        os.replace(new, self.partial)

    def resume(self) -> None:
        """Remove what a killed process left in the partial store."""
        remove_temporaries(self.partial / "fields")

    def missing(self, first: int, stop: int) -> list[int]:
        """Return the times from `first` up to `stop` that have no shard yet."""
        folder = self.partial / "fields"
        return [index for index in range(first, stop) if not (folder / shard_name(index)).exists()]

    def fields(self) -> "zarr.Array[Any]":
        """Open the fields of the partial store, `(T, C, H, W)`, for writing complete shards."""
        array = zarr.open_array(
            AtomicFileStore(LocalStore(self.partial)), path="fields", mode="r+", zarr_format=3
        )
        # The setting is not stored with the array, and open_array() ignores it.
        return array.with_config({"write_empty_chunks": True})

    def finish(self) -> None:
        """Rename the partial store to `OUT`, and remove a store that it replaces."""
        # A folder can't replace another one in one rename: the old store makes way first, and is
        # removed only when the new one has its name.
        if self.out.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            os.replace(self.out, self._old)
        os.replace(self.partial, self.out)
        remove_lock(self.out)
        shutil.rmtree(self._old, ignore_errors=True)

    def _replaceable(self) -> bool:
        """Whether `OUT` may be removed: it is a prepared store, and the user allows it."""
        attributes = _read_attributes(self.out)
        return self._overwrite and attributes is not None and METADATA_ATTRIBUTE in attributes


def shard_name(time: int) -> str:
    """Return the name of the file in `fields` that holds a time."""
    return f"c.{time}.0.0.0"


def _read_attributes(folder: Path) -> Mapping[str, Any] | None:
    """Return the attributes of a zarr group of format 3; None if there is none."""
    try:
        metadata = json.loads((folder / "zarr.json").read_text())
        attributes: Mapping[str, Any] = metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return attributes


def _write_static(group: zarr.Group, selected: SelectedFields, rows: int, codec: str) -> None:
    if not selected.metadata.static:
        return
    values: FieldArray = selected.static()
    options = shard_options(values.shape, rows, codec)
    array = group.create_array(
        "static",
        shape=values.shape,
        dimension_names=("static", *selected.grid.dims),
        attributes=selected.grid.field_attributes,
        **options,
    )
    array[:] = values


def _write_coordinates(group: zarr.Group, selected: SelectedFields) -> None:
    grid = selected.grid
    times, time_units = encode_times(selected.times, selected.calendar, selected.metadata.origin)
    attributes: dict[str, dict[str, Any]] = {
        "time": {
            **{"units": time_units, "calendar": selected.calendar.cf_name},
            "standard_name": "time",
        },
        "latitude": {"units": "degrees_north", "standard_name": "latitude"},
        "longitude": {"units": "degrees_east", "standard_name": "longitude"},
    }
    values: dict[str, NDArray[Any]] = {
        "time": times,
        "latitude": grid.latitude,
        "longitude": grid.longitude,
    }
    dims: dict[str, tuple[str, ...]] = {}
    if grid.is_projected:
        mapping, of_mapping, *axes = grid.projection
        dims = {"latitude": grid.dims, "longitude": grid.dims, mapping: ()}
        axes.append(Axis(mapping, np.array(0, np.int32), of_mapping))
        for name, numbers, of_axis in axes:
            if name and numbers.size:  # a file may have neither mapping nor axes
                values[name], attributes[name] = numbers, dict(of_axis)
    for name, numbers in values.items():
        group.create_array(
            name,
            data=np.asarray(numbers, order="C"),  # keeps no dims as they are
            chunks=numbers.shape,
            compressors=None,
            dimension_names=dims.get(name, (name,)),
            attributes=attributes[name],
        )


def encode_times(times: Times, calendar: Calendar, where: str) -> tuple[NDArray[np.int64], str]:
    """Return times as numbers, and their units.

    Raises:
        UserError: a time is not a full minute.
    """
    not_whole = times[times.astype("M8[m]") != times]
    if len(not_whole):
        raise UserError(
            f"{where}: a prepared store needs full minutes, but has {not_whole[0]}. "
            "Round the times of the store, or change data.store."
        )
    return calendar.encode(times)


@final
class AtomicFileStore(WrapperStore[LocalStore]):
    """A zarr store on disk whose files appear complete or not at all.

    A process that is killed leaves complete files, and at worst one with a temporary name, which
    `remove_temporaries` removes. Two processes may write the same content at once.
    """

    _supports_sync_io: ClassVar[bool] = False  # or zarr 3.4 writes past `set`

    async def set(self, key: str, value: Buffer) -> None:
        """Write one key; see `zarr.abc.store.Store`."""
        path = self._store.root / key
        content = memoryview(value.as_buffer_like()).cast("B")
        await asyncio.to_thread(write_bytes_atomic, path, content, durable=True, unique=True)


def _blosc(name: str, level: int) -> tuple[BytesBytesCodec, ...]:
    # Shuffled by bytes: the exponents of neighbouring floats are alike, their last bits noise.
    return (BloscCodec(cname=name, clevel=level, shuffle="shuffle", typesize=4),)  # type: ignore[arg-type]


# All are lossless.
CODECS: Mapping[str, tuple[BytesBytesCodec, ...]] = MappingProxyType(
    {
        "none": (),
        "lz4": _blosc("lz4", 5),
        "zstd": _blosc("zstd", 1),
    }
)


def shard_options(shape: Sequence[int], rows: int, codec: str) -> dict[str, Any]:
    """Return the arguments of `zarr.create_array`: chunks of some rows, and one shard per time.

    Args:
        shape: `(T, C, H, W)`, or `(C, H, W)` for fields without a time.
        rows: of a chunk.
        codec: key of `CODECS`.
    """
    *times, channels, height, columns = shape
    ones = (1,) * len(times)
    channels = max(1, channels)
    return {
        "chunks": (*ones, channels, rows, columns),
        "shards": (*ones, channels, -(-height // rows) * rows, columns),
        "compressors": (*CODECS[codec], Crc32cCodec()),
        "dtype": np.float32,
        "fill_value": np.nan,
        # All shards in one folder: `/` would make four nested folders for each of them.
        "chunk_key_encoding": {"name": "default", "separator": "."},
        # Chunks full of NaN are written, too, so that a missing chunk means damage.
        "config": {"write_empty_chunks": True},
    }


def stored_size(fields: FieldArray, rows: int, codec: str) -> int:
    """Return the bytes that one time is stored in, `(C, H, W)`."""
    chunks: dict[str, Buffer] = {}
    options = shard_options((1, *fields.shape), rows, codec)
    zarr.create_array(MemoryStore(chunks), shape=(1, *fields.shape), **options)[0] = fields
    return sum(len(value) for key, value in chunks.items() if "zarr.json" not in key)

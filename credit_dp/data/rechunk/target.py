"""Lays out the zarr store that `credit-dp data prepare` writes: one file per time, cut into bands.

`create_store` writes everything but the fields. Whatever writes them opens the array with
`open_fields`, whose files appear complete or not at all (`AtomicFileStore`).
"""

import asyncio
import json
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

from credit_dp.data.grid import FieldArray
from credit_dp.data.rechunk.selected_fields import SelectedFields
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE
from credit_dp.errors import UserError
from credit_dp.files import write_bytes_atomic

SETTINGS = "prepared"  # attribute with all that the content depends on, chunks and codec included


def create_store(
    path: Path, selected: SelectedFields, rows: int, codec: str, settings: Mapping[str, Any]
) -> None:
    """Write everything but the fields, whose chunks have some rows, into a folder."""
    attributes = {METADATA_ATTRIBUTE: selected.metadata.attributes(), SETTINGS: dict(settings)}
    group = zarr.create_group(LocalStore(path), attributes=attributes)
    group.create_array(
        "fields",
        shape=selected.shape,
        dimension_names=("time", "channel", *selected.grid.dims),
        attributes=selected.grid.field_attributes,
        **shard_options(selected.shape, rows, codec),
    )
    if selected.metadata.static:
        values = selected.static()
        static = group.create_array(
            "static",
            shape=values.shape,
            dimension_names=("static", *selected.grid.dims),
            attributes=selected.grid.field_attributes,
            **shard_options(values.shape, rows, codec),
        )
        static[:] = values
    _write_coordinates(group, selected)


def open_fields(store: Path) -> "zarr.Array[Any]":
    """Open the array of fields, `(T, C, H, W)`, to read it or to write complete times."""
    array = zarr.open_array(
        AtomicFileStore(LocalStore(store)), path="fields", mode="r+", zarr_format=3
    )
    # The setting is not stored with the array, and open_array() ignores it.
    return array.with_config({"write_empty_chunks": True})


def shard_name(time: int) -> str:
    """Return the name of the file in `fields` that holds a time."""
    return f"c.{time}.0.0.0"


def read_attributes(folder: Path) -> Mapping[str, Any]:
    """Return the attributes of a zarr group of format 3; none if there is no such group."""
    try:
        attributes: Mapping[str, Any] = json.loads((folder / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return attributes


def _write_coordinates(group: zarr.Group, selected: SelectedFields) -> None:
    grid = selected.grid
    between_minutes = selected.times[selected.times.astype("M8[m]") != selected.times]
    if len(between_minutes):
        raise UserError(
            f"{selected.metadata.origin}: a prepared store needs full minutes, but has "
            f"{between_minutes[0]}. Round the times of the store, or change data.store."
        )
    times, time_units = selected.calendar.encode(selected.times)
    time_attributes = {
        "units": time_units,
        "calendar": selected.calendar.cf_name,
        "standard_name": "time",
    }
    coordinates: list[tuple[str, NDArray[Any], Mapping[str, Any]]] = [
        ("time", times, time_attributes),
        ("latitude", grid.latitude, {"units": "degrees_north", "standard_name": "latitude"}),
        ("longitude", grid.longitude, {"units": "degrees_east", "standard_name": "longitude"}),
    ]
    dims: dict[str, tuple[str, ...]] = {}
    if grid.is_projected:
        mapping, mapping_attributes, *axes = grid.projection
        dims = {"latitude": grid.dims, "longitude": grid.dims, mapping: ()}
        coordinates += [*axes, (mapping, np.array(0, np.int32), mapping_attributes)]
    for name, values, attributes in coordinates:
        if name and values.size:  # a file may have neither mapping nor axes
            group.create_array(
                name,
                data=np.asarray(values, order="C"),  # keeps no dims as they are
                chunks=values.shape,
                compressors=None,
                dimension_names=dims.get(name, (name,)),
                attributes=dict(attributes),
            )


@final
class AtomicFileStore(WrapperStore[LocalStore]):
    """A zarr store on disk whose files appear complete or not at all.

    A process that is killed leaves complete files, and at worst one with a temporary name. Two
    processes may write the same content at once.
    """

    _supports_sync_io: ClassVar[bool] = False  # or zarr 3.4 writes past `set`

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file."""
        path = self._store.root / key
        content = memoryview(value.as_buffer_like()).cast("B")
        await asyncio.to_thread(write_bytes_atomic, path, content, durable=True, unique=True)


def _blosc(name: str, level: int) -> tuple[BytesBytesCodec, ...]:
    # Shuffled by bytes: the exponents of neighbouring floats are alike, their last bits noise.
    return (BloscCodec(cname=name, clevel=level, shuffle="shuffle", typesize=4),)  # type: ignore[arg-type]


# All are lossless.
CODECS: Mapping[str, tuple[BytesBytesCodec, ...]] = MappingProxyType(
    {"none": (), "lz4": _blosc("lz4", 5), "zstd": _blosc("zstd", 1)}
)


def shard_options(shape: Sequence[int], rows: int, codec: str) -> dict[str, Any]:
    """Return the arguments of `zarr.create_array`: chunks of some rows, and one shard per time.

    Shapes:
        `(T, C, H, W)`, or `(C, H, W)` for fields without a time.
    """
    *times, channels, height, columns = shape
    ones = (1,) * len(times)
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

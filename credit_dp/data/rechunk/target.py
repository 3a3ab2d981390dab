"""The prepared store while it is written: under a temporary name, resumed, then renamed."""

import asyncio
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any, final

import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from credit_dp.checks import expand_home, one_of
from credit_dp.data.rechunk.request import SelectedFields
from credit_dp.data.sources.base import Fields, Times
from credit_dp.data.sources.prepared import EPOCH, METADATA_ATTRIBUTE, TIME_UNITS
from credit_dp.errors import UserError

ENDING = ".partial"


@final
class AtomicFileStore(WrapperStore[LocalStore]):
    """Writes each file under another name, makes sure that it is on the disk, then renames it.

    A process that is killed at any point leaves files that are whole, and at worst one with
    `PARTIAL_SUFFIX`. Two writers of the same content don't harm each other.
    """

    async def set(self, key: str, value: Buffer) -> None:
        """See `zarr.abc.store.Store`."""
        path = self._store.root / key
        await asyncio.to_thread(
            write_bytes_atomic, path, memoryview(value.as_buffer_like()).cast("B")
        )


def write_bytes_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{ENDING}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were writing in a folder."""
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(ENDING):
            Path(entry.path).unlink(missing_ok=True)


SAMPLE_BYTES = 64 * 2**20  # compressed for each measurement, at most
DISK_BYTES = 64 * 2**20  # written and read to see how fast the disk is
REPEATS = 3  # of which the fastest counts
BEARABLE = 1.05  # a codec that makes files smaller wins if it is slower by this factor at most
AUTO = "auto"


def _blosc(name: str, level: int) -> tuple[BytesBytesCodec, ...]:
    # Shuffled by bytes: the exponents of neighbouring floats are alike, their last bits noise.
    return (BloscCodec(cname=name, clevel=level, shuffle="shuffle", typesize=4),)  # type: ignore[arg-type]


# All are lossless.
CODECS: Mapping[str, tuple[BytesBytesCodec, ...]] = MappingProxyType(
    {
        "none": (),
        "lz4": _blosc("lz4", 5),
        "zstd": _blosc("zstd", 1),
        "zstd3": _blosc("zstd", 3),
        "zstd-plain": (ZstdCodec(level=1),),
    }
)


@final
@dataclass(frozen=True)
class CodecMeasurement:
    """One codec on a sample.

    Attributes:
        name: its key in `CODECS`.
        ratio: bytes before over bytes after.
        encode, decode: seconds for each byte before, on one thread of this machine.
        read: seconds to have one of those bytes from the disk, decoded.
    """

    name: str
    ratio: float
    encode: float
    decode: float
    read: float


def check_codec(name: str) -> None:
    """Refuse what is neither `auto` nor a codec."""
    one_of("codec", name, (AUTO, *CODECS))


def measure_codecs(
    fields: Fields, rows: int, names: Sequence[str], disk_speed: float
) -> dict[str, CodecMeasurement]:
    """Try codecs on one sample, in chunks as they will be.

    Args:
        fields: `(C, H, W)`.
        rows: of a chunk.
        names: of the codecs.
        disk_speed: bytes that the disk gives in a second.
    """
    channels, height, columns = fields.shape
    part = max(rows, min(height, SAMPLE_BYTES // (4 * channels * columns)))
    middle = max(0, (height - part) // 2)
    sample = np.ascontiguousarray(fields[None, :, middle : middle + part])
    return {name: _measure_codec(sample, rows, name, disk_speed) for name in names}


def choose_codec(measured: Mapping[str, CodecMeasurement]) -> CodecMeasurement:
    """The smallest of those that are read about as fast as the fastest."""
    least = min(one.read for one in measured.values())
    near = [one for one in measured.values() if one.read <= BEARABLE * least]
    return max(near, key=lambda one: one.ratio)


def measure_disk_bandwidth(folder: Path) -> float:
    """Bytes per second that are read from the disk of a folder, without the system's cache."""
    content = np.random.default_rng(0).bytes(DISK_BYTES)
    with NamedTemporaryFile(dir=folder, prefix=".speed-", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(2**20):
            pass
        return DISK_BYTES / (time.perf_counter() - start)


def shard_options(shape: Sequence[int], rows: int, codec: str) -> dict[str, Any]:
    """What `zarr.create_array` is told of shards: chunks of some rows, one shard for each time.

    Args:
        shape: `(..., C, H, W)`; before the channels there is time, or nothing.
        rows: of a chunk.
        codec: key of `CODECS`.
    """
    *times, channels, height, columns = shape
    one = (1,) * len(times)
    channels = max(1, channels)
    return {
        "chunks": (*one, channels, rows, columns),
        "shards": (*one, channels, -(-height // rows) * rows, columns),
        "compressors": (*CODECS[codec], Crc32cCodec()),
        "dtype": np.float32,
        "fill_value": np.nan,
        # One file for each time in one folder, not four folders for each.
        "chunk_key_encoding": {"name": "default", "separator": "."},
        # A chunk that is NaN throughout is there too: one that is not there is a fault.
        "config": {"write_empty_chunks": True},
    }


def _measure_codec(sample: Fields, rows: int, name: str, disk_speed: float) -> CodecMeasurement:
    store = MemoryStore()
    array = zarr.create_array(store, shape=sample.shape, **shard_options(sample.shape, rows, name))

    def write() -> None:
        array[:] = sample

    encode = _seconds(write) / sample.nbytes
    decode = _seconds(lambda: array[:]) / sample.nbytes
    stored = sum(len(value) for key, value in store._store_dict.items() if "zarr.json" not in key)
    ratio = sample.nbytes / stored
    return CodecMeasurement(name, ratio, encode, decode, decode + 1 / (ratio * disk_speed))


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


SETTINGS = "prepared"  # attribute with what the fields depend on, chunks and codec
FIELD_DIMS = ("channel", "latitude", "longitude")


@final
class RechunkTarget:
    """`OUT` and `OUT.partial`.

    The shards are their own journal: one that is there is whole, so what is done is what is there.

    Args:
        out: where the prepared store is to be.
        overwrite: whether a prepared store that is there may be replaced.

    Raises:
        UserError: `out` can't be made, or is there.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        if not out or "://" in out:
            raise UserError(f"out: needs the path of a store to write, got {out!r}. Change out.")
        self.out = expand_home("out", out).absolute()
        self.partial = self.out.with_name(self.out.name + ENDING)
        self._overwrite = overwrite
        self._new = self.out.with_name(f"{self.out.name}.new{ENDING}")
        self._old = self.out.with_name(f"{self.out.name}.old{ENDING}")
        folder = self.out.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            problem = "cannot be written in" if folder.is_dir() else "there is no such folder"
            raise UserError(f"{folder}: {problem}. Make it, or change out.")
        if self.out.exists() and not self._replaceable():
            known = METADATA_ATTRIBUTE in (_read_attributes(self.out) or {})
            advice = ", or say overwrite=true" if known else ""
            raise UserError(f"{self.out}: is there already. Change out{advice}.")

    def settings(self) -> Mapping[str, Any] | None:
        """Those of the partial store; None if there is none.

        Raises:
            UserError: something else is in its place.
        """
        if not self.partial.exists():
            return None
        attributes = _read_attributes(self.partial)
        if attributes is None or SETTINGS not in attributes:
            raise UserError(
                f"{self.partial}: is no store that was being prepared. Move it, or change out."
            )
        settings: Mapping[str, Any] = attributes[SETTINGS]
        return settings

    def begin(
        self, asked: SelectedFields, rows: int, codec: str, settings: Mapping[str, Any]
    ) -> None:
        """Write all but the fields; the partial store is there with all of that, or not at all."""
        for leftover in (self._new, self.partial):
            shutil.rmtree(leftover, ignore_errors=True)
        self._new.mkdir()
        attributes = {METADATA_ATTRIBUTE: asked.form.attributes(), SETTINGS: dict(settings)}
        group = zarr.create_group(LocalStore(self._new), attributes=attributes)
        group.create_array(
            "fields",
            shape=asked.shape,
            dimension_names=("time", *FIELD_DIMS),
            **shard_options(asked.shape, rows, codec),
        )
        _write_static(group, asked, rows, codec)
        _write_coordinates(group, asked)
        os.replace(self._new, self.partial)

    def resume(self) -> None:
        """Clean up behind what was killed."""
        remove_leftovers(self.partial / "fields")

    def missing(self, first: int, stop: int) -> list[int]:
        """The times from `first` up to `stop` that have no shard yet."""
        folder = self.partial / "fields"
        return [time for time in range(first, stop) if not (folder / shard_name(time)).exists()]

    def fields(self) -> "zarr.Array[Any]":
        """`(time, channel, latitude, longitude)` of the partial store, to write whole shards to."""
        array = zarr.open_array(
            AtomicFileStore(LocalStore(self.partial)), path="fields", mode="r+", zarr_format=3
        )
        # Opening ignores a config.
        return array.with_config({"write_empty_chunks": True})

    def finish(self) -> None:
        """Give the partial store its name; what had it is removed."""
        if self.out.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            os.replace(self.out, self._old)
        os.replace(self.partial, self.out)
        shutil.rmtree(self._old, ignore_errors=True)

    def _replaceable(self) -> bool:
        """Only a prepared store is ever removed, and only if a user says so."""
        attributes = _read_attributes(self.out)
        return self._overwrite and attributes is not None and METADATA_ATTRIBUTE in attributes


def shard_name(time: int) -> str:
    """The file in `fields` that holds a time."""
    return f"c.{time}.0.0.0"


def _read_attributes(folder: Path) -> Mapping[str, Any] | None:
    """Those of a zarr group of version 3; None if there is none."""
    try:
        metadata = json.loads((folder / "zarr.json").read_text())
        attributes: Mapping[str, Any] = metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return attributes


def _write_static(group: zarr.Group, asked: SelectedFields, rows: int, codec: str) -> None:
    if not asked.form.static:
        return
    values: Fields = asked.static()
    options = shard_options(values.shape, rows, codec)
    array = group.create_array(
        "static", shape=values.shape, dimension_names=("static", *FIELD_DIMS[1:]), **options
    )
    array[:] = values


def _write_coordinates(group: zarr.Group, asked: SelectedFields) -> None:
    attributes: dict[str, dict[str, Any]] = {
        "time": {"units": TIME_UNITS, "calendar": "proleptic_gregorian", "standard_name": "time"},
        "latitude": {"units": "degrees_north", "standard_name": "latitude"},
        "longitude": {"units": "degrees_east", "standard_name": "longitude"},
    }
    values = {
        "time": hours_since_epoch(asked.times, asked.form.origin),
        "latitude": asked.latitude,
        "longitude": asked.longitude,
    }
    for name, numbers in values.items():
        group.create_array(
            name,
            data=np.ascontiguousarray(numbers),
            chunks=numbers.shape,
            compressors=None,
            dimension_names=(name,),
            attributes=attributes[name],
        )


def hours_since_epoch(times: Times, where: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Hours since `EPOCH`.

    Raises:
        UserError: a time is no whole hour.
    """
    hours = times.astype("M8[h]")
    odd = times[hours != times]
    if len(odd):
        raise UserError(
            f"{where}: a prepared store has whole hours, but there is {odd[0].astype('M8[s]')}. "
            "Choose other dates, or another data.step."
        )
    return (hours - EPOCH).astype(np.int64)

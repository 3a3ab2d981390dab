"""How a prepared store can be compressed, and which way is read fastest on this machine."""

import os
import time
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
from zarr.storage import MemoryStore

from credit_dp.checks import one_of
from credit_dp.data.sources.source import Fields

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
class Measured:
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


def measure(
    fields: Fields, rows: int, names: Sequence[str], disk_speed: float
) -> dict[str, Measured]:
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
    return {name: _measure(sample, rows, name, disk_speed) for name in names}


def fastest(measured: Mapping[str, Measured]) -> Measured:
    """The smallest of those that are read about as fast as the fastest."""
    least = min(one.read for one in measured.values())
    near = [one for one in measured.values() if one.read <= BEARABLE * least]
    return max(near, key=lambda one: one.ratio)


def disk_speed(folder: Path) -> float:
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


def _measure(sample: Fields, rows: int, name: str, disk_speed: float) -> Measured:
    store = MemoryStore()
    array = zarr.create_array(store, shape=sample.shape, **shard_options(sample.shape, rows, name))

    def write() -> None:
        array[:] = sample

    encode = _seconds(write) / sample.nbytes
    decode = _seconds(lambda: array[:]) / sample.nbytes
    stored = sum(len(value) for key, value in store._store_dict.items() if "zarr.json" not in key)
    ratio = sample.nbytes / stored
    return Measured(name, ratio, encode, decode, decode + 1 / (ratio * disk_speed))


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best

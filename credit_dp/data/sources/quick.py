"""Prepared stores read through tensorstore where it is installed: many small chunks cost it less.

It reads files by itself, past the stores that count and check. So what it reads is counted here,
from each shard's index, and where something is amiss it gives way to zarr, whose errors say which
file. Checksums are verified by both.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import final

import numpy as np
import zarr
from zarr.storage import LocalStore

from credit_dp.data.disk import CountingStore
from credit_dp.data.sources.address import is_remote, local_path
from credit_dp.data.sources.source import Fields

# Of all readers of an array: threads that decode, and files that are read at once.
DECODING, READING = 4, 8
ENTRY = 16  # bytes of a shard's index for each inner chunk: where it begins, and how long it is
CHECKSUM = 4  # bytes after the index


@final
class QuickArray:
    """One array of shards in a folder on this machine, of which slices are read.

    Raises:
        ValueError: the array has no shards.
    """

    def __init__(self, folder: Path, name: str, disk: CountingStore) -> None:
        import tensorstore

        self._array = zarr.open_array(LocalStore(folder, read_only=True), path=name, mode="r")
        if self._array.shards is None:
            raise ValueError(f"{name} has no shards")
        self._shards, self._chunks = self._array.shards, self._array.chunks
        self._folder = folder / name
        self._disk = disk
        context = {
            "cache_pool": {"total_bytes_limit": 0},  # each chunk is wanted once
            "data_copy_concurrency": {"limit": DECODING},
            "file_io_concurrency": {"limit": READING},
        }
        self._quick = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self._folder}/"}},
            context=tensorstore.Context(context),
            read=True,
        ).result()

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """The values, float32; None if a file is missing or is not as it should be."""
        spans = [part.indices(size)[:2] for part, size in self._spans(selection)]
        try:
            sizes = [size for shard in self._touched(spans) for size in self._sizes(shard, spans)]
            fields = np.asarray(self._quick[selection].read().result(), dtype=np.float32)
        except Exception:  # noqa: BLE001 - whatever it was, zarr will meet it again and name it
            return None
        self._disk.add(sum(sizes), len(sizes))
        return fields

    def _spans(self, selection: tuple[slice, ...]) -> list[tuple[slice, int]]:
        return list(zip(selection, self._array.shape, strict=True))

    def _touched(self, spans: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """The numbers of the shards that have some of it."""
        ranges = [
            range(first // size, -(-stop // size))
            for (first, stop), size in zip(spans, self._shards, strict=True)
        ]
        return product(*ranges)

    def _sizes(self, shard: tuple[int, ...], spans: list[tuple[int, int]]) -> list[int]:
        """Bytes of the inner chunks of a shard that have some of it."""
        counts = [s // c for s, c in zip(self._shards, self._chunks, strict=True)]
        length = ENTRY * int(np.prod(counts)) + CHECKSUM
        with (self._folder / self._array.metadata.encode_chunk_key(shard)).open("rb") as file:
            file.seek(-length, 2)
            index = np.frombuffer(file.read(length - CHECKSUM), "<u8").reshape(*counts, 2)
        inside = []
        for (first, stop), number, size, chunk in zip(
            spans, shard, self._shards, self._chunks, strict=True
        ):
            start = number * size
            low, high = max(first, start) - start, min(stop, start + size) - start
            inside.append(slice(low // chunk, -(-high // chunk)))
        sizes: list[int] = index[..., 1][tuple(inside)].ravel().tolist()
        return sizes


def quick_array(address: str, name: str, disk: CountingStore) -> QuickArray | None:
    """The array read through tensorstore; None if it is not installed, or can't read it.

    At addresses elsewhere zarr waits for the network, not for the processor.
    """
    if is_remote(address) or find_spec("tensorstore") is None:
        return None
    try:
        return QuickArray(local_path(address), name, disk)
    except Exception:  # noqa: BLE001 - zarr reads it, or says why it can't be read
        return None

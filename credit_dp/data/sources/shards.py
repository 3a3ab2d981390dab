"""Where the inner chunks of an array's shards are, in the files of a folder on this machine."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import google_crc32c
import numpy as np
import zarr

ENTRY = 16  # bytes of a shard's index for each inner chunk: where it begins, and how long it is
CHECKSUM = 4  # bytes after whatever has one


class Part(NamedTuple):
    """What is wanted of one inner chunk.

    Attributes:
        begin, size: of the chunk in its file, in bytes.
        inside: of its entries, those wanted.
        place: theirs among all that is wanted.
    """

    begin: int
    size: int
    inside: tuple[slice, ...]
    place: tuple[slice, ...]


@final
class Shards:
    """The shards of one array, with an index at the end of each.

    Raises:
        ValueError: the array has no shards.
    """

    def __init__(self, folder: Path, array: "zarr.Array[Any]") -> None:
        if array.shards is None:
            raise ValueError(f"{folder} has no shards")
        self.folder, self.shape, self.chunks = folder, array.shape, array.chunks
        self._shards, self._metadata = array.shards, array.metadata
        self._counts = [s // c for s, c in zip(self._shards, self.chunks, strict=True)]

    def spans(self, selection: Sequence[slice]) -> list[tuple[int, int]]:
        """First and last but one of what is selected in each dim."""
        sizes = zip(selection, self.shape, strict=True)
        return [part.indices(size)[:2] for part, size in sizes]

    def files(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[Path, tuple[int, ...]]]:
        """Those that have some of it, each with the shard's number in each dim."""
        touched = zip(spans, self._shards, strict=True)
        ranges = [range(first // size, -(-stop // size)) for (first, stop), size in touched]
        for shard in product(*ranges):
            yield self.folder / self._metadata.encode_chunk_key(shard), shard

    def parts(
        self, file: BinaryIO, shard: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> Iterator[Part]:
        """What of a shard is wanted, chunk by chunk.

        Raises:
            OSError, ValueError: its index can't be read, or is damaged.
        """
        index = self._index(file)
        ranges = []
        for (first, stop), number, size, chunk in zip(
            spans, shard, self._shards, self.chunks, strict=True
        ):
            start = number * size
            low, high = max(first, start) - start, min(stop, start + size) - start
            ranges.append([(at, start) for at in range(low // chunk, -(-high // chunk))])
        for places in product(*ranges):
            begin, size = map(int, index[tuple(at for at, _ in places)])
            inside, place = [], []
            for (at, start), (first, stop), chunk in zip(places, spans, self.chunks, strict=True):
                origin = start + at * chunk
                low, high = max(first, origin), min(stop, origin + chunk)
                inside.append(slice(low - origin, high - origin))
                place.append(slice(low - first, high - first))
            yield Part(begin, size, tuple(inside), tuple(place))

    def _index(self, file: BinaryIO) -> np.ndarray[Any, np.dtype[np.uint64]]:
        length = ENTRY * int(np.prod(self._counts)) + CHECKSUM
        file.seek(-length, 2)
        found = file.read(length)
        if not is_intact(found):
            raise ValueError(f"{file.name}: its index is damaged")
        return np.frombuffer(found, "<u8", len(found) // 8).reshape(*self._counts, 2)


def is_intact(content: Any) -> bool:
    """Whether bytes end with the checksum of those before."""
    sum_: int = google_crc32c.value(content[:-CHECKSUM])
    return sum_ == int.from_bytes(content[-CHECKSUM:], "little")

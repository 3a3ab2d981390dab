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
        dims = zip(spans, shard, self._shards, self.chunks, strict=True)
        for chunk in product(*(_along(*dim) for dim in dims)):
            at, inside, place = zip(*chunk, strict=True)
            begin, size = index[at].tolist()
            yield Part(begin, size, inside, place)

    def _index(self, file: BinaryIO) -> np.ndarray[Any, np.dtype[np.uint64]]:
        length = ENTRY * int(np.prod(self._counts)) + CHECKSUM
        file.seek(-length, 2)
        found = file.read(length)
        if not is_intact(found):
            raise ValueError(f"{file.name}: its index is damaged")
        return np.frombuffer(found, "<u8", len(found) // 8).reshape(*self._counts, 2)


def _along(
    span: tuple[int, int], number: int, shard: int, chunk: int
) -> list[tuple[int, slice, slice]]:
    """Along one dim, the chunks of a shard that have some of a span.

    Of each its number in the shard, what of it is wanted, and the place of that in the span.
    """
    first, start = span[0], number * shard
    low, high = max(first, start), min(span[1], start + shard)
    found = []
    for origin in range(low - (low - start) % chunk, high, chunk):
        inside = slice(max(low - origin, 0), min(high - origin, chunk))
        place = slice(origin + inside.start - first, origin + inside.stop - first)
        found.append(((origin - start) // chunk, inside, place))
    return found


def is_intact(content: Any) -> bool:
    """Whether bytes end with the checksum of those before."""
    sum_: int = google_crc32c.value(content[:-CHECKSUM])
    return sum_ == int.from_bytes(content[-CHECKSUM:], "little")

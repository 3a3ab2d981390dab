"""Prepared stores without compression: their chunks lie in files as they lie in memory.

So they are read into one room that stays in the processor's cache, checked there, and copied from
it to where they are wanted.
"""

from typing import Any, final

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

from credit_dp.data.disk import CountingStore
from credit_dp.data.sources.shards import CHECKSUM, Shards, is_intact
from credit_dp.data.sources.source import Fields

DTYPE = np.dtype("<f4")


def is_plain(array: "zarr.Array[Any]") -> bool:
    """Whether an array is of shards whose chunks are little-endian float32 with a checksum."""
    codecs: Any = getattr(array.metadata, "codecs", ())
    if array.dtype != DTYPE or len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec):
        return False
    little, checked = BytesCodec(endian="little"), Crc32cCodec()
    one = codecs[0]
    at_the_end = one.index_location.value == "end"
    return at_the_end and (*one.codecs, *one.index_codecs) == (little, checked) * 2


@final
class PlainArray:
    """One array in a folder on this machine, for which `is_plain`, and of which slices are read."""

    def __init__(self, shards: Shards, disk: CountingStore) -> None:
        self._shards, self._disk = shards, disk

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """The values; None if a file is missing or is not as it should be."""
        first, *others = selection
        if any(part.step is not None and part.step < 1 for part in selection):
            return None
        if first.step not in (None, 1):
            places = range(*first.indices(self._shards.shape[0]))
            parts = [self.read((slice(place, place + 1), *others)) for place in places]
            found = [part for part in parts if part is not None]
            return np.concatenate(found) if len(found) == len(parts) > 0 else None
        try:
            made = self._read(self._shards.spans(selection))
            return made[tuple(slice(None, None, part.step) for part in selection)]
        except (OSError, ValueError):
            return None

    def _read(self, spans: list[tuple[int, int]]) -> Fields:
        made = np.empty([stop - first for first, stop in spans], DTYPE)
        room = np.empty(int(np.prod(self._shards.chunks)) * DTYPE.itemsize + CHECKSUM, np.uint8)
        values = room[:-CHECKSUM].view(DTYPE).reshape(self._shards.chunks)
        chunks = 0
        for path, shard in self._shards.files(spans):
            with path.open("rb", buffering=0) as file:
                for part in self._shards.parts(file, shard, spans):
                    if part.size != len(room):
                        raise ValueError(f"{path}: a chunk is not as long as it should be")
                    file.seek(part.begin)
                    if file.readinto(room.data) != len(room) or not is_intact(room):
                        raise ValueError(f"{path}: a chunk is damaged")
                    made[part.place] = values[part.inside]
                    chunks += 1
        self._disk.add(chunks * len(room), chunks)
        return made

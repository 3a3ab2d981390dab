"""A store in which a chunk that is cut short is an error, where its decoder would not notice."""

from collections.abc import Collection
from typing import final

from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from credit_dp.data.disk import METADATA

HEADER = 16  # bytes before the data of a Blosc chunk; the last 4 say how long the chunk is


@final
class TruncatedChunkError(OSError):
    """A chunk is shorter than it says; the message is its key, and how long it is."""


@final
class IntactStore(WrapperStore[Store]):
    """Hands every read on, and refuses short chunks of the arrays in `blosc`, and short ranges.

    The Blosc decoder reads on behind the end of a short chunk. A shard's reader takes an empty
    inner chunk for fill values.

    Source: Blosc chunk format (header), https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
    """

    def __init__(self, store: Store, blosc: Collection[str]) -> None:
        super().__init__(store)
        self._blosc = frozenset(blosc)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As the wrapped store's.

        Raises:
            TruncatedChunkError: the chunk, or the range of it, ends too early.
        """
        value = await super().get(key, prototype, byte_range)
        if value is None:
            return None
        needed = 0
        if isinstance(byte_range, RangeByteRequest):
            needed = byte_range.end - byte_range.start
        elif byte_range is None and self._is_blosc(key):
            header = value[:HEADER].to_bytes()
            needed = max(HEADER, int.from_bytes(header[12:], "little"))
        if len(value) < needed:
            raise TruncatedChunkError(f"{key} has {len(value)} of {needed} bytes")
        return value

    def _is_blosc(self, key: str) -> bool:
        return key.split("/")[0] in self._blosc and not key.endswith(METADATA)

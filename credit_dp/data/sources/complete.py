"""A store in which a missing chunk is an error, where zarr would take it for fill values."""

from collections.abc import Sequence
from typing import final

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from credit_dp.data.disk import METADATA


@final
class AbsentChunkError(OSError):
    """A chunk's file is not in the store; the message is its key."""


@final
class CompleteStore(WrapperStore[Store]):
    """Hands every read on, and refuses that a chunk of one of the `arrays` is absent."""

    def __init__(self, store: Store, arrays: Sequence[str]) -> None:
        super().__init__(store)
        self._arrays = tuple(arrays)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As the wrapped store's.

        Raises:
            AbsentChunkError: there is no such chunk.
        """
        value = await super().get(key, prototype, byte_range)
        ours = key.split("/")[0] in self._arrays and not key.endswith(METADATA)
        if value is None and ours:
            raise AbsentChunkError(key)
        return value

"""A zarr store on disk, opened for reading only, that counts what is read from it."""

from pathlib import Path

import xarray as xr
import zarr
from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, WrapperStore

from credit_dp.errors import UserError

METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")


class CountingStore(WrapperStore[LocalStore]):
    """Hands every read on and adds up the bytes of chunks; metadata is not counted.

    The index at the end of a shard is counted apart: it is the price of reading part of a shard.
    """

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.data_bytes = 0
        self.chunk_reads = 0
        self.index_bytes = 0

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As the wrapped store's, counted. None, and nothing counted, for an absent chunk."""
        value = await super().get(key, prototype, byte_range)
        if value is None or key.endswith(METADATA):
            return value
        if isinstance(byte_range, SuffixByteRequest):
            self.index_bytes += len(value)
        else:
            self.data_bytes += len(value)
            self.chunk_reads += 1
        return value


def open_dataset(path: Path) -> tuple[xr.Dataset, CountingStore]:
    """The store at `path`, version 2 or 3, as lazily read variables, and its counter.

    Raises:
        UserError: there is nothing at `path`, or nothing that zarr can read.
    """
    if not path.exists():
        raise UserError(f"{path}: no such zarr store. Set data.store to one that exists.")
    disk = CountingStore(LocalStore(path, read_only=True))
    try:
        group = zarr.open_group(disk, mode="r")
        consolidated = group.metadata.consolidated_metadata is not None
        # Without dask: it would add milliseconds to each read.
        dataset = xr.open_zarr(disk, chunks=None, consolidated=consolidated, decode_timedelta=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: not a zarr group that can be read ({reason}). Set data.store to one."
        ) from error
    return dataset, disk


def stamp(path: Path) -> str:
    """What changes when the store at `path` is written anew: its root metadata and their age."""
    parts = []
    for name in METADATA:
        file = path / name
        if file.is_file():
            parts.append(f"{name} {file.stat().st_mtime_ns} {file.read_text()}")
    return "\n".join(parts)

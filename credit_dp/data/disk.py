"""A zarr store on disk or elsewhere, opened for reading only, that counts what is read from it."""

import atexit
from pathlib import Path
from threading import Lock

import zarr.core.sync
from zarr.abc.store import ByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from credit_dp.data.sources.address import (
    check_address,
    filesystem,
    is_remote,
    local_path,
    storage_options,
    without_secrets,
)
from credit_dp.errors import UserError

EXIT_SECONDS = 30.0  # for zarr's reading thread, on however busy a machine
METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")


class CountingStore(WrapperStore[Store]):
    """Hands every read on and adds up the bytes of chunks; metadata is not counted.

    The index at the end of a shard is counted apart: it is the price of reading part of a shard.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.data_bytes = 0
        self.chunk_reads = 0
        self.index_bytes = 0
        self.absent = 0  # chunks that were not there

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As the wrapped store's, counted. None, and only `absent` counted, for an absent chunk."""
        value = await super().get(key, prototype, byte_range)
        if key.endswith(METADATA):
            return value
        with self._lock:
            if value is None:
                self.absent += 1
            elif isinstance(byte_range, SuffixByteRequest):
                self.index_bytes += len(value)
            else:
                self.data_bytes += len(value)
                self.chunk_reads += 1
        return value

    def add(self, size: int, chunks: int) -> None:
        """Count what was read past this store: so many bytes of chunks."""
        with self._lock:
            self.data_bytes += size
            self.chunk_reads += chunks

    def asked(self, size: int) -> None:
        """Nothing: what a reader asks for is counted when its chunks are read."""


def open_disk(where: str) -> CountingStore:
    """The zarr store at a path or address, for reading.

    Raises:
        UserError: there is nothing at the path, or the address can't be used.
    """
    check_address(where)
    if is_remote(where):
        filesystem(where)  # for its errors
        return CountingStore(
            FsspecStore.from_url(where, storage_options=storage_options(where), read_only=True)
        )
    path = local_path(where)
    if not path.exists():
        raise UserError(f"{where}: no such zarr store. Set data.store to one that exists.")
    return CountingStore(LocalStore(path, read_only=True))


def place(where: str) -> str:
    """A store's address as results remember it: the whole path, or the address without secrets."""
    return without_secrets(where) if is_remote(where) else str(local_path(where).resolve())


def stamp(where: str | Path) -> str:
    """What changes when a store is written anew: its root metadata, and how old they are.

    Of one file, such as netCDF: its size and age.
    """
    if isinstance(where, str) and is_remote(where):
        return _remote_stamp(where)
    path = local_path(str(where))
    if path.is_file():
        status = path.stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    parts = []
    for name in METADATA:
        file = path / name
        if file.is_file():
            parts.append(f"{name} {file.stat().st_mtime_ns} {file.read_text()}")
    return "\n".join(parts)


def _remote_stamp(where: str) -> str:
    """The metadata alone: not every server says how old they are."""
    system, root = filesystem(where)
    paths = {f"{root.rstrip('/')}/{name}": name for name in METADATA}
    found = system.cat(list(paths), on_error="omit")
    return "\n".join(f"{paths[path]} {found[path].decode()}" for path in paths if path in found)


def stop_reading_thread() -> None:
    """Let zarr's reading thread end before zarr closes its event loop at exit.

    zarr waits 0.2 s for the thread, which is too short on a busy machine: closing the loop of a
    thread that runs prints a traceback after everything has been done.
    """
    loop, thread = zarr.core.sync.loop[0], zarr.core.sync.iothread[0]
    if loop is not None and thread is not None and thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(EXIT_SECONDS)


atexit.register(stop_reading_thread)  # what is registered last runs first: before zarr's

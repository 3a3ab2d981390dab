"""Zarr stores opened for reading: what is counted, and damage that zarr would not notice."""

import atexit
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, final

import google_crc32c
import numpy as np
import zarr
import zarr.core.sync
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from credit_dp.data.sources.address import (
    check_address,
    filesystem,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    storage_options,
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
        self.absent_chunks = 0  # chunks that were not there

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As the wrapped store's, counted. None, and only `absent` counted, for an absent chunk."""
        value = await super().get(key, prototype, byte_range)
        if key.endswith(METADATA):
            return value
        with self._lock:
            if value is None:
                self.absent_chunks += 1
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

    def count_requested(self, size: int) -> None:
        """Nothing: what a reader asks for is counted when its chunks are read."""


def open_zarr_store(where: str) -> CountingStore:
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


def resolved_address(where: str) -> str:
    """A store's address as results remember it: the whole path, or the address without secrets."""
    return redact_secrets(where) if is_remote(where) else str(local_path(where).resolve())


def version_stamp(where: str | Path) -> str:
    """What changes when a store is written anew: its root metadata, and how old they are.

    Of one file, such as netCDF: its size and age.
    """
    if isinstance(where, str) and is_remote(where):
        return _remote_version_stamp(where)
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


def _remote_version_stamp(where: str) -> str:
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


READS_BETWEEN_CHECKS = 64


def unreadable_error(
    where: str, variable: str, date: np.datetime64 | None, error: BaseException
) -> UserError:
    """One line: file, variable and date, what is wrong, and what to do."""
    when = "" if date is None else f" at {date.astype('M8[m]')}"
    advice = "" if date is None else ", or choose other dates: data.dates.train, .valid and .test"
    return UserError(
        f"{redact_secrets(where)}: {variable}{when} can't be read: {_describe_problem(error)}. "
        f"Restore the file{advice}."
    )


def _describe_problem(error: BaseException) -> str:
    if isinstance(error, AbsentChunkError):
        return (
            f"its chunk {error} is missing (if it was left out for being constant, write it with "
            "write_empty_chunks=True)"
        )
    if isinstance(error, TruncatedChunkError):
        return f"its chunk {error}: it is cut short"
    if "checksum" in str(error).lower():
        return "the checksum of a chunk is wrong"
    return f"a chunk is damaged or out of reach ({reason_of(error)})"


@final
class StoreChangeDetector:
    """Notices that a store was written anew since it was opened.

    It looks at the metadata: of a store on this machine every 64 reads and when there is reason, of
    a remote one only when a read has failed. Values that are written over in place, under the
    same metadata, are not noticed.
    """

    def __init__(self, where: str, variables: Sequence[str]) -> None:
        self._where = where
        self._remote = is_remote(where)
        self._files = [
            local_path(where) / folder / name for folder in ("", *variables) for name in METADATA
        ]
        self._files.append(local_path(where))
        self._reads = 0
        self._initial_state = self._current_state()

    def after_read(self, suspicious: bool) -> None:
        """Look, if it is time to, or if there is reason.

        Raises:
            UserError: the store has changed.
        """
        self._reads += 1
        due = self._reads % READS_BETWEEN_CHECKS == 0
        if not self._remote and (suspicious or due):
            self.check()

    def check(self) -> None:
        """Look now.

        Raises:
            UserError: the store has changed.
        """
        try:
            changed = self._current_state() != self._initial_state
        except (OSError, UserError):  # what failed is what the caller knows of
            return
        if changed:
            raise UserError(
                f"{redact_secrets(self._where)}: has changed since it was opened. Start again "
                "when it is complete, or set data.store to one that nobody writes to."
            )

    def _current_state(self) -> object:
        if self._remote:
            return version_stamp(self._where)
        found = []
        for path in self._files:
            if path.is_file():
                status = path.stat()
                found.append((str(path), status.st_mtime_ns, status.st_size))
        return found


ENTRY = 16  # bytes of a shard's index for each inner chunk: where it begins, and how long it is
CHECKSUM = 4  # bytes after whatever has one


class ChunkPart(NamedTuple):
    """What is wanted of one inner chunk.

    Attributes:
        begin, size: of the chunk in its file, in bytes.
        inside: of its entries, those wanted.
        place: theirs among all that is wanted.
    """

    begin: int
    size: int
    inside: tuple[slice, ...]
    destination: tuple[slice, ...]


@final
class ShardedArray:
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
    ) -> Iterator[ChunkPart]:
        """What of a shard is wanted, chunk by chunk.

        Raises:
            OSError, ValueError: its index can't be read, or is damaged.
        """
        index = self._index(file)
        dims = zip(spans, shard, self._shards, self.chunks, strict=True)
        for chunk in product(*(_chunks_along(*dim) for dim in dims)):
            at, inside, place = zip(*chunk, strict=True)
            begin, size = index[at].tolist()
            yield ChunkPart(begin, size, inside, place)

    def _index(self, file: BinaryIO) -> np.ndarray[Any, np.dtype[np.uint64]]:
        length = ENTRY * int(np.prod(self._counts)) + CHECKSUM
        file.seek(-length, 2)
        found = file.read(length)
        if not has_valid_checksum(found):
            raise ValueError(f"{file.name}: its index is damaged")
        return np.frombuffer(found, "<u8", len(found) // 8).reshape(*self._counts, 2)


def _chunks_along(
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


def has_valid_checksum(content: Any) -> bool:
    """Whether bytes end with the checksum of those before."""
    sum_: int = google_crc32c.value(content[:-CHECKSUM])
    return sum_ == int.from_bytes(content[-CHECKSUM:], "little")

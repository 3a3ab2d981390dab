"""Zarr stores opened for reading: counted reads, and checks for damage that zarr does not make.

A read passes these stores from the outside to the inside:

1. `CompleteStore` refuses a missing chunk, which zarr would replace by fill values.
2. `IntactStore` refuses a chunk that is too short, which a decoder might read beyond its end.
3. `CountingStore` counts bytes and chunks.
4. `FolderStore` reads the file, or zarr's own store the remote object.

`StoreChangeDetector` notices a store that is rewritten while it is read.
"""

import asyncio
import atexit
import errno
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, final

import fsspec
import numpy as np
import zarr
import zarr.core.sync
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from credit_dp.data.cache import fingerprint
from credit_dp.data.sources.address import (
    check_address,
    filesystem,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    storage_options,
    zarr_open_error,
)
from credit_dp.data.sources.virtual import (
    chunk_files,
    is_icechunk,
    is_reference,
    open_icechunk,
    open_references,
    snapshot_id,
)
from credit_dp.errors import UserError
from credit_dp.files import is_special

logger = logging.getLogger(__name__)

EXIT_SECONDS = 30.0  # for zarr's reading thread to end, on a busy machine, too
METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")
SAMPLE = 64  # files of an array, or of references, whose sizes and times are compared
SMALL_RANGE = 2**16  # bytes; reading so few takes less time than handing the read to a thread


@final
class FolderStore(LocalStore):
    """A store in a local folder that reads small byte ranges at once, in zarr's event loop.

    zarr hands every read to another thread. A small grid's shards have an index and inner chunks of
    a few kB: their training step spends most of its reading time on switching threads.
    """

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read a key; None if there is no such file."""
        length = _length(byte_range)
        path = f"{self.root}/{key}"
        if is_special(path):
            raise OSError(errno.EINVAL, "is a pipe, a socket or a device", path)
        if length is None or length > SMALL_RANGE:
            return await super().get(key, prototype, byte_range)
        try:
            with open(path, "rb") as file:
                if isinstance(byte_range, RangeByteRequest):
                    file.seek(byte_range.start)
                else:
                    # A suffix longer than the file is the whole file, as in zarr's own stores.
                    file.seek(max(0, file.seek(0, os.SEEK_END) - length))
                found = file.read(length)
        # zarr probes for keys that need not exist: None says that this one is absent.
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found)


def _length(byte_range: ByteRequest | None) -> int | None:
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end - byte_range.start
    return byte_range.suffix if isinstance(byte_range, SuffixByteRequest) else None


class RangeByRangeStore(WrapperStore[Store]):
    """A store around another one that reads by its own `get`, and writes by its own `set`, alone.

    Since zarr 3.4 several ranges of a key, and synchronous calls, go to the store inside instead.
    """

    _supports_sync_io: ClassVar[bool] = False

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **limits: int | None,  # of reads that are joined to one
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Read each range of a key, and yield all of them with their positions.

        Raises:
            ExceptionGroup: of one FileNotFoundError, as zarr expects it; the key is absent.
        """
        reads = [self.get(key, prototype, byte_range) for byte_range in byte_ranges]
        values = await asyncio.gather(*reads)
        if None in values:
            raise ExceptionGroup("absent", [FileNotFoundError(key)])
        yield list(enumerate(values))


class CountingStore(RangeByRangeStore):
    """Counts the bytes and chunks that are read through it; not metadata and indices of shards."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        # `get` runs in zarr's event loop, `add` in the threads that read.
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.data_bytes = 0
        self.chunk_reads = 0
        self.absent_chunks = 0

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read and count; for an absent chunk, return None and count it in `absent_chunks`."""
        value = await super().get(key, prototype, byte_range)
        if key.endswith(METADATA):
            return value
        with self._lock:
            if value is None:
                self.absent_chunks += 1
            # Not the last bytes of a file: this is how zarr reads the index of a shard.
            elif not isinstance(byte_range, SuffixByteRequest):
                self.data_bytes += len(value)
                self.chunk_reads += 1
        return value

    def add(self, size: int, chunks: int) -> None:
        """Count chunks that were read without this store, of `size` bytes in all."""
        with self._lock:
            self.data_bytes += size
            self.chunk_reads += chunks

    def count_requested(self, size: int) -> None:
        """Do nothing: chunks are counted when they are read."""


def open_zarr_store(where: str) -> CountingStore:
    """Open the zarr store at a path or address for reading."""
    check_address(where)
    if is_icechunk(where):
        return CountingStore(open_icechunk(where))
    if is_reference(where):
        return CountingStore(open_references(where))
    if is_remote(where):
        filesystem(where)  # raises a UserError for an unknown protocol or a missing package
        return CountingStore(
            FsspecStore.from_url(where, storage_options=storage_options(where), read_only=True)
        )
    path = local_path(where)
    if not path.exists():
        raise UserError(
            f"{path.absolute()}: no such zarr store. Set data.store to one that exists."
        )
    return CountingStore(FolderStore(path, read_only=True))


def open_current_group(store: Store, where: str) -> zarr.Group:
    """Open a zarr group, by its consolidated metadata only if these are up to date.

    A store that was extended or changed without consolidating it again would be read as it was
    before. All arrays of a local store are compared with their own metadata; of a remote store,
    where each costs a round trip, those of the times.
    """
    group = zarr.open_group(store, mode="r")
    if group.metadata.consolidated_metadata is None:
        return group
    current = zarr.open_group(store, mode="r", use_consolidated=False)
    consolidated: Mapping[str, zarr.Array[Any]] = dict(group.arrays())
    if is_remote(where):
        consolidated = {name: array for name, array in consolidated.items() if _has_times(array)}
        found = {name: current.get(name) for name in consolidated}
        own = {name: array for name, array in found.items() if isinstance(array, zarr.Array)}
        consolidated = {name: consolidated[name] for name in own}
    else:
        own = dict(current.arrays())
    names = sorted({*own, *consolidated})
    changed = [name for name in names if _metadata(own, name) != _metadata(consolidated, name)]
    if not changed:
        return group
    problem = (
        f"{redact_secrets(where)}: its consolidated metadata are out of date "
        f"({_describe_change(changed, consolidated, own)})"
    )
    recipe = f"zarr.consolidate_metadata({redact_secrets(where)!r})"
    if is_remote(where) and not any(True for _ in current.arrays()):
        raise UserError(f"{problem}. Update them by {recipe}.")
    logger.warning("%s: each array's own are used. Update them by %s", problem, recipe)
    return current


def _has_times(array: "zarr.Array[Any]") -> bool:
    has_unit = " since " in str(array.attrs.get("units", ""))
    return array.ndim == 1 and (has_unit or array.dtype.kind == "M")


def _metadata(arrays: "Mapping[str, zarr.Array[Any]]", name: str) -> str:
    """Return shape and attributes of an array as a text; empty if it is not there."""
    array = arrays.get(name)
    if array is None:
        return ""
    return json.dumps([array.shape, dict(array.attrs)], sort_keys=True)


def _describe_change(
    names: Sequence[str],
    before: "Mapping[str, zarr.Array[Any]]",
    after: "Mapping[str, zarr.Array[Any]]",
) -> str:
    """Return what differs in the first array, or in that of the times if it is one of them."""
    both = [name for name in names if name in before and name in after]
    name = next((name for name in both if _has_times(after[name])), names[0])
    if name not in both:
        return f"{name} is {'missing in them' if name in after else 'in them only'}"
    old, new = before[name].shape, after[name].shape
    if old == new:
        return f"{name} has other attributes"
    return f"{name} has the shape {new}, not {old}"


def resolved_address(where: str) -> str:
    """Return the absolute path of a store, or its address without secrets, for cached results."""
    return redact_secrets(where) if is_remote(where) else str(local_path(where).resolve())


def version_stamp(where: str, arrays: Sequence[str] | None = None) -> str:
    """Return a text that changes when a store is written again, for cached results.

    This is the number of an Icechunk snapshot, the size and time of a file, or a checksum of a
    remote store's metadata. A folder has sizes and times of its metadata and of chunks that are
    evenly spaced, references those of local files that they name: that few others were overwritten
    is not noticed.

    Args:
        where: its path or address.
        arrays: the zarr arrays that are read; None for all of a folder.
    """
    try:
        if is_icechunk(where):
            return snapshot_id(where)
        if is_remote(where):
            return _remote_metadata(where, arrays or ())
        path = local_path(where).resolve()
        if is_reference(where):
            targets, _ = chunk_files(open_references(where), SAMPLE)
            files = [Path(fsspec.url_to_fs(x)[1]) for x in targets if not is_remote(x)]
            return str(_file_states([path, *_metadata_files(path, arrays or ()), *files]))
        if path.is_file():
            return str(_file_states([path]))
        group = zarr.open_group(open_zarr_store(where), mode="r", use_consolidated=False)
        names = group.array_keys() if arrays is None else arrays
        found = {name: group.get(name) for name in sorted(names)}
        chunks = [
            path / name / key
            for name, array in found.items()
            if isinstance(array, zarr.Array)
            for key in _sampled_chunks(array)
        ]
        return str(_file_states([*_metadata_files(path, list(found)), *chunks]))
    except UserError:
        raise
    except Exception as error:
        raise zarr_open_error(where, error) from error


def _metadata_files(root: Path, arrays: Sequence[str]) -> list[Path]:
    return [root / folder / name for folder in ("", *arrays) for name in METADATA]


def _file_states(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    states = []
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            states.append((str(path), status.st_size, status.st_mtime_ns))
    return states


def _sampled_chunks(array: "zarr.Array[Any]") -> list[str]:
    sizes = zip(array.shape, array.shards or array.chunks, strict=True)
    counts = [-(-length // size) for length, size in sizes]
    total = math.prod(counts)
    numbers = {round(x) for x in np.linspace(0, total - 1, min(total, SAMPLE))} if counts else set()
    places = [tuple(map(int, np.unravel_index(number, counts))) for number in sorted(numbers)]
    return [array.metadata.encode_chunk_key(place) for place in places]


def _remote_metadata(where: str, arrays: Sequence[str]) -> str:
    """Return a checksum of the metadata, whose times not every server knows."""
    system, root = filesystem(where)
    folders = [root.rstrip("/"), *(f"{root.rstrip('/')}/{name}" for name in arrays)]
    paths = [f"{folder}/{name}" for folder in folders for name in METADATA]
    if is_reference(where):
        paths.append(root)
    contents = system.cat(paths, on_error="omit")
    return fingerprint([[path, contents[path].decode()] for path in paths if path in contents])


def stop_reading_thread() -> None:
    """Stop zarr's reading thread before zarr closes its event loop at exit.

    zarr waits 0.2 s for the thread, which is too short on a busy machine: closing the loop of a
    running thread prints a traceback at the end of a successful run.
    """
    loop, thread = zarr.core.sync.loop[0], zarr.core.sync.iothread[0]
    if loop is not None and thread is not None and thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(EXIT_SECONDS)


# Handlers run in reverse order of registration: this one before zarr's, imported above.
atexit.register(stop_reading_thread)


@final
class AbsentChunkError(OSError):
    """A chunk is missing in the store; the message is its key."""


@final
class CompleteStore(RangeByRangeStore):
    """Raises an error for a missing chunk of `arrays`, where zarr would return fill values."""

    def __init__(self, store: Store, arrays: Sequence[str]) -> None:
        super().__init__(store)
        self._arrays = tuple(arrays)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a key.

        Raises:
            AbsentChunkError: the chunk is missing.
        """
        value = await super().get(key, prototype, byte_range)
        is_required = key.split("/")[0] in self._arrays and not key.endswith(METADATA)
        if value is None and is_required:
            raise AbsentChunkError(key)
        return value


def compressor_name(array: "zarr.Array[Any]") -> str:
    """Return what decodes a chunk first, in lower case, such as `blosc`; empty for nothing."""
    names = [type(codec).__name__ for codec in array.compressors]
    return names[-1].lower().removesuffix("codec") if names else ""


HEADER = 16  # bytes before the data of a Blosc chunk: at 12 is its own length


@final
class TruncatedChunkError(OSError):
    """A chunk is shorter than its header says; the message has its key and both lengths."""


@final
class IntactStore(RangeByRangeStore):
    """Raises an error for chunks, and byte ranges, that are too short.

    zarr does not check: the Blosc decoder reads beyond the end of a short chunk, and the shard
    reader takes an empty inner chunk for fill values.

    Source: Blosc chunk format (header), https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
    """

    def __init__(self, store: Store, arrays: "Mapping[str, zarr.Array[Any]]") -> None:
        super().__init__(store)
        whole = {name: array for name, array in arrays.items() if array.shards is None}
        self._blosc = {n for n, array in whole.items() if compressor_name(array) == "blosc"}

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a key.

        Raises:
            TruncatedChunkError: the chunk, or the requested range of it, is too short.
        """
        value = await super().get(key, prototype, byte_range)
        if value is None:
            return None
        name = "" if key.endswith(METADATA) else key.split("/")[0]
        needed = 0
        if isinstance(byte_range, RangeByteRequest):
            needed = byte_range.end - byte_range.start
        elif byte_range is None and name in self._blosc:
            header = value[:HEADER].to_bytes()
            needed = max(HEADER, int.from_bytes(header[12:], "little"))
        if len(value) < needed:
            raise TruncatedChunkError(f"{key} has {len(value)} of {needed} bytes")
        return value


READS_BETWEEN_CHECKS = 64


def unreadable_error(
    where: str, variable: str, date: str | None, error: BaseException
) -> UserError:
    """Return an error that names file, variable and date, the problem, and what to do."""
    date_text = "" if date is None else f" at {date}"
    advice = "" if date is None else ", or choose other dates: data.dates.train, .valid and .test"
    return UserError(
        f"{redact_secrets(where)}: {variable}{date_text} can't be read: "
        f"{_describe_problem(error)}. Restore the file{advice}."
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
    return f"a chunk is damaged or can't be fetched ({reason_of(error)})"


@final
class StoreChangeDetector:
    """Detects that a store was rewritten since it was opened.

    It compares the metadata: of a local store after every 64 reads and when a read found chunks
    missing, of a remote store only after a failed read, as asking costs a round trip. Values that
    were overwritten in place under the same metadata are not detected.
    """

    def __init__(self, where: str, variables: Sequence[str]) -> None:
        self._where = where
        self._remote = is_remote(where)
        path = local_path(where)
        self._files = [path] if path.is_file() else _metadata_files(path, variables)
        self._reads = 0
        self._initial_state = self._current_state()

    def after_read(self, suspicious: bool) -> None:
        """Check now and then, and always after a `suspicious` read."""
        self._reads += 1
        is_due = self._reads % READS_BETWEEN_CHECKS == 0
        if not self._remote and (suspicious or is_due):
            self.check()

    def check(self) -> None:
        """Check now."""
        try:
            changed = self._current_state() != self._initial_state
        except (OSError, UserError):  # the caller reports the failed read itself
            return
        if changed:
            raise UserError(
                f"{redact_secrets(self._where)}: has changed since it was opened. Start again "
                "when it is complete, or set data.store to a store that no process writes to."
            )

    def _current_state(self) -> object:
        return _remote_metadata(self._where, ()) if self._remote else _file_states(self._files)

"""Reads arrays that hold all channels of a time in one chunk.

`StackedArray` selects channels and times; anemoi's datasets and prepared stores are read through
it. Its values come from the first of these readers that can read the array:

1. `RawShardReader`, for shards of plain float32 on a local disk: one read per inner chunk. Of
   these, `RawBlockReader` passes on block by block what a batch needs.
2. `TensorStoreReader`, for other shards on a local disk, if tensorstore is installed.
3. zarr, for everything else. It also reads again whatever the others could not, so that one place
   reports the error.
"""

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import FileIO
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, final

import google_crc32c
import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import LocalStore

from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.address import is_remote, local_path, reason_of, zarr_open_error
from credit_dp.data.sources.source import BlockConsumer, BlockReader, Indexer, Source, as_slice
from credit_dp.data.sources.storage import (
    CHECKSUM,
    HEADER,
    CompleteStore,
    CountingStore,
    IntactStore,
    ShardedArray,
    StoreChangeDetector,
    compressor_name,
    content_stamp,
    declared_size,
    decoded_bytes,
    has_valid_checksum,
    open_current_group,
    open_zarr_store,
    resolved_address,
    unreadable_error,
)
from credit_dp.errors import UserError


def open_stacked(where: str, arrays: Sequence[str]) -> tuple[zarr.Group, CountingStore]:
    """Open a zarr group in which all chunks of `arrays` are required, with a counter of its reads.

    Raises:
        UserError: there is no store, or zarr can't read it.
    """
    counting_store = open_zarr_store(where)
    try:
        opened = open_current_group(counting_store, where)
        consolidated = opened.metadata.consolidated_metadata is not None
        # Opened a second time, with the checks that the first opening has shown to be needed.
        store = CompleteStore(IntactStore(counting_store, dict(opened.arrays())), arrays)
        group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
    except UserError:
        raise
    except Exception as error:
        raise zarr_open_error(where, error) from error
    return group, counting_store


def get_array(group: zarr.Group, name: str, where: str) -> "zarr.Array[Any]":
    """Return one array of the group.

    Raises:
        UserError: it is missing.
    """
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        raise UserError(f"{where}: has no array {name}. Change data.store.")
    return array


def read_array(group: zarr.Group, name: str, where: str) -> NDArray[Any]:
    """Read all values of a small array.

    Raises:
        UserError: the array is missing, or can't be read.
    """
    array = get_array(group, name, where)
    try:
        return np.asarray(array[...])
    except Exception as error:
        raise UserError(
            f"{where}: its array {name} can't be read ({reason_of(error)}). Change data.store."
        ) from error


def times_dataset(source: Source) -> xr.Dataset:
    """Return the times of a source as the dataset that `check_coordinates` needs."""
    return xr.Dataset(coords={"time": source.calendar.dates(source.times)})


def describe_source(
    source: Source, address: str, variables: Sequence[str], arrays: Sequence[str]
) -> list[object]:
    """See `Source.description`; `arrays` have all fields."""
    description: list[object] = [resolved_address(address), content_stamp(address, arrays)]
    description += source.grid.description()
    for name in variables:
        variable = source.variables[name]
        description.append([name, variable.has_time, list(variable.levels), variable.units])
    return description


FLOAT32 = np.dtype("<f4")


def is_raw_float32(array: "zarr.Array[Any]") -> bool:
    """Whether an array has shards of uncompressed little-endian float32 chunks with checksums."""
    codecs: Any = getattr(array.metadata, "codecs", ())
    if array.dtype != FLOAT32 or len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec):
        return False
    little_endian = BytesCodec(endian="little")
    checksum = Crc32cCodec()
    sharding = codecs[0]
    # An enumeration before zarr 3.4, a text since.
    location = sharding.index_location
    has_index_at_end = getattr(location, "value", location) == "end"
    return (
        has_index_at_end
        and (*sharding.codecs, *sharding.index_codecs) == (little_endian, checksum) * 2
    )


@final
class RawShardReader:
    """Reads slices of a local array for which `is_raw_float32` holds, chunk by chunk."""

    def __init__(self, shards: ShardedArray, store: CountingStore) -> None:
        self._shards = shards
        self._store = store

    def blocks(
        self, channels: Sequence[int], rows: slice, change_detector: StoreChangeDetector
    ) -> BlockReader | None:
        """Return a reader of blocks; None if chunks hold several times or not all channels.

        There is none either for a channel that is requested twice: its values are passed on once.
        """
        shape, chunks, shards = self._shards.shape, self._shards.chunks, self._shards.shards
        whole = (shape[1], shape[-1])
        if len(set(channels)) < len(channels):
            return None
        if len(shape) != 4 or (chunks[0], shards[0]) != (1, 1) or shards[2] < shape[2]:
            return None
        if (chunks[1], chunks[3]) != whole or (shards[1], shards[3]) != whole:
            return None
        return RawBlockReader(self._shards, self._store, channels, rows, change_detector)

    def read(self, selection: tuple[slice, ...]) -> FieldArray | None:
        """Return the values; None if a file is missing or damaged."""
        first, *rest = selection
        if any(part.step is not None and part.step < 1 for part in selection):
            return None
        if first.step not in (None, 1):
            # Time by time, or the chunks of the times between would be read, too.
            indices = range(*first.indices(self._shards.shape[0]))
            parts = [self.read((slice(index, index + 1), *rest)) for index in indices]
            complete = [part for part in parts if part is not None]
            return np.concatenate(complete) if len(complete) == len(parts) > 0 else None
        try:
            values = self._read(self._shards.spans(selection))
            return values[tuple(slice(None, None, part.step) for part in selection)]
        except (OSError, ValueError):
            return None

    def _read(self, spans: list[tuple[int, int]]) -> FieldArray:
        result = np.empty([stop - first for first, stop in spans], FLOAT32)
        # Each chunk goes into one buffer, checksum and all; `values` is a view of its floats.
        buffer = np.empty(int(np.prod(self._shards.chunks)) * FLOAT32.itemsize + CHECKSUM, np.uint8)
        values = buffer[:-CHECKSUM].view(FLOAT32).reshape(self._shards.chunks)
        chunks = 0
        for path, shard in self._shards.files(spans):
            with path.open("rb", buffering=0) as file:
                for part in self._shards.parts(file, shard, spans):
                    if part.size != len(buffer):
                        raise ValueError(f"{path}: a chunk is not as long as it should be")
                    file.seek(part.begin)
                    if file.readinto(buffer.data) != len(buffer) or not has_valid_checksum(buffer):
                        raise ValueError(f"{path}: a chunk is damaged")
                    result[part.destination] = values[part.inside]
                    chunks += 1
        self._store.add(chunks * len(buffer), chunks)
        return result


BLOCK_BYTES = 2**20  # of a block, which has to fit the cache of a core


class _Part(NamedTuple):
    """The part of a block that is requested.

    Attributes:
        inside: channels, chunks and rows of the block's values.
        channels, rows: their positions in the result.
    """

    inside: tuple[slice, slice, slice]
    channels: slice
    rows: slice


class _Block(NamedTuple):
    """What is read at once: some whole chunks, or a part of a chunk that is larger than a block.

    Attributes:
        shape: of its values: chunks, channels, rows, columns.
        ends: whether a checksum follows the values of each chunk, or later those of the last part.
        parts: those requested.
    """

    shape: tuple[int, int, int, int]
    ends: bool
    parts: list[_Part]


class _Views(NamedTuple):
    """Views of the memory that a block is read into.

    Attributes:
        memory: all bytes of the block.
        contents: the bytes of each of its chunks, without checksum.
        checksums: `(chunks, 1)`, or `(chunks, 0)` in a block without.
        values: channels, chunks, rows, columns.
    """

    memory: memoryview
    contents: list[NDArray[np.uint8]]
    checksums: NDArray[np.uint32]
    values: FieldArray

    @classmethod
    def of(cls, buffer: NDArray[np.uint8], block: _Block) -> "_Views":
        """Return the views of a block at the beginning of a buffer."""
        chunks = block.shape[0]
        size = math.prod(block.shape[1:])
        words = size + 1 if block.ends else size
        memory = buffer[: chunks * words * FLOAT32.itemsize]
        table = memory.view(FLOAT32).reshape(chunks, words)
        return cls(
            memory.data,
            [row[:size].view(np.uint8) for row in table],
            table.view("<u4")[:, size:],
            table[:, :size].reshape(block.shape).transpose(1, 0, 2, 3),
        )


@final
class RawBlockReader:
    """Reads channels and rows of an array that has all channels of a time in one shard.

    A block is small enough to remain in the processor's cache while it is read from the file,
    checked, and written where it belongs. So main memory is passed over twice, by the system's
    read and by the last write, however many steps there are between.

    Files are read, not mapped: a mapped file that shrinks would end the process.
    """

    def __init__(
        self,
        shards: ShardedArray,
        store: CountingStore,
        channels: Sequence[int],
        rows: slice,
        change_detector: StoreChangeDetector,
    ) -> None:
        """Find blocks and their parts once, for all times.

        Args:
            shards: of the array `(T, C, H, W)`.
            store: counts what is read.
            channels: indices in the order of the result.
            rows: with both ends.
            change_detector: counts the reads and checks the store now and then.
        """
        self._shards = shards
        self._store = store
        self._change_detector = change_detector
        _, count, height, columns = shards.chunks
        self._chunk_bytes = count * height * columns * FLOAT32.itemsize + CHECKSUM
        self._chunks = slice(rows.start // height, -(-rows.stop // height))
        layout = _ChunkLayout(count, height, columns)
        self._blocks = list(layout.blocks(list(_runs(channels)), rows, self._chunks))
        # Several threads may read at once.
        self._local = threading.local()

    def read(self, time: int, consume: BlockConsumer) -> bool:
        """See `BlockReader`."""
        try:
            file = open(self._shards.file((time, 0, 0, 0)), "rb", buffering=0)  # noqa: SIM115
        except OSError:
            return False
        with file:
            begin = self._first_byte(file)
            if begin is None:
                return False
            file.seek(begin)
            if not self._read_blocks(file, consume):
                return False
        chunks = self._chunks.stop - self._chunks.start
        self._store.add(chunks * self._chunk_bytes, chunks)
        self._change_detector.after_read(suspicious=False)
        return True

    def _first_byte(self, file: FileIO) -> int | None:
        """Return where the chunks of the band begin; None if they don't follow one another."""
        try:
            index = self._shards.index(file).reshape(-1, 2)[self._chunks]
        except (OSError, ValueError):
            return None
        begin: int = index[0, 0].item()
        expected = begin + self._chunk_bytes * np.arange(len(index), dtype=np.uint64)
        in_order = (index[:, 0] == expected).all() and (index[:, 1] == self._chunk_bytes).all()
        return begin if in_order else None

    def _read_blocks(self, file: FileIO, consume: BlockConsumer) -> bool:
        """Read all blocks from a file and pass on their parts; False if one is damaged."""
        checksum = 0
        for block, views in zip(self._blocks, self._views(), strict=True):
            if not _fill(file, views.memory):
                return False
            stored = views.checksums.ravel().tolist()
            # Before the values are passed on, as they may be overwritten.
            for number, content in enumerate(views.contents):
                checksum = google_crc32c.extend(checksum, content)
                if block.ends:
                    if checksum != stored[number]:
                        return False
                    checksum = 0
            for part in block.parts:
                consume(part.channels, part.rows, views.values[part.inside])
        return True

    def _views(self) -> list[_Views]:
        """Return views of each block in this thread's buffer."""
        if not hasattr(self._local, "views"):
            sizes = [FLOAT32.itemsize * math.prod(block.shape) for block in self._blocks]
            checksums = CHECKSUM * max(block.shape[0] for block in self._blocks)
            buffer = np.empty(max(sizes) + checksums, np.uint8)
            self._local.views = [_Views.of(buffer, block) for block in self._blocks]
        views: list[_Views] = self._local.views
        return views


class _ChunkLayout(NamedTuple):
    """The shape of a chunk, and how its values are divided into blocks."""

    channels: int
    rows: int
    columns: int

    def blocks(
        self, runs: Sequence[tuple[int, int, int]], band: slice, chunks: slice
    ) -> Iterator[_Block]:
        """Yield the blocks of all chunks of a band in the order of their bytes.

        Args:
            runs: of the requested channels, see `_runs`.
            band: the requested rows.
            chunks: the numbers of the chunks with these rows.
        """
        chunk_bytes = math.prod(self) * FLOAT32.itemsize + CHECKSUM
        if chunk_bytes > BLOCK_BYTES:
            for chunk in range(chunks.start, chunks.stop):
                yield from self._blocks_of_chunk(runs, band, chunk)
            return
        step = BLOCK_BYTES // chunk_bytes
        for first in range(chunks.start, chunks.stop, step):
            stop = min(first + step, chunks.stop)
            channels, rows = slice(0, self.channels), slice(0, self.rows)
            parts = _parts(runs, channels, self._row_parts(band, first, stop, rows))
            yield _Block((stop - first, *self), True, parts)

    def _blocks_of_chunk(
        self, runs: Sequence[tuple[int, int, int]], band: slice, chunk: int
    ) -> Iterator[_Block]:
        """Yield blocks with all rows of some channels, or with some rows of one channel."""
        row_bytes = self.columns * FLOAT32.itemsize
        channel_step = max(1, BLOCK_BYTES // (self.rows * row_bytes))
        row_step = self.rows if channel_step > 1 else max(1, BLOCK_BYTES // row_bytes)
        for low in range(0, self.channels, channel_step):
            channels = slice(low, min(low + channel_step, self.channels))
            for first in range(0, self.rows, row_step):
                rows = slice(first, min(first + row_step, self.rows))
                parts = _parts(runs, channels, self._row_parts(band, chunk, chunk + 1, rows))
                shape = (1, channels.stop - low, rows.stop - first, self.columns)
                is_last = channels.stop == self.channels and rows.stop == self.rows
                yield _Block(shape, is_last, parts)

    def _row_parts(
        self, band: slice, first: int, stop: int, rows: slice
    ) -> list[tuple[slice, slice, slice]]:
        """Return the parts of some rows of chunks in a band: chunks, rows of these, of the band.

        Chunks that are in the band with all these rows are one part.
        """
        found: list[tuple[slice, slice, slice]] = []
        for chunk in range(first, stop):
            origin = chunk * self.rows + rows.start
            north = max(band.start, origin)
            south = min(band.stop, origin + rows.stop - rows.start)
            if north >= south:
                continue
            part = (
                slice(chunk - first, chunk - first + 1),
                slice(north - origin, south - origin),
                slice(north - band.start, south - band.start),
            )
            is_whole = part[1] == slice(0, self.rows)
            if found and is_whole and found[-1][1] == part[1]:
                chunks, _, destination = found[-1]
                part = (
                    slice(chunks.start, part[0].stop),
                    part[1],
                    slice(destination.start, part[2].stop),
                )
                found[-1] = part
            else:
                found.append(part)
        return found


def _parts(
    runs: Iterable[tuple[int, int, int]],
    channels: slice,
    row_parts: Iterable[tuple[slice, slice, slice]],
) -> list[_Part]:
    """Return the requested parts of a block with some channels."""
    parts = []
    for (first, stop, position), (chunks, rows, destination) in itertools.product(runs, row_parts):
        low, high = max(first, channels.start), min(stop, channels.stop)
        if low < high:
            inside = slice(low - channels.start, high - channels.start), chunks, rows
            positions = slice(position + low - first, position + high - first)
            parts.append(_Part(inside, positions, destination))
    return parts


def _runs(channels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts in which channels are adjacent: `(first, stop, position)`."""
    edges = np.flatnonzero(np.diff(channels) != 1) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(channels)]):
        yield channels[start], channels[stop - 1] + 1, start


def _fill(file: FileIO, buffer: memoryview) -> bool:
    """Fill a buffer with the next bytes of a file; whether there were enough."""
    try:
        return file.readinto(buffer) == len(buffer)
    except OSError:
        return False


# Limits of one TensorStoreReader.
DECODER_THREADS = 4
CONCURRENT_FILES = 8


class ShardReader(Protocol):
    """Reads slices of one local array of shards without zarr."""

    def read(self, selection: tuple[slice, ...]) -> FieldArray | None:
        """Return the values as float32; None if a file is missing or damaged."""


@final
class TensorStoreReader:
    """Reads slices of a local array with tensorstore."""

    def __init__(self, shards: ShardedArray, store: CountingStore, blosc_limit: int | None) -> None:
        """Open the array.

        Args:
            shards: where its chunks are.
            store: counts what is read.
            blosc_limit: the most bytes that a chunk of Blosc may expand to; None for others.
        """
        import tensorstore

        self._blosc_limit = blosc_limit
        self._shards = shards
        self._store = store
        context = {
            "cache_pool": {"total_bytes_limit": 0},  # each chunk is read once
            "data_copy_concurrency": {"limit": DECODER_THREADS},
            "file_io_concurrency": {"limit": CONCURRENT_FILES},
        }
        self._tensorstore = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{shards.folder}/"}},
            context=tensorstore.Context(context),
            read=True,
        ).result()

    def read(self, selection: tuple[slice, ...]) -> FieldArray | None:
        """See `ShardReader`."""
        try:
            sizes = self._sizes(self._shards.spans(selection))
            fields = np.asarray(self._tensorstore[selection].read().result(), dtype=np.float32)
        except Exception:  # noqa: BLE001 - zarr reads it again and reports the error
            return None
        self._store.add(sum(sizes), len(sizes))
        return fields

    def _sizes(self, spans: list[tuple[int, int]]) -> list[int]:
        """Return the bytes of each chunk that overlaps `spans`: tensorstore does not count them.

        Raises:
            ValueError: a chunk of Blosc expands to more bytes than its values have.
        """
        sizes = []
        for path, shard in self._shards.files(spans):
            with path.open("rb") as file:
                for part in list(self._shards.parts(file, shard, spans)):
                    sizes.append(part.size)
                    if self._blosc_limit is not None:
                        file.seek(part.begin)
                        if (declared_size("blosc", file.read(HEADER)) or 0) > self._blosc_limit:
                            raise ValueError(f"{path}: a chunk expands too far")
        return sizes


def open_shard_reader(address: str, name: str, store: CountingStore) -> ShardReader | None:
    """Return a faster reader than zarr for an array; None if there is none.

    Remote stores are left to zarr, which waits for the network there, not for the processor.
    """
    if is_remote(address):
        return None
    try:
        folder = local_path(address)
        array = zarr.open_array(LocalStore(folder, read_only=True), path=name, mode="r")
        shards = ShardedArray(folder / name, array)
        if is_raw_float32(array):
            return RawShardReader(shards, store)
        # tensorstore would allocate whatever the header of a Blosc chunk says; the others it
        # decodes piece by piece, up to the size of the chunk.
        limit = decoded_bytes(array.chunks, array.dtype)
        blosc_limit = limit if compressor_name(array) == "blosc" else None
        has_tensorstore = find_spec("tensorstore") is not None
        return TensorStoreReader(shards, store, blosc_limit) if has_tensorstore else None
    except Exception:  # noqa: BLE001 - zarr reads it, or says why it can't be read
        return None


@final
@dataclass(frozen=True)
class StackedArray:
    """One array `(time, channel, ...)`, or `(channel, ...)` if `times` is None.

    Attributes:
        where: the address of the store as messages show it.
        times: of the first dim.
        calendar: of the times.
        change_detector: counts the reads and checks the store now and then.
        fast_reader: is tried before zarr.
    """

    array: "zarr.Array[Any]"
    where: str
    times: Times | None
    change_detector: StoreChangeDetector
    fast_reader: ShardReader | None = None
    calendar: Calendar = STANDARD

    def read(self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> FieldArray:
        """Read channels at some times: `(T, C, ...)`.

        Args:
            times: indices of the first dim; ignored if `times` of the array is None.
            channels: indices of the channel dim, in the order of the result.
            rest: indices of the remaining dims.

        Raises:
            UserError: a chunk is missing or damaged (with date and file), or the store has changed.
        """
        try:
            fields = self._read(times, channels, rest)
        except MemoryError:
            raise
        except Exception as error:
            # That the store was rewritten explains a failed read better than a damaged chunk.
            self.change_detector.check()
            self._raise_first_error(times, channels, rest)
            first = 0 if self.times is None else int(np.arange(len(self.times))[times][0])
            raise self._error("a chunk", first, error) from error
        self.change_detector.after_read(suspicious=False)
        return fields

    def block_reader(self, channels: Sequence[int], rows: slice) -> BlockReader | None:
        """Return a reader of blocks; None if the array can only be read at once."""
        if not isinstance(self.fast_reader, RawShardReader):
            return None
        return self.fast_reader.blocks(channels, rows, self.change_detector)

    def chunk_name(self, indices: tuple[int, ...]) -> str:
        """Return the key of the file that holds one value, for a message."""
        numbers = tuple(
            index // size for index, size in zip(indices, self._file_shape, strict=True)
        )
        return f"chunk {self.array.basename}/{self.array.metadata.encode_chunk_key(numbers)}"

    @property
    def times_per_file(self) -> int:
        """Return how many times share one file."""
        return int(self._file_shape[0])

    @property
    def _file_shape(self) -> tuple[int, ...]:
        return self.array.shards or self.array.chunks

    def _read(self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> FieldArray:
        channel_indices = np.asarray(channels, dtype=np.intp)
        if self.times is None:
            return self._read_channels((), channel_indices, rest)[None]
        if isinstance(times, slice):
            return self._read_channels((times,), channel_indices, rest)
        # Time by time: zarr's indexing with arrays of integers takes several times longer.
        parts = [
            self._read_channels((slice(time, time + 1),), channel_indices, rest)
            for time in map(int, times)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_channels(
        self, time: tuple[slice, ...], channels: NDArray[np.intp], rest: tuple[Any, ...]
    ) -> FieldArray:
        """Read channels with as few and as small reads as possible.

        Adjacent channels are one slice. Others within one chunk are taken from the slice around
        them, as the chunk is decoded anyway. Of others, each run of adjacent channels is one slice.
        """
        span = as_slice(channels)
        if isinstance(span, slice):
            return self._read_selection((*time, span, *rest))
        first, last = int(channels.min()), int(channels.max())
        chunk = self.array.chunks[len(time)]
        # All channels lie in one chunk: it is decoded whole in any case, once with a single read.
        if first // chunk == last // chunk:
            values = self._read_selection((*time, slice(first, last + 1), *rest))
            return np.take(values, channels - first, axis=len(time))
        slices = [slice(first, stop) for first, stop, _ in _runs(channels.tolist())]
        return np.concatenate(
            [self._read_selection((*time, run, *rest)) for run in slices], len(time)
        )

    def _read_selection(self, selection: tuple[Any, ...]) -> FieldArray:
        values = self.fast_reader.read(selection) if self.fast_reader is not None else None
        return np.asarray(self.array[selection], dtype=np.float32) if values is None else values

    def _raise_first_error(
        self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]
    ) -> None:
        """Read file by file to find the first that can't be read, and raise its error."""
        span = slice(min(channels), max(channels) + 1)
        selection = (span, *rest) if self.times is None else (times, span, *rest)
        # zarr's own error names neither the file nor, for several times, the date.
        for files in itertools.product(*map(self._files, range(self.array.ndim), selection)):
            numbers = tuple(number for number, _ in files)
            try:
                self.array[tuple(part for _, part in files)]
            except Exception as error:
                key = f"{self.array.basename}/{self.array.metadata.encode_chunk_key(numbers)}"
                raise self._error(key, files[0][1].start, error) from error

    def _files(self, dim: int, selection: Any) -> Iterable[tuple[int, slice]]:
        """Yield the number of each file in a dim that the selection touches, and the touched part.

        Times come one by one, so that the error can name the date.
        """
        length = self._file_shape[dim]
        indices = np.atleast_1d(np.arange(self.array.shape[dim])[selection])
        step = 1 if dim == 0 and self.times is not None else length
        for start in np.unique(indices // step * step).tolist():
            inside = indices[(indices >= start) & (indices < start + step)]
            yield start // length, slice(int(inside.min()), int(inside.max()) + 1)

    def _error(self, key: str, time: int, error: Exception) -> UserError:
        contents = "the static fields" if self.times is None else "all variables"
        date = None if self.times is None else self.calendar.text(self.times[time])
        return unreadable_error(self.where, f"{key} with {contents}", date, error)

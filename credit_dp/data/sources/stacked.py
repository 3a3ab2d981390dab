"""Reads arrays that hold all channels of a time in one chunk.

`StackedArray` selects channels and times; anemoi's datasets and prepared stores are read through
it. Its values come from the first of these readers that can read the array:

1. `RawShardReader`, for shards of plain float32 on a local disk: one read per inner chunk.
2. `TensorStoreReader`, for other shards on a local disk, if tensorstore is installed.
3. zarr, for everything else. It also reads again whatever the others could not, so that one place
   reports the error.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import LocalStore

from credit_dp.data.sources.address import is_remote, local_path, reason_of, redact_secrets
from credit_dp.data.sources.base import Fields, Indexer, Source, Times, as_slice
from credit_dp.data.sources.storage import (
    CHECKSUM,
    CompleteStore,
    CountingStore,
    IntactStore,
    ShardedArray,
    StoreChangeDetector,
    has_valid_checksum,
    is_blosc_array,
    open_zarr_store,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.errors import UserError


def open_stacked(where: str, arrays: Sequence[str]) -> tuple[zarr.Group, CountingStore]:
    """Open a zarr group in which all chunks of `arrays` are required, with a counter of its reads.

    Raises:
        UserError: there is no store, or zarr can't read it.
    """
    counting_store = open_zarr_store(where)
    try:
        blosc = [
            name
            for name, array in zarr.open_group(counting_store, mode="r").arrays()
            if is_blosc_array(array)
        ]
        # Opened a second time, with the checks that the first opening has shown to be needed.
        group = zarr.open_group(CompleteStore(IntactStore(counting_store, blosc), arrays), mode="r")
    except Exception as error:
        raise UserError(
            f"{redact_secrets(where)}: not a zarr group that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
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


def coordinate_dataset(source: Source) -> xr.Dataset:
    """Return the coordinates of a source as the dataset that `check_coordinates` needs."""
    return xr.Dataset(
        coords={"time": source.times, "latitude": source.latitude, "longitude": source.longitude}
    )


def describe_source(source: Source, address: str, variables: Sequence[str]) -> list[object]:
    """See `Source.description`."""
    description: list[object] = [resolved_address(address), version_stamp(address)]
    description += [source.latitude.tolist(), source.longitude.tolist()]
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
    has_index_at_end = sharding.index_location.value == "end"
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

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
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

    def _read(self, spans: list[tuple[int, int]]) -> Fields:
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


# Limits of one TensorStoreReader.
DECODER_THREADS = 4
CONCURRENT_FILES = 8


class ShardReader(Protocol):
    """Reads slices of one local array of shards without zarr."""

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """Return the values as float32; None if a file is missing or damaged."""


@final
class TensorStoreReader:
    """Reads slices of a local array with tensorstore."""

    def __init__(self, shards: ShardedArray, store: CountingStore) -> None:
        import tensorstore

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

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """See `ShardReader`."""
        try:
            sizes = self._sizes(self._shards.spans(selection))
            fields = np.asarray(self._tensorstore[selection].read().result(), dtype=np.float32)
        except Exception:  # noqa: BLE001 - zarr reads it again and reports the error
            return None
        self._store.add(sum(sizes), len(sizes))
        return fields

    def _sizes(self, spans: list[tuple[int, int]]) -> list[int]:
        """Return the bytes of each chunk that overlaps `spans`: tensorstore does not count them."""
        sizes = []
        for path, shard in self._shards.files(spans):
            with path.open("rb") as file:
                sizes += [part.size for part in self._shards.parts(file, shard, spans)]
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
        return TensorStoreReader(shards, store) if find_spec("tensorstore") is not None else None
    except Exception:  # noqa: BLE001 - zarr reads it, or says why it can't be read
        return None


@final
@dataclass(frozen=True)
class StackedArray:
    """One array `(time, channel, ...)`, or `(channel, ...)` if `times` is None.

    Attributes:
        where: the address of the store as messages show it.
        times: of the first dim.
        change_detector: counts the reads and checks the store now and then.
        fast_reader: is tried before zarr.
    """

    array: "zarr.Array[Any]"
    where: str
    times: Times | None
    change_detector: StoreChangeDetector
    fast_reader: ShardReader | None = None

    def read(self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
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
            raise self._error("a chunk", self._first_index(times), error) from error
        self.change_detector.after_read(suspicious=False)
        return fields

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

    def _read(self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
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
    ) -> Fields:
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
        runs = np.split(channels, np.flatnonzero(np.diff(channels) != 1) + 1)
        slices = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        return np.concatenate(
            [self._read_selection((*time, run, *rest)) for run in slices], len(time)
        )

    def _read_selection(self, selection: tuple[Any, ...]) -> Fields:
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

    def _first_index(self, times: Indexer) -> int:
        return 0 if self.times is None else int(np.arange(len(self.times))[times][0])

    def _error(self, key: str, time: int, error: Exception) -> UserError:
        contents = "the static fields" if self.times is None else "all variables"
        date = None if self.times is None else self.times[time]
        return unreadable_error(self.where, f"{key} with {contents}", date, error)

"""Reads arrays that hold all channels of a time in one chunk.

`StackedArray` selects channels and times; anemoi's datasets and prepared stores are read through
it, by zarr. Shards on a local disk are read by tensorstore if that is installed; what it can't read
zarr reads again, so that one place reports the error.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore

from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.address import is_remote, local_path, reason_of, zarr_open_error
from credit_dp.data.sources.source import Indexer, Source, as_slice
from credit_dp.data.sources.storage import (
    CompleteStore,
    CountingStore,
    IntactStore,
    StoreChangeDetector,
    open_current_group,
    open_zarr_store,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.errors import UserError


def open_stacked(where: str, arrays: Sequence[str]) -> tuple[zarr.Group, CountingStore]:
    """Open a zarr group in which all chunks of `arrays` are required; reads are counted."""
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
    """Return one array of the group."""
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        raise UserError(f"{where}: has no array {name}. Change data.store.")
    return array


def read_array(group: zarr.Group, name: str, where: str) -> NDArray[Any]:
    """Read all values of a small array."""
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
    """Return the `description` of a source whose fields are all in `arrays`."""
    description: list[object] = [resolved_address(address), version_stamp(address, arrays)]
    description += source.grid.description()
    for name in variables:
        variable = source.variables[name]
        description.append([name, variable.has_time, list(variable.levels), variable.units])
    return description


def _runs(channels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    edges = np.flatnonzero(np.diff(channels) != 1) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(channels)]):
        yield channels[start], channels[stop - 1] + 1, start


# Limits of one TensorStoreReader.
DECODER_THREADS = 4
CONCURRENT_FILES = 8


@final
class TensorStoreReader:
    """Reads slices of a local array of shards with tensorstore."""

    _lock: ClassVar[Lock] = Lock()
    _bytes_counted: ClassVar[int] = 0

    def __init__(self, folder: Path, array: "zarr.Array[Any]", store: CountingStore) -> None:
        """Open the array in a folder; `store` counts what is read."""
        import tensorstore

        self._chunks = array.chunks
        self._store = store
        self._metrics = tensorstore.experimental_collect_matching_metrics
        context = {
            "cache_pool": {"total_bytes_limit": 0},  # each chunk is read once
            "data_copy_concurrency": {"limit": DECODER_THREADS},
            "file_io_concurrency": {"limit": CONCURRENT_FILES},
        }
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "fill_missing_data_reads": False,
        }
        self._array = tensorstore.open(
            spec, context=tensorstore.Context(context), read=True
        ).result()
        self._bytes_read()  # those of metadata are not counted

    def read(self, selection: tuple[slice, ...]) -> FieldArray | None:
        """Return the values as float32; None if a chunk is missing or damaged."""
        try:
            fields = np.asarray(self._array[selection].read().result(), dtype=np.float32)
        except Exception:  # noqa: BLE001 - zarr reads it again and reports the error
            return None
        dims = zip(selection, self._array.shape, self._chunks, strict=True)
        touched = [
            {index // chunk for index in range(*part.indices(size))} for part, size, chunk in dims
        ]
        self._store.add(self._bytes_read(), math.prod(map(len, touched)))
        return fields

    def _bytes_read(self) -> int:
        """Return the bytes that tensorstore has read, with indices of shards, since the last call.

        It counts those of the process: of stores that are read at once the sum is right.
        """
        with self._lock:
            (metric,) = self._metrics("/tensorstore/kvstore/file/bytes_read")
            before = TensorStoreReader._bytes_counted
            TensorStoreReader._bytes_counted = metric["values"][0]["value"]
            return TensorStoreReader._bytes_counted - before


def open_shard_reader(address: str, name: str, store: CountingStore) -> TensorStoreReader | None:
    """Return a faster reader than zarr for an array; None if there is none.

    Remote stores are left to zarr, which waits for the network there, not for the processor.
    """
    if is_remote(address) or find_spec("tensorstore") is None:
        return None
    try:
        folder = local_path(address)
        array = zarr.open_array(LocalStore(folder, read_only=True), path=name, mode="r")
        return None if array.shards is None else TensorStoreReader(folder / name, array, store)
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
    fast_reader: TensorStoreReader | None = None
    calendar: Calendar = STANDARD

    def read(self, times: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> FieldArray:
        """Read channels at some times: `(T, C, ...)`.

        Args:
            times: indices of the first dim; ignored if `times` of the array is None.

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
        them, as the chunk is decoded anyway. Otherwise each run of adjacent channels is one slice.
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

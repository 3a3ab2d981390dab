"""Arrays with all channels of a time together, and readers of them that are faster than zarr."""

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
    open_zarr_store,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.errors import UserError


def open_stacked(where: str, arrays: Sequence[str]) -> tuple[zarr.Group, CountingStore]:
    """The zarr group at a path or address, and its counter. All chunks of `arrays` must be there.

    Raises:
        UserError: there is nothing, or nothing that zarr can read.
    """
    disk = open_zarr_store(where)
    try:
        blosc = [
            name for name, array in zarr.open_group(disk, mode="r").arrays() if _is_blosc(array)
        ]
        group = zarr.open_group(CompleteStore(IntactStore(disk, blosc), arrays), mode="r")
    except Exception as error:
        raise UserError(
            f"{redact_secrets(where)}: not a zarr group that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
    return group, disk


def get_array(group: zarr.Group, name: str, where: str) -> "zarr.Array[Any]":
    """One array of the group.

    Raises:
        UserError: it is missing.
    """
    found = group.get(name)
    if not isinstance(found, zarr.Array):
        raise UserError(f"{where}: has no array {name}. Change data.store.")
    return found


def read_array(group: zarr.Group, name: str, where: str) -> NDArray[Any]:
    """All values of a small array.

    Raises:
        UserError: it is missing, or can't be read.
    """
    array = get_array(group, name, where)
    try:
        return np.asarray(array[...])
    except Exception as error:
        raise UserError(
            f"{where}: its array {name} can't be read ({reason_of(error)}). Change data.store."
        ) from error


def coordinate_dataset(source: Source) -> xr.Dataset:
    """What `check_coordinates` looks at."""
    return xr.Dataset(
        coords={"time": source.times, "latitude": source.latitude, "longitude": source.longitude}
    )


def describe_source(source: Source, address: str, variables: Sequence[str]) -> list[object]:
    """See `Source.description`."""
    described: list[object] = [resolved_address(address), version_stamp(address)]
    described += [source.latitude.tolist(), source.longitude.tolist()]
    for name in variables:
        variable = source.variables[name]
        described.append([name, variable.timed, list(variable.levels), variable.units])
    return described


def _is_blosc(array: "zarr.Array[Any]") -> bool:
    """Whether a chunk's file is a Blosc buffer."""
    codecs = array.compressors
    return array.shards is None and bool(codecs) and "Blosc" in type(codecs[-1]).__name__


DTYPE = np.dtype("<f4")


def is_raw_float32(array: "zarr.Array[Any]") -> bool:
    """Whether an array is of shards whose chunks are little-endian float32 with a checksum."""
    codecs: Any = getattr(array.metadata, "codecs", ())
    if array.dtype != DTYPE or len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec):
        return False
    little, checked = BytesCodec(endian="little"), Crc32cCodec()
    one = codecs[0]
    at_the_end = one.index_location.value == "end"
    return at_the_end and (*one.codecs, *one.index_codecs) == (little, checked) * 2


@final
class RawShardReader:
    """One array in a folder on this machine, for which `is_raw_float32`, and of which slices are
    read."""

    def __init__(self, shards: ShardedArray, disk: CountingStore) -> None:
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
                    if file.readinto(room.data) != len(room) or not has_valid_checksum(room):
                        raise ValueError(f"{path}: a chunk is damaged")
                    made[part.destination] = values[part.inside]
                    chunks += 1
        self._disk.add(chunks * len(room), chunks)
        return made


# Of all readers of an array: threads that decode, and files that are read at once.
DECODING, READING = 4, 8


class ShardReader(Protocol):
    """One array of shards in a folder on this machine, of which slices are read."""

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """The values, float32; None if a file is missing or is not as it should be."""


@final
class TensorStoreReader:
    """What tensorstore decodes, where it is installed."""

    def __init__(self, shards: ShardedArray, disk: CountingStore) -> None:
        import tensorstore

        self._shards, self._disk = shards, disk
        context = {
            "cache_pool": {"total_bytes_limit": 0},  # each chunk is wanted once
            "data_copy_concurrency": {"limit": DECODING},
            "file_io_concurrency": {"limit": READING},
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
        except Exception:  # noqa: BLE001 - whatever it was, zarr will meet it again and name it
            return None
        self._disk.add(sum(sizes), len(sizes))
        return fields

    def _sizes(self, spans: list[tuple[int, int]]) -> list[int]:
        """Bytes of the chunks that have some of it."""
        sizes = []
        for path, shard in self._shards.files(spans):
            with path.open("rb") as file:
                sizes += [part.size for part in self._shards.parts(file, shard, spans)]
        return sizes


def open_shard_reader(address: str, name: str, disk: CountingStore) -> ShardReader | None:
    """Another reader than zarr of an array; None if there is none for it here.

    At addresses elsewhere zarr waits for the network, not for the processor.
    """
    if is_remote(address):
        return None
    try:
        folder = local_path(address)
        array = zarr.open_array(LocalStore(folder, read_only=True), path=name, mode="r")
        shards = ShardedArray(folder / name, array)
        if is_raw_float32(array):
            return RawShardReader(shards, disk)
        return TensorStoreReader(shards, disk) if find_spec("tensorstore") is not None else None
    except Exception:  # noqa: BLE001 - zarr reads it, or says why it can't be read
        return None


@final
@dataclass(frozen=True)
class StackedArray:
    """One array `(time, channel, ...)`, or `(channel, ...)` if `times` is None.

    Attributes:
        where: the store, as messages name it.
        times: of the first dim.
        quick: another reader of the same array, asked first.
    """

    array: "zarr.Array[Any]"
    where: str
    times: Times | None
    change_detector: StoreChangeDetector
    fast_reader: ShardReader | None = None

    def read(self, places: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
        """Some channels at some places of time, and `rest` of the dims after: `(T, C, ...)`.

        Raises:
            UserError: a chunk is missing or damaged, with its date and file; the store has changed.
        """
        try:
            fields = self._read(places, channels, rest)
        except MemoryError:
            raise
        except Exception as error:
            self.change_detector.check()
            self._raise_first_error(places, channels, rest)
            raise self._error("a chunk", self._first_index(places), error) from error
        self.change_detector.after_read(suspicious=False)
        return fields

    def chunk_name(self, at: tuple[int, ...]) -> str:
        """The file that holds one value, by its key in the store."""
        numbers = tuple(n // size for n, size in zip(at, self._file_shape, strict=True))
        return f"chunk {self.array.basename}/{self.array.metadata.encode_chunk_key(numbers)}"

    @property
    def times_together(self) -> int:
        """Times that lie in one file."""
        return int(self._file_shape[0])

    @property
    def _file_shape(self) -> tuple[int, ...]:
        return self.array.shards or self.array.chunks

    def _read(self, places: Indexer, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
        wanted = np.asarray(channels, dtype=np.intp)
        if self.times is None:
            return self._read_channels((), wanted, rest)[None]
        if isinstance(places, slice):
            return self._read_channels((places,), wanted, rest)
        # Each time by itself: zarr's own indexing by numbers takes several times longer.
        parts = [
            self._read_channels((slice(place, place + 1),), wanted, rest)
            for place in map(int, places)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_channels(
        self, time: tuple[slice, ...], wanted: NDArray[np.intp], rest: tuple[Any, ...]
    ) -> Fields:
        """Neighbours at once; others with what lies between them, where that is in their chunk."""
        span = as_slice(wanted)
        if isinstance(span, slice):
            return self._read_selection((*time, span, *rest))
        first, last = int(wanted.min()), int(wanted.max())
        chunk = self.array.chunks[len(time)]
        if first // chunk == last // chunk:
            whole = self._read_selection((*time, slice(first, last + 1), *rest))
            return np.take(whole, wanted - first, axis=len(time))
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        slices = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        return np.concatenate(
            [self._read_selection((*time, run, *rest)) for run in slices], len(time)
        )

    def _read_selection(self, selection: tuple[Any, ...]) -> Fields:
        found = self.fast_reader.read(selection) if self.fast_reader is not None else None
        return np.asarray(self.array[selection], dtype=np.float32) if found is None else found

    def _raise_first_error(
        self, places: Indexer, channels: Sequence[int], rest: tuple[Any, ...]
    ) -> None:
        """Read file by file, and raise the error of the first that can't be read."""
        span = slice(min(channels), max(channels) + 1)
        asked = (span, *rest) if self.times is None else (places, span, *rest)
        for files in itertools.product(*map(self._files, range(self.array.ndim), asked)):
            numbers = tuple(number for number, _ in files)
            try:
                self.array[tuple(part for _, part in files)]
            except Exception as error:
                key = f"{self.array.basename}/{self.array.metadata.encode_chunk_key(numbers)}"
                raise self._error(key, files[0][1].start, error) from error

    def _files(self, dim: int, asked: Any) -> Iterable[tuple[int, slice]]:
        """Of one dim, the number of each file that has some of what is asked, and what of it.

        Of time: one by one, for the date.
        """
        length = self._file_shape[dim]
        indices = np.atleast_1d(np.arange(self.array.shape[dim])[asked])
        step = 1 if dim == 0 and self.times is not None else length
        for start in np.unique(indices // step * step).tolist():
            inside = indices[(indices >= start) & (indices < start + step)]
            yield start // length, slice(int(inside.min()), int(inside.max()) + 1)

    def _first_index(self, places: Indexer) -> int:
        return 0 if self.times is None else int(np.arange(len(self.times))[places][0])

    def _error(self, key: str, place: int, error: Exception) -> UserError:
        what = "the static fields" if self.times is None else "all variables"
        date = None if self.times is None else self.times[place]
        return unreadable_error(self.where, f"{key} with {what}", date, error)

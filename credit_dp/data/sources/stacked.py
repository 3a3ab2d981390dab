"""An array that holds all channels of a time together, read with errors that say which file."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.sources.faults import Watch, unreadable
from credit_dp.data.sources.quick import QuickArray
from credit_dp.data.sources.source import Fields, Places, Times, as_slice
from credit_dp.errors import UserError


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
    watch: Watch
    quick: QuickArray | None = None

    def read(self, places: Places, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
        """Some channels at some places of time, and `rest` of the dims after: `(T, C, ...)`.

        Raises:
            UserError: a chunk is missing or damaged, with its date and file; the store has changed.
        """
        try:
            fields = self._read(places, channels, rest)
        except MemoryError:
            raise
        except Exception as error:
            self.watch.check()
            self._raise_named(places, channels, rest)
            raise self._error("a chunk", self._first(places), error) from error
        self.watch.after_read(suspicious=False)
        return fields

    def chunk(self, at: tuple[int, ...]) -> str:
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

    def _read(self, places: Places, channels: Sequence[int], rest: tuple[Any, ...]) -> Fields:
        wanted = np.asarray(channels, dtype=np.intp)
        if self.times is None:
            return self._channels((), wanted, rest)[None]
        if isinstance(places, slice):
            return self._channels((places,), wanted, rest)
        # Each time by itself: zarr's own indexing by numbers takes several times longer.
        parts = [
            self._channels((slice(place, place + 1),), wanted, rest) for place in map(int, places)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _channels(
        self, time: tuple[slice, ...], wanted: NDArray[np.intp], rest: tuple[Any, ...]
    ) -> Fields:
        """Neighbours at once; others with what lies between them, where that is in their chunk."""
        span = as_slice(wanted)
        if isinstance(span, slice):
            return self._values((*time, span, *rest))
        first, last = int(wanted.min()), int(wanted.max())
        chunk = self.array.chunks[len(time)]
        if first // chunk == last // chunk:
            whole = self._values((*time, slice(first, last + 1), *rest))
            return np.take(whole, wanted - first, axis=len(time))
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        slices = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        return np.concatenate([self._values((*time, run, *rest)) for run in slices], len(time))

    def _values(self, selection: tuple[Any, ...]) -> Fields:
        found = self.quick.read(selection) if self.quick is not None else None
        return np.asarray(self.array[selection], dtype=np.float32) if found is None else found

    def _raise_named(self, places: Places, channels: Sequence[int], rest: tuple[Any, ...]) -> None:
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

    def _first(self, places: Places) -> int:
        return 0 if self.times is None else int(np.arange(len(self.times))[places][0])

    def _error(self, key: str, place: int, error: Exception) -> UserError:
        what = "the static fields" if self.times is None else "all variables"
        date = None if self.times is None else self.times[place]
        return unreadable(self.where, f"{key} with {what}", date, error)

"""Read the training dates once, with bounded memory, for statistics and climatology.

The work is divided into `Piece`s (channels, rows, a year) that `PieceWorkers` process in parallel.
`stream_windows` reads one piece as a sequence of `Window`s, in which each date and each pair of
dates one step apart occurs once. `connect_to_scheduler` gives commands a dask scheduler.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.channels import Channel
from credit_dp.data.dates import one_step_pairs, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Masks, Store
from credit_dp.errors import UserError, counted, first_line

Indices = NDArray[np.intp]
RowSplitter = Callable[[tuple[Channel, ...]], list[slice]]  # channels -> bands of rows

CONNECT_SECONDS = 30  # for a dask scheduler to answer
TIME_BYTES = 512 * 2**20  # fields of one time; larger ones are split into bands of rows


@final
@dataclass(frozen=True)
class TrainingDates:
    """Every N-th training date.

    Attributes:
        indices: `(T,)`, of the store's times.
        next_indices: `(T,)`, of the times one step later; -1 if that is not a training date.
    """

    indices: Indices
    next_indices: Indices

    @classmethod
    def of(cls, store: Store, every: int = 1) -> "TrainingDates":
        """Return every N-th training date of a store."""
        train = split_slice(store.config, "train", store.times, store.calendar)
        earlier, later = one_step_pairs(store.times[train], store.config.step_hours)
        next_indices = np.full(train.stop - train.start, -1)
        next_indices[earlier] = later + train.start
        return cls(np.arange(train.start, train.stop)[::every], next_indices[::every])

    @classmethod
    def at(cls, indices: Indices) -> "TrainingDates":
        """Return any dates of a store, for passes that do not need pairs of dates."""
        return cls(indices, np.full(len(indices), -1))

    def check_pairs(self, store: Store, every: int = 1) -> None:
        """Check that there are pairs of dates, from which statistics of tendencies are computed."""
        if (self.next_indices < 0).all():
            nth = f"every={every}: " if every > 1 else ""
            raise UserError(
                f"{store.config.where}: {nth}no two dates of data.dates.train are "
                f"{counted(store.config.step_hours, 'hour')} apart. Change data.step or "
                "data.dates.train."
            )


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of a group of channels at the training dates `indices[first:stop]` of a member."""

    channels: tuple[Channel, ...]
    rows: slice
    first: int
    stop: int
    member: int = 0


@final
@dataclass(frozen=True)
class Window:
    """Fields that are in memory at once.

    Attributes:
        fields: `(T, C, h, W)` in the store's units, NaN where there is no value.
        dates: the training dates that are in a window for the first time, as positions in
            `TrainingDates.indices`.
        fresh: their indices along T.
        before, after: indices along T of pairs one step apart that are complete for the first time.
    """

    fields: FieldArray
    dates: Indices
    fresh: Indices
    before: Indices
    after: Indices


def channel_groups(store: Store) -> list[tuple[Channel, ...]]:
    """Return all stored channels that change in time, in groups that share chunks."""
    stored = [Channel(name) for name in store.channels.forcing if name not in COMPUTED_FORCINGS]
    groups = store.source.group_by_chunk([*store.channels.output_channels, *stored])
    return [tuple(group) for group in groups]


def split_rows(
    store: Store, channels: Sequence[Channel], max_bytes: int, bytes_per_point: int
) -> list[slice]:
    """Split the grid into bands of rows that need at most `max_bytes` of memory each.

    There are as few bands as possible: if chunks span the globe, each band decodes all of them.
    """
    rows, columns = store.grid
    count = -(-len(channels) * rows * columns * bytes_per_point // max_bytes)
    edges = np.linspace(0, rows, min(count, rows) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def split_dates(store: Store, dates: TrainingDates) -> list[tuple[int, int]]:
    """Return the first and the last plus one of the dates of each calendar year, in order."""
    years = store.calendar.years(store.times[dates.indices])
    edges = np.flatnonzero(years[1:] != years[:-1]) + 1
    return list(pairwise([0, *edges.tolist(), len(years)]))


def all_pieces(
    store: Store,
    dates: TrainingDates,
    split: RowSplitter | None = None,
    groups: Sequence[tuple[Channel, ...]] | None = None,
) -> list[Piece]:
    """Return all pieces of a pass over the training dates, in the order of merging.

    Args:
        split: returns the bands of rows for some channels; None limits the fields of one time.
    """
    years = split_dates(store, dates)
    # Results are merged in this order for any number of workers, so that all bits are the same.
    return [
        Piece(channels, rows, first, stop, member)
        for channels in (channel_groups(store) if groups is None else groups)
        for rows in (split(channels) if split else split_rows(store, channels, TIME_BYTES, 4))
        for member in range(store.num_members)
        for first, stop in years
    ]


def stream_windows(
    store: Store, dates: TrainingDates, piece: Piece, *, checked: bool = True
) -> Iterator[Window]:
    """Read a piece: each date once, and once each pair whose first date is in the piece.

    Without `checked`, values may be missing or out of range.
    """
    indices = dates.indices[piece.first : piece.stop]
    next_indices = dates.next_indices[piece.first : piece.stop]
    window_indices: Indices = np.empty(0, dtype=np.intp)
    fields: FieldArray | None = None
    store = store.member(piece.member)
    needed = np.union1d(indices, next_indices[next_indices >= 0])
    for block_indices, block in _read_blocks(store, piece, needed, checked):
        # Keep the dates whose next date is in this block or a later one. Otherwise the pairs
        # that cross the border of two blocks would be lost.
        waiting = np.isin(window_indices, indices[next_indices >= block_indices[0]])
        kept_fields = block[:0] if fields is None else fields[waiting]
        window_indices = np.concatenate([window_indices[waiting], block_indices])
        fields = np.concatenate([kept_fields, block]) if len(kept_fields) else block
        fresh = np.isin(indices, block_indices)
        completed = np.isin(next_indices, block_indices)
        yield Window(
            fields=fields,
            dates=piece.first + np.flatnonzero(fresh),
            fresh=np.searchsorted(window_indices, indices[fresh]),
            before=np.searchsorted(window_indices, indices[completed]),
            after=np.searchsorted(window_indices, next_indices[completed]),
        )


def _read_blocks(
    store: Store, piece: Piece, indices: Indices, checked: bool
) -> Iterator[tuple[Indices, FieldArray]]:
    """Yield time indices and their fields, for the given indices only."""
    for span in _contiguous_slices(indices, _dates_per_chunk(store, piece.channels)):
        for first, block in store.blocks(piece.channels, span, piece.rows, checked=checked):
            block_indices = indices[(indices >= first) & (indices < first + len(block))]
            if len(block_indices) == len(block):
                yield block_indices, block
            elif len(block_indices):
                yield block_indices, block[block_indices - first]


def _contiguous_slices(indices: Indices, max_gap: int) -> Iterator[slice]:
    """Yield slices that cover the indices, split at gaps wider than `max_gap`."""
    # Smaller gaps are read as well: their chunks have to be decoded for the dates around them.
    for part in np.split(indices, np.flatnonzero(np.diff(indices) > max_gap) + 1):
        yield slice(int(part[0]), int(part[-1]) + 1)


def _dates_per_chunk(store: Store, channels: Sequence[Channel]) -> int:
    num_times = np.count_nonzero(store.source.has_times(channels[0].variable))
    times_per_date = max(1, int(num_times) // len(store.times))
    return max(1, store.source.times_per_file(channels[0]) // times_per_date)


T = TypeVar("T")
PieceFunction = Callable[[Store, TrainingDates, Piece], T]


@final
class PieceWorkers:
    """Processes pieces in parallel and yields their results in order.

    The workers are threads of this process, which share the open store, or those of a
    `dask.distributed` scheduler, which open the store themselves.

    Attributes:
        count: number of pieces processed at once.
    """

    def __init__(
        self, store: Store, dates: TrainingDates, threads: int = 1, scheduler: str = ""
    ) -> None:
        """Start threads or, with the address of a scheduler, connect to it."""
        self._client = connect_to_scheduler(scheduler) if scheduler else None
        self._executor: Executor
        if self._client is None:
            self.count = threads
            self._call = partial(_run, store, dates)
            self._executor = ThreadPoolExecutor(threads)
            return
        self.count = sum(self._client.nthreads().values())
        if not self.count:
            self._client.close()
            raise UserError(
                f"{scheduler}: the scheduler has no workers. Start some, or drop scheduler."
            )
        self._call = partial(_open_and_run, store.config, store.masks, dates)
        # pure=False: a piece that the scheduler remembers is processed again.
        self._executor = self._client.get_executor(pure=False)

    def run(self, function: PieceFunction[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """Yield the result of each piece, in order."""
        pending: deque[Future[T]] = deque()
        try:
            for piece in pieces:
                # Bound to its arguments, which dask would search for tasks.
                pending.append(self._executor.submit(partial(self._call, function, piece)))
                # Not all at once: results would pile up if the caller is slower than the workers.
                if len(pending) == self.count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Stop the threads, or disconnect from the scheduler."""
        self._executor.shutdown()
        if self._client is not None:
            self._client.close()


def _run(store: Store, dates: TrainingDates, function: PieceFunction[T], piece: Piece) -> T:
    return function(store, dates, piece)


def _open_and_run(
    config: DataConfig,
    masks: Masks,
    dates: TrainingDates,
    function: PieceFunction[T],
    piece: Piece,
) -> T:
    return function(Store(open_source(config), config, masks), dates, piece)


def connect_to_scheduler(address: str) -> Any:
    """Return a `distributed.Client` of the scheduler at an address like `tcp://HOST:PORT`.

    It is not made the default of this process: dask computes elsewhere as it did before.
    """
    try:
        from distributed import Client
    except ImportError:
        raise UserError(
            "scheduler: needs the package distributed. Install it, or leave scheduler out."
        ) from None
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        raise UserError(
            f"scheduler: no dask scheduler answers at {address} ({first_line(error)}). "
            "Change scheduler."
        ) from None

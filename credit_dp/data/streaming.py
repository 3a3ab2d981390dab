"""The training dates as a stream of blocks: bounded in memory, each read once, in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from credit_dp.data.limits import ValueRange
from credit_dp.data.sources.base import Fields
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.errors import UserError

Indices = NDArray[np.intp]
Cut = Callable[[tuple[Channel, ...]], list[slice]]

PIECE_CHUNKS = 64  # of times in a piece: the one pair that reaches beyond it is read twice
TIME_BYTES = 512 * 2**20  # of one time of a group of channels: what is larger is cut into bands


@final
@dataclass(frozen=True)
class TrainingDates:
    """Every N-th training date.

    Attributes:
        chosen: `(T,)`, their places in the store's times.
        later: `(T,)`, the places of the dates one step later; -1 where there is none in training.
    """

    indices: Indices
    next_indices: Indices

    @classmethod
    def of(cls, store: Store, every: int = 1) -> "TrainingDates":
        """Those of a store.

        Raises:
            UserError: of none of them the date one step later is there.
        """
        span = split_slice(store.config, "train", store.times)
        now, after = one_step_pairs(store.times[span], store.config.step_hours)
        later = np.full(span.stop - span.start, -1)
        later[now] = after + span.start
        found = cls(np.arange(span.start, span.stop)[::every], later[::every])
        if (found.next_indices < 0).all():
            nth = f"every={every}: " if every > 1 else ""
            raise UserError(
                f"{store.config.store}: {nth}no two dates of data.dates.train are "
                f"{store.config.step_hours} hours apart. Change data.step or data.dates.train."
            )
        return found


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of the channels of one group at some dates: `chosen[first:stop]`."""

    channels: tuple[Channel, ...]
    rows: slice
    first: int
    stop: int


@final
@dataclass(frozen=True)
class Window:
    """Fields that are in memory at once.

    Attributes:
        fields: `(T, C, h, W)` in the store's units, NaN where there is no value.
        dates: which of the chosen dates come for the first time, and `fresh`: where in `fields`.
        before, after: where in `fields` pairs lie whose second one comes for the first time.
    """

    fields: Fields
    dates: Indices
    fresh: Indices
    before: Indices
    after: Indices


def channel_groups(store: Store) -> list[tuple[Channel, ...]]:
    """All channels that change in time and are stored, in groups that share chunks."""
    stored = [Channel(name) for name in store.channels.forcing if name not in COMPUTED_FORCINGS]
    together = store.source.group_by_chunk([*store.channels.output_channels, *stored])
    return [tuple(group) for group in together]


def split_rows(store: Store, channels: Sequence[Channel], most: int, per_point: int) -> list[slice]:
    """The globe as bands of rows of which no more than `most` bytes are held at once.

    Where chunks span the globe, each band reads them anew: there is one band if possible.
    """
    rows, columns = store.grid
    count = -(-len(channels) * rows * columns * per_point // most)
    edges = np.linspace(0, rows, min(count, rows) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def split_dates(
    store: Store, dates: TrainingDates, channels: tuple[Channel, ...], rows: slice
) -> list[Piece]:
    """The dates of some channels and rows, as pieces in order."""
    length = PIECE_CHUNKS * _dates_per_chunk(store, channels)
    edges = range(0, len(dates.indices), length)
    return [Piece(channels, rows, x, min(x + length, len(dates.indices))) for x in edges]


def all_pieces(store: Store, dates: TrainingDates, cut: Cut | None = None) -> list[Piece]:
    """Everything that statistics have to see, in the order in which it is merged.

    Args:
        cut: the rows of some channels that are done at once; None: as many as can be read at once.
    """
    return [
        piece
        for channels in channel_groups(store)
        for rows in (cut(channels) if cut else split_rows(store, channels, TIME_BYTES, 4))
        for piece in split_dates(store, dates, channels, rows)
    ]


def stream_windows(store: Store, dates: TrainingDates, piece: Piece) -> Iterator[Window]:
    """Each date of the piece once, and each pair whose first date is in the piece once.

    Raises:
        UserError: a field cannot be read, or has NaN where it may not.
    """
    chosen, later = (
        dates.indices[piece.first : piece.stop],
        dates.next_indices[piece.first : piece.stop],
    )
    places: Indices = np.empty(0, dtype=np.intp)
    fields: Fields | None = None
    for found, block in _read_blocks(store, piece, np.union1d(chosen, later[later >= 0])):
        # Dates whose second one is still to come stay, so that no pair is lost between blocks.
        waiting = np.isin(places, chosen[later >= found[0]])
        kept = block[:0] if fields is None else fields[waiting]
        places = np.concatenate([places[waiting], found])
        fields = np.concatenate([kept, block]) if len(kept) else block
        fresh, closed = np.isin(chosen, found), np.isin(later, found)
        yield Window(
            fields,
            piece.first + np.flatnonzero(fresh),
            np.searchsorted(places, chosen[fresh]),
            np.searchsorted(places, chosen[closed]),
            np.searchsorted(places, later[closed]),
        )


def _read_blocks(store: Store, piece: Piece, wanted: Indices) -> Iterator[tuple[Indices, Fields]]:
    """The fields at these places, and no others, with their places."""
    for span in _contiguous_slices(wanted, _dates_per_chunk(store, piece.channels)):
        for first, block in store.blocks(piece.channels, span, piece.rows):
            found = wanted[(wanted >= first) & (wanted < first + len(block))]
            if len(found) == len(block):
                yield found, block
            elif len(found):
                yield found, block[found - first]


def _contiguous_slices(wanted: Indices, chunk: int) -> Iterator[slice]:
    """Where the places lie, without the gaps between them that hold a whole chunk or more."""
    for part in np.split(wanted, np.flatnonzero(np.diff(wanted) > chunk) + 1):
        yield slice(int(part[0]), int(part[-1]) + 1)


def _dates_per_chunk(store: Store, channels: Sequence[Channel]) -> int:
    """Dates that lie in one chunk of the store."""
    skipped = max(1, len(store.source.times) // len(store.times))
    return max(1, store.source.times_together(channels[0]) // skipped)


T = TypeVar("T")
PieceFunction = Callable[[Store, TrainingDates, Piece], T]

CONNECT_SECONDS = 30


class PieceWorkers(ABC):
    """Does pieces at once, as many as there are workers, and hands the results out in order.

    Attributes:
        count: how many pieces are done at once.
    """

    count: int

    @abstractmethod
    def run(self, work: PieceFunction[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """The result of each piece, in order."""

    def close(self) -> None:  # noqa: B027
        """Let go of what was opened."""


@final
class ThreadWorkers(PieceWorkers):
    """Threads of this process, that share the open store."""

    def __init__(self, store: Store, dates: TrainingDates, count: int) -> None:
        self.count = count
        self._store, self._dates = store, dates

    def run(self, work: PieceFunction[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """See `PieceWorkers`."""
        with ThreadPoolExecutor(self.count) as threads:
            one = partial(work, self._store, self._dates)
            for start in range(0, len(pieces), self.count):  # few results at once wait to be taken
                yield from threads.map(one, pieces[start : start + self.count])


@final
class DaskWorkers(PieceWorkers):
    """The workers of a running `dask.distributed` scheduler; each opens the store itself."""

    def __init__(self, store: Store, dates: TrainingDates, address: str) -> None:
        """Connect.

        Raises:
            UserError: nobody answers there, it has no workers, or `distributed` is not installed.
        """
        self._config, self._ranges, self._dates = store.config, store.limits.sampled_ranges, dates
        self._client = _connect_client(address)
        self.count = sum(self._client.nthreads().values())
        if not self.count:
            self.close()
            raise UserError(
                f"{address}: the scheduler has no workers. Start some, or drop scheduler."
            )

    def run(self, work: PieceFunction[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """See `PieceWorkers`."""
        for start in range(0, len(pieces), self.count):
            tasks = [
                _delayed_call(_open_and_run, work, self._config, self._ranges, self._dates, piece)
                for piece in pieces[start : start + self.count]
            ]
            yield from self._client.gather(self._client.compute(tasks))

    def close(self) -> None:
        """Leave the scheduler."""
        self._client.close()


def _delayed_call(function: Callable[..., Any], *arguments: Any) -> Any:
    from dask.delayed import delayed

    # Bound and not traversed: dask would take a piece apart to look for tasks in it.
    return delayed(partial(function, *arguments), pure=False, traverse=False)()


def _open_and_run(
    work: PieceFunction[T],
    config: DataConfig,
    ranges: Mapping[str, ValueRange],
    dates: TrainingDates,
    piece: Piece,
) -> T:
    return work(Store(open_source(config), config, ranges), dates, piece)


def _connect_client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError("scheduler: needs the package distributed. Install it.") from error
    try:
        return Client(address, timeout=CONNECT_SECONDS)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UserError(f"scheduler={address}: can't be reached ({error}).") from error

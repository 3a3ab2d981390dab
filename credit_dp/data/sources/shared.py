"""Reading shared among ranks: each decodes a share of the chunks, and sends every rank its band.

For stores whose chunks span more rows than a band needs: there every rank would decode nearly
everything, and keep little of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.base import Fields, Indexer, Source, Times, VariableInfo, as_slice
from credit_dp.errors import UserError

SHARING_THRESHOLD = 1.05  # times the rows of all bands, from which on reading is shared


class ChunkExchange(Protocol):
    """How the ranks that share reading meet; all call the same, in the same order."""

    @property
    def rank(self) -> int:
        """This one's number among them."""
        ...

    @property
    def bounds(self) -> Sequence[int]:
        """Rank r owns the rows `bounds[r]` to `bounds[r + 1] - 1`."""
        ...

    def gather_problems(self, problem: str) -> list[str]:
        """Every rank's problem, in rank order; empty for none."""
        ...

    def all_to_all(
        self, parcels: Fields, sizes: Sequence[int], coming: Sequence[int]
    ) -> list[Fields]:
        """Send each rank its parcel, and get one from each, in rank order.

        Shapes:
            `parcels`: all of them flat, one after the other, of the given `sizes`; `coming`: the
            sizes of those of the others.
        """
        ...

    def stop(self) -> None:
        """Let nobody here wait any longer: `ExchangeStoppedError` in the thread that does."""
        ...


class ExchangeStoppedError(Exception):
    """Whoever read for others was told to stop."""


@final
@dataclass(frozen=True)
class _DecodedChunk:
    """What one rank decodes at once: one group of channels, in one chunk along time.

    Attributes:
        columns: where the channels are to be in the result.
        steps: where the times are to be in the result.
        places: of the times in the source.
    """

    channels: list[Channel]
    columns: NDArray[np.intp]
    steps: NDArray[np.intp]
    time_indices: NDArray[np.intp]

    @property
    def planes(self) -> int:
        return len(self.columns) * len(self.steps)


def unshared_amplification(height: int, chunk_rows: int, bounds: Sequence[int]) -> float:
    """Rows that all ranks read if each reads for itself, relative to the globe's.

    Chunks begin at the pole where that is worse: stores may hold either pole first.
    """
    from_south = [height - bound for bound in reversed(bounds)]
    rows = max(_rows_read(height, chunk_rows, edges) for edges in (bounds, from_south))
    return rows / height


def _rows_read(height: int, chunk_rows: int, edges: Sequence[int]) -> int:
    total = 0
    for first, stop in pairwise(edges):
        if stop > first:
            chunks_end = min(height, -(-stop // chunk_rows) * chunk_rows)
            total += chunks_end - first // chunk_rows * chunk_rows
    return total


@final
class SharedSource(Source):
    """A source of which this rank is asked for its own band only, whose ranks share the reading.

    Every rank reads the same channels and places in the same order, in one thread. Chunks that are
    no taller than bands are read by each rank for itself, as are fields that don't change in time.
    After an error on one rank all of them have one, at this read or the next, and no rank reads on.

    Attributes:
        stopped: whether `stop` was called.
    """

    def __init__(self, source: Source, trade: ChunkExchange) -> None:
        self._source = source
        self._exchange = trade
        self._ranks = len(trade.bounds) - 1
        self._next_decoder = 0  # of the rank that decodes the next piece
        self._error: Exception | None = None
        self.stopped = False
        self.where = source.where
        self.times: Times = source.times
        self.latitude: NDArray[np.float64] = source.latitude
        self.longitude: NDArray[np.float64] = source.longitude
        self.variables: Mapping[str, VariableInfo] = source.variables
        self.counters = source.counters

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`."""
        return self._source.group_by_chunk(channels)

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        return self._source.times_together(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`."""
        return self._source.chunk_shape(channel)

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`."""
        return self._source.location(channel, place, row, column)

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """See `Source`."""
        return self._source.chunk_numbers(channel, places)

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        return self._source.description(variables)

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`; `rows` are this rank's.

        Raises:
            UserError: something cannot be read, on whichever rank.
        """
        if self._error is not None:
            raise self._error
        if not self.variables[channels[0].variable].timed:
            return self._source.read(channels, places, rows)
        try:
            return self._read(channels, np.arange(len(self.times))[places], rows)
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank can't go on, unless one of them was first."""
        if self._error is None:
            self._error = error
            known = isinstance(error, UserError)
            text = str(error) if known else f"{self.where}: {type(error).__name__}: {error}"
            with suppress(ExchangeStoppedError):
                self._exchange.gather_problems(text)

    def check_all_ranks(self) -> None:
        """Go on only if what has been read so far is well on every rank.

        Whoever met an error has to have told of it by `fail`: else the others would take what they
        have read, and wait elsewhere for a rank that waits for them here.

        Raises:
            UserError: the first problem of the others.
        """
        if self._error is not None:
            raise self._error
        self._raise_any_problem()

    def stop(self) -> None:
        """Wait for the others no longer; there is no reading on."""
        self.stopped = True
        self._exchange.stop()

    def _read(self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice) -> Fields:
        first, stop = self._exchange.bounds[self._exchange.rank : self._exchange.rank + 2]
        if (rows.start, rows.stop) != (first, stop):
            raise ValueError(f"this rank shares the reading of rows {first} to {stop}, not {rows}")
        shape = (len(places), len(channels), stop - first, self.grid[1])
        fields = np.empty(shape, dtype=np.float32)
        shared = []
        for piece in self._pieces(channels, places):
            if self._is_shared(piece.channels[0]):
                shared.append(piece)
            else:
                own = self._source.read(piece.channels, as_slice(piece.time_indices), rows)
                fields[np.ix_(piece.steps, piece.columns)] = own
        for start in range(0, len(shared), self._ranks):
            self._exchange_pieces(shared[start : start + self._ranks], fields)
        return fields

    def _pieces(self, channels: Sequence[Channel], places: NDArray[np.intp]) -> list[_DecodedChunk]:
        columns = {channel: column for column, channel in enumerate(channels)}
        found = []
        for group in self._source.group_by_chunk(channels):
            chunks = self._source.chunk_numbers(group[0], places)
            for chunk in dict.fromkeys(chunks.tolist()):
                steps = np.flatnonzero(chunks == chunk)
                at = np.array([columns[channel] for channel in group])
                found.append(_DecodedChunk(group, at, steps, places[steps]))
        return found

    def _is_shared(self, channel: Channel) -> bool:
        chunk_rows = self._source.chunk_shape(channel)[2]
        return (
            unshared_amplification(self.grid[0], chunk_rows, self._exchange.bounds)
            > SHARING_THRESHOLD
        )

    def _exchange_pieces(self, pieces: Sequence[_DecodedChunk], fields: Fields) -> None:
        """Have each piece decoded by another rank, the next one in turn, and take all bands.

        A rank holds one decoded piece at a time, twice while it is put in order for sending.
        """
        dealt = {(self._next_decoder + n) % self._ranks: piece for n, piece in enumerate(pieces)}
        self._next_decoder += len(pieces)
        mine = dealt.get(self._exchange.rank)
        parcels = self._pack_bands(mine)
        self._raise_any_problem()
        columns = self.grid[1]
        heights = np.diff(self._exchange.bounds) * columns
        sizes = [mine.planes * int(height) if mine else 0 for height in heights]
        own = int(heights[self._exchange.rank])
        coming = [dealt[rank].planes * own if rank in dealt else 0 for rank in range(self._ranks)]
        bands = self._exchange.all_to_all(parcels, sizes, coming)
        del parcels
        for rank, piece in dealt.items():
            shape = (len(piece.steps), len(piece.columns), *fields.shape[2:])
            fields[np.ix_(piece.steps, piece.columns)] = bands[rank].reshape(shape)

    def _pack_bands(self, piece: _DecodedChunk | None) -> Fields:
        """The whole globe of a piece, decoded, band after band."""
        if piece is None:
            return np.empty(0, dtype=np.float32)
        whole = self._source.read(
            piece.channels, as_slice(piece.time_indices), slice(0, self.grid[0])
        )
        bands = [whole[:, :, first:stop].ravel() for first, stop in pairwise(self._exchange.bounds)]
        return np.concatenate(bands)

    def _raise_any_problem(self) -> None:
        """Go on only if every rank can.

        Raises:
            UserError: the first problem of the others.
        """
        problem = next(filter(None, self._exchange.gather_problems("")), None)
        if problem is not None:
            self._error = UserError(problem)
            raise self._error

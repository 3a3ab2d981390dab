"""Shares the reading of a store among ranks: each decodes some chunks and sends bands to the rest.

This pays for stores whose chunks span more rows than a band: without it, every rank would decode
nearly everything and keep little of it.

A read of `SharedSource`, on every rank alike:

1. The requested fields are split into pieces: one group of channels in one chunk along time.
2. Pieces with chunks no taller than bands are read by every rank for itself.
3. Each rank decodes one of the other pieces per round, on the globe.
4. The ranks exchange error messages (`gather_problems`), and stop together if there is one.
5. One `all_to_all` per round gives every rank its band of every piece.

Every rank enters 4 and 5 equally often and in the same order, or the exchange would hang. This is
why a rank that fails still takes part in one `gather_problems`, by `fail`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.bands import unshared_amplification
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.source import Indexer, Source, SourceWrapper, as_slice
from credit_dp.errors import UserError

SHARING_THRESHOLD = 1.05  # reading is shared above this amplification


class ChunkExchange(Protocol):
    """The collectives of the ranks that share reading; all ranks call them in the same order."""

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""
        ...

    @property
    def bounds(self) -> Sequence[int]:
        """Return the edges of all bands: rank r has the rows `bounds[r]` to `bounds[r + 1] - 1`."""
        ...

    def gather_problems(self, problem: str) -> list[str]:
        """Return every rank's error message in rank order, empty for none: an all-gather."""
        ...

    def all_to_all(
        self, send: FieldArray, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[FieldArray]:
        """Send each rank its part of `send`, and return the parts received, in rank order.

        Shapes:
            `send`: the parts one after the other, flat, with `send_sizes` entries each. The
            results are flat, with `receive_sizes` entries each.
        """
        ...

    def stop(self) -> None:
        """Wake this rank's reading thread; it gets an `ExchangeStoppedError` in its collective."""
        ...


class ExchangeStoppedError(Exception):
    """The exchange was stopped while a thread waited in it."""


@final
@dataclass(frozen=True)
class _DecodedChunk:
    """The unit of decoding: one group of channels in one chunk along time.

    Attributes:
        columns: positions of the channels in the result.
        steps: positions of the times in the result.
        time_indices: indices of the times in the source.
    """

    channels: list[Channel]
    columns: NDArray[np.intp]
    steps: NDArray[np.intp]
    time_indices: NDArray[np.intp]

    @property
    def planes(self) -> int:
        """Return the number of two-dimensional fields."""
        return len(self.columns) * len(self.steps)


@final
@dataclass
class _SharedState:
    """What the reads of all members have in common.

    Attributes:
        next_decoder: the rank that decodes the next piece. It is kept between reads, so that reads
            of few pieces don't all go to the first ranks, and is the same on all ranks, as they
            read the same pieces.
        error: of this rank, or of another.
        stopped: whether nothing is read any more.
    """

    next_decoder: int = 0
    error: Exception | None = None
    stopped: bool = False


@final
class SharedSource(SourceWrapper):
    """A source that reads one rank's band, with the work of decoding shared among ranks.

    Every rank reads the same channels and times in the same order, in one thread. Fields without
    a time, and chunks that are no taller than bands, are read by each rank for itself. After an
    error on one rank all ranks raise one, in this read or the next, and none reads on.
    """

    def __init__(self, source: Source, exchange: ChunkExchange) -> None:
        super().__init__(source)
        self._exchange = exchange
        self._ranks = len(exchange.bounds) - 1
        self._state = _SharedState()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._state.stopped

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read this rank's band `rows` of chunks that the ranks decode in turn."""
        if self._state.error is not None:
            raise self._state.error
        # Without collectives, as on every other rank.
        if not self.variables[channels[0].variable].has_time:
            return self._source.read(channels, times, rows)
        try:
            return self._read(channels, np.arange(len(self.times))[times], rows)
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Report an error of this rank to the others, unless an error is known already."""
        if self._state.error is None:
            self._state.error = error
            is_user_error = isinstance(error, UserError)
            text = str(error) if is_user_error else f"{self.where}: {type(error).__name__}: {error}"
            # The collective that the other ranks are in, or enter next, is a gather_problems().
            with suppress(ExchangeStoppedError):
                self._exchange.gather_problems(text)

    def check_all_ranks(self) -> None:
        """Raise an error unless all reads so far succeeded on every rank.

        A rank that met an error must have called `fail`. Otherwise the others would use what they
        have read and wait for it in a collective elsewhere, while it waits for them here.
        """
        if self._state.error is not None:
            raise self._state.error
        self._raise_any_problem()

    def stop(self) -> None:
        """Stop waiting for other ranks; nothing can be read afterwards."""
        self._state.stopped = True
        self._exchange.stop()

    def _read(
        self, channels: Sequence[Channel], time_indices: NDArray[np.intp], rows: slice
    ) -> FieldArray:
        first, stop = self._exchange.bounds[self._exchange.rank : self._exchange.rank + 2]
        if (rows.start, rows.stop) != (first, stop):
            raise ValueError(f"this rank shares the reading of rows {first} to {stop}, not {rows}")
        shape = (len(time_indices), len(channels), stop - first, self.grid[1])
        fields = np.empty(shape, dtype=np.float32)
        shared = []
        for piece in self._pieces(channels, time_indices):
            if self._is_shared(piece.channels[0]):
                shared.append(piece)
            else:
                values = self._source.read(piece.channels, as_slice(piece.time_indices), rows)
                # Steps and columns of a piece need not be adjacent: `ix_` selects their product.
                fields[np.ix_(piece.steps, piece.columns)] = values
        for start in range(0, len(shared), self._ranks):
            self._exchange_pieces(shared[start : start + self._ranks], fields)
        return fields

    def _pieces(
        self, channels: Sequence[Channel], time_indices: NDArray[np.intp]
    ) -> list[_DecodedChunk]:
        columns = {channel: column for column, channel in enumerate(channels)}
        pieces = []
        for group in self._source.group_by_chunk(channels):
            chunks = self._source.chunk_numbers(group[0], time_indices)
            # In order of first use, so that all ranks have the pieces in the same order.
            for chunk in dict.fromkeys(chunks.tolist()):
                steps = np.flatnonzero(chunks == chunk)
                positions = np.array([columns[channel] for channel in group])
                pieces.append(_DecodedChunk(group, positions, steps, time_indices[steps]))
        return pieces

    def _is_shared(self, channel: Channel) -> bool:
        chunk_rows = self._source.chunk_shape(channel)[2]
        return (
            unshared_amplification(self.grid[0], chunk_rows, self._exchange.bounds)
            > SHARING_THRESHOLD
        )

    def _exchange_pieces(self, pieces: Sequence[_DecodedChunk], fields: FieldArray) -> None:
        """Have each piece decoded by a different rank, and distribute the bands of all of them.

        A rank holds one decoded piece at a time, and a second copy of it while it is packed.
        """
        piece_of_rank = {
            (self._state.next_decoder + number) % self._ranks: piece
            for number, piece in enumerate(pieces)
        }
        self._state.next_decoder += len(pieces)
        local_piece = piece_of_rank.get(self._exchange.rank)
        send = self._pack_bands(local_piece)
        # Before any data is sent: a rank that failed to decode does not enter the all_to_all.
        self._raise_any_problem()
        band_sizes = np.diff(self._exchange.bounds) * self.grid[1]  # values of one field
        send_sizes = [local_piece.planes * int(size) if local_piece else 0 for size in band_sizes]
        local_size = int(band_sizes[self._exchange.rank])
        receive_sizes = [
            piece_of_rank[rank].planes * local_size if rank in piece_of_rank else 0
            for rank in range(self._ranks)
        ]
        bands = self._exchange.all_to_all(send, send_sizes, receive_sizes)
        del send  # it is as large as a piece
        for rank, piece in piece_of_rank.items():
            shape = (len(piece.steps), len(piece.columns), *fields.shape[2:])
            fields[np.ix_(piece.steps, piece.columns)] = bands[rank].reshape(shape)

    def _pack_bands(self, piece: _DecodedChunk | None) -> FieldArray:
        """Decode a piece on the globe and return its bands one after the other, flat."""
        if piece is None:
            return np.empty(0, dtype=np.float32)
        globe = self._source.read(
            piece.channels, as_slice(piece.time_indices), slice(0, self.grid[0])
        )
        bands = [globe[:, :, first:stop].ravel() for first, stop in pairwise(self._exchange.bounds)]
        return np.concatenate(bands)

    def _raise_any_problem(self) -> None:
        """Raise an error if any rank reports one."""
        problem = next(filter(None, self._exchange.gather_problems("")), None)
        if problem is not None:
            self._state.error = UserError(problem)
            raise self._state.error

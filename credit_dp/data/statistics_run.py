"""Computes the statistics of a store piece by piece, at once and so that it can go on after a kill.

Each finished piece is kept in a folder beside the result. What is merged in the end is read back
from there in one order, so that no interruption and no number of threads changes a bit of it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import final

from filelock import FileLock, Timeout

from credit_dp.data.moments import Moments
from credit_dp.data.piece_workers import Workers
from credit_dp.data.statistics import Pair, Statistics, merged, piece_moments
from credit_dp.data.statistics_file import StatisticsFile, made_from, strict_name, write_whole
from credit_dp.data.store import Store
from credit_dp.data.streaming import Piece, TrainingDates, all_pieces, stream
from credit_dp.errors import UserError

Done = Callable[[int], None]  # how many fields have been seen


@final
class StatisticsRun:
    """What is to be read for a file of statistics, and what of it has been.

    Attributes:
        fields: how many there are to be read, each one channel at one date.
        done: how many of them an earlier run has read.

    Raises:
        UserError: the file can't be written, another process is making it, or no date has one a
            step later.
    """

    def __init__(self, store: Store, path: Path, every: int = 1) -> None:
        self.store, self.path, self.every = store, path, every
        self.dates = TrainingDates.of(store, every)
        self.pieces = all_pieces(store, self.dates)
        self._folder = path.with_name(f"{path.name}.parts")
        self._name = strict_name(store, every)
        self._lock = FileLock(self._folder / "lock")
        self._take()
        self._found = {
            index: pairs
            for index, piece in enumerate(self.pieces)
            if (pairs := self._kept(index, piece)) is not None
        }
        self.fields = sum(map(_size, self.pieces))
        self.done = sum(_size(self.pieces[index]) for index in self._found)

    @property
    def left(self) -> list[Piece]:
        """The pieces that are still to be done."""
        return [piece for index, piece in enumerate(self.pieces) if index not in self._found]

    def run(self, workers: Workers, done: Done) -> StatisticsFile:
        """Do what is left, write the file and remove what was kept.

        Raises:
            UserError: a field cannot be read, a channel is constant, or the disk is full.
        """
        waiting = [index for index in range(len(self.pieces)) if index not in self._found]
        seen = self.done
        done(seen)
        for index, pairs in zip(waiting, workers.run(moments_of, self.left), strict=True):
            self._keep(index, pairs)
            self._found[index] = pairs
            seen += _size(self.pieces[index])
            done(seen)
        table = merged(self.store, self.pieces, [self._found[i] for i in range(len(self.pieces))])
        Statistics.of(table, self.store, self.store.config.store)
        result = StatisticsFile(made_from(self.store, self.every), table)
        result.save(self.path)
        self._lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)
        return result

    def close(self) -> None:
        """Let another process go on."""
        self._lock.release()

    def _take(self) -> None:
        """Make the folder, which tells before hours of reading that it can be written to."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UserError(
                f"{self.path}: another process is making it. Wait, or change out."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self._folder}: cannot be made ({error.strerror}). Change out."
            ) from error

    def _part(self, index: int) -> Path:
        return self._folder / f"{self._name}-{index:05}.json"

    def _keep(self, index: int, pairs: list[Pair]) -> None:
        numbers = [[values.numbers(), changes.numbers()] for values, changes in pairs]
        write_whole(self._part(index), json.dumps(numbers))

    def _kept(self, index: int, piece: Piece) -> list[Pair] | None:
        """What an earlier run found; None if it did not, or what it wrote is damaged."""
        try:
            numbers = json.loads(self._part(index).read_text())
            pairs = [(Moments(*map(float, v)), Moments(*map(float, c))) for v, c in numbers]
        except (OSError, ValueError, TypeError):
            return None
        return pairs if len(pairs) == len(piece.channels) else None


def moments_of(store: Store, dates: TrainingDates, piece: Piece) -> list[Pair]:
    """The moments of one piece."""
    return piece_moments(store, piece, stream(store, dates, piece))


def first_window(store: Store, dates: TrainingDates, piece: Piece) -> int:
    """Read and use the first fields of a piece, to see how long it takes: how many."""
    window = next(stream(store, dates, piece))
    piece_moments(store, piece, [window])
    return len(piece.channels) * len(window.fields)


def _size(piece: Piece) -> int:
    return len(piece.channels) * (piece.stop - piece.first)

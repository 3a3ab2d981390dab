"""The log of a run that is always there: a CSV file with one row for each logged step."""

import csv
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import final

from credit_dp.errors import UserError
from credit_dp.training.run_folder import write_whole, writing

COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")  # always there, and first

logger = logging.getLogger(__name__)

Row = Mapping[str, str]


@final
class CsvLog:
    """One row per logged step, on disk as soon as it is logged.

    A resumed run appends; rows after the step it resumes from are dropped first, since those steps
    are taken again. A number with a new name becomes a column, empty in the rows before.

    What can't be written, because the disk is full for instance, is lost: the first time is told,
    every row tries again, and the end tells how many are missing.

    Args:
        path: of the file.
        step: the one that training goes on after; 0 begins a new file.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.columns = list(COLUMNS)
        self.lost = 0
        self._last_kept: float = step
        self._begun = False
        try:
            self._rewrite([])
        except UserError as error:
            logger.warning("%s Training goes on; each logged step tries again.", error)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one row if possible; a column without a number stays empty."""
        row = {"step": str(step), **{name: repr(number) for name, number in numbers.items()}}
        new = [name for name in row if name not in self.columns]
        try:
            if new or not self._begun:
                self._rewrite(new, row)
            else:
                self._append(row)
        except UserError as error:
            if not self.lost:
                logger.warning("%s Training goes on; step %s is not in the log.", error, step)
            self.lost += 1

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Nothing: the final numbers have a file of their own."""

    def close(self) -> None:
        """Tell what is missing; the file is closed after each row."""
        if self.lost:
            logger.warning("%s: %s rows could not be written.", self.path, self.lost)

    def _append(self, row: Row) -> None:
        """Write a row at the end, whole or not at all."""
        left = as_csv([row], self.columns).encode()
        # Opened for each row and without a buffer: closing would try to write again what is in it.
        with writing(self.path), self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(end)
                raise

    def _rewrite(self, new: list[str], *rows: Row) -> None:
        """Write the whole file, with more columns and rows."""
        header, kept = read_rows(self.path) if self._last_kept else ([], [])
        kept = [row for row in kept if int(row["step"]) <= self._last_kept]
        columns = list(dict.fromkeys([*self.columns, *header, *new]))
        write_whole(self.path, ",".join(columns) + "\n" + as_csv([*kept, *rows], columns))
        self.columns, self._last_kept, self._begun = columns, float("inf"), True


def as_csv(rows: list[Row], columns: list[str]) -> str:
    """Rows as lines of a file with these columns."""
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """Header and rows of a log, without one that was cut off by a crash; nothing if it is no log.

    Raises:
        UserError: the file is there and can't be read.
    """
    if not path.exists():
        return [], []
    with writing(path):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    header, *rows = [*csv.reader(line for line in lines if line.endswith("\n"))] or [[]]
    if header[:1] != ["step"]:
        return [], []
    whole = [row for row in rows if len(row) == len(header) and row[0].isdecimal()]
    return header, [dict(zip(header, row, strict=True)) for row in whole]

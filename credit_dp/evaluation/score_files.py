"""The folder of a scorecard: written under another name and renamed, so that it is whole or not."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

from credit_dp.errors import UserError
from credit_dp.evaluation.score_page import page
from credit_dp.evaluation.scorecard import Scorecard


@final
class ScoreFolder:
    """Where scores are written, taken before anything is read: what can't be is told at once.

    Raises:
        UserError: it is there already, or can't be made.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._made: list[Path] = []
        try:
            if os.path.lexists(out):
                raise UserError(
                    f"{out}: exists already, and scores are not written over others. Change out, "
                    "or remove it."
                )
            self._temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
            self._made = [path for path in out.parents if not path.exists()]
            self._temporary.mkdir(parents=True)
        except OSError as error:
            self._remove_made()
            raise UserError(f"{out}: can't be made ({error.strerror}). Change out.") from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leave nothing behind if what is done inside fails."""
        try:
            yield
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._remove_made()

    def _remove_made(self) -> None:
        """Remove the folders made for it that hold nothing, innermost first."""
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    def write(self, card: Scorecard) -> None:
        """Write all files of a scorecard; see `write_files`."""
        self.write_files(
            {
                "scores.csv": card.csv(),
                "scores.json": card.json(),
                "spectra.csv": card.spectra_csv(),
                "scorecard.html": page(card),
            }
        )

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write all files, then give the folder its name.

        Raises:
            UserError: the disk is full, or the name was taken meanwhile.
        """
        try:
            for name, text in files.items():
                (self._temporary / name).write_text(text, encoding="utf-8")
            os.rename(self._temporary, self.out)
        except OSError as error:
            raise UserError(
                f"{self.out}: can't be written ({error.strerror}). Free space there or change out."
            ) from error

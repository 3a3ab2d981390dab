"""A log file for each rank, of everything that goes through `logging`, and of warnings."""

import contextlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO, final

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_to_file(folder: Path, rank: int, early: Iterable[logging.LogRecord] = ()) -> Iterator[None]:
    """Write `logs/rank-RANK.log` in a run's folder meanwhile, after what it has from earlier.

    The terminal shows what it showed before. The error that ends a run is in the file, too. That
    the file can't be written is one warning, and nothing else happens.

    Args:
        folder: of the run.
        rank: of this process.
        early: what was logged before there was a file.
    """
    path = folder / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LogFile(path, rank)
    except OSError as error:
        logger.warning("%s: no log is kept there (%s).", path, error.strerror or error)
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        stack.enter_context(listening(file))
        stack.enter_context(warnings_too(file))
        file.note(logging.INFO, "started as process %s on %s", os.getpid(), socket.gethostname())
        for record in early:
            file.handle(record)
        try:
            yield
        except BaseException:
            file.note(logging.ERROR, "ended by an error", error=True)
            raise
        file.note(logging.INFO, "ended")


@final
class LogFile(logging.FileHandler):
    """Lines with a time and a rank; a disk that is full is told once."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, encoding="utf-8")
        line = f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(line))
        self.told = False

    def note(self, level: int, message: str, *args: object, error: bool = False) -> None:
        """Write a line that nobody else is to see; with the error that is under way."""
        trace = sys.exc_info() if error else None
        self.handle(logging.LogRecord(__name__, level, "", 0, message, args, trace))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as it is called
        """Warn the others instead of showing a traceback for each line."""
        if not self.told:
            self.told = True
            logger.warning("%s: could not be written (%s).", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        """Write what waits, if that is possible."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def listening(file: LogFile) -> Iterator[None]:
    """Hear this package's loggers from INFO on, and all others; what else hears them stays so."""
    ours, root = logging.getLogger("credit_dp"), logging.getLogger()
    heard_by = [(handler, handler.level) for handler in ours.handlers]
    level = ours.level
    added: list[tuple[logging.Logger, logging.Handler]] = [(root, file)]
    if not ours.propagate:
        added.append((ours, file))
        for handler, own in heard_by:
            handler.setLevel(max(own, level))
        ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    if not root.handlers and logging.lastResort is not None:
        added.append((root, logging.lastResort))  # it shows what has no handler: now there is one
    for source, handler in added:
        source.addHandler(handler)
    try:
        yield
    finally:
        for source, handler in added:
            source.removeHandler(handler)
        for handler, own in heard_by:
            handler.setLevel(own)
        ours.setLevel(level)


@contextlib.contextmanager
def warnings_too(log: LogFile) -> Iterator[None]:
    """Write warnings that are shown into the file as well."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        shown(message, category, filename, lineno, file, line)
        text = warnings.formatwarning(message, category, filename, lineno, line)
        log.note(logging.WARNING, "%s", text.rstrip())

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown

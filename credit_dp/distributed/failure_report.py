"""Record how each rank ended, and report a failure on stderr: one line or one traceback."""

import contextlib
import faulthandler
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

from credit_dp.config import ParallelConfig
from credit_dp.files import write_text_atomic
from credit_dp.plain_text import printable

FIRST_RANK_SECONDS = 3.0  # by which other ranks report later than rank 0

_captures: list[list[str]] = []


@contextlib.contextmanager
def capture_reports() -> Iterator[list[str]]:
    """Collect the reports that this process writes meanwhile; stderr gets them as well."""
    lines: list[str] = []
    _captures.append(lines)
    try:
        yield lines
    finally:
        _captures.remove(lines)


def wait_for_first_rank(rank: int) -> None:
    """Wait a moment on all ranks but rank 0, so that an error of all ranks is reported by rank 0.

    If rank 0 has failed as well, the launcher ends this process during the wait. If it has not,
    this rank's error is the cause.
    """
    if rank > 0:
        time.sleep(FIRST_RANK_SECONDS)


def report_error(message: str) -> None:
    """Write `error:` and the message to stderr, in one line: line breaks become spaces."""
    _write(f"error: {' '.join(message.split())}\n")


def report_crash(text: str) -> None:
    """Write a text of several lines, such as a traceback, to stderr as it is."""
    _write(text if text.endswith("\n") else f"{text}\n")


def _write(text: str) -> None:
    text = printable(text)
    for lines in _captures:
        lines.append(text)
    sys.stderr.write(text)
    sys.stderr.flush()


@final
@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        kind: `returned`, `refused` (by a UserError) or `crashed`.
        text: line of the UserError, or traceback of the crash.
        time: when it ended, in nanoseconds: the earliest failure is the cause of the others.
    """

    rank: int
    kind: Literal["returned", "refused", "crashed"]
    code: int = 0
    text: str = ""
    time: int = 0


def write_outcome(folder: Path, outcome: RankOutcome) -> None:
    """Write the outcome atomically where the parent reads it."""
    path = folder / f"{outcome.rank}.json"
    write_text_atomic(path, json.dumps({**asdict(outcome), "time": time.time_ns()}))


def read_outcome(folder: Path, rank: int) -> RankOutcome | None:
    """Return the outcome that a rank wrote; None if it ended without writing one."""
    path = folder / f"{rank}.json"
    return RankOutcome(**json.loads(path.read_text())) if path.exists() else None


def record_abort(folder: Path, rank: int) -> None:
    """Let Python note in a file of the folder that this process aborts, just before it does."""
    with contextlib.suppress(FileNotFoundError):  # the parent has just ended, and so will this
        faulthandler.enable((folder / f"{rank}.abort").open("w"))  # which keeps the file open


def read_aborts(folder: Path) -> dict[int, int]:
    """Return when each rank that aborted did so, as `RankOutcome.time`."""
    found = {int(path.stem): path.stat() for path in folder.glob("*.abort")}
    return {rank: stat.st_mtime_ns for rank, stat in found.items() if stat.st_size}


def rank_name(rank: int, data: int, domain: int, ensemble: int = 1) -> str:
    """Return a rank with its mesh coordinates: `rank 5 (pipeline 1, data 0, domain 1)`.

    Args:
        ensemble: size of the mesh's ensemble axis, which is left out if it is 1.
    """
    rest, band = divmod(rank, domain)
    rest, share = divmod(rest, ensemble)
    stage, replica = divmod(rest, data)
    members = f", ensemble {share}" if ensemble > 1 else ""
    return f"rank {rank} (pipeline {stage}, data {replica}{members}, domain {band})"


def mesh_rank_name(rank: int, parallel: ParallelConfig) -> str:
    """Return the name of a rank with its coordinates on the configured mesh."""
    return rank_name(rank, parallel.data or 1, parallel.domain, parallel.ensemble)

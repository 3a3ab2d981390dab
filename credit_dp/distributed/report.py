"""How a rank ended, and what a failed run says on stderr: one line, or one traceback."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

FIRST_RANK_SECONDS = 3.0  # seconds that other ranks leave to rank 0

_captures: list[list[str]] = []


@contextlib.contextmanager
def capture_reports() -> Iterator[list[str]]:
    """Collect what this process says meanwhile about runs that fail; it is said nevertheless."""
    told: list[str] = []
    _captures.append(told)
    try:
        yield told
    finally:
        _captures.remove(told)


def wait_for_first_rank(rank: int) -> None:
    """Let rank 0 speak first, which knows most of what the others do.

    When it has failed as well, the launcher ends this process during the wait, and one voice is
    heard instead of all. When it has not, what this rank has to say is the only cause there is.
    """
    if rank > 0:
        time.sleep(FIRST_RANK_SECONDS)


def report_error(message: str) -> None:
    """`error:` and the message, on one line whatever the message holds."""
    _write(f"error: {' '.join(message.split())}\n")


def report_crash(text: str) -> None:
    """A traceback or a sentence, as it is."""
    _write(text if text.endswith("\n") else f"{text}\n")


def _write(text: str) -> None:
    for told in _captures:
        told.append(text)
    sys.stderr.write(text)
    sys.stderr.flush()


@final
@dataclass(frozen=True)
class RankOutcome:
    """The end of one rank.

    `kind`: `returned` (`code` is the exit code), `refused` (`text` is a UserError's line) or
    `crashed` (`text` is a traceback). `time` is in nanoseconds, to tell cause from consequence.
    """

    rank: int
    kind: Literal["returned", "refused", "crashed"]
    code: int = 0
    text: str = ""
    time: int = 0


def write_outcome(folder: Path, outcome: RankOutcome) -> None:
    """Leave the outcome where the parent looks; it appears whole or not at all."""
    path = folder / f"{outcome.rank}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({**asdict(outcome), "time": time.time_ns()}))
    os.replace(temporary, path)


def read_outcome(folder: Path, rank: int) -> RankOutcome | None:
    """What the rank left; None if it died without a word."""
    path = folder / f"{rank}.json"
    return RankOutcome(**json.loads(path.read_text())) if path.exists() else None


def rank_name(rank: int, data: int, domain: int) -> str:
    """`rank 5 (pipeline 1, data 0, domain 1)` on a mesh of so many data and domain ranks."""
    stage, rest = divmod(rank, data * domain)
    return f"rank {rank} (pipeline {stage}, data {rest // domain}, domain {rest % domain})"

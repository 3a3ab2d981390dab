"""`job.json` in the folder of each run of a sweep: what it was to do, and how it ended.

The process that starts a job's ranks writes it, so that it also tells of ranks that were killed.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, final

from credit_dp.launch.job_number import job_number
from credit_dp.launch.signals import PREEMPTED, Terminated
from credit_dp.training.run_folder import write_whole

State = Literal["running", "done", "failed", "preempted"]
FILE = "job.json"
SLURM_SAYS = ("srun: ", "slurmstepd: ")  # what follows from the cause


@final
@dataclass(frozen=True)
class JobRecord:
    """A run of a sweep. `cause` is one line; times are ISO 8601 in UTC."""

    overrides: tuple[str, ...]
    state: State
    started: str
    exit_code: int | None = None
    cause: str | None = None
    ended: str | None = None
    slurm_job: str | None = None


@final
class Ending:
    """How a job ends, to be told by whoever runs it; it counts as failed until then."""

    def __init__(self) -> None:
        self.code = 1
        self.cause: str | None = None


@contextlib.contextmanager
def recorded(folder: Path, overrides: Sequence[str]) -> Iterator[Ending]:
    """Keep the record of a job while it runs, and note how it ended.

    Raises:
        UserError: the folder cannot be written to.
    """
    record, ending = begin_record(folder, overrides), Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        ending.code, ending.cause = 130, "interrupted"
        raise
    except Terminated as stop:
        ending.code, ending.cause = stop.code, "terminated"
        raise
    finally:
        end_record(folder, record, ending.code, ending.cause)


def begin_record(folder: Path, overrides: Sequence[str]) -> JobRecord:
    """Note that a job runs from now on.

    Raises:
        UserError: the folder cannot be written to.
    """
    record = JobRecord(tuple(overrides), "running", now(), slurm_job=job_number(os.environ))
    write_record(folder, record)
    return record


def end_record(folder: Path, record: JobRecord, code: int, cause: str | None) -> None:
    """Note how a job has ended; only one that failed has a cause.

    Raises:
        UserError: the folder cannot be written to.
    """
    state: State = "failed"
    if code in (0, PREEMPTED):
        state = "preempted" if code else "done"
    cause = (cause or f"exit code {code}") if state == "failed" else None
    write_record(folder, replace(record, state=state, exit_code=code, cause=cause, ended=now()))


def write_record(folder: Path, record: JobRecord) -> None:
    """Write the record; readers see the old one or the new one.

    Raises:
        UserError: the folder cannot be written to.
    """
    write_whole(folder / FILE, json.dumps(asdict(record), indent=2) + "\n")


def read_overrides(path: Path) -> list[str] | None:
    """The overrides in such a file; None if there is none, or not a whole one."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["overrides"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return [str(text) for text in told] if isinstance(told, list) else None


def cause_of(told: str) -> str | None:
    """The line of what a program said that names the cause: `error: ...`, or its last one."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    own = [line for line in lines if not line.startswith(SLURM_SAYS)]
    return next((found[-1] for found in (named, own, lines) if found), None)


def now() -> str:
    """This moment, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

"""One job of a sweep as a program of its own, watched by the process that started it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from credit_dp.command.job_record import begin_record, cause_of, end_record
from credit_dp.command.overrides import quote
from credit_dp.launch.nursery import die_with_parent
from credit_dp.launch.signals import ASKING, PREEMPTED

LOG = "job.log"  # what the job says, in its folder


@final
class JobProcess:
    """A job that runs; its record is kept, and what it says goes to `job.log` in its folder.

    It has a session of its own: a terminal's Ctrl-C reaches this process alone, and dies with it.

    Raises:
        UserError: its folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.asked: set[int] = set()
        self.record = begin_record(folder, overrides)
        self.log = folder / LOG
        self.said_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=begin,
            )

    def poll(self) -> int | None:
        """The exit code if the job has ended, which is noted then, else None."""
        code = self.process.poll()
        return None if code is None else self.note_end(code)

    def wait(self) -> int:
        """Wait for the end of the job, and note it; the exit code."""
        return self.note_end(self.process.wait())

    def note_end(self, code: int) -> int:
        """Write down how the job ended, and return the exit code that a shell gives.

        A job that is asked to stop before it trains, or when it is through, ends at once with
        nothing to save: it counts as stopped, and not as failed. So does one that SIGUSR1 killed,
        which a queue sends, while it had no ear for it.
        """
        code = code if code >= 0 else 128 - code
        if code - 128 in (*self.asked, signal.SIGUSR1):
            code = PREEMPTED
        end_record(self.folder, self.record, code, self.cause())
        return code

    def cause(self) -> str | None:
        """The line of what the job has said this time that names a cause."""
        with self.log.open("rb") as log:
            log.seek(self.said_before)
            return cause_of(log.read().decode(errors="replace"))

    def send(self, number: int) -> None:
        """Send the job a signal, which it hands on to its ranks."""
        if number in ASKING:
            self.asked.add(number)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the job with all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def begin() -> None:
    """What the job's process does before it becomes the job."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it hears all signals, whoever started it


def train_command(folder: Path, texts: Sequence[str]) -> list[str]:
    """The command that runs a job in its folder, or goes on with it."""
    keys = [*texts, f"run.dir={quote(str(folder))}", "resume=auto"]
    return [sys.executable, "-m", "credit_dp", "train", *keys]


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One in which another Python finds the package that runs here, and says things at once."""
    here = str(Path(__file__).resolve().parents[2])
    found = [here, environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in found if path)
    return {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

"""What a process asks SLURM: its job, the time that is left, and the output of any command.

Scripts for other schedulers tell the end of their job by the variable `CREDIT_DP_JOB_END`.
"""

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import final

from credit_dp.errors import UserError

# Seconds in which a SLURM command has to answer. This is longer than SLURM's own limit of a message
# (MessageTimeout, 10 s by default), as a busy controller may be slow and a job that can't be
# requeued is lost. It is short enough to notice a controller that is down.
SLURM_TIMEOUT = 60.0


def run_slurm_command(command: Sequence[str]) -> str:
    """Run `squeue`, `scontrol` or the like, and return its output.

    Raises:
        UserError: it is not installed, fails, or does not answer; one line without a key.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} fails (no answer within {SLURM_TIMEOUT:g} s)") from error
    except OSError as error:
        raise UserError(f"{command[0]} fails ({error})") from error
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise UserError(f"{command[0]} fails ({reason})")
    return result.stdout


def slurm_job_id(environment: Mapping[str, str]) -> str | None:
    """Return `7`, or `7_2` for a job of an array; None outside SLURM."""
    # SLURM_JOB_ID of an array's last job is the id of the whole array: `scontrol requeue` would
    # queue all its jobs again, finished ones included.
    if environment.get("SLURM_ARRAY_JOB_ID") and environment.get("SLURM_ARRAY_TASK_ID"):
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID") or None


MARGIN_SECONDS = 120.0  # before the time limit: for the rest of a step and a checkpoint
MARGIN_SHARE = 0.1  # of the time that is left: a smaller margin for a short job
LEAST_MARGIN_SECONDS = 15.0  # any checkpoint can take this long on a busy machine
UNIT_SECONDS = (1, 60, 3600, 86400)  # of `[days-[hours:]]minutes:seconds`, from the right


@final
class TimeLimit:
    """The time at which a run has to stop to save a checkpoint within its job.

    Attributes:
        deadline: on the monotonic clock; None if there is no limit.
    """

    def __init__(self, seconds_left: float | None) -> None:
        self.deadline: float | None = None
        if seconds_left is not None:
            margin = min(MARGIN_SECONDS, max(LEAST_MARGIN_SECONDS, MARGIN_SHARE * seconds_left))
            self.deadline = time.monotonic() + seconds_left - margin

    def reached(self) -> bool:
        """Whether the run has to stop now."""
        return self.deadline is not None and time.monotonic() >= self.deadline


JOB_END = "CREDIT_DP_JOB_END"  # variable with the end of the job, in seconds since 1970


def job_time_limit() -> TimeLimit:
    """Return the time limit of the job of this process."""
    return TimeLimit(seconds_left(os.environ))


def seconds_left(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the end of this job; None outside a job or if there is no limit.

    Also None if SLURM does not answer.
    """
    end = environment.get(JOB_END, "")
    if end.isdigit():
        return max(0.0, int(end) - time.time())
    job = slurm_job_id(environment)
    if job is None:
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():  # newer versions of SLURM set it
        return max(0.0, int(end) - time.time())
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    try:
        return parse_duration(run_slurm_command(command).strip())
    except UserError:
        return None


def parse_duration(text: str) -> float | None:
    """Return the seconds of `1-02:03:04`, `2:03:04` or `3:04`; None for `UNLIMITED` and others."""
    if not re.fullmatch(r"(\d+-)?(\d+:){1,2}\d+", text):
        return None
    parts = reversed(re.split("[-:]", text))
    return float(sum(int(part) * unit for part, unit in zip(parts, UNIT_SECONDS, strict=False)))

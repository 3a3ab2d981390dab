"""When the job that this process is part of ends, so that a run can save what it has before."""

import os
import re
import subprocess
import time
from collections.abc import Mapping
from typing import final

from credit_dp.launch.job_number import job_number

MARGIN = 120.0  # seconds before the end: for the rest of a step and a checkpoint
SHARE = 0.1  # of a short job's time, which may be less
LEAST = 15.0  # seconds that a checkpoint of anything takes on a busy machine
PATIENCE = 10.0  # seconds for SLURM to answer
UNITS = (1, 60, 3600, 86400)  # of `[days-[hours:]]minutes:seconds`, from the right


@final
class TimeLimit:
    """The moment at which a run of a job has to stop to be saved in time; never outside a job."""

    def __init__(self, seconds_left: float | None) -> None:
        self.until: float | None = None
        if seconds_left is not None:
            margin = min(MARGIN, max(LEAST, SHARE * seconds_left))
            self.until = time.monotonic() + seconds_left - margin

    def reached(self) -> bool:
        """Whether it is time to stop."""
        return self.until is not None and time.monotonic() >= self.until


def time_limit() -> TimeLimit:
    """Of the job that this process is part of."""
    return TimeLimit(seconds_left(os.environ))


def seconds_left(environment: Mapping[str, str]) -> float | None:
    """Until SLURM ends this job; None outside of one, without a limit, or if it can't be told."""
    job = job_number(environment)
    if job is None:
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():  # set by newer versions
        return max(0.0, int(end) - time.time())
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_duration(done.stdout.strip())


def read_duration(text: str) -> float | None:
    """Seconds of `1-02:03:04`, `2:03:04` or `3:04`; None for `UNLIMITED` and the like."""
    if not re.fullmatch(r"(\d+-)?(\d+:){1,2}\d+", text):
        return None
    parts = reversed(re.split("[-:]", text))
    return float(sum(int(part) * unit for part, unit in zip(parts, UNITS, strict=False)))

"""What a SLURM job of a sweep does: run its ranks under srun, and queue itself again if stopped.

Submitit pickles the name of `run_job` with texts and numbers, and nothing else: this is all that is
loaded in the job.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from credit_dp.command.job_process import JobProcess, job_environment, train_command
from credit_dp.launch.job_number import job_number
from credit_dp.launch.signals import PREEMPTED, heeding

PATIENCE = 60.0  # seconds for scontrol


def run_job(
    folder: str, overrides: Sequence[str], more: Sequence[str], step: Sequence[str], requeues: int
) -> None:
    """Run one job of the array.

    Args:
        folder: of the job.
        overrides: of the job.
        more: of its command line, which says nothing of what it computes.
        step: options of srun, which place the ranks.
        requeues: how often the job may be queued again.

    Raises:
        SystemExit: with the exit code of the ranks, so that SLURM knows it.
    """
    path = Path(folder)
    command = [*train_command(path, overrides), *more]
    environment = job_environment(os.environ)
    job = JobProcess(path, overrides, ["srun", *step, *command], environment)
    with heeding(job.send):  # SIGUSR1; submitit takes SIGTERM, which srun gets besides
        code = job.wait()
    number = job_number(os.environ)
    if code == PREEMPTED and number is not None and may_run_again(number, requeues):
        subprocess.run(["scontrol", "requeue", number], timeout=PATIENCE, check=True)
    sys.exit(code)


def may_run_again(job: str, requeues: int) -> bool:
    """Whether the job was stopped while it could go on: not cancelled, and not again and again."""
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= requeues:
        return False
    told = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return " JobState=RUNNING " in told.stdout

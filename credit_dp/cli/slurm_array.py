"""`hydra/launcher=slurm`: submit the jobs of a sweep as one array of SLURM, with submitit.

`submit` places the ranks of each job and hands the array to submitit, which writes the batch script
and starts `run_job` in each job. That starts the ranks with srun, and queues the job again if they
were stopped.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from credit_dp import checks
from credit_dp.cli.check_run import check_prepared
from credit_dp.cli.output import print_lines
from credit_dp.cli.sweep_jobs import Job, JobProcess, write_submission
from credit_dp.config import by_dotted_key
from credit_dp.config.launchers import SlurmLauncherConfig
from credit_dp.distributed.forkserver import interpreter
from credit_dp.distributed.placement import Placement, PlacementRequest, place_ranks, slurm_nodes
from credit_dp.distributed.signals import EXIT_PREEMPTED, handle_stop
from credit_dp.distributed.slurm import run_slurm_command, slurm_job_id
from credit_dp.errors import UserError, counted
from credit_dp.sweeps.read import SUBMISSION_FILE, read_table

PLACEMENT_KEYS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node")
# Parameters that submitit has for all executors; it expects a prefix `slurm_` before all others.
COMMON_KEYS = (*PLACEMENT_KEYS, "timeout_min", "mem_gb", "name", "stderr_to_stdout")
OWN_KEYS = ("max_num_timeout", "signal_delay_s")  # handled here


def drop_queued(jobs: Sequence[Job], settings: SlurmLauncherConfig, folder: Path) -> list[Job]:
    """Return the jobs that are not in the queue, neither waiting nor running."""
    checks.one_line("run.dir", str(folder.absolute()))
    for key, value in by_dotted_key(asdict(settings)).items():
        if key != "setup":
            checks.one_line(f"hydra.launcher.{key}", str(value))
    if shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm: needs sbatch, which is not here. Start it where jobs are "
            "submitted, or use hydra/launcher=local."
        )
    queued = queued_job_ids()
    remaining = [job for job in jobs if submitted_job_id(job) not in queued]
    if len(remaining) < len(jobs):
        print_lines(f"in the queue already: {counted(len(jobs) - len(remaining), 'job')}")
    return remaining


def submitted_job_id(job: Job) -> str | None:
    """Return the number under which a job was submitted; None if it was not."""
    number = read_table(job.folder / SUBMISSION_FILE).get("slurm_job")
    return None if number is None else str(number)


def queued_job_ids() -> set[str]:
    """Return the numbers of all jobs in the user's queue; a job of an array has one like `7_2`."""
    command = ["squeue", "--noheader", "--array", "--me", "--format", "%i"]
    try:
        return set(run_slurm_command(command).split())
    except UserError as error:
        raise UserError(f"hydra/launcher=slurm: {error}") from error


def submit(
    jobs: Sequence[Job], options: Sequence[str], settings: SlurmLauncherConfig, folder: Path
) -> int:
    """Submit jobs as one array; return the exit code.

    Raises:
        UserError: a job fits on no node, would compute statistics on several, or the queue refuses
            them; nothing has been submitted.
    """
    placements = place_jobs(jobs, settings)
    tasks = [
        (str(job.folder.absolute()), srun_command(job, placement, options))
        for job, placement in zip(jobs, placements, strict=True)
    ]
    for job in jobs:
        write_submission(job)
    job_ids = submit_array(tasks, placements, settings, folder)
    for job, job_id in zip(jobs, job_ids, strict=True):
        write_submission(job, job_id)  # so that it is not submitted twice
    array_id = job_ids[0].partition("_")[0]
    print_lines(
        f"submitted {counted(len(jobs), 'job')} as {array_id} "
        f"(squeue --jobs {array_id}; scancel {array_id}); "
        f"each writes to its folder in {folder}. The same command again submits unfinished jobs."
    )
    return 0


def place_jobs(jobs: Sequence[Job], settings: SlurmLauncherConfig) -> list[Placement]:
    """Return the placement of each job's ranks on the nodes of the partition."""
    available = slurm_nodes(settings.partition)
    request = PlacementRequest(
        nodes=settings.nodes or None,
        tasks_per_node=settings.tasks_per_node or None,
        cpus_per_task=settings.cpus_per_task,
        spread=bool(settings.nodes and settings.tasks_per_node),
        spread_hint="hydra.launcher.nodes with hydra.launcher.tasks_per_node",
    )
    placements = [place_ranks(job.config, available, request) for job in jobs]
    for job, placement in zip(jobs, placements, strict=True):
        if placement.nodes > 1:
            check_prepared(job.config, job.overrides)
    if settings.gpus_per_node is None:
        return placements
    return [replace(each, gpus_per_node=settings.gpus_per_node) for each in placements]


def srun_command(job: Job, placement: Placement, options: Sequence[str]) -> list[str]:
    """Return the command that starts the ranks of one job, numbered in the order of the nodes.

    Without `parallel.data` a step of one rank would take all GPUs that it sees. Not
    `--unbuffered`: it gives the ranks a terminal, and they would draw progress bars.
    """
    data = [] if job.config.parallel.data is not None else [f"parallel.data={placement.data}"]
    return [
        "srun",
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.ranks}",
        f"--ntasks-per-node={placement.tasks_per_node}",
        f"--cpus-per-task={placement.cpus_per_task}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        *(*job.command, *data, *options),
    ]


def submit_array(
    tasks: Sequence[tuple[Any, ...]],
    placements: Sequence[Placement],
    settings: SlurmLauncherConfig,
    folder: Path,
) -> list[str]:
    """Submit a call of `run_job` for each task; return the number of each job.

    All jobs of an array have the same resources: what the largest needs.
    """
    import submitit  # an extra

    package_parent = shlex.quote(str(Path(__file__).resolve().parents[2]))
    largest = {key: max(getattr(each, key) for each in placements) for key in PLACEMENT_KEYS}
    parameters = asdict(settings) | largest
    parameters |= {
        # `run_job` runs once, in the batch script, and starts the ranks with its own srun.
        "use_srun": False,
        "setup": [
            f"export PYTHONPATH={package_parent}${{PYTHONPATH:+:$PYTHONPATH}}",
            "trap : TERM USR1",  # bash stays alive; the program handles them
            *(settings.setup or []),
        ],
        "additional_parameters": {
            # Not `B:`, which signals only the batch script: the ranks get it and save. `run_job`
            # waits for their exit code.
            "signal": f"USR1@{settings.signal_delay_s}",
            "requeue": True,
            **settings.additional_parameters,
        },
        "gpus_per_node": largest["gpus_per_node"] or None,
    }
    executor = submitit.AutoExecutor(
        folder=folder / ".submitit",
        cluster="slurm",
        slurm_python=shlex.join(interpreter()),
    )
    try:
        executor.update_parameters(
            **{
                key if key in COMMON_KEYS else f"slurm_{key}": value
                for key, value in parameters.items()
                if key not in OWN_KEYS and value is not None
            }
        )
        requeues = settings.max_num_timeout
        jobs = executor.map_array(run_job, *zip(*tasks, strict=True), [requeues] * len(tasks))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hydra/launcher=slurm: the jobs were not accepted ({reason})") from error
    return [str(job.job_id) for job in jobs]


def run_job(folder: str, command: Sequence[str], requeues: int) -> None:
    """Run one job of the array; submitit calls this in the job.

    Raises:
        SystemExit: with the exit code of the ranks, so that SLURM records it.
        UserError: the job could not be requeued.
    """
    job = JobProcess(Path(folder), command, os.environ)
    with handle_stop(job.send):  # SIGUSR1; submitit handles SIGTERM, which srun gets as well
        code = job.wait()
    job_id = slurm_job_id(os.environ)
    if code == EXIT_PREEMPTED and job_id is not None and may_requeue(job_id, requeues):
        run_slurm_command(["scontrol", "requeue", job_id])
    sys.exit(code)


def may_requeue(job: str, requeues: int) -> bool:
    """Whether a stopped job may be requeued: it is not cancelled, and has requeues left.

    If SLURM does not answer, which a line reports, it may not.
    """
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) >= requeues:
        return False
    try:
        output = run_slurm_command(["scontrol", "show", "job", "--oneliner", job])
    except UserError as error:
        sys.stderr.write(f"error: not requeued: {error}\n")
        return False
    return " JobState=RUNNING " in output

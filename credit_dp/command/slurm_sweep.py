"""`hydra/launcher=slurm`: the jobs of a sweep as one SLURM job array.

An array has one request for all its jobs: that of the largest mesh. Each job runs its own mesh in
it, as a step of its size.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from credit_dp.command.slurm_job import run_job
from credit_dp.command.sweep_jobs import SUBMITTED, Job, note_job
from credit_dp.command.tell import tell
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch.placement import Nodes, Placement, Wish, place
from credit_dp.launch.slurm_nodes import slurm_nodes

Settings = Mapping[str, Any]

SPREAD = "hydra.launcher.nodes with hydra.launcher.tasks_per_node"
PATIENCE = 60.0  # seconds for squeue
DERIVED = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node")
OURS = ("_target_", "submitit_folder", "max_num_timeout", "signal_delay_s", "additional_parameters")
OF_ALL_EXECUTORS = ("timeout_min", "mem_gb", "name", "stderr_to_stdout")  # others are SLURM's own


def submit(
    jobs: Sequence[Job], dashes: Sequence[str], settings: Mapping[str, Any], to: Path
) -> int:
    """Submit jobs as one array; the exit code.

    Args:
        jobs: of the sweep that are neither done nor in the queue.
        dashes: of the command line.
        settings: `hydra.launcher`.
        to: the folder of the sweep.

    Raises:
        UserError: a job fits no node, or the queue refuses them; nothing has been submitted.
    """
    check_notice(settings)
    has = slurm_nodes(settings["partition"])
    placements = [place_job(job, has, settings) for job in jobs]
    tasks = [
        (
            str(job.folder.absolute()),
            list(job.overrides),
            [*definite(job.config, placement), *dashes],
            step_options(placement),
            int(settings["max_num_timeout"]),
        )
        for job, placement in zip(jobs, placements, strict=True)
    ]
    array = submit_array(tasks, request(placements, settings), settings, to)
    for job, name in zip(jobs, array, strict=True):
        note_job(job, name)  # so that it is not submitted twice
    number = array[0].partition("_")[0]
    tell(
        f"submitted {len(jobs)} jobs as {number} (squeue --jobs {number}; scancel {number}); "
        f"each writes to its folder in {to}. The same command again runs what is not done."
    )
    return 0


def leave_out_queued(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that are not in the queue, waiting or running.

    Raises:
        UserError: there is no SLURM here, or it does not answer.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm: needs sbatch, which is not here. Start it where jobs are "
            "submitted, or use hydra/launcher=local."
        )
    queued = in_queue()
    left = [job for job in jobs if queued_as(job) not in queued]
    if len(left) < len(jobs):
        tell(f"{len(jobs) - len(left)} jobs are in the queue already")
    return left


def check_notice(settings: Settings) -> None:
    """Refuse jobs that would be told to end as soon as they begin, and begin again, and so on.

    Raises:
        UserError: the notice is too long for their time.
    """
    notice, time = settings["signal_delay_s"], settings["timeout_min"] * 60
    if notice > time / 2:
        raise UserError(
            f"hydra.launcher.signal_delay_s: {notice} s before the end of a job is too soon where "
            f"hydra.launcher.timeout_min gives it {time} s. Lower it, or give jobs more time."
        )


def place_job(job: Job, has: Nodes, settings: Settings) -> Placement:
    """Where the ranks of one job go.

    Raises:
        UserError: they fit on no node.
    """
    nodes, tasks = settings["nodes"] or None, settings["tasks_per_node"] or None
    wish = Wish(nodes, tasks, settings["cpus_per_task"], bool(nodes and tasks), SPREAD)
    placement = place(job.config, has, wish)
    gpus = settings["gpus_per_node"]
    return placement if gpus is None else replace(placement, gpus_per_node=int(gpus))


def definite(config: Config, placement: Placement) -> list[str]:
    """What the placement has settled, so that a step of one rank does not take all GPUs it sees."""
    return [] if config.parallel.data is not None else [f"parallel.data={placement.data}"]


def step_options(placement: Placement) -> list[str]:
    """Options of srun for the ranks of one job; they come in the order of the nodes.

    Without `--unbuffered`, which gives the ranks a terminal, and so bars in place of lines.
    """
    return [
        f"--nodes={placement.nodes}",
        f"--ntasks={placement.ranks}",
        f"--ntasks-per-node={placement.tasks_per_node}",
        f"--cpus-per-task={placement.cpus_per_task}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
    ]


def request(placements: Sequence[Placement], settings: Settings) -> dict[str, Any]:
    """What the array asks for: enough for each of its jobs."""
    most = {key: max(getattr(place, key) for place in placements) for key in DERIVED}
    options = {
        # To the ranks themselves: the program that watches them sees how they end.
        "signal": f"USR1@{settings['signal_delay_s']}",
        "requeue": True,
        **settings["additional_parameters"],
    }
    if not most["gpus_per_node"]:
        del most["gpus_per_node"]
    return {**most, "additional_parameters": options}


def submit_array(
    tasks: Sequence[tuple[Any, ...]],
    asked: Mapping[str, Any],
    settings: Settings,
    to: Path,
) -> list[str]:
    """Hand tasks to submitit; the number of each job.

    Raises:
        UserError: the queue refuses them.
    """
    import submitit  # an extra

    executor = submitit.AutoExecutor(folder=to / ".submitit", cluster="slurm")
    here = shlex.quote(str(Path(__file__).resolve().parents[2]))
    setup = [
        f"export PYTHONPATH={here}${{PYTHONPATH:+:$PYTHONPATH}}",
        "trap : TERM USR1",  # bash waits for the program, which heeds them
        *(settings["setup"] or []),
    ]
    given = {k: v for k, v in settings.items() if k not in (*OURS, *DERIVED) and v is not None}
    given |= {**asked, "setup": setup, "use_srun": False}
    common = (*OF_ALL_EXECUTORS, *DERIVED)
    executor.update_parameters(**{k if k in common else f"slurm_{k}": v for k, v in given.items()})
    try:
        jobs = executor.map_array(run_job, *zip(*tasks, strict=True))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hydra/launcher=slurm: the jobs were not taken ({reason})") from error
    return [str(job.job_id) for job in jobs]


def queued_as(job: Job) -> str | None:
    """The number under which a job was submitted, if it was."""
    try:
        return str(json.loads((job.folder / SUBMITTED).read_text())["slurm_job"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def in_queue() -> set[str]:
    """The numbers of all jobs in the queue, those of arrays as `7_2`.

    Raises:
        UserError: SLURM does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--me", "--format", "%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"hydra/launcher=slurm: squeue fails ({' '.join(said.split())})") from error
    return set(done.stdout.split())

"""`hydra/launcher=local` and `slurm`: run a sweep's jobs on this machine or as a job array."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, read_write

from credit_dp.cli.compose import (
    Composer,
    check_run_config,
    check_unlocked,
    explain_folder_errors,
    folder_key,
)
from credit_dp.cli.output import print_line
from credit_dp.cli.sweep_jobs import (
    SUBMISSION_FILE,
    Job,
    JobProcess,
    job_environment,
    override_choices,
    plan_jobs,
    train_command,
    write_submission,
)
from credit_dp.config import Config
from credit_dp.distributed.placement import (
    ClusterNodes,
    Placement,
    PlacementRequest,
    count_visible_gpus,
    place_ranks,
    slurm_nodes,
)
from credit_dp.distributed.signals import (
    EXIT_PREEMPTED,
    STOP_SIGNALS,
    block_signals,
    handle_stop,
    slurm_job_id,
)
from credit_dp.errors import UserError

POLL_SECONDS = 0.1  # seconds between two looks at what runs
GRACE_SECONDS = 15.0  # seconds in which jobs end after Ctrl-C


@final
@dataclass
class FreeResources:
    """The cores and GPUs of this machine that no job has."""

    cores: int
    gpus: list[str] = field(default_factory=list)

    def can_hold(self, placement: Placement) -> bool:
        """Whether a job can start."""
        cores = placement.ranks * placement.cpus_per_task
        return cores <= self.cores and placement.gpus_per_node <= len(self.gpus)

    def allocate(self, placement: Placement) -> list[str]:
        """Give a job its cores, and its GPUs, by number."""
        self.cores -= placement.ranks * placement.cpus_per_task
        taken = self.gpus[: placement.gpus_per_node]
        self.gpus = self.gpus[placement.gpus_per_node :]
        return taken

    def release(self, placement: Placement, gpus: Sequence[str]) -> None:
        """Take back what a job had."""
        self.cores += placement.ranks * placement.cpus_per_task
        self.gpus += gpus


@final
@dataclass(frozen=True)
class RunningJob:
    """A job that runs, and what it has of the machine."""

    job: Job
    process: JobProcess
    placement: Placement
    gpus: list[str]


def run_locally(jobs: Sequence[Job], dashes: Sequence[str], cores: int) -> int:
    """Run all jobs; the exit code of the first one in their order that failed, or 0.

    Raises:
        UserError: a job needs more than this machine has, or its folder cannot be written to;
            nothing has started.
        KeyboardInterrupt: all jobs are gone by then.
    """
    room = free_resources(jobs, cores)
    has = ClusterNodes(1, room.cores, len(room.gpus))
    waiting = [(job, place_ranks(job.config, has, PlacementRequest(nodes=1))) for job in jobs]
    for job in jobs:
        write_submission(job)
    return LocalSweep(room, dashes).run(waiting)


def free_resources(jobs: Sequence[Job], cores: int) -> FreeResources:
    """What this machine has for a sweep; it is not asked for GPUs that no job would use."""
    if not isinstance(cores, int) or cores < 0:
        raise UserError(f"hydra.launcher.cores: needs a whole number, 0 for all, got {cores!r}")
    asks = any(job.config.device != "cpu" for job in jobs)
    count = count_visible_gpus() if asks else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = named or [str(number) for number in range(count)]
    return FreeResources(cores or len(os.sched_getaffinity(0)), gpus[:count])


@final
class LocalSweep:
    """Jobs that run at once, and those that wait for room."""

    def __init__(self, room: FreeResources, dashes: Sequence[str]) -> None:
        self.resources = room
        self.options = dashes
        self.running: list[RunningJob] = []
        self.codes: dict[int, int] = {}
        self.stopping = False

    def run(self, waiting: list[tuple[Job, Placement]]) -> int:
        """Start jobs as room comes free, until none is left; see `run_locally`."""
        with handle_stop(self.forward_signal), self.kill_remaining():
            while self.running or (waiting and not self.stopping):
                for entry in [] if self.stopping else list(waiting):
                    if self.resources.can_hold(entry[1]):
                        waiting.remove(entry)
                        self.start(*entry)
                time.sleep(POLL_SECONDS)
                self.collect()
        failed = [code for _, code in sorted(self.codes.items()) if code not in (0, EXIT_PREEMPTED)]
        stopped = EXIT_PREEMPTED in self.codes.values() or self.stopping
        print_line(f"{len(self.codes)} jobs ended, {len(failed)} of them failed")
        return failed[0] if failed else EXIT_PREEMPTED if stopped else 0

    def start(self, job: Job, placement: Placement) -> None:
        """Start one job in its share of the machine."""
        gpus = self.resources.allocate(placement)
        command = [*train_command(job.folder, job.overrides), *self.options]
        environment = job_share_environment(os.environ, placement, gpus)
        with block_signals(
            (*STOP_SIGNALS, signal.SIGINT)
        ):  # none is started that would be forgotten
            if self.stopping:
                return
            process = JobProcess(job.folder, job.overrides, command, environment)
            self.running.append(RunningJob(job, process, placement, gpus))
        ranks = f"{placement.ranks} rank{'s' if placement.ranks > 1 else ''}"
        print_line(f"#{job.number} started with {ranks}: {' '.join(job.overrides)}")

    def collect(self) -> None:
        """Note which jobs have ended, and take back what they had."""
        for entry in list(self.running):
            code = entry.process.poll()
            if code is None:
                continue
            self.running.remove(entry)
            self.resources.release(entry.placement, entry.gpus)
            self.codes[entry.job.number] = code
            why = f" ({entry.process.cause()})" if code not in (0, EXIT_PREEMPTED) else ""
            print_line(f"#{entry.job.number} ended with exit code {code}{why}")

    def forward_signal(self, number: int) -> None:
        """Hand a signal on to all jobs, and start no more."""
        self.stopping = True
        for entry in self.running:
            entry.process.send(number)

    @contextmanager
    def kill_remaining(self) -> Iterator[None]:
        """Leave no job behind, however this ends."""
        try:
            yield
        except BaseException:
            self.forward_signal(signal.SIGINT)
            deadline = time.monotonic() + GRACE_SECONDS
            while self.running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self.collect()
            raise
        finally:
            for entry in self.running:
                entry.process.kill()
                entry.process.wait()


def job_share_environment(
    environment: Mapping[str, str], placement: Placement, gpus: Sequence[str]
) -> dict[str, str]:
    """What a job is to take for the whole machine."""
    own = {"OMP_NUM_THREADS": str(placement.cpus_per_task)}
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**job_environment(environment), **own}


SLURM_TIMEOUT = 60.0  # seconds for a command of SLURM


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
    with handle_stop(job.send):  # SIGUSR1; submitit takes SIGTERM, which srun gets besides
        code = job.wait()
    number = slurm_job_id(os.environ)
    if code == EXIT_PREEMPTED and number is not None and may_requeue(number, requeues):
        subprocess.run(["scontrol", "requeue", number], timeout=SLURM_TIMEOUT, check=True)
    sys.exit(code)


def may_requeue(job: str, requeues: int) -> bool:
    """Whether the job was stopped while it could go on: not cancelled, and not again and again."""
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= requeues:
        return False
    told = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job],
        capture_output=True,
        text=True,
        timeout=SLURM_TIMEOUT,
        check=False,
    )
    return " JobState=RUNNING " in told.stdout


Settings = Mapping[str, Any]

SPREAD_HINT = "hydra.launcher.nodes with hydra.launcher.tasks_per_node"
PLACEMENT_KEYS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node")
LAUNCHER_KEYS = (
    "_target_",
    "submitit_folder",
    "max_num_timeout",
    "signal_delay_s",
    "additional_parameters",
)
COMMON_EXECUTOR_KEYS = (
    "timeout_min",
    "mem_gb",
    "name",
    "stderr_to_stdout",
)  # others are SLURM's own


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
            [*resolved_overrides(job.config, placement), *dashes],
            srun_options(placement),
            int(settings["max_num_timeout"]),
        )
        for job, placement in zip(jobs, placements, strict=True)
    ]
    array = submit_array(tasks, array_options(placements, settings), settings, to)
    for job, name in zip(jobs, array, strict=True):
        write_submission(job, name)  # so that it is not submitted twice
    number = array[0].partition("_")[0]
    print_line(
        f"submitted {len(jobs)} jobs as {number} (squeue --jobs {number}; scancel {number}); "
        f"each writes to its folder in {to}. The same command again runs what is not done."
    )
    return 0


def drop_queued(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that are not in the queue, waiting or running.

    Raises:
        UserError: there is no SLURM here, or it does not answer.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm: needs sbatch, which is not here. Start it where jobs are "
            "submitted, or use hydra/launcher=local."
        )
    queued = queued_job_ids()
    left = [job for job in jobs if submitted_job_id(job) not in queued]
    if len(left) < len(jobs):
        print_line(f"{len(jobs) - len(left)} jobs are in the queue already")
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


def place_job(job: Job, has: ClusterNodes, settings: Settings) -> Placement:
    """Where the ranks of one job go.

    Raises:
        UserError: they fit on no node.
    """
    nodes, tasks = settings["nodes"] or None, settings["tasks_per_node"] or None
    wish = PlacementRequest(
        nodes, tasks, settings["cpus_per_task"], bool(nodes and tasks), SPREAD_HINT
    )
    placement = place_ranks(job.config, has, wish)
    gpus = settings["gpus_per_node"]
    return placement if gpus is None else replace(placement, gpus_per_node=int(gpus))


def resolved_overrides(config: Config, placement: Placement) -> list[str]:
    """What the placement has settled, so that a step of one rank does not take all GPUs it sees."""
    return [] if config.parallel.data is not None else [f"parallel.data={placement.data}"]


def srun_options(placement: Placement) -> list[str]:
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


def array_options(placements: Sequence[Placement], settings: Settings) -> dict[str, Any]:
    """What the array asks for: enough for each of its jobs."""
    most = {key: max(getattr(place, key) for place in placements) for key in PLACEMENT_KEYS}
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
    given = {
        k: v
        for k, v in settings.items()
        if k not in (*LAUNCHER_KEYS, *PLACEMENT_KEYS) and v is not None
    }
    given |= {**asked, "setup": setup, "use_srun": False}
    common = (*COMMON_EXECUTOR_KEYS, *PLACEMENT_KEYS)
    executor.update_parameters(**{k if k in common else f"slurm_{k}": v for k, v in given.items()})
    try:
        jobs = executor.map_array(run_job, *zip(*tasks, strict=True))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hydra/launcher=slurm: the jobs were not taken ({reason})") from error
    return [str(job.job_id) for job in jobs]


def submitted_job_id(job: Job) -> str | None:
    """The number under which a job was submitted, if it was."""
    try:
        return str(json.loads((job.folder / SUBMISSION_FILE).read_text())["slurm_job"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def queued_job_ids() -> set[str]:
    """The numbers of all jobs in the queue, those of arrays as `7_2`.

    Raises:
        UserError: SLURM does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--me", "--format", "%i"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"hydra/launcher=slurm: squeue fails ({' '.join(said.split())})") from error
    return set(done.stdout.split())


LAUNCHERS = ("local", "slurm")
GROUP = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def chosen_launcher(overrides: Sequence[Override]) -> str | None:
    """Which of our launchers a command line asks for, if any."""
    chosen = [override.value() for override in overrides if override.key_or_group == GROUP]
    return str(chosen[-1]) if chosen and chosen[-1] in LAUNCHERS else None


def check_launcher(overrides: Sequence[Override], multirun: bool) -> None:
    """Refuse one of our launchers where it can't work.

    Raises:
        UserError: there is no sweep, another sweeper chooses the runs, or an extra is missing.
    """
    launcher = chosen_launcher(overrides)
    if launcher is None:
        return
    if not multirun:
        raise UserError(f"{GROUP}={launcher}: starts the runs of a sweep; add --multirun")
    for override in overrides:
        if override.key_or_group == "hydra/sweeper" and override.value() != "basic":
            raise UserError(
                f"hydra/sweeper: {GROUP}={launcher} needs basic, got {override.value()}"
            )
    if launcher == "slurm" and not is_installed(PLUGIN):
        raise UserError(
            f"{GROUP}=slurm: needs hydra-submitit-launcher, which is not installed. "
            "Install it with pip install 'credit_dp[slurm]'."
        )


def is_installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package can't
        return False


def sweep_as_jobs(
    composer: Composer, overrides: Sequence[Override], dashes: Sequence[str], launcher: str
) -> int:
    """Run or submit the jobs of a sweep that have not finished before; the exit code.

    Raises:
        UserError: a job can't run as it is; none has been started.
    """
    choices = override_choices(overrides, composer)
    composed = composer.compose([choice[0] for choice in choices])
    sweep = Path(str(composed.hydra.sweep.dir))
    settings = launcher_settings(composed.hydra.launcher)
    jobs = plan_jobs(composer, choices, sweep)
    left = [job for job in jobs if job.state != "finished"]
    if len(left) < len(jobs):
        print_line(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done already")
    for job in left:
        check_job_config(job.config)
    if launcher == "slurm":
        left = drop_queued(left)
    for job in left:
        check_unlocked(job.folder, folder_key(job.config.run))
    if not left:
        return 0
    with explain_folder_errors(jobs[0].config.run, "multirun"):
        sweep.mkdir(parents=True, exist_ok=True)
        save_sweep_config(composed, overrides, sweep / "multirun.yaml")
        if launcher == "slurm":
            return submit(left, dashes, settings, sweep)
        return run_locally(left, dashes, settings["cores"])


def save_sweep_config(composed: DictConfig, overrides: Sequence[Override], path: Path) -> None:
    """Write what Hydra writes for a sweep: the config, with what was typed."""
    texts = [str(each.input_line) for each in overrides if not each.is_hydra_override()]
    with read_write(composed):
        composed.hydra.overrides.task = texts
    OmegaConf.save(composed, path)


def check_job_config(config: Config) -> None:
    """Refuse a job that is bound to fail.

    Raises:
        UserError: for what reason.
    """
    if config.resume not in (None, "auto"):
        raise UserError(
            "resume: each job goes on from its own checkpoint. Leave it out; init_from starts with "
            "the weights of another run."
        )
    check_run_config(config)


def launcher_settings(launcher: DictConfig) -> dict[str, Any]:
    """The keys of `hydra.launcher`, plain."""
    settings = OmegaConf.to_container(launcher, resolve=True)
    return {str(key): value for key, value in dict(settings).items()}  # type: ignore[arg-type]

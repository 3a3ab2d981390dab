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

from credit_dp.cli.compose import Composer, check_free, check_plan, folder_key, folder_made_by_hydra
from credit_dp.cli.output import tell
from credit_dp.cli.sweep_jobs import (
    SUBMITTED,
    Job,
    JobProcess,
    choices_of,
    job_environment,
    note_job,
    plan_jobs,
    train_command,
)
from credit_dp.config import Config
from credit_dp.distributed.placement import Nodes, Placement, Wish, place, slurm_nodes, visible_gpus
from credit_dp.distributed.signals import ASKING, PREEMPTED, heeding, held, job_number
from credit_dp.errors import UserError

LOOK = 0.1  # seconds between two looks at what runs
GRACE = 15.0  # seconds in which jobs end after Ctrl-C


@final
@dataclass
class Room:
    """The cores and GPUs of this machine that no job has."""

    cores: int
    gpus: list[str] = field(default_factory=list)

    def holds(self, placement: Placement) -> bool:
        """Whether a job can start."""
        cores = placement.ranks * placement.cpus_per_task
        return cores <= self.cores and placement.gpus_per_node <= len(self.gpus)

    def take(self, placement: Placement) -> list[str]:
        """Give a job its cores, and its GPUs, by number."""
        self.cores -= placement.ranks * placement.cpus_per_task
        taken = self.gpus[: placement.gpus_per_node]
        self.gpus = self.gpus[placement.gpus_per_node :]
        return taken

    def give_back(self, placement: Placement, gpus: Sequence[str]) -> None:
        """Take back what a job had."""
        self.cores += placement.ranks * placement.cpus_per_task
        self.gpus += gpus


@final
@dataclass(frozen=True)
class Running:
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
    room = room_here(jobs, cores)
    has = Nodes(1, room.cores, len(room.gpus))
    waiting = [(job, place(job.config, has, Wish(nodes=1))) for job in jobs]
    for job in jobs:
        note_job(job)
    return Sweep(room, dashes).run(waiting)


def room_here(jobs: Sequence[Job], cores: int) -> Room:
    """What this machine has for a sweep; it is not asked for GPUs that no job would use."""
    if not isinstance(cores, int) or cores < 0:
        raise UserError(f"hydra.launcher.cores: needs a whole number, 0 for all, got {cores!r}")
    asks = any(job.config.device != "cpu" for job in jobs)
    count = visible_gpus() if asks else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = named or [str(number) for number in range(count)]
    return Room(cores or len(os.sched_getaffinity(0)), gpus[:count])


@final
class Sweep:
    """Jobs that run at once, and those that wait for room."""

    def __init__(self, room: Room, dashes: Sequence[str]) -> None:
        self.room = room
        self.dashes = dashes
        self.running: list[Running] = []
        self.codes: dict[int, int] = {}
        self.asked = False

    def run(self, waiting: list[tuple[Job, Placement]]) -> int:
        """Start jobs as room comes free, until none is left; see `run_locally`."""
        with heeding(self.ask), self.ending_all():
            while self.running or (waiting and not self.asked):
                for entry in [] if self.asked else list(waiting):
                    if self.room.holds(entry[1]):
                        waiting.remove(entry)
                        self.start(*entry)
                time.sleep(LOOK)
                self.collect()
        failed = [code for _, code in sorted(self.codes.items()) if code not in (0, PREEMPTED)]
        stopped = PREEMPTED in self.codes.values() or self.asked
        tell(f"{len(self.codes)} jobs ended, {len(failed)} of them failed")
        return failed[0] if failed else PREEMPTED if stopped else 0

    def start(self, job: Job, placement: Placement) -> None:
        """Start one job in its share of the machine."""
        gpus = self.room.take(placement)
        command = [*train_command(job.folder, job.overrides), *self.dashes]
        environment = share_of_machine(os.environ, placement, gpus)
        with held((*ASKING, signal.SIGINT)):  # none is started that would be forgotten
            if self.asked:
                return
            process = JobProcess(job.folder, job.overrides, command, environment)
            self.running.append(Running(job, process, placement, gpus))
        ranks = f"{placement.ranks} rank{'s' if placement.ranks > 1 else ''}"
        tell(f"#{job.number} started with {ranks}: {' '.join(job.overrides)}")

    def collect(self) -> None:
        """Note which jobs have ended, and take back what they had."""
        for entry in list(self.running):
            code = entry.process.poll()
            if code is None:
                continue
            self.running.remove(entry)
            self.room.give_back(entry.placement, entry.gpus)
            self.codes[entry.job.number] = code
            why = f" ({entry.process.cause()})" if code not in (0, PREEMPTED) else ""
            tell(f"#{entry.job.number} ended with exit code {code}{why}")

    def ask(self, number: int) -> None:
        """Hand a signal on to all jobs, and start no more."""
        self.asked = True
        for entry in self.running:
            entry.process.send(number)

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """Leave no job behind, however this ends."""
        try:
            yield
        except BaseException:
            self.ask(signal.SIGINT)
            deadline = time.monotonic() + GRACE
            while self.running and time.monotonic() < deadline:
                time.sleep(LOOK)
                self.collect()
            raise
        finally:
            for entry in self.running:
                entry.process.kill()
                entry.process.wait()


def share_of_machine(
    environment: Mapping[str, str], placement: Placement, gpus: Sequence[str]
) -> dict[str, str]:
    """What a job is to take for the whole machine."""
    own = {"OMP_NUM_THREADS": str(placement.cpus_per_task)}
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**job_environment(environment), **own}


PATIENCE = 60.0  # seconds for a command of SLURM


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


Settings = Mapping[str, Any]

SPREAD = "hydra.launcher.nodes with hydra.launcher.tasks_per_node"
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


LAUNCHERS = ("local", "slurm")
GROUP = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def launcher_of(overrides: Sequence[Override]) -> str | None:
    """Which of our launchers a command line asks for, if any."""
    chosen = [override.value() for override in overrides if override.key_or_group == GROUP]
    return str(chosen[-1]) if chosen and chosen[-1] in LAUNCHERS else None


def check_launcher(overrides: Sequence[Override], multirun: bool) -> None:
    """Refuse one of our launchers where it can't work.

    Raises:
        UserError: there is no sweep, another sweeper chooses the runs, or an extra is missing.
    """
    launcher = launcher_of(overrides)
    if launcher is None:
        return
    if not multirun:
        raise UserError(f"{GROUP}={launcher}: starts the runs of a sweep; add --multirun")
    for override in overrides:
        if override.key_or_group == "hydra/sweeper" and override.value() != "basic":
            raise UserError(
                f"hydra/sweeper: {GROUP}={launcher} needs basic, got {override.value()}"
            )
    if launcher == "slurm" and not installed(PLUGIN):
        raise UserError(
            f"{GROUP}=slurm: needs hydra-submitit-launcher, which is not installed. "
            "Install it with pip install 'credit_dp[slurm]'."
        )


def installed(module: str) -> bool:
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
    choices = choices_of(overrides, composer)
    composed = composer.compose([choice[0] for choice in choices])
    sweep = Path(str(composed.hydra.sweep.dir))
    settings = settings_of(composed.hydra.launcher)
    jobs = plan_jobs(composer, choices, sweep)
    left = [job for job in jobs if job.state != "finished"]
    if len(left) < len(jobs):
        tell(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done already")
    for job in left:
        check_config(job.config)
    if launcher == "slurm":
        left = leave_out_queued(left)
    for job in left:
        check_free(job.folder, folder_key(job.config.run))
    if not left:
        return 0
    with folder_made_by_hydra(jobs[0].config.run, "multirun"):
        sweep.mkdir(parents=True, exist_ok=True)
        save_typed(composed, overrides, sweep / "multirun.yaml")
        if launcher == "slurm":
            return submit(left, dashes, settings, sweep)
        return run_locally(left, dashes, settings["cores"])


def save_typed(composed: DictConfig, overrides: Sequence[Override], path: Path) -> None:
    """Write what Hydra writes for a sweep: the config, with what was typed."""
    texts = [str(each.input_line) for each in overrides if not each.is_hydra_override()]
    with read_write(composed):
        composed.hydra.overrides.task = texts
    OmegaConf.save(composed, path)


def check_config(config: Config) -> None:
    """Refuse a job that is bound to fail.

    Raises:
        UserError: for what reason.
    """
    if config.resume not in (None, "auto"):
        raise UserError(
            "resume: each job goes on from its own checkpoint. Leave it out; init_from starts with "
            "the weights of another run."
        )
    check_plan(config)


def settings_of(launcher: DictConfig) -> dict[str, Any]:
    """The keys of `hydra.launcher`, plain."""
    settings = OmegaConf.to_container(launcher, resolve=True)
    return {str(key): value for key, value in dict(settings).items()}  # type: ignore[arg-type]

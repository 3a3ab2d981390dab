"""`hydra/launcher=local` and `slurm`: run a sweep's jobs on this machine, or as a job array.

`sweep_as_jobs` is the entry: it plans the jobs, leaves out finished ones, and passes the others to
`run_locally` or `submit`. The sections follow in this order: the local launcher;
`run_job`, which runs inside an array; the submission of an array; the choice of a launcher.
"""

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

from credit_dp import checks
from credit_dp.cli.check import check_prepared
from credit_dp.cli.compose import Composer, check_run_config
from credit_dp.cli.folders import (
    SWEEP_FILE,
    check_sweep_folder,
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
from credit_dp.config import Config, by_dotted_key
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
)
from credit_dp.distributed.slurm import run_slurm_command, slurm_job_id
from credit_dp.errors import UserError, counted, install_extra
from credit_dp.process import usable_cores

POLL_SECONDS = 0.1  # between two checks of the running jobs
GRACE_SECONDS = 15.0  # for jobs to end after Ctrl-C, before they are killed


@final
@dataclass
class FreeResources:
    """The cores and GPUs of this machine that no job uses."""

    cores: int
    gpus: list[str] = field(default_factory=list)

    def can_hold(self, placement: Placement) -> bool:
        """Whether there are enough for a job."""
        cores = placement.ranks * placement.cpus_per_task
        return cores <= self.cores and placement.gpus_per_node <= len(self.gpus)

    def allocate(self, placement: Placement) -> list[str]:
        """Take a job's cores and GPUs; return the names of its GPUs."""
        self.cores -= placement.ranks * placement.cpus_per_task
        allocated = self.gpus[: placement.gpus_per_node]
        self.gpus = self.gpus[placement.gpus_per_node :]
        return allocated

    def release(self, placement: Placement, gpus: Sequence[str]) -> None:
        """Add the cores and GPUs of a job that has ended."""
        self.cores += placement.ranks * placement.cpus_per_task
        self.gpus += gpus


@final
@dataclass(frozen=True)
class RunningJob:
    """A running job, and the resources that it uses."""

    job: Job
    process: JobProcess
    placement: Placement
    gpus: list[str]


def run_locally(jobs: Sequence[Job], options: Sequence[str], cores: int) -> int:
    """Run all jobs; return the exit code of the first, in their order, that failed, or 0.

    Raises:
        UserError: a job needs more than this machine has, or its folder can't be written to;
            no job has been started.
        KeyboardInterrupt: after all jobs have ended.
    """
    resources = free_resources(jobs, cores)
    available = ClusterNodes(1, resources.cores, len(resources.gpus))
    waiting = [(job, place_ranks(job.config, available, PlacementRequest(nodes=1))) for job in jobs]
    for job in jobs:
        write_submission(job)
    return LocalSweep(resources, options).run(waiting)


def free_resources(jobs: Sequence[Job], cores: int) -> FreeResources:
    """Return the cores and GPUs of this machine; GPUs are counted only if a job may use them.

    Raises:
        UserError: `hydra.launcher.cores` is not valid.
    """
    if not isinstance(cores, int) or cores < 0:
        raise UserError(f"hydra.launcher.cores: needs a whole number, 0 for all, got {cores!r}")
    needs_gpus = any(job.config.device != "cpu" for job in jobs)
    count = count_visible_gpus() if needs_gpus else 0
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = visible or [str(index) for index in range(count)]
    return FreeResources(cores or usable_cores(), gpus[:count])


@final
class LocalSweep:
    """Runs jobs side by side; others wait until their resources are free."""

    def __init__(self, resources: FreeResources, options: Sequence[str]) -> None:
        self.resources = resources
        self.options = options
        self.running: list[RunningJob] = []
        self.codes: dict[int, int] = {}
        self.stopping = False

    def run(self, waiting: list[tuple[Job, Placement]]) -> int:
        """Start jobs as resources become free, until all have ended; see `run_locally`."""
        with handle_stop(self.forward_signal), self.kill_remaining():
            while self.running or (waiting and not self.stopping):
                # Smaller jobs may overtake one that does not fit yet.
                for entry in [] if self.stopping else list(waiting):
                    if self.resources.can_hold(entry[1]):
                        waiting.remove(entry)
                        self.start(*entry)
                time.sleep(POLL_SECONDS)
                self.collect()
        failed = [code for _, code in sorted(self.codes.items()) if code not in (0, EXIT_PREEMPTED)]
        stopped = EXIT_PREEMPTED in self.codes.values() or self.stopping
        print_line(f"{counted(len(self.codes), 'job')} ended, {len(failed)} of them failed")
        return failed[0] if failed else EXIT_PREEMPTED if stopped else 0

    def start(self, job: Job, placement: Placement) -> None:
        """Start one job on its share of the machine."""
        gpus = self.resources.allocate(placement)
        command = [*train_command(job.folder, job.overrides), *self.options]
        environment = job_share_environment(os.environ, placement, gpus)
        # A signal between start and `append` would miss this job, so signals are blocked meanwhile.
        with block_signals((*STOP_SIGNALS, signal.SIGINT)):
            if self.stopping:
                return
            process = JobProcess(job.folder, job.overrides, command, environment)
            self.running.append(RunningJob(job, process, placement, gpus))
        ranks = f"{placement.ranks} rank{'s' if placement.ranks > 1 else ''}"
        print_line(f"#{job.number} started with {ranks}: {' '.join(job.overrides)}")

    def collect(self) -> None:
        """Record the jobs that have ended, and release their resources."""
        for entry in list(self.running):
            code = entry.process.poll()
            if code is None:
                continue
            self.running.remove(entry)
            self.resources.release(entry.placement, entry.gpus)
            self.codes[entry.job.number] = code
            cause = f" ({entry.process.cause()})" if code not in (0, EXIT_PREEMPTED) else ""
            print_line(f"#{entry.job.number} ended with exit code {code}{cause}")

    def forward_signal(self, signal_number: int) -> None:
        """Send a signal to all jobs, and start no more."""
        self.stopping = True
        for entry in self.running:
            entry.process.send(signal_number)

    @contextmanager
    def kill_remaining(self) -> Iterator[None]:
        """Make sure that no job outlives the block, whatever ends it."""
        try:
            yield
        except BaseException:
            # Interrupted jobs get some time to end; any that still run are killed below.
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
    """Return an environment in which a job sees only its cores and GPUs."""
    limits = {"OMP_NUM_THREADS": str(placement.cpus_per_task)}
    if gpus:
        limits["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**job_environment(environment), **limits}


def run_job(
    folder: str,
    overrides: Sequence[str],
    extra_arguments: Sequence[str],
    srun_arguments: Sequence[str],
    requeues: int,
) -> None:
    """Run one job of the array; submitit calls this in the job.

    Args:
        folder: of the job.
        overrides: of the job.
        extra_arguments: of its command line, which do not change what it computes.
        srun_arguments: options of srun, which place the ranks.
        requeues: how often the job may be requeued.

    Raises:
        SystemExit: with the exit code of the ranks, so that SLURM records it.
        UserError: the job could not be requeued.
    """
    path = Path(folder)
    command = [*train_command(path, overrides), *extra_arguments]
    environment = job_environment(os.environ)
    job = JobProcess(path, overrides, ["srun", *srun_arguments, *command], environment)
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
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= requeues:
        return False
    try:
        output = run_slurm_command(["scontrol", "show", "job", "--oneliner", job])
    except UserError as error:
        sys.stderr.write(f"error: not requeued: {error}\n")
        return False
    return " JobState=RUNNING " in output


Settings = Mapping[str, Any]

SPREAD_HINT = "hydra.launcher.nodes with hydra.launcher.tasks_per_node"
PLACEMENT_KEYS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node")
# Keys of Hydra's launcher, or handled here, which submitit does not know.
LAUNCHER_KEYS = (
    "_target_",
    "submitit_folder",
    "max_num_timeout",
    "signal_delay_s",
    "additional_parameters",
)
# Parameters that submitit has for all executors; it expects a prefix `slurm_` before all others.
COMMON_EXECUTOR_KEYS = ("timeout_min", "mem_gb", "name", "stderr_to_stdout")


def submit(
    jobs: Sequence[Job], options: Sequence[str], settings: Mapping[str, Any], folder: Path
) -> int:
    """Submit jobs as one array; return the exit code.

    Args:
        jobs: of the sweep that have not finished and are not in the queue.
        options: of the command line.
        settings: `hydra.launcher`.
        folder: of the sweep.

    Raises:
        UserError: a job fits on no node, would compute statistics on several, or the queue refuses
            them; nothing has been submitted.
    """
    check_notice(settings)
    available = slurm_nodes(settings["partition"])
    placements = [place_job(job, available, settings) for job in jobs]
    for job, placement in zip(jobs, placements, strict=True):
        if placement.nodes > 1:
            check_prepared(job.config, job.overrides)
    tasks = [
        (
            str(job.folder.absolute()),
            list(job.overrides),
            [*resolved_overrides(job.config, placement), *options],
            srun_options(placement),
            int(settings["max_num_timeout"]),
        )
        for job, placement in zip(jobs, placements, strict=True)
    ]
    job_ids = submit_array(tasks, array_options(placements, settings), settings, folder)
    for job, job_id in zip(jobs, job_ids, strict=True):
        write_submission(job, job_id)  # so that it is not submitted twice
    array_id = job_ids[0].partition("_")[0]
    print_line(
        f"submitted {counted(len(jobs), 'job')} as {array_id} "
        f"(squeue --jobs {array_id}; scancel {array_id}); "
        f"each writes to its folder in {folder}. The same command again submits unfinished jobs."
    )
    return 0


def check_script_values(settings: Settings, sweep: Path) -> None:
    """Refuse values that would add lines to the batch script; those of `setup` are lines of it.

    Raises:
        UserError: a value has several lines.
    """
    checks.one_line("run.dir", str(sweep.absolute()))
    for key, value in by_dotted_key(settings).items():
        for text in value if isinstance(value, list) else [value]:
            if key != "setup":
                checks.one_line(f"hydra.launcher.{key}", str(text))


def drop_queued(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that are not in the queue, neither waiting nor running.

    Raises:
        UserError: SLURM is not installed here, or does not answer.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "hydra/launcher=slurm: needs sbatch, which is not here. Start it where jobs are "
            "submitted, or use hydra/launcher=local."
        )
    queued = queued_job_ids()
    remaining = [job for job in jobs if submitted_job_id(job) not in queued]
    if len(remaining) < len(jobs):
        print_line(f"in the queue already: {counted(len(jobs) - len(remaining), 'job')}")
    return remaining


def check_notice(settings: Settings) -> None:
    """Refuse jobs that would be stopped soon after they begin, requeued, and stopped again.

    Raises:
        UserError: the notice is longer than half of their time.
    """
    notice = settings["signal_delay_s"]
    time_limit = settings["timeout_min"] * 60
    if notice > time_limit / 2:
        raise UserError(
            f"hydra.launcher.signal_delay_s: {notice} s before the end of a job is too early, as "
            f"hydra.launcher.timeout_min gives it {time_limit} s. Lower it, or give jobs more time."
        )


def place_job(job: Job, available: ClusterNodes, settings: Settings) -> Placement:
    """Return the placement of one job's ranks."""
    nodes = settings["nodes"] or None
    tasks_per_node = settings["tasks_per_node"] or None
    request = PlacementRequest(
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=settings["cpus_per_task"],
        spread=bool(nodes and tasks_per_node),
        spread_hint=SPREAD_HINT,
    )
    placement = place_ranks(job.config, available, request)
    gpus = settings["gpus_per_node"]
    return placement if gpus is None else replace(placement, gpus_per_node=int(gpus))


def resolved_overrides(config: Config, placement: Placement) -> list[str]:
    """Return the number of data ranks that the placement determined, if it is not given.

    Without it a step of one rank would take all GPUs that it sees.
    """
    return [] if config.parallel.data is not None else [f"parallel.data={placement.data}"]


def srun_options(placement: Placement) -> list[str]:
    """Return options of srun for the ranks of one job, numbered in the order of the nodes.

    Not `--unbuffered`: it gives the ranks a terminal, and they would draw progress bars.
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
    """Return the resources that the array requests: enough for each of its jobs."""
    largest = {
        key: max(getattr(placement, key) for placement in placements) for key in PLACEMENT_KEYS
    }
    options = {
        # Not `B:`, which signals only the batch script: the ranks get it and save. `run_job` waits
        # for their exit code.
        "signal": f"USR1@{settings['signal_delay_s']}",
        "requeue": True,
        **settings["additional_parameters"],
    }
    if not largest["gpus_per_node"]:
        del largest["gpus_per_node"]
    return {**largest, "additional_parameters": options}


def submit_array(
    tasks: Sequence[tuple[Any, ...]],
    options: Mapping[str, Any],
    settings: Settings,
    folder: Path,
) -> list[str]:
    """Submit tasks with submitit; return the number of each job.

    Raises:
        UserError: the queue refuses them.
    """
    import submitit  # an extra

    executor = submitit.AutoExecutor(folder=folder / ".submitit", cluster="slurm")
    package_parent = shlex.quote(str(Path(__file__).resolve().parents[2]))
    setup = [
        f"export PYTHONPATH={package_parent}${{PYTHONPATH:+:$PYTHONPATH}}",
        "trap : TERM USR1",  # bash stays alive; the program handles them
        *(settings["setup"] or []),
    ]
    parameters = {
        key: value
        for key, value in settings.items()
        if key not in (*LAUNCHER_KEYS, *PLACEMENT_KEYS) and value is not None
    }
    # `run_job` runs once, in the batch script, and starts the ranks with its own srun.
    parameters |= {**options, "setup": setup, "use_srun": False}
    common = (*COMMON_EXECUTOR_KEYS, *PLACEMENT_KEYS)
    executor.update_parameters(
        **{key if key in common else f"slurm_{key}": value for key, value in parameters.items()}
    )
    try:
        jobs = executor.map_array(run_job, *zip(*tasks, strict=True))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hydra/launcher=slurm: the jobs were not accepted ({reason})") from error
    return [str(job.job_id) for job in jobs]


def submitted_job_id(job: Job) -> str | None:
    """Return the number under which a job was submitted; None if it was not."""
    try:
        return str(json.loads((job.folder / SUBMISSION_FILE).read_text())["slurm_job"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def queued_job_ids() -> set[str]:
    """Return the numbers of all jobs in the user's queue; a job of an array has one like `7_2`.

    Raises:
        UserError: SLURM does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--me", "--format", "%i"]
    try:
        return set(run_slurm_command(command).split())
    except UserError as error:
        raise UserError(f"hydra/launcher=slurm: {error}") from error


LAUNCHERS = ("local", "slurm")
GROUP = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def chosen_launcher(overrides: Sequence[Override]) -> str | None:
    """Return which of our launchers a command line chooses; None if it is neither."""
    chosen = [override.value() for override in overrides if override.key_or_group == GROUP]
    return str(chosen[-1]) if chosen and chosen[-1] in LAUNCHERS else None


def check_launcher(overrides: Sequence[Override], multirun: bool) -> None:
    """Refuse one of our launchers if it can't work here.

    Raises:
        UserError: it is no sweep, another sweeper chooses the runs, or a package is missing.
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
            f"{install_extra('slurm')}."
        )


def is_installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def sweep_as_jobs(
    composer: Composer, overrides: Sequence[Override], options: Sequence[str], launcher: str
) -> int:
    """Run or submit the jobs of a sweep that have not finished; return the exit code.

    Raises:
        UserError: a job can't run; none has been started.
    """
    choices = override_choices(overrides, composer)
    # The folder and the settings of the launcher are those of the first combination.
    composed = composer.compose([choice[0] for choice in choices])
    sweep = Path(str(composed.hydra.sweep.dir))
    settings = launcher_settings(composed.hydra.launcher)
    jobs = plan_jobs(composer, choices, sweep)
    check_sweep_folder(jobs[0].config.run)
    remaining = [job for job in jobs if job.state != "finished"]
    if len(remaining) < len(jobs):
        print_line(f"done already: {len(jobs) - len(remaining)} of {counted(len(jobs), 'job')}")
    for job in remaining:
        check_job_config(job.config)
    if launcher == "slurm":
        check_script_values(settings, sweep)
        remaining = drop_queued(remaining)
    for job in remaining:
        check_unlocked(job.folder, folder_key(job.config.run))
    if not remaining:
        return 0
    with explain_folder_errors(jobs[0].config.run, "multirun"):
        sweep.mkdir(parents=True, exist_ok=True)
        save_sweep_config(composed, overrides, sweep / SWEEP_FILE)
        if launcher == "slurm":
            return submit(remaining, options, settings, sweep)
        return run_locally(remaining, options, settings["cores"])


def save_sweep_config(composed: DictConfig, overrides: Sequence[Override], path: Path) -> None:
    """Write the config as Hydra does for a sweep, with the overrides that were typed."""
    texts = [str(override.input_line) for override in overrides if not override.is_hydra_override()]
    with read_write(composed):
        composed.hydra.overrides.task = texts
    OmegaConf.save(composed, path)


def check_job_config(config: Config) -> None:
    """Refuse a job that is bound to fail."""
    if config.resume not in (None, "auto"):
        raise UserError(
            "resume: each job resumes from its own checkpoint. Leave it out; init_from starts with "
            "the weights of another run."
        )
    check_run_config(config)


def launcher_settings(launcher: DictConfig) -> dict[str, Any]:
    """Return the keys of `hydra.launcher` as plain values."""
    settings = OmegaConf.to_container(launcher, resolve=True)
    return {str(key): value for key, value in dict(settings).items()}  # type: ignore[arg-type]

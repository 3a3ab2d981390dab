"""`--multirun`: run the jobs of a sweep one after the other, side by side, or as a job array.

Whatever runs it, a job is what a single run with its overrides would be, in a numbered folder of
the sweep (`sweep_jobs`). Without a launcher jobs run in this process, `hydra/launcher=local` gives
each of them cores and GPUs of this machine, and `slurm` submits them (`slurm_array`).
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, read_write

from credit_dp.cli.compose import Composer
from credit_dp.cli.folders import (
    SWEEP_FILE,
    check_sweep_folder,
    check_unlocked,
    explain_folder_errors,
    folder_key,
)
from credit_dp.cli.output import print_lines
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.show_sweep import report_scaling
from credit_dp.cli.slurm_array import drop_queued, submit
from credit_dp.cli.start_run import report_errors, run_once
from credit_dp.cli.sweep_jobs import (
    LOG_FILE,
    Job,
    JobProcess,
    check_resume,
    compose_combinations,
    failure_cause,
    override_choices,
    plan_jobs,
    result_line,
    write_record,
    write_submission,
)
from credit_dp.config import Config
from credit_dp.config.launchers import LAUNCHERS, LocalLauncherConfig, SlurmLauncherConfig
from credit_dp.distributed.failure_report import capture_reports, report_error
from credit_dp.distributed.launcher import find_launcher
from credit_dp.distributed.placement import (
    ClusterNodes,
    Placement,
    PlacementRequest,
    count_visible_gpus,
    place_ranks,
)
from credit_dp.distributed.signals import (
    EXIT_PREEMPTED,
    STOP_SIGNALS,
    Terminated,
    block_signals,
    handle_stop,
)
from credit_dp.errors import UserError, counted, install_extra
from credit_dp.process import output_to, usable_cores
from credit_dp.training.checkpoint_files import list_checkpoints
from credit_dp.training.run_folder import RunFolder

GROUP = "hydra/launcher"
POLL_SECONDS = 0.1  # between two checks of the running jobs
GRACE_SECONDS = 15.0  # for jobs to end after Ctrl-C, before they are killed


def check_is_no_launcher(overrides: Sequence[Override]) -> None:
    """Refuse a launcher for a single run."""
    for override in overrides:
        if override.key_or_group == GROUP and override.value() != "basic":
            raise UserError(
                f"{override.input_line}: starts the runs of a sweep. Add --multirun, or drop it"
            )


def sweep(composer: Composer, overrides: Sequence[Override], options: Sequence[str]) -> int:
    """Check all jobs, then run or submit the unfinished ones; return the exit code.

    Each job gets the `options` of the command line as well.

    Raises:
        UserError: a job can't run; none has been started.
    """
    choices, composed = compose_sweep(composer, overrides)
    folder = Path(str(composed.hydra.sweep.dir))
    launcher = OmegaConf.to_object(composed.hydra.launcher)
    jobs = plan_jobs(composer, choices, folder)
    run = jobs[0].config.run
    check_sweep_folder(run)
    remaining = [job for job in jobs if not job.is_finished]
    if len(remaining) < len(jobs):
        print_lines(f"done already: {len(jobs) - len(remaining)} of {counted(len(jobs), 'job')}")
    if isinstance(launcher, LocalLauncherConfig | SlurmLauncherConfig):
        for job in remaining:
            check_resume(job.config)
    if isinstance(launcher, SlurmLauncherConfig):
        remaining = drop_queued(remaining, launcher, folder)
    for job in remaining:
        check_unlocked(job.folder, folder_key(run))
    if not remaining:
        return 0
    with explain_folder_errors(run, "multirun"):
        folder.mkdir(parents=True, exist_ok=True)
        save_sweep_config(composed, overrides, folder / SWEEP_FILE)
        if isinstance(launcher, SlurmLauncherConfig):
            return submit(remaining, options, launcher, folder)
        if isinstance(launcher, LocalLauncherConfig):
            codes = LocalSweep(remaining, options, launcher.cores).run()
        else:
            codes = run_here(remaining, composer)
    if run.scaling and EXIT_PREEMPTED not in codes.values():
        report_scaling(folder)
    return exit_code(codes, folder)


def check_combinations(composer: Composer, overrides: Sequence[Override]) -> list[Config]:
    """Check every combination without starting any; return their configs."""
    choices, _ = compose_sweep(composer, overrides)
    configs = [config for _, config in compose_combinations(composer, choices)]
    check_sweep_folder(configs[0].run)  # that of all runs
    return configs


def compose_sweep(
    composer: Composer, overrides: Sequence[Override]
) -> tuple[list[list[str]], DictConfig]:
    """Return the overrides to choose from for each key, and the config of the first combination.

    That has the folder and the launcher. The parameters of the experiment are among the choices,
    unless they are given: as overrides, their interpolations are resolved in each run.
    """
    launcher = find_launcher(os.environ)
    if launcher is not None:
        raise UserError(
            f"--multirun: can't run in ranks that {launcher.name} started. Start the sweep without "
            f"{launcher.name}."
        )
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in ("run.name", "run.dir"):
            raise UserError(
                f"{override.key_or_group}: names the folder of the sweep, which numbers its runs. "
                "Give one value."
            )
    choices = override_choices(overrides, composer)
    composed = composer.compose([choice[0] for choice in choices])
    check_launcher(composed.hydra)
    params = composed.hydra.sweeper.get("params") or {}
    given = {override.key_or_group for override in overrides}
    texts = [f"{key}={value}" for key, value in params.items() if key not in given]
    if texts:
        choices = [*override_choices(parse_overrides(texts), composer), *choices]
        composed = composer.compose([choice[0] for choice in choices])
    return choices, composed


def check_launcher(hydra: DictConfig) -> None:
    """Refuse a launcher that is neither Hydra's basic one nor ours, or lacks its package.

    A file of the user's may add keys to one of ours, which it names in its defaults.
    """
    name, sweeper = (hydra.runtime.choices[f"hydra/{kind}"] for kind in ("launcher", "sweeper"))
    if sweeper != "basic":
        raise UserError(f"hydra/sweeper: needs basic, got {sweeper}")
    schema = OmegaConf.get_type(hydra.launcher)
    if name != "basic" and schema not in LAUNCHERS.values():
        raise UserError(
            f"{GROUP}: needs basic, {', '.join(LAUNCHERS)}, or a file of yours with one of these "
            f"in its defaults, got {name}"
        )
    if schema is SlurmLauncherConfig and find_spec("submitit") is None:
        raise UserError(
            f"{GROUP}={name}: needs submitit, which is not installed. {install_extra('slurm')}."
        )


def save_sweep_config(composed: DictConfig, overrides: Sequence[Override], path: Path) -> None:
    """Write the config of the sweep, with the overrides that were typed."""
    texts = [str(override.input_line) for override in overrides if not override.is_hydra_override()]
    with read_write(composed):
        composed.hydra.overrides.task = texts
    OmegaConf.save(composed, path)


def exit_code(codes: Mapping[Path, int], folder: Path) -> int:
    """Report the jobs that failed in one line; return 75 if one was stopped, else the first code.

    Whoever stopped it starts the same command again, which runs what has failed as well.
    """
    failed = sorted(
        (int(job.name), code) for job, code in codes.items() if code not in (0, EXIT_PREEMPTED)
    )
    if failed:
        report_error(
            f"--multirun: {len(failed)} of {len(codes)} runs failed: "
            f"{', '.join(str(number) for number, _ in failed)}. "
            f"See `credit-dp sweep show {folder.absolute()}`."
        )
    if EXIT_PREEMPTED in codes.values():
        return EXIT_PREEMPTED
    return failed[0][1] if failed else 0


def run_here(jobs: Sequence[Job], composer: Composer) -> dict[Path, int]:
    """Run jobs one after the other in this process, and return their exit codes.

    A run that fails does not keep the next ones from starting. A run that was stopped ends the
    sweep, because the signal was meant for this process, too.
    """
    for job in jobs:
        write_submission(job)
    folder = jobs[0].folder.parent
    print_lines(f"{counted(len(jobs), 'run')} in {folder}, the output of each in its {LOG_FILE}")
    codes: dict[Path, int] = {}
    for job in jobs:
        started = time.monotonic()
        with output_to(str(job.folder.absolute() / LOG_FILE)):
            code = codes[job.folder] = run_recorded(job, composer)
        print_lines(result_line(job, jobs, code, time.monotonic() - started))
        if code == EXIT_PREEMPTED:
            break
    return codes


def run_recorded(job: Job, composer: Composer) -> int:
    """Run one job in this process, record how it ended, and return its exit code."""
    config = job.config
    run = replace(config.run, dir=str(job.folder.absolute()))
    # A checkpoint that was given is where a job begins, until it has one of its own.
    has_own = bool(list_checkpoints(RunFolder(job.folder).checkpoints))
    resume = "auto" if has_own else config.resume or "auto"
    config = replace(config, run=run, resume=resume)
    write_record(job.folder)
    code, cause = 1, None
    try:
        with capture_reports() as reported:
            code = report_errors(lambda: run_once(composer, job.arguments, config))
        cause = failure_cause("".join(reported))
    except KeyboardInterrupt:
        code, cause = 130, "interrupted"
        raise KeyboardInterrupt from None  # its message is how to continue a single run
    except Terminated as stop:
        code, cause = stop.code, "terminated"
        raise
    finally:
        write_record(job.folder, code, cause)
    return code


@final
@dataclass(frozen=True)
class RunningJob:
    """A running job, the cores and GPUs that it uses, and the moment when it started."""

    job: Job
    process: JobProcess
    cores: int
    gpus: Sequence[str]
    started: float


@final
class LocalSweep:
    """Runs jobs side by side here; others wait until there are cores and GPUs for them."""

    def __init__(self, jobs: Sequence[Job], options: Sequence[str], cores: int) -> None:
        count = count_visible_gpus() if any(job.config.device != "cpu" for job in jobs) else 0
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        # Those that no job uses.
        self.gpus = (visible or [str(index) for index in range(count)])[:count]
        self.cores = cores or usable_cores()
        node = ClusterNodes(1, self.cores, len(self.gpus))
        request = PlacementRequest(nodes=1)
        self.waiting = [(job, place_ranks(job.config, node, request)) for job in jobs]
        self.jobs, self.options = jobs, options
        self.running: list[RunningJob] = []
        self.codes: dict[Path, int] = {}
        self.stopping = False

    def run(self) -> dict[Path, int]:
        """Run all jobs and return their exit codes.

        Raises:
            KeyboardInterrupt: after all jobs have ended.
            Terminated: there was a signal, but no job was stopped by it.
        """
        for job, _ in self.waiting:
            write_submission(job)
        with handle_stop(self.stop), self.kill_remaining():
            while self.running or (self.waiting and not self.stopping):
                # Smaller jobs may overtake one that does not fit yet.
                for job, placement in [] if self.stopping else list(self.waiting):
                    fits = placement.ranks * placement.cpus_per_task <= self.cores
                    if fits and placement.gpus_per_node <= len(self.gpus):
                        self.start(job, placement)
                time.sleep(POLL_SECONDS)
                self.collect()
        if self.waiting and not any(self.codes.values()):
            raise Terminated(signal.SIGUSR1)
        return self.codes

    def start(self, job: Job, placement: Placement) -> None:
        """Start one job on its share of the machine."""
        cores, count = placement.ranks * placement.cpus_per_task, placement.gpus_per_node
        gpus = self.gpus[:count]
        environment = {**os.environ, "OMP_NUM_THREADS": str(placement.cpus_per_task)}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # A signal between start and `append` would miss this job, so signals are blocked meanwhile.
        with block_signals((*STOP_SIGNALS, signal.SIGINT)):
            if self.stopping:
                return
            command = [*job.command, *self.options]
            process = JobProcess(job.folder, command, environment)
            self.running.append(RunningJob(job, process, cores, gpus, time.monotonic()))
            self.waiting.remove((job, placement))
        self.cores, self.gpus = self.cores - cores, self.gpus[count:]
        name, ranks = job.folder.name, counted(placement.ranks, "rank")
        print_lines(f"#{name} started with {ranks}: {' '.join(job.overrides)}")

    def collect(self) -> None:
        """Take back the cores and GPUs of jobs that have ended."""
        for entry in list(self.running):
            code = entry.process.poll()
            if code is None:
                continue
            self.running.remove(entry)
            self.cores, self.gpus = self.cores + entry.cores, [*self.gpus, *entry.gpus]
            self.codes[entry.job.folder] = code
            cause = f" ({entry.process.cause()})" if code not in (0, EXIT_PREEMPTED) else ""
            seconds = time.monotonic() - entry.started
            print_lines(f"{result_line(entry.job, self.jobs, code, seconds)}{cause}")

    def stop(self, signal_number: int) -> None:
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
            self.stop(signal.SIGINT)
            deadline = time.monotonic() + GRACE_SECONDS
            while self.running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self.collect()
            raise
        finally:
            for entry in self.running:
                entry.process.kill()

"""The jobs of a sweep: their overrides, their folders, their records, and their processes.

Each job has a numbered folder with its overrides (`submitted.json`), a record of its state
(`job.json`), and its output (`job.log`). A sweep that is
started again recognises its jobs by their overrides: finished ones are left alone, others resume.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.cli.compose import Composer, check_run_config
from credit_dp.cli.saved_config import values_by_key
from credit_dp.config import Config, as_dict, by_dotted_key
from credit_dp.distributed.forkserver import die_with_parent, interpreter
from credit_dp.distributed.signals import EXIT_PREEMPTED, STOP_SIGNALS, signal_name
from credit_dp.errors import UserError, quote, traceback_message
from credit_dp.sweeps.read import (
    LAUNCH_KEYS,
    RECORD_FILE,
    RELATIVE_RMSE,
    SUBMISSION_FILE,
    read_job,
    read_overrides,
)
from credit_dp.training.console import format_duration
from credit_dp.training.run_folder import RunFolder, with_absolute_paths, write_run_file

LOG_FILE = "job.log"
SLURM_PREFIXES = ("srun: ", "slurmstepd: ")  # of lines that SLURM adds after a failure
RECORDED_STATES = {0: "done", EXIT_PREEMPTED: "preempted"}  # by exit code
# Keys and values that a run resolves for its machine and data, so that its config file differs.
UNRESOLVED_VALUES = (
    ("device", "auto"),
    ("parallel.data", None),
    ("trainer.validate_every", None),
)


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        folder: its number in the folder of the sweep.
        overrides: without keys of the sweep.
        config: of the run, without its folder.
        is_finished: whether it has its scores.
    """

    folder: Path
    overrides: tuple[str, ...]
    config: Config
    is_finished: bool

    @property
    def arguments(self) -> list[str]:
        """The arguments of `train` that run the job in its folder, or resume it."""
        return [*self.overrides, f"run.dir={quote(str(self.folder.absolute()))}", "resume=auto"]

    @property
    def command(self) -> list[str]:
        """The command that runs the job in another process."""
        return [*interpreter(), "-m", "credit_dp", "train", *self.arguments]


def compose_combinations(
    composer: Composer, choices: Sequence[Sequence[str]]
) -> list[tuple[tuple[str, ...], Config]]:
    """Return the overrides and the checked config of each combination, the last key fastest."""
    combinations = [(texts, composer.compose_config(texts)) for texts in product(*choices)]
    for _, config in combinations:
        check_run_config(config)
    return combinations


def plan_jobs(composer: Composer, choices: Sequence[Sequence[str]], sweep: Path) -> list[Job]:
    """Return a job for each combination of the choices."""
    folders = [path for path in sweep.glob("*") if path.name.isdecimal() and path.is_dir()]
    known_folders = {
        job_identity(earlier): folder
        for folder in folders
        if (earlier := read_overrides(folder)) is not None
    }
    next_number = max((int(folder.name) for folder in folders), default=-1) + 1
    jobs = []
    for texts, config in compose_combinations(composer, choices):
        overrides = tuple(text for text in texts if not text.lstrip("+").startswith(LAUNCH_KEYS))
        folder = known_folders.get(job_identity(overrides))
        if folder is None:
            folder, next_number = sweep / str(next_number), next_number + 1
        run = RunFolder(folder)
        if run.config.exists() and (changed := first_difference(run.config, config)) is not None:
            raise UserError(
                f"run.name: {folder} was run with these overrides, but with another config "
                f"({changed}). Give another run.name, or remove that folder to run the job afresh."
            )
        is_finished = run.config.exists() and run.scores.is_file()
        jobs.append(Job(folder, overrides, config, is_finished))
    return jobs


def result_line(job: Job, jobs: Sequence[Job], code: int, seconds: float) -> str:
    """Return a line about a job that has ended: what sets it apart, how well it did, how long."""
    shared = set.intersection(*(set(each.overrides) for each in jobs))
    texts = [text for text in job.overrides if text not in shared] or job.overrides
    parts = []
    if code == EXIT_PREEMPTED:
        parts.append("stopped")
    elif code:
        parts.append(f"failed with exit code {code}")
    else:
        found = read_job(job.folder)
        if "loss" in found.numbers:
            parts.append(f"loss {found.numbers['loss']:.4g}")
        if RELATIVE_RMSE in found.metrics:
            parts.append(f"RMSE {found.metrics[RELATIVE_RMSE]:.2f} of persistence's")
    parts.append(format_duration(seconds))
    keys = " ".join(text.lstrip("+") for text in texts)
    return f"#{job.folder.name} {keys}: {', '.join(parts)}"


def job_identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return a key that is equal for jobs that compute the same."""
    texts = (text.lstrip("+") for text in overrides)
    return tuple(sorted(text for text in texts if not text.startswith(LAUNCH_KEYS)))


def first_difference(path: Path, config: Config) -> str | None:
    """Return the first key that differs from a run's config file, with both values, or None.

    Keys that the run resolved itself, such as `device=auto`, are not compared.
    """
    try:
        saved = checks.load_yaml(path)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return f"{path.name} can't be read"
    saved_values = values_by_key(saved if isinstance(saved, dict) else {})
    node: Any = OmegaConf.to_container(with_absolute_paths(config))
    absolute = by_dotted_key(node)
    for key, value in values_by_key(as_dict(config)).items():
        if key.startswith(LAUNCH_KEYS) or (key, value) in UNRESOLVED_VALUES:
            continue
        if config.data.dates.undetermined and key.startswith("data.dates."):
            continue
        if saved_values.get(key, ...) not in (value, absolute.get(key)):
            return f"{key}: {saved_values.get(key, 'nothing')}, now {value}"
    return None


def override_choices(overrides: Sequence[Override], composer: Composer) -> list[list[str]]:
    """Return, for each key of a command line, the overrides to choose from."""
    choices = []
    for override in overrides:
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
            continue
        if not override.is_discrete_sweep():
            raise UserError(f"{override.key_or_group}: needs a list of values, like 1,2,3")
        # A glob, such as `model=glob(*)`, gets its choices from the loader.
        override.config_loader = composer.hydra.config_loader
        key = override.get_key_element()
        choices.append([f"{key}={text}" for text in override.sweep_string_iterator()])
    return choices


def check_resume(config: Config) -> None:
    """Refuse a checkpoint to resume from, for jobs that may start several times."""
    if config.resume not in (None, "auto"):
        raise UserError(
            "resume: each job resumes from its own checkpoint. Leave it out; init_from starts with "
            "the weights of another run."
        )


def write_submission(job: Job, slurm_job: str | None = None) -> None:
    """Write into a job's folder, before it starts, what it is and its number in a queue."""
    content = {"overrides": job.overrides, "slurm_job": slurm_job}
    write_run_file(job.folder / SUBMISSION_FILE, json.dumps(content, indent=2) + "\n")


def write_record(folder: Path, code: int | None = None, cause: str | None = None) -> None:
    """Record in the folder of a job that it runs, or how it ended."""
    state = "running" if code is None else RECORDED_STATES.get(code, "failed")
    cause = (cause or f"exit code {code}") if state == "failed" else None
    record = {"state": state, "exit_code": code, "cause": cause}
    write_run_file(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def failure_cause(output: str) -> str | None:
    """Return the line of a program's output that names the cause.

    It is `error: ...`, the message of a traceback, or the last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    program_lines = [line for line in lines if not line.startswith(SLURM_PREFIXES)]
    return reported_cause(output) or next(reversed(program_lines or lines), None)


def reported_cause(output: str) -> str | None:
    """Return what a program reported as an error, the last one; None if it did not."""
    lines = output.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1].strip() if errors else traceback_message(lines)


@final
class JobProcess:
    """A running job with its record; its output goes to `job.log` in its folder.

    It has its own session, so that Ctrl-C in a terminal reaches only this process, which decides
    how its jobs end. If this process dies, the job dies too.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.sent_signals: set[int] = set()
        self.folder = folder
        write_record(folder)
        self.log = folder / LOG_FILE
        self.log_offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=job_environment(environment),
                start_new_session=True,
                preexec_fn=prepare_job_process,
            )

    def poll(self) -> int | None:
        """Return the exit code, after recording it, if the job has ended, otherwise None."""
        return None if self.process.poll() is None else self.wait()

    def wait(self) -> int:
        """Wait for the end of the job, record it, and return the exit code as a shell gives it.

        A job that gets a signal before it trains, or after, ends at once and has nothing to save:
        it counts as preempted, not as failed. So does a job killed by SIGUSR1, which a queue sends,
        before its handler was installed.
        """
        code = self.process.wait()
        code = code if code >= 0 else 128 - code
        if code - 128 in (*self.sent_signals, signal.SIGUSR1):
            code = EXIT_PREEMPTED
        write_record(self.folder, code, self.cause())
        return code

    def cause(self) -> str | None:
        """Return the line of this start's output that names a cause, or the signal."""
        with self.log.open("rb") as log:
            log.seek(self.log_offset)
            output = log.read().decode(errors="replace")
        code = self.process.returncode
        if code >= 0:
            return failure_cause(output)
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return reported_cause(output) or f"killed by {signal_name(-code)}{hint}"

    def send(self, signal_number: int) -> None:
        """Send the job a signal, which it passes on to its ranks."""
        if signal_number in STOP_SIGNALS:
            self.sent_signals.add(signal_number)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal_number)

    def kill(self) -> None:
        """Kill the job and all processes of its session, and record it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def prepare_job_process() -> None:
    """Set up the child process before it becomes the job."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent may have blocked some


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new Python finds this package and does not buffer."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in paths if path)
    return {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

"""The jobs of a sweep: their records, their folders, and their processes.

Each job has a numbered folder with a record of its state (`job.json`) and, under our launchers, a
note of what was submitted (`submitted.json`) and a log (`job.log`). A sweep that is started again
recognises its jobs by their overrides: finished ones are left alone, others are resumed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal, final

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.cli.compose import Composer
from credit_dp.cli.saved_config import tuples_to_lists
from credit_dp.config import Config, as_dict, by_dotted_key
from credit_dp.distributed.signals import (
    EXIT_PREEMPTED,
    STOP_SIGNALS,
    Terminated,
    signal_name,
)
from credit_dp.distributed.slurm import slurm_job_id
from credit_dp.errors import UserError, quote, traceback_message
from credit_dp.forkserver import die_with_parent
from credit_dp.training.run_folder import RunFolder, write_run_file

JobState = Literal["running", "done", "failed", "preempted"]
RECORD_FILE = "job.json"
SLURM_PREFIXES = ("srun: ", "slurmstepd: ")  # of lines that SLURM adds after a failure


@final
@dataclass(frozen=True)
class JobRecord:
    """The record of a job. `cause` is one line; times are ISO 8601 in UTC."""

    overrides: tuple[str, ...]
    state: JobState
    started: str
    exit_code: int | None = None
    cause: str | None = None
    ended: str | None = None
    slurm_job: str | None = None


@final
class JobResult:
    """The exit code and cause of a job, set by the code that runs it; a failure unless set."""

    def __init__(self) -> None:
        self.code = 1
        self.cause: str | None = None


@contextlib.contextmanager
def record_job(folder: Path, overrides: Sequence[str]) -> Iterator[JobResult]:
    """Keep the record of a job while it runs, and write how it ended.

    Raises:
        UserError: the folder can't be written to.
    """
    record = begin_record(folder, overrides)
    result = JobResult()
    try:
        yield result
    except KeyboardInterrupt:
        result.code, result.cause = 130, "interrupted"
        raise
    except Terminated as stop:
        result.code, result.cause = stop.code, "terminated"
        raise
    finally:
        end_record(folder, record, result.code, result.cause)


def begin_record(folder: Path, overrides: Sequence[str]) -> JobRecord:
    """Write a record that the job is running; return it."""
    record = JobRecord(tuple(overrides), "running", utc_now(), slurm_job=slurm_job_id(os.environ))
    write_record(folder, record)
    return record


def end_record(folder: Path, record: JobRecord, code: int, cause: str | None) -> None:
    """Write how a job ended; only a failure has a cause."""
    state: JobState = "failed"
    if code in (0, EXIT_PREEMPTED):
        state = "preempted" if code else "done"
    cause = (cause or f"exit code {code}") if state == "failed" else None
    write_record(folder, replace(record, state=state, exit_code=code, cause=cause, ended=utc_now()))


def write_record(folder: Path, record: JobRecord) -> None:
    """Write the record atomically, as sweeps are read while they run."""
    write_run_file(folder / RECORD_FILE, json.dumps(asdict(record), indent=2) + "\n")


def read_overrides(path: Path) -> list[str] | None:
    """Return the overrides in a record or submission; None if there is no valid file."""
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))["overrides"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return [str(text) for text in overrides] if isinstance(overrides, list) else None


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


def utc_now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


SUBMISSION_FILE = "submitted.json"  # overrides and queue number of a job that may not have started
# Keys that do not change what a job computes.
SWEEP_KEY_PREFIXES = ("run.", "hydra.", "hydra/", "resume")
# Keys and values that a run resolves for the machine it runs on, so that its config file differs.
UNRESOLVED_VALUES = (("device", "auto"), ("parallel.data", None))

EarlierState = Literal["finished", "unfinished", "new"]


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep, with its folder; `overrides` excludes keys of the sweep."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    config: Config
    state: EarlierState


def plan_jobs(composer: Composer, choices: Sequence[Sequence[str]], sweep: Path) -> list[Job]:
    """Return a job for each combination of the choices, in the order of Hydra's sweeper.

    Args:
        composer: of the command.
        choices: for each key, the overrides to choose from.
        sweep: the folder of the sweep.
    """
    known_folders = folders_by_identity(sweep)
    jobs = []
    next_number = max((int(folder.name) for folder in job_folders(sweep)), default=-1) + 1
    for texts in all_combinations(choices):
        config = composer.compose_config(texts)
        overrides = tuple(
            text for text in texts if not text.lstrip("+").startswith(SWEEP_KEY_PREFIXES)
        )
        folder = known_folders.get(job_identity(overrides))
        if folder is None:
            folder, next_number = sweep / str(next_number), next_number + 1
        jobs.append(Job(int(folder.name), folder, overrides, config, folder_state(folder, config)))
    return jobs


def all_combinations(choices: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return all combinations of one override of each key; the last key varies fastest."""
    return [list(texts) for texts in product(*choices)]


def job_identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return a key that is equal for jobs that compute the same."""
    texts = (text.lstrip("+") for text in overrides)
    return tuple(sorted(text for text in texts if not text.startswith(SWEEP_KEY_PREFIXES)))


def write_submission(job: Job, slurm_job: str | None = None) -> None:
    """Write into a job's folder, before it starts, what it is and its number in a queue."""
    content = {"overrides": job.overrides, "slurm_job": slurm_job}
    write_run_file(job.folder / SUBMISSION_FILE, json.dumps(content, indent=2) + "\n")


def job_folders(sweep: Path) -> list[Path]:
    """Return the numbered folders in a sweep."""
    if not sweep.is_dir():
        return []
    return [folder for folder in sweep.iterdir() if folder.name.isdecimal() and folder.is_dir()]


def folders_by_identity(sweep: Path) -> dict[tuple[str, ...], Path]:
    """Return the folder of each job that was started or submitted before."""
    folders = {}
    for folder in job_folders(sweep):
        for name in (SUBMISSION_FILE, RECORD_FILE):
            overrides = read_overrides(folder / name)
            if overrides is not None:
                folders[job_identity(overrides)] = folder
    return folders


def earlier_state(folder: Path, overrides: Sequence[str], config: Config) -> EarlierState:
    """Return how far a job has come, if the run in the folder was this job, otherwise `new`."""
    before = read_overrides(folder / RECORD_FILE)
    same = before is not None and job_identity(before) == job_identity(overrides)
    return folder_state(folder, config) if same else "new"


def folder_state(folder: Path, config: Config) -> EarlierState:
    """Return how far the job in a folder has come; it has finished if its scores are there.

    Raises:
        UserError: the folder has a run with another config.
    """
    run = RunFolder(folder)
    if not run.config.exists():
        return "new"
    changed = first_difference(run.config, config)
    if changed is not None:
        raise UserError(
            f"run.name: {folder} was run with these overrides, but with another config "
            f"({changed}). Give another run.name, or remove that folder to run the job afresh."
        )
    return "finished" if run.scores.is_file() else "unfinished"


def first_difference(path: Path, config: Config) -> str | None:
    """Return the first key that differs from a run's config file, with both values, or None.

    Keys that the run resolved itself, such as `device=auto`, are not compared.
    """
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return f"{path.name} can't be read"
    saved_values = values_by_key(saved if isinstance(saved, dict) else {})
    for key, value in values_by_key(as_dict(config)).items():
        if key.startswith(SWEEP_KEY_PREFIXES) or (key, value) in UNRESOLVED_VALUES:
            continue
        if config.data.dates.undetermined and key.startswith("data.dates."):
            continue
        if saved_values.get(key, ...) != value:
            return f"{key}: {saved_values.get(key, 'nothing')}, now {value}"
    return None


def values_by_key(table: Mapping[Any, Any]) -> dict[str, object]:
    """Return all values by dotted key, with tuples as lists."""
    return {key: tuples_to_lists(value) for key, value in by_dotted_key(table).items()}


def override_choices(overrides: Sequence[Override], composer: Composer) -> list[list[str]]:
    """Return, for each key of a command line, the overrides to choose from.

    Raises:
        UserError: a key has a range, which has infinitely many values.
    """
    choices = []
    for override in overrides:
        values = expand_override(composer, override)
        if not values:
            raise UserError(f"{override.key_or_group}: needs a list of values, like 1,2,3")
        choices.append(values)
    return choices


def expand_override(composer: Composer, override: Override) -> list[str]:
    """Return one override for each value; none if the values are a range."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        return []
    # A glob, such as `model=glob(*)`, gets its choices from the loader.
    override.config_loader = composer.hydra.config_loader
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


LOG_FILE = "job.log"  # output of the job, in its folder


@final
class JobProcess:
    """A running job with its record; its output goes to `job.log` in its folder.

    It has its own session, so that Ctrl-C in a terminal reaches only this process, which decides
    how its jobs end. If this process dies, the job dies too.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.sent_signals: set[int] = set()
        self.record = begin_record(folder, overrides)
        self.log = folder / LOG_FILE
        self.log_offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=prepare_job_process,
            )

    def poll(self) -> int | None:
        """Return the exit code, after recording it, if the job has ended, otherwise None."""
        code = self.process.poll()
        return None if code is None else self.record_end(code)

    def wait(self) -> int:
        """Wait for the end of the job, record it, and return the exit code."""
        return self.record_end(self.process.wait())

    def record_end(self, code: int) -> int:
        """Record how the job ended, and return the exit code as a shell gives it.

        A job that gets a signal before it trains, or after, ends at once and has nothing to save:
        it counts as preempted, not as failed. So does a job killed by SIGUSR1, which a queue sends,
        before its handler was installed.
        """
        code = code if code >= 0 else 128 - code
        if code - 128 in (*self.sent_signals, signal.SIGUSR1):
            code = EXIT_PREEMPTED
        end_record(self.folder, self.record, code, self.cause())
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
        """Kill the job and all processes of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def prepare_job_process() -> None:
    """Set up the child process before it becomes the job."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent may have blocked some


def train_command(folder: Path, texts: Sequence[str]) -> list[str]:
    """Return the command that runs a job in its folder, or resumes it."""
    keys = [*texts, f"run.dir={quote(str(folder))}", "resume=auto"]
    return [sys.executable, "-m", "credit_dp", "train", *keys]


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new Python finds this package and does not buffer."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in paths if path)
    return {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

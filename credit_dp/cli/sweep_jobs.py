"""The jobs of a sweep: their folders, their records, and each as a process of its own."""

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
from credit_dp.cli.overrides import quote
from credit_dp.cli.saved_config import flatten_keys, tuples_to_lists
from credit_dp.config import Config, as_dict
from credit_dp.distributed.forkserver import die_with_parent
from credit_dp.distributed.signals import EXIT_PREEMPTED, STOP_SIGNALS, Terminated, slurm_job_id
from credit_dp.errors import UserError
from credit_dp.training.run_folder import RunFolder, write_text_atomic

JobState = Literal["running", "done", "failed", "preempted"]
RECORD_FILE = "job.json"
SLURM_PREFIXES = ("srun: ", "slurmstepd: ")  # what follows from the cause


@final
@dataclass(frozen=True)
class JobRecord:
    """A run of a sweep. `cause` is one line; times are ISO 8601 in UTC."""

    overrides: tuple[str, ...]
    state: JobState
    started: str
    exit_code: int | None = None
    cause: str | None = None
    ended: str | None = None
    slurm_job: str | None = None


@final
class JobResult:
    """How a job ends, to be told by whoever runs it; it counts as failed until then."""

    def __init__(self) -> None:
        self.code = 1
        self.cause: str | None = None


@contextlib.contextmanager
def record_job(folder: Path, overrides: Sequence[str]) -> Iterator[JobResult]:
    """Keep the record of a job while it runs, and note how it ended.

    Raises:
        UserError: the folder cannot be written to.
    """
    record, ending = begin_record(folder, overrides), JobResult()
    try:
        yield ending
    except KeyboardInterrupt:
        ending.code, ending.cause = 130, "interrupted"
        raise
    except Terminated as stop:
        ending.code, ending.cause = stop.code, "terminated"
        raise
    finally:
        end_record(folder, record, ending.code, ending.cause)


def begin_record(folder: Path, overrides: Sequence[str]) -> JobRecord:
    """Note that a job runs from now on.

    Raises:
        UserError: the folder cannot be written to.
    """
    record = JobRecord(tuple(overrides), "running", utc_now(), slurm_job=slurm_job_id(os.environ))
    write_record(folder, record)
    return record


def end_record(folder: Path, record: JobRecord, code: int, cause: str | None) -> None:
    """Note how a job has ended; only one that failed has a cause.

    Raises:
        UserError: the folder cannot be written to.
    """
    state: JobState = "failed"
    if code in (0, EXIT_PREEMPTED):
        state = "preempted" if code else "done"
    cause = (cause or f"exit code {code}") if state == "failed" else None
    write_record(folder, replace(record, state=state, exit_code=code, cause=cause, ended=utc_now()))


def write_record(folder: Path, record: JobRecord) -> None:
    """Write the record; readers see the old one or the new one.

    Raises:
        UserError: the folder cannot be written to.
    """
    write_text_atomic(folder / RECORD_FILE, json.dumps(asdict(record), indent=2) + "\n")


def read_overrides(path: Path) -> list[str] | None:
    """The overrides in such a file; None if there is none, or not a whole one."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["overrides"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return [str(text) for text in told] if isinstance(told, list) else None


def failure_cause(told: str) -> str | None:
    """The line of what a program said that names the cause: `error: ...`, or its last one."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    own = [line for line in lines if not line.startswith(SLURM_PREFIXES)]
    return next((found[-1] for found in (named, own, lines) if found), None)


def utc_now() -> str:
    """This moment, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


SUBMISSION_FILE = "submitted.json"  # beside FILE: what is to be done there
SWEEP_KEY_PREFIXES = (
    "run.",
    "hydra.",
    "hydra/",
    "resume",
)  # not of what a job computes
# What a run makes definite, depending on where it runs: key and value that leave it open.
UNRESOLVED_VALUES = (("device", "auto"), ("parallel.data", None))

EarlierState = Literal["finished", "unfinished", "new"]


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep: its overrides, but for those of the whole sweep, and its folder."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    config: Config
    state: EarlierState


def plan_jobs(composer: Composer, choices: Sequence[Sequence[str]], sweep: Path) -> list[Job]:
    """A job for each combination of the choices, in the order of Hydra's sweeper.

    Args:
        composer: of the command.
        choices: for each key the overrides to choose from.
        sweep: the folder of the sweep.

    Raises:
        UserError: a combination is not allowed, or a job was run before with another config.
    """
    known, jobs = folders_by_identity(sweep), []
    free = max((int(folder.name) for folder in job_folders(sweep)), default=-1) + 1
    for texts in all_combinations(choices):
        config = composer.config(texts)
        overrides = tuple(
            text for text in texts if not text.lstrip("+").startswith(SWEEP_KEY_PREFIXES)
        )
        folder = known.get(job_identity(overrides))
        if folder is None:
            folder, free = sweep / str(free), free + 1
        jobs.append(Job(int(folder.name), folder, overrides, config, folder_state(folder, config)))
    return jobs


def all_combinations(choices: Sequence[Sequence[str]]) -> list[list[str]]:
    """One override of each key, in every way, the last key's values changing fastest."""
    return [list(texts) for texts in product(*choices)]


def job_identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """What two jobs have in common if they are the same."""
    texts = (text.lstrip("+") for text in overrides)
    return tuple(sorted(text for text in texts if not text.startswith(SWEEP_KEY_PREFIXES)))


def write_submission(job: Job, slurm_job: str | None = None) -> None:
    """Leave in a job's folder what it is, before it starts, and its number in a queue.

    Raises:
        UserError: the folder cannot be written to.
    """
    told = {"overrides": job.overrides, "slurm_job": slurm_job}
    write_text_atomic(job.folder / SUBMISSION_FILE, json.dumps(told, indent=2) + "\n")


def job_folders(sweep: Path) -> list[Path]:
    """The folders of jobs in a sweep."""
    if not sweep.is_dir():
        return []
    return [folder for folder in sweep.iterdir() if folder.name.isdecimal() and folder.is_dir()]


def folders_by_identity(sweep: Path) -> dict[tuple[str, ...], Path]:
    """The folder of each job that was started or submitted before."""
    found = {}
    for folder in job_folders(sweep):
        for name in (SUBMISSION_FILE, RECORD_FILE):
            overrides = read_overrides(folder / name)
            if overrides is not None:
                found[job_identity(overrides)] = folder
    return found


def earlier_state(folder: Path, overrides: Sequence[str], config: Config) -> EarlierState:
    """How far a job has come, if it was this one that was run in the folder.

    Raises:
        UserError: it was, with another config.
    """
    before = read_overrides(folder / RECORD_FILE)
    same = before is not None and job_identity(before) == job_identity(overrides)
    return folder_state(folder, config) if same else "new"


def folder_state(folder: Path, config: Config) -> EarlierState:
    """How far the job in a folder has come; one has finished that has its scores.

    Raises:
        UserError: the folder is that of a run with another config.
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
    """The first key that has another value in a run's config file, with both; None if none has."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return f"{path.name} can't be read"
    before = values_by_key(saved if isinstance(saved, dict) else {})
    for key, value in values_by_key(as_dict(config)).items():
        dates = config.data.dates.open and key.startswith("data.dates.")
        open_here = dates or (key, value) in UNRESOLVED_VALUES
        if (
            not open_here
            and not key.startswith(SWEEP_KEY_PREFIXES)
            and before.get(key, ...) != value
        ):
            return f"{key}: {before.get(key, 'nothing')}, now {value}"
    return None


def values_by_key(table: Mapping[Any, Any]) -> dict[str, object]:
    """All values by dotted key, tuples as lists."""
    return {".".join(map(str, key)): tuples_to_lists(value) for key, value in flatten_keys(table)}


def override_choices(overrides: Sequence[Override], composer: Composer) -> list[list[str]]:
    """For each key of a command line the overrides to choose from.

    Raises:
        UserError: a key has a range, of which there is no end of values.
    """
    choices = []
    for override in overrides:
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
            continue
        if not override.is_discrete_sweep():
            raise UserError(f"{override.key_or_group}: needs a list of values, like 1,2,3")
        override.config_loader = composer.hydra.config_loader
        key = override.get_key_element()
        choices.append([f"{key}={text}" for text in override.sweep_string_iterator()])
    return choices


LOG_FILE = "job.log"  # what the job says, in its folder


@final
class JobProcess:
    """A job that runs; its record is kept, and what it says goes to `job.log` in its folder.

    It has a session of its own: a terminal's Ctrl-C reaches this process alone, and dies with it.

    Raises:
        UserError: its folder cannot be written to.
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
        """The exit code if the job has ended, which is noted then, else None."""
        code = self.process.poll()
        return None if code is None else self.record_end(code)

    def wait(self) -> int:
        """Wait for the end of the job, and note it; the exit code."""
        return self.record_end(self.process.wait())

    def record_end(self, code: int) -> int:
        """Write down how the job ended, and return the exit code that a shell gives.

        A job that is asked to stop before it trains, or when it is through, ends at once with
        nothing to save: it counts as stopped, and not as failed. So does one that SIGUSR1 killed,
        which a queue sends, while it had no ear for it.
        """
        code = code if code >= 0 else 128 - code
        if code - 128 in (*self.sent_signals, signal.SIGUSR1):
            code = EXIT_PREEMPTED
        end_record(self.folder, self.record, code, self.cause())
        return code

    def cause(self) -> str | None:
        """The line of what the job has said this time that names a cause."""
        with self.log.open("rb") as log:
            log.seek(self.log_offset)
            return failure_cause(log.read().decode(errors="replace"))

    def send(self, number: int) -> None:
        """Send the job a signal, which it hands on to its ranks."""
        if number in STOP_SIGNALS:
            self.sent_signals.add(number)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the job with all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def prepare_job_process() -> None:
    """What the job's process does before it becomes the job."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it hears all signals, whoever started it


def train_command(folder: Path, texts: Sequence[str]) -> list[str]:
    """The command that runs a job in its folder, or goes on with it."""
    keys = [*texts, f"run.dir={quote(str(folder))}", "resume=auto"]
    return [sys.executable, "-m", "credit_dp", "train", *keys]


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One in which another Python finds the package that runs here, and says things at once."""
    here = str(Path(__file__).resolve().parents[2])
    found = [here, environment.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in found if path)
    return {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

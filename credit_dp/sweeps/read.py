"""Read the folders of a sweep.

In this order: `Job` with everything about one run and `Sweep`, how to read them, the metrics to
compare runs, the status of a run from its record or its logs, its CSV log, and small files. A
missing or damaged file is never an error, because runs may be writing.
"""

import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, final

import yaml  # type: ignore[import-untyped]

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError, traceback_message
from credit_dp.training.loggers import read_csv_log
from credit_dp.training.run_folder import RunFolder

LONGEST_WARM_UP = 10  # steps
STEP_COLUMNS = ("seconds", "samples_per_second", "wait_seconds", "sent_bytes", "sent_messages")
AXES = ("pipeline", "data", "ensemble", "domain")
ENDED = ("done", "failed", "preempted")
STALLED_AFTER_SECONDS = 1800.0  # building, reading and scoring write nothing for minutes
LOG_TAIL_LENGTH = 20_000  # characters read from the end of a rank's log

# A line of the run folder's logger.
LIFECYCLE_LINE = re.compile(r"^(\S+ \S+) \[rank \d+\] (\w+) credit_dp\.training\.run_folder: (.*)$")
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank ")
HOST_LINE = re.compile(r"started as process \d+ on (\S+)")
RUN_MARKERS = (".hydra/overrides.yaml", "job.json", "submitted.json")  # any marks a run's folder
LAUNCH_KEYS = ("run.", "hydra.", "hydra/")  # where and how a run is started, not what it computes
RELATIVE_RMSE = "relative_rmse"

# The default is the first of these that any run has.
DEFAULT_METRICS = (RELATIVE_RMSE, "validation_rmse", "loss")
LARGER_IS_BETTER = ("samples_per_second",)

# The C loader reads a thousand configs in seconds instead of a minute; not every build has it.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Row = Mapping[str, float]


@final
@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes:
        state: done, running, failed, preempted, stalled or not started.
        cause: of a failure, in one line.
    """

    state: str
    cause: str = ""


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        overrides: value by key, as given on the command line.
        config: resolved; empty before the run has started.
        numbers: one for each column of its log, see `summarise`.
        scores: its `metrics.json`; empty before its end.
    """

    folder: Path
    overrides: Mapping[str, str]
    status: RunStatus
    config: Mapping[str, Any]
    numbers: Mapping[str, float]
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return its number in the sweep."""
        return self.folder.name

    @property
    def steps(self) -> int:
        """Return the number of optimiser steps that are done."""
        return int(self.numbers.get("step", 0))

    @property
    def all_steps(self) -> int | None:
        """Return the number of optimiser steps of the complete run; None if not known yet."""
        return get_nested_int(self.config, "trainer.steps")

    @property
    def mesh(self) -> dict[str, int] | None:
        """Return the number of ranks of each axis; None if not known yet."""
        if not self.config:
            return None
        return {axis: get_nested_int(self.config, f"parallel.{axis}") or 1 for axis in AXES}

    def value(self, key: str) -> str:
        """Return the override of a key; for an interpolation, its value in the config."""
        text = self.overrides.get(key, "")
        resolved = get_nested(self.config, key) if text.startswith("$") else None
        return text if resolved is None else str(resolved)

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """Return all metrics that the run has by now, by name.

        They are `relative_rmse`, the columns of its log, and `rmse/CHANNEL/LEAD` of its scores.
        """
        rmse = {
            f"rmse/{channel}/{lead}": value
            for channel, leads in as_mapping(self.scores.get("rmse")).items()
            for lead, scores in as_mapping(leads).items()
            if (value := as_nonnegative(as_mapping(scores).get("model"))) is not None
        }
        relative = relative_rmse(self.scores)
        first = {} if relative is None else {RELATIVE_RMSE: relative}
        return first | {k: v for k, v in self.numbers.items() if k != "step"} | rmse

    def rows(self) -> list[Row]:
        """Read the rows of its log, without a cache."""
        return read_log(RunFolder(self.folder).log)

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Return the names of the machines that its ranks ran on."""
        texts = (read_text(log) for log in self.folder.glob("logs/rank-*.log"))
        return frozenset(name for text in texts for name in HOST_LINE.findall(text))


@final
@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in order; `keys` are the keys whose values differ between runs."""

    folder: Path
    jobs: tuple[Job, ...]
    keys: tuple[str, ...]

    def job(self, name: str) -> Job:
        """Return the run with this number.

        Raises:
            KeyError: there is no such run.
        """
        return {job.name: job for job in self.jobs}[name]


def read_sweep(folder: Path | str) -> Sweep:
    """Read the folder of a sweep; its runs may be in any state.

    Raises:
        UserError: the folder does not exist, or holds no sweep.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder. Give the folder of a sweep.")
    try:
        names = [path.name for path in folder.iterdir() if is_run_folder(path)]
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}).") from error
    if not names:
        raise UserError(
            f"{folder}: is not a sweep: it has no folder of a run. Give the folder that --multirun "
            "created."
        )
    jobs = tuple(read_job(folder / name) for name in sorted(names, key=job_order))
    return Sweep(folder, jobs, swept_keys(jobs))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return any((folder / marker).exists() for marker in RUN_MARKERS)


def job_order(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, then other names."""
    return (False, int(name), name) if name.isdecimal() else (True, 0, name)


def swept_keys(jobs: tuple[Job, ...]) -> tuple[str, ...]:
    """Return the keys whose values differ between runs, in the order of the command line."""
    keys = dict.fromkeys(
        key for job in jobs for key in job.overrides if not key.startswith(LAUNCH_KEYS)
    )
    return tuple(key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1)


def choose_metric(jobs: Sequence[Job], requested: str) -> str:
    """Return the requested metric, or by default the first of `DEFAULT_METRICS` that exists.

    Raises:
        UserError: no run has the requested metric.
    """
    names = list(dict.fromkeys(name for job in jobs for name in job.metrics))
    if not requested:
        return next((name for name in DEFAULT_METRICS if name in names), RELATIVE_RMSE)
    if requested not in names:
        available = [name for name in names if not name.startswith(("rmse/", "loss/"))]
        if any(name.startswith("rmse/") for name in names):
            available.append("rmse/VARIABLE/HOURSh")
        raise UserError(
            f"metric: no run of this sweep has {requested!r} yet, but "
            f"{', '.join(available) or 'nothing'}.{did_you_mean(requested, names)}"
        )
    return requested


def relative_rmse(scores: Mapping[str, Any]) -> float | None:
    """Return the final RMSE relative to persistence, at the longest lead time, over all channels.

    Ratios of different variables have no units, so that their mean is meaningful.
    """
    ratios = []
    for leads in as_mapping(scores.get("rmse")).values():
        by_lead = as_mapping(leads)
        hours = [lead for lead in by_lead if lead.removesuffix("h").isdecimal()]
        if not hours:
            continue
        last = as_mapping(by_lead[max(hours, key=lambda lead: int(lead.removesuffix("h")))])
        model = as_nonnegative(last.get("model"))
        persistence = as_nonnegative(last.get("persistence"))
        if model is not None and persistence:
            ratios.append(model / persistence)
    return sum(ratios) / len(ratios) if ratios else None


def as_nonnegative(value: object) -> float | None:
    """Return a finite number of at least 0 as float; None for anything else."""
    valid = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if valid else None  # type: ignore[arg-type]


def read_job(folder: Path) -> Job:
    """Read the folder of a run, which may not have started."""
    files = RunFolder(folder)
    config = as_mapping(read_yaml(files.config))
    numbers = summarise(read_log(files.log))
    record = as_mapping(read_json(folder / "job.json"))
    return Job(
        folder=folder,
        overrides=overrides_by_key(read_overrides(folder, record)),
        status=run_status(folder, record, config, numbers),
        config=config,
        numbers=numbers,
        scores=as_mapping(read_json(files.scores)),
    )


def read_overrides(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a run: from its record, its submission, or hydra's own file.

    The record has only the overrides that change what the run computes.
    """
    submission = as_mapping(read_json(folder / "submitted.json"))
    recorded = as_list(record.get("overrides")) or as_list(submission.get("overrides"))
    return recorded or as_list(read_yaml(folder / ".hydra" / "overrides.yaml"))


def overrides_by_key(overrides: list[str]) -> dict[str, str]:
    """Return values by key; the last value of a key counts."""
    # `+key=` and `++key=` are hydra's words for adding a key.
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


def run_status(
    folder: Path, record: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, float]
) -> RunStatus:
    """Return the status of a run: the first that its record, its scores or its logs give.

    Args:
        folder: of the run.
        record: its `job.json`; {} if there is none.
        config: its `config.yaml`; {} if there is none.
        numbers: the summary of its log.
    """
    # A job record is written by the launcher, which knows how the process ended.
    if record.get("state") in ENDED:
        cause = str(record.get("cause") or "")
        return RunStatus(str(record["state"]), " ".join(cause.split()))
    # Runs without a record: finished if all steps are logged and the final scores written.
    complete = "step" in numbers and numbers["step"] == get_nested(config, "trainer.steps")
    if complete and (folder / "metrics.json").exists():
        return RunStatus("done")
    logs = sorted(folder.glob("logs/rank-*.log"))
    since = start_time(record)
    exits = [last_exit(read_text(log)[-LOG_TAIL_LENGTH:]) for log in logs]
    ends = [end for end in exits if end is not None and end[0] >= since]
    failures = sorted(end for end in ends if end[1] == "ERROR")
    if failures:
        # The earliest: other ranks may have failed because of it.
        return RunStatus("failed", failures[0][2])
    if ends:
        # Ended without an error, but before the last step.
        return RunStatus("preempted")
    if not (logs or numbers or record or config):
        return RunStatus("not started")
    return RunStatus("running" if is_recently_written(folder, config, numbers) else "stalled")


def start_time(record: Mapping[str, Any]) -> str:
    """Return when a recorded run started, as its logs write times; empty if that is unknown.

    Until its ranks write, their logs end with an earlier start.
    """
    try:
        started = datetime.fromisoformat(str(record.get("started")))
    except ValueError:
        return ""
    return f"{started.astimezone():%Y-%m-%d %H:%M:%S}"  # in local time


def last_exit(text: str) -> tuple[str, str, str] | None:
    """Return time, level (`INFO` or `ERROR`) and cause of a rank's last exit; None while it runs.

    Args:
        text: the end of the rank's log.
    """
    lines = text.splitlines()
    events = [
        (index, match) for index, line in enumerate(lines) if (match := LIFECYCLE_LINE.match(line))
    ]
    if not events or not events[-1][1][3].startswith("ended"):
        return None
    index, match = events[-1]
    # A traceback follows the line, without the prefix of log lines.
    trace = []
    for line in lines[index + 1 :]:
        if LOG_LINE.match(line):
            break
        trace.append(line)
    message = traceback_message(trace) or ""
    return match[1], match[2], message.removeprefix("credit_dp.errors.UserError: ").strip()


def is_recently_written(
    folder: Path, config: Mapping[str, Any], numbers: Mapping[str, float]
) -> bool:
    """Whether a file was written in the last half hour, or in the time of five rows of the log."""
    row_seconds = numbers.get("seconds", 0.0) * (get_nested_int(config, "trainer.log_every") or 1)
    written = 0.0
    for path in (folder, folder / "metrics.csv", folder / "job.json", *folder.glob("logs/*")):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    # A folder's own time changes when a file is created in it.
    return time.time() - written < max(STALLED_AFTER_SECONDS, 5 * row_seconds)


def read_log(path: Path) -> list[Row]:
    """Return the rows of a CSV log as numbers, without empty cells; [] if there is no log."""
    try:
        _, rows = read_csv_log(path)
    except UserError:
        return []
    return [
        {name: value for name, text in row.items() if (value := parse_number(text)) is not None}
        for row in rows
    ]


def parse_number(text: str) -> float | None:
    """Return a text as finite number; None if it is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def after_warm_up(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows after the warm-up, which is ten steps, or a third of all if that is less."""
    if not rows:
        return []
    warm_up = min(LONGEST_WARM_UP, math.ceil(rows[-1]["step"] / 3))
    # A row is about all steps since the row before, which have to be after the warm-up.
    starts = [0.0, *(row["step"] for row in rows)]
    return [row for row, start in zip(rows, starts, strict=False) if start >= warm_up]


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Return one number for each column.

    The median, without the warm-up, of `STEP_COLUMNS`; the minimum of `validation_rmse`; the last
    value of all others.
    """
    summary = {name: value for row in rows for name, value in row.items()}
    for name in STEP_COLUMNS:
        values = column(after_warm_up(rows), name) or column(rows, name)
        if values:
            summary[name] = median(values)
    scores = column(rows, "validation_rmse")
    return summary | ({"validation_rmse": min(scores)} if scores else {})


def column(rows: Iterable[Row], name: str) -> list[float]:
    """Return the values of one column, from the rows that have it."""
    return [row[name] for row in rows if name in row]


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file as plain values; None if it can't be parsed."""
    try:
        return yaml.load(read_text(path), YAML_LOADER)  # both are safe loaders
    except (yaml.YAMLError, ValueError):
        return None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it can't be parsed."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        return None


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a dict with its keys as text; {} for anything else."""
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {}


def as_list(value: Any) -> list[str]:
    """Return the entries of a list as text; [] for anything else."""
    return [str(entry) for entry in value] if isinstance(value, list) else []


def get_nested(mapping: Any, key: str) -> Any:
    """Return the value of a key with dots in nested dicts; None if a level is missing."""
    for name in key.split("."):
        mapping = mapping.get(name) if isinstance(mapping, dict) else None
    return mapping


def get_nested_int(mapping: Any, key: str) -> int | None:
    """Return the integer of a key with dots in nested dicts; None if it is not one."""
    value = get_nested(mapping, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

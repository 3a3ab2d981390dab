"""Read the folders of a sweep: overrides, state, log and scores of each run.

A missing or damaged file is never an error, because runs may be writing.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any, final

import yaml  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.errors import UserError, traceback_message
from credit_dp.training.loggers import read_csv_log
from credit_dp.training.run_folder import RunFolder

SUBMISSION_FILE = "submitted.json"  # of a job: its overrides, and its number in a queue
RECORD_FILE = "job.json"  # of a job: its state, and how it ended
HYDRA_FILE = ".hydra/overrides.yaml"  # of a run that is no job of a sweep
LAUNCH_KEYS = ("run.", "hydra.", "hydra/", "resume")  # they do not change what a run computes
LONGEST_WARM_UP = 10  # steps
STEP_COLUMNS = ("seconds", "samples_per_second", "wait_seconds", "sent_bytes", "sent_messages")
AXES = ("pipeline", "data", "ensemble", "domain")
RELATIVE_RMSE = "relative_rmse"
LOG_TAIL_LENGTH = 20_000  # characters read from the end of a rank's log
# A line that a run writes to the log of each rank as it starts and ends.
LIFE_LINE = re.compile(
    r"^(\S+ \S+) \[rank \d+\] (\w+) credit_dp\.training\.run_folder: (started|ended).*$", re.M
)

# The C loader reads a thousand configs in seconds instead of a minute; not every build has it.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Row = Mapping[str, float]


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        overrides: value by key, as given on the command line.
        state: done, running, failed, preempted or not started.
        cause: why it failed, in one line.
        config: resolved; empty before the run has started.
        numbers: one for each column of its log, see `summarise`.
        scores: its `metrics.json`; empty before its end.
    """

    folder: Path
    overrides: Mapping[str, str]
    state: str
    cause: str
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
        steps: int | None = get_nested(self.config, "trainer.steps")
        return steps

    @property
    def mesh(self) -> dict[str, int] | None:
        """Return the number of ranks of each axis; None if not known yet."""
        if not self.config:
            return None
        return {axis: get_nested(self.config, f"parallel.{axis}") or 1 for axis in AXES}

    @property
    def mesh_text(self) -> str | None:
        """Return pipeline x data x domain ranks, such as 1x2x4; None if not known yet.

        Ranks that share members come before those of the domain, if there are several: 1x2x2x4.
        """
        if self.mesh is None:
            return None
        return "x".join(str(n) for axis, n in self.mesh.items() if axis != "ensemble" or n > 1)

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
            f"rmse/{channel}/{lead}h": float(errors["model"])
            for channel, lead, errors in channel_errors(self.scores)
            if is_finite(errors.get("model"))
        }
        relative = relative_rmse(self.scores)
        first = {} if relative is None else {RELATIVE_RMSE: relative}
        return first | {k: v for k, v in self.numbers.items() if k != "step"} | rmse

    def rows(self) -> list[Row]:
        """Read the rows of its log, without a cache."""
        return read_log(RunFolder(self.folder).log)


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
        folders = [
            path
            for path in folder.iterdir()
            if (path / SUBMISSION_FILE).exists() or (path / HYDRA_FILE).exists()
        ]
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}).") from error
    if not folders:
        raise UserError(
            f"{folder}: is not a sweep: it has no folder of a run. Give the folder that --multirun "
            "created."
        )
    jobs = tuple(read_job(path) for path in sorted(folders, key=lambda path: job_order(path.name)))
    given = dict.fromkeys(key for job in jobs for key in job.overrides)
    swept = (
        key
        for key in given
        if not key.startswith(LAUNCH_KEYS) and len({job.overrides.get(key) for job in jobs}) > 1
    )
    return Sweep(folder, jobs, tuple(swept))


def job_order(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, then other names."""
    return (False, int(name), name) if name.isdecimal() else (True, 0, name)


def read_job(folder: Path) -> Job:
    """Read the folder of a run, which may not have started."""
    files = RunFolder(folder)
    config, scores = read_table(files.config), read_table(files.scores)
    numbers = summarise(read_log(files.log))
    # A record is written by the process that watches the job, and knows how it ended.
    record = read_table(folder / RECORD_FILE)
    state, cause = str(record.get("state", "")), str(record.get("cause") or "")
    ends = {get_nested(config, "trainer.steps")}
    if get_nested(config, "trainer.patience"):  # it may have ended before
        ends.add(scores.get("step"))
    if not state and scores and numbers.get("step") in ends:
        state = "done"
    elif not state:
        state, cause = state_in_logs(folder)
    if not state:
        state = "running" if numbers or config else "not started"
    # `+key=` and `++key=` are hydra's words for adding a key.
    pairs = (text.lstrip("+").partition("=") for text in read_overrides(folder) or ())
    overrides = {key: value for key, _, value in pairs}
    return Job(folder, overrides, state, " ".join(cause.split()), config, numbers, scores)


def read_overrides(folder: Path) -> list[str] | None:
    """Return the overrides of a run, those of a job without keys that only launch it.

    None if there is no file of them.
    """
    overrides = read_table(folder / SUBMISSION_FILE).get("overrides")
    if not isinstance(overrides, list):
        overrides = read_file(folder / HYDRA_FILE)
    return [str(text) for text in overrides] if isinstance(overrides, list) else None


def state_in_logs(folder: Path) -> tuple[str, str]:
    """Return the state of a run by the logs of its ranks, and the cause of its failure.

    The state is empty if there are no logs.
    """
    logs = [read_text(log)[-LOG_TAIL_LENGTH:] for log in folder.glob("logs/rank-*.log")]
    ends = []
    for text in logs:
        *_, last = (None, *LIFE_LINE.finditer(text))
        if last is not None and last[3] == "ended":
            ends.append((last[1], last[2], text[last.end() :]))  # time, level and traceback
    failures = sorted(end for end in ends if end[1] == "ERROR")
    if failures:  # the earliest: other ranks may have failed because of it
        message = traceback_message(failures[0][2].splitlines()) or ""
        return "failed", message.removeprefix("credit_dp.errors.UserError: ")
    # Without an error, but before the last step.
    return ("preempted" if ends else "running" if logs else ""), ""


def relative_rmse(scores: Mapping[str, Any]) -> float | None:
    """Return the final RMSE relative to persistence, at the longest lead time, over all channels.

    Ratios of different variables have no units, so that their mean is meaningful.
    """
    longest: dict[str, tuple[int, Row]] = {}
    for channel, lead, errors in channel_errors(scores):
        longest[channel] = max(longest.get(channel, (-1, {})), (lead, errors), key=itemgetter(0))
    ratios = [
        errors["model"] / errors["persistence"]
        for _, errors in longest.values()
        if is_finite(errors.get("model"))
        and is_finite(errors.get("persistence"))
        and errors["persistence"]
    ]
    return mean(ratios) if ratios else None


def channel_errors(scores: Mapping[str, Any]) -> Iterator[tuple[str, int, Row]]:
    """Yield channel, lead time in hours and errors by source of what is readable in scores."""
    rmse = scores.get("rmse")
    for channel, leads in rmse.items() if isinstance(rmse, dict) else ():
        for lead, errors in leads.items() if isinstance(leads, dict) else ():
            if isinstance(errors, dict) and re.fullmatch(r"\d+h", lead):
                yield channel, int(lead[:-1]), errors


def is_finite(value: object) -> bool:
    """Whether a value is a number, neither infinite nor NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


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


def read_file(path: Path) -> Any:
    """Return the content of a JSON or YAML file as plain values; None if it can't be parsed."""
    try:
        text = read_text(path)
        if path.suffix == ".json":
            return json.loads(text)
        return yaml.load(checks.plain_yaml(text), YAML_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def read_table(path: Path) -> dict[str, Any]:
    """Return the table in a JSON or YAML file; {} if there is none."""
    content = read_file(path)
    return content if isinstance(content, dict) else {}


def get_nested(mapping: Any, key: str) -> Any:
    """Return the value of a key with dots in nested dicts; None if a level is missing."""
    for name in key.split("."):
        mapping = mapping.get(name) if isinstance(mapping, dict) else None
    return mapping

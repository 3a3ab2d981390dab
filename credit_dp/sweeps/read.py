"""Reads the folders of a sweep: what its runs were to do, how far they are, and how well."""

import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, final

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.training.loggers import read_csv_log
from credit_dp.training.run_folder import RunFolder

LONGEST_WARM_UP = 10  # steps
STEP_COLUMNS = ("seconds", "samples_per_second", "wait_seconds", "sent_bytes", "sent_messages")

Row = Mapping[str, float]


def read_log(path: Path) -> list[Row]:
    """The log's rows as numbers, cells that have none left out; none if there is no log."""
    try:
        _, rows = read_csv_log(path)
    except UserError:
        return []
    return [
        {name: found for name, text in row.items() if (found := parse_number(text)) is not None}
        for row in rows
    ]


def parse_number(text: str) -> float | None:
    """The finite number that a text is; None if it is none."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def after_warm_up(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows whose steps all come after the warm-up: ten steps, or a third of all if that is less."""
    if not rows:
        return []
    warm_up = min(LONGEST_WARM_UP, math.ceil(rows[-1]["step"] / 3))
    before = [0.0, *(row["step"] for row in rows)]
    return [row for row, begin in zip(rows, before, strict=False) if begin >= warm_up]


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """One number for each column.

    Medians of what a step takes and sends, without the warm-up; the lowest `validation_rmse`; the
    last value of everything else.
    """
    last = {name: value for row in rows for name, value in row.items()}
    for name in STEP_COLUMNS:
        found = column(after_warm_up(rows), name) or column(rows, name)
        if found:
            last[name] = median(found)
    scores = column(rows, "validation_rmse")
    return last | ({"validation_rmse": min(scores)} if scores else {})


def column(rows: Iterable[Row], name: str) -> list[float]:
    """The values of one column, where there are any."""
    return [row[name] for row in rows if name in row]


# Written in C where there is a compiler: a thousand configs take seconds and not a minute.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file as plain values; None if it has none."""
    try:
        return yaml.load(read_text(path), YAML_LOADER)  # both are safe loaders
    except (yaml.YAMLError, ValueError):
        return None


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it has none."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        return None


def as_mapping(value: Any) -> dict[str, Any]:
    """A table with texts as keys; an empty one for anything else."""
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {}


def as_list(value: Any) -> list[str]:
    """The texts of a list; none for anything else."""
    return [str(entry) for entry in value] if isinstance(value, list) else []


def get_nested(table: Any, key: str) -> Any:
    """What a key with dots leads to; None if it leads nowhere."""
    for name in key.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table


def get_nested_int(table: Any, key: str) -> int | None:
    """The whole number that a key with dots leads to; None if there is none."""
    value = get_nested(table, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


ENDED = ("done", "failed", "preempted")
STALLED_AFTER_SECONDS = 1800.0  # seconds: building, reading and scoring write nothing for a while
LOG_TAIL_LENGTH = 20_000  # characters of a log
LIFECYCLE_LINE = re.compile(
    r"^(\S+ \S+) \[rank \d+\] (\w+) credit_dp\.training\.(?:run_folder|log_files): (.*)$"
)
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank ")


@final
@dataclass(frozen=True)
class RunStatus:
    """`state`: done, running, failed, preempted, stalled or not started; `cause`: one line."""

    state: str
    cause: str = ""


def standing(
    folder: Path, record: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, float]
) -> RunStatus:
    """How a run stands.

    Args:
        folder: of the run.
        record: its `job.json`, or nothing.
        config: its `config.yaml`, or nothing.
        numbers: what its log comes to.
    """
    if record.get("state") in ENDED:
        cause = str(record.get("cause") or "")
        return RunStatus(str(record["state"]), " ".join(cause.split()))
    complete = "step" in numbers and numbers["step"] == get_nested(config, "trainer.steps")
    if complete and (folder / "metrics.json").exists():
        return RunStatus("done")
    logs = sorted(folder.glob("logs/rank-*.log"))
    since = start_time(record)
    found = [last_exit(read_text(log)[-LOG_TAIL_LENGTH:]) for log in logs]
    ends = [end for end in found if end is not None and end[0] >= since]
    failures = sorted(end for end in ends if end[1] == "ERROR")
    if failures:
        return RunStatus("failed", failures[0][2])  # the first one: others may only follow from it
    if ends:
        return RunStatus("preempted")
    if not (logs or numbers or record or config):
        return RunStatus("not started")
    return RunStatus("running" if is_recently_written(folder, config, numbers) else "stalled")


def start_time(record: Mapping[str, Any]) -> str:
    """When the process that a record tells of began, as logs write it; empty if that is not known.

    It keeps a record before its ranks write anything: until then, their logs end a life before.
    """
    try:
        started = datetime.fromisoformat(str(record.get("started")))
    except ValueError:
        return ""
    return f"{started.astimezone():%Y-%m-%d %H:%M:%S}"  # of this place


def last_exit(text: str) -> tuple[str, str, str] | None:
    """When, how (`INFO` or `ERROR`) and why a rank's last life ended; None while it lasts."""
    lines = text.splitlines()
    noted = [
        (place, found) for place, line in enumerate(lines) if (found := LIFECYCLE_LINE.match(line))
    ]
    if not noted or not noted[-1][1][3].startswith("ended"):
        return None
    place, found = noted[-1]
    trace = []
    for line in lines[place + 1 :]:
        if LOG_LINE.match(line):
            break
        trace.append(line)
    told = [line for line in trace if line and not line.startswith((" ", "Traceback"))]
    return found[1], found[2], strip_error_type(told[-1] if told else "")


def strip_error_type(line: str) -> str:
    """The last line of a traceback as a user reads it."""
    return line.removeprefix("credit_dp.errors.UserError: ").strip()


def is_recently_written(
    folder: Path, config: Mapping[str, Any], numbers: Mapping[str, float]
) -> bool:
    """Whether something was written within half an hour, or within five times that between rows."""
    between = numbers.get("seconds", 0.0) * (get_nested_int(config, "trainer.log_every") or 1)
    written = 0.0
    for path in (folder, folder / "metrics.csv", folder / "job.json", *folder.glob("logs/*")):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    return time.time() - written < max(STALLED_AFTER_SECONDS, 5 * between)


AXES = ("pipeline", "data", "domain")
HOST_LINE = re.compile(r"started as process \d+ on (\S+)")


@final
@dataclass(frozen=True)
class Job:
    """What one run was to do, how far it is, and what came of it.

    `overrides`: value by key, as they were given. `config`: resolved; empty before it has started.
    `numbers`: one for each column of its log, see `summarise`. `scores`: its `metrics.json`.
    """

    folder: Path
    overrides: Mapping[str, str]
    status: RunStatus
    config: Mapping[str, Any]
    numbers: Mapping[str, float]
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its number in the sweep."""
        return self.folder.name

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken."""
        return int(self.numbers.get("step", 0))

    @property
    def all_steps(self) -> int | None:
        """Optimiser steps that are to be taken, if that is known yet."""
        return get_nested_int(self.config, "trainer.steps")

    @property
    def mesh(self) -> dict[str, int] | None:
        """Ranks of each axis, if that is known yet."""
        if not self.config:
            return None
        return {axis: get_nested_int(self.config, f"parallel.{axis}") or 1 for axis in AXES}

    def value(self, key: str) -> str:
        """The value given to a key; what it came to, where that was an interpolation."""
        text = self.overrides.get(key, "")
        found = get_nested(self.config, key) if text.startswith("$") else None
        return text if found is None else str(found)

    def rows(self) -> list[Row]:
        """The rows of its log, which is read again."""
        return read_log(RunFolder(self.folder).log)

    @cached_property
    def hosts(self) -> frozenset[str]:
        """The machines that its ranks ran on."""
        texts = (read_text(log) for log in self.folder.glob("logs/rank-*.log"))
        return frozenset(name for text in texts for name in HOST_LINE.findall(text))


def read_job(folder: Path, overrides: Mapping[str, str] | None = None) -> Job:
    """What a run's folder tells; nothing of it need be there.

    `overrides` are those that the sweep has for it, for a run that has left none itself.
    """
    files = RunFolder(folder)
    config, numbers = as_mapping(read_yaml(files.config)), summarise(read_log(files.log))
    record = as_mapping(read_json(folder / "job.json"))
    given = read_overrides(folder, record)
    return Job(
        folder,
        overrides_by_key(given) if given else (overrides or {}),
        standing(folder, record, config, numbers),
        config,
        numbers,
        as_mapping(read_json(files.scores)),
    )


def read_overrides(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """The overrides of a run; in its record are those that say what it computes."""
    waiting = as_mapping(read_json(folder / "submitted.json"))
    noted = as_list(record.get("overrides")) or as_list(waiting.get("overrides"))
    return noted or as_list(read_yaml(folder / ".hydra" / "overrides.yaml"))


def overrides_by_key(overrides: list[str]) -> dict[str, str]:
    """Values by key; a key's last value counts."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
MULTIRUN_FILE = "multirun.yaml"


def planned_jobs(folder: Path) -> list[dict[str, str]]:
    """Value by key for each run of the sweep in its order; none where they can't be counted.

    Hydra's own sweeper runs the product of all values. Another one makes its runs up as it goes.
    """
    hydra = as_mapping(get_nested(read_yaml(folder / MULTIRUN_FILE), "hydra"))
    if get_nested(hydra, "sweeper._target_") != BASIC_SWEEPER:
        return []
    params = as_mapping(get_nested(hydra, "sweeper.params"))
    task = [str(text) for text in as_list(get_nested(hydra, "overrides.task"))]
    given = {text.lstrip("+").partition("=")[0] for text in task}
    left = {key: value for key, value in params.items() if key not in given}
    typed = [re.sub(r"\\+\$", "$", f"{key}={value}") for key, value in left.items()]
    typed += task
    choices: dict[str, list[str]] = {}
    try:
        for override in OverridesParser.create().parse_overrides(typed):
            key = override.get_key_element().lstrip("+")
            choices[key] = override_values(override)
    except (HydraException, AssertionError, ValueError):
        return []
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def override_values(override: Override) -> list[str]:
    """The values of an override.

    Raises:
        ValueError: they can't be counted without the config, as those of a pattern.
    """
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ValueError(str(override.input_line))
    return list(override.sweep_string_iterator())


RUN_MARKERS = (".hydra/overrides.yaml", "job.json", "submitted.json")  # of a run's folder
LAUNCH_KEYS = ("run.", "hydra.", "hydra/")  # keys that say where and how a run is started


@final
@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in their order; `keys` are those whose values differ between them."""

    folder: Path
    jobs: tuple[Job, ...]
    keys: tuple[str, ...]

    def job(self, name: str) -> Job:
        """The run with this number.

        Raises:
            KeyError: there is none.
        """
        return {job.name: job for job in self.jobs}[name]


def read_sweep(folder: Path | str) -> Sweep:
    """Read the folder of a sweep, whatever state its runs are in.

    Raises:
        UserError: the folder is not there, or holds no sweep.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: needs the folder of a sweep, but there is none.")
    try:
        found = {path.name for path in folder.iterdir() if is_run_folder(path)}
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}).") from error
    planned = {str(place): given for place, given in enumerate(planned_jobs(folder))}
    if not found and not (folder / MULTIRUN_FILE).exists():
        raise UserError(
            f"{folder}: is no sweep: there is neither {MULTIRUN_FILE} nor a run's folder in it. "
            "Give the folder that --multirun made."
        )
    names = sorted(found | planned.keys(), key=job_order)
    jobs = tuple(read_job(folder / name, planned.get(name)) for name in names)
    return Sweep(folder, jobs, swept_keys(jobs))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return any((folder / sign).exists() for sign in RUN_MARKERS)


def job_order(name: str) -> tuple[bool, int, str]:
    """Sorts numbers by their value and other names behind them."""
    return (False, int(name), name) if name.isdecimal() else (True, 0, name)


def swept_keys(jobs: tuple[Job, ...]) -> tuple[str, ...]:
    """Keys whose values are not the same in all runs, in the order in which they were given."""
    keys = dict.fromkeys(
        key for job in jobs for key in job.overrides if not key.startswith(LAUNCH_KEYS)
    )
    return tuple(key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1)


RELATIVE_RMSE = "relative_rmse"
# The first of these that any run has is taken if none is asked for.
DEFAULT_METRICS = (RELATIVE_RMSE, "validation_rmse", "loss")
LARGER_IS_BETTER = ("samples_per_second",)


def choose_metric(jobs: Sequence[Job], asked: str) -> str:
    """The metric that was asked for, else the best that there is.

    Raises:
        UserError: no run has it.
    """
    names = available_metrics(jobs)
    if not asked:
        return next((name for name in DEFAULT_METRICS if name in names), RELATIVE_RMSE)
    if asked not in names:
        there = [name for name in names if not name.startswith(("rmse/", "loss/"))]
        if any(name.startswith("rmse/") for name in names):
            there.append("rmse/VARIABLE/HOURSh")
        raise UserError(
            f"metric: no run of this sweep has {asked!r} yet, but "
            f"{', '.join(there) or 'nothing'}.{did_you_mean(asked, names)}"
        )
    return asked


def available_metrics(jobs: Iterable[Job]) -> list[str]:
    """The metrics that at least one run has."""
    names: dict[str, None] = {}
    for job in jobs:
        if relative_rmse(job) is not None:
            names[RELATIVE_RMSE] = None
        names |= dict.fromkeys(job.numbers)
        names |= dict.fromkeys(
            f"rmse/{channel}/{lead}"
            for channel, leads in as_mapping(job.scores.get("rmse")).items()
            for lead in as_mapping(leads)
        )
    return [name for name in names if name != "step"]


def metric_of(job: Job, name: str) -> float | None:
    """The value of a metric; None if the run has none yet."""
    if name == RELATIVE_RMSE:
        return relative_rmse(job)
    if name in job.numbers:
        return job.numbers[name]
    kind, _, rest = name.partition("/")
    channel, _, lead = rest.rpartition("/")
    found = as_mapping(get_nested(job.scores, "rmse")).get(channel) if kind == "rmse" else None
    return as_nonnegative(as_mapping(as_mapping(found).get(lead)).get("model"))


def relative_rmse(job: Job) -> float | None:
    """The final RMSE over that of persistence, at the longest lead time, mean over all fields."""
    ratios = []
    for leads in as_mapping(job.scores.get("rmse")).values():
        of = as_mapping(leads)
        hours = [lead for lead in of if lead.removesuffix("h").isdecimal()]
        if not hours:
            continue
        last = as_mapping(of[max(hours, key=lambda lead: int(lead.removesuffix("h")))])
        model, persistence = (
            as_nonnegative(last.get("model")),
            as_nonnegative(last.get("persistence")),
        )
        if model is not None and persistence:
            ratios.append(model / persistence)
    return sum(ratios) / len(ratios) if ratios else None


def as_nonnegative(value: object) -> float | None:
    """A finite number of at least 0; None for anything else."""
    good = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if good else None  # type: ignore[arg-type]


def best(jobs: Sequence[Job], metric: str) -> Job | None:
    """The run that does best; None if none has the metric."""
    scored = [(value, job) for job in jobs if (value := metric_of(job, metric)) is not None]
    if not scored:
        return None
    pick = max if metric in LARGER_IS_BETTER else min
    return pick(scored, key=lambda pair: pair[0])[1]

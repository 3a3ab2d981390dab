"""The runs of a sweep as a table: a row for each run, for text, CSV, JSON and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.plain_text import csv_text
from credit_dp.sweeps.read import RELATIVE_RMSE, Job, Sweep, parse_number

DEFAULT_METRICS = (RELATIVE_RMSE, "validation_rmse", "loss")  # the first of these that any run has
LARGER_IS_BETTER = ("samples_per_second",)
TIMING_COLUMNS = ("seconds", "samples_per_second")
SORT_COLUMNS = ("job", "state", "steps", "metric", *TIMING_COLUMNS)
Row = Mapping[str, Any]


@final
@dataclass(frozen=True)
class SweepTable:
    """The runs of a sweep in the order to show.

    Attributes:
        folder: the folder of the sweep.
        keys: the swept keys, which are columns.
        metric: the column to compare runs by.
        rows: the values of each run by column; a value that does not exist yet is None.
    """

    folder: Path
    keys: tuple[str, ...]
    metric: str
    rows: tuple[Row, ...]


def sweep_table(sweep: Sweep, metric: str = "", sort: str = "metric") -> SweepTable:
    """Return the table of a sweep, whose runs are compared by a metric; see `choose_metric`.

    `sort` is a column, with - before it in the opposite order; by the metric, the best run comes
    first. Runs without a value are last.
    """
    metric = choose_metric(sweep.jobs, metric)
    name = sort.removeprefix("-")
    allowed = (*SORT_COLUMNS, *sweep.keys)
    if name not in allowed:
        raise UserError(
            f"sort: needs one of {', '.join(allowed)}, or one with - before it, got {sort!r}."
            f"{did_you_mean(name, allowed)}"
        )
    descending = sort.startswith("-") != (name == "metric" and metric in LARGER_IS_BETTER)
    column = metric if name == "metric" else name
    rows = [
        {
            "job": job.name,
            **{key: job.value(key) for key in sweep.keys},
            "state": job.state,
            "mesh": job.mesh_text,
            metric: job.metrics.get(metric),
            "steps": job.steps,
            "all_steps": job.all_steps,
            **{name: job.numbers.get(name) for name in TIMING_COLUMNS},
            "cause": job.cause or None,
        }
        for job in sweep.jobs
    ]
    present = [row for row in rows if row[column] is not None]
    # `reverse` keeps the order among equals.
    present.sort(key=lambda row: value_order(str(row[column])), reverse=descending)
    missing = [row for row in rows if row[column] is None]
    return SweepTable(sweep.folder, sweep.keys, metric, (*present, *missing))


def choose_metric(jobs: Sequence[Job], requested: str) -> str:
    """Return the requested metric, or by default the first of `DEFAULT_METRICS` that exists."""
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


def value_order(text: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by value, then other texts."""
    number = parse_number(text)
    return (True, 0.0, text) if number is None else (False, number, "")


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Return CSV with a line for each of the rows, which have the same columns."""
    columns = list(rows[0])
    return csv_text(columns, [[row[name] for name in columns] for row in rows])

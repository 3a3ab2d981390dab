"""The runs of a sweep as a table: a row for each run, for text, CSV, JSON and figures."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.sweeps.read import LARGER_IS_BETTER, Job, Sweep, choose_metric, parse_number

TIMING_COLUMNS = ("seconds", "samples_per_second")
SORT_COLUMNS = ("job", "state", "steps", "metric", *TIMING_COLUMNS)
Row = Mapping[str, Any]


@final
@dataclass(frozen=True)
class SweepTable:
    """The runs of a sweep in the order to show.

    Attributes:
        folder: of the sweep.
        keys: the swept keys, which are columns.
        metric: the column to compare runs by.
        rows: the values of each run by column; a value that does not exist yet is None.
    """

    folder: Path
    keys: tuple[str, ...]
    metric: str
    rows: tuple[Row, ...]


def sweep_table(sweep: Sweep, metric: str = "", sort: str = "metric") -> SweepTable:
    """Return the table of a sweep.

    Args:
        sweep: with its runs.
        metric: to compare runs by; empty: see `choose_metric`.
        sort: a column, with - before it in the opposite order; by the metric, the best run comes
            first. Runs without a value are last.

    Raises:
        UserError: no run has this metric, or there is no such column.
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
    rows = [table_row(job, sweep.keys, metric) for job in sweep.jobs]
    present = [row for row in rows if row[column] is not None]
    # `reverse` keeps the order among equals.
    present.sort(key=lambda row: value_order(str(row[column])), reverse=descending)
    missing = [row for row in rows if row[column] is None]
    return SweepTable(sweep.folder, sweep.keys, metric, (*present, *missing))


def table_row(job: Job, keys: Sequence[str], metric: str) -> dict[str, Any]:
    """Return the values of a run by column."""
    return {
        "job": job.name,
        **{key: job.value(key) for key in keys},
        "state": job.status.state,
        "mesh": mesh_text(job),
        metric: job.metrics.get(metric),
        "steps": job.steps,
        "all_steps": job.all_steps,
        **{name: job.numbers.get(name) for name in TIMING_COLUMNS},
        "cause": job.status.cause or None,
    }


def mesh_text(job: Job) -> str | None:
    """Return pipeline x data x domain ranks, such as 1x2x4; None if not known yet.

    Ranks that share members come before those of the domain, if there are several: 1x2x2x4.
    """
    mesh = job.mesh
    if mesh is None:
        return None
    return "x".join(str(n) for axis, n in mesh.items() if axis != "ensemble" or n > 1)


def value_order(text: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by value, then other texts."""
    number = parse_number(text)
    return (True, 0.0, text) if number is None else (False, number, "")


def rows_to_csv(rows: Iterable[Row]) -> str:
    """Return CSV with a line for each of the rows, which have the same columns."""
    buffer = io.StringIO()
    first, *others = rows
    writer = csv.DictWriter(buffer, list(first), lineterminator="\n")
    writer.writeheader()
    writer.writerows([first, *others])
    return buffer.getvalue()

"""Show a sweep as a table: one line for each run, as text, CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.sweeps.read import LARGER_IS_BETTER, Job, Sweep, metric_of, parse_number

TIMING_COLUMNS = ("seconds", "samples_per_second")
SORT_COLUMNS = ("job", "state", "steps", "metric", *TIMING_COLUMNS)


@final
@dataclass(frozen=True)
class SweepTable:
    """The runs of a sweep in the order to show, with the metric to compare them by."""

    sweep: Sweep
    metric: str
    jobs: tuple[Job, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        columns = ("state", "mesh", self.metric, "steps", "all_steps", *TIMING_COLUMNS, "cause")
        return list(dict.fromkeys(["job", *self.sweep.keys, *columns]))

    def row(self, job: Job) -> dict[str, Any]:
        """Return the values of a run by column; a value that does not exist yet is None."""
        return {
            "job": job.name,
            **{key: job.value(key) for key in self.sweep.keys},
            "state": job.status.state,
            "mesh": mesh_text(job),
            "steps": job.steps,
            "all_steps": job.all_steps,
            **{name: job.numbers.get(name) for name in TIMING_COLUMNS},
            self.metric: metric_of(job, self.metric),
            "cause": job.status.cause or None,
        }

    def to_csv(self) -> str:
        """Return CSV with all columns and a line for each run."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.row(job) for job in self.jobs)
        return buffer.getvalue()

    def to_json(self) -> str:
        """Return the same as JSON, with the swept keys and the metric."""
        content = {
            "sweep": str(self.sweep.folder),
            "swept": list(self.sweep.keys),
            "metric": self.metric,
            "jobs": [self.row(job) for job in self.jobs],
        }
        return json.dumps(content, indent=2) + "\n"


def sorted_jobs(sweep: Sweep, metric: str, by: str) -> tuple[Job, ...]:
    """Return the runs sorted by a column, runs without a value last.

    Args:
        metric: the sweep's metric; by it, the best run comes first.
        by: a column; with - before it in the opposite order.

    Raises:
        UserError: there is no such column.
    """
    name = by.removeprefix("-")
    allowed = (*SORT_COLUMNS, *sweep.keys)
    if name not in allowed:
        raise UserError(
            f"sort: needs one of {', '.join(allowed)}, or one with - before it, got {by!r}."
            f"{did_you_mean(name, allowed)}"
        )
    descending = by.startswith("-") != (name == "metric" and metric in LARGER_IS_BETTER)
    # Runs without a value stay last in either order. `reverse` keeps the order among equals.
    present = [job for job in sweep.jobs if sort_key(job, name, metric) is not None]
    missing = [job for job in sweep.jobs if sort_key(job, name, metric) is None]
    present.sort(key=lambda job: sort_key(job, name, metric) or (), reverse=descending)
    return (*present, *missing)


def sort_key(job: Job, name: str, metric: str) -> tuple[bool, float, str] | None:
    """Return the sort key of a run by one column, numbers before texts; None without a value."""
    if name == "state":
        return (True, 0.0, job.status.state)
    if name in ("metric", "steps", *TIMING_COLUMNS):
        value = metric_of(job, metric) if name == "metric" else job.numbers.get(name)
        if name == "steps":
            value = float(job.steps)
        return None if value is None else (False, value, "")
    text = job.name if name == "job" else job.value(name)
    value = parse_number(text)
    return (value is None, value or 0.0, text if value is None else "")


def mesh_text(job: Job) -> str | None:
    """Return pipeline x data x domain ranks, such as 1x2x4; None if not known yet.

    Ranks that share members come before those of the domain, if there are several: 1x2x2x4.
    """
    mesh = job.mesh
    if mesh is None:
        return None
    return "x".join(str(n) for axis, n in mesh.items() if axis != "ensemble" or n > 1)


def swept_values(jobs: Sequence[Job], key: str) -> list[str]:
    """Return the values of a swept key, each once, numbers by value and before other texts."""
    values = {job.value(key) for job in jobs}
    return sorted(
        values, key=lambda text: (parse_number(text) is None, parse_number(text) or 0.0, text)
    )

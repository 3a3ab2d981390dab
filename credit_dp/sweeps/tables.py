"""A sweep as a table: one line for each run, for people, CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.sweeps.read import AXES, LARGER_IS_BETTER, Job, Sweep, metric_of, parse_number

TIMING_COLUMNS = ("seconds", "samples_per_second")
SORT_COLUMNS = ("job", "state", "steps", "metric", *TIMING_COLUMNS)


@final
@dataclass(frozen=True)
class SweepTable:
    """The runs in the order in which they are shown, and the metric that compares them."""

    sweep: Sweep
    metric: str
    jobs: tuple[Job, ...]

    @property
    def names(self) -> list[str]:
        """The columns of a row."""
        columns = ("state", "mesh", self.metric, "steps", "all_steps", *TIMING_COLUMNS, "cause")
        return list(dict.fromkeys(["job", *self.sweep.keys, *columns]))

    def row(self, job: Job) -> dict[str, Any]:
        """A run's numbers and texts by column; None where there is nothing yet."""
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
        """All columns, a line for each run."""
        held = io.StringIO()
        writer = csv.DictWriter(held, self.names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.row(job) for job in self.jobs)
        return held.getvalue()

    def to_json(self) -> str:
        """The same, with what was swept and by what runs are compared."""
        content = {
            "sweep": str(self.sweep.folder),
            "swept": list(self.sweep.keys),
            "metric": self.metric,
            "jobs": [self.row(job) for job in self.jobs],
        }
        return json.dumps(content, indent=2) + "\n"


def sorted_jobs(sweep: Sweep, metric: str, by: str) -> tuple[Job, ...]:
    """The runs by a column, those that have nothing there last; the best first by a metric.

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
    down = by.startswith("-") != (name == "metric" and metric in LARGER_IS_BETTER)
    # Twice: a sort that is turned round keeps the order of the sweep among equals.
    having = [job for job in sweep.jobs if sort_key(job, name, metric) is not None]
    missing = [job for job in sweep.jobs if sort_key(job, name, metric) is None]
    having.sort(key=lambda job: sort_key(job, name, metric) or (), reverse=down)
    return (*having, *missing)


def sort_key(job: Job, name: str, metric: str) -> tuple[bool, float, str] | None:
    """Where a run belongs by one column: numbers by value, before texts; None if it has none."""
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
    """`pipeline x data x domain` ranks, as 1x2x4; None if that is not known yet."""
    mesh = job.mesh
    return None if mesh is None else "x".join(str(mesh[axis]) for axis in AXES)


def swept_values(jobs: Sequence[Job], key: str) -> list[str]:
    """The values of a swept key, each once, numbers by value and before other texts."""
    found = {job.value(key) for job in jobs}
    return sorted(
        found, key=lambda text: (parse_number(text) is None, parse_number(text) or 0.0, text)
    )

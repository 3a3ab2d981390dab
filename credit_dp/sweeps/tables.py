"""A sweep as a table and as a picture: its metric against what was swept."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import PALE, SERIES, figure_style, series_colour
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


MARKERS = "osD^vPX*"
MAX_LABELLED = 12  # lines or values that a legend or an axis has room for
MIN_RELATIVE_SPAN = 1e-4  # of a value: smaller differences are not drawn as if they were large
REPEAT_KEYS = ("seed",)  # runs that differ in these alone are repeats of one another


@figure_style()
def draw_metric(table: SweepTable) -> Figure | None:
    """The metric of all runs that have it; None if none has.

    Along the axis goes the number with the most values, each combination of the other keys is a
    line of its own. Without a number that was swept, runs are bars. Runs that differ in the seed
    alone are dots about the line, which goes through their mean.
    """
    scored = [job for job in table.sweep.jobs if metric_of(job, table.metric) is not None]
    if not scored:
        return None
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    keys = [key for key in table.sweep.keys if key not in REPEAT_KEYS] or list(table.sweep.keys)
    along = axis_key(scored, keys)
    if along is None:
        draw_bars(axes, table, scored, keys)
    else:
        draw_lines(axes, table, scored, along, [key for key in keys if key != along])
    axes.set_title(f"{table.sweep.folder.name}: {len(scored)} of {len(table.jobs)} runs")
    axes.grid(visible=False, axis="y" if along is None else "x")
    return figure


def axis_key(jobs: Sequence[Job], keys: Sequence[str]) -> str | None:
    """The key with the most values, among those whose values are all numbers."""
    of = {key: swept_values(jobs, key) for key in keys}
    numeric = [key for key in keys if all(parse_number(text) is not None for text in of[key])]
    numeric = [key for key in numeric if len(of[key]) > 1]
    return max(numeric, key=lambda key: len(of[key]), default=None)


def draw_lines(
    axes: Axes, table: SweepTable, jobs: Sequence[Job], along: str, others: Sequence[str]
) -> None:
    """The metric against a number, a line for each combination of the other keys."""
    lines: dict[tuple[str, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        lines[tuple(job.value(key) for key in others)].append(job)
    for place, (values, members) in enumerate(sorted(lines.items(), key=line_order)):
        points = points_of(members, along, table.metric)
        colour, marker = series_colour(place), MARKERS[place // len(SERIES) % len(MARKERS)]
        name = ", ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
        means = [sum(found) / len(found) for found in points.values()]
        label = name if place < MAX_LABELLED else None
        axes.plot(list(points), means, label=label, color=colour, marker=marker)
        for x, found in points.items():
            if len(found) > 1:
                axes.scatter([x] * len(found), found, s=14, alpha=0.5, color=colour)
    shown = sorted({parse_number(job.value(along)) or 0.0 for job in jobs})
    if shown[0] > 0 and shown[-1] / shown[0] >= MAX_LABELLED:
        axes.set_xscale("log")
    if len(shown) <= MAX_LABELLED:
        axes.set_xticks(shown, [f"{value:g}" for value in shown], minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel(table.metric)
    low, high = axes.dataLim.intervaly
    if high - low < MIN_RELATIVE_SPAN * abs(high):
        axes.set_ylim(low - MIN_RELATIVE_SPAN * abs(low), high + MIN_RELATIVE_SPAN * abs(high))
    if others:
        more = f" (first {MAX_LABELLED} of {len(lines)})" if len(lines) > MAX_LABELLED else ""
        axes.legend(title=more or None)


def points_of(jobs: Sequence[Job], along: str, metric: str) -> Mapping[float, list[float]]:
    """The metric of the runs at each value of a key, in the order of these values."""
    points: dict[float, list[float]] = defaultdict(list)
    for job in jobs:
        points[parse_number(job.value(along)) or 0.0].append(metric_of(job, metric) or 0.0)
    return dict(sorted(points.items()))


def draw_bars(axes: Axes, table: SweepTable, jobs: Sequence[Job], keys: Sequence[str]) -> None:
    """A bar for each combination of the keys, with a dot for each of several runs."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for job in jobs:
        label = tuple(job.value(key) for key in keys) if keys else (f"job {job.name}",)
        found[label].append(metric_of(job, table.metric) or 0.0)
    heights = [sum(values) / len(values) for values in found.values()]
    bars = axes.barh(range(len(found)), heights, color=PALE)
    if len(found) <= MAX_LABELLED:
        axes.bar_label(bars, fmt="%.4g", label_type="center")
    for place, values in enumerate(found.values()):
        if len(values) > 1:
            axes.plot(values, [place] * len(values), "o", color=SERIES[0])
    if len(found) <= 4 * MAX_LABELLED:
        axes.set_yticks(range(len(found)), [", ".join(label) for label in found])
    axes.invert_yaxis()
    axes.set_ylabel(", ".join(keys))
    axes.set_xlabel(table.metric)


def line_order(line: tuple[tuple[str, ...], list[Job]]) -> list[tuple[bool, float, str]]:
    """Sorts combinations of values, numbers by their value."""
    return [(parse_number(text) is None, parse_number(text) or 0.0, text) for text in line[0]]

"""A picture of a sweep: its metric against what was swept."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from credit_dp.evaluation.figure_style import PALE, SERIES, figure_style, series_colour
from credit_dp.sweeps.job import Job
from credit_dp.sweeps.metric import metric_of
from credit_dp.sweeps.run_log import number
from credit_dp.sweeps.sweep_table import SweepTable, texts

MARKERS = "osD^vPX*"
MANY = 12  # lines or values that a legend or an axis has room for
ROUNDING = 1e-4  # of a value: smaller differences are not drawn as if they were large
REPEATS = ("seed",)  # runs that differ in these alone are repeats of one another


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
    keys = [key for key in table.sweep.keys if key not in REPEATS] or list(table.sweep.keys)
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
    of = {key: texts(jobs, key) for key in keys}
    numeric = [key for key in keys if all(number(text) is not None for text in of[key])]
    numeric = [key for key in numeric if len(of[key]) > 1]
    return max(numeric, key=lambda key: len(of[key]), default=None)


def draw_lines(
    axes: Axes, table: SweepTable, jobs: Sequence[Job], along: str, others: Sequence[str]
) -> None:
    """The metric against a number, a line for each combination of the other keys."""
    lines: dict[tuple[str, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        lines[tuple(job.value(key) for key in others)].append(job)
    for place, (values, members) in enumerate(sorted(lines.items(), key=by_numbers)):
        points = points_of(members, along, table.metric)
        colour, marker = series_colour(place), MARKERS[place // len(SERIES) % len(MARKERS)]
        name = ", ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
        means = [sum(found) / len(found) for found in points.values()]
        label = name if place < MANY else None
        axes.plot(list(points), means, label=label, color=colour, marker=marker)
        for x, found in points.items():
            if len(found) > 1:
                axes.scatter([x] * len(found), found, s=14, alpha=0.5, color=colour)
    shown = sorted({number(job.value(along)) or 0.0 for job in jobs})
    if shown[0] > 0 and shown[-1] / shown[0] >= MANY:
        axes.set_xscale("log")
    if len(shown) <= MANY:
        axes.set_xticks(shown, [f"{value:g}" for value in shown], minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel(table.metric)
    low, high = axes.dataLim.intervaly
    if high - low < ROUNDING * abs(high):
        axes.set_ylim(low - ROUNDING * abs(low), high + ROUNDING * abs(high))
    if others:
        more = f" (first {MANY} of {len(lines)})" if len(lines) > MANY else ""
        axes.legend(title=more or None)


def points_of(jobs: Sequence[Job], along: str, metric: str) -> Mapping[float, list[float]]:
    """The metric of the runs at each value of a key, in the order of these values."""
    points: dict[float, list[float]] = defaultdict(list)
    for job in jobs:
        points[number(job.value(along)) or 0.0].append(metric_of(job, metric) or 0.0)
    return dict(sorted(points.items()))


def draw_bars(axes: Axes, table: SweepTable, jobs: Sequence[Job], keys: Sequence[str]) -> None:
    """A bar for each combination of the keys, with a dot for each of several runs."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for job in jobs:
        label = tuple(job.value(key) for key in keys) if keys else (f"job {job.name}",)
        found[label].append(metric_of(job, table.metric) or 0.0)
    heights = [sum(values) / len(values) for values in found.values()]
    bars = axes.barh(range(len(found)), heights, color=PALE)
    if len(found) <= MANY:
        axes.bar_label(bars, fmt="%.4g", label_type="center")
    for place, values in enumerate(found.values()):
        if len(values) > 1:
            axes.plot(values, [place] * len(values), "o", color=SERIES[0])
    if len(found) <= 4 * MANY:
        axes.set_yticks(range(len(found)), [", ".join(label) for label in found])
    axes.invert_yaxis()
    axes.set_ylabel(", ".join(keys))
    axes.set_xlabel(table.metric)


def by_numbers(line: tuple[tuple[str, ...], list[Job]]) -> list[tuple[bool, float, str]]:
    """Sorts combinations of values, numbers by their value."""
    return [(number(text) is None, number(text) or 0.0, text) for text in line[0]]

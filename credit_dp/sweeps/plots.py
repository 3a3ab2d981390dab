"""Figures of a sweep: its metric against the swept keys, and its scaling over ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from credit_dp.evaluation.figure_style import PALE, REFERENCE, SERIES, figure_style, series_colour
from credit_dp.evaluation.plots import legend_columns
from credit_dp.sweeps.read import Job, metric_of, parse_number
from credit_dp.sweeps.scaling import Kind, ScalingSeries, StepTiming, is_oversubscribed
from credit_dp.sweeps.tables import SweepTable, swept_values

MARKERS = "osD^vPX*"
METRIC_INCHES = 7.5  # width of the figure of a metric
MAX_LABELLED = 12  # lines in a legend, or values on an axis
MIN_RELATIVE_SPAN = 1e-4  # minimum span of the axis, relative: hides differences of rounding
REPEAT_KEYS = ("seed",)  # runs that differ only in these are repeats
LINE_STYLES: Mapping[Kind, Literal["-", "--"]] = {"strong": "-", "weak": "--"}
TimingValue = Callable[[ScalingSeries, StepTiming], float]


@figure_style()
def draw_metric(table: SweepTable) -> Figure | None:
    """Return a figure of the metric of all runs that have it; None if no run has it.

    The horizontal axis is the numeric key with the most values, with a line for each combination
    of the other keys. Without a numeric key, runs are bars. Runs that differ only in the seed are
    dots around the line, which is their mean.
    """
    scored = [job for job in table.sweep.jobs if metric_of(job, table.metric) is not None]
    if not scored:
        return None
    figure = Figure(figsize=(METRIC_INCHES, 5.4), layout="constrained")
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
    """Return the numeric key with the most values; None if no key is numeric."""
    values = {key: swept_values(jobs, key) for key in keys}
    numeric = [key for key in keys if all(parse_number(text) is not None for text in values[key])]
    # A key can have the same value in all runs that have the metric so far.
    numeric = [key for key in numeric if len(values[key]) > 1]
    return max(numeric, key=lambda key: len(values[key]), default=None)


def draw_lines(
    axes: Axes, table: SweepTable, jobs: Sequence[Job], along: str, others: Sequence[str]
) -> None:
    """Draw the metric against a numeric key, with a line for each combination of the others."""
    lines: dict[tuple[str, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        lines[tuple(job.value(key) for key in others)].append(job)
    for index, (values, members) in enumerate(sorted(lines.items(), key=line_order)):
        points = points_of(members, along, table.metric)
        colour = series_colour(index)
        marker = MARKERS[index // len(SERIES) % len(MARKERS)]
        name = ", ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
        means = [sum(repeats) / len(repeats) for repeats in points.values()]
        # All lines are drawn, but only the first are in the legend.
        label = name if index < MAX_LABELLED else None
        axes.plot(list(points), means, label=label, color=colour, marker=marker)
        for x, repeats in points.items():
            if len(repeats) > 1:
                axes.scatter([x] * len(repeats), repeats, s=14, alpha=0.5, color=colour)
    ticks = sorted({parse_number(job.value(along)) or 0.0 for job in jobs})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= MAX_LABELLED:
        axes.set_xscale("log")
    if len(ticks) <= MAX_LABELLED:
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks], minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel(table.metric)
    # matplotlib would fill the axis with differences of the last digits.
    low, high = axes.dataLim.intervaly
    if high - low < MIN_RELATIVE_SPAN * abs(high):
        axes.set_ylim(low - MIN_RELATIVE_SPAN * abs(low), high + MIN_RELATIVE_SPAN * abs(high))
    if others:
        title = f"first {MAX_LABELLED} of {len(lines)}" if len(lines) > MAX_LABELLED else None
        # Below the axes: inside them it would cover lines.
        columns = legend_columns(axes.get_legend_handles_labels()[1], METRIC_INCHES)
        axes.figure.legend(loc="outside lower center", ncols=columns, title=title)


def points_of(jobs: Sequence[Job], along: str, metric: str) -> Mapping[float, list[float]]:
    """Return the metric of the runs by the value of a key, which rises."""
    points: dict[float, list[float]] = defaultdict(list)
    for job in jobs:
        points[parse_number(job.value(along)) or 0.0].append(metric_of(job, metric) or 0.0)
    return dict(sorted(points.items()))


def draw_bars(axes: Axes, table: SweepTable, jobs: Sequence[Job], keys: Sequence[str]) -> None:
    """Draw a bar for each combination of the keys: the mean of its runs, with a dot for each."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for job in jobs:
        label = tuple(job.value(key) for key in keys) if keys else (f"job {job.name}",)
        groups[label].append(metric_of(job, table.metric) or 0.0)
    means = [sum(values) / len(values) for values in groups.values()]
    bars = axes.barh(range(len(groups)), means, color=PALE)
    if len(groups) <= MAX_LABELLED:
        axes.bar_label(bars, fmt="%.4g", label_type="center")
    for index, values in enumerate(groups.values()):
        if len(values) > 1:
            axes.plot(values, [index] * len(values), "o", color=SERIES[0])
    if len(groups) <= 4 * MAX_LABELLED:
        axes.set_yticks(range(len(groups)), [", ".join(label) for label in groups])
    axes.invert_yaxis()
    axes.set_ylabel(", ".join(keys))
    axes.set_xlabel(table.metric)


def line_order(line: tuple[tuple[str, ...], list[Job]]) -> list[tuple[bool, float, str]]:
    """Return the sort key of a combination of values, numbers by value."""
    return [(parse_number(text) is None, parse_number(text) or 0.0, text) for text in line[0]]


@figure_style()
def draw_scaling(all_series: Sequence[ScalingSeries]) -> Figure:
    """Return a figure of time, speed-up and efficiency against the number of ranks.

    Hollow marks are runs with more ranks than cores.
    """
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_panel(left, all_series, lambda series, timing: timing.seconds, ideal_seconds)
    left.set_title("time per step (s)")
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    draw_panel(middle, all_series, lambda series, timing: series.speed_up(timing), ideal_speed_up)
    middle.set_title("speed-up")
    middle.set_yscale("log", base=2)
    middle.yaxis.set_major_formatter("{x:g}")
    draw_panel(
        right,
        all_series,
        lambda series, timing: series.efficiency(timing),
        lambda series, timing: 1.0,
    )
    right.set_title("efficiency")
    right.set_ylim(bottom=0)
    add_legend(figure, all_series)
    return figure


def draw_panel(
    axes: Axes, all_series: Sequence[ScalingSeries], value_of: TimingValue, ideal: TimingValue
) -> None:
    """Draw one quantity of all series against the number of ranks, with its ideal lines."""
    for index, series in enumerate(all_series):
        ranks = [timing.ranks for timing in series.timings]
        values = [value_of(series, timing) for timing in series.timings]
        axes.plot(ranks, [ideal(series, timing) for timing in series.timings], ":", color=REFERENCE)
        colour = series_colour(index)
        axes.plot(ranks, values, color=colour, linestyle=LINE_STYLES[series.kind])
        for timing, value in zip(series.timings, values, strict=True):
            face = "white" if is_oversubscribed(timing) else colour
            axes.plot(timing.ranks, value, "o", color=colour, markerfacecolor=face)
    ticks = sorted({timing.ranks for series in all_series for timing in series.timings})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks")


def ideal_seconds(series: ScalingSeries, timing: StepTiming) -> float:
    """Return the time of a step under ideal scaling."""
    first = series.timings[0]
    return first.seconds * (first.ranks / timing.ranks if series.kind == "strong" else 1.0)


def ideal_speed_up(series: ScalingSeries, timing: StepTiming) -> float:
    """Return the ratio of ranks to the fewest ranks."""
    return timing.ranks / series.timings[0].ranks


def add_legend(figure: Figure, all_series: Sequence[ScalingSeries]) -> None:
    """Add a legend of lines and marks below the panels."""
    lines = [
        Line2D([], [], color=series_colour(index), linestyle=LINE_STYLES[series.kind], marker="o")
        for index, series in enumerate(all_series)
    ]
    names = [f"{series.kind}, {series.axis} ranks: {series.title}" for series in all_series]
    lines.append(Line2D([], [], color=REFERENCE, linestyle=":"))
    names.append("ideal")
    # Such runs say nothing about the program's scaling, only about the machine.
    if any(is_oversubscribed(timing) for series in all_series for timing in series.timings):
        lines.append(Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="w"))
        names.append("more ranks than cores")
    figure.legend(lines, names, loc="outside lower center", ncols=2)

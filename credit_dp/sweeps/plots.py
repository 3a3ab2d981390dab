"""Pictures of a sweep: its metric against what was swept, and how it scales over ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from credit_dp.evaluation.figure_style import PALE, REFERENCE, SERIES, figure_style, series_colour
from credit_dp.sweeps.read import Job, metric_of, parse_number
from credit_dp.sweeps.scaling import Kind, ScalingSeries, StepTiming, is_oversubscribed
from credit_dp.sweeps.tables import SweepTable, swept_values

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


LINE_STYLES: Mapping[Kind, Literal["-", "--"]] = {"strong": "-", "weak": "--"}
TimingValue = Callable[[ScalingSeries, StepTiming], float]


@figure_style()
def draw_scaling(found: Sequence[ScalingSeries]) -> Figure:
    """Three panels over the number of ranks; hollow marks where ranks had to share cores."""
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_panel(left, found, lambda series, timing: timing.seconds, ideal_seconds)
    left.set_title("time per step (s)")
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    draw_panel(middle, found, lambda series, timing: series.speed_up(timing), ideal_speed_up)
    middle.set_title("speed-up")
    middle.set_yscale("log", base=2)
    middle.yaxis.set_major_formatter("{x:g}")
    draw_panel(
        right, found, lambda series, timing: series.efficiency(timing), lambda series, timing: 1.0
    )
    right.set_title("efficiency")
    right.set_ylim(bottom=0)
    add_legend(figure, found)
    return figure


def draw_panel(
    axes: Axes, found: Sequence[ScalingSeries], height: TimingValue, ideal: TimingValue
) -> None:
    """One number of all series against ranks, each above its ideal line."""
    for place, series in enumerate(found):
        ranks = [timing.ranks for timing in series.timings]
        values = [height(series, timing) for timing in series.timings]
        axes.plot(ranks, [ideal(series, timing) for timing in series.timings], ":", color=REFERENCE)
        colour = series_colour(place)
        axes.plot(ranks, values, color=colour, linestyle=LINE_STYLES[series.kind])
        for timing, value in zip(series.timings, values, strict=True):
            face = "white" if is_oversubscribed(timing) else colour
            axes.plot(timing.ranks, value, "o", color=colour, markerfacecolor=face)
    ticks = sorted({timing.ranks for series in found for timing in series.timings})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks")


def ideal_seconds(series: ScalingSeries, timing: StepTiming) -> float:
    """What a step would take if nothing were lost."""
    first = series.timings[0]
    return first.seconds * (first.ranks / timing.ranks if series.kind == "strong" else 1.0)


def ideal_speed_up(series: ScalingSeries, timing: StepTiming) -> float:
    """The growth in ranks."""
    return timing.ranks / series.timings[0].ranks


def add_legend(figure: Figure, found: Sequence[ScalingSeries]) -> None:
    """What the lines and marks of all panels mean, below them."""
    lines = [
        Line2D([], [], color=series_colour(place), linestyle=LINE_STYLES[series.kind], marker="o")
        for place, series in enumerate(found)
    ]
    names = [f"{series.kind}, {series.axis} ranks: {series.title}" for series in found]
    lines.append(Line2D([], [], color=REFERENCE, linestyle=":"))
    names.append("ideal")
    if any(is_oversubscribed(timing) for series in found for timing in series.timings):
        lines.append(Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="w"))
        names.append("more ranks than cores")
    figure.legend(lines, names, loc="outside lower center", ncols=2)

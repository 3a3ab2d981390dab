"""Figures of a sweep: its metric against the swept keys, and its scaling over ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from credit_dp.evaluation.figure_style import PALE, REFERENCE, SERIES, figure_style, series_colour
from credit_dp.evaluation.score_plots import legend_columns
from credit_dp.sweeps.read import job_order, parse_number
from credit_dp.sweeps.tables import Row, SweepTable, value_order

MARKERS = "osD^vPX*"
METRIC_INCHES = 7.5  # width of the figure of a metric
MAX_LABELLED = 12  # lines in a legend, or values on an axis
MIN_RELATIVE_SPAN = 1e-4  # minimum span of the axis, relative: hides differences of rounding
REPEAT_KEYS = ("seed",)  # runs that differ only in these are repeats
LINE_STYLES: Mapping[str, Literal["-", "--"]] = {"strong": "-", "weak": "--"}


@figure_style()
def draw_metric(table: SweepTable) -> Figure | None:
    """Return a figure of the metric of all runs that have it; None if no run has it.

    The horizontal axis is the numeric key with the most values, with a line for each combination
    of the other keys. Without a numeric key, runs are bars. Runs that differ only in the seed are
    dots around the line, which is their mean.
    """
    rows = [row for row in table.rows if row[table.metric] is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: job_order(row["job"]))
    figure = Figure(figsize=(METRIC_INCHES, 5.4), layout="constrained")
    axes = figure.subplots()
    keys = [key for key in table.keys if key not in REPEAT_KEYS] or list(table.keys)
    along = axis_key(rows, keys)
    if along is None:
        draw_bars(axes, rows, keys, table.metric)
    else:
        draw_lines(axes, rows, along, [key for key in keys if key != along], table.metric)
    axes.set_title(f"{table.folder.name}: {len(rows)} of {len(table.rows)} runs")
    axes.grid(visible=False, axis="y" if along is None else "x")
    return figure


def axis_key(rows: Sequence[Row], keys: Sequence[str]) -> str | None:
    """Return the numeric key with the most values; None if no key is numeric."""
    counts = {}
    for key in keys:
        values = {row[key] for row in rows}
        # A key can have the same value in all runs that have the metric so far.
        if len(values) > 1 and all(parse_number(text) is not None for text in values):
            counts[key] = len(values)
    return max(counts, key=lambda key: counts[key], default=None)


def draw_lines(
    axes: Axes, rows: Sequence[Row], along: str, others: Sequence[str], metric: str
) -> None:
    """Draw the metric against a numeric key, with a line for each combination of the others."""
    # The metric of the repeats, by the values of the other keys and then by that of this one.
    lines: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        lines[tuple(row[key] for key in others)][float(row[along])].append(row[metric])
    ordered = sorted(lines.items(), key=lambda line: [value_order(text) for text in line[0]])
    for index, (values, points) in enumerate(ordered):
        colour = series_colour(index)
        marker = MARKERS[index // len(SERIES) % len(MARKERS)]
        name = ", ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
        means = {x: sum(repeats) / len(repeats) for x, repeats in sorted(points.items())}
        # All lines are drawn, but only the first are in the legend.
        label = name if index < MAX_LABELLED else None
        axes.plot(list(means), list(means.values()), label=label, color=colour, marker=marker)
        for x, repeats in points.items():
            if len(repeats) > 1:
                axes.scatter([x] * len(repeats), repeats, s=14, alpha=0.5, color=colour)
    ticks = sorted({float(row[along]) for row in rows})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= MAX_LABELLED:
        axes.set_xscale("log")
    if len(ticks) <= MAX_LABELLED:
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks], minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel(metric)
    # matplotlib would fill the axis with differences of the last digits.
    low, high = axes.dataLim.intervaly
    if high - low < MIN_RELATIVE_SPAN * abs(high):
        axes.set_ylim(low - MIN_RELATIVE_SPAN * abs(low), high + MIN_RELATIVE_SPAN * abs(high))
    if others:
        title = f"first {MAX_LABELLED} of {len(lines)}" if len(lines) > MAX_LABELLED else None
        # Below the axes: inside them it would cover lines.
        columns = legend_columns(axes.get_legend_handles_labels()[1], METRIC_INCHES)
        axes.figure.legend(loc="outside lower center", ncols=columns, title=title)


def draw_bars(axes: Axes, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    """Draw a bar for each combination of the keys: the mean of its runs, with a dot for each."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        label = tuple(row[key] for key in keys) if keys else (f"job {row['job']}",)
        groups[label].append(row[metric])
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
    axes.set_xlabel(metric)


@figure_style()
def draw_scaling(all_series: Sequence[Sequence[Row]]) -> Figure:
    """Return a figure of time, speed-up and efficiency against the number of ranks.

    Hollow marks are runs with more ranks than cores.
    """
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_panel(left, all_series, "seconds", ideal_seconds)
    left.set_title("time per step (s)")
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    draw_panel(middle, all_series, "speed_up", growth)
    middle.set_title("speed-up")
    middle.set_yscale("log", base=2)
    middle.yaxis.set_major_formatter("{x:g}")
    draw_panel(right, all_series, "efficiency", lambda row, first: 1.0)
    right.set_title("efficiency")
    right.set_ylim(bottom=0)
    add_legend(figure, all_series)
    return figure


def draw_panel(
    axes: Axes,
    all_series: Sequence[Sequence[Row]],
    quantity: str,
    ideal: Callable[[Row, Row], float],
) -> None:
    """Draw one quantity of all series against the number of ranks, with its ideal lines.

    Args:
        axes: to draw in.
        all_series: with their runs.
        quantity: its column.
        ideal: its ideal value, from the run and that on the fewest ranks.
    """
    for index, series in enumerate(all_series):
        ranks = [row["ranks"] for row in series]
        axes.plot(ranks, [ideal(row, series[0]) for row in series], ":", color=REFERENCE)
        colour = series_colour(index)
        line_style = LINE_STYLES[series[0]["kind"]]
        axes.plot(ranks, [row[quantity] for row in series], color=colour, linestyle=line_style)
        for row in series:
            face = "white" if row["more_ranks_than_cores"] else colour
            axes.plot(row["ranks"], row[quantity], "o", color=colour, markerfacecolor=face)
    ticks = sorted({row["ranks"] for series in all_series for row in series})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks")


def growth(row: Row, first: Row) -> float:
    """Return the ratio of ranks to the fewest ranks, which is the ideal speed-up."""
    return float(row["ranks"] / first["ranks"])


def ideal_seconds(row: Row, first: Row) -> float:
    """Return the time of a step under ideal scaling."""
    return float(first["seconds"] / (growth(row, first) if row["kind"] == "strong" else 1.0))


def add_legend(figure: Figure, all_series: Sequence[Sequence[Row]]) -> None:
    """Add a legend of lines and marks below the panels."""
    firsts = [series[0] for series in all_series]
    lines = [
        Line2D([], [], color=series_colour(index), linestyle=LINE_STYLES[row["kind"]], marker="o")
        for index, row in enumerate(firsts)
    ]
    names = [f"{row['kind']}, {row['axis']} ranks: {row['series']}" for row in firsts]
    lines.append(Line2D([], [], color=REFERENCE, linestyle=":"))
    names.append("ideal")
    # Such runs say nothing about the program's scaling, only about the machine.
    if any(row["more_ranks_than_cores"] for series in all_series for row in series):
        lines.append(Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="w"))
        names.append("more ranks than cores")
    figure.legend(lines, names, loc="outside lower center", ncols=2)

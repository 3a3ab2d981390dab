"""Figures of a sweep: its metric against the swept keys, and its scaling over ranks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from credit_dp.evaluation.figure_style import PALE, REFERENCE, SERIES, figure_style, series_colour
from credit_dp.evaluation.score_plots import legend_columns
from credit_dp.sweeps.read import parse_number
from credit_dp.sweeps.tables import Row, SweepTable, value_order

METRIC_INCHES = 7.5  # width of the figure of a metric
LOG_RATIO = 9.99  # of the largest to the smallest value, from which an axis is logarithmic
MAX_TICKS = 8  # of the swept values
LINE_STYLES: Mapping[str, Literal["-", "--"]] = {"strong": "-", "weak": "--"}


@figure_style()
def draw_metric(table: SweepTable) -> Figure | None:
    """Return a figure of the metric of all runs that have it; None if no run has it.

    The horizontal axis is the numeric key with the most values, with a line for each combination
    of the other keys. Without a numeric key, runs are bars. Runs that differ only in the seed are
    dots around the line, which is their mean; in a sweep of nothing but seeds there is no line.
    """
    rows = [row for row in table.rows if row[table.metric] is not None]
    if not rows:
        return None
    figure = Figure(figsize=(METRIC_INCHES, 5.4), layout="constrained")
    axes = figure.subplots()
    keys = [key for key in table.keys if key != "seed"] or list(table.keys)
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
        name = ", ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
        means = {x: mean(repeats) for x, repeats in sorted(points.items())}
        line = "o" if along == "seed" else "o-"  # nothing lies between two seeds
        axes.plot(list(means), list(means.values()), line, label=name, color=colour)
        for x, repeats in points.items():
            if len(repeats) > 1:
                axes.scatter([x] * len(repeats), repeats, s=14, alpha=0.5, color=colour)
    texts = {float(row[along]): row[along] for row in rows}
    places = sorted(texts)
    if spans_decades(places):
        axes.set_xscale("log")
    if len(places) <= MAX_TICKS:
        axes.set_xticks(places, [texts[place] for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
    elif all(place.is_integer() for place in places) and not spans_decades(places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if spans_decades([row[metric] for row in rows]):
        axes.set_yscale("log")
    axes.set_xlabel(along)
    axes.set_ylabel(metric)
    if others:  # below the axes: inside them it would cover lines
        columns = legend_columns(axes.get_legend_handles_labels()[1], METRIC_INCHES)
        axes.figure.legend(loc="outside lower center", ncols=columns)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values are above 0, and the largest at least ten times the smallest."""
    return min(values) > 0 and max(values) >= LOG_RATIO * min(values)


def draw_bars(axes: Axes, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    """Draw a bar for each combination of the keys: the mean of its runs, with a dot for each."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[", ".join(row[key] for key in keys) or f"job {row['job']}"].append(row[metric])
    bars = axes.barh(list(groups), [mean(values) for values in groups.values()], color=PALE)
    axes.bar_label(bars, fmt="%.4g", label_type="center")
    for index, values in enumerate(groups.values()):
        if len(values) > 1:
            axes.plot(values, [index] * len(values), "o", color=SERIES[0])
    axes.invert_yaxis()
    axes.set_ylabel(", ".join(keys))
    axes.set_xlabel(metric)


@figure_style()
def draw_scaling(all_series: Sequence[Sequence[Row]]) -> Figure:
    """Return a figure of time, speed-up and efficiency against the number of ranks.

    Hollow marks are runs with more ranks than cores.
    """
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    panels = {"seconds": "time per step (s)", "speed_up": "speed-up", "efficiency": "efficiency"}
    for axes, (quantity, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for index, series in enumerate(all_series):
            ranks, colour = [row["ranks"] for row in series], series_colour(index)
            ideal = [ideal_value(quantity, row, series[0]) for row in series]
            axes.plot(ranks, ideal, ":", color=REFERENCE)
            style = LINE_STYLES[series[0]["kind"]]
            axes.plot(ranks, [row[quantity] for row in series], color=colour, linestyle=style)
            for row in series:
                face = "white" if row["more_ranks_than_cores"] else colour
                axes.plot(row["ranks"], row[quantity], "o", color=colour, markerfacecolor=face)
        axes.set_title(title)
        ticks = sorted({row["ranks"] for series in all_series for row in series})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xlabel("ranks")
        if quantity == "efficiency":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if quantity == "seconds":  # may differ by less than a factor of two
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    lines = [
        Line2D(
            [],
            [],
            color=series_colour(index),
            linestyle=LINE_STYLES[series[0]["kind"]],
            marker="o",
            label=f"{series[0]['kind']}, {series[0]['axis']} ranks: {series[0]['series']}",
        )
        for index, series in enumerate(all_series)
    ]
    lines.append(Line2D([], [], color=REFERENCE, linestyle=":", label="ideal"))
    # Such runs say nothing about the program's scaling, only about the machine.
    if any(row["more_ranks_than_cores"] for series in all_series for row in series):
        hollow = Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="w")
        hollow.set_label("more ranks than cores")
        lines.append(hollow)
    figure.legend(handles=lines, loc="outside lower center", ncols=2)
    return figure


def ideal_value(quantity: str, row: Row, first: Row) -> float:
    """Return a quantity of a run under ideal scaling from that on the fewest ranks."""
    growth = row["ranks"] / first["ranks"]
    seconds = first["seconds"] / (growth if row["kind"] == "strong" else 1)
    return float({"seconds": seconds, "speed_up": growth, "efficiency": 1}[quantity])

"""Pictures of a scaling study: time, speed-up and efficiency over ranks, with ideal lines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from credit_dp.evaluation.figure_style import REFERENCE, figure_style, series_colour
from credit_dp.sweeps.scaling import Kind, Series, Timing
from credit_dp.sweeps.scaling_table import crowded

DASHES: Mapping[Kind, Literal["-", "--"]] = {"strong": "-", "weak": "--"}
Height = Callable[[Series, Timing], float]


@figure_style()
def draw_scaling(found: Sequence[Series]) -> Figure:
    """Three panels over the number of ranks; hollow marks where ranks had to share cores."""
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw(left, found, lambda series, timing: timing.seconds, ideal_seconds)
    left.set_title("time per step (s)")
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    draw(middle, found, lambda series, timing: series.speed_up(timing), ideal_speed_up)
    middle.set_title("speed-up")
    middle.set_yscale("log", base=2)
    middle.yaxis.set_major_formatter("{x:g}")
    draw(right, found, lambda series, timing: series.efficiency(timing), lambda series, timing: 1.0)
    right.set_title("efficiency")
    right.set_ylim(bottom=0)
    legend(figure, found)
    return figure


def draw(axes: Axes, found: Sequence[Series], height: Height, ideal: Height) -> None:
    """One number of all series against ranks, each above its ideal line."""
    for place, series in enumerate(found):
        ranks = [timing.ranks for timing in series.timings]
        values = [height(series, timing) for timing in series.timings]
        axes.plot(ranks, [ideal(series, timing) for timing in series.timings], ":", color=REFERENCE)
        colour = series_colour(place)
        axes.plot(ranks, values, color=colour, linestyle=DASHES[series.kind])
        for timing, value in zip(series.timings, values, strict=True):
            face = "white" if crowded(timing) else colour
            axes.plot(timing.ranks, value, "o", color=colour, markerfacecolor=face)
    ticks = sorted({timing.ranks for series in found for timing in series.timings})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks")


def ideal_seconds(series: Series, timing: Timing) -> float:
    """What a step would take if nothing were lost."""
    first = series.timings[0]
    return first.seconds * (first.ranks / timing.ranks if series.kind == "strong" else 1.0)


def ideal_speed_up(series: Series, timing: Timing) -> float:
    """The growth in ranks."""
    return timing.ranks / series.timings[0].ranks


def legend(figure: Figure, found: Sequence[Series]) -> None:
    """What the lines and marks of all panels mean, below them."""
    lines = [
        Line2D([], [], color=series_colour(place), linestyle=DASHES[series.kind], marker="o")
        for place, series in enumerate(found)
    ]
    names = [f"{series.kind}, {series.axis} ranks: {series.title}" for series in found]
    lines.append(Line2D([], [], color=REFERENCE, linestyle=":"))
    names.append("ideal")
    if any(crowded(timing) for series in found for timing in series.timings):
        lines.append(Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="w"))
        names.append("more ranks than cores")
    figure.legend(lines, names, loc="outside lower center", ncols=2)

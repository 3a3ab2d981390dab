"""Panels of curves and maps of errors, drawn alike wherever scores are shown."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from credit_dp.evaluation.figure_style import (
    DIVERGING,
    SEQUENTIAL,
    SOURCE_LINES,
    plain,
    power_label,
    power_of_ten,
    with_unit,
)
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.plots import draw_cells

COLUMNS = 3
PANEL = (3.6, 2.7)  # inches
LEGEND = 0.4  # inches: two lines
LEGEND_COLUMNS = 4
TITLE = 0.3  # inches
SPANNED = 99.5  # percent of points whose errors a colour bar spans
POWERS = 7  # ticks of an axis of powers, at most
DECADES = 100.0  # of the largest to the smallest power: from here on ticks are powers of ten
WAVES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
DAILY = 48  # hours from which on lead times are told in days


def panels(count: int, title: str = "") -> tuple[Figure, list[Axes]]:
    """A figure with room for a legend, and this many panels that are in use."""
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    top = LEGEND + (TITLE if title else 0.0)
    width, height = PANEL[0] * columns, PANEL[1] * rows + top
    figure = Figure(figsize=(width, height))
    # Margins are given, for to find them takes longer than to draw.
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - (top + 0.25) / height,
        wspace=0.32,
        hspace=0.42,
    )
    if title:
        figure.suptitle(title, y=1 - 0.08 / height, va="top")
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in found[count:]:
        axes.set_visible(False)
    return figure, found[:count]


def legend(figure: Figure, axes: Axes, below: float = 0.0) -> None:
    """What the curves are, above all panels; `below` so many inches."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        ncols=min(len(labels), LEGEND_COLUMNS),
        bbox_to_anchor=(0, 1 - below / figure.get_figheight()),
    )


def draw_scores(
    axes: Axes, hours: Sequence[int], values: Mapping[str, np.ndarray], title: str, label: str
) -> None:
    """A score `(leads,)` of each source by lead time; `label` says which score, and its unit."""
    in_days = max(hours) > DAILY
    leads = np.array(hours) / (24 if in_days else 1)
    for source, of_source in values.items():
        axes.plot(
            leads,
            of_source,
            label=source,
            marker="o" if len(leads) < 12 else "",
            **SOURCE_LINES[source],
        )
    axes.set_title(plain(title))
    axes.set_ylabel(label)
    axes.set_xlabel(f"lead time ({'days' if in_days else 'hours'})")
    if len(leads) < 5:
        axes.set_xticks(leads)


def draw_powers(axes: Axes, powers: Mapping[str, np.ndarray], name: str, unit: str) -> None:
    """The power `(W // 2 + 1,)` of each source by zonal wavenumber, from 1 on."""
    for source, of_source in powers.items():
        power = of_source[1:]
        waves = np.arange(1, len(power) + 1)
        shown = np.where(power > 0, power, np.nan)
        axes.plot(waves, shown, label=source, **SOURCE_LINES[source])
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Every tick takes as long to draw as a curve, and a logarithmic axis would have hundreds.
    axes.xaxis.set_major_locator(FixedLocator([k for k in WAVES if k <= len(waves)]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if high > DECADES * low:  # else the powers of ten are too few
        axes.yaxis.set_major_locator(LogLocator(numticks=POWERS))
        axes.yaxis.set_major_formatter(power_of_ten)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(plain(name))
    axes.set_xlabel("zonal wavenumber")
    axes.set_ylabel(power_label(unit))


def draw_errors(grid: MapGrid, rmse: np.ndarray, bias: np.ndarray, unit: str) -> Figure:
    """Root-mean-square and mean error on each grid point, side by side."""
    figure = Figure(figsize=(9.6, 2.7))
    figure.subplots_adjust(left=0.05, right=0.97, bottom=0.09, top=0.86, wspace=0.14)
    most, far = _most(rmse), _most(np.abs(bias))
    parts = (
        ("root-mean-square error", rmse, "max", (SEQUENTIAL, Normalize(0, most))),
        ("mean error (forecast - truth)", bias, "both", (DIVERGING, Normalize(-far, far))),
    )
    for axes, (name, values, extend, colours) in zip(figure.subplots(1, 2), parts, strict=True):
        draw_cells(axes, grid, values, colours)
        axes.set_title(name)
        bar = figure.colorbar(axes.collections[0], ax=axes, extend=extend, pad=0.02)
        bar.set_label(with_unit("error", unit))
    return figure


def _most(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return max(float(np.percentile(finite, SPANNED)) if len(finite) else 0.0, 1e-30)

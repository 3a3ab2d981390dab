"""Panels of curves, drawn alike wherever scores are shown: for each source a colour and dashes."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from credit_dp.evaluation.labels import RAISED, plain, unit_label
from credit_dp.evaluation.plots import MapGrid, draw_cells

# Each source has its colour and dashes everywhere; they differ in grey too.
STYLES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "forecast": {"color": "#1f4e9c", "linewidth": 2.0},
        "persistence": {"color": "#c2571a", "linestyle": "--"},
        "climatology": {"color": "#5f6b6d", "linestyle": ":", "linewidth": 2.0},
        "truth": {"color": "#111111", "linestyle": "-."},
        "error of the mean": {"color": "#111111", "linestyle": "-."},
    }
)
COLUMNS = 3
PANEL = (3.6, 2.7)  # inches
LEGEND = 0.4  # inches: two lines
LEGEND_COLUMNS = 4
TITLE = 0.3  # inches
POWERS = 7  # ticks of an axis of powers, at most
DECADES = 100.0  # of the largest to the smallest power: from here on ticks are powers of ten
SPANNED = 99.5  # percent of points whose errors a colour bar spans
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
        figure.suptitle(title, y=1 - 0.08 / height, va="top", fontsize=11)
    look = {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titley": 1.0,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
    }
    with rc_context(look):  # type: ignore[arg-type]
        found = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axes in found:
        # Places are given, too: to find them, all texts are laid out once more for each label.
        box = axes.get_position()
        axes.xaxis.set_label_coords(0.5, -0.25 / (box.height * height))
        axes.yaxis.set_label_coords(-0.42 / (box.width * width), 0.5)
        axes.yaxis.set_major_formatter(number)
    return figure, found


def empty(figure: Figure, axes_of: Sequence[Axes]) -> None:
    """Remove curves and legend, to draw others: new ticks would take longer than the drawing."""
    for drawn in [*figure.legends, *(line for axes in axes_of for line in axes.get_lines())]:
        drawn.remove()
    for axes in axes_of:
        axes.relim()
        axes.autoscale()


def number(value: float, _: float) -> str:
    """Return the label of a tick."""
    return f"{value:g}".replace("-", "\N{MINUS SIGN}")


def power_of_ten(value: float, _: float) -> str:
    """Return the label of a tick at a power of ten."""
    return "10" + str(round(math.log10(value))).translate(RAISED)


def legend(figure: Figure, axes: Axes, below: float = 0.0) -> None:
    """What the curves are, above all panels; `below` so many inches."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        ncols=min(len(labels), LEGEND_COLUMNS),
        frameon=False,
        bbox_to_anchor=(0, 1 - below / figure.get_figheight()),
    )


def draw_scores(
    axes: Axes, hours: Sequence[int], values: Mapping[str, np.ndarray], name: str, unit: str
) -> None:
    """A score `(leads,)` of each source by lead time."""
    in_days = max(hours) > DAILY
    leads = np.array(hours) / (24 if in_days else 1)
    for source, of_source in values.items():
        axes.plot(
            leads,
            of_source,
            label=source,
            marker="o" if len(leads) < 12 else "",
            markersize=3,
            **STYLES[source],  # type: ignore[arg-type]
        )
    axes.set_title(plain(name), fontsize=9, loc="left")
    axes.set_ylabel(unit_label(unit), fontsize=8)
    axes.set_xlabel(f"lead time ({'days' if in_days else 'hours'})", fontsize=8)
    if len(leads) < 5:
        axes.set_xticks(leads)


def draw_powers(axes: Axes, powers: Mapping[str, np.ndarray], name: str, unit: str) -> None:
    """The power `(W // 2 + 1,)` of each source by zonal wavenumber, from 1 on."""
    for source, of_source in powers.items():
        power = of_source[1:]
        waves = np.arange(1, len(power) + 1)
        shown = np.where(power > 0, power, np.nan)
        axes.plot(waves, shown, label=source, **STYLES[source])  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([k for k in WAVES if k <= len(waves)]))
    axes.xaxis.set_major_formatter(number)
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if high > DECADES * low:  # else the powers of ten are too few
        axes.yaxis.set_major_locator(LogLocator(numticks=POWERS))
        axes.yaxis.set_major_formatter(power_of_ten)
        axes.yaxis.set_minor_locator(NullLocator())  # there would be hundreds
    axes.set_title(plain(name), fontsize=9, loc="left")
    axes.set_xlabel("zonal wavenumber", fontsize=8)
    label = unit_label(unit)
    squared = f"{label}$^2$" if label.isalpha() else f"({label})$^2$"
    axes.set_ylabel(f"{squared} m" if label else "power", fontsize=8)


def error_panels(grid: MapGrid) -> Figure:
    """Two maps side by side, for root-mean-square and mean errors; see `draw_errors`."""
    figure = Figure(figsize=(11.0, 3.2))
    figure.subplots_adjust(left=0.06, right=0.97, bottom=0.16, top=0.86, wspace=0.16)
    none = np.zeros((len(grid.latitude), len(grid.longitude)))
    parts = (
        ("root-mean-square error", "max", "viridis"),
        ("mean error (forecast - truth)", "both", "RdBu_r"),
    )
    for axes, (name, extend, colours) in zip(figure.subplots(1, 2), parts, strict=True):
        draw_cells(axes, grid, none, (colours, Normalize(0, 1)))
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("longitude (degrees east)", fontsize=8)
        axes.set_ylabel("latitude (degrees north)", fontsize=8)
        axes.tick_params(labelsize=7)
        bar = figure.colorbar(axes.collections[0], ax=axes, extend=extend, pad=0.02)
        bar.ax.tick_params(labelsize=7)
    return figure


def draw_errors(figure: Figure, rmse: np.ndarray, bias: np.ndarray, unit: str) -> None:
    """Show errors on each grid point in the panels made for them, in place of others."""
    most, far = _most(rmse), _most(np.abs(bias))
    parts = ((rmse, Normalize(0, most)), (bias, Normalize(-far, far)))
    maps, bars = figure.axes[:2], figure.axes[2:]
    for axes, bar, (values, norm) in zip(maps, bars, parts, strict=True):
        axes.collections[0].set_array(values)
        axes.collections[0].set_norm(norm)
        bar.set_ylabel(unit_label(unit), fontsize=8)


def _most(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return max(float(np.percentile(finite, SPANNED)) if len(finite) else 0.0, 1e-30)

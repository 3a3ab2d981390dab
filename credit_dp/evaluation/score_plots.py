"""Pictures of a scorecard: scores by lead time, spectra and error maps, for its page."""

import base64
import io
from collections.abc import Mapping
from types import MappingProxyType

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from credit_dp.evaluation.error_maps import ErrorMap
from credit_dp.evaluation.plots import cell_edges, raised, row_edges
from credit_dp.evaluation.scorecard import Scorecard, headline
from credit_dp.evaluation.variable_scores import SOURCES, SPECTRA_OF

# Each source has its colour and dashes everywhere; they differ in grey too.
STYLES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "forecast": {"color": "#1f4e9c", "linewidth": 2.0},
        "persistence": {"color": "#c2571a", "linestyle": "--"},
        "climatology": {"color": "#5f6b6d", "linestyle": ":", "linewidth": 2.0},
        "truth": {"color": "#111111", "linestyle": "-."},
    }
)
COLUMNS = 3
PANEL = (3.6, 2.7)  # inches
LEGEND = 0.4  # inches
SPANNED = 99.5  # percent of points whose errors a colour bar spans
WAVES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def curves(card: Scorecard, name: str) -> str:
    """One score by lead time, a panel for each channel that is shown."""
    shown = headline(card.channels)
    figure, panels = _panels(len(shown))
    days = np.array(card.hours) / 24
    for axes, c in zip(panels, shown, strict=False):
        for source, of in enumerate(SOURCES[name]):
            marker = "o" if len(days) < 12 else ""
            axes.plot(
                days,
                card.scores[name][source, :, c],
                label=of,
                marker=marker,
                markersize=3,
                **STYLES[of],  # type: ignore[arg-type]
            )
        if name == "spread":  # which says nothing without what it is compared with
            error = card.scores["rmse"][0, :, c]
            axes.plot(days, error, label="error of the mean", **STYLES["truth"])  # type: ignore[arg-type]
        axes.set_title(plain(card.channels[c].name), fontsize=9, loc="left")
        axes.set_ylabel("" if name == "acc" else raised(plain(card.units[c])), fontsize=8)
        axes.set_xlabel("lead time (days)", fontsize=8)
        if name == "bias":
            axes.axhline(0, color="#999999", linewidth=0.8)
        elif name != "acc":
            axes.set_ylim(bottom=0)
    return _finished(figure, panels, len(shown))


def spectra(card: Scorecard, band: int) -> str:
    """Power by zonal wavenumber at the longest lead time, a panel for each channel shown."""
    shown = headline(card.channels)
    figure, panels = _panels(len(shown))
    for axes, c in zip(panels, shown, strict=False):
        for source, of in enumerate(SPECTRA_OF):
            power = card.spectra[source, -1, c, band, 1:]
            waves = np.arange(1, len(power) + 1)
            axes.plot(waves, np.where(power > 0, power, np.nan), label=of, **STYLES[of])  # type: ignore[arg-type]
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([k for k in WAVES if k <= len(waves)], minor=False)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(plain(card.channels[c].name), fontsize=9, loc="left")
        axes.set_xlabel("zonal wavenumber", fontsize=8)
        unit = raised(plain(card.units[c]))
        squared = f"{unit}$^2$" if unit.isalpha() else f"({unit})$^2$"
        axes.set_ylabel(f"{squared} m" if unit else "power", fontsize=8)
    return _finished(figure, panels, len(shown))


def error_map(card: Scorecard, found: ErrorMap) -> str:
    """Root-mean-square and mean error of one channel on each grid point."""
    figure = Figure(figsize=(11.0, 3.2))
    figure.subplots_adjust(left=0.06, right=0.97, bottom=0.16, top=0.92, wspace=0.16)
    left, right = figure.subplots(1, 2)
    most = _most(found.rmse)
    far = _most(np.abs(found.bias))
    _draw(left, card, found.rmse, "root-mean-square error", ("viridis", Normalize(0, most)))
    _draw(right, card, found.bias, "mean error", ("RdBu_r", Normalize(-far, far)))
    unit = raised(plain(card.units[found.channel]))
    for axes, extend in ((left, "max"), (right, "both")):
        bar = figure.colorbar(axes.collections[0], ax=axes, extend=extend, pad=0.02)
        bar.set_label(unit, fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return picture(figure, "png")


def plain(text: str) -> str:
    """A text of a store's as it is, where what is between dollars would be read as a formula."""
    return text.replace("$", r"\$")


def picture(figure: Figure, form: str) -> str:
    """The figure as a `data:` address, so that a page needs no other file."""
    held = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scorecard"}):
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(held, format=form, dpi=110, metadata=metadata)
    kind = "image/svg+xml" if form == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(held.getvalue()).decode()}"


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    width, height = PANEL[0] * columns, PANEL[1] * rows + LEGEND
    figure = Figure(figsize=(width, height))
    # Margins are given, for to find them takes longer than to draw.
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - (LEGEND + 0.25) / height,
        wspace=0.32,
        hspace=0.42,
    )
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _finished(figure: Figure, panels: list[Axes], used: int) -> str:
    for axes in panels[used:]:
        axes.set_visible(False)
    for axes in panels[:used]:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.tick_params(which="both", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", ncols=len(labels), frameon=False)
    return picture(figure, "svg")


def _draw(
    axes: Axes, card: Scorecard, values: np.ndarray, name: str, colours: tuple[str, Normalize]
) -> None:
    cmap, norm = colours
    longitudes, latitudes = cell_edges(card.longitude), row_edges(card.latitude)
    axes.pcolormesh(longitudes, latitudes, values, cmap=matplotlib.colormaps[cmap], norm=norm)
    axes.set_title(name, fontsize=9, loc="left")
    axes.set_xlabel("longitude (degrees east)", fontsize=8)
    axes.set_ylabel("latitude (degrees north)", fontsize=8)
    axes.tick_params(labelsize=7)


def _most(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return max(float(np.percentile(finite, SPANNED)) if len(finite) else 0.0, 1e-30)

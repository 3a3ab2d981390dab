"""Pictures of a scorecard: scores by lead time, spectra and error maps, for its page."""

import base64
import io
from collections.abc import Iterable, Iterator

import matplotlib
from matplotlib.figure import Figure

from credit_dp.evaluation.panels import (
    draw_errors,
    draw_powers,
    draw_scores,
    empty,
    error_panels,
    legend,
    panels,
)
from credit_dp.evaluation.scorecard import Scorecard, headline
from credit_dp.evaluation.variable_scores import SOURCES, SPECTRA_OF


def curves(card: Scorecard, names: Iterable[str]) -> Iterator[str]:
    """Draw scores by lead time, a picture for each of these, a panel for each channel shown."""
    shown = headline(card.channels)
    figure, axes_of = panels(len(shown))
    for name in names:
        empty(figure, axes_of)
        for axes, c in zip(axes_of, shown, strict=True):
            values = {of: card.scores[name][n, :, c] for n, of in enumerate(SOURCES[name])}
            unit = "" if name == "acc" else card.units[c]
            draw_scores(axes, card.hours, values, card.channels[c].name, unit)
            if name == "spread":  # which says nothing without what it is compared with
                error = {"error of the mean": card.scores["rmse"][0, :, c]}
                draw_scores(axes, card.hours, error, card.channels[c].name, unit)
            if name == "bias":
                axes.axhline(0, color="#999999", linewidth=0.8)
            elif name != "acc":
                axes.set_ylim(bottom=0)
        legend(figure, axes_of[0])
        yield picture(figure, "svg")


def spectra(card: Scorecard, bands: Iterable[int]) -> Iterator[str]:
    """Draw power by zonal wavenumber at the longest lead time, a picture for each of the bands."""
    shown = headline(card.channels)
    figure, axes_of = panels(len(shown))
    for band in bands:
        empty(figure, axes_of)
        for axes, c in zip(axes_of, shown, strict=True):
            powers = {of: card.spectra[n, -1, c, band] for n, of in enumerate(SPECTRA_OF)}
            draw_powers(axes, powers, card.channels[c].name, card.units[c])
        legend(figure, axes_of[0])
        yield picture(figure, "svg")


def error_maps(card: Scorecard) -> Iterator[str]:
    """Draw root-mean-square and mean errors on each grid point, a picture for each map."""
    if not card.maps:
        return
    figure = error_panels(card.grid)
    for found in card.maps:
        draw_errors(figure, found.rmse, found.bias, card.units[found.channel])
        yield picture(figure, "png")


def picture(figure: Figure, form: str) -> str:
    """The figure as a `data:` address, so that a page needs no other file."""
    held = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scorecard"}):
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(held, format=form, dpi=110, metadata=metadata)
    kind = "image/svg+xml" if form == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(held.getvalue()).decode()}"

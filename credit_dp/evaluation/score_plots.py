"""Pictures of a scorecard: scores by lead time, spectra and error maps, for its page."""

import base64
import io

from matplotlib.figure import Figure

from credit_dp.evaluation.error_maps import ErrorMap
from credit_dp.evaluation.figure_style import REFERENCE, figure_style, with_unit
from credit_dp.evaluation.panels import draw_errors, draw_powers, draw_scores, legend, panels
from credit_dp.evaluation.scorecard import Scorecard, headline
from credit_dp.evaluation.variable_scores import SOURCES, SPECTRA_OF

# What an axis says of each score.
LABELS = {
    "rmse": "RMSE",
    "acc": "ACC",
    "bias": "bias",
    "activity": "activity",
    "crps": "CRPS",
    "spread": "spread",
}


@figure_style()
def curves(card: Scorecard, name: str) -> str:
    """One score by lead time, a panel for each channel that is shown."""
    shown = headline(card.channels)
    figure, axes_of = panels(len(shown))
    for axes, c in zip(axes_of, shown, strict=True):
        values = {of: card.scores[name][source, :, c] for source, of in enumerate(SOURCES[name])}
        label = with_unit(LABELS[name], "1" if name == "acc" else card.units[c])
        draw_scores(axes, card.hours, values, card.channels[c].name, label)
        if name == "spread":  # which says nothing without what it is compared with
            error = {"error of the mean": card.scores["rmse"][0, :, c]}
            draw_scores(axes, card.hours, error, card.channels[c].name, label)
        if name == "bias":
            axes.axhline(0, color=REFERENCE, linewidth=0.8)
        elif name != "acc":
            axes.set_ylim(bottom=0)
    legend(figure, axes_of[0])
    return picture(figure, "svg")


@figure_style()
def spectra(card: Scorecard, band: int) -> str:
    """Power by zonal wavenumber at the longest lead time, a panel for each channel shown."""
    shown = headline(card.channels)
    figure, axes_of = panels(len(shown))
    for axes, c in zip(axes_of, shown, strict=True):
        powers = {of: card.spectra[source, -1, c, band] for source, of in enumerate(SPECTRA_OF)}
        draw_powers(axes, powers, card.channels[c].name, card.units[c])
    legend(figure, axes_of[0])
    return picture(figure, "svg")


@figure_style()
def error_map(card: Scorecard, found: ErrorMap) -> str:
    """Root-mean-square and mean error of one channel on each grid point."""
    unit = card.units[found.channel]
    return picture(draw_errors(card.grid, found.rmse, found.bias, unit), "png")


@figure_style()
def picture(figure: Figure, form: str) -> str:
    """The figure as a `data:` address, so that a page needs no other file."""
    held = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {}
    figure.savefig(held, format=form, metadata=metadata)
    kind = "image/svg+xml" if form == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(held.getvalue()).decode()}"

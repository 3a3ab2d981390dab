"""The plots of a run's evaluation: errors by lead time, spectra, and errors on the globe."""

from collections.abc import Sequence
from pathlib import Path

from credit_dp.evaluation.figure_style import figure_style, plain, with_unit
from credit_dp.evaluation.last_lead import SOURCES as SPECTRA_OF
from credit_dp.evaluation.last_lead import LastLead
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.panels import (
    TITLE,
    draw_errors,
    draw_powers,
    draw_scores,
    legend,
    panels,
)
from credit_dp.evaluation.plots import save
from credit_dp.evaluation.table import Scores
from credit_dp.evaluation.zonal_spectra import BANDS

SOURCES = ("forecast", "persistence", "climatology")  # as `table.SOURCES`, in the words of plots


@figure_style()
def draw_rmse(scores: Scores, shown: Sequence[int], path: Path) -> None:
    """Root-mean-square errors by lead time, a panel for each channel that is shown.

    Raises:
        UserError: the file could not be written.
    """
    figure, axes_of = panels(len(shown), f"RMSE over {scores.samples} initial times")
    for axes, c in zip(axes_of, shown, strict=True):
        values = {of: scores.rmse[source, :, c] for source, of in enumerate(SOURCES)}
        label = with_unit("RMSE", scores.units[c])
        draw_scores(axes, scores.hours, values, scores.channels[c], label)
        axes.set_ylim(bottom=0)
    legend(figure, axes_of[0], below=TITLE)
    save(figure, path)


@figure_style()
def draw_spectra(scores: Scores, last: LastLead, path: Path) -> None:
    """Power by zonal wavenumber of a few channels, each with a row of bands of latitude.

    Raises:
        UserError: the file could not be written.
    """
    title = f"Zonal power spectra, {last.hours} h forecasts from {scores.samples} initial times"
    drawn = drawn_of(scores, last)
    figure, axes_of = panels(len(drawn) * len(BANDS), title)
    for place, axes in enumerate(axes_of):
        channel, band = divmod(place, len(BANDS))
        c = drawn[channel]
        powers = {of: last.spectra[s, last.shown.index(c), band] for s, of in enumerate(SPECTRA_OF)}
        name = f"{scores.channels[c]}, {list(BANDS)[band]}"
        draw_powers(axes, powers, name, scores.units[c])
    legend(figure, axes_of[0], below=TITLE)
    save(figure, path)


def drawn_of(scores: Scores, last: LastLead) -> list[int]:
    """The channel with maps if it has spectra, and one of another kind, by its unit."""
    first = last.mapped if last.mapped in last.shown else last.shown[0]
    others = [c for c in last.shown if scores.units[c] != scores.units[first]]
    return [first, *(others or [c for c in last.shown if c != first])[:1]]


@figure_style()
def draw_errors_of(scores: Scores, last: LastLead, grid: MapGrid, path: Path) -> None:
    """Root-mean-square and mean error of one channel on each grid point.

    Raises:
        UserError: the file could not be written.
    """
    unit, name = scores.units[last.mapped], scores.channels[last.mapped]
    figure = draw_errors(grid, last.rmse, last.bias, unit)
    over = f"{last.hours} h forecasts from {scores.samples} initial times"
    figure.suptitle(f"{plain(name)}, {over}")
    save(figure, path)

"""The folder of a scorecard: one HTML page that needs no other file, with its pictures."""

import base64
import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
from matplotlib.figure import Figure

from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import REFERENCE, figure_style, superscript, with_unit
from credit_dp.evaluation.metrics import SCORE_SOURCES, SPECTRA_SOURCES, ErrorMap
from credit_dp.evaluation.plots import (
    add_legend,
    create_panels,
    draw_error_maps,
    draw_scores,
    draw_spectrum,
)
from credit_dp.evaluation.scorecard import Array, Scorecard, headline_indices, three_digits

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
def score_image(card: Scorecard, name: str) -> str:
    """One score by lead time, a panel for each channel that is shown."""
    shown = headline_indices(card.channels)
    figure, axes_of = create_panels(len(shown))
    for axes, c in zip(axes_of, shown, strict=True):
        values = {
            of: card.scores[name][source, :, c] for source, of in enumerate(SCORE_SOURCES[name])
        }
        label = with_unit(LABELS[name], "1" if name == "acc" else card.units[c])
        draw_scores(axes, card.hours, values, card.channels[c].name, label)
        if name == "spread":  # which says nothing without what it is compared with
            error = {"error of the mean": card.scores["rmse"][0, :, c]}
            draw_scores(axes, card.hours, error, card.channels[c].name, label)
        if name == "bias":
            axes.axhline(0, color=REFERENCE, linewidth=0.8)
        elif name != "acc":
            axes.set_ylim(bottom=0)
    add_legend(figure, axes_of[0])
    return figure_data_uri(figure, "svg")


@figure_style()
def spectra_image(card: Scorecard, band: int) -> str:
    """Power by zonal wavenumber at the longest lead time, a panel for each channel shown."""
    shown = headline_indices(card.channels)
    figure, axes_of = create_panels(len(shown))
    for axes, c in zip(axes_of, shown, strict=True):
        powers = {
            of: card.spectra[source, -1, c, band] for source, of in enumerate(SPECTRA_SOURCES)
        }
        draw_spectrum(axes, powers, card.channels[c].name, card.units[c])
    add_legend(figure, axes_of[0])
    return figure_data_uri(figure, "svg")


@figure_style()
def error_map_image(card: Scorecard, found: ErrorMap) -> str:
    """Root-mean-square and mean error of one channel on each grid point."""
    unit = card.units[found.channel]
    return figure_data_uri(draw_error_maps(card.grid, found.rmse, found.bias, unit), "png")


@figure_style()
def figure_data_uri(figure: Figure, form: str) -> str:
    """The figure as a `data:` address, so that a page needs no other file."""
    held = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {}
    figure.savefig(held, format=form, metadata=metadata)
    kind = "image/svg+xml" if form == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(held.getvalue()).decode()}"


TABLE_HOURS = (24, 72, 120, 240)  # in tables, as far as there are these
# In which scores one source is better than another.
BEST_INDEX: Mapping[str, Callable[[Array], np.intp]] = MappingProxyType(
    {"rmse": np.nanargmin, "crps": np.nanargmin, "acc": np.nanargmax}
)
TITLES = {
    "rmse": "Root-mean-square error",
    "acc": "Anomaly correlation",
    "bias": "Bias",
    "activity": "Activity: standard deviation of the anomaly",
    "crps": "Continuous ranked probability score (fair)",
    "spread": "Ensemble spread",
}
EXPLANATIONS = {
    "rmse": "Weighted by area; the root is taken after the mean over initial times. Smaller is "
    "better; the best of each lead time is bold.",
    "acc": "Of forecast and true anomaly over the globe, averaged over initial times. 1 is "
    "perfect; a climatology has none. The best of each lead time is bold.",
    "bias": "Forecast less truth.",
    "activity": "Less than the truth's says that the forecast is too smooth.",
    "crps": "In the unit of the variable; of a single forecast the mean absolute error. Smaller is "
    "better; the best of each lead time is bold.",
    # Source: Fortin et al. 2014, "Why should ensemble spread match the RMSE of the ensemble mean?"
    "spread": "Of members about their mean. If the ensemble is reliable, the root-mean-square "
    "error of the mean is this times the root of 1 + 1 / members.",
}
PAGE_CSS = """
:root { color-scheme: light; background: #fff; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f23; max-width: 1180px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
.wide { overflow-x: auto; }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
thead tr:last-child th { border-bottom: 1px solid #888; } th[colspan] { text-align: center; }
tbody tr:nth-child(even) { background: #f4f6f8; }
td.best { font-weight: 600; } td.forecast, th.forecast { border-left: 1px solid #ccc; }
img { max-width: 100%; } p.note { color: #555; margin: 0.2rem 0 0.8rem; }
@media (max-width: 900px) { img { max-width: none; } }
h1, h2, dd { overflow-wrap: anywhere; }
dt { float: left; clear: left; width: 9rem; color: #555; } dd { margin-left: 9.5rem; }
"""


def scorecard_page(card: Scorecard) -> str:
    """The whole page, as text."""
    parts = [
        *_page_header(card),
        *_score_sections(card),
        *_spectra_sections(card),
        *_map_sections(card),
    ]
    title = escape(f"Scorecard of {card.forecast}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{PAGE_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def table_lead_indices(hours: Sequence[int]) -> list[int]:
    """The places of a few lead times for tables."""
    known = [hours.index(hour) for hour in TABLE_HOURS if hour in hours]
    if known:
        return known
    spread = np.linspace(0, len(hours) - 1, len(TABLE_HOURS)).round()
    return sorted({int(place) for place in spread})


def _page_header(card: Scorecard) -> list[str]:
    first, last = (str(card.initial_times[x].astype("M8[m]")) for x in (0, -1))
    count = len(card.initial_times)
    facts = {
        "Forecast": card.forecast + (f", {card.members} members" if card.members > 1 else ""),
        "Truth": card.truth,
        "Climatology": card.climatology,
        "Initial times": f"{count}, {first} to {last}" if count > 1 else first,
        "Lead times": f"{len(card.hours)}, {card.hours[0]} to {card.hours[-1]} hours",
        "Grid": f"{len(card.latitude)} x {len(card.longitude)}",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return [
        "<h1>Scorecard</h1>",
        f"<dl>{listed}</dl>",
        '<p class="note">Scores as WeatherBench 2 defines them (Rasp et al. 2024). All numbers are '
        f"in scores.csv and scores.json beside this page.{_omission_note(card)}</p>",
    ]


def _omission_note(card: Scorecard) -> str:
    drawn, count = len(headline_indices(card.channels)), len(card.channels)
    return (
        f" Plots are of {drawn} of the {count} variables, tables of all." if drawn < count else ""
    )


def _score_sections(card: Scorecard) -> Iterable[str]:
    for name in card.scores:
        yield f"<h2>{TITLES[name]}</h2>"
        yield f'<p class="note">{EXPLANATIONS[name]}</p>'
        yield _image_tag(score_image(card, name), f"{TITLES[name]} by lead time")
        yield f'<div class="wide">{_score_table(card, name)}</div>'


def _score_table(card: Scorecard, name: str) -> str:
    """Channels below each other; for each lead time the forecast beside the others."""
    leads, sources = table_lead_indices(card.hours), SCORE_SOURCES[name]
    spans = "".join(
        f'<th colspan="{len(sources)}" class="forecast">{card.hours[lead]} h</th>' for lead in leads
    )
    names = "".join(f'<th class="{of}">{of}</th>' for _ in leads for of in sources)
    lines = []
    for c, channel in enumerate(card.channels):
        unit = "1" if name == "acc" else card.units[c]
        cells = [_score_cells(name, card.scores[name][:, lead, c]) for lead in leads]
        lines.append(
            f'<tr><td>{escape(channel.name)}</td><td class="text">{escape(superscript(unit))}</td>'
            f"{''.join(cells)}</tr>"
        )
    return (
        f'<table id="{name}"><thead><tr><th></th><th></th>{spans}</tr>'
        f'<tr><th>variable</th><th class="text">unit</th>{names}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _score_cells(name: str, values: Array) -> str:
    """The cells of one lead time; the best of them marked, where better has a meaning."""
    best = BEST_INDEX[name](values) if name in BEST_INDEX and np.isfinite(values).any() else None
    return "".join(
        f'<td class="{of}{" best" if place == best else ""}">{_format_value(value)}</td>'
        for place, (of, value) in enumerate(zip(SCORE_SOURCES[name], values, strict=True))
    )


def _spectra_sections(card: Scorecard) -> Iterable[str]:
    yield f"<h2>Zonal power spectra at {card.hours[-1]} h</h2>"
    yield (
        '<p class="note">What lies below the truth at high wavenumbers is smoothed away; what lies '
        "above is noise.</p>"
    )
    for band, name in enumerate(card.bands):
        if np.isfinite(card.spectra[:, -1, :, band]).any():
            yield f"<h3>{escape(name)}</h3>"
            yield _image_tag(spectra_image(card, band), f"power spectra, {name}")


def _map_sections(card: Scorecard) -> Iterable[str]:
    for found in card.maps:
        title = f"Errors of {card.channels[found.channel].name} at {found.hours} h"
        yield f"<h2>{escape(title)}</h2>"
        yield _image_tag(error_map_image(card, found), title)


def _image_tag(address: str, told: str) -> str:
    return f'<div class="wide"><img src="{address}" alt="{escape(told, quote=True)}"></div>'


def _format_value(value: float) -> str:
    return three_digits(float(value)) if np.isfinite(value) else "-"


@final
class ScoreFolder:
    """Where scores are written, taken before anything is read: what can't be is told at once.

    Raises:
        UserError: it is there already, or can't be made.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._created_parents: list[Path] = []
        try:
            if os.path.lexists(out):
                raise UserError(
                    f"{out}: exists already, and scores are not written over others. Change out, "
                    "or remove it."
                )
            self._temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
            self._created_parents = [path for path in out.parents if not path.exists()]
            self._temporary.mkdir(parents=True)
        except OSError as error:
            self._remove_created()
            raise UserError(f"{out}: can't be made ({error.strerror}). Change out.") from error

    @contextlib.contextmanager
    def cleanup_on_failure(self) -> Iterator[None]:
        """Leave nothing behind if what is done inside fails."""
        try:
            yield
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._remove_created()

    def _remove_created(self) -> None:
        """Remove the folders made for it that hold nothing, innermost first."""
        for path in self._created_parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def write(self, card: Scorecard) -> None:
        """Write all files of a scorecard; see `write_files`."""
        self.write_files(
            {
                "scores.csv": card.to_csv(),
                "scores.json": card.to_json(),
                "spectra.csv": card.spectra_csv(),
                "scorecard.html": scorecard_page(card),
            }
        )

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write all files, then give the folder its name.

        Raises:
            UserError: the disk is full, or the name was taken meanwhile.
        """
        try:
            for name, text in files.items():
                (self._temporary / name).write_text(text, encoding="utf-8")
            os.rename(self._temporary, self.out)
        except OSError as error:
            raise UserError(
                f"{self.out}: can't be written ({error.strerror}). Free space there or change out."
            ) from error

"""Write a scorecard's folder: CSV, JSON and one self-contained HTML page with its figures.

`scorecard_page` builds the page from sections; `ScoreFolder` writes all files or none.
"""

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

# Labels of the vertical axes.
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
    """Return curves of a score by lead time, one panel per headline channel, as `data:` URI."""
    channels = headline_indices(card.channels)
    figure, panels = create_panels(len(channels))
    for axes, c in zip(panels, channels, strict=True):
        values = {
            source: card.scores[name][s, :, c] for s, source in enumerate(SCORE_SOURCES[name])
        }
        label = with_unit(LABELS[name], "1" if name == "acc" else card.units[c])
        draw_scores(axes, card.hours, values, card.channels[c].name, label)
        if name == "spread":  # is only meaningful next to the error of the ensemble mean
            error = {"error of the mean": card.scores["rmse"][0, :, c]}
            draw_scores(axes, card.hours, error, card.channels[c].name, label)
        if name == "bias":
            axes.axhline(0, color=REFERENCE, linewidth=0.8)
        elif name != "acc":
            axes.set_ylim(bottom=0)
    add_legend(figure, panels[0])
    return figure_data_uri(figure, "svg")


@figure_style()
def spectra_image(card: Scorecard, band: int) -> str:
    """Return spectra at the longest lead time, one panel per headline channel, as `data:` URI."""
    channels = headline_indices(card.channels)
    figure, panels = create_panels(len(channels))
    for axes, c in zip(panels, channels, strict=True):
        powers = {source: card.spectra[s, -1, c, band] for s, source in enumerate(SPECTRA_SOURCES)}
        draw_spectrum(axes, powers, card.channels[c].name, card.units[c])
    add_legend(figure, panels[0])
    return figure_data_uri(figure, "svg")


@figure_style()
def error_map_image(card: Scorecard, errors: ErrorMap) -> str:
    """Return maps of root-mean-square and mean error of one channel, as `data:` URI."""
    unit = card.units[errors.channel]
    return figure_data_uri(draw_error_maps(card.grid, errors.rmse, errors.bias, unit), "png")


@figure_style()
def figure_data_uri(figure: Figure, image_format: str) -> str:
    """Return the figure as `data:` URI, so that a page needs no other file."""
    buffer = io.BytesIO()
    # Without a date the same scores give the same bytes.
    metadata = {"Date": None} if image_format == "svg" else {}
    figure.savefig(buffer, format=image_format, metadata=metadata)
    kind = "image/svg+xml" if image_format == "svg" else "image/png"
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


TABLE_HOURS = (24, 72, 120, 240)  # lead times in tables, if the scorecard has any of them
# Finds the best source of a score; scores without a direction are not listed.
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
    "acc": "Correlation of forecast and true anomaly over the globe, averaged over initial times. "
    "1 is perfect; it is undefined for climatology. The best of each lead time is bold.",
    "bias": "Forecast minus truth.",
    "activity": "A forecast with less activity than the truth is too smooth.",
    "crps": "In the unit of the variable; for a single forecast the mean absolute error. Smaller "
    "is better; the best of each lead time is bold.",
    # Source: Fortin et al. 2014, "Why should ensemble spread match the RMSE of the ensemble mean?"
    "spread": "Standard deviation of the members about their mean. For a reliable ensemble, the "
    "root-mean-square error of the mean is the spread times the root of 1 + 1 / members.",
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
    """Return the page as HTML text."""
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
    """Return the indices of the lead times that tables show."""
    usual = [hours.index(hour) for hour in TABLE_HOURS if hour in hours]
    if usual:
        return usual
    spaced = np.linspace(0, len(hours) - 1, len(TABLE_HOURS)).round()
    return sorted({int(index) for index in spaced})


def _page_header(card: Scorecard) -> list[str]:
    first, last = (str(card.initial_times[x].astype("M8[m]")) for x in (0, -1))
    count = len(card.initial_times)
    metadata = {
        "Forecast": card.forecast + (f", {card.members} members" if card.members > 1 else ""),
        "Truth": card.truth,
        "Climatology": card.climatology,
        "Initial times": f"{count}, {first} to {last}" if count > 1 else first,
        "Lead times": f"{len(card.hours)}, {card.hours[0]} to {card.hours[-1]} hours",
        "Grid": f"{len(card.latitude)} x {len(card.longitude)}",
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in metadata.items())
    return [
        "<h1>Scorecard</h1>",
        f"<dl>{items}</dl>",
        '<p class="note">Scores as WeatherBench 2 defines them (Rasp et al. 2024). All numbers are '
        f"in scores.csv and scores.json beside this page.{_omission_note(card)}</p>",
    ]


def _omission_note(card: Scorecard) -> str:
    plotted = len(headline_indices(card.channels))
    count = len(card.channels)
    if plotted == count:
        return ""
    return f" Plots show {plotted} of the {count} variables, tables all."


def _score_sections(card: Scorecard) -> Iterable[str]:
    for name in card.scores:
        yield f"<h2>{TITLES[name]}</h2>"
        yield f'<p class="note">{EXPLANATIONS[name]}</p>'
        yield _image_tag(score_image(card, name), f"{TITLES[name]} by lead time")
        yield f'<div class="wide">{_score_table(card, name)}</div>'


def _score_table(card: Scorecard, name: str) -> str:
    """Return an HTML table: one row per channel, all sources for each lead time."""
    leads = table_lead_indices(card.hours)
    sources = SCORE_SOURCES[name]
    spans = "".join(
        f'<th colspan="{len(sources)}" class="forecast">{card.hours[lead]} h</th>' for lead in leads
    )
    names = "".join(f'<th class="{source}">{source}</th>' for _ in leads for source in sources)
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
    """Return the cells of one lead time; the best source has the class `best`."""
    best = BEST_INDEX[name](values) if name in BEST_INDEX and np.isfinite(values).any() else None
    return "".join(
        f'<td class="{source}{" best" if s == best else ""}">{_format_value(value)}</td>'
        for s, (source, value) in enumerate(zip(SCORE_SOURCES[name], values, strict=True))
    )


def _spectra_sections(card: Scorecard) -> Iterable[str]:
    yield f"<h2>Zonal power spectra at {card.hours[-1]} h</h2>"
    yield (
        '<p class="note">At high wavenumbers, power below the truth\'s means that the forecast is '
        "too smooth, power above it that the forecast is noisy.</p>"
    )
    for band, name in enumerate(card.bands):
        if np.isfinite(card.spectra[:, -1, :, band]).any():
            yield f"<h3>{escape(name)}</h3>"
            yield _image_tag(spectra_image(card, band), f"power spectra, {name}")


def _map_sections(card: Scorecard) -> Iterable[str]:
    for errors in card.maps:
        title = f"Errors of {card.channels[errors.channel].name} at {errors.hours} h"
        yield f"<h2>{escape(title)}</h2>"
        yield _image_tag(error_map_image(card, errors), title)


def _image_tag(uri: str, alt: str) -> str:
    return f'<div class="wide"><img src="{uri}" alt="{escape(alt, quote=True)}"></div>'


def _format_value(value: float) -> str:
    return three_digits(float(value)) if np.isfinite(value) else "-"


@final
class ScoreFolder:
    """The output folder of scores, written completely or not at all.

    The temporary folder is created before anything is scored, so that a path that can't be written
    is reported at once.

    Raises:
        UserError: the folder exists already, or can't be created.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._created_parents: list[Path] = []
        try:
            if os.path.lexists(out):
                raise UserError(
                    f"{out}: exists already, and scores are never overwritten. Change out, or "
                    "remove it."
                )
            # Next to `out`, because a rename is atomic only within one file system.
            self._temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
            self._created_parents = [path for path in out.parents if not path.exists()]
            self._temporary.mkdir(parents=True)
        except OSError as error:
            self._remove_created()
            raise UserError(f"{out}: can't be created ({error.strerror}). Change out.") from error

    @contextlib.contextmanager
    def cleanup_on_failure(self) -> Iterator[None]:
        """Remove temporary files and empty parent folders if the block fails."""
        try:
            yield
        finally:
            # After success the temporary folder has its final name, and its parents are not empty.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._remove_created()

    def _remove_created(self) -> None:
        """Remove parent folders that were created here and are empty, innermost first."""
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
        """Write all files, then rename the folder to its final name.

        Raises:
            UserError: the disk is full, or the folder was created by another process meanwhile.
        """
        try:
            for name, text in files.items():
                (self._temporary / name).write_text(text, encoding="utf-8")
            # Fails if another process has created a folder that is not empty.
            os.rename(self._temporary, self.out)
        except OSError as error:
            raise UserError(
                f"{self.out}: can't be written ({error.strerror}). Free space there or change out."
            ) from error

"""Write a scorecard's folder: CSV, JSON and one self-contained HTML page with its figures.

`scorecard_page` collects what the page shows and fills its template; `ScoreFolder` writes all files
or none.
"""

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit_dp.data.grid import GLOBAL
from credit_dp.data.sampling import evenly_spaced_indices
from credit_dp.errors import UserError
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.evaluation.events import SOURCES as EVENT_SOURCES
from credit_dp.evaluation.events import EventResult, event_score
from credit_dp.evaluation.figure_style import (
    REFERENCE,
    figure_style,
    series_colour,
    superscript,
    with_unit,
)
from credit_dp.evaluation.map_plots import draw_error_maps
from credit_dp.evaluation.metric_table import (
    BASELINES,
    ERROR,
    FORECAST,
    MEAN,
    METRICS,
    SPECTRA_SOURCES,
    SPREAD,
    TRUTH,
    Better,
    Metric,
    panel_name,
)
from credit_dp.evaluation.metrics import ErrorMap, has_spectra
from credit_dp.evaluation.pages import DifferenceTable, data_uri, difference_table, render_page
from credit_dp.evaluation.score_plots import (
    add_legend,
    create_panels,
    draw_rank_histogram,
    draw_scores,
    draw_spectrum,
    draw_spread_error,
    has_power,
    last_wavenumber,
    lowest_power,
    start_at_zero,
)
from credit_dp.evaluation.scorecard import (
    MAX_HEADLINES,
    Array,
    Scorecard,
    headline_indices,
    in_order,
    three_digits,
)
from credit_dp.evaluation.scores_by_date import write_scores_by_date
from credit_dp.files import locked_folder, remove_abandoned_folders, temporary_path


@figure_style()
def score_image(card: Scorecard, name: str) -> str:
    """Return curves of a score by lead time, one panel per headline channel, as `data:` URI."""
    metric = METRICS[name]
    scored = scored_indices(card, metric)
    headlines = headline_indices(card.channels)
    channels = [c for c in headlines if c in scored] or scored[:MAX_HEADLINES]
    figure, panels = create_panels(len(channels))
    for axes, c in zip(panels, channels, strict=True):
        values = {source: card.scores[name][s, :, c] for s, source in enumerate(metric.sources)}
        values |= {label: card.scores[other][0, :, c] for label, other in metric.drawn_with.items()}
        label = with_unit(metric.label, metric.unit(card.units[c]))
        draw_scores(axes, card.hours, values, panel_name(metric, card.channels[c].name), label)
        mark_ideal(axes, metric.better)
    add_legend(figure, panels)
    return figure_data_uri(figure, "svg")


def scored_indices(card: Scorecard, metric: Metric) -> list[int]:
    """Return the indices of the channels that a metric scores."""
    channels = card.channels
    ordered = in_order([channel.name for channel in channels])
    return [c for c in ordered if metric.channels(channels[c])]


def mark_ideal(axes: Axes, better: Better) -> None:
    """Draw the ideal value of a score, or let its axis start at zero."""
    ideals = {Better.CLOSER_TO_ZERO: 0, Better.CLOSER_TO_ONE: 1}
    if better in ideals:
        axes.axhline(ideals[better], color=REFERENCE, linewidth=0.8)
    elif better is not Better.LARGER:
        start_at_zero(axes)


@figure_style()
def spectra_image(card: Scorecard, band: int) -> str:
    """Return spectra at the longest lead time, one panel per headline channel, as `data:` URI.

    Channels without a spectrum are left out.
    """
    channels = [c for c in headline_indices(card.channels) if has_spectrum(card, c, band)]
    figure, panels = create_panels(len(channels))
    for axes, c in zip(panels, channels, strict=True):
        powers = powers_of(card, -1, c, band)
        shown = {source: powers[source] for source in (*SPECTRA_SOURCES, MEAN) if source in powers}
        draw_spectrum(axes, shown, card.channels[c].name, card.units[c], card.wavelength)
    add_legend(figure, panels)
    return figure_data_uri(figure, "svg")


def powers_of(card: Scorecard, lead: int, channel: int, band: int) -> dict[str, Array]:
    """Return the power of each source, `(N,)`."""
    spectra = card.spectra[:, lead, channel, band]
    return dict(zip(card.spectra_sources, spectra, strict=True))


@figure_style()
def spread_error_image(card: Scorecard, band: int) -> str:
    """Return the ratio of an ensemble's spread and error by wavenumber, as `data:` URI.

    A panel for each headline channel with spectra has some lead times.
    """
    channels = [c for c in headline_indices(card.channels) if has_spectrum(card, c, band)]
    labels = [f"{card.hours[lead]} h" for lead in shown_leads(card)]
    figure, panels = create_panels(len(channels), labels=labels)
    for axes, c in zip(panels, channels, strict=True):
        powers = [powers_of(card, lead, c, band) for lead in shown_leads(card)]
        ratios = [spread_error_ratio(each, card.members) for each in powers]
        draw_spread_error(
            axes, dict(zip(labels, ratios, strict=True)), card.channels[c].name, card.wavelength
        )
    add_legend(figure, panels)
    return figure_data_uri(figure, "svg")


def spread_error_ratio(powers: Mapping[str, Array], members: int) -> Array:
    """Return the root of spread over error by wavenumber, 1 for a reliable ensemble.

    It ends where the truth does: beyond, a forecast has only noise, of which the mean has less.

    Source: Fortin et al. 2014, "Why should ensemble spread match the RMSE of the ensemble mean?",
    here for each wavenumber.
    """
    both = np.stack([powers[source] for source in SPECTRA_SOURCES])
    lowest = lowest_power(both) if has_power(both) else None
    end = 1 + last_wavenumber(powers[TRUTH], lowest or 0.0)
    spread, error = powers[SPREAD][:end], powers[ERROR][:end]
    ratio = np.full_like(error, np.nan)
    return np.sqrt(np.divide((1 + 1 / members) * spread, error, out=ratio, where=error > 0))


def has_spectrum(card: Scorecard, channel: int, band: int) -> bool:
    """Whether a channel has a spectrum at the longest lead time."""
    return has_power(card.spectra[:, -1, channel, band])


@figure_style()
def rank_histogram_image(card: Scorecard) -> str:
    """Return rank histograms of some lead times, one panel per headline channel, as `data:` URI."""
    channels = headline_indices(card.channels)
    labels = [f"{card.hours[lead]} h" for lead in shown_leads(card)]
    figure, panels = create_panels(len(channels), labels=labels)
    histograms = np.zeros(0) if card.rank_histograms is None else card.rank_histograms
    for axes, c in zip(panels, channels, strict=True):
        leads = {f"{card.hours[lead]} h": histograms[lead, c] for lead in shown_leads(card)}
        draw_rank_histogram(axes, leads, card.channels[c].name)
    add_legend(figure, panels)
    return figure_data_uri(figure, "svg")


def shown_leads(card: Scorecard) -> list[int]:
    """Return the indices of the lead times of tables, without the initial time."""
    leads = table_lead_indices(card.hours)
    return [lead for lead in leads if card.hours[lead] > 0] or leads


@figure_style()
def error_map_image(card: Scorecard, errors: ErrorMap) -> str:
    """Return maps of root-mean-square and mean error of one channel, as `data:` URI."""
    unit, variable = card.units[errors.channel], card.channels[errors.channel].variable
    figure = draw_error_maps(card.grid, errors.rmse, errors.bias, unit, variable=variable)
    return figure_data_uri(figure, "png")


@figure_style()
def figure_data_uri(figure: Figure, image_format: str) -> str:
    """Return the figure as `data:` URI, so that a page needs no other file."""
    buffer = io.BytesIO()
    # Without a date the same scores give the same bytes.
    metadata = {"Date": None} if image_format == "svg" else {}
    figure.savefig(buffer, format=image_format, metadata=metadata)
    return data_uri(buffer.getvalue(), image_format)


TABLE_HOURS = (24, 72, 120, 240)  # lead times in tables, if the scorecard has any of them


def scorecard_page(card: Scorecard) -> str:
    """Return the page as HTML text."""
    ensemble = card.rank_histograms is not None
    return render_page(
        "scorecard.html",
        title=f"Scorecard of {card.forecast}",
        metadata=page_metadata(card),
        plotted=len(headline_indices(card.channels)),
        count=len(card.channels),
        cards=difference_tables(card),
        scores=[score_section(card, name) for name in card.scores],
        hours=card.hours[-1],
        spectra=spectra_by_band(card),
        zonal=card.wavelength is None,
        maps=[
            (title, draw_or_warn(title, error_map_image, card, errors))
            for errors in card.maps
            for title in [f"Errors of {card.channels[errors.channel].name} at {errors.hours} h"]
        ],
        ensemble=ensemble,
        ranks=draw_or_warn("rank histograms", rank_histogram_image, card) if ensemble else None,
        events=[event_section(card, result) for result in card.events],
        regions={region: region_tables(card, region) for region in card.regions},
    )


def difference_tables(card: Scorecard) -> list[DifferenceTable]:
    """Return the RMSE relative to that of each baseline; none without RMSE."""
    if "rmse" not in card.scores:
        return []
    sources, rmse = METRICS["rmse"].sources, card.scores["rmse"]
    names = [channel.name for channel in card.channels]
    return [
        difference_table(
            (FORECAST, baseline),
            names,
            card.hours,
            (rmse[sources.index(FORECAST)], rmse[sources.index(baseline)]),
            f"card-{baseline}",
        )
        for baseline in BASELINES
    ]


def table_lead_indices(hours: Sequence[int]) -> list[int]:
    """Return the indices of the lead times that tables show."""
    usual = [hours.index(hour) for hour in TABLE_HOURS if hour in hours]
    return usual or evenly_spaced_indices(len(hours), len(TABLE_HOURS))


def page_metadata(card: Scorecard) -> dict[str, str]:
    """Return what was scored, as texts by heading."""
    first, last = card.initial_times[0], card.initial_times[-1]
    count = len(card.initial_times)
    return {
        "Forecast": card.forecast + (f", {card.members} members" if card.members > 1 else ""),
        "Truth": card.truth,
        "Climatology": card.climatology,
        "Initial times": f"{count}, {first} to {last}" if count > 1 else first,
        "Lead times": f"{len(card.hours)}, {card.hours[0]} to {card.hours[-1]} hours",
        "Grid": " x ".join(map(str, card.grid.cells))
        + (f", without {card.boundary} at each edge" if card.boundary else ""),
    }


class ScoreCell(NamedTuple):
    """A number in a table, and the source that it belongs to."""

    source: str
    text: str
    is_best: bool


class ScoreTable(NamedTuple):
    """A metric's table.

    Attributes:
        rows: channel, unit and cells of each row.
    """

    metric: Metric
    identifier: str
    hours: list[int]
    rows: list[tuple[str, str, list[ScoreCell]]]


class ScoreSection(NamedTuple):
    """A metric's section of a scorecard.

    Attributes:
        image: `data:` URI of its curves; None if they could not be drawn.
    """

    metric: Metric
    image: str | None
    table: ScoreTable


def score_section(card: Scorecard, name: str) -> ScoreSection:
    """Return the section of a score over the globe."""
    table = score_table(card, name, card.scores[name], name)
    return ScoreSection(METRICS[name], draw_or_warn(name, score_image, card, name), table)


def region_tables(card: Scorecard, region: str) -> list[ScoreTable]:
    """Return the tables of a region: those of the scores that the terminal shows."""
    return [
        score_table(card, name, values, f"{name}-{region}")
        for name, values in card.regions[region].items()
        if METRICS[name].in_terminal
    ]


def score_table(card: Scorecard, name: str, values: Array, identifier: str) -> ScoreTable:
    """Return the table of a score: one row per channel, all sources for each lead time."""
    metric = METRICS[name]
    leads = table_lead_indices(card.hours)
    rows = []
    for c in scored_indices(card, metric):
        cells = [cell for lead in leads for cell in score_cells(metric, values[:, lead, c])]
        rows.append((card.channels[c].name, superscript(metric.unit(card.units[c])), cells))
    return ScoreTable(metric, identifier, [card.hours[lead] for lead in leads], rows)


def score_cells(metric: Metric, values: Array) -> list[ScoreCell]:
    """Return the cells of one lead time, of which the best source is marked."""
    best = metric.better.best_source(values)
    return [
        ScoreCell(source, three_digits(value) if np.isfinite(value) else "-", s == best)
        for s, (source, value) in enumerate(zip(metric.sources, values.tolist(), strict=True))
    ]


class EventSection(NamedTuple):
    """An event: curves of its scores, its reliability diagram, and a table of the scores.

    Attributes:
        image, reliability: `data:` URIs; None if they could not be drawn, or without an ensemble.
        sources: of the columns of each lead time.
        rows: label and explanation of each score, and its cells.
    """

    title: str
    image: str | None
    reliability: str | None
    hours: list[int]
    sources: tuple[str, ...]
    rows: list[tuple[str, str, list[ScoreCell]]]


def event_section(card: Scorecard, result: EventResult) -> EventSection:
    """Return the section of an event of one channel over the globe."""
    title = f"{result.channel.name.replace('_', ' ')} {result.event}"
    leads = table_lead_indices(card.hours)
    rows = []
    for name, values in result.scores(GLOBAL).items():
        score = event_score(name)
        cells = [cell for lead in leads for cell in event_cells(score.better, values[:, lead])]
        rows.append((score.label, score.explanation, cells))
    return EventSection(
        title,
        draw_or_warn(f"scores of {title}", event_image, card, result),
        draw_or_warn(f"reliability of {title}", reliability_image, card, result)
        if result.members > 1
        else None,
        [card.hours[lead] for lead in leads],
        EVENT_SOURCES,
        rows,
    )


def event_cells(better: Better, values: Array) -> list[ScoreCell]:
    """Return the cells of one lead time, of which the better source is marked."""
    best = better.best_source(values)
    return [
        ScoreCell(source, three_digits(value) if np.isfinite(value) else "-", s == best)
        for s, (source, value) in enumerate(zip(EVENT_SOURCES, values.tolist(), strict=True))
    ]


@figure_style()
def event_image(card: Scorecard, result: EventResult) -> str:
    """Return curves of the scores of an event by lead time, a panel each, as `data:` URI."""
    scores = result.scores(GLOBAL)
    figure, panels = create_panels(len(scores))
    for axes, (name, values) in zip(panels, scores.items(), strict=True):
        score = event_score(name)
        by_source = dict(zip(EVENT_SOURCES, values, strict=True))
        draw_scores(axes, card.hours, by_source, score.label, score.label)
        if score.better is Better.CLOSER_TO_ONE:
            mark_ideal(axes, score.better)
    add_legend(figure, panels)
    return figure_data_uri(figure, "svg")


@figure_style()
def reliability_image(card: Scorecard, result: EventResult) -> str:
    """Return the reliability diagram of an event at some lead times, as `data:` URI."""
    figure, (axes, shares) = create_panels(2)
    axes.plot([0, 1], [0, 1], color=REFERENCE, linewidth=0.8)
    for number, lead in enumerate(shown_leads(card)):
        probability, share, frequency = result.reliability(lead)
        style: dict[str, Any] = {"color": series_colour(number), "marker": "o", "markersize": 3}
        label = f"{card.hours[lead]} h"
        axes.plot(probability, frequency, label=label, **style)
        shares.plot(probability, np.where(share > 0, share, np.nan), **style)
    axes.set_title("reliability")
    axes.set_ylabel("observed frequency")
    shares.set_title("how often it is forecast")
    shares.set_ylabel("share of forecasts")
    shares.set_yscale("log")
    for each in (axes, shares):
        each.set_xlabel("forecast probability")
    add_legend(figure, [axes])
    return figure_data_uri(figure, "svg")


class SpectraSection(NamedTuple):
    """The spectra of a latitude band, or of a region.

    Attributes:
        image: `data:` URI; None if they could not be drawn.
        spread_error: the same of the ratio of spread and error, of ensembles.
        without: headline channels that have no spectrum.
    """

    band: str
    image: str | None
    spread_error: str | None
    without: list[str]


def spectra_by_band(card: Scorecard) -> list[SpectraSection]:
    """Return the spectra of the latitude bands, or of the region, that have any."""
    sections = []
    for band, name in enumerate(card.bands):
        channels = headline_indices(card.channels)
        without = [card.channels[c].name for c in channels if not has_spectrum(card, c, band)]
        if len(without) < len(channels):
            image = draw_or_warn(f"spectra of {name}", spectra_image, card, band)
            ratio = None
            if SPREAD in card.spectra_sources:
                title = f"spread over error of {name}"
                ratio = draw_or_warn(title, spread_error_image, card, band)
            sections.append(SpectraSection(name, image, ratio, without))
    return sections


@final
class ScoreFolder:
    """The output folder of scores, written completely or not at all.

    The temporary folder is created before anything is scored, so that a path that can't be written
    is reported at once.

    Attributes:
        temporary: the folder until then.

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
            remove_abandoned_folders(out)
            # Next to `out`, because a rename is atomic only within one file system.
            self.temporary = temporary_path(out, unique=True)
            self._created_parents = [path for path in out.parents if not path.exists()]
            self.temporary.mkdir(parents=True)
        except OSError as error:
            self._remove_created()
            raise UserError(f"{out}: can't be created ({error.strerror}). Change out.") from error

    @contextlib.contextmanager
    def cleanup_on_failure(self) -> Iterator[None]:
        """Remove temporary files and empty parent folders after the block; success leaves none."""
        try:
            with locked_folder(self.temporary):
                yield
        finally:
            # After success the temporary folder has its final name, and its parents are not empty.
            shutil.rmtree(self.temporary, ignore_errors=True)
            self._remove_created()

    def _remove_created(self) -> None:
        for path in self._created_parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def write(self, card: Scorecard) -> None:
        """Write all files of a scorecard; see `write_files`.

        Raises:
            UserError: the disk is full.
        """
        try:
            write_scores_by_date(card, self.temporary)
        except OSError as error:
            raise self._write_error(error) from error
        files = {
            "scores.csv": card.to_csv(),
            "scores.json": card.to_json(),
            "scorecard.html": scorecard_page(card),
        }
        if has_spectra(card.grid.cells):
            files["spectra.csv"] = card.spectra_csv()
        if card.events:
            files["events.csv"] = card.events_csv()
            if card.members > 1:
                files["reliability.csv"] = card.reliability_csv()
        if card.rank_histograms is not None:
            files["rank_histograms.csv"] = card.rank_histograms_csv()
        self.write_files(files)

    def write_files(self, files: Mapping[str, str]) -> None:
        """Write all files, then rename the folder to its final name.

        Raises:
            UserError: the disk is full, or the folder was created by another process meanwhile.
        """
        try:
            for name, text in files.items():
                (self.temporary / name).write_text(text, encoding="utf-8")
            # Fails if another process has created a folder that is not empty.
            os.rename(self.temporary, self.out)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise UserError(
                    f"{self.out}: another process has just created it, and scores are never "
                    "overwritten. Change out, or remove it."
                ) from error
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        return UserError(
            f"{self.out}: can't be written ({error.strerror}). Free space there or change out."
        )

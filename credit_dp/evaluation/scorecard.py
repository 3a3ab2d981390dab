"""Scores as data: checked, and written as JSON, CSV and tables.

`HeldOutScores` are those of a run's own model on its test dates, a `Scorecard` those of a forecast
store. Which scores there are is in `metric_table`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import GLOBAL
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.events import SOURCES as EVENT_SOURCES
from credit_dp.evaluation.events import EventResult
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.metric_table import (
    CLIMATOLOGY,
    ENSEMBLE_SPECTRA_SOURCES,
    FORECAST,
    METRICS,
    PERSISTENCE,
    SOURCES,
    TRUTH,
)
from credit_dp.evaluation.metrics import ErrorMap
from credit_dp.plain_text import csv_text, superscript

MODEL = "model"  # the forecast's name in files and tables of a run
# With line breaks, because a column of the table is as wide as its longest line.
SOURCE_HEADINGS = {
    FORECAST: "model\n",
    PERSISTENCE: "persis-\ntence",
    CLIMATOLOGY: "clima-\ntology",
}
_TEST_DATES_ADVICE = "Look at the held-out dates of the store, or change data.dates.test"
NOT_FINITE_ADVICE = {
    FORECAST: "Its forecasts grew without bounds: train longer or with trainer.rollout, or lower "
    "trainer.evaluate_hours; the checkpoint is kept",
    PERSISTENCE: _TEST_DATES_ADVICE,
    TRUTH: _TEST_DATES_ADVICE,
    CLIMATOLOGY: "Look at the training dates of the store, or change data.dates.train",
}
ZERO_ERROR_QUESTIONS = {
    PERSISTENCE: "Does this field change in time?",
    CLIMATOLOGY: "Is this field the same on all its dates?",
}
UNLIMITED = 10_000  # characters; wider than any table


Array = NDArray[np.float64]


def iter_scores(
    scores: Mapping[str, Array], channels: Sequence[Channel] | None = None
) -> Iterator[tuple[int, int, str, str, float]]:
    """Yield channel index, lead index, score, source and value of each score.

    Args:
        scores: by name, `(sources, leads, C)` each, sources as in `metric_table.METRICS`.
        channels: C channels; a metric leaves out channels that it does not score.
    """
    leads, count = next(iter(scores.values())).shape[1:]
    for c in range(count):
        for lead in range(leads):
            for name, values in scores.items():
                metric = METRICS[name]
                if channels is not None and not metric.channels(channels[c]):
                    continue
                for s, source in enumerate(metric.sources):
                    yield c, lead, name, source, float(values[s, lead, c])


def is_valid(name: str, value: float) -> bool:
    """Whether a score is finite, or undefined where it may be."""
    return math.isfinite(value) or (METRICS[name].may_be_undefined and math.isnan(value))


def finite_or_none(value: float) -> float | None:
    """Return a score for JSON, which has no NaN: undefined is null."""
    return value if math.isfinite(value) else None


@final
@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the model, persistence and climatology on held-out dates.

    Attributes:
        scores: by name, `(sources, leads, C)` each, sources as in `metric_table.METRICS`.
        shown_hours: lead times of tables and loggers; empty: all.
    """

    channels: tuple[str, ...]
    units: tuple[str, ...]
    hours: tuple[int, ...]
    scores: Mapping[str, Array]
    samples: int
    members: int = 1
    shown_hours: tuple[int, ...] = ()

    @property
    def shown_leads(self) -> list[int]:
        """Return the indices of the lead times of tables and loggers."""
        return [lead for lead, h in enumerate(self.hours) if h in (self.shown_hours or self.hours)]

    @property
    def rmse(self) -> Array:
        """Return the RMSE, `(3, leads, C)`, sources in the order of `SOURCES`."""
        return self.scores["rmse"]

    def check(self) -> None:
        """Refuse scores that are not finite; scores that may be undefined may be NaN."""
        for name, values in self.scores.items():
            metric = METRICS[name]
            for s, h, c in np.argwhere(~np.isfinite(values)):
                source = metric.sources[s]
                if is_valid(name, values[s, h, c]):
                    continue
                raise UserError(
                    f"{self.channels[c]}: the {metric.label} of the {name_in_runs(source)} at "
                    f"{self.hours[h]} h is {values[s, h, c]}. {NOT_FINITE_ADVICE[source]}."
                )

    def warnings(self) -> list[str]:
        """Return a line for each channel on which persistence or climatology has zero error."""
        # Zero error means that the data are suspicious, not that the baseline is good.
        return [
            f"{channel}: the RMSE of {source} is exactly 0 at {self.hours[h]} h. "
            f"{ZERO_ERROR_QUESTIONS[source]}"
            for c, channel in enumerate(self.channels)
            for s, source in enumerate(SOURCES)
            for h in np.flatnonzero(self.rmse[s, :, c] == 0)[:1]
            if source in ZERO_ERROR_QUESTIONS
        ]

    def scalars(self) -> dict[str, float]:
        """Return scores by flat names for loggers: `rmse/geopotential_500/24h/model`."""
        return {
            f"{name}/{self.channels[c]}/{self.hours[lead]}h/{name_in_runs(source)}": value
            for c, lead, name, source, value in iter_scores(self.scores)
            if lead in self.shown_leads
        }

    def to_json(self, step: int) -> str:
        """Return scores as JSON, nested by score, channel, lead time and source."""
        nested: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
        for c, lead, name, source, value in iter_scores(self.scores):
            by_channel = nested.setdefault(name, {})
            by_lead = by_channel.setdefault(self.channels[c], {})
            by_source = by_lead.setdefault(f"{self.hours[lead]}h", {})
            by_source[name_in_runs(source)] = finite_or_none(value)
        units = dict(zip(self.channels, self.units, strict=True))
        members = {"members": self.members} if self.members > 1 else {}
        counts = {"step": step, "initial_times": self.samples, **members}
        return json.dumps({**counts, "units": units, **nested}, indent=2) + "\n"

    def to_csv(self) -> str:
        """Return CSV with one line for each score; undefined values are empty."""
        rows = [
            (
                *(self.channels[c], METRICS[name].unit(self.units[c]), self.hours[lead], name),
                *(name_in_runs(source), csv_number(value)),
            )
            for c, lead, name, source, value in iter_scores(self.scores)
        ]
        return csv_text(("field", "unit", "lead_hours", "score", "of", "value"), rows)

    def tables(self, width: int) -> list[Table]:
        """Return short tables: headline fields at the first and at the last requested lead time.

        A table that does not fit into `width` characters has the last lead time alone.
        """
        first, last = self.shown_leads[0], self.shown_leads[-1]
        tables = []
        for build in [self.table] + ([self.ensemble_table] if self.members > 1 else []):
            table = build(sorted({first, last}))
            fits = Console(width=UNLIMITED).measure(table).maximum <= width
            tables.append(table if fits else build([last]))
        return tables

    def table(self, leads: Sequence[int]) -> Table:
        """Return a table with one row for each headline field, and all sources of each lead."""
        shown = len(headlines(self.channels))
        which = f"; {shown} of {len(self.channels)} fields" if shown < len(self.channels) else ""
        return self._table(
            f"RMSE on held-out dates ({counted(self.samples, 'initial time')}{which})",
            dict(zip(SOURCE_HEADINGS.values(), self.rmse, strict=True)),
            leads,
        )

    def ensemble_table(self, leads: Sequence[int]) -> Table:
        """Return a table with the CRPS of headline fields, and the ratio of spread to error.

        Source: Fortin et al. 2014 for the ratio, which is 1 for a reliable ensemble.
        """
        ratio = math.sqrt(1 + 1 / self.members) * self.scores["spread"][0] / self.rmse[0]
        return self._table(
            f"CRPS of {self.members} members, and their spread over the error of their mean",
            {"CRPS": self.scores["crps"][0], "spread\n/ error": ratio},
            leads,
        )

    def _table(self, title: str, columns: Mapping[str, Array], leads: Sequence[int]) -> Table:
        """Return a table of some lead times; the columns of each are `(leads, C)`, by heading.

        A narrow terminal wraps the unit, never a number of a single lead time.
        """
        # No padding: two lead times fit into 80 characters.
        table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("field", no_wrap=True)
        table.add_column("unit", overflow="fold")
        for hours in (self.hours[lead] for lead in leads):
            for heading in columns:
                style = "bold" if heading == SOURCE_HEADINGS[FORECAST] else None
                label = f"{hours} h\n{heading}"
                table.add_column(label, justify="right", style=style, no_wrap=True)
        for c in headlines(self.channels):
            channel, unit = self.channels[c], superscript(self.units[c])
            cells = [three_digits(x[lead, c]) for lead in leads for x in columns.values()]
            table.add_row(channel, unit, *cells)
        return table


def name_in_runs(source: str) -> str:
    """Return a source's name in files and tables of a run."""
    return MODEL if source == FORECAST else source


def three_digits(value: float) -> str:
    """Return a number with three significant digits; as an integer from 1000 to a million."""
    # 1.23e+03 is longer and harder to read than 1234, and 0.000123 longer than 1.23e-4.
    if 999.5 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:.3g}"


RANK_COLUMNS = ("variable", "level", "lead_hours", "rank", "frequency")
EVENT = ("variable", "level", "event", "lead_hours")
EVENT_COLUMNS = (*EVENT, "score", "of", "value", "region")
RELIABILITY_COLUMNS = (*EVENT, "probability", "share", "frequency")
CSV_COLUMNS = ("variable", "level", "unit", "lead_hours", "score", "of", "value", "region")
# Source: Rasp et al. 2024, "WeatherBench 2", headline scores.
HEADLINE_CHANNELS = (
    Channel("geopotential", 500),
    Channel("temperature", 850),
    Channel("2m_temperature"),
    Channel("mean_sea_level_pressure"),
    Channel("specific_humidity", 700),
    Channel("u_component_of_wind", 850),
    Channel("v_component_of_wind", 850),
    Channel("10m_u_component_of_wind"),
    Channel("total_precipitation_24hr"),
)
MAX_HEADLINES = 6  # channels with curves and spectra
NEAR = 100  # hPa, within which another level stands for that of a headline
# As in the scorecards of WeatherBench 2; other variables come last, as they are stored.
ORDER = (
    *("geopotential", "temperature", "specific_humidity"),
    *("u_component_of_wind", "v_component_of_wind"),
    *("2m_temperature", "mean_sea_level_pressure"),
    *("10m_u_component_of_wind", "10m_v_component_of_wind"),
)
CHANNEL_NAME = re.compile(r"(?P<variable>.+)_(?P<level>\d+)")
NestedScores = dict[str, dict[str, dict[str, dict[str, float | None]]]]


@final
@dataclass(frozen=True)
class DateScores:
    """What some initial times contribute to the scores.

    Attributes:
        times: indices of these initial times.
        means: of the globe and of each region, before any root: by region and name, `(sources,
            times, leads, C)`.
        events: the counts of each event and channel.
    """

    times: slice
    means: Mapping[str, Mapping[str, Array]]
    events: tuple[EventResult, ...]


@final
@dataclass(frozen=True)
class Scorecard:
    """All scores of a forecast store.

    Attributes:
        forecast, truth, climatology: their addresses or descriptions.
        initial_times: in ISO format, to the minute.
        units: one for each channel; empty if unknown.
        grid: of the truth, with coasts for maps.
        scores: by name, `(sources, leads, C)` each, sources as in `metric_table.METRICS`.
        spectra: of `spectra_sources`, `(sources, leads, C, K, N)`, see `PowerSpectra`.
        bands: names of the K latitude bands, or of a region.
        regions: the scores of each region besides the globe, as `scores`.
        rank_histograms: how often the truth has each rank among M members, `(leads, C, M + 1)`;
            None without an ensemble.
        times, calendar: the initial times as numbers of their calendar.
        by_date: yields what the initial times contribute to the scores, a few at a time.
        events: the counts of each event and channel, of all initial times.
        boundary: rows and columns at each edge of a region that are not scored.
        wavelength: of wavenumber 1 in the spectra of a region, in metres; None of others.
    """

    forecast: str
    truth: str
    climatology: str
    members: int
    initial_times: tuple[str, ...]
    hours: tuple[int, ...]
    channels: tuple[Channel, ...]
    units: tuple[str, ...]
    grid: MapGrid
    scores: Mapping[str, Array]
    spectra: Array
    bands: tuple[str, ...]
    maps: tuple[ErrorMap, ...]
    regions: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    rank_histograms: Array | None = None
    times: Times | None = None
    calendar: Calendar = STANDARD
    by_date: Callable[[], Iterable[DateScores]] = tuple
    events: tuple[EventResult, ...] = ()
    boundary: int = 0
    wavelength: float | None = None

    @property
    def spectra_sources(self) -> tuple[str, ...]:
        """Return what has spectra: forecast and truth, of an ensemble its mean and others, too."""
        return ENSEMBLE_SPECTRA_SOURCES[: len(self.spectra)]

    def check(self) -> None:
        """Refuse scores that are not finite; scores that may be undefined may be NaN."""
        # Those of regions are of the same fields, or undefined without a point that has values.
        for c, lead, name, source, value in iter_scores(self.scores, self.channels):
            if not is_valid(name, value):
                where = {PERSISTENCE: self.truth, TRUTH: self.truth}
                where |= {FORECAST: self.forecast, CLIMATOLOGY: self.climatology}
                raise UserError(
                    f"{where[source]}: the {name} of the {source} is {value} for "
                    f"{self.channels[c].name} at {self.hours[lead]} h. Check this field, or "
                    "leave it out of variables=."
                )

    def warnings(self) -> list[str]:
        """Return a line for each channel on which persistence or climatology has zero error."""
        lines = {}
        for c, lead, name, source, value in iter_scores(self.scores):
            if name != "rmse" or value != 0 or source not in ZERO_ERROR_QUESTIONS:
                continue
            if self.hours[lead] > 0:  # at lead time 0 persistence is the truth itself
                lines[c, source] = (
                    f"{self.channels[c].name}: the RMSE of {source} is exactly 0. "
                    f"{ZERO_ERROR_QUESTIONS[source]}"
                )
        return list(lines.values())

    def to_csv(self) -> str:
        """Return CSV with one line for each score; undefined values are empty."""
        rows = []
        for region, scores in {GLOBAL: self.scores, **self.regions}.items():
            for c, lead, name, source, value in iter_scores(scores, self.channels):
                unit = METRICS[name].unit(self.units[c])
                number = csv_number(value)
                variable = name_and_level(self.channels[c])
                rows.append((*variable, unit, self.hours[lead], name, source, number, region))
        return csv_text(CSV_COLUMNS, rows)

    def to_json(self) -> str:
        """Return scores as JSON, nested by channel, score, lead time and source, with metadata."""
        content = {
            **self.metadata(),
            "scores": self._nest(self.scores),
            "regions": {region: self._nest(scores) for region, scores in self.regions.items()},
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def _nest(self, scores: Mapping[str, Array]) -> NestedScores:
        nested: NestedScores = {}
        for c, lead, name, source, value in iter_scores(scores, self.channels):
            by_score = nested.setdefault(self.channels[c].name, {})
            by_source = by_score.setdefault(name, {}).setdefault(f"{self.hours[lead]}h", {})
            by_source[source] = finite_or_none(value)
        return nested

    def metadata(self) -> dict[str, object]:
        """Return stores, times, grid and units, for JSON."""
        names = [channel.name for channel in self.channels]
        return {
            "forecast": self.forecast,
            "truth": self.truth,
            "climatology": self.climatology,
            "members": self.members,
            "initial_times": list(self.initial_times),
            "lead_hours": list(self.hours),
            "grid": [*self.grid.cells],
            **({"boundary": self.boundary} if self.boundary else {}),
            "units": dict(zip(names, self.units, strict=True)),
        }

    def spectra_csv(self) -> str:
        """Return the spectra as CSV, a line for each wavenumber; cells without power are empty.

        Those of a region have wavelengths, too.
        """
        waves = ("wavenumber",) if self.wavelength is None else ("wavenumber", "wavelength_km")
        columns = ("variable", "level", "lead_hours", "band", *waves, *self.spectra_sources)
        return csv_text(columns, self._spectra_rows())

    def _spectra_rows(self) -> Iterator[Sequence[object]]:
        for c, channel in enumerate(self.channels):
            for lead, hours in enumerate(self.hours):
                for band, name in enumerate(self.bands):
                    for k, powers in enumerate(self.spectra[:, lead, c, band].T.tolist()):
                        cells = [*map(csv_number, powers)]
                        if self.wavelength is not None:
                            cells.insert(0, repr(self.wavelength / 1000 / k) if k else "")
                        yield (*name_and_level(channel), hours, name, k, *cells)

    def rank_histograms_csv(self) -> str:
        """Return the rank histograms as CSV, one line for each rank; the header without members."""
        rows: list[tuple[object, ...]] = []
        if self.rank_histograms is None:
            return csv_text(RANK_COLUMNS, rows)
        for c, channel in enumerate(self.channels):
            for hours, frequencies in zip(self.hours, self.rank_histograms[:, c], strict=True):
                for rank, frequency in enumerate(frequencies.tolist()):
                    rows.append((*name_and_level(channel), hours, rank, repr(frequency)))
        return csv_text(RANK_COLUMNS, rows)

    def events_csv(self) -> str:
        """Return the scores of events as CSV, a line for each; undefined values are empty."""
        rows = [
            (*name_and_level(result.channel), result.event, hours, name, source, cell, region)
            for result in self.events
            for region in result.counts
            for name, scores in result.scores(region).items()
            for source, values in zip(EVENT_SOURCES, scores.tolist(), strict=True)
            for hours, cell in zip(self.hours, map(csv_number, values), strict=True)
        ]
        return csv_text(EVENT_COLUMNS, rows)

    def reliability_csv(self) -> str:
        """Return how often each probability was forecast, and how often its event occurred.

        A line for each number of members of which the event was forecast, over the globe.
        """
        rows = [
            (*name_and_level(result.channel), result.event, hours, *map(csv_number, numbers))
            for result in self.events
            for lead, hours in enumerate(self.hours)
            for numbers in np.stack(result.reliability(lead), axis=1).tolist()
        ]
        return csv_text(RELIABILITY_COLUMNS, rows)


def csv_number(value: float) -> str:
    """Return a number for CSV; an undefined one is empty."""
    return repr(value) if math.isfinite(value) else ""


def name_and_level(channel: Channel) -> tuple[str, int | str]:
    """Return the variable and the level of a channel for CSV; no level is empty."""
    return channel.variable, "" if channel.level is None else channel.level


def headline_indices(channels: Sequence[Channel]) -> list[int]:
    """Return the indices of the channels to plot: the headline channels, then the first others."""
    return headlines([channel.name for channel in channels])


def headlines(names: Sequence[str]) -> list[int]:
    """Return the same of channels by name."""
    ordered = in_order(names)
    near = (_nearest(names, channel) for channel in HEADLINE_CHANNELS)
    known = [index for index in near if index is not None]
    others = [index for index in ordered if index not in known]
    shown = (known + others)[:MAX_HEADLINES]
    return [index for index in ordered if index in shown]


def _nearest(names: Sequence[str], headline: Channel) -> int | None:
    if headline.level is None:
        return names.index(headline.name) if headline.name in names else None
    distances = {
        abs(int(level) - headline.level): index
        for index, (variable, level) in enumerate(map(variable_and_level, names))
        if level and variable == headline.variable
    }
    least = min(distances, default=NEAR + 1)
    return distances[least] if least <= NEAR else None


def in_order(names: Sequence[str]) -> list[int]:
    """Return the indices of channels in the order of plots and tables."""

    def place(index: int) -> int:
        variable, _ = variable_and_level(names[index])
        return ORDER.index(variable) if variable in ORDER else len(ORDER)

    return sorted(range(len(names)), key=place)


def variable_and_level(channel: str) -> tuple[str, str]:
    """Return the variable and the level of a channel's name; no level is empty."""
    match = CHANNEL_NAME.fullmatch(channel)
    return (match["variable"], match["level"]) if match else (channel, "")

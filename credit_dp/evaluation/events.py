"""Scores of events: a variable above or below a value, or a quantile of its climate.

`parse_events` reads what the key says, `open_quantiles` finds the quantiles of each date and place,
and `EVENT_SCORES` are functions of counts: how often an event was forecast with each probability,
with and without being observed, which `score` adds up for each initial time. A single forecast has
the probabilities 0 and 1. `Neighbourhoods` average over discs on the sphere, for the fractions
skill score.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from credit_dp.area_means import AreaMeans, NeighbourhoodSums
from credit_dp.data.cache import ProgressCallback, cache_folder, fingerprint, load_or_create
from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.climatology import hour_of_day
from credit_dp.data.dates import split_slice
from credit_dp.data.forcings import year_fraction
from credit_dp.data.grid import GLOBAL, FieldArray, Grid
from credit_dp.data.store import Store
from credit_dp.data.streaming import split_rows
from credit_dp.data.units import canonical_unit, find_conversion
from credit_dp.errors import UserError
from credit_dp.evaluation.metric_table import Better

KEY = "events"
PATTERN = re.compile(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)")
PERCENT = "%"
ROUNDING = 1e-12  # of shares of points
SOURCES = ("forecast", "persistence")

Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Event:
    """A variable is above or below a threshold.

    Attributes:
        text: as the user gives it, with spaces and numbers in one form.
        above: whether it is above.
        value: of the threshold in the truth's unit, or, of a quantile, the share of dates below.
        is_quantile: whether the threshold is a quantile of the date and place.
    """

    text: str
    above: bool
    value: float
    is_quantile: bool

    def occurs(self, fields: Tensor, threshold: Tensor | float) -> Tensor:
        """Return where the event is in fields of float32 values."""
        # 0.025 in float32 is above 0.025: rounded as the fields are, a threshold equals itself.
        threshold = torch.as_tensor(threshold, dtype=torch.float32)
        return fields > threshold if self.above else fields < threshold


def parse_events(events: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, list[Event]]:
    """Return the events of each variable.

    Args:
        events: `{VARIABLE: [">303.15", "<273.15 K", ">90%"]}`.
        units: of the scored variables in the truth.

    Raises:
        UserError: a variable is not scored, or a text is no event.
    """
    parsed = {}
    for name, texts in events.items():
        if name not in units:
            raise UserError(
                f"{KEY}.{name}: needs a variable that is scored, one of {', '.join(units)}."
            )
        if not isinstance(texts, list) or not texts:
            raise UserError(f'{KEY}.{name}: needs a list, like [">303.15",">90%"], got {texts}.')
        found = [parse_event(f"{KEY}.{name}", str(text), units[name]) for text in texts]
        if len({(x.above, x.value, x.is_quantile) for x in found}) < len(found):
            raise UserError(f"{KEY}.{name}: has an event twice, {texts}. Leave one out.")
        parsed[name] = found
    return parsed


def parse_event(key: str, text: str, unit: str) -> Event:
    """Return the event of a text, whose unit is converted to that of the truth."""
    match = PATTERN.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"{key}: needs > or <, a number and a unit or %, like '>303.15 K', got {text!r}."
        )
    sign, number, given = match[1], float(match[2]), match[3].strip()
    if given == PERCENT and canonical_unit(unit) != PERCENT:
        if not 0 < number < 100:
            raise UserError(f"{key}: needs a quantile between 0 and 100 %, got {text!r}.")
        return Event(f"{sign}{number:.12g}%", sign == ">", number / 100, is_quantile=True)
    conversion = (1.0, 0.0) if not given else find_conversion(given, unit)
    if conversion is None:
        raise UserError(
            f"{key}: the truth is in {unit or 'no unit'}, to which {given!r} can't be converted. "
            f"Give the threshold in {unit or 'its numbers'}."
        )
    scale, offset = conversion
    shown = f"{sign}{number:.12g} {given}".rstrip()
    return Event(shown, sign == ">", number * scale + offset, is_quantile=False)


# ---------------------------------------------------------------- quantiles of date and place

VERSION = "credit_dp quantiles 1"  # change with the definition: old files are ignored
SEASONS = 24  # dates of the year with quantiles; those between are interpolated
WINDOW_DAYS = 15  # before and after such a date, from which all dates count
DAYS = 365.25
MIN_BEYOND = 5  # dates of a window beyond a quantile
ROWS_AT_ONCE = 32  # of sorted samples
WINDOW_BYTES = 4 * 2**30  # memory for the chunks of a window, in a band of rows


@final
class Quantiles:
    """Quantiles of a channel by hour of the day and date of the year.

    Args:
        hours: of the day, `(N,)`.
        values: `(N, SEASONS, H, W)`, on disk.
    """

    def __init__(self, hours: Array, values: FieldArray, calendar: Calendar) -> None:
        self._hours = hours
        self._values = values
        self._calendar = calendar

    def at(self, times: Times) -> FieldArray:
        """Return the quantile at each time, `(T, H, W)`; other hours as the one before."""
        slots = np.searchsorted(self._hours, hour_of_day(times), side="right") - 1
        place, before = season_before(times, self._calendar)
        weight = (place - before)[:, None, None].astype(np.float32)
        first, second = (
            np.stack(
                [
                    self._values[slot, season % SEASONS]
                    for slot, season in zip(slots, x, strict=True)
                ]
            )
            for x in (before, before + 1)
        )
        return np.asarray(first + weight * (second - first))


def season_before(times: Times, calendar: Calendar) -> tuple[Array, NDArray[np.intp]]:
    """Return the place of times among the dates with quantiles, and the number of that before.

    That of the last date of the year before is -1.
    """
    place = year_fraction(times, calendar) * SEASONS - 0.5
    return place, np.floor(place).astype(np.intp)


def open_quantiles(
    truth: Store,
    channel: Channel,
    share: float,
    valid: Times,
    cache: str,
    report: ProgressCallback,
) -> Quantiles:
    """Return the quantile of a channel that this share of the truth's training dates is below.

    Memory holds the chunks with dates of a window, up to `WINDOW_BYTES`, and the one that is read.
    If they take more, the truth is read in bands of rows: each chunk once for each band, and those
    at the turn of the year twice.

    Args:
        valid: the times that need one.

    Raises:
        UserError: a window has too few dates, or a store can't be read.
    """
    span = split_slice(truth.config, "train", truth.times, truth.calendar)
    times = truth.times[span]
    hours, slots = np.unique(hour_of_day(times), return_inverse=True)
    windows = season_windows(times, truth.calendar)
    _, before = season_before(valid, truth.calendar)
    used = np.unique(np.concatenate([before, before + 1]) % SEASONS).tolist()
    least = min(np.bincount(slots[windows[x]], minlength=len(hours)).min() for x in used)
    needed = math.ceil(MIN_BEYOND / min(share, 1 - share) - 1e-9)
    if least < needed:
        text = truth.calendar.text
        raise UserError(
            f"{KEY}: {share:.4g} of the climate of {channel.name} needs {needed} dates within "
            f"{WINDOW_DAYS} days of each date at each hour, but {text(times[0], 'D')} to "
            f"{text(times[-1], 'D')} have {least}. Give climatology_dates=[A,B] of more years, or "
            "a quantile nearer to 50 %."
        )
    description = truth.description([channel.variable])
    name = fingerprint(VERSION, description, channel.name, share, [str(time) for time in times])
    path = cache_folder(cache) / f"quantiles-{name}.npy"

    def load(file: Path) -> Quantiles | None:
        try:
            values = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            return None
        expected = (len(hours), SEASONS, *truth.grid)
        return Quantiles(hours, values, truth.calendar) if values.shape == expected else None

    def create(file: Path) -> None:
        shape = (len(hours), SEASONS, *truth.grid)
        values = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
        chunks = truth.chunk_numbers(channel, times)
        each = [slots == slot for slot in range(len(hours))]
        # Hours of the day that share no chunk are read one after another, which takes less memory.
        apart = sum(len(np.unique(chunks[x])) for x in each) == len(np.unique(chunks))
        passes = each if apart else [np.full(len(times), True)]
        for number, chosen in enumerate(passes):
            windows = season_windows(times[chosen], truth.calendar)
            for season, rows, fields in read_windows(truth, channel, times[chosen], windows):
                at = slots[chosen][windows[season]]
                for slot in np.unique(slots[chosen]).tolist():
                    samples = [fields[index] for index in np.flatnonzero(at == slot).tolist()]
                    values[slot, season, rows] = quantile(samples, share)
                part = (rows.start + (rows.stop - rows.start) * season / SEASONS) / truth.grid[0]
                report(TITLE, (number + part) / len(passes))
                del fields, samples  # frees those that the next window does not have
        values.flush()

    return load_or_create(path, load, create, TITLE)


TITLE = "quantiles of date and place"


def season_windows(times: Times, calendar: Calendar) -> list[NDArray[np.intp]]:
    """Return the indices of the times around each date of the year that has quantiles."""
    fractions = year_fraction(times, calendar)
    centres = (np.arange(SEASONS) + 0.5) / SEASONS
    distance = np.abs((fractions - centres[:, None] + 0.5) % 1 - 0.5) * DAYS
    return [np.flatnonzero(row <= WINDOW_DAYS + 0.5) for row in distance]


def read_windows(
    truth: Store, channel: Channel, times: Times, windows: Sequence[NDArray[np.intp]]
) -> Iterator[tuple[int, slice, list[FieldArray]]]:
    """Yield the number of each window, rows, and the fields of its times there, `(rows, W)`."""
    chunks = truth.chunk_numbers(channel, times)
    # A chunk is decoded as a whole, and kept as long as windows have a time of it.
    kept = [np.flatnonzero(np.isin(chunks, chunks[window])) for window in windows]
    for rows in split_rows(truth, [channel], WINDOW_BYTES, 4 * max(map(len, kept))):
        fields: dict[int, FieldArray] = {}
        for season, (window, indices) in enumerate(zip(windows, kept, strict=True)):
            fields = {index: fields[index] for index in indices.tolist() if index in fields}
            for chunk in np.unique(chunks[indices[~np.isin(indices, [*fields])]]):
                read = np.flatnonzero(chunks == chunk)
                block = truth.read_channels([channel], times[read], rows)[:, 0]
                fields |= zip(read.tolist(), block, strict=True)
            yield season, rows, [fields[index] for index in window.tolist()]


def quantile(fields: Sequence[FieldArray], share: float) -> FieldArray:
    """Return the quantile at each point, `(rows, W)`; NaN without fields."""
    if not fields:
        return np.full((), np.nan, np.float32)
    bands = [slice(x, x + ROWS_AT_ONCE) for x in range(0, len(fields[0]), ROWS_AT_ONCE)]
    parts = [np.quantile([x[band] for x in fields], share, axis=0) for band in bands]
    return np.concatenate(parts).astype(np.float32)


# ---------------------------------------------------------------- fractions in neighbourhoods


@final
class Neighbourhoods:
    """Averages channels over all points within a distance on the sphere, weighted by area.

    Args:
        grid: rows and columns of latitudes and longitudes, round the globe or a box.
        kilometres: the distance.
        valid: points with values, `(C, H, W)`.
    """

    def __init__(self, grid: Grid, kilometres: float, valid: Tensor) -> None:
        steps = (np.diff(np.asarray(grid.longitude, float)) + 180) % 360 - 180  # also across 0
        if grid.is_projected or np.ptp(steps) > 1e-3 * abs(steps[0]):
            raise UserError(
                "fss: needs a truth with rows and columns of latitudes and evenly spaced "
                "longitudes. Leave it out, or give grid=."
            )
        # A box is a part of the globe that has no other values.
        columns = round(360 / abs(float(steps[0])))
        self._beside = (0, columns - grid[1])
        sums = NeighbourhoodSums(
            grid.latitude,
            grid.weights,
            slice(0, grid[0]),
            columns,
            kilometres,
            torch.zeros((), dtype=torch.float64),
        )
        self._valid = valid
        self._means = AreaMeans(sums, pad(valid, self._beside))

    def mean(self, fields: Tensor, channels: slice) -> Tensor:
        """Return the means of some channels, `(..., C, H, W)`; 0 without a value."""
        known = torch.where(self._valid[channels], fields, 0).double()
        means = self._means(pad(known, self._beside), channels)[..., : fields.shape[-1]]
        # The sums are of Fourier transforms: without any event they are not quite 0.
        return torch.where(means.abs() < ROUNDING, 0.0, means)


# ---------------------------------------------------------------- counts and scores


@final
@dataclass(frozen=True)
class EventScore:
    """A score of an event.

    Attributes:
        compute: returns it from the counts `(..., M + 1, 2)`: by the number of members that
            forecast the event, those without and with it in the truth.
        ensemble: whether it is one of ensembles only.
    """

    name: str
    label: str
    explanation: str
    better: Better
    compute: Any
    ensemble: bool = False


class Contingency(NamedTuple):
    """Weights of yes and no forecasts; an ensemble says yes with half of its members or more."""

    hits: Array
    false_alarms: Array
    misses: Array
    correct_negatives: Array

    @classmethod
    def of(cls, counts: Array) -> "Contingency":
        """Return the table of counts `(..., M + 1, 2)`."""
        members = counts.shape[-2] - 1
        first = -(-members // 2)
        no, yes = counts[..., :first, :].sum(axis=-2), counts[..., first:, :].sum(axis=-2)
        return cls(yes[..., 1], yes[..., 0], no[..., 1], no[..., 0])


def frequency_bias(counts: Array) -> Array:
    """Return how often the event is forecast over how often it occurs."""
    a, b, c, _ = Contingency.of(counts)
    return (a + b) / (a + c)


def hit_rate(counts: Array) -> Array:
    """Return the share of events that were forecast."""
    a, _, c, _ = Contingency.of(counts)
    return a / (a + c)


def false_alarm_ratio(counts: Array) -> Array:
    """Return the share of forecast events that did not occur."""
    a, b, _, _ = Contingency.of(counts)
    return b / (a + b)


def false_alarm_rate(counts: Array) -> Array:
    """Return the share of cases without event for which it was forecast."""
    _, b, _, d = Contingency.of(counts)
    return b / (b + d)


def critical_success_index(counts: Array) -> Array:
    """Return hits over all cases where the event was forecast or occurred."""
    a, b, c, _ = Contingency.of(counts)
    return a / (a + b + c)


def equitable_threat_score(counts: Array) -> Array:
    """Return the same without the hits that chance would give."""
    a, b, c, d = Contingency.of(counts)
    chance = (a + b) * (a + c) / (a + b + c + d)
    return (a - chance) / (a + b + c - chance)


def extremal_dependence(counts: Array) -> Array:
    """Return the symmetric extremal dependence index.

    Source: Ferro & Stephenson 2011, "Extremal dependence indices", eq. 4.
    """
    rate, hits = false_alarm_rate(counts), hit_rate(counts)
    pairs = [np.log(x) for x in (rate, hits, 1 - rate, 1 - hits)]
    f, h, not_f, not_h = pairs
    value: Array = (f - h - not_f + not_h) / (f + h + not_f + not_h)
    return value


class BrierParts(NamedTuple):
    """The Brier score is `reliability - resolution + uncertainty`."""

    reliability: Array
    resolution: Array
    uncertainty: Array


def brier_parts(counts: Array) -> BrierParts:
    """Return the parts of the Brier score.

    Source: Murphy 1973, "A new vector partition of the probability score".
    """
    cases = counts.sum(axis=-1)
    total = cases.sum(axis=-1)
    share = cases / total[..., None]
    frequency = np.divide(counts[..., 1], cases, out=np.zeros_like(cases), where=cases > 0)
    rate = counts[..., 1].sum(axis=-1) / total
    probability = np.linspace(0, 1, counts.shape[-2])
    return BrierParts(
        (share * (probability - frequency) ** 2).sum(axis=-1),
        (share * (frequency - rate[..., None]) ** 2).sum(axis=-1),
        rate * (1 - rate),
    )


def brier_score(counts: Array) -> Array:
    """Return the mean squared error of the probability."""
    parts = brier_parts(counts)
    return parts.reliability - parts.resolution + parts.uncertainty


def roc_area(counts: Array) -> Array:
    """Return the area below the hit rate as a function of the false alarm rate."""
    # From no yes forecasts to yes with any number of members.
    cumulated = np.cumsum(counts[..., ::-1, :], axis=-2)
    rates = cumulated / cumulated[..., -1:, :]
    rates = np.concatenate([np.zeros_like(rates[..., :1, :]), rates], axis=-2)
    steps = np.diff(rates[..., 0], axis=-1)
    area: Array = (steps * (rates[..., 1:, 1] + rates[..., :-1, 1]) / 2).sum(axis=-1)
    return area


EVENT_SCORES: dict[str, EventScore] = {
    score.name: score
    for score in (
        EventScore(
            "frequency_bias",
            "frequency bias",
            "how often it is forecast over how often it occurs",
            Better.CLOSER_TO_ONE,
            frequency_bias,
        ),
        EventScore(
            "hit_rate", "hit rate", "share of events that were forecast", Better.LARGER, hit_rate
        ),
        EventScore(
            "false_alarm_ratio",
            "false alarm ratio",
            "share of forecast events that did not occur",
            Better.SMALLER,
            false_alarm_ratio,
        ),
        EventScore(
            "false_alarm_rate",
            "false alarm rate",
            "share of cases without event for which it was forecast",
            Better.SMALLER,
            false_alarm_rate,
        ),
        EventScore(
            "csi",
            "CSI",
            "critical success index: hits over hits, misses and false alarms",
            Better.LARGER,
            critical_success_index,
        ),
        EventScore(
            "ets",
            "ETS",
            "equitable threat score: CSI without the hits of chance",
            Better.LARGER,
            equitable_threat_score,
        ),
        EventScore(
            "sedi",
            "SEDI",
            "symmetric extremal dependence index, for rare events",
            Better.LARGER,
            extremal_dependence,
        ),
        EventScore(
            "brier",
            "Brier score",
            "mean squared error of the probability",
            Better.SMALLER,
            brier_score,
            ensemble=True,
        ),
        EventScore(
            "brier_reliability",
            "reliability",
            "part of the Brier score, 0 is perfect",
            Better.SMALLER,
            lambda counts: brier_parts(counts).reliability,
            ensemble=True,
        ),
        EventScore(
            "brier_resolution",
            "resolution",
            "part of the Brier score, subtracted",
            Better.LARGER,
            lambda counts: brier_parts(counts).resolution,
            ensemble=True,
        ),
        EventScore(
            "brier_uncertainty",
            "uncertainty",
            "part of the Brier score, of the truth alone",
            Better.UNDECIDED,
            lambda counts: brier_parts(counts).uncertainty,
            ensemble=True,
        ),
        EventScore(
            "roc_area",
            "ROC area",
            "area below hit rate against false alarm rate, 0.5 has no skill",
            Better.LARGER,
            roc_area,
            ensemble=True,
        ),
    )
}


FSS = re.compile(r"fss_(.+)km")


def event_score(name: str) -> EventScore:
    """Return the score of a name, also of the fractions skill score at a distance."""
    match = FSS.fullmatch(name)
    if match is None:
        return EVENT_SCORES[name]
    # Source: Roberts & Lean 2008, "Scale-selective verification of rainfall accumulations".
    label, meaning = f"FSS {match[1]} km", f"fractions skill score of discs of {match[1]} km radius"
    return EventScore(name, label, meaning, Better.LARGER, None)


@final
@dataclass(frozen=True)
class EventResult:
    """The counts of one event of one channel: of all initial times, or of each.

    Attributes:
        counts: by region: weights, `(sources, leads, M + 1, 2)`, see `EventScore`; those of each
            initial time have their dim after the sources.
        fractions: by region: mean squared difference of the fractions, and the sum of their mean
            squares, at each of the distances, `(sources, leads, D, 2)`, likewise.
        distances: in km.
    """

    channel: Channel
    event: str
    counts: Mapping[str, Array]
    fractions: Mapping[str, Array]
    distances: tuple[float, ...] = ()

    @property
    def members(self) -> int:
        """Return the number of members."""
        return int(self.counts[GLOBAL].shape[-2]) - 1

    def reliability(self, lead: int) -> tuple[Array, Array, Array]:
        """Return the probabilities, how often each was forecast, and how often the event occurred.

        Those are of the globe; NaN where a probability was never forecast.
        """
        counts = self.counts[GLOBAL][0, lead]
        cases = counts.sum(axis=-1)
        frequency = np.divide(counts[:, 1], cases, out=np.full_like(cases, np.nan), where=cases > 0)
        return np.linspace(0, 1, len(counts)), cases / cases.sum(), frequency

    def scores(self, region: str) -> dict[str, Array]:
        """Return all scores in a region by name, `(sources, leads)` each; NaN if undefined."""
        return event_scores(self.counts[region], self.fractions[region], self.distances)


def event_scores(counts: Array, fractions: Array, distances: Sequence[float]) -> dict[str, Array]:
    """Return all scores by name, `(...)` each; NaN if undefined.

    Args:
        counts, fractions: `(..., M + 1, 2)` and `(..., D, 2)`, sums of those of `EventResult`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            name: np.asarray(score.compute(counts))
            for name, score in EVENT_SCORES.items()
            if counts.shape[-2] > 2 or not score.ensemble
        }
        for number, kilometres in enumerate(distances):
            errors, squares = np.moveaxis(fractions[..., number, :], -1, 0)
            found[f"fss_{kilometres:g}km"] = 1 - errors / squares
    return {name: np.where(np.isfinite(x), x, np.nan) for name, x in found.items()}

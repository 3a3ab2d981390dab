"""SEEPS: the error of precipitation in three classes of a local climate, dry, light and heavy.

`open_seeps` finds the climate of a precipitation variable: the share of dry dates at each point,
and the amount that separates light from heavy precipitation, by hour of the day and season. It
reads them from a climatology store of WeatherBench 2, or computes them from the truth and caches
them. `SeepsClimate.score` gives the score of each point.

Source: Rodwell et al. 2010, "A new equitable score suitable for verifying precipitation in
numerical weather prediction"; thresholds and limits of Rasp et al. 2024, "WeatherBench 2".
"""

import re
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.cache import ProgressCallback, cache_folder, fingerprint, load_or_create
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.climatology import hour_of_day
from credit_dp.data.dates import split_slice
from credit_dp.data.grid import FieldArray
from credit_dp.data.store import Store
from credit_dp.data.streaming import split_rows
from credit_dp.data.units import canonical_unit
from credit_dp.errors import UserError
from credit_dp.evaluation.stored_climatology import StoredClimatology

VERSION = "credit_dp seeps 1"  # change with the definition: old files are ignored
TITLE = "dry and wet climate of precipitation"
DRY_MILLIMETRES = {6: 0.1, 24: 0.25}  # smaller sums are dry, by the span in hours
HEAVY_SHARE = 1 / 3  # of wet dates
MIN_DRY, MAX_DRY = 0.1, 0.85  # share of dry dates at points that are scored
MONTHS = 12
FIT_BYTES = 4 * 2**30  # memory for all dates of a band of rows
NAMED_SPAN = re.compile(r"total_precipitation_(\d+)hr")
PER_METRE = {"m": 1.0, "": 1.0, "mm": 1000.0, "kg m-2": 1000.0}  # units of precipitation


def span_hours(channel: Channel, step_hours: int) -> int:
    """Return the span of the sums of a precipitation channel, in hours.

    Args:
        step_hours: the span if the name has none.
    """
    named = NAMED_SPAN.fullmatch(channel.variable)
    return int(named[1]) if named else step_hours


class SeepsClimate(ABC):
    """The climate of one precipitation variable on the truth's grid.

    Attributes:
        dry_share: share of dry dates, `(H, W)`; NaN without values.
        dry_below: amounts below are dry, in the truth's unit.
    """

    def __init__(self, dry_share: NDArray[np.float64], dry_below: float) -> None:
        self.dry_share = dry_share
        self.dry_below = dry_below

    @abstractmethod
    def heavy_from(self, times: Times) -> FieldArray:
        """Return the smallest heavy amount at each time, `(T, H, W)`; NaN where it is never wet."""

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Return the points that are neither too dry nor too wet to be scored, `(H, W)`."""
        # As in WeatherBench 2; NaN compares false.
        return (self.dry_share > MIN_DRY) & (self.dry_share < MAX_DRY)

    def score(
        self, forecast: FieldArray, truth: FieldArray, heavy_from: FieldArray
    ) -> NDArray[np.float64]:
        """Return the score of each point, NaN where it is not `scored`.

        Args:
            forecast, truth: `(..., H, W)`, in the truth's unit.
            heavy_from: of the same times, `(..., H, W)`.
        """
        dry = np.where(self.scored, self.dry_share, np.nan)
        # Rows are the forecast's class, columns the truth's: dry, light, heavy.
        zero = np.zeros_like(dry)
        matrix = 0.5 * np.array(
            [
                [zero, 1 / (1 - dry), 4 / (1 - dry)],
                [1 / dry, zero, 3 / (1 - dry)],
                [1 / dry + 3 / (2 + dry), 3 / (2 + dry), zero],
            ]
        )
        flat = matrix.reshape(9, *dry.shape)
        pair = 3 * self._classify(forecast, heavy_from) + self._classify(truth, heavy_from)
        rows, columns = np.ogrid[: dry.shape[0], : dry.shape[1]]
        return np.asarray(np.where(self.scored, flat[pair, rows, columns], np.nan))

    def _classify(self, amounts: FieldArray, heavy_from: FieldArray) -> NDArray[np.intp]:
        """Return 0 for dry, 1 for light and 2 for heavy precipitation."""
        wet = amounts >= self.dry_below
        # Where no date of the season is wet, any precipitation is heavy.
        heavy = wet & ~(amounts < heavy_from)
        return wet.astype(np.intp) + heavy


def open_seeps(
    truth: Store, channel: Channel, climatology: str, cache: str, report: ProgressCallback
) -> SeepsClimate | None:
    """Return the climate of a precipitation channel; None if it can't have this score.

    Only sums over 6 or 24 hours have it, for which WeatherBench 2 defines what is dry.

    Args:
        truth: its training dates are what the climate is computed from.
        climatology: a store that may have the climate in WeatherBench 2's form; may be empty.

    Raises:
        UserError: a store can't be read.
    """
    hours = span_hours(channel, truth.config.step_hours)
    per_metre = PER_METRE.get(canonical_unit(truth.units(channel.variable)))
    if hours not in DRY_MILLIMETRES or per_metre is None:
        return None
    dry_below = DRY_MILLIMETRES[hours] / 1000 * per_metre
    stored = _open_stored(truth, channel, climatology, dry_below, per_metre)
    if stored is not None:
        return stored
    times = truth.times[split_slice(truth.config, "train", truth.times, truth.calendar)]
    description = truth.description([channel.variable])
    name = fingerprint(VERSION, description, dry_below, [str(time) for time in times])
    path = cache_folder(cache) / f"seeps-{name}.npz"
    load = partial(ComputedSeeps.load, dry_below=dry_below, calendar=truth.calendar)
    return load_or_create(
        path, load, lambda file: compute_seeps(truth, channel, dry_below, file, report), TITLE
    )


def _open_stored(
    truth: Store, channel: Channel, climatology: str, dry_below: float, per_metre: float
) -> "StoredSeeps | None":
    names = [f"{channel.variable}_seeps_{part}" for part in ("threshold", "dry_fraction")]
    if not climatology:
        return None
    try:
        heavy, dry = (
            StoredClimatology(climatology, [Channel(name)], truth.grid, truth.calendar)
            for name in names
        )
    except UserError:
        # The store was opened before for the means: it lacks only these variables.
        return None
    return StoredSeeps(heavy, dry, truth.grid[0], dry_below, per_metre)


@final
class StoredSeeps(SeepsClimate):
    """The climate in a store by hour and day of the year, in metres.

    Args:
        heavy, dry: the stores of both variables, which have one channel.
        per_metre: the truth's units in a metre.
    """

    def __init__(
        self,
        heavy: StoredClimatology,
        dry: StoredClimatology,
        rows: int,
        dry_below: float,
        per_metre: float,
    ) -> None:
        self._heavy = heavy
        self._rows = slice(0, rows)
        self._per_metre = np.float32(per_metre)
        # The mean over all hours and days, read day by day.
        days = dry.times_of_days()
        total = sum(
            dry.fields(times, slice(0, 1), self._rows)[:, 0].mean(axis=0, dtype=np.float64)
            for times in days
        )
        super().__init__(np.asarray(total / len(days)), dry_below)

    def heavy_from(self, times: Times) -> FieldArray:
        """See `SeepsClimate`."""
        return self._heavy.fields(times, slice(0, 1), self._rows)[:, 0] * self._per_metre


@final
class ComputedSeeps(SeepsClimate):
    """The climate computed by `compute_seeps`.

    Args:
        hours: of the day, `(N,)`, with a climate of their own.
        heavy: by hour and month, `(N, 12, H, W)`.
    """

    def __init__(
        self,
        hours: NDArray[np.int64],
        heavy: FieldArray,
        dry_share: NDArray[np.float64],
        dry_below: float,
        calendar: Calendar = STANDARD,
    ) -> None:
        super().__init__(dry_share, dry_below)
        self._calendar = calendar
        self._hours = hours
        self._heavy = heavy

    @classmethod
    def load(
        cls, path: Path, dry_below: float, calendar: Calendar = STANDARD
    ) -> "ComputedSeeps | None":
        """Read a file of `compute_seeps`; None if it is absent or damaged."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                hours, heavy, dry_share = (arrays[x] for x in ("hours", "heavy", "dry_share"))
                return cls(hours, heavy, dry_share, dry_below, calendar)
        except (OSError, ValueError, KeyError, EOFError):
            return None

    def heavy_from(self, times: Times) -> FieldArray:
        """See `SeepsClimate`; hours without a climate take that of the hour before."""
        slots = np.searchsorted(self._hours, hour_of_day(times), side="right") - 1
        return np.asarray(self._heavy[slots, month_of(times, self._calendar)])


def month_of(times: Times, calendar: Calendar = STANDARD) -> NDArray[np.int64]:
    """Return the month of each time, 0 to 11."""
    return calendar.months(times).astype(np.int64) % MONTHS


def compute_seeps(
    truth: Store, channel: Channel, dry_below: float, path: Path, report: ProgressCallback
) -> None:
    """Compute the climate of a channel at the truth's training dates, and write it to `path`.

    A month without dates takes the dates of all months.

    Raises:
        UserError: a field can't be read.
    """
    span = split_slice(truth.config, "train", truth.times, truth.calendar)
    times = truth.times[span]
    hours, hour_slots = np.unique(hour_of_day(times).astype(np.int64), return_inverse=True)
    months = month_of(times, truth.calendar)
    height, width = truth.grid
    heavy = np.full((len(hours), MONTHS, height, width), np.nan, np.float32)
    dry_share = np.full((height, width), np.nan)
    # The dates as they are, and a sorted copy of one group of them.
    bands = split_rows(truth, [channel], FIT_BYTES, 2 * 4 * len(times))
    for number, rows in enumerate(bands):
        fields = np.empty((len(times), rows.stop - rows.start, width), np.float32)
        for first, block in truth.blocks([channel], span, rows):
            fields[first - span.start : first - span.start + len(block)] = block[:, 0]
            report(TITLE, (number + (first - span.start) / len(times)) / len(bands))
        shares = []
        for hour in range(len(hours)):
            at_hour = hour_slots == hour
            for month in range(MONTHS):
                chosen = at_hour & (months == month)
                amounts = fields[chosen if chosen.any() else at_hour]
                heavy[hour, month, rows] = heavy_amount(amounts, dry_below)
                if chosen.any():
                    missing = np.isnan(amounts).any(axis=0)
                    share = (amounts < dry_below).mean(axis=0)
                    shares.append(np.where(missing, np.nan, share))
        dry_share[rows] = np.mean(shares, axis=0)
    with path.open("wb") as file:  # a path would get the suffix .npz
        np.savez(file, hours=hours, heavy=heavy, dry_share=dry_share)


def heavy_amount(amounts: FieldArray, dry_below: float) -> FieldArray:
    """Return the amount that the heaviest third of wet dates exceeds; NaN without wet dates.

    Shapes:
        `(T, h, W)` -> `(h, W)`. Between two dates it is interpolated, as by numpy's `quantile`.
    """
    wet = amounts >= dry_below  # NaN is not wet
    count = wet.sum(axis=0)
    # NaN is sorted to the end, so that the wet dates come first.
    ordered = np.sort(np.where(wet, amounts, np.float32(np.nan)), axis=0)
    position = (np.maximum(count, 1) - 1) * (1 - HEAVY_SHARE)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, np.maximum(count, 1) - 1)
    low, high = (np.take_along_axis(ordered, place[None], axis=0)[0] for place in (below, above))
    return np.asarray(low + (high - low) * (position - below), dtype=np.float32)

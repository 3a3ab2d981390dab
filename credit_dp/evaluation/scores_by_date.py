"""Scores of each initial time: their file, and whether two forecasts differ in more than chance.

`scores_by_date.zarr` has what each initial time contributes to every score, before any root is
taken, and to the counts of events: any later mean over dates, a season or a test needs the
forecasts no more.

Scores of neighbouring initial times are alike, as the weather is: a test that takes them for
independent finds differences where there are none. `paired_test` is that of Geer (2016), a paired
t-test with the standard error of a second-order autoregressive process. A bootstrap of blocks, the
other usual one, needs a length of blocks and random numbers.

Source: Geer 2016, "Significance of changes in medium-range forecast scores", Tellus A 68, 30229.
"""

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import GLOBAL
from credit_dp.data.sources.datasets import all_dates
from credit_dp.errors import UserError
from credit_dp.evaluation.events import SOURCES as EVENT_SOURCES
from credit_dp.evaluation.events import EventResult, event_score, event_scores
from credit_dp.evaluation.metric_table import FORECAST, METRICS, SOURCES, TRUTH
from credit_dp.evaluation.scorecard import Array, DateScores, Scorecard

NAME = "scores_by_date.zarr"
DIMS = ("region", "source", "time", "prediction_timedelta", "channel")
ALL_SOURCES = (*SOURCES, TRUTH)
READ_BYTES = 2**25  # of the values of a few initial times, which are in memory together


def temporary_file(folder: Path | None = None) -> FileIO:
    """Open a nameless file, which is gone when it is closed; None: in the system's folder."""
    return TemporaryFile(buffering=0, dir=folder)


@final
class DateFile:
    """Values of each initial and lead time, in a file: in memory they would grow with the dates.

    Args:
        shape: number of initial times, of lead times and of values.
        open_file: opens an empty file to write and read.
    """

    def __init__(self, shape: tuple[int, int, int], open_file: Callable[[], FileIO]) -> None:
        self.shape = shape
        self._open = open_file
        self._others: dict[tuple[int, int], FileIO] = {}
        self._written = np.zeros(shape[:2], int)  # number of values

    @cached_property
    def _file(self) -> FileIO:
        file = self._open()
        weakref.finalize(self, file.close)
        return file

    def write(self, time: int, leads: slice, column: int, values: Array) -> None:
        """Write some values of an initial time, `(leads, N)`, from a column on, each one once.

        Raises:
            UserError: they can't be written.
        """
        with self._disk_errors():
            for lead, row in zip(range(leads.start, leads.stop), values, strict=True):
                offset = self._offset(time, lead, column)
                left = np.ascontiguousarray(row, np.float64).data.cast("B")
                while left:  # the last bytes of a disk may be too few for all of it
                    count = os.pwrite(self._file.fileno(), left, offset)
                    left, offset = left[count:], offset + count
        self._written[time, leads] += values.shape[1]

    def save(self) -> None:
        """Let all that was written reach the disk.

        Raises:
            UserError: it can't be written.
        """
        with self._disk_errors():
            os.fsync(self._file.fileno())

    def add(self, file: FileIO, done: NDArray[np.bool_]) -> None:
        """Take some initial and lead times, `(times, leads)`, from another file.

        Raises:
            ValueError: it does not have them.
        """
        weakref.finalize(self, file.close)
        for time, lead in np.argwhere(done).tolist():
            if os.fstat(file.fileno()).st_size < self._offset(time, lead, self.shape[2]):
                raise ValueError("it ends early")
            self._others[time, lead] = file
        self._written[done] = self.shape[2]

    def read(self) -> Iterator[tuple[slice, Array]]:
        """Yield the initial times, a few at a time, with their values, `(times, leads, N)`."""
        if (self._written != self.shape[2]).any():
            raise RuntimeError("an initial and lead time lacks a score")
        times, leads, size = self.shape
        count = max(1, READ_BYTES // (8 * leads * size))
        for first in range(0, times, count):
            part = slice(first, min(first + count, times))
            values = np.empty((part.stop - first, leads, size))
            for row, lead in np.ndindex(values.shape[:2]):
                file = self._others.get((first + row, lead)) or self._file
                into = values[row, lead].data
                os.preadv(file.fileno(), [into], self._offset(first + row, lead))
            yield part, values

    def _offset(self, time: int, lead: int, column: int = 0) -> int:
        return 8 * ((time * self.shape[1] + lead) * self.shape[2] + column)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"out: can't be written ({error.strerror}). Fix this and start again, or change "
                "out."
            ) from error


def scores_by_date(card: Scorecard, dates: DateScores) -> xr.Dataset:
    """Return what some initial times contribute to each score.

    Those with `root` in their attributes are means of squares, of which the root is taken after the
    mean over initial times. A source that a metric does not have is NaN.
    """
    channels = [channel.name for channel in card.channels]
    times = np.asarray(card.times)[dates.times]
    shape = (len(dates.means), len(ALL_SOURCES), len(times), len(card.hours), len(channels))
    variables = {}
    for name in dates.means[GLOBAL]:
        values = np.full(shape, np.nan)
        for region, means in enumerate(dates.means.values()):
            for source, field in zip(METRICS[name].sources, means[name], strict=True):
                values[region, ALL_SOURCES.index(source)] = field
        attributes = {"long_name": METRICS[name].title, "root": int(METRICS[name].root)}
        variables[name] = (DIMS, values, attributes)
    leads = np.array(card.hours, "m8[h]").astype("m8[ns]")
    coordinates = {
        "region": ("region", np.array([*dates.means], object)),
        "time": ("time", card.calendar.dates(times)),
        "prediction_timedelta": ("prediction_timedelta", leads),
        "source": ("source", np.array(ALL_SOURCES, object)),
        "channel": ("channel", np.array(channels, object)),
        "units": ("channel", np.array(card.units, object)),
    }
    return xr.Dataset(variables, coordinates)


COUNTS, FRACTIONS = "event_counts", "event_fractions"
EVENT_DIMS = ("region", "source", "time", "prediction_timedelta", "event")


def events_by_date(events: Sequence[EventResult]) -> xr.Dataset:
    """Return what each initial time adds to the counts of events.

    The counts of a source that is not counted are NaN.
    """
    counts = with_all_sources([x.counts for x in events])
    dims = (*EVENT_DIMS, "members", "observed")
    about = {"long_name": "area by number of members with the event, and by what was observed"}
    variables: dict[str, tuple[Any, ...]] = {COUNTS: (dims, counts, about)}
    coordinates = {
        "event": ("event", np.array([f"{x.channel.name} {x.event}" for x in events], object)),
        "event_channel": ("event", np.array([x.channel.name for x in events], object)),
        "members": np.arange(counts.shape[-2]),
        "observed": [0, 1],
    }
    if events[0].distances:
        fractions = with_all_sources([x.fractions for x in events])
        about = {"long_name": "squared errors of fractions, and the sum of their squares"}
        variables[FRACTIONS] = ((*EVENT_DIMS, "distance", "term"), fractions, about)
        coordinates["distance"] = ("distance", [*events[0].distances], {"units": "km"})
        coordinates["term"] = ("term", np.array(["errors", "squares"], object))
    return xr.Dataset(variables, coordinates)


def with_all_sources(by_event: Sequence[Mapping[str, Array]]) -> Array:
    """Return an array of `EVENT_DIMS` from those of each region, `(sources, times, leads, ...)`."""
    _, times, leads, *rest = by_event[0][GLOBAL].shape
    sizes = (len(by_event[0]), len(ALL_SOURCES), times, leads, len(by_event), *rest)
    values = np.full(sizes, np.nan)
    sources = [ALL_SOURCES.index(name) for name in EVENT_SOURCES]
    for event, regions in enumerate(by_event):
        for region, array in enumerate(regions.values()):
            values[region, sources, :, :, event] = array
    return values


def write_scores_by_date(card: Scorecard, folder: Path) -> None:
    """Write the file into a folder, a variable for each metric, and the counts of events.

    Raises:
        OSError: it can't be written.
    """
    for dates in card.by_date():
        scores = scores_by_date(card, dates)
        if dates.events:
            scores = scores.merge(events_by_date(dates.events))
        first = dates.times.start == 0
        if first:  # in hours or days, later dates might not be whole numbers
            scores["time"].encoding["units"] = f"seconds since {card.initial_times[0]}"
        target: dict[str, Any] = {"mode": "w"} if first else {"append_dim": "time"}
        with all_dates():
            scores.to_zarr(folder / NAME, zarr_format=2, consolidated=True, **target)


def read_scores_by_date(folder: Path, names: Collection[str]) -> xr.Dataset | None:
    """Read some scores of the forecast from a folder; None if it has no such file.

    Raises:
        ValueError: it is damaged, as all that zarr and xarray raise for it may be.
    """
    if not (folder / NAME).is_dir():
        return None
    with xr.open_zarr(folder / NAME, decode_timedelta=True, consolidated=True) as scores:
        found = scores[[name for name in scores.data_vars if name in names]]
        found = found.sel(source=FORECAST, drop=True).load()
    dims = [dim for dim in DIMS if dim != "source"]
    if any({*array.dims} != {*dims} for array in found.data_vars.values()):
        raise ValueError("its scores need the dims " + ", ".join(DIMS))
    if not all(array.notnull().any() for array in found.data_vars.values()):
        raise ValueError("it has no values of a score")
    if not all(found.get_index(dim).is_unique for dim in dims):
        raise ValueError("an initial time, region, lead time or channel is there twice")
    ordered: xr.Dataset = found.transpose("time", *(dim for dim in dims if dim != "time")).sortby(
        "time"
    )
    return ordered


def read_events_by_date(folder: Path) -> xr.Dataset | None:
    """Read the counts of events from a folder; None if it has none.

    Raises:
        ValueError: it is damaged, as all that zarr and xarray raise for it may be.
    """
    if not (folder / NAME).is_dir():
        return None
    with xr.open_zarr(folder / NAME, decode_timedelta=True, consolidated=True) as scores:
        if COUNTS not in scores:
            return None
        if not all([*scores["event"].values, *scores["event_channel"].values]):
            raise ValueError("it lacks the names of events")
        names = [name for name in (COUNTS, FRACTIONS) if name in scores]
        found: xr.Dataset = scores[names].sel(source=[*EVENT_SOURCES]).load()
    if any(array.isnull().any() for array in found.data_vars.values()):
        raise ValueError("it lacks counts of events")
    return found.sortby("time")


def scores_from_counts(sums: xr.Dataset) -> xr.Dataset:
    """Return the scores of events, a variable for each, from counts that were added up."""
    counts = sums[COUNTS].transpose(..., "members", "observed")
    dims = counts.dims[:-2]
    distances: list[float] = []
    fractions = np.zeros((*counts.shape[:-2], 0, 2))
    if FRACTIONS in sums:
        distances = sums["distance"].values.tolist()
        fractions = sums[FRACTIONS].transpose(*dims, "distance", "term").values
    scores = event_scores(counts.values, fractions, distances)
    coordinates = {dim: counts[dim].values for dim in dims}
    return xr.Dataset({name: (dims, x) for name, x in scores.items()}, coordinates)


class PairedTest(NamedTuple):
    """The test of a mean difference; arrays have the shape of the series without their times.

    Attributes:
        difference: its mean.
        error: the standard error of that mean.
        independent: number of independent cases that have the same standard error.
        p: probability of a difference of this size or more, on either side, if there is none.
    """

    difference: Array
    error: Array
    independent: Array
    p: Array


MIN_TIMES = 30  # with fewer, autocorrelations say too little,
MIN_INDEPENDENT = 10  # and so do fewer independent cases
MAX_CORRELATION = 0.99
ROUNDING = 1e-12  # relative differences of scores that are no differences


def paired_test(differences: Array) -> PairedTest:
    """Test whether the mean of a series of differences, `(T, ...)`, is zero.

    The autocorrelation is that of consecutive initial times, however far apart they are.
    """
    count = len(differences)
    mean = differences.mean(axis=0)
    anomaly = differences - mean
    variance = (anomaly**2).mean(axis=0)
    # Rounding leaves a variance a little above zero where all differences are the same.
    is_constant = variance <= (ROUNDING * np.abs(differences).max(axis=0)) ** 2
    variance = np.where(is_constant, np.nan, variance)
    first, second = (
        (anomaly[lag:] * anomaly[:-lag]).sum(axis=0) / count / variance for lag in (1, 2)
    )
    independent = count / np.maximum(1, variance_factor(first, second, count))
    error = np.sqrt(variance * count / (count - 1) / independent)
    p = t_test(np.abs(mean) / error, np.maximum(independent - 1, 1))
    # A difference that is always the same is no chance, and none is none.
    error, independent = np.where(is_constant, 0, error), np.where(is_constant, count, independent)
    return PairedTest(mean, error, independent, np.where(is_constant, mean == 0, p))


def variance_factor(first: Array, second: Array, count: int) -> Array:
    """Return how much larger the variance of a mean is than that of a mean of independent values.

    Autocorrelations that are estimated from a short series are too small. The larger factor counts
    of those with and without a correction, if a process can have the corrected ones.

    Args:
        first, second: estimated autocorrelations of a second-order autoregressive process.
        count: of the values.

    Source: Geer 2016 for the factor; the bias of a first-order process in Kendall 1954, "Note on
    bias in the estimation of autocorrelation".
    """
    first = np.clip(first, -MAX_CORRELATION, MAX_CORRELATION)
    corrected = first + (1 + 3 * first) / count
    corrected_second = second + ((1 + first) ** 2 + 4 * first**2) / count
    is_possible = (np.abs(corrected) < MAX_CORRELATION) & (corrected_second < 1)
    is_possible &= corrected_second > 2 * corrected**2 - 1
    factor = inflation(first, second)
    return np.where(is_possible, np.maximum(factor, inflation(corrected, corrected_second)), factor)


def inflation(first: Array, second: Array) -> Array:
    """Return the factor of `variance_factor` from exact autocorrelations."""
    phi1 = first * (1 - second) / (1 - first**2)
    phi2 = (second - first**2) / (1 - first**2)
    factor: Array = (1 - first * phi1 - second * phi2) / np.maximum(1 - phi1 - phi2, 1e-6) ** 2
    return factor


QUADRATURE = np.polynomial.legendre.leggauss(64)
TAIL_WIDTH = 12  # standard deviations, beyond which a normal distribution has no weight


def t_test(t: Array, freedom: Array) -> Array:
    """Return the probability that Student's t is not between -t and t."""
    # With t = sqrt(freedom) tan(angle) the density is a power of the angle's cosine.
    nodes, weights = QUADRATURE

    def weight(start: Array) -> Array:
        stop = np.minimum(np.pi / 2, start + TAIL_WIDTH / np.sqrt(freedom))
        angles = start[..., None] + (stop - start)[..., None] * (nodes + 1) / 2
        total: Array = np.cos(angles) ** (freedom - 1)[..., None] @ weights * (stop - start) / 2
        return total

    return weight(np.arctan(t / np.sqrt(freedom))) / weight(np.zeros_like(t))


class Significance(NamedTuple):
    """A mean difference at common initial times, and whether it may be chance.

    Attributes:
        difference: of the scores, or of their squares if a root is taken of them.
        p: the probability of such a difference by chance.
        independent: the number of independent cases.
    """

    difference: float
    p: float
    independent: float


Place = tuple[str, int, str]  # region, lead time in hours and channel, or channel and event


def compare_by_date(other: xr.Dataset, first: xr.Dataset, score: str) -> dict[Place, Significance]:
    """Test where a score of two forecasts differs, at their common initial times.

    Returns:
        The tests of all places where both have the score on `MIN_TIMES` common initial times or
        more, of which `MIN_INDEPENDENT` or more are independent.
    """
    if score not in other or score not in first:
        return {}
    one, two = xr.align(other[score], first[score], join="inner")
    if one.sizes["time"] < MIN_TIMES:
        return {}
    differences = one.values - two.values
    differences[np.abs(differences) <= ROUNDING * np.abs(one.values)] = 0
    test = paired_test(differences)
    regions, leads, channels = (one[dim].values for dim in one.dims[1:])
    hours = (leads / np.timedelta64(1, "h")).astype(int).tolist()
    return {
        (str(regions[r]), hours[lead], str(channels[c])): Significance(
            *(float(x[r, lead, c]) for x in (test.difference, test.p, test.independent))
        )
        for r, lead, c in np.argwhere(
            np.isfinite(test.p) & (test.independent >= MIN_INDEPENDENT)
        ).tolist()
    }


def compare_events_by_date(
    other: xr.Dataset, first: xr.Dataset
) -> dict[str, dict[Place, Significance]]:
    """Test where scores of events of two forecasts differ, as `compare_by_date`, by score.

    Only dates with the event, forecast or observed, count as independent cases.
    """
    times = other.get_index("time").intersection(first.get_index("time"))
    if len(times) < MIN_TIMES:
        return {}
    counts = [x.sel(time=times, source=FORECAST) for x in (other, first)]
    cases = count_cases(*counts)
    one, two = map(jackknife_series, counts)
    tests = {}
    for name in map(str, one):
        if event_score(name).better.ranks_sources:
            tests[name] = {
                place: test._replace(independent=min(test.independent, cases[place]))
                for place, test in compare_by_date(one, two, name).items()
                if cases[place] >= MIN_INDEPENDENT
            }
    return tests


def count_cases(one: xr.Dataset, two: xr.Dataset) -> Mapping[Place, int]:
    """Return the number of dates on which an event was observed, or one of both forecasts had it.

    Other dates tell nothing of most scores: they are no independent cases.
    """
    is_case = []
    for counts in (one[COUNTS], two[COUNTS]):
        neither = counts.isel(members=0, observed=0, drop=True)
        is_case.append(counts.sum(["members", "observed"]) > neither)
    number = (is_case[0] | is_case[1]).sum("time")
    series = number.transpose("region", "prediction_timedelta", "event").to_series()
    return {
        (region, round(lead.total_seconds() / 3600), event): int(count)
        for (region, lead, event), count in series.items()
    }


def jackknife_series(counts: xr.Dataset) -> xr.Dataset:
    """Return a series of each score of events that has the score of all dates as its mean.

    The score of a sum of counts is no mean of scores by date. The value of a date is the score plus
    the effect of the date, times the number of the other dates: how much the score without this
    date is below the mean of all such scores. The mean of these values has the error of the score.
    For the Brier score they are the scores of the dates. A score that is undefined without one of
    the dates is NaN at all of them.

    Source: Efron & Tibshirani 1993, "An introduction to the bootstrap", chapter 11.
    """
    total = counts.sum("time")
    without = scores_from_counts(total - counts)
    effects = without.mean("time", skipna=False) - without
    series = scores_from_counts(total) + (counts.sizes["time"] - 1) * effects
    ordered = series.transpose("time", "region", "prediction_timedelta", "event")
    return ordered.rename(event="channel")

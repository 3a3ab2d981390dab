"""Score any store of forecasts against the truth, with persistence and climatology as baselines.

Runs in one process. `align` opens the stores, `read_blocks` yields forecasts with truth and
climatology, `Scorer` sums the scores of `metric_table` over the globe and each region, and the
spectra and rank histograms of each variable. Memory is bounded by one block's window and the sums;
what each initial time contributes to the scores is in a file.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.area_means import AreaMeans, NeighbourhoodSums
from credit_dp.data.cache import ProgressCallback
from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import GLOBAL, REGIONS, FieldArray, Grid, check_regions
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.source import as_slice
from credit_dp.data.store import Store
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import (
    AlignedForecast,
    ScoreRequest,
    align,
    translate_error_keys,
)
from credit_dp.evaluation.events import SOURCES as EVENT_SOURCES
from credit_dp.evaluation.events import (
    Event,
    EventResult,
    Neighbourhoods,
    Quantiles,
    open_quantiles,
    parse_events,
)
from credit_dp.evaluation.forecast_blocks import Block, read_blocks, variable_slices
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.maps import MapGrid, planet_of
from credit_dp.evaluation.metric_table import (
    CLIMATOLOGY,
    ENSEMBLE_SPECTRA_SOURCES,
    ERROR,
    FORECAST,
    MEAN,
    METRICS,
    PERSISTENCE,
    SOURCES,
    SPECTRA_SOURCES,
    SPREAD,
    TRUTH,
    Extent,
    ScoredFields,
    ScoreSums,
    is_precipitation,
    wind_vector_rmse,
)
from credit_dp.evaluation.metrics import (
    LATITUDE_BANDS,
    MEMBER_DIM,
    REGION_BAND,
    AreaMean,
    ErrorMapAccumulator,
    FairCRPS,
    MeanAccumulator,
    PowerSpectra,
    RankHistogram,
    RegionSpectra,
    ZonalSpectra,
    region_wavelength,
    weighted_sums,
)
from credit_dp.evaluation.scorecard import Array, DateScores, Scorecard, headline_indices
from credit_dp.evaluation.scores_by_date import DateFile, temporary_file
from credit_dp.evaluation.seeps import SeepsClimate, open_seeps

MAP_COUNT = 3  # channels with a map
MAP_HOURS = 72  # maps show the lead time closest to this one
PROGRESS_TITLE = "scoring"
STEP_BYTES = 4 * 2**20  # float64 fields scored at once; more would not stay in the CPU's cache
SMALL_GRID_POINTS = 2**17  # grids up to this size are scored on one thread


def score(
    request: ScoreRequest,
    forecast: ForecastStore,
    report: ProgressCallback,
    folder: Path | None = None,
) -> Scorecard:
    """Score a forecast store.

    Args:
        folder: for a temporary file with what each initial time contributes to the scores; None:
            the system's.

    Raises:
        UserError: a store is invalid or does not fit the others, or a value is missing.
    """
    aligned = align(request, forecast, report)
    num_channels = aligned.truth.channels.num_outputs
    total = len(aligned.initial_indices) * len(aligned.lead_indices) * num_channels
    scorer = Scorer(aligned, request, report, lambda: temporary_file(folder))
    done = 0
    with limit_threads(aligned.truth.grid):
        for block in read_blocks(aligned, scorer.valid):
            scorer.add(block)
            leads, channels = block.truth.shape[:2]
            done += leads * channels
            report(PROGRESS_TITLE, done / total)
            del block  # frees its fields before the next block is read
    return scorer.result(request)


@contextmanager
def limit_threads(grid: tuple[int, int]) -> Iterator[None]:
    """Use one thread for small grids, on which further threads would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if grid[0] * grid[1] <= SMALL_GRID_POINTS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@final
class StoredFields(ScoredFields):
    """The forecasts from one initial time, at some lead times.

    Args:
        members: `(M, leads, C, h, W)`, M = 1 without an ensemble.
        truth: `(leads, C, h, W)`.
        persistence: `(1, C, h, W)`.
        climatology: `(leads, C, h, W)`.
    """

    samples = (0,)  # sums are folded before the next initial time

    def __init__(
        self, members: Tensor, truth: Tensor, *, persistence: Tensor, climatology: Tensor
    ) -> None:
        self._members = members.double()
        self._fields = {
            FORECAST: self._members.mean(dim=0),
            PERSISTENCE: persistence.double(),
            CLIMATOLOGY: climatology.double(),
            TRUTH: truth.double(),
        }

    def within(self, region: "RegionPoints") -> "StoredFields":
        """Return the fields in a region."""
        # Of the fields in float64: the mean of the members is that of the globe.
        part = copy(self)
        part._members = region.select(self._members)
        part._fields = {source: region.select(field) for source, field in self._fields.items()}
        return part

    def field(self, source: str) -> Tensor:
        """Return a source, `(leads, C, h, W)`; of an ensemble its mean."""
        return self._fields[source].expand_as(self._fields[TRUTH])

    @property
    def truth(self) -> Tensor:
        """Return the truth, `(1, leads, C, h, W)`."""
        return self._fields[TRUTH][None]

    def members(self, source: str) -> Tensor:
        """Return the members, `(1, M, leads, C, h, W)`; any other source is one member."""
        if source == FORECAST:
            return self._members[None]
        # Persistence is one field for all lead times; scores of members need it for each.
        return self._fields[source].expand_as(self._fields[TRUTH])[None, None]

    def error(self, source: str) -> Tensor:
        """Return a source minus the truth, `(1, leads, C, h, W)`."""
        return (self._fields[source] - self._fields[TRUTH])[None]

    def anomaly(self, source: str) -> Tensor:
        """Return a source minus the climatology, `(1, leads, C, h, W)`."""
        return (self._fields[source] - self._fields[CLIMATOLOGY])[None]

    def with_spectrum(self, source: str) -> Tensor:
        """Return the fields whose power is averaged, `(B, leads, C, h, W)`.

        Those of the spread are scaled so that their mean square is the unbiased variance.
        """
        if source == MEAN:
            return self._fields[FORECAST][None]
        if source == ERROR:
            return self.error(FORECAST)
        if source == SPREAD:
            count = len(self._members)
            return (self._members - self._fields[FORECAST]) * math.sqrt(count / (count - 1))
        return self.members(source)[0]


Indexer = slice | Tensor  # of one dim


@final
@dataclass(frozen=True)
class RegionPoints:
    """The points of the globe that scores of a region are averaged over.

    Attributes:
        weights: area weights of these rows, `(h,)`, or, on a projection, points, `(h, w)`, of
            which those outside the region have none; those of the whole grid, as in WeatherBench 2.
    """

    rows: Indexer
    columns: Indexer
    weights: Tensor

    @classmethod
    def of(cls, name: str, truth: Store) -> "RegionPoints":
        """Return the points of a region on the truth's grid."""
        if name == GLOBAL:  # the whole grid
            everything = slice(None)
            return cls(everything, everything, torch.from_numpy(truth.grid.weights))
        inside = REGIONS[name].holds(*truth.grid.points)
        if not inside.any():
            raise UserError(
                f"{truth.source.where}: its grid of {truth.grid[0]} x {truth.grid[1]} points has "
                f"none in {name}. Change regions."
            )
        rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
        weights = truth.grid.weights[rows]
        if truth.grid.is_projected:  # these rows and columns have points outside, too
            weights = (weights * inside[rows])[:, columns]
        return cls(to_indexer(rows), to_indexer(columns), torch.from_numpy(weights))

    def select(self, fields: Tensor) -> Tensor:
        """Return the points of the region: `(..., H, W)` -> `(..., h, w)`."""
        return fields[..., self.rows, :][..., self.columns]


def to_indexer(indices: NDArray[np.intp]) -> Indexer:
    """Return indices as a slice, which copies nothing, if they are evenly spaced."""
    indexer = as_slice(indices)
    return indexer if isinstance(indexer, slice) else torch.from_numpy(indices)


@final
class VariableScores:
    """Accumulates all scores, spectra and the rank histogram of the C levels of a variable.

    The forecast's spectra are those of its members, as in WeatherBench 2.

    Args:
        shape: number of lead times and of channels.
        regions: the points of the globe and of each region, by name; the globe is the first.
        neighbourhoods: sums whose means are scored, by the name of the metric.
        points: points with values; None: all points have values.
        seeps_points: points `(H, W)` that SEEPS is averaged over; None: the variable has none.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        members: int,
        truth: Store,
        regions: Mapping[str, RegionPoints],
        neighbourhoods: Mapping[str, NeighbourhoodSums],
        points: ValidPoints | None,
        seeps_points: Tensor | None = None,
    ) -> None:
        self._channels = shape[1]
        metrics = [metric for metric in METRICS.values() if members > 1 or not metric.ensemble]
        self._regions = regions
        self._scores: dict[str, ScoreSums] = {}
        # By region and name, of metrics that `ScoreSums` does not compute.
        self._others: dict[str, dict[str, MeanAccumulator]] = {}
        self._points = points
        valid = None if points is None else points.valid
        self._area_means = {name: AreaMeans(sums, valid) for name, sums in neighbourhoods.items()}
        for name, region in regions.items():
            inside = None if points is None else ValidPoints(region.select(points.valid))
            # Sums of one initial time, which `end_initial_time` takes before the next.
            extent = Extent(region.weights, inside, samples=1, members=members)
            self._scores[name] = ScoreSums(metrics, shape, extent)
            self._others[name] = {
                metric: FairCRPS((len(SOURCES), *shape), region.weights, inside)
                for metric in self._area_means
            }
            if seeps_points is not None:
                scored = ValidPoints(region.select(seeps_points)[None])
                self._others[name]["seeps"] = AreaMean(
                    (len(SOURCES), *shape), region.weights, scored
                )
        others = self._others[GLOBAL]
        # Those with means of each initial time.
        self._metrics = [m for m in metrics if m.accumulator is not None or m.name in others]
        self._spectra_sources = ENSEMBLE_SPECTRA_SOURCES if members > 1 else SPECTRA_SOURCES
        powers = (len(self._spectra_sources), *shape)
        self._spectra: PowerSpectra
        if truth.grid.is_periodic:
            self._spectra = ZonalSpectra(powers, truth.grid, slice(None), points)
        else:
            self._spectra = RegionSpectra(powers, truth.grid, truth.config.boundary, points)
        self._ranks = (
            RankHistogram(shape, members, regions[GLOBAL].weights, points) if members > 1 else None
        )

    def add(self, leads: slice, fields: StoredFields) -> None:
        """Add the forecasts from one initial time, at some lead times.

        `end_initial_time` has to follow before the same lead times of another initial time.
        """
        for name, region in self._regions.items():
            self._scores[name].add(leads, fields if name == GLOBAL else fields.within(region))
        if self._area_means:
            self._add_area_means(leads, fields)
        for index, source in enumerate(self._spectra_sources):
            self._spectra.add((index, leads), fields.with_spectrum(source))
        if self._ranks is not None:
            self._ranks.add((leads,), fields.members(FORECAST), fields.truth)

    def _add_area_means(self, leads: slice, fields: StoredFields) -> None:
        members = [fields.members(source) for source in SOURCES]
        counts = [source.shape[MEMBER_DIM] for source in members]
        errors = torch.cat(members, dim=MEMBER_DIM) - fields.truth.unsqueeze(MEMBER_DIM)
        if self._points is not None:
            errors = self._points.zero_invalid(errors)
        for metric, mean in self._area_means.items():
            # Errors of means are means of errors: of all sources at once, with a truth of 0.
            averaged = mean(errors)
            for name, region in self._regions.items():
                parts = torch.split(region.select(averaged), counts, MEMBER_DIM)
                for index, part in enumerate(parts):
                    truth = torch.zeros_like(part[:, 0])
                    self._others[name][metric].add((index, leads), part, truth)

    def add_seeps(self, source: int, leads: slice, scores: Tensor) -> None:
        """Add SEEPS of one source from one initial time, `(leads, 1, H, W)`."""
        for name, region in self._regions.items():
            self._others[name]["seeps"].add((source, leads), region.select(scores)[None])

    def end_initial_time(self, leads: slice, manager: DomainParallelManager) -> Tensor:
        """Return the means at these lead times, `(leads, N)` as for `means`; collective."""
        rows = []
        for region, sums in self._scores.items():
            means = sums.take_means(manager, leads)
            index = (slice(None), leads)
            for name, other in self._others[region].items():
                means[name] = other.mean(manager, index)
                other.clear(index)
            rows += [means[metric.name] for metric in self._metrics]
        return torch.cat(rows).transpose(0, 1).flatten(1)

    @property
    def num_means(self) -> int:
        """Return the number of means that each initial and lead time has."""
        sources = sum(len(metric.sources) for metric in self._metrics)
        return len(self._regions) * sources * self._channels

    def means(self, values: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return means `(..., N)` by region and metric, `(sources, ..., C)` each."""
        rows = values.reshape(*values.shape[:-1], -1, self._channels).movedim(-2, 0)
        names = [metric.name for metric in self._metrics]
        counts = [len(metric.sources) for metric in self._metrics]
        return {
            region: dict(zip(names, torch.split(part, counts), strict=True))
            for region, part in zip(self._regions, rows.chunk(len(self._regions)), strict=True)
        }

    def sums(self) -> list[Tensor]:
        """Return the tensors that all initial times are added to."""
        ranks = [] if self._ranks is None else [self._ranks.sums]
        return [self._spectra.sums, self._spectra.weights, *ranks]

    def result(self, means: Tensor, manager: DomainParallelManager) -> "VariableResult":
        """Return the scores, from means over all initial times, `(leads, N)`; collective."""
        by_region = self.means(means)
        scores = {
            region: {**by_region[region], **sums.finish(by_region[region])}
            for region, sums in self._scores.items()
        }
        ranks = None if self._ranks is None else self._ranks.result(manager)
        return VariableResult(scores, self._spectra.result(manager), ranks)


def neighbourhood_sums(grid: Grid, members: int) -> dict[str, NeighbourhoodSums]:
    """Return the sums whose means metrics of ensembles score, by name; none on regions."""
    if members == 1 or not grid.is_global:
        return {}
    like = torch.zeros((), dtype=torch.float64)
    rows = slice(0, grid[0])
    return {
        metric.name: NeighbourhoodSums(
            grid.latitude, grid.weights, rows, grid[1], metric.scale, like
        )
        for metric in METRICS.values()
        if metric.scale
    }


@final
class EventCounts:
    """Counts the events of the C levels of a variable, by how many members forecast them.

    Args:
        valid: points with values, `(C, H, W)`; None: all points have values.
        quantiles: of each channel, by the index of an event with one.
        neighbourhoods: of the fractions skill score, by distance in km.
    """

    def __init__(
        self,
        events: Sequence[Event],
        members: int,
        regions: Mapping[str, RegionPoints],
        valid: Tensor | None,
        quantiles: Mapping[int, Sequence[Quantiles]],
        neighbourhoods: Mapping[float, Neighbourhoods],
    ) -> None:
        self._events = events
        self._members = members
        self._regions = regions
        self._valid = valid
        self._quantiles = quantiles
        self._neighbourhoods = neighbourhoods
        # Of each channel; the rows are those of the counts, then those of the fractions.
        rows = members + 1 + len(neighbourhoods)
        self._shape = (len(events), len(regions), len(EVENT_SOURCES), rows, 2)

    @property
    def num_sums(self) -> int:
        """Return the number of sums that each channel has at each initial and lead time."""
        return math.prod(self._shape)

    def count(self, channels: slice, fields: StoredFields, times: Times) -> Tensor:
        """Count in the forecasts from one initial time, at some lead times.

        Args:
            channels: among those of the variable.
            times: valid times, `(leads,)`.

        Returns:
            The sums of these channels, `(leads, N)` as for `results`.
        """
        sums = torch.zeros(*fields.field(TRUTH).shape[:2], *self._shape, dtype=torch.float64)
        for number, event in enumerate(self._events):
            threshold: Tensor | float = event.value
            if number in self._quantiles:
                by_channel = [x.at(times) for x in self._quantiles[number][channels]]
                threshold = torch.from_numpy(np.stack(by_channel, axis=1))
            observed = event.occurs(fields.field(TRUTH), threshold)
            near = {km: x.mean(observed, channels) for km, x in self._neighbourhoods.items()}
            for source, name in enumerate(EVENT_SOURCES):
                members = event.occurs(fields.members(name)[0], threshold)
                count = members.sum(dim=0) * self._members // len(members)
                part = sums[:, :, number, :, source]
                self._put_counts(part[..., : self._members + 1, :], channels, count, observed)
                for distance, (km, truth) in enumerate(near.items()):
                    share = count.double() / self._members
                    forecast = self._neighbourhoods[km].mean(share, channels)
                    errors = (forecast - truth).square(), forecast.square() + truth.square()
                    for kind, values in enumerate(errors):
                        row = self._members + 1 + distance
                        self._put_means(part[..., row, kind], channels, values)
        return sums.flatten(1)

    def _put_counts(self, out: Tensor, channels: slice, count: Tensor, observed: Tensor) -> None:
        """Put weights of `(leads, C, H, W)` by number of members and by what was observed.

        Args:
            out: `(leads, C, regions, M + 1, 2)`.
        """
        shape = count.shape[:2]
        kinds = 2 * (self._members + 1)
        place = torch.arange(shape.numel()).reshape(*shape, 1, 1)
        cells = place * kinds + 2 * count + observed
        for number, region in enumerate(self._regions.values()):
            selected = region.select(cells)
            weights = region.weights.reshape(len(region.weights), -1).expand(selected.shape)
            if self._valid is not None:
                weights = weights * region.select(self._valid[channels])
            sums = torch.bincount(
                selected.flatten(), weights.flatten(), minlength=shape.numel() * kinds
            )
            out[:, :, number] = sums.reshape(*shape, self._members + 1, 2)

    def _put_means(self, out: Tensor, channels: slice, values: Tensor) -> None:
        """Put means of `(leads, C, H, W)` over each region into `(leads, C, regions)`."""
        if self._valid is not None:
            values = torch.where(self._valid[channels], values, 0)
        for number, region in enumerate(self._regions.values()):
            out[..., number] = weighted_sums(region.select(values), region.weights, None)

    def results(self, sums: Tensor, channels: Sequence[Channel]) -> list[EventResult]:
        """Return the counts of each channel and event, from sums `(..., C * num_sums)`."""
        by_channel = sums.reshape(*sums.shape[:-1], len(channels), *self._shape)
        counted = self._members + 1
        results = []
        for c, channel in enumerate(channels):
            for number, event in enumerate(self._events):
                rows = by_channel[..., c, number, :, :, :, :].movedim(-3, 0).numpy()
                by_region = {name: rows[..., r, :, :] for r, name in enumerate(self._regions)}
                counts = {name: x[..., :counted, :] for name, x in by_region.items()}
                fractions = {name: x[..., counted:, :] for name, x in by_region.items()}
                distances = tuple(self._neighbourhoods)
                results.append(EventResult(channel, event.text, counts, fractions, distances))
        return results


@final
@dataclass(frozen=True)
class VariableResult:
    """All scores of C channels.

    Attributes:
        scores: by region and metric, `(sources, leads, C)`; SEEPS only of precipitation.
        spectra: of `SPECTRA_SOURCES`, of ensembles of `ENSEMBLE_SPECTRA_SOURCES`, `(sources, leads,
            C, K, N)`, see `PowerSpectra`.
        ranks: frequencies of the truth's ranks, `(leads, C, M + 1)`; None without an ensemble.
    """

    scores: Mapping[str, Mapping[str, Tensor]]
    spectra: Tensor
    ranks: Tensor | None


@final
class Scorer:
    """Adds forecasts block by block to the scores of their variables.

    Args:
        open_file: opens an empty file for what each initial time contributes to the scores.

    Raises:
        UserError: a region has no point, or a field can't be read.
    """

    def __init__(
        self,
        aligned: AlignedForecast,
        request: ScoreRequest,
        report: ProgressCallback,
        open_file: Callable[[], FileIO] = temporary_file,
    ) -> None:
        self._aligned = aligned
        self._manager = DomainParallelManager(1, 1)  # one rank: the metrics' sums stay local
        truth = aligned.truth
        channels = truth.channels.output_channels
        with translate_error_keys("truth"):
            self.valid = truth.scored_mask(slice(0, truth.grid[0]))
        leads = len(aligned.lead_indices)
        self._times = aligned.forecast.initial_times[aligned.initial_indices]
        self._lead_times = aligned.forecast.lead_times[aligned.lead_indices]
        check_regions(request.regions)
        names = dict.fromkeys([GLOBAL, *request.regions])
        regions = {name: RegionPoints.of(name, truth) for name in names}
        # Each variable is scored in runs of channels of at most `STEP_BYTES`: (channels, scores).
        self._scores: dict[str, list[tuple[slice, VariableScores]]] = {}
        self._seeps: dict[str, SeepsClimate] = {}
        neighbourhoods = neighbourhood_sums(truth.grid, aligned.forecast.members)
        count = max(1, STEP_BYTES // (8 * aligned.forecast.members * truth.grid[0] * truth.grid[1]))
        for name, span in variable_slices(channels).items():
            seeps_points = self._open_seeps(span, request, report)
            self._scores[name] = []
            for first in range(span.start, span.stop, count):
                part = slice(first, min(first + count, span.stop))
                valid = None if self.valid is None else self.valid[part]
                points = ValidPoints.of(valid, regions[GLOBAL].weights)
                shape = (leads, part.stop - part.start)
                members = aligned.forecast.members
                scores = VariableScores(
                    shape, members, truth, regions, neighbourhoods, points, seeps_points
                )
                within = slice(part.start - span.start, part.stop - span.start)
                self._scores[name].append((within, scores))
        self._events = self._open_events(request, regions, report)
        # The columns of each part of what an initial and lead time contributes to the scores.
        sizes: dict[VariableScores | EventCounts, int] = {
            scores: scores.num_means for parts in self._scores.values() for _, scores in parts
        }
        for name, events in self._events.items():
            sizes[events] = len(channels[variable_slices(channels)[name]]) * events.num_sums
        stops = list(accumulate(sizes.values()))
        self._columns = {
            part: slice(stop - size, stop)
            for (part, size), stop in zip(sizes.items(), stops, strict=True)
        }
        self.dates = DateFile((len(self._times), leads, stops[-1]), open_file)
        hours = np.array(aligned.hours)
        lead = int(np.abs(hours - MAP_HOURS).argmin())
        shown = headline_indices(channels)[:MAP_COUNT]
        rim = truth.rim(slice(None))
        self._maps = ErrorMapAccumulator(shown, lead, int(hours[lead]), truth.grid, rim)

    def _open_seeps(
        self, span: slice, request: ScoreRequest, report: ProgressCallback
    ) -> Tensor | None:
        truth = self._aligned.truth
        channel = truth.channels.output_channels[span.start]
        if not is_precipitation(channel) or channel.level is not None:
            return None
        with translate_error_keys("truth"):
            climate = open_seeps(truth, channel, request.climatology, request.cache, report)
        if climate is None:
            return None
        self._seeps[channel.variable] = climate
        valid = True if self.valid is None else self.valid[span.start]
        return torch.from_numpy(climate.scored & valid)

    def _open_events(
        self, request: ScoreRequest, regions: Mapping[str, RegionPoints], report: ProgressCallback
    ) -> dict[str, EventCounts]:
        truth = self._aligned.truth
        channels = truth.channels.output_channels
        spans = variable_slices(channels)
        units = {name: truth.shown_unit(name) for name in spans}
        valid_times = np.unique(self._times[:, None] + self._lead_times)
        counts = {}
        for name, events in parse_events(request.events, units).items():
            span = spans[name]
            with translate_error_keys("truth"):
                quantiles = {
                    number: [
                        open_quantiles(
                            truth, channel, event.value, valid_times, request.cache, report
                        )
                        for channel in channels[span]
                    ]
                    for number, event in enumerate(events)
                    if event.is_quantile
                }
            count = span.stop - span.start
            valid = None if self.valid is None else torch.from_numpy(self.valid[span])
            points = torch.ones(count, *truth.grid).bool() if valid is None else valid
            near = {km: Neighbourhoods(truth.grid, km, points) for km in request.fss}
            members = self._aligned.forecast.members
            counts[name] = EventCounts(events, members, regions, valid, quantiles, near)
        return counts

    def add(self, block: Block) -> None:
        """Add the forecasts of a block, a few lead times and channels at a time."""
        time = int(np.searchsorted(self._times, block.initial_time))
        for channels, scores in self._scores[block.variable]:
            forecast = block.forecast[:, :, channels]
            leads = len(forecast)
            step = max(1, STEP_BYTES * leads // (2 * forecast.nbytes))
            for first in range(0, leads, step):
                part = slice(first, min(first + step, leads))
                scored = slice(block.leads.start + part.start, block.leads.start + part.stop)
                fields = StoredFields(
                    to_tensor(forecast[part].swapaxes(0, 1)),
                    to_tensor(block.truth[part, channels]),
                    persistence=to_tensor(block.start[:, channels]),
                    climatology=to_tensor(block.climatology[part, channels]),
                )
                scores.add(scored, fields)
                if block.variable in self._seeps:
                    self._add_seeps(block, scored, scores, fields)
                if block.variable in self._events:
                    events = self._events[block.variable]
                    sums = events.count(
                        channels, fields, block.initial_time + self._lead_times[scored]
                    )
                    first_column = self._columns[events].start + channels.start * events.num_sums
                    self.dates.write(time, scored, first_column, sums.numpy())
                # A block has one initial time, so that these lead times are complete.
                means = scores.end_initial_time(scored, self._manager)
                self.dates.write(time, scored, self._columns[scores].start, means.numpy())
        self._maps.add(block.leads, block.channels.start, block.forecast, block.truth)

    def _add_seeps(
        self, block: Block, leads: slice, scores: VariableScores, fields: StoredFields
    ) -> None:
        climate = self._seeps[block.variable]
        heavy_from = climate.heavy_from(block.initial_time + self._lead_times[leads])[:, None]
        truth = fields.field(TRUTH).numpy()
        for index, source in enumerate(SOURCES):
            values = climate.score(fields.field(source).numpy(), truth, heavy_from)
            scores.add_seeps(index, leads, torch.from_numpy(values))

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return the sums over all that was added."""
        return {f"sum{number}": array for number, array in enumerate(self._sums())}

    def add_state(
        self, state: Mapping[str, NDArray[np.float64]], dates: FileIO, done: NDArray[np.bool_]
    ) -> None:
        """Add the `state` of another scorer.

        Args:
            dates: its file with what each initial time contributes to the scores.
            done: the initial and lead times that it has scored, `(times, leads)`.
        """
        for number, array in enumerate(self._sums()):
            array += state[f"sum{number}"]
        self.dates.add(dates, done)

    def _sums(self) -> list[NDArray[np.float64]]:
        scores = [scores for parts in self._scores.values() for _, scores in parts]
        sums = [tensor.numpy() for each in scores for tensor in each.sums()]
        return [*sums, *self._maps.sums()]

    def by_date(self) -> Iterator[DateScores]:
        """Yield what the initial times contribute to the scores, a few at a time."""
        channels = self._aligned.truth.channels.output_channels
        for times, values in self.dates.read():
            by_part = self._split(values)
            parts = [x.means(by_part[x]) for part in self._scores.values() for _, x in part]
            means = {
                region: join_scores(channels, [part[region] for part in parts], square=True)
                for region in parts[0]
            }
            yield DateScores(times, means, self._event_results(by_part))

    def _split(self, values: NDArray[np.float64]) -> dict[VariableScores | EventCounts, Tensor]:
        by_column = torch.from_numpy(values)
        return {part: by_column[..., columns] for part, columns in self._columns.items()}

    def _event_results(
        self, by_part: Mapping[VariableScores | EventCounts, Tensor]
    ) -> tuple[EventResult, ...]:
        channels = self._aligned.truth.channels.output_channels
        return tuple(
            result
            for name, events in self._events.items()
            for result in events.results(by_part[events], channels[variable_slices(channels)[name]])
        )

    def result(self, request: ScoreRequest) -> Scorecard:
        """Return the scorecard of all forecasts that were added."""
        aligned = self._aligned
        truth = aligned.truth
        total = np.zeros(self.dates.shape[1:])
        for _, values in self.dates.read():
            total += values.sum(axis=0)
        sums, means = self._split(total), self._split(total / len(self._times))
        results = [
            scores.result(means[scores], self._manager)
            for parts in self._scores.values()
            for _, scores in parts
        ]
        channels = truth.channels.output_channels
        regions = {
            region: join_scores(channels, [one.scores[region] for one in results])
            for region in results[0].scores
        }
        ranks = [one.ranks for one in results if one.ranks is not None]
        wavelength = region_wavelength(truth.grid, truth.config.boundary)
        card = Scorecard(
            forecast=redact_secrets(request.forecast) + aligned.forecast.interpolated,
            truth=", ".join(map(redact_secrets, request.truth)),
            climatology=redact_secrets(aligned.climatology_description),
            members=aligned.forecast.members,
            initial_times=tuple(
                aligned.forecast.calendar.text(time)
                for time in aligned.forecast.initial_times[aligned.initial_indices]
            ),
            hours=aligned.hours,
            channels=truth.channels.output_channels,
            units=tuple(
                truth.shown_unit(channel.variable) for channel in truth.channels.output_channels
            ),
            grid=MapGrid(truth.grid, planet_of(truth.source.title)),
            scores=regions.pop(GLOBAL),
            spectra=torch.cat([one.spectra for one in results], dim=2).numpy(),
            bands=tuple(LATITUDE_BANDS) if wavelength is None else (REGION_BAND,),
            maps=tuple(self._maps.result()),
            regions=regions,
            times=self._times,
            by_date=self.by_date,
            calendar=aligned.forecast.calendar,
            rank_histograms=torch.cat(ranks, dim=1).numpy() if ranks else None,
            events=self._event_results(sums),
            boundary=truth.config.boundary,
            wavelength=wavelength,
        )
        card.check()
        return card


def join_scores(
    channels: Sequence[Channel], results: Sequence[Mapping[str, Tensor]], square: bool = False
) -> dict[str, Array]:
    """Return the scores of all channels in the order of `METRICS`, `(sources, ..., C)`.

    A score that not all channels have is NaN at the others.

    Args:
        square: the scores are means before any root, so that errors are mean squares.
    """
    joined = {}
    for name in METRICS:
        if any(name in scores for scores in results):
            parts = [
                scores.get(name, torch.full_like(scores["rmse"], torch.nan)) for scores in results
            ]
            joined[name] = torch.cat(parts, dim=-1).numpy()
        elif name == "wind_vector_rmse":
            rmse = np.sqrt(joined["rmse"]) if square else joined["rmse"]
            errors = wind_vector_rmse(channels, rmse)
            if errors is not None:
                joined[name] = errors**2 if square else errors
    return joined


def to_tensor(fields: FieldArray) -> Tensor:
    """Return fields as a contiguous tensor on the CPU, which copies them only if needed."""
    return torch.from_numpy(np.ascontiguousarray(fields))

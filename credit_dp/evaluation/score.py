"""Score any store of forecasts against the truth, with persistence and climatology as baselines.

Runs in one process. `align` opens the stores, `read_blocks` yields forecasts with truth and
climatology, `Scorer` sums the scores of `metric_table` and the spectra of each variable. Memory is
bounded by one block's window and the sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.cache import ProgressCallback
from credit_dp.data.grid import row_weights
from credit_dp.data.sources.address import redact_secrets
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.alignment import (
    AlignedForecast,
    ScoreRequest,
    align,
    translate_error_keys,
)
from credit_dp.evaluation.blocks import Block, Fields, read_blocks, variable_slices
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.maps import coasts_of
from credit_dp.evaluation.metric_table import (
    CLIMATOLOGY,
    FORECAST,
    METRICS,
    PERSISTENCE,
    SPECTRA_SOURCES,
    TRUTH,
    Extent,
    ScoredFields,
    ScoreSums,
)
from credit_dp.evaluation.metrics import (
    LATITUDE_BANDS,
    ErrorMapAccumulator,
    ValidPoints,
    ZonalSpectra,
    latitude_band_weights,
    unit_of,
)
from credit_dp.evaluation.scorecard import Scorecard, headline_indices

MAP_COUNT = 3  # channels with a map
MAP_HOURS = 72  # maps show the lead time closest to this one
PROGRESS_TITLE = "scoring"
STEP_BYTES = 4 * 2**20  # float64 fields scored at once; more would not stay in the CPU's cache
SMALL_GRID_POINTS = 2**17  # grids up to this size are scored on one thread


def score(request: ScoreRequest, forecast: ForecastStore, report: ProgressCallback) -> Scorecard:
    """Score a forecast store.

    Args:
        report: called with a title and the fraction done.

    Raises:
        UserError: a store is invalid or does not fit the others, or a value is missing.
    """
    aligned = align(request, forecast, report)
    num_channels = aligned.truth.channels.num_outputs
    total = len(aligned.initial_indices) * len(aligned.lead_indices) * num_channels
    scorer = Scorer(aligned)
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


@final
@dataclass(frozen=True)
class GridGeometry:
    """The rows of the fields with their weights.

    Attributes:
        rows: area weights, `(h,)`.
        bands: area weights in each latitude band, `(K, h)`.
        latitude: `(h,)`, in degrees.
        columns: W.
    """

    rows: Tensor
    bands: Tensor
    latitude: Tensor
    columns: int


@final
class VariableScores:
    """Accumulates all scores and the spectra of the C levels of a variable.

    Spectra of an ensemble are those of its members, as in WeatherBench 2. Memory does not grow
    with the number of initial times.

    Args:
        sizes: number of lead times and of channels.
        members: number of members; 1 without an ensemble.
        points: points with values; None: all points have values.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        members: int,
        geometry: GridGeometry,
        points: ValidPoints | None,
    ) -> None:
        metrics = [metric for metric in METRICS.values() if members > 1 or not metric.ensemble]
        # Sums of one initial time, which `end_initial_time` folds before the next.
        self._scores = ScoreSums(metrics, sizes, Extent(geometry.rows, points, samples=1))
        self._spectra = ZonalSpectra(
            (len(SPECTRA_SOURCES), *sizes),
            geometry.bands,
            geometry.latitude,
            geometry.columns,
            points,
        )

    def add(self, leads: slice, fields: StoredFields) -> None:
        """Add the forecasts from one initial time, at some lead times.

        `end_initial_time` has to follow before the same lead times of another initial time.
        """
        self._scores.add(leads, fields)
        for index, source in enumerate(SPECTRA_SOURCES):
            self._spectra.add((index, leads), fields.members(source)[0])

    def end_initial_time(self, leads: slice, manager: DomainParallelManager) -> None:
        """Complete these lead times of one initial time; collective."""
        self._scores.fold(manager, leads)

    def result(self, manager: DomainParallelManager) -> tuple[dict[str, Tensor], Tensor]:
        """Return scores by name, `(sources, leads, C)` each, and the spectra; collective.

        Spectra are `(2, leads, C, K, W // 2 + 1)`, of forecast and truth.
        """
        return self._scores.result(manager), self._spectra.result(manager)


@final
class Scorer:
    """Adds forecasts block by block to the scores of their variables."""

    def __init__(self, aligned: AlignedForecast) -> None:
        self._aligned = aligned
        self._manager = DomainParallelManager(1, 1)  # one rank: the metrics' sums stay local
        truth = aligned.truth
        with translate_error_keys("truth"):
            self.valid = truth.valid_mask(slice(0, truth.grid[0]))
        leads = len(aligned.lead_indices)
        geometry = GridGeometry(
            torch.from_numpy(row_weights(truth.latitude)),
            latitude_band_weights(truth.latitude),
            torch.from_numpy(truth.latitude.copy()),
            truth.grid[1],
        )
        # Each variable is scored in runs of channels of at most `STEP_BYTES`: (channels, scores).
        self._scores: dict[str, list[tuple[slice, VariableScores]]] = {}
        count = max(1, STEP_BYTES // (8 * aligned.forecast.members * truth.grid[0] * truth.grid[1]))
        for name, span in variable_slices(truth.channels.output_channels).items():
            self._scores[name] = []
            for first in range(span.start, span.stop, count):
                part = slice(first, min(first + count, span.stop))
                points = (
                    None if self.valid is None else ValidPoints.of(self.valid[part], geometry.rows)
                )
                sizes = (leads, part.stop - part.start)
                scores = VariableScores(sizes, aligned.forecast.members, geometry, points)
                within = slice(part.start - span.start, part.stop - span.start)
                self._scores[name].append((within, scores))
        hours = np.array(aligned.hours)
        lead = int(np.abs(hours - MAP_HOURS).argmin())
        shown = headline_indices(truth.channels.output_channels)[:MAP_COUNT]
        self._maps = ErrorMapAccumulator(shown, lead, int(hours[lead]), truth.grid)

    def add(self, block: Block) -> None:
        """Add the forecasts of a block, a few lead times and channels at a time."""
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
                # A block has one initial time, so that these lead times are complete.
                scores.end_initial_time(scored, self._manager)
        self._maps.add(block.leads, block.channels.start, block.forecast, block.truth)

    def result(self, request: ScoreRequest) -> Scorecard:
        """Return the scorecard of all forecasts that were added.

        Raises:
            UserError: a score is not finite.
        """
        aligned = self._aligned
        truth = aligned.truth
        results = [
            scores.result(self._manager) for parts in self._scores.values() for _, scores in parts
        ]
        scores = {
            name: torch.cat([one[name] for one, _ in results], dim=-1).numpy()
            for name in results[0][0]
        }
        card = Scorecard(
            forecast=redact_secrets(request.forecast),
            truth=", ".join(map(redact_secrets, request.truth)),
            climatology=redact_secrets(aligned.climatology_description),
            members=aligned.forecast.members,
            initial_times=aligned.forecast.initial_times[aligned.initial_indices],
            hours=aligned.hours,
            channels=truth.channels.output_channels,
            units=tuple(
                unit_of(truth, channel.variable) for channel in truth.channels.output_channels
            ),
            latitude=truth.latitude,
            longitude=truth.longitude,
            coasts=coasts_of(truth.source),
            scores=scores,
            spectra=torch.cat([spectra for _, spectra in results], dim=2).numpy(),
            bands=tuple(LATITUDE_BANDS),
            maps=tuple(self._maps.result()),
        )
        card.check()
        return card


def to_tensor(fields: Fields) -> Tensor:
    """Return fields as a contiguous tensor on the CPU, which copies them only if needed."""
    return torch.from_numpy(np.ascontiguousarray(fields))

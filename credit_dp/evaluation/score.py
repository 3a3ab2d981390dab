"""Scores any store of forecasts against the truth, beside persistence and climatology.

One process. What is in memory at once is bounded by what `blocks` reads, and by sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.cache import ProgressCallback
from credit_dp.data.grid import row_weights
from credit_dp.data.sources.address import redact_secrets
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.alignment import AlignedForecast, align
from credit_dp.evaluation.blocks import Block, Fields, read_blocks, variable_slices
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.maps import coasts_of
from credit_dp.evaluation.metrics import (
    LATITUDE_BANDS,
    ErrorMapAccumulator,
    GridGeometry,
    ValidPoints,
    VariableScores,
    latitude_band_weights,
    unit_of,
)
from credit_dp.evaluation.request import ScoreRequest, translate_error_keys
from credit_dp.evaluation.scorecard import Scorecard, headline_indices

MAP_COUNT = 3  # channels with a map
MAP_HOURS = 72  # at the lead time next to this one
PROGRESS_TITLE = "scoring"
STEP_BYTES = 4 * 2**20  # of float64 fields at once, or one: more leaves the processor's cache
SMALL_GRID_POINTS = 2**17  # points of a globe that are too few for several threads


def score(request: ScoreRequest, forecast: ForecastStore, report: ProgressCallback) -> Scorecard:
    """Score a forecast store.

    Args:
        report: called with what is being done and the fraction done.

    Raises:
        UserError: a store is not as needed, or a value is missing.
    """
    matched = align(request, forecast, report)
    total = len(matched.initial_indices) * len(matched.leads) * matched.truth.channels.outputs
    scorer, done = Scorer(matched), 0
    with limit_threads(matched.truth.grid):
        for block in read_blocks(matched, scorer.valid):
            scorer.add(block)
            leads, channels = block.truth.shape[:2]
            done += leads * channels
            report(PROGRESS_TITLE, done / total)
            del block  # before the next is read
    return scorer.result(request)


@contextmanager
def limit_threads(grid: tuple[int, int]) -> Iterator[None]:
    """Compute on one thread where fields are so small that others would mostly wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if grid[0] * grid[1] <= SMALL_GRID_POINTS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@final
class Scorer:
    """Adds forecasts block by block to the scores of their variables."""

    def __init__(self, matched: AlignedForecast) -> None:
        self._aligned, self._manager = matched, DomainParallelManager(1, 1)
        truth = matched.truth
        with translate_error_keys("truth"):
            self.valid = truth.valid_mask(slice(0, truth.grid[0]))
        leads = len(matched.leads)
        globe = GridGeometry(
            torch.from_numpy(row_weights(truth.latitude)),
            latitude_band_weights(truth.latitude),
            torch.from_numpy(truth.latitude.copy()),
            truth.grid[1],
        )
        # Of each variable, the scores of some of its channels, in their order.
        self._scores: dict[str, list[tuple[slice, VariableScores]]] = {}
        most = max(1, STEP_BYTES // (8 * matched.forecast.members * truth.grid[0] * truth.grid[1]))
        for name, span in variable_slices(truth.channels.output_channels).items():
            self._scores[name] = []
            for first in range(span.start, span.stop, most):
                own = slice(first, min(first + most, span.stop))
                points = None if self.valid is None else ValidPoints.of(self.valid[own], globe.rows)
                sizes = leads, own.stop - own.start
                scores = VariableScores(sizes, matched.forecast.members, globe, points)
                within = slice(own.start - span.start, own.stop - span.start)
                self._scores[name].append((within, scores))
        hours = np.array(matched.hours)
        lead = int(np.abs(hours - MAP_HOURS).argmin())
        shown = headline_indices(truth.channels.output_channels)[:MAP_COUNT]
        self._maps = ErrorMapAccumulator(shown, lead, int(hours[lead]), truth.grid)

    def add(self, block: Block) -> None:
        """Score the forecasts of a block, some lead times and channels at once."""
        for channels, scores in self._scores[block.variable]:
            forecast = block.forecast[:, :, channels]
            leads = len(forecast)
            step = max(1, STEP_BYTES * leads // (2 * forecast.nbytes))
            for first in range(0, leads, step):
                own = slice(first, min(first + step, leads))
                place = slice(block.leads.start + own.start, block.leads.start + own.stop)
                scores.add(
                    place,
                    to_tensor(forecast[own].swapaxes(0, 1)),
                    to_tensor(block.truth[own, channels]),
                    (
                        to_tensor(block.start[:, channels]),
                        to_tensor(block.climatology[own, channels]),
                    ),
                )
                scores.end_initial_time(place, self._manager)
        self._maps.add(block.leads, block.channels.start, block.forecast, block.truth)

    def result(self, request: ScoreRequest) -> Scorecard:
        """What was found.

        Raises:
            UserError: a score is not finite.
        """
        matched, truth = self._aligned, self._aligned.truth
        found = [
            scores.result(self._manager) for parts in self._scores.values() for _, scores in parts
        ]
        scores = {
            name: torch.cat([one[name] for one, _ in found], dim=-1).numpy() for name in found[0][0]
        }
        card = Scorecard(
            forecast=redact_secrets(request.forecast),
            truth=", ".join(map(redact_secrets, request.truth)),
            climatology=redact_secrets(matched.climatology_description),
            members=matched.forecast.members,
            initial_times=matched.forecast.initial_times[matched.initial_indices],
            hours=matched.hours,
            channels=truth.channels.output_channels,
            units=tuple(
                unit_of(truth, channel.variable) for channel in truth.channels.output_channels
            ),
            latitude=truth.latitude,
            longitude=truth.longitude,
            coasts=coasts_of(truth.source),
            scores=scores,
            spectra=torch.cat([spectra for _, spectra in found], dim=2).numpy(),
            bands=tuple(LATITUDE_BANDS),
            maps=tuple(self._maps.result()),
        )
        card.check()
        return card


def to_tensor(fields: Fields) -> Tensor:
    """On the CPU, in this order of dims."""
    return torch.from_numpy(np.ascontiguousarray(fields))

"""Scores any store of forecasts against the truth, beside persistence and climatology.

One process. What is in memory at once is bounded by what `blocks` reads, and by sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.cache import Report
from credit_dp.data.grid import row_weights
from credit_dp.data.sources.address import without_secrets
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.alignment import Matched, match
from credit_dp.evaluation.blocks import Block, Fields, blocks, variables_of
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.maps import coasts_of
from credit_dp.evaluation.metrics import (
    BANDS,
    ErrorMaps,
    Globe,
    ValidPoints,
    VariableScores,
    band_weights,
    unit_of,
)
from credit_dp.evaluation.request import ScoreRequest, keys_for
from credit_dp.evaluation.scorecard import Scorecard, headline

MAPPED = 3  # channels with a map
MAP_HOURS = 72  # at the lead time next to this one
TITLE = "scoring"
STEP_BYTES = 4 * 2**20  # of float64 fields at once, or one: more leaves the processor's cache
SMALL = 2**17  # points of a globe that are too few for several threads


def score(request: ScoreRequest, forecast: ForecastStore, report: Report) -> Scorecard:
    """Score a forecast store.

    Args:
        report: called with what is being done and the fraction done.

    Raises:
        UserError: a store is not as needed, or a value is missing.
    """
    matched = match(request, forecast, report)
    total = len(matched.initials) * len(matched.leads) * matched.truth.channels.outputs
    scorer, done = Scorer(matched), 0
    with threads_for(matched.truth.grid):
        for block in blocks(matched, scorer.valid):
            scorer.add(block)
            leads, channels = block.truth.shape[:2]
            done += leads * channels
            report(TITLE, done / total)
            del block  # before the next is read
    return scorer.result(request)


@contextmanager
def threads_for(grid: tuple[int, int]) -> Iterator[None]:
    """Compute on one thread where fields are so small that others would mostly wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if grid[0] * grid[1] <= SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@final
class Scorer:
    """Adds forecasts block by block to the scores of their variables."""

    def __init__(self, matched: Matched) -> None:
        self._matched, self._alone = matched, DomainParallelManager(1, 1)
        truth = matched.truth
        with keys_for("truth"):
            self.valid = truth.masks(slice(0, truth.grid[0]))
        leads = len(matched.leads)
        globe = Globe(
            torch.from_numpy(row_weights(truth.latitude)),
            band_weights(truth.latitude),
            torch.from_numpy(truth.latitude.copy()),
            truth.grid[1],
        )
        # Of each variable, the scores of some of its channels, in their order.
        self._scores: dict[str, list[tuple[slice, VariableScores]]] = {}
        most = max(1, STEP_BYTES // (8 * matched.forecast.members * truth.grid[0] * truth.grid[1]))
        for name, span in variables_of(truth.channels.out).items():
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
        shown = headline(truth.channels.out)[:MAPPED]
        self._maps = ErrorMaps(shown, lead, int(hours[lead]), truth.grid)

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
                    tensor(forecast[own].swapaxes(0, 1)),
                    tensor(block.truth[own, channels]),
                    (tensor(block.start[:, channels]), tensor(block.normal[own, channels])),
                )
                scores.end_initial_time(place, self._alone)
        self._maps.add(block.leads, block.channels.start, block.forecast, block.truth)

    def result(self, request: ScoreRequest) -> Scorecard:
        """What was found.

        Raises:
            UserError: a score is not finite.
        """
        matched, truth = self._matched, self._matched.truth
        found = [
            scores.result(self._alone) for parts in self._scores.values() for _, scores in parts
        ]
        scores = {
            name: torch.cat([one[name] for one, _ in found], dim=-1).numpy() for name in found[0][0]
        }
        card = Scorecard(
            forecast=without_secrets(request.forecast),
            truth=", ".join(map(without_secrets, request.truth)),
            climatology=without_secrets(matched.climatology_description),
            members=matched.forecast.members,
            initial_times=matched.forecast.initial_times[matched.initials],
            hours=matched.hours,
            channels=truth.channels.out,
            units=tuple(unit_of(truth, channel.variable) for channel in truth.channels.out),
            latitude=truth.latitude,
            longitude=truth.longitude,
            coasts=coasts_of(truth.source),
            scores=scores,
            spectra=torch.cat([spectra for _, spectra in found], dim=2).numpy(),
            bands=tuple(BANDS),
            maps=tuple(self._maps.result()),
        )
        card.check()
        return card


def tensor(fields: Fields) -> Tensor:
    """On the CPU, in this order of dims."""
    return torch.from_numpy(np.ascontiguousarray(fields))

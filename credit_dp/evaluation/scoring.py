"""Scores any store of forecasts against the truth, beside persistence and climatology.

One process; in memory are the fields of one initial and lead time, and sums.
"""

from itertools import groupby
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.cache import Report
from credit_dp.data.grid import row_weights
from credit_dp.data.schema import Channel
from credit_dp.data.sources.address import without_secrets
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.coasts import coasts_of
from credit_dp.evaluation.error_maps import ErrorMaps
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.matched import Matched, match
from credit_dp.evaluation.score_request import ScoreRequest, keys_for
from credit_dp.evaluation.scorecard import Scorecard, headline
from credit_dp.evaluation.units import unit_of
from credit_dp.evaluation.valid_points import ValidPoints
from credit_dp.evaluation.variable_scores import Globe, VariableScores
from credit_dp.evaluation.zonal_spectra import BANDS, band_weights

Fields = NDArray[np.float32]
MAPPED = 3  # channels with a map
MAP_HOURS = 72  # at the lead time next to this one
TITLE = "scoring"


def score(request: ScoreRequest, forecast: ForecastStore, report: Report) -> Scorecard:
    """Score a forecast store.

    Args:
        report: called with what is being done and the fraction done.

    Raises:
        UserError: a store is not as needed, or a value is missing.
    """
    matched = match(request, forecast, report)
    scorer = Scorer(matched)
    total = len(matched.initials) * len(matched.leads)
    for sample, initial in enumerate(matched.initials.tolist()):
        time = forecast.initial_times[initial]
        start = scorer.truth_at(time)
        for place, lead in enumerate(matched.leads.tolist()):
            scorer.add(initial, place, lead, start)
            report(TITLE, (sample * len(matched.leads) + place + 1) / total)
        scorer.end_initial_time()
    return scorer.result(request)


@final
class Scorer:
    """Reads forecasts one by one and adds them to the scores of their variables."""

    def __init__(self, matched: Matched) -> None:
        self._matched, self._alone = matched, DomainParallelManager(1, 1)
        truth = matched.truth
        self._rows = slice(0, truth.grid[0])
        with keys_for("truth"):
            self._masks = truth.masks(self._rows)
        self._groups = groups(truth.channels.out)
        leads = len(matched.leads)
        globe = Globe(
            torch.from_numpy(row_weights(truth.latitude)),
            band_weights(truth.latitude),
            torch.from_numpy(truth.latitude.copy()),
            truth.grid[1],
        )
        self._scores = {
            name: VariableScores(
                (leads, span.stop - span.start),
                matched.forecast.members,
                globe,
                None if self._masks is None else ValidPoints.of(self._masks[span], globe.rows),
            )
            for name, span in self._groups.items()
        }
        hours = np.array(matched.hours)
        lead = int(np.abs(hours - MAP_HOURS).argmin())
        shown = headline(truth.channels.out)[:MAPPED]
        self._maps = ErrorMaps(shown, lead, int(hours[lead]), truth.grid)

    def truth_at(self, time: np.datetime64) -> Fields:
        """All channels `(C, H, W)`; NaN only where a masked variable has no values."""
        with keys_for("truth"):
            fields: Fields = self._matched.truth.read_outputs(np.array([time]), self._rows)[0]
        return fields

    def add(self, initial: int, place: int, lead: int, start: Fields) -> None:
        """Score one forecast.

        Args:
            initial, lead: places in the store.
            place: of the lead time among those that are scored.
            start: the truth at the initial time.
        """
        forecast = self._matched.forecast
        time = forecast.initial_times[initial] + forecast.leads[lead]
        truth = self.truth_at(time)
        with keys_for("climatology"):
            normal = self._matched.climatology.field(time, self._rows)
        for name, span in self._groups.items():
            channels = self._matched.truth.channels.out[span]
            levels = tuple(c.level for c in channels if c.level is not None)
            members = forecast.read(name, levels, initial, lead)[..., self._matched.columns]
            self._check(members, span, forecast.where, f"{name} {forecast.told(initial, lead)}")
            told = f"{name} for {time.astype('M8[m]')}"
            self._check(normal[span], span, self._matched.told, told)
            self._scores[name].add(
                place,
                tensor(members),
                tensor(truth[span]),
                (tensor(start[span]), tensor(normal[span])),
            )
            error = members.mean(axis=0, dtype=np.float64) - truth[span]
            self._maps.add(place, span.start, error)

    def end_initial_time(self) -> None:
        """Say that all lead times from one initial time have been scored."""
        for scores in self._scores.values():
            scores.end_initial_time(self._alone)

    def _check(self, fields: Fields, span: slice, where: str, told: str) -> None:
        """Refuse `(..., C, H, W)` that lacks values where the truth has them."""
        absent = ~np.isfinite(fields)
        if self._masks is not None:
            absent &= self._masks[span]
        if absent.any():
            raise UserError(
                f"{where}: {told} has NaN or infinite values on {np.count_nonzero(absent)} points "
                "where the truth has values. Leave it out with variables=, dates= or hours=, or "
                "complete it."
            )

    def result(self, request: ScoreRequest) -> Scorecard:
        """What was found."""
        matched, truth = self._matched, self._matched.truth
        found = [scores.result(self._alone) for scores in self._scores.values()]
        scores = {
            name: torch.cat([one[name] for one, _ in found], dim=-1).numpy() for name in found[0][0]
        }
        return Scorecard(
            forecast=without_secrets(request.forecast),
            truth=without_secrets(request.truth),
            climatology=without_secrets(matched.told),
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


def groups(channels: tuple[Channel, ...]) -> dict[str, slice]:
    """Where the channels of each variable are, which lie together."""
    found, first = {}, 0
    for name, of_name in groupby(channels, lambda channel: channel.variable):
        count = len(list(of_name))
        found[name] = slice(first, first + count)
        first += count
    return found


def tensor(fields: Fields) -> Tensor:
    """With a dim for one sample."""
    return torch.from_numpy(np.ascontiguousarray(fields))[None]

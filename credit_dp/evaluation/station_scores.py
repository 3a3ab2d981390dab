"""Scores at stations as data: their sums, and tables by region, hour, station and rank.

An observation counts with the weight of its station.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.metric_table import FORECAST, PERSISTENCE
from credit_dp.evaluation.observations import Indices, Observations, Values
from credit_dp.evaluation.scorecard import CSV_COLUMNS, RANK_COLUMNS, name_and_level
from credit_dp.plain_text import csv_text

SOURCES = (FORECAST, PERSISTENCE)
SCORES = ("observations", "rmse", "bias", "crps")  # of stations and hours
CASE_COLUMNS = ("variable", "level", "unit", "lead_hours", "of")
STATION_COLUMNS = ("station", "latitude", "longitude", *CASE_COLUMNS, *SCORES)
HOUR_COLUMNS = (*CASE_COLUMNS, "hour", "region", *SCORES)
HOURS = 24


@final
class StationSums:
    """The sums of one variable's scores, by source and lead time, at stations and by hour.

    Attributes:
        ranks: how often observations have each rank among M members, `(L, M + 1)`; see
            `metrics.RankHistogram`.
    """

    def __init__(self, leads: int, members: int, inside: NDArray[np.bool_], weights: Values):
        """Begin with no observation.

        Args:
            inside: which stations are in each region, `(R, S)`.
            weights: of the stations, `(S,)`.
        """
        self._inside, self._weights = inside, weights
        shape = (len(SOURCES), leads)
        # Of observations; with weights of 1, squared errors, errors, distances (see `crps`) and
        # variances.
        self._of_stations = np.zeros((6, *shape, len(weights)))
        self._by_hour = np.zeros((6, *shape, len(inside), HOURS))
        self.ranks = np.zeros((leads, members + 1))

    def add(
        self,
        source: int,
        lead: int,
        hour: int,
        stations: Indices,
        members: Values,
        observed: Values,
    ) -> NDArray[np.bool_]:
        """Add the members `(M, n)` of one forecast, and return which of them are scored, `(n,)`.

        Args:
            hour: of the day.
            observed: `(n,)`; NaN without an observation.
        """
        number = len(members)
        mean = members.mean(axis=0)
        error = mean - observed
        distance = np.abs(members - observed).mean(axis=0)
        variance = np.zeros_like(error)
        if number > 1:
            # The sum over all pairs, from the members in order; fair: of different members.
            ranks = 2 * np.arange(1, number + 1) - number - 1
            pairs = np.tensordot(ranks, np.sort(members, axis=0), 1)
            distance -= pairs / (number * (number - 1))
            variance = members.var(axis=0, ddof=1)
        scored: NDArray[np.bool_] = np.isfinite(error)
        weight = np.where(scored, self._weights[stations], 0.0)
        values = np.stack([scored, weight, weight * error**2, weight * error, weight * distance,
                           weight * variance])  # fmt: skip
        values[:, ~scored] = 0.0
        self._of_stations[:, source, lead, stations] += values
        # Not a matrix product, in which the order of the sums depends on the number of regions.
        by_region = values[:, None] * self._inside[:, stations]
        self._by_hour[:, source, lead, :, hour] += by_region.sum(axis=-1)
        if source == SOURCES.index(FORECAST):
            lowest, ties = (members < observed).sum(axis=0), (members == observed).sum(axis=0)
            for tie in range(int(ties.max(initial=0)) + 1):
                share = np.where(ties >= tie, weight / (ties + 1), 0.0)
                rank = np.minimum(lowest + tie, number)
                self.ranks[lead] += np.bincount(rank, share, number + 1)
        return scored

    def of_region(self, region: int) -> dict[str, Values]:
        """Return the scores in a region by its index, `(2, L)`; NaN without observations."""
        return self._scores(*self._by_hour[..., region, :].sum(axis=-1))

    def by_hour(self, region: int) -> dict[str, Values]:
        """Return the scores in a region at each hour of the day, `(2, L, 24)`."""
        return self._scores(*self._by_hour[..., region, :])

    def of_stations(self) -> dict[str, Values]:
        """Return the scores of each station, `(2, L, S)`; NaN without observations."""
        return self._scores(*self._of_stations)

    @staticmethod
    def _scores(
        count: Values,
        weights: Values,
        squares: Values,
        errors: Values,
        crps: Values,
        variances: Values,
    ) -> dict[str, Values]:
        some = np.where(count > 0, weights, np.nan)
        return {
            "observations": count,
            "rmse": np.sqrt(squares / some),
            "bias": errors / some,
            "crps": crps / some,
            "spread": np.sqrt(variances / some),
        }


@final
@dataclass(frozen=True)
class StationScores:
    """Scores at the stations that a forecast covers.

    Attributes:
        forecast: its address.
        grid: of the forecast, for maps.
        hours: lead times.
        channels: by their names, as are units and sums.
        regions: names of the globe and of the regions in the request.
        notes: why others don't count, and what was assumed.
    """

    forecast: str
    grid: MapGrid
    observations: Observations
    members: int
    hours: Sequence[int]
    channels: Mapping[str, Channel]
    units: Mapping[str, str]
    sums: Mapping[str, StationSums]
    regions: Sequence[str]
    coverage: str
    notes: Sequence[str]

    def of_region(self, variable: str, region: str) -> dict[str, Values]:
        """Return the scores of a variable over the stations of a region, `(2, L)`."""
        return self.sums[variable].of_region(self.regions.index(region))

    def rank_frequencies(self, variable: str) -> Values:
        """Return how often observations have each rank, `(L, M + 1)`; NaN without any."""
        ranks = self.sums[variable].ranks
        total = ranks.sum(axis=-1, keepdims=True)
        return np.asarray(ranks / np.where(total > 0, total, np.nan))

    def tables(self) -> dict[str, str]:
        """Return CSV by the names of its files."""
        return {
            "scores.csv": self.to_csv(),
            "stations.csv": self.stations_csv(),
            "hours.csv": self.hours_csv(),
            **({"rank_histograms.csv": self.ranks_csv()} if self.members > 1 else {}),
        }

    def to_csv(self) -> str:
        """Return the scores over all stations, and those of regions, as CSV."""
        rows: list[Sequence[object]] = []
        for region in self.regions:
            for variable in self.sums:
                for score, values in self.of_region(variable, region).items():
                    if score == "spread" and self.members == 1:
                        continue
                    unit = "" if score == "observations" else self.units[variable]
                    rows += [
                        (
                            *name_and_level(self.channels[variable]),
                            *(unit, hours, score, source, _number(values[s, x]), region),
                        )
                        for x, hours in enumerate(self.hours)
                        for s, source in enumerate(SOURCES[: 1 if score == "spread" else 2])
                    ]
        return csv_text(CSV_COLUMNS, rows)

    def stations_csv(self) -> str:
        """Return the scores of each station as CSV, of those with observations."""
        seen = self.observations
        return csv_text(
            STATION_COLUMNS,
            (
                (seen.names[station], seen.latitude[station], seen.longitude[station],
                 *case, *scores)
                for variable, sums in self.sums.items()
                for station, case, scores in self._rows(variable, sums.of_stations())
            ),
        )  # fmt: skip

    def hours_csv(self) -> str:
        """Return the scores at each hour of the day of the valid time, by region, as CSV."""
        return csv_text(
            HOUR_COLUMNS,
            (
                (*case, hour, region, *scores)
                for r, region in enumerate(self.regions)
                for variable, sums in self.sums.items()
                for hour, case, scores in self._rows(variable, sums.by_hour(r))
            ),
        )

    def ranks_csv(self) -> str:
        """Return the rank histograms over all stations as CSV."""
        rows = [
            (*name_and_level(self.channels[variable]), hours, rank, _number(frequency))
            for variable in self.sums
            for hours, frequencies in zip(self.hours, self.rank_frequencies(variable), strict=True)
            for rank, frequency in enumerate(frequencies)
        ]
        return csv_text(RANK_COLUMNS, rows)

    def _rows(
        self, variable: str, scores: Mapping[str, Values]
    ) -> Iterator[tuple[int, tuple[object, ...], list[str]]]:
        """Yield the index in the last dim, the columns of the case and the scores, if any."""
        for s, x, index in np.argwhere(scores["observations"] > 0):
            channel = name_and_level(self.channels[variable])
            case = *channel, self.units[variable], self.hours[x], SOURCES[s]
            yield index, case, [_number(scores[name][s, x, index]) for name in SCORES]


def _number(value: np.float64) -> str:
    if not np.isfinite(value):
        return ""
    return repr(int(value) if value == int(value) else float(value))

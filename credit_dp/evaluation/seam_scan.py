"""Looks through stored forecasts for seams where bands of rows meet; see `seams`.

In memory are a few rows of one variable of one forecast, and a number for each row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.cache import Report
from credit_dp.data.schema import Channel
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score_choice import HOUR, chosen_initials, chosen_leads, chosen_variables
from credit_dp.evaluation.score_request import ScoreRequest
from credit_dp.evaluation.seams import FEWEST, Seams, find_seams, other_pairs, tests_of
from credit_dp.evaluation.seams import row_differences as differences_of

INITIALS, LEADS = 8, 4  # at most, evenly spread, if no others are asked for
BLOCK_BYTES = 2**26  # of rows read at once, if a chunk is not larger
TITLE = "looking for seams"


@final
@dataclass(frozen=True)
class Scan:
    """What was found.

    Attributes:
        edges: first rows of bands but the first.
        initials: how many forecasts each number is of.
        found: by channel and place of the lead time; None where nothing can be said.
    """

    where: str
    edges: tuple[int, ...]
    initials: int
    hours: tuple[float, ...]
    channels: tuple[Channel, ...]
    found: tuple[tuple[Seams | None, ...], ...]

    @property
    def far(self) -> list[tuple[Channel, float, Seams]]:
        """Where there are seams: channel and lead time."""
        return [
            (channel, hours, seams)
            for channel, of_channel in zip(self.channels, self.found, strict=True)
            for hours, seams in zip(self.hours, of_channel, strict=True)
            if seams is not None and seams.is_far
        ]


def scan(
    request: ScoreRequest, forecast: ForecastStore, edges: Sequence[int], report: Report
) -> Scan:
    """Compare the rows at the edges between bands with all others, in the first member.

    Args:
        edges: first rows of bands but the first, counted from the north.
        report: called with what is being done and the fraction done.

    Raises:
        UserError: what is asked for is not there, or can't be read, or bands are too narrow.
    """
    check_edges(edges, len(forecast.latitude))
    initials, leads = chosen_initials(request, forecast), chosen_leads(request, forecast)
    initials = initials if request.dates else spread(initials, INITIALS)
    leads = leads if request.hours else spread(leads, LEADS)
    channels = chosen_channels(request, forecast)
    sums = np.zeros((len(channels), len(leads), len(forecast.latitude) - 1))
    counts = np.zeros_like(sums)
    total = len(initials) * len(leads)
    for done, (initial, lead) in enumerate(np.ndindex(len(initials), len(leads))):
        place = int(initials[initial]), int(leads[lead])
        for own, name, levels in _variables(channels):
            steps = differences(forecast, name, levels, place)
            sums[own, lead] += np.nan_to_num(steps)
            counts[own, lead] += np.isfinite(steps)
        report(TITLE, (done + 1) / total)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    tests = len(channels) * len(leads) * tests_of(edges)
    return Scan(
        where=forecast.where,
        edges=tuple(edges),
        initials=len(initials),
        hours=tuple(float(hours) for hours in forecast.leads[leads] / HOUR),
        channels=tuple(channels),
        found=tuple(tuple(find_seams(one, edges, tests) for one in of) for of in means),
    )


def differences(
    forecast: ForecastStore, name: str, levels: tuple[int, ...], place: tuple[int, int]
) -> NDArray[np.float64]:
    """Mean absolute differences of neighbouring rows, `(levels, H - 1)`, read some rows at a time.

    Whole chunks are read at once, for each is decoded whole; one row is read twice.
    """
    height, columns = len(forecast.latitude), len(forecast.longitude)
    chunk = forecast.rows_together(name)
    row_bytes = 4 * max(1, len(levels)) * columns
    step = min(height, chunk * max(1, BLOCK_BYTES // (row_bytes * chunk)))
    parts = []
    for first in range(0, height - 1, step):
        rows = slice(first, min(first + step + 1, height))
        parts.append(differences_of(forecast.read(name, levels, *place, rows, slice(0, 1))[0]))
    return np.concatenate(parts, axis=-1)


def check_edges(edges: Sequence[int], height: int) -> None:
    """Refuse edges that are not within the globe, or leave nothing to compare with.

    Raises:
        UserError: naming the keys.
    """
    if not edges:
        raise UserError("bands: needs at least 2 bands, for one has no edges. Change bands.")
    if any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"edges: need to rise, got {list(edges)}")
    wrong = [edge for edge in edges if not 2 <= edge <= height - 2]
    if wrong:
        raise UserError(
            f"edges: {wrong[0]} has not two rows on either side, of {height} rows. An edge is the "
            "first row of a band, counted from 0 in the north. Change edges or bands."
        )
    if len(other_pairs(height - 1, edges)[1:-1]) < FEWEST:  # the outermost have one neighbour
        raise UserError(
            f"edges: {len(edges) + 1} bands of {height} rows are too narrow: fewer than {FEWEST} "
            "rows are left to compare with. Change edges or bands."
        )


def chosen_channels(request: ScoreRequest, forecast: ForecastStore) -> list[Channel]:
    """The variables, on each of their levels that are asked for.

    Raises:
        UserError: one is not there.
    """
    names = chosen_variables(request, forecast)
    there = {level for name in names for level in forecast.variables[name].levels}
    for level in request.levels:
        if level not in there:
            raise UserError(
                f"{forecast.where}: has no level {level}. There are: "
                f"{', '.join(map(str, sorted(there))) or 'none'}. Change levels."
            )
    found = []
    for name in names:
        levels = forecast.variables[name].levels
        kept = [level for level in levels if not request.levels or level in request.levels]
        found += [Channel(name, level) for level in kept] if levels else [Channel(name)]
    return found


def spread(places: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """At most so many of them, evenly spread, first and last among them."""
    return places[np.unique(np.linspace(0, len(places) - 1, most).round().astype(np.intp))]


def _variables(channels: Sequence[Channel]) -> Iterator[tuple[slice, str, tuple[int, ...]]]:
    """Places among the channels, name and levels of each variable, whose channels lie together."""
    first = 0
    for name in dict.fromkeys(channel.variable for channel in channels):
        own = [channel.level for channel in channels if channel.variable == name]
        yield (
            slice(first, first + len(own)),
            name,
            tuple(level for level in own if level is not None),
        )
        first += len(own)

"""Whether fields that were computed band by band show where the bands meet.

For the pair of rows across an edge, the mean absolute difference between the two rows is divided by
the mean of that of the pairs next to it, so that a field's own change with latitude cancels. Where
bands fit together the ratio is 1, but for chance and for the field itself: how far other rows are
from 1 says what is usual. Rows beyond an edge that were taken for zero pull both of its sides to
the same value, and the difference across becomes small: that shows in the pairs beside it, which
are divided by the next ones. Only large ratios are told of: small ones are where a field is flat,
for instance a geopotential at the equator of a coarse grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FALSE_ALARMS = 0.01  # how often a store without seams is told to have one
FEWEST = 8  # rows away from edges that usual ratios are taken from
SMALLEST_SPREAD = 1e-3  # of contrasts: below it is rounding


@final
@dataclass(frozen=True)
class Ratio:
    """How much pairs of rows at edges differ, over their neighbours.

    Attributes:
        mean: over all edges, and `of_edges` of each; NaN where there are no values.
        limit, edge_limit: the largest that is usual, over all edges and for a single one.
    """

    mean: float
    of_edges: tuple[float, ...]
    limit: float
    edge_limit: float

    @property
    def is_far(self) -> bool:
        """Whether one is more than usual."""
        return self.mean > self.limit or any(ratio > self.edge_limit for ratio in self.of_edges)


@final
@dataclass(frozen=True)
class Seams:
    """What was found of one field: of the pairs across edges, and of those beside them.

    The latter is None where bands are too narrow to say what is usual.
    """

    across: Ratio
    beside: Ratio | None

    @property
    def is_far(self) -> bool:
        """Whether there is a seam."""
        return self.across.is_far or (self.beside is not None and self.beside.is_far)


def row_differences(fields: NDArray[np.floating]) -> Array:
    """Mean absolute difference of neighbouring rows: `(..., H, W)` -> `(..., H - 1)`.

    Over columns with values in both rows; NaN where there are none.
    """
    steps = np.abs(np.diff(fields.astype(np.float64), axis=-2))
    there = np.isfinite(steps)
    with np.errstate(invalid="ignore"):
        sums = np.where(there, steps, 0).sum(axis=-1)
        return np.asarray(sums / np.where(there.any(axis=-1), there.sum(axis=-1), np.nan))


def contrasts(differences: Array) -> Array:
    """`(a - b) / (a + b)` of each pair's difference a and the mean b of its two neighbours'.

    Between -1 and 1, which a ratio a / b is not.

    Shapes:
        `(..., P)` -> `(..., P)`, NaN for the first and the last pair.
    """
    return _contrasts(differences, differences, 1)


def contrasts_beside(differences: Array) -> Array:
    """The same of the mean a of a pair's neighbours, and the mean b of those two pairs away."""
    beside = np.full(differences.shape, np.nan)
    beside[..., 1:-1] = (differences[..., :-2] + differences[..., 2:]) / 2
    return _contrasts(beside, differences, 2)


def _contrasts(here: Array, differences: Array, away: int) -> Array:
    around = (differences[..., : -2 * away] + differences[..., 2 * away :]) / 2
    found = np.full(differences.shape, np.nan)
    inner = here[..., away:-away]
    with np.errstate(invalid="ignore"):
        found[..., away:-away] = (inner - around) / (inner + around)
    return found


def inner_edges(edges: Sequence[int], height: int) -> list[int]:
    """Those with two rows on either side, which can be compared with what is beside them."""
    return [edge for edge in edges if 2 <= edge <= height - 2]


def tests_of(edges: Sequence[int]) -> int:
    """How many tests there are of one field, across and beside: of all edges, and of each."""
    return 2 * (1 + len(edges)) if len(edges) > 1 else 2


def ratio_of(contrast: float) -> float:
    """The ratio a / b whose contrast this is."""
    # NaN, where there are no values, stays what it is.
    return float("inf") if contrast >= 1 else (1 + contrast) / (1 - contrast)


def other_pairs(pairs: int, edges: Sequence[int], away: int = 1) -> NDArray[np.intp]:
    """The pairs that are further than so many from an edge's, which is the first row of a band."""
    near = {edge - 1 + off for edge in edges for off in range(-away, away + 1)}
    return np.array([pair for pair in range(pairs) if pair not in near], np.intp)


def find_seams(differences: Array, edges: Sequence[int], tests: int) -> Seams | None:
    """Compare edges with all other rows; None where too few rows have values, or all are alike.

    Args:
        differences: of all pairs of neighbouring rows, `(H - 1,)`.
        tests: how many there are in all, so that many fields do not make an alarm likely.
    """
    across = _compare(contrasts(differences), edges, other_pairs(len(differences), edges), tests)
    if across is None:
        return None
    # No closer, for then what is wrong beside an edge would count as usual.
    others = other_pairs(len(differences), edges, 3)
    return Seams(across, _compare(contrasts_beside(differences), edges, others, tests))


def _compare(
    found: Array, edges: Sequence[int], places: NDArray[np.intp], tests: int
) -> Ratio | None:
    """The contrasts of edges beside those of other places; None where these are too few.

    The spread is taken of the contrasts above their median, for below are the flat places. A mean
    of E edges is far if it is above what a mean of E draws from a normal distribution with that
    median and spread, estimated from n values, exceeds with a probability of
    `FALSE_ALARMS / tests`; so is a single edge.
    """
    others, own = found[places], found[np.array(edges) - 1]
    others = others[np.isfinite(others)]
    with_values = np.count_nonzero(np.isfinite(own))
    if len(others) < FEWEST or not with_values:
        return None
    usual = float(np.median(others))
    above = others[others > usual] - usual
    spread = max(float(np.sqrt(np.mean(above**2))) if len(above) else 0.0, SMALLEST_SPREAD)
    count = max(len(above), 1)
    reach = spread * student_quantile(FALSE_ALARMS / tests, count)
    return Ratio(
        mean=ratio_of(float(np.nanmean(own))),
        of_edges=tuple(ratio_of(float(one)) for one in own),
        limit=ratio_of(usual + reach * math.sqrt(1 / with_values + 1 / count)),
        edge_limit=ratio_of(usual + reach * math.sqrt(1 + 1 / count)),
    )


def student_quantile(tail: float, freedom: int) -> float:
    """What Student's t with this many degrees of freedom exceeds with the probability `tail`.

    Source: Abramowitz & Stegun 1964, eq. 26.7.5.
    """
    z = NormalDist().inv_cdf(1 - tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms)))


def seams_told(differences: Array, edges: Sequence[int], names: Sequence[str]) -> str:
    """What is found of some fields, `(C, H - 1)` and C names, in words; empty without edges.

    The ratio at edges, and those at other rows, each of all fields together.
    """
    edges = inner_edges(edges, differences.shape[-1] + 1)
    found = contrasts(differences)
    there = np.isfinite(found)
    together = np.where(there, found, 0).sum(axis=0)[there.any(axis=0)]
    together /= there.sum(axis=0)[there.any(axis=0)]
    places = np.flatnonzero(there.any(axis=0))
    others = together[np.isin(places, other_pairs(differences.shape[-1], edges))]
    own = together[np.isin(places, np.array(edges, np.intp) - 1)]
    if not len(own) or not len(others):
        return ""
    here, low, high = map(ratio_of, (float(own.mean()), float(others.min()), float(others.max())))
    tests = len(names) * tests_of(edges)
    every = [find_seams(field, edges, tests) for field in differences]
    far = [name for name, one in zip(names, every, strict=True) if one is not None and one.is_far]
    verdict = f"; SEAMS IN {', '.join(far)}" if far else ""
    return f"{here:.2f} (other rows {low:.2f} to {high:.2f}){verdict}"

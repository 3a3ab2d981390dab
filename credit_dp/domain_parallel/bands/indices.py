"""Which rows indices name, and in which bands these lie so that few of them are sent.

A slice of rows and a rising index leave each row on its rank. Rows in another order, as in shifted
or dilated windows, get the bands that as many rows have. The adjoint, which adds rows at indices,
chooses the bands from which `taken_bounds` would choose those of the rows that it adds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import LARGEST_BAND, RowPartition

Bounds = tuple[int, ...]


def ranges_of(indices: Sequence[int]) -> tuple[RowRange, ...]:
    """Return indices as ranges, flipped where they fall; -1 stands for zeros."""
    ranges: list[RowRange] = []
    i = 0
    while i < len(indices):
        first, step = indices[i], _step(indices, i)
        j = i + 1
        while (
            j < len(indices)
            and indices[j] == indices[j - 1] + step
            and (indices[j] < 0) == (first < 0)
        ):
            j += 1
        last = indices[j - 1]
        if first < 0:
            ranges.append(RowRange(0, j - i, zero_filled=True))
        elif step < 0:
            ranges.append(RowRange(last, first + 1, flipped=True))
        else:
            ranges.append(RowRange(first, last + 1))
        i = j
    return tuple(ranges)


def _step(indices: Sequence[int], i: int) -> int:
    if indices[i] < 0:
        return 0
    return -1 if i + 1 < len(indices) and 0 <= indices[i + 1] == indices[i] - 1 else 1


@lru_cache(1024)
def rank_ranges(indices: tuple[int, ...], bounds: Bounds) -> tuple[tuple[RowRange, ...], ...]:
    """Return for each rank the ranges of those indices that are in its band."""
    return tuple(ranges_of(indices[a:b]) for a, b in pairwise(bounds))


def is_balanced(bounds: Bounds) -> bool:
    """Return whether each rank has rows, and none has many more than others."""
    sizes = [b - a for a, b in pairwise(bounds)]
    return min(sizes) > 0 and max(sizes) * len(sizes) <= LARGEST_BAND * bounds[-1]


# ---------------------------------------------------------------- indices


@lru_cache(1024)
def taken_bounds(indices: tuple[int, ...], bounds: Bounds, usual: Bounds) -> Bounds:
    """Return the bands in which rows lie that are taken from bands.

    Args:
        bounds: the bands from which they are taken.
        usual: the bands of as many rows.
    """
    count, ranks = len(indices), len(bounds) - 1
    if is_rising(indices):
        here = tuple(bisect_left(indices, bound) for bound in bounds)
        if count < ranks or is_balanced(here):
            return here
    kept = tuple(min(bound, count) for bound in bounds)
    is_kept = kept[-1] == count and RowPartition(kept).is_well_balanced
    return kept if is_kept else usual


@lru_cache(1024)
def source_bounds(indices: tuple[int, ...], taken: Bounds, usual: Bounds) -> Bounds:
    """Return bands from which rows were taken that lie in other bands now: see `taken_bounds`.

    Args:
        taken: the bands in which they lie.
        usual: the bands of the height from which they are taken, where nothing says otherwise.
    """
    if is_rising(indices):
        here = _between(_first_rows(indices, taken, usual[-1]), usual)
        if tuple(bisect_left(indices, bound) for bound in here) == taken and is_balanced(here):
            return here
    kept = _between([(n, n if n < taken[-1] else usual[-1]) for n in taken[1:-1]], usual)
    return kept if is_balanced(kept) and taken_bounds(indices, kept, taken) == taken else usual


def is_rising(indices: Sequence[int]) -> bool:
    """Return whether no index is smaller than that before it."""
    return all(a <= b for a, b in pairwise(indices))


def _first_rows(indices: Sequence[int], taken: Bounds, height: int) -> list[tuple[int, int]]:
    """Return between which rows each inner bound is, if rising indices are cut so."""
    count = len(indices)
    return [
        (indices[n - 1] + 1 if n else 0, indices[n] if n < count else height) for n in taken[1:-1]
    ]


def _between(limits: Sequence[tuple[int, int]], usual: Bounds) -> Bounds:
    """Return the bounds that are nearest to usual ones between limits."""
    inner: list[int] = []
    for (low, high), bound in zip(limits, usual[1:-1], strict=True):
        nearest = min(max(bound, low), high)
        inner.append(max(nearest, inner[-1] if inner else 0))
    return (0, *inner, usual[-1])


# ---------------------------------------------------------------- slices


@lru_cache(65536)
def sliced_bounds(bounds: Bounds, start: int, stop: int, step: int) -> Bounds:
    """Return the bands of the rows start, start + step, ... of bands; rows stay where they are."""
    return tuple(len(range(start, min(bound, stop), step)) for bound in bounds)


@lru_cache(65536)
def bounds_around(sliced: Bounds, start: int, step: int, usual: Bounds) -> Bounds | None:
    """Return bands of which a slice has other bands, and no row moves; None if they are uneven.

    Args:
        usual: the bands of the height from which it is taken.
    """
    count, height = sliced[-1], usual[-1]
    limits = [
        (
            start + (n - 1) * step + 1 if n else 0,
            start + n * step if n < count else height,
        )
        for n in sliced[1:-1]
    ]
    around = _between(limits, usual)
    is_one = tuple(len(range(start, min(b, start + count * step), step)) for b in around) == sliced
    return around if is_one and (around == usual or is_balanced(around)) else None

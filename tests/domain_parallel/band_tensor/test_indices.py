"""Bands of rows that slices and indices take: of the adjoint, too, and of folded rows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from credit_dp.domain_parallel.band_tensor.moving import band_entries, unfolded_rows
from credit_dp.domain_parallel.band_tensor.tensor import Band
from credit_dp.domain_parallel.bands.indices import (
    bounds_around,
    rank_ranges,
    sliced_bounds,
    source_bounds,
    taken_bounds,
)
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import RowPartition


@st.composite
def some_bounds(draw, height=None, ranks=None):
    height = draw(st.integers(1, 24)) if height is None else height
    ranks = draw(st.integers(1, 5)) if ranks is None else ranks
    inner = draw(st.lists(st.integers(0, height), min_size=ranks - 1, max_size=ranks - 1))
    return (0, *sorted(inner), height)


def usual(height, bounds):
    return RowPartition.balanced(height, len(bounds) - 1).bounds


@given(some_bounds(), st.integers(0, 9), st.integers(1, 9), st.integers(1, 3))
def test_bounds_around_a_slice_leave_its_rows_where_they_are(bounds, start, length, step):
    rows = range(bounds[-1])[start : start + length : step]
    sliced = sliced_bounds(bounds, rows.start, rows.stop, rows.step)
    around = bounds_around(sliced, rows.start, rows.step, usual(bounds[-1], bounds))
    if around is not None:
        assert sliced_bounds(around, rows.start, rows.stop, rows.step) == sliced
    else:
        assert bounds != usual(bounds[-1], bounds)


@given(some_bounds(), st.data())
def test_rows_return_to_the_usual_bands_from_which_they_were_taken(bounds, data):
    height = bounds[-1]
    indices = tuple(data.draw(st.lists(st.integers(0, height - 1), min_size=1, max_size=12)))
    even, of_count = usual(height, bounds), usual(len(indices), bounds)
    taken = taken_bounds(indices, even, of_count)
    assert (taken[0], taken[-1]) == (0, len(indices))
    returned = source_bounds(indices, taken, even)
    assert (returned[0], returned[-1]) == (0, height)
    assert all(a <= b for a, b in pairwise(returned))


def test_a_slice_that_is_padded_returns_to_where_it_was():
    shifted = (0, 6, 11, 16)
    order = tuple((row + 2) % 16 for row in range(16))
    assert taken_bounds(order, shifted, (0, 6, 11, 16)) == shifted
    assert source_bounds(order, (0, 5, 10, 16), (0, 6, 11, 16)) == (0, 5, 10, 16)
    assert source_bounds((3, 0), (0, 1, 2, 2), (0, 6, 11, 16)) == (0, 6, 11, 16)


@given(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]), st.data())
def test_folded_rows_are_folded_in_another_way(outer, new_outer, data):
    ranks = data.draw(st.integers(1, 4))
    bounds = data.draw(some_bounds(12 // outer, ranks))
    new_bounds = data.draw(some_bounds(12 // new_outer, ranks))

    def held(outer, bounds):
        return [
            [before * bounds[-1] + row for before in range(outer) for row in range(a, b)]
            for a, b in pairwise(bounds)
        ]

    band, required = unfolded_rows(
        Band(-1, outer, bounds), band_entries(Band(-1, new_outer, new_bounds))
    )
    order = [entry for band in held(outer, bounds) for entry in band]
    sizes = list(map(len, held(outer, bounds)))
    assert band.bounds == tuple(sum(sizes[:r]) for r in range(ranks + 1))
    for ranges, expected in zip(required, held(new_outer, new_bounds), strict=True):
        assert [order[i] for i in _rows(ranges)] == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_each_rank_gets_the_rows_of_its_indices(indices, data):
    bounds = data.draw(some_bounds(len(indices)))
    found = [_rows(ranges) for ranges in rank_ranges(tuple(indices), bounds)]
    assert found == [indices[a:b] for a, b in pairwise(bounds)]


def _rows(ranges: tuple[RowRange, ...]) -> list[int]:
    return [
        row for part in ranges for row in range(part.start, part.stop)[:: -1 if part.flipped else 1]
    ]

"""Row partitions: balanced, aligned across levels, one per height."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.partition import LARGEST_IMBALANCE, BandTable, RowPartition
from credit_dp.errors import UserError


def test_surplus_rows_go_to_the_first_ranks():
    assert RowPartition.balanced(181, 4).sizes == (46, 45, 45, 45)
    assert RowPartition.balanced(721, 3).sizes == (241, 240, 240)


def test_coarse_bands_line_up_with_fine_ones():
    table = BandTable(4)
    table.plan({181, 91, 46})
    assert table[46].bounds == (0, 12, 24, 35, 46)
    assert table[91].bounds == (0, 24, 48, 70, 91)
    assert table[181].bounds == (0, 48, 96, 140, 181)


def test_alignment_gives_way_to_balance():
    table = BandTable(8)
    table.plan({12, 24})
    assert table[12].sizes == (2, 2, 2, 2, 1, 1, 1, 1)
    assert table[24].sizes == (3,) * 8


@given(height=st.integers(8, 800), ranks=st.integers(1, 8), levels=st.integers(1, 4))
def test_every_planned_level_covers_its_rows_in_balance(height, ranks, levels):
    heights = [height]
    while len(heights) < levels and -(-heights[-1] // 2) >= ranks:
        heights.append(-(-heights[-1] // 2))
    table = BandTable(ranks)
    table.plan(set(heights))
    for h in heights:
        sizes = table[h].sizes
        assert sum(sizes) == h
        assert min(sizes) > 0
        assert max(sizes) <= max(LARGEST_IMBALANCE * h / ranks, -(-h // ranks))
        for row in range(h):
            owner = table[h].owner(row)
            assert table[h].bounds[owner] <= row < table[h].bounds[owner + 1]


@given(bounds=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_owner_skips_empty_bands(bounds):
    partition = RowPartition.from_sizes(bounds)
    for row in range(partition.height):
        owned = partition.rows(partition.owner(row))
        assert owned.start <= row < owned.stop


def test_a_height_keeps_its_bands():
    table = BandTable(2)
    first = table[9]
    table.plan({9, 5})
    assert table[9] == first
    with pytest.raises(UserError, match=r"bands of 9 rows: the plan has \(5, 4\)"):
        table.register(RowPartition((0, 4, 9)))


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="must rise from 0"):
        RowPartition((0, 5, 3))


def test_ranks_are_numbered_by_stage_then_by_share_of_the_samples_then_by_band():
    manager = DomainParallelManager(
        12, 2, pipeline_parallel_size=2, transport=CountingTransport(0, 2)
    )
    coordinates = []
    for rank in range(12):
        manager.rank = rank
        coordinates.append((manager.pipeline_rank, manager.dp_rank, manager.domain_rank))
    assert coordinates == list(itertools.product(range(2), range(3), range(2)))

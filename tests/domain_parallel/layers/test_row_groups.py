"""Layers that act on groups of rows: ranks get whole groups, results equal the whole globe's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.bands import balanced_bounds
from credit_dp.domain_parallel.convert import convert_to_domain_parallel, shard_model
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.domain_parallel.layers import DomainParallelRowGroups
from credit_dp.domain_parallel.layers.row_groups import assign_groups
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.models.blocks import StochasticDepth, draw_stochastic_depths
from credit_dp.models.row_groups import GroupedRows, dilated, windows
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.domain_parallel.models import RowGroupAttention, RowGroupModel
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["windows", "dilated"]))
    size, height = draw(st.integers(1, 9)), draw(st.integers(8, 30))
    padded = -(-height // size) * size
    return kind, size, draw(st.integers(0, padded - 1)), height


@pytest.mark.parametrize("ranks", THREADS)
@given(case=cases())
def test_same_as_the_whole_globe(ranks, case):
    shape = (2, 2, case[-1], 3)
    on_threads(ranks, assert_same_as_whole_globe, RowGroupModel, case, shape, 1e-11)


GLOO = [
    (kind, size, shift, planned)
    for kind, size, shift in [("windows", 4, 2), ("dilated", 5, 0), ("windows", 9, 4)]
    for planned in (True, False)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "shift", "planned"),
    tiers(fast=GLOO[:1], slow=GLOO[3:4], exhaustive=GLOO[1:3] + GLOO[4:]),
)
def test_on_gloo_ranks(kind, size, shift, planned):
    args = (RowGroupModel, (kind, size, shift, 13), (1, 2, 13, 3), 1e-11, 0.0, planned)
    on_processes(3, assert_same_as_whole_globe, *args)


class Loop(GroupedRows):
    """Treats one group after the other: the result of no group has no autograd history."""

    def groups(self, height):
        return windows(height, 4)

    def treat(self, x, groups, height):
        made = torch.zeros_like(x)
        for group in range(groups.stop - groups.start):
            rows = slice(4 * group, 4 * group + 4)
            made[..., rows, :] = x[..., rows, :].softmax(-2)
        return made


def _loop():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Loop())
    model.converters = {Loop: DomainParallelRowGroups}
    return model


def test_a_rank_without_groups_joins_the_backward():
    on_threads(3, assert_same_as_whole_globe, _loop, (), (1, 2, 8, 3))


def test_rows_of_windows_and_of_dilated_groups():
    assert windows(5, 2).order == (0, 1, 2, 3, 4, None)
    assert windows(5, 2, 1).order == (1, 2, 3, 4, None, 0)
    assert windows(5, 2, 1).positions == (5, 0, 1, 2, 3)
    assert dilated(7, 3).order == (0, 3, 6, 1, 4, None, 2, 5, None)
    assert (dilated(7, 3).count, windows(5, 2).count) == (3, 3)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    size=st.integers(1, 7),
    shift=st.integers(0, 6),
)
def test_no_rank_gets_more_than_its_share(sizes, size, shift):
    bands = RowPartition.from_sizes(sizes)
    for groups in (windows(bands.height, size, shift), dilated(bands.height, size)):
        shares = assign_groups(bands, groups)
        dealt = [number for share in shares for number in range(share.start, share.stop)]
        assert (len(shares), sorted(dealt)) == (bands.ranks, list(range(groups.count)))
        assert max(s.stop - s.start for s in shares) <= -(-groups.count // bands.ranks)


def _forward(manager, kind, size, shift, height):
    """Return the bands, this rank's number of groups, and messages and rows sent in a forward."""
    model = nn.Sequential(RowGroupAttention(kind, size, shift, height))
    rules = {RowGroupAttention: DomainParallelRowGroups}
    convert_to_domain_parallel(model, manager, -2, rules, input_shape=(1, 3, height, 2))
    traffic = manager.transport.traffic
    before = traffic.messages, traffic.bytes
    with torch.no_grad():
        model(torch.zeros(1, 3, manager.bands[height].sizes[manager.domain_rank], 2))
    sent = traffic.messages - before[0], (traffic.bytes - before[1]) // (3 * 2 * 4)
    groups = model[0].assignment(manager.bands[height]).groups
    return manager.bands[height].sizes, groups.stop - groups.start, *sent


def test_groups_go_to_the_ranks_that_have_their_rows():
    """Bands, groups of each rank, and messages and rows sent there and back."""
    # Bands end where windows do, and nothing is sent.
    found = on_threads(3, _forward, "windows", 4, 0, 34)
    assert found == [((12, 12, 10), 3, 0, 0)] * 3
    # Of 5 windows one rank needs two; bands of whole windows would differ too much.
    found = on_threads(4, _forward, "windows", 4, 0, 20)
    assert {sizes for sizes, *_ in found} == {(5, 5, 5, 5)}
    assert sorted(groups for _, groups, *_ in found) == [1, 1, 1, 2]
    # A shifted window sends half of itself.
    found = on_threads(4, _forward, "windows", 4, 2, 32)
    assert found == [((8, 8, 8, 8), 2, 2, 4)] * 4
    # Bands end at row 10, windows at rows 7, 11 and 15: one row travels, and the three of the pole.
    found = on_threads(2, _forward, "windows", 4, 3, 20)
    assert found == [((10, 10), 2, 2, 4), ((10, 10), 3, 2, 4)]
    # A rank treats one group of four: one row of it is its own.
    found = on_threads(4, _forward, "dilated", 4, 0, 16)
    assert found == [((4, 4, 4, 4), 1, 6, 6)] * 4
    # Of each of its two groups one row is its own, and comes home to it.
    found = on_threads(4, _forward, "dilated", 2, 0, 16)
    assert [rows for *_, rows in found] == [4] * 4
    # More ranks than groups.
    found = on_threads(6, _forward, "dilated", 3, 0, 9)
    assert [groups for _, groups, *_ in found].count(0) == 3


def _residual(rate):
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), Residual(rate))


class Residual(nn.Module):
    """A branch that stochastic depth may drop, added to its input."""

    def __init__(self, rate):
        super().__init__()
        self.branch = nn.Conv2d(2, 2, 3, padding=1)
        self.depth = StochasticDepth(rate)

    def forward(self, x):
        return x + self.depth(self.branch(x))


def _dropped(manager, rate, numbers):
    """Return whether each sample lost its branch in training on this rank."""
    model = _residual(rate)
    shard_model(model, manager, (4, 2, 9, 3))
    model[1].depth.draws = numbers
    x = torch.rand(4, 2, manager.bands[9].sizes[manager.domain_rank], 3)
    between = model[0](x)
    return [bool(torch.equal(a, b)) for a, b in zip(model(x), between, strict=True)]


def test_a_sample_loses_its_branch_on_all_ranks():
    numbers = torch.tensor([0.1, 0.9, 0.49, 0.5])
    found = on_threads(3, _dropped, 0.5, numbers)
    assert found == [[True, False, True, False]] * 3
    assert on_threads(3, _dropped, 0.0, None) == [[False] * 4] * 3


def test_the_first_rank_draws_for_all():
    found = [on_threads(2, _dropped, 0.5, None) for _ in range(4)]
    assert all(first == second for first, second in found)
    assert {dropped for first, _ in found for dropped in first} == {True, False}


def test_draws_for_other_samples_are_refused():
    layer = StochasticDepth(0.5)
    layer.draws = torch.zeros(1)
    with pytest.raises(ValueError, match="has draws for 1 samples, got 3"):
        layer(torch.zeros(3, 2))


def test_a_plan_drops_nothing():
    model = _residual(0.5)
    report = plan_report(model, (1, 2, 9, 3), 2)
    assert (report.problems, report.unplanned) == ((), "")


def test_draws_belong_to_the_sample_wherever_it_is():
    together, apart = nn.ModuleList(), nn.ModuleList()
    for model in (together, apart):
        model.extend([Residual(0.3), Residual(0.3)])
    draw_stochastic_depths(together, seed=1, step=2, samples=[0, 1, 2])
    draw_stochastic_depths(apart, seed=1, step=2, samples=[2])
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a.depth.draws[2:], b.depth.draws)
    assert not torch.equal(together[0].depth.draws, together[1].depth.draws)
    draw_stochastic_depths(apart, seed=1, step=3, samples=[2])
    assert not torch.equal(together[0].depth.draws[2:], apart[0].depth.draws)


@pytest.mark.parametrize("ranks", THREADS)
def test_spread_groups_go_to_ranks_that_own_most_of_their_rows(ranks):
    bands = RowPartition(tuple(balanced_bounds(32, ranks)))
    groups = dilated(32, 4)
    owners = [Counter(map(bands.owner, groups.order[at : at + 4])) for at in range(0, 32, 4)]
    shares = assign_groups(bands, groups)
    kept = sum(of[rank] for rank, share in enumerate(shares) for of in owners[share])
    assert kept == sum(max(of.values()) for of in owners)

"""Layouts of views and slices: a part of the view equals the view of the part."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.bands.indices import ranges_of
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.thread_ranks import ThreadRanks
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.view.function_rules import NoRuleError
from credit_dp.domain_parallel.view.indexing import take_rows
from credit_dp.domain_parallel.view.shapes import view_layout
from credit_dp.domain_parallel.view.tensor import GlobalTensor, GlobalView, Layout, cut, whole

FACTORS = (1, 2, 3, 4, 6)


def _view(ranks, rank=0, world=None):
    transport = ThreadTransport(world or ThreadWorld(ranks), rank)
    return GlobalView(DomainParallelManager(ranks, ranks, transport=transport))


@st.composite
def reshapes(draw):
    """Return a shape, another one made by splitting and merging its dimensions, and a dimension."""
    shape = draw(st.lists(st.sampled_from(FACTORS), min_size=1, max_size=4))
    split = []
    for size in shape:
        factor = draw(st.sampled_from([f for f in FACTORS if size % f == 0]))
        split += draw(st.sampled_from([[size], [factor, size // factor]]))
    new = [split[0]]
    for size in split[1:]:
        if draw(st.booleans()):
            new[-1] *= size
        else:
            new.append(size)
    return shape, new, draw(st.sampled_from(range(len(shape))))


@settings(max_examples=60, deadline=None)
@given(reshapes(), st.sampled_from([1, 2]), st.sampled_from([2, 3]))
def test_the_part_of_a_reshaped_tensor_is_the_part_reshaped(case, outer, ranks):
    shape, new, dim = tuple(case[0]), tuple(case[1]), case[2]
    if shape[dim] % outer or shape[dim] // outer < ranks:
        return
    entries = shape[dim] // outer
    x = torch.arange(prod(shape)).reshape(shape)
    layout = Layout(dim, outer, RowPartition.balanced(entries, ranks))
    try:
        _, unit = view_layout(shape, layout, new)
    except NoRuleError:
        return
    layout = layout._replace(partition=RowPartition.in_multiples_of(entries, ranks, unit))
    result, _ = view_layout(shape, layout, new)
    assert result.size == new[result.dim]
    for rank in range(ranks):
        view = _view(ranks, rank)
        expected = cut(x.reshape(new), result, view)
        assert torch.equal(cut(x, layout, view).reshape(expected.shape), expected)


def test_layouts_of_usual_views():
    for shape, dim, outer, new, expected in [
        ((2, 3, 12, 8), 2, 1, (2, 3, 96), (2, 1, 96, 1)),  # tokens
        ((2, 3, 12, 8), 2, 1, (2, 3, 3, 4, 8), (2, 1, 3, 4)),  # windows
        ((2, 12, 8), 1, 1, (24, 8), (0, 2, 12, 1)),  # rows in the batch
        ((24, 8), 0, 2, (2, 12, 8), (1, 1, 12, 1)),  # and out of it again
    ]:
        layout, unit = view_layout(shape, Layout(dim, outer, RowPartition.balanced(12, 2)), new)
        assert (layout.dim, layout.outer, layout.partition.height, unit) == expected, new


@given(st.lists(st.integers(-1, 9), max_size=12))
def test_ranges_have_the_indices_that_they_are_made_of(indices):
    flat = []
    for rows in ranges_of(indices):
        if rows.zero_filled:
            flat += [-1] * rows.length
        else:
            flat += list(range(rows.start, rows.stop))[:: -1 if rows.flipped else 1]
    assert flat == indices


def _global(x, view, rows_dim=0):
    layout = Layout(rows_dim, 1, view.manager.partition(x.shape[rows_dim]))
    return GlobalTensor(cut(x, layout, view), layout, view)


def test_taken_rows_are_those_of_the_globe():
    x = torch.randn(9, 2)
    for indices in ([0, 2, 4, 6, 8], [7, 6, 5, 5, 0], [3, -1, 4, -1], [2]):
        expected = torch.stack([x[i] if i >= 0 else torch.zeros(2) for i in indices])
        world = ThreadWorld(3)

        def take(rank, indices=indices, world=world):
            return whole(take_rows(_global(x, _view(3, rank, world)), indices))

        for result in ThreadRanks(world, 60.0).run(take):
            assert torch.equal(result, expected), indices

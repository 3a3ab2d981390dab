"""Transposes of rows to channels and back, and their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.channel_parallel import (
    channel_slice,
    channels_per_rank,
    channels_to_rows,
    rows_to_channels,
)
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.errors import UserError
from tests.ranks import on_processes, on_threads


def _transpose_both_ways(manager, rows, channels, before, columns, dtype=torch.float64):
    """Compare with slices of the global tensor, bit by bit; return what was sent."""
    transport, rank = manager.transport, manager.domain_rank
    generator = torch.Generator().manual_seed(0)
    shape = (*before, sum(channels), sum(rows), columns)
    globe, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    row_slice, local_channels = channel_slice(rows, rank), channel_slice(channels, rank)
    sent_before = vars(transport.traffic).copy()

    band = globe[..., row_slice, :].clone().requires_grad_()
    transposed = rows_to_channels(band, rows, transport, channels)
    assert torch.equal(transposed, globe[..., local_channels, :, :])
    transposed.backward(cotangent[..., local_channels, :, :])
    assert torch.equal(band.grad, cotangent[..., row_slice, :])

    part = globe[..., local_channels, :, :].clone().requires_grad_()
    returned = channels_to_rows(part, rows, transport, channels)
    assert torch.equal(returned, globe[..., row_slice, :])
    returned.backward(cotangent[..., row_slice, :])
    assert torch.equal(part.grad, cotangent[..., local_channels, :, :])
    return {name: value - sent_before[name] for name, value in vars(transport.traffic).items()}


@st.composite
def _cuts(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    rows = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    channels = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    return ranks, tuple(rows), tuple(channels)


@given(cuts=_cuts(), before=st.sampled_from([(), (2,), (2, 3)]), columns=st.integers(1, 4))
def test_both_ways_and_their_gradients(cuts, before, columns):
    ranks, rows, channels = cuts
    on_threads(ranks, _transpose_both_ways, rows, channels, before, columns)


CASES = [((3, 2), (2, 1)), ((3, 2, 2), (1, 1, 0)), ((1, 4, 2, 2), (3, 0, 2, 1))]


@pytest.mark.parametrize(("rows", "channels"), CASES)
def test_on_gloo_ranks(rows, channels):
    on_processes(len(rows), _transpose_both_ways, rows, channels, (2,), 3, torch.bfloat16)


@pytest.mark.parametrize(("rows", "channels"), CASES)
def test_every_entry_moves_once_and_is_counted(rows, channels):
    sent = on_threads(len(rows), _transpose_both_ways, rows, channels, (2,), 3)
    unit = 2 * 3 * 8  # samples x columns x bytes
    for rank, of_rank in enumerate(sent):
        peers = [r for r in range(len(rows)) if r != rank]
        to_channels = [rows[rank] * channels[r] for r in peers]
        to_rows = [channels[rank] * rows[r] for r in peers]
        assert of_rank["bytes"] == 2 * unit * sum(to_channels + to_rows)  # each also as a gradient
        assert of_rank["messages"] == 2 * sum(size > 0 for size in to_channels + to_rows)
        assert of_rank["collectives"] == 0

    for rank in range(len(rows)):  # each counts the messages of all, without data and other ranks
        counting = CountingTransport(rank, len(rows))
        like = {"dtype": torch.float64, "device": "meta", "requires_grad": True}
        band = torch.empty(2, sum(channels), rows[rank], 3, **like)
        transposed = rows_to_channels(band, rows, counting, channels)
        channels_to_rows(transposed, rows, counting, channels).sum().backward()
        assert [s.bytes for s in counting.sent] == [of_rank["bytes"] for of_rank in sent]
        assert [s.messages for s in counting.sent] == [of_rank["messages"] for of_rank in sent]


def test_shares_differ_by_one_at_most():
    assert channels_per_rank(7, 3) == (3, 2, 2)
    assert channels_per_rank(2, 4) == (1, 1, 0, 0)
    assert [channel_slice((3, 2, 2), rank) for rank in range(3)] == [
        slice(0, 3),
        slice(3, 5),
        slice(5, 7),
    ]


def _default_shares(manager):
    rank = manager.domain_rank
    return tuple(rows_to_channels(torch.zeros(5, 2, 3), (2, 2), manager.transport).shape), rank


def test_channels_are_distributed_by_default():
    assert on_threads(2, _default_shares) == [((3, 4, 3), 0), ((2, 4, 3), 1)]


def _refused(manager, function, shape, *args, match):
    rows, *channels = args
    with pytest.raises(UserError, match=match):
        function(torch.zeros(shape), rows, manager.transport, *channels)


@pytest.mark.parametrize(
    ("function", "shape", "args", "match"),
    [
        (rows_to_channels, (4, 3, 2), ((2, 2),), r"needs 2 rows, got 3 of \(4, 3, 2\)"),
        (rows_to_channels, (4, 2, 2), ((2, 2), (2, 3)), "needs 5 channels, got 4"),
        (channels_to_rows, (2, 3, 2), ((2, 2), (2, 3)), "needs 4 rows, got 3"),
        (channels_to_rows, (5, 4, 2), ((2, 2), (2, 2)), "needs 2 channels, got 5"),
        (rows_to_channels, (4, 2, 2), ((2, 2, 2),), "rows: needs a number for each of 2 ranks"),
        (channels_to_rows, (2, 4, 2), ((2, 2), (4,)), "channels: needs a number for each of 2"),
    ],
)
def test_wrong_numbers_are_refused(function, shape, args, match):
    def refused(manager):
        _refused(manager, function, shape, *args, match=match)

    on_threads(2, refused)

"""Rows are sent once through the view, whatever form padding has, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit_dp.domain_parallel import shard_tensor
from tests.domain_parallel.band_tensor.functions import (
    CHANNELS,
    COLUMNS,
    RANKS,
    Model,
    check,
    compute_on_bands,
)
from tests.domain_parallel.band_tensor.sent_rows import ROWS, cases, conv, dilated, joined
from tests.ranks import on_threads
from tests.tables import entry


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_are_sent_once(ranks):
    for name, (function, rows, messages) in cases(ranks).items():
        with entry(name):
            sent = check(function, (2, CHANNELS, ROWS, COLUMNS), ranks)
            for of_pass in zip(*sent, strict=True):
                found = [sum(counts) for counts in zip(*of_pass, strict=True)]
                assert found[0] == pytest.approx(rows)
                assert messages in (None, found[1])


@pytest.mark.parametrize(
    ("dilations", "rows", "again"),
    [
        # Bands of 4 rows: the kernel reaches over the next one, of which it needs no row, or half.
        # Halos wider than the band are not kept: backward fetches their rows again. Of small bands
        # all rows are kept.
        ((8,), [4, 4, 4, 4], True),
        pytest.param((6,), [4, 6, 6, 4], True, marks=pytest.mark.exhaustive),
        pytest.param((4, 6, 8), [8, 12, 12, 8], False, marks=pytest.mark.exhaustive),
    ],
)
def test_convolutions_that_reach_over_a_band_send_each_row_once(dilations, rows, again, overlap):
    def function(m, x):
        return sum(dilated(m, x, dilation) for dilation in dilations)

    forward, backward = zip(*check(function, (2, CHANNELS, 16, COLUMNS), 4), strict=True)
    assert [sent for sent, _ in forward] == rows
    # Every rank returns the gradients of as many rows as it has received.
    assert sum(sent for sent, _ in backward) == (1 + (again and overlap)) * sum(rows)


@pytest.mark.slow
def test_many_rows_of_poles_become_bands():
    def beyond(rows):
        return rows.flip(2).roll(COLUMNS // 2, -1)

    def function(m, x):
        return conv(m, joined(x, 4, beyond), rows=9)

    sent = check(function, (2, CHANNELS, 24, COLUMNS), 4)
    # The slice of each pole becomes bands of one row, which are exchanged by the flip, and return.
    halos, of_poles = [4, 8, 8, 4], [3 + 2 + 1, 2 + 2, 2 + 2, 3 + 2 + 1]
    assert [forward for (forward, _), _ in sent] == [
        halo + of_pole for halo, of_pole in zip(halos, of_poles, strict=True)
    ]
    assert sum(backward for _, (backward, _) in sent) == sum(halos) + sum(of_poles)


def _change_rows(m, x):
    y = x * 1
    rows = y[:, :, :5]
    rows += 1
    return rows


def _change_rows_and_read_all(m, x):
    y = x * 1
    y[:, :, :5] += 1
    return y


def test_rows_move_once_to_where_they_are_changed_and_once_back():
    read, changed, both = (
        [forward[1] for forward, _ in check(function, (2, CHANNELS, 12, COLUMNS))]
        for function in (lambda m, x: x[:, :, :5], _change_rows, _change_rows_and_read_all)
    )
    assert changed == read
    assert sum(both) == 2 * sum(read) > 0


def _attention_costs(manager, count, shape):
    """Return what a rank sends in a forward and in a backward, and holds, relative to the tokens.

    With attention of `count` heads.
    """

    def attend_and_scale(model, x):
        q = x.flatten(2).transpose(1, 2).unflatten(-1, (count, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q * 2, q * 3, q * 4)
        return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)

    model = Model(attend_and_scale).double()
    compute_on_bands(model, manager, [shape])
    x = torch.randn(shape, dtype=torch.float64)
    local = shard_tensor(x, manager=manager)
    traffic = manager.transport.traffic
    before = traffic.bytes
    saved = {}

    def keep(y):
        saved[y.untyped_storage()._cdata] = y
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        y = model(local)
    forward = traffic.bytes - before
    held = sum(y.untyped_storage().nbytes() for y in saved.values() if y.ndim > 3)
    y.sum().backward()
    size = x.numel() * x.element_size()
    return forward / size, (traffic.bytes - before - forward) / size, held / size


@pytest.mark.parametrize(
    ("heads", "sent", "held"),
    [
        # Each rank has the queries, keys and values of two heads, and sends their results back: of
        # four tensors, 3/4 of its quarter. It holds its part of those and the input.
        (8, 4 * 3 / 16, 5 / 4),
        # Pairs of ranks share a head: its keys and values are sent to both.
        (2, 2 * (1 / 4 * 1 / 2) + 2 * (1 / 4 * 3 / 2), 2 * 1 / 2 + 3 / 4),
        # With one head keys and values are sent to all.
        (1, 2 * 3 / 4, 2 + 3 / 4),
    ],
)
def test_attention_sends_and_holds_what_its_heads_need(heads, sent, held):
    costs = on_threads(4, _attention_costs, heads, (1, CHANNELS, 16, COLUMNS))
    assert [forward for forward, _, _ in costs] == [sent] * 4
    assert [backward for _, backward, _ in costs] == [sent] * 4
    assert max(of_rank for _, _, of_rank in costs) <= held

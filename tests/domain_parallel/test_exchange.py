"""The exchange primitive: right rows, true adjoint, least bytes and messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.domain_parallel.exchange import POLE_MODES, RowExchange, RowRange, rows_with_poles
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.ranks import PROCESSES, on_processes, on_threads


@st.composite
def exchanges(draw):
    """Any bands (empty ones too) and any runs on every rank."""
    ranks = draw(st.sampled_from([2, 3, 4]))
    sizes = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any))
    partition = RowPartition.from_sizes(sizes)

    def run():
        start = draw(st.integers(0, partition.height - 1))
        stop = draw(st.integers(start + 1, partition.height))
        return RowRange(start, stop, *(draw(st.booleans()) for _ in range(2)))

    needs = []
    for _ in range(ranks):
        runs = [run() for _ in range(draw(st.integers(0, 3)))]
        if draw(st.booleans()):
            runs.insert(
                draw(st.integers(0, len(runs))),
                RowRange(0, draw(st.integers(1, 3)), zero_filled=True),
            )
        needs.append(tuple(runs))
    return partition, tuple(needs)


def _expected(x, runs):
    parts = [x[..., :0, :]]
    for run in runs:
        rows = x[..., run.start : run.stop, :]
        rows = rows.flip(-2) if run.flipped else rows
        rows = rows.roll(x.shape[-1] // 2, -1) if run.rotated else rows
        parts.append(torch.zeros_like(rows) if run.zero_filled else rows)
        if run.zero_filled:
            parts[-1] = x.new_zeros(*x.shape[:-2], run.length, x.shape[-1])
    return torch.cat(parts, -2)


def _check(manager, partition, needs):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, partition.height, 5, dtype=torch.float64, generator=generator)
    cotangents = [
        torch.randn(2, 3, sum(r.length for r in runs), 5, dtype=torch.float64, generator=generator)
        for runs in needs
    ]
    rank = manager.domain_rank
    rows = partition.rows(rank)
    x = whole[..., rows, :].clone().requires_grad_()
    before = vars(manager.transport.traffic).copy()
    result = RowExchange(partition, needs, rank).apply(x, manager.transport)
    assert torch.equal(result, _expected(whole, needs[rank]))

    after = vars(manager.transport.traffic).copy()
    wanted = {
        peer: {
            row
            for run in runs
            if not run.zero_filled
            for row in range(run.start, run.stop)
            if rows.start <= row < rows.stop
        }
        for peer, runs in enumerate(needs)
        if peer != rank
    }
    assert after["messages"] - before["messages"] == sum(1 for r in wanted.values() if r)
    assert after["bytes"] - before["bytes"] == sum(len(r) for r in wanted.values()) * 2 * 3 * 5 * 8

    reference = whole.clone().requires_grad_()
    sum(
        (_expected(reference, runs) * c).sum() for runs, c in zip(needs, cotangents, strict=True)
    ).backward()
    kept = cotangents[rank].clone()
    (result * 1).backward(cotangents[rank])
    assert torch.equal(cotangents[rank], kept)
    torch.testing.assert_close(x.grad, reference.grad[..., rows, :], rtol=1e-13, atol=1e-13)


@given(case=exchanges())
def test_rows_adjoint_and_bytes_on_threads(case):
    partition, needs = case
    on_threads(partition.ranks, _check, partition, needs)


@pytest.mark.parametrize("ranks", PROCESSES)
def test_rows_adjoint_and_bytes_on_processes(ranks):
    partition = RowPartition.balanced(3 * ranks + 1, ranks)
    height = partition.height
    needs = tuple(
        rows_with_poles(partition.bounds[r] - 5, partition.bounds[r + 1] + 4, height, "earth")
        for r in range(ranks)
    )
    on_processes(ranks, _check, partition, needs)
    whole = ((RowRange(0, height),),) * ranks
    on_processes(ranks, _check, partition, whole)


def _pad(x, width, mode):
    if mode == "zeros":
        return torch.nn.functional.pad(x, (0, 0, width, width))
    if mode in ("reflect", "replicate", "circular"):
        return torch.nn.functional.pad(x, (0, 0, width, width), mode=mode)
    rows = [x[..., :width, :].flip(-2), x[..., x.shape[-2] - width :, :].flip(-2)]
    if mode == "earth":
        rows = [r.roll(x.shape[-1] // 2, -1) for r in rows]
    return torch.cat([rows[0], x, rows[1]], -2)


@given(
    height=st.integers(2, 9),
    width=st.integers(0, 8),
    mode=st.sampled_from(POLE_MODES),
    data=st.data(),
)
def test_rows_beyond_the_poles(height, width, mode, data):
    width = min(width, height - 1)
    x = torch.arange(float(height * 4)).view(1, 1, height, 4)
    padded = _pad(x, width, mode)
    start = data.draw(st.integers(-width, height + width - 1))
    stop = data.draw(st.integers(start + 1, height + width))
    runs = rows_with_poles(start, stop, height, mode)
    assert torch.equal(_expected(x, runs), padded[..., start + width : stop + width, :])


def test_padding_wider_than_the_globe_is_refused():
    with pytest.raises(UserError, match="5 rows beyond a pole need as many on the globe"):
        rows_with_poles(-5, 3, 4, "reflect")


def _nothing_moves(manager):
    partition = RowPartition.balanced(7, manager.domain_parallel_size)
    needs = tuple((RowRange(partition.bounds[r], partition.bounds[r + 1]),) for r in range(2))
    x = torch.randn(1, 1, partition.sizes[manager.domain_rank], 3)
    assert RowExchange(partition, needs, manager.domain_rank).apply(x, manager.transport) is x


def test_own_rows_cost_nothing():
    on_threads(2, _nothing_moves)

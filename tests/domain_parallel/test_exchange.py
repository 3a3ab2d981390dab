"""Row exchanges: the rows, the adjoint, and as few bytes and messages as possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.domain_parallel.exchange import POLE_MODES, RowExchange, RowRange, rows_with_poles
from credit_dp.domain_parallel.halo_exchange import fetch_rows, start_fetching
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.ranks import PROCESSES, on_processes, on_threads, seeded


@st.composite
def exchanges(draw):
    """Draw any bands (empty ones too) and any ranges on every rank."""
    ranks = draw(st.sampled_from([2, 3, 4]))
    sizes = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any))
    partition = RowPartition.from_sizes(sizes)

    def row_range():
        start = draw(st.integers(0, partition.height - 1))
        stop = draw(st.integers(start + 1, partition.height))
        return RowRange(start, stop, *(draw(st.booleans()) for _ in range(2)))

    required_rows = []
    for _ in range(ranks):
        ranges = [row_range() for _ in range(draw(st.integers(0, 3)))]
        if draw(st.booleans()):
            ranges.insert(
                draw(st.integers(0, len(ranges))),
                RowRange(0, draw(st.integers(1, 3)), zero_filled=True),
            )
        required_rows.append(tuple(ranges))
    return partition, tuple(required_rows)


def _expected(x, ranges):
    parts = [x[..., :0, :]]
    for row_range in ranges:
        rows = x[..., row_range.start : row_range.stop, :]
        rows = rows.flip(-2) if row_range.flipped else rows
        rows = rows.roll(x.shape[-1] // 2, -1) if row_range.rotated else rows
        parts.append(torch.zeros_like(rows) if row_range.zero_filled else rows)
        if row_range.zero_filled:
            parts[-1] = x.new_zeros(*x.shape[:-2], row_range.length, x.shape[-1])
    return torch.cat(parts, -2)


def _check(manager, partition, required_rows):
    generator = seeded(0)
    globe = torch.randn(2, 3, partition.height, 5, dtype=torch.float64, generator=generator)
    cotangents = [
        torch.randn(
            2, 3, sum(r.length for r in ranges), 5, dtype=torch.float64, generator=generator
        )
        for ranges in required_rows
    ]
    rank = manager.domain_rank
    rows = partition.rows(rank)
    x = globe[..., rows, :].clone().requires_grad_()
    before = vars(manager.transport.traffic).copy()
    result = fetch_rows(x, RowExchange(partition, required_rows, rank), manager.transport)
    assert torch.equal(result, _expected(globe, required_rows[rank]))

    after = vars(manager.transport.traffic).copy()
    rows_of_peers = {
        peer: {
            row
            for row_range in ranges
            if not row_range.zero_filled
            for row in range(row_range.start, row_range.stop)
            if rows.start <= row < rows.stop
        }
        for peer, ranges in enumerate(required_rows)
        if peer != rank
    }
    assert after["messages"] - before["messages"] == sum(1 for r in rows_of_peers.values() if r)
    assert (
        after["bytes"] - before["bytes"]
        == sum(len(r) for r in rows_of_peers.values()) * 2 * 3 * 5 * 8
    )

    reference = globe.clone().requires_grad_()
    sum(
        (_expected(reference, ranges) * c).sum()
        for ranges, c in zip(required_rows, cotangents, strict=True)
    ).backward()
    cotangent_before = cotangents[rank].clone()
    (result * 1).backward(cotangents[rank])
    assert torch.equal(cotangents[rank], cotangent_before)
    torch.testing.assert_close(x.grad, reference.grad[..., rows, :], rtol=1e-13, atol=1e-13)


@given(case=exchanges())
def test_rows_adjoint_and_bytes_on_threads(case):
    partition, required_rows = case
    on_threads(partition.ranks, _check, partition, required_rows)


@pytest.mark.parametrize("ranks", PROCESSES)
def test_rows_adjoint_and_bytes_on_processes(ranks):
    partition = RowPartition.balanced(3 * ranks + 1, ranks)
    height = partition.height
    required_rows = tuple(
        rows_with_poles(partition.bounds[r] - 5, partition.bounds[r + 1] + 4, height, "earth")
        for r in range(ranks)
    )
    on_processes(ranks, _check, partition, required_rows)
    all_rows = ((RowRange(0, height),),) * ranks
    on_processes(ranks, _check, partition, all_rows)


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
    ranges = rows_with_poles(start, stop, height, mode)
    assert torch.equal(_expected(x, ranges), padded[..., start + width : stop + width, :])


def test_padding_wider_than_the_globe_is_refused():
    with pytest.raises(UserError, match="5 rows beyond a pole need as many on the globe"):
        rows_with_poles(-5, 3, 4, "reflect")


def _identity(manager):
    partition = RowPartition.balanced(7, manager.domain_parallel_size)
    required_rows = tuple(
        (RowRange(partition.bounds[r], partition.bounds[r + 1]),) for r in range(2)
    )
    x = torch.randn(1, 1, partition.sizes[manager.domain_rank], 3)
    exchange = RowExchange(partition, required_rows, manager.domain_rank)
    assert fetch_rows(x, exchange, manager.transport) is x


def test_an_identity_sends_nothing():
    on_threads(2, _identity)


def _collectives_meanwhile(manager):
    """Return gathers and sums of several types, called while rows travel, and these rows."""
    transport, rank = manager.transport, manager.domain_rank
    x = torch.full((1, 2, 3, 4), float(rank))
    partition = manager.bands[3 * manager.domain_parallel_size]
    north, south = (RowRange(0, 1), RowRange(partition.height - 1, partition.height))
    exchange = RowExchange(partition, ((north, south),) * partition.ranks, rank)
    finish = start_fetching(x, exchange, transport, -2)
    found = []
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.complex64):
        part = torch.arange(3).to(dtype) + rank
        if dtype.is_complex:
            part = (part * 1j).conj()
        elif dtype.is_floating_point:
            part.requires_grad_()
        gathered, total = transport.all_gather(part), transport.all_reduce(part.detach())
        assert gathered.dtype == total.dtype == dtype
        assert not gathered.requires_grad
        found.append((gathered.resolve_conj(), total.resolve_conj()))
    return found, finish()


def test_collectives_while_rows_travel():
    ranks = 3
    for found, rows in on_processes(ranks, _collectives_meanwhile):
        for gathered, total in found:
            expected = torch.stack([torch.arange(3) + rank for rank in range(ranks)])
            expected = (expected * (-1j if total.is_complex() else 1)).to(total.dtype)
            assert torch.equal(gathered, expected)
            assert torch.equal(total, expected.sum(0))
        assert rows[0, 0, :, 0].tolist() == [0.0, ranks - 1.0]

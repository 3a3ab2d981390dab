"""Direct halo exchanges, sharding and gathering of tensors, and a rank's position in the mesh."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelManager,
    HaloExchange,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    get_domain_parallel_manager,
    initialize_domain_parallel,
    shard_batch,
    shard_tensor,
)
from credit_dp.domain_parallel import manager as manager_module
from credit_dp.errors import UserError
from tests.domain_parallel.equality import THREADS
from tests.ranks import RankError, on_processes, on_threads, seeded
from tests.tables import entry


def _field(height, seed=0):
    generator = seeded(seed)
    return torch.randn(2, 3, height, 4, dtype=torch.float64, generator=generator)


def _halo(manager, height, width, dim):
    globe = _field(height).requires_grad_()
    padded = F.pad(globe, (0, 0, width, width))
    cotangent = torch.randn(padded.shape, generator=seeded(1)).double()
    rows = manager.rows(height)
    x = globe.detach()[..., rows, :].clone().requires_grad_()
    y = HaloExchange(width, dim, manager=manager)(x)
    wide = slice(rows.start, rows.stop + 2 * width)
    assert torch.equal(y, padded[..., wide, :])
    assert torch.equal(HaloExchange.trim(y, width, width, dim), x)

    # The ranks' outputs overlap: the gradient is that of the sum of all their losses.
    bounds = manager.partition(height).bounds
    parts = [
        padded[..., a : b + 2 * width, :] * cotangent[..., a : b + 2 * width, :]
        for a, b in pairwise(bounds)
    ]
    sum(part.sum() for part in parts).backward()
    y.backward(cotangent[..., wide, :])
    torch.testing.assert_close(x.grad, globe.grad[..., rows, :], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ranks", THREADS)
@given(rows=st.integers(1, 5), data=st.data())
def test_halo_equals_zero_padding(ranks, rows, data):
    width = data.draw(st.integers(0, rows))
    height = ranks * rows + data.draw(st.integers(0, ranks - 1))
    on_threads(ranks, _halo, height, width, data.draw(st.sampled_from([-2, 2])))


def _too_wide(manager):
    with pytest.raises(UserError, match="halo_width 3 needs as many rows in every band"):
        HaloExchange(3, manager=manager)(_field(8)[..., manager.rows(8), :])


def test_halo_wider_than_a_band_is_refused_on_every_rank():
    on_threads(3, _too_wide)


def _gather(manager, sizes):
    height = sum(sizes)
    globe = _field(height)
    start = sum(sizes[: manager.domain_rank])
    rows = slice(start, start + sizes[manager.domain_rank])
    x = globe[..., rows, :].clone().requires_grad_()
    y = gather_tensor(x, manager=manager)
    assert torch.equal(y, globe)
    cotangents = [_field(height, seed=7 + r) for r in range(len(sizes))]
    y.backward(cotangents[manager.domain_rank])
    torch.testing.assert_close(x.grad, sum(cotangents)[..., rows, :], rtol=1e-13, atol=1e-13)


def test_gather_undoes_any_bands():
    for sizes in [(3, 3), (1, 6), (2, 1, 4), (1, 1, 1, 5)]:
        with entry(sizes):
            on_threads(len(sizes), _gather, sizes)


Sample = namedtuple("Sample", "field flag")


def _batch(manager):
    globe = _field(7)
    rows = manager.rows(7)
    batch = {
        "x": globe,
        "list": [globe, "text"],
        "sample": Sample(globe, torch.ones(2, 5)),
        "profile": torch.ones(2, 3, 1, 4),
        "step": 3,
    }
    sharded = shard_batch(batch, manager=manager)
    for field in (sharded["x"], sharded["list"][0], sharded["sample"].field):
        assert torch.equal(field, globe[..., rows, :])
    assert sharded["sample"].flag is batch["sample"].flag
    assert sharded["profile"] is batch["profile"]
    assert (sharded["list"][1], sharded["step"]) == ("text", 3)
    with pytest.raises(UserError, match="1 rows can't be shared by 3 ranks"):
        shard_tensor(torch.ones(2, 3, 1, 4), manager=manager)


def test_shard_batch_cuts_fields_and_nothing_else():
    on_threads(3, _batch)


def _position(manager):
    return (
        manager.rank,
        manager.domain_rank,
        manager.dp_rank,
        manager.domain_world_size,
        manager.dp_world_size,
        manager.data_parallel_size,
        manager.is_first_domain_rank,
        manager.is_last_domain_rank,
        manager.neighbor_ranks(),
        torch.distributed.get_process_group_ranks(manager.domain_group),
        torch.distributed.get_process_group_ranks(manager.data_parallel_group),
    )


@pytest.mark.slow
def test_positions_in_a_2x2_mesh():
    positions = on_processes(4, _position, domain=2)
    assert positions[0] == (0, 0, 0, 2, 2, 2, True, False, (None, 1), [0, 1], [0, 2])
    assert positions[3] == (3, 1, 1, 2, 2, 2, False, True, (2, None), [2, 3], [1, 3])


def test_one_process_needs_no_manager(monkeypatch):
    monkeypatch.setattr(manager_module, "_default_manager", None)
    x, conv = _field(5), nn.Conv2d(3, 3, 3, 2, 1).double()
    layer = DomainParallelConv2d(conv)
    assert torch.equal(layer(x), conv(x))
    assert torch.equal(HaloExchange(2)(x), F.pad(x, (0, 0, 2, 2)))
    assert shard_tensor(x) is x
    assert gather_tensor(x) is x
    # A manager that is initialised later is that of the layer, too.
    manager = initialize_domain_parallel(1, 1)
    assert layer.manager is manager


def test_what_may_be_one_of_several_ranks_needs_a_manager(monkeypatch):
    monkeypatch.setattr(manager_module, "_default_manager", None)
    layer, x = DomainParallelConv2d(nn.Conv2d(3, 3, 3)), _field(5).float()
    with pytest.raises(RankError, match="there is no manager"):
        on_threads(2, lambda manager: layer(x))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="there is no manager"):
        layer(x)


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.setattr(manager_module, "_default_manager", None)
    with pytest.raises(UserError, match="there is no manager"):
        get_domain_parallel_manager()
    manager = initialize_domain_parallel(1, 1)
    assert get_domain_parallel_manager() is manager
    assert (manager.domain_group, manager.data_parallel_group) == (None, None)
    assert manager.neighbor_ranks() == (None, None)
    x = _field(5)
    assert shard_tensor(x) is x
    assert gather_tensor(x) is x
    assert HaloExchange(2)(x).shape == (2, 3, 9, 4)


def test_impossible_meshes():
    with pytest.raises(UserError, match="4 ranks can't be split into domains of 3"):
        DomainParallelManager(4, 3)
    with pytest.raises(UserError, match="needs 2 ranks, 1 are running"):
        DomainParallelManager(2, 2)


def _copies(manager):
    assert copy.deepcopy(manager) is manager
    copied = pickle.loads(pickle.dumps(manager))  # noqa: S301
    assert (copied.domain_rank, copied.domain_group) == (manager.domain_rank, None)
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.GroupNorm(1, 1))
    convert_to_domain_parallel(model, manager, input_shape=(1, 1, 8, 4))
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301
    for layer in (loaded, loaded[0], loaded[1]):
        with pytest.raises(UserError, match=r"was unpickled .* Convert the model again"):
            layer(torch.zeros(1, 1, 4, 4))
    plain = convert_from_domain_parallel(loaded)
    again = convert_to_domain_parallel(plain, manager, input_shape=(1, 1, 8, 4))
    x = torch.ones(1, 1, 4, 4)
    torch.testing.assert_close(again(x), model(x))


@pytest.mark.slow
def test_copies_of_a_manager():
    on_processes(2, _copies)


def _hang(manager):
    if manager.domain_rank == 0:
        manager.transport.all_gather(torch.zeros(1))


@pytest.mark.slow
def test_a_rank_that_waits_for_nothing_fails(monkeypatch):
    assert on_processes(2, _position, domain=1)  # so that starting them does not count
    with monkeypatch.context() as short:
        short.setattr("tests.ranks.TIMEOUT", 2.0)
        with pytest.raises(RankError, match="not finished after 2 s: rank 0 is at"):
            on_threads(2, _hang)
        with pytest.raises(RankError, match=r"ranks \[0\] hang"):
            on_processes(2, _hang)
    assert on_processes(2, _position, domain=1)

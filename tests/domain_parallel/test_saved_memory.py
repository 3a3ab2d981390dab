"""A sharded model saves for backward each rank's share of what the unsharded one saves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from tests.domain_parallel.equality import THREADS, in_both_ways
from tests.ranks import on_threads

SHAPE = (1, 16, 61, 24)


def _stack():
    blocks = [(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def _saved_bytes(model, x):
    """Return the bytes that a forward pass saves: each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x.requires_grad_())
    y.sum().backward()
    return sum(size for address, size in saved.items() if address not in parameters)


def _share(manager):
    unsharded = _stack()
    sharded = convert_to_domain_parallel(copy.deepcopy(unsharded), manager, input_shape=SHAPE)
    x = torch.randn(SHAPE)
    band = shard_tensor(x, manager=manager)
    # A halo on either side of each of four convolutions.
    halos = 8 * x[..., :1, :].numel() * x.element_size()
    saved, total = _saved_bytes(sharded, band), _saved_bytes(unsharded, x)
    rows = band.shape[-2] / SHAPE[-2]
    assert saved <= rows * total + halos + 0.01 * total
    return saved / total


@in_both_ways
@pytest.mark.parametrize("ranks", THREADS)
def test_a_rank_saves_its_share(ranks):
    shares = on_threads(ranks, _share)
    assert max(shares) <= 1.1 / ranks + 2 / SHAPE[-2]

"""A training step of the U-Net sends exactly the rows that other bands need, each once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from credit_dp.config import ParallelConfig, UNetConfig
from credit_dp.config.model import UNET_UPSAMPLING
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.models.unet import MatchRows, PeriodicConv2d, PeriodicUpsample, UNet
from credit_dp.training.model_parts import wrap_in_ddp
from tests.domain_parallel.equality import RANDOM_LOCK, THREADS
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers

BYTES = 8  # float64
RESAMPLING = (nn.ConvTranspose2d, nn.Upsample, PeriodicUpsample, MatchRows)


def _needed(layer, inputs, out_rows):
    """Return the input rows that influence some output rows, by differentiating the layer."""
    x, *others = (torch.rand_like(i) + 0.5 for i in inputs)
    x.requires_grad_()
    positive = copy.deepcopy(layer)
    for parameter in positive.parameters():  # so that influences don't cancel
        nn.init.constant_(parameter, 1.0)
    positive(x, *others)[..., out_rows, :].sum().backward()
    return set(x.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist())


def _least(manager, model, x):
    """Return the least traffic of this rank in a step, from the layers of the unsharded model."""
    calls, norms, hooks = [], [], []
    for layer in model.modules():
        if isinstance(layer, (PeriodicConv2d, *RESAMPLING)):
            hooks.append(layer.register_forward_hook(lambda m, i, o: calls.append((m, i, o))))
        if isinstance(layer, nn.GroupNorm):
            hooks.append(layer.register_forward_hook(lambda m, i, o: norms.append((m, i))))
    model(x)
    for hook in hooks:
        hook.remove()
    rank, messages, size = manager.domain_rank, 0, 0
    for layer, inputs, output in calls:
        input_bands = manager.partition(inputs[0].shape[-2])
        output_bands = manager.partition(output.shape[-2])
        row = inputs[0][..., 0, :].numel() * BYTES
        for peer in range(input_bands.ranks):
            if peer == rank:
                continue
            local_rows = set(range(input_bands.height)[input_bands.rows(rank)])
            peer_rows = set(range(input_bands.height)[input_bands.rows(peer)])
            to_peer = _needed(layer, inputs, output_bands.rows(peer)) & local_rows
            back_to_peer = _needed(layer, inputs, output_bands.rows(rank)) & peer_rows
            if inputs[0] is x:
                back_to_peer = set()  # the model's input needs no gradient
            messages += bool(to_peer) + bool(back_to_peer)
            size += (len(to_peer) + len(back_to_peer)) * row
    moments = sum(2 * len(inputs[0]) * layer.num_groups * BYTES for layer, inputs in norms)
    return {
        "messages": messages,
        "bytes": size,
        "collectives": 2 * len(norms),
        "collective_bytes": 2 * moments,
    }


def _step(manager, rows, upsample="bilinear"):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        config = UNetConfig(channels=[4, 8, 8], blocks=1, groups=2, upsample=upsample)
        unsharded = UNet(config, 3, 2).double()
        x = torch.randn(2, 3, rows, 8, dtype=torch.float64)
    model = shard_model(copy.deepcopy(unsharded), manager, x.shape)
    model(x[..., manager.rows(rows), :].contiguous()).sum().backward()
    with torch.random.fork_rng():
        least = _least(manager, unsharded, x)
    assert vars(manager.transport.traffic) == least
    return least


HEIGHTS = [(32, "bilinear"), *((121, upsample) for upsample in UNET_UPSAMPLING)]


@pytest.mark.parametrize("ranks", THREADS)
@pytest.mark.parametrize(("rows", "upsample"), tiers(HEIGHTS[:1], HEIGHTS[1:3], HEIGHTS[3:]))
def test_a_step_sends_the_least_on_threads(ranks, rows, upsample):
    sent = on_threads(ranks, _step, rows, upsample)
    assert all(least["messages"] > 0 for least in sent)


def _fresh_step(manager, rows):
    manager.transport.traffic.__init__()
    return _step(manager, rows)


@pytest.mark.slow
def test_a_step_sends_the_least_on_processes():
    on_processes(3, _fresh_step, 181)


def _gradients(manager):
    torch.manual_seed(0)
    model = UNet(UNetConfig(channels=[4, 8], blocks=1, groups=2), 3, 2).double()
    shard_model(model, manager, (2, 3, 12, 8))
    averaged = wrap_in_ddp(model, ParallelConfig())
    sent = []

    def count(state, bucket):
        sent.append(bucket.buffer().numel() * BYTES)
        return allreduce_hook(state, bucket)

    averaged.register_comm_hook(None, count)
    rows = manager.partition(12).sizes[manager.domain_rank]
    averaged(torch.randn(2, 3, rows, 8, dtype=torch.float64)).sum().backward()
    return sum(sent), sum(p.numel() * BYTES for p in model.parameters())


@pytest.mark.slow
def test_every_gradient_is_reduced_once():
    for sent, parameters in on_processes(4, _gradients, domain=2):
        assert sent == parameters

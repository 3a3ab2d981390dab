"""Spectral and weight norm in both forms: bands and whole globe give equal state and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelPeriodicConv2d,
    convert_to_domain_parallel,
    shard_tensor,
)
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import RANDOM_LOCK, error, in_both_ways
from tests.domain_parallel.models import Moved
from tests.ranks import on_processes, on_threads, seeded
from tests.tier_cases import tiers

# The old forms set `weight` in a hook before every forward; the new ones make a type of their own.
NORMS = {
    "spectral": parametrizations.spectral_norm,
    "weight": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "old spectral": nn.utils.spectral_norm,
    "old weight": nn.utils.weight_norm,
}
SHAPE = (2, 2, 9, 6)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


class _Channels(nn.Module):
    """A linear layer on channels, and parametrised parameters of its own."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.ones(4))
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.linear(x.movedim(1, -1).contiguous() @ self.mix * self.scale).movedim(-1, 1)


class _Positive(nn.Module):
    def forward(self, x):
        return nn.functional.softplus(x)


def _model(name):
    """Sharded, kept and apart layers with the norm, and a periodic one whose inner layer has it."""
    norm = NORMS[name]
    with RANDOM_LOCK, torch.no_grad():
        torch.manual_seed(0)
        periodic, group_norm = PeriodicConv2d(4, 2), nn.GroupNorm(2, 4)
        norm(periodic.conv)
        channels = norm(_Channels(norm(nn.Linear(4, 4))), "mix")
        for module, parameter in ((group_norm, "weight"), (channels, "scale")):
            register_parametrization(module, parameter, _Positive())
        model = nn.Sequential(
            norm(nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate")),
            norm(nn.Conv2d(4, 4, 1)),
            group_norm,
            channels,
            norm(nn.ConvTranspose2d(4, 4, 4, 2, 1)),
            Moved(norm(nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1))), "times"),
            Moved(norm(nn.Conv1d(4, 4, 3, padding=1)), "samples"),
            periodic,
        )
    return model.double()


def _convert(model, manager):
    converters = {PeriodicConv2d: DomainParallelPeriodicConv2d}
    with RANDOM_LOCK:  # planning restores the random state, which another rank may draw from
        return convert_to_domain_parallel(
            model, manager, custom_converters=converters, input_shape=SHAPE
        )


def _attributes(model):
    for module in model.modules():
        for holder in (module, module.__dict__.get("wrapped", module)):
            yield from vars(holder).values()


def _train(model, x, cotangent):
    """Several forwards before one backward, and an evaluation: what the norms' state depends on."""
    made = [model(x) for _ in range(3)]
    (made[1] * cotangent).sum().backward()
    model.eval()
    made.append(model(x))
    ((made[2] + made[3]) * cotangent).sum().backward()
    return [y.detach() for y in made]


def _assert_same(manager, name):
    whole = _model(name)
    sharded = _convert(copy.deepcopy(whole), manager)
    assert not any(isinstance(value, FakeTensor) for value in _attributes(sharded))
    before = sharded.state_dict()
    assert list(before) == list(whole.state_dict())
    assert all(torch.equal(before[key], value) for key, value in whole.state_dict().items())

    generator = seeded(0)
    x = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    cotangent = torch.randn(2, 2, 18, 12, dtype=torch.float64, generator=generator)
    expected = _train(whole, x, cotangent)
    bands = [shard_tensor(t, manager=manager) for t in (x, cotangent)]
    for y, y_whole in zip(_train(sharded, *bands), expected, strict=True):
        assert error(y, shard_tensor(y_whole, manager=manager)) < 1e-12
    for key, value in whole.state_dict().items():
        assert torch.equal(sharded.state_dict()[key], value), key
    sums = {k: manager.transport.all_reduce(p.grad) for k, p in sharded.named_parameters()}
    largest = max(p.grad.abs().max().item() for p in whole.parameters())
    for key, parameter in whole.named_parameters():
        assert error(sums[key], parameter.grad, 1e-3 * largest) < 1e-11, key


@pytest.mark.parametrize(
    "name",
    tiers(
        fast=[("spectral",)],
        slow=[("orthogonal",), ("old weight",)],
        exhaustive=[("weight",), ("old spectral",)],
    ),
)
@in_both_ways
def test_norms_of_weights(name):
    on_threads(3, _assert_same, name)


@pytest.mark.slow
def test_norms_of_weights_on_gloo_ranks():
    on_processes(2, _assert_same, "old spectral")


@pytest.mark.parametrize("name", tiers(fast=[("old spectral",)], slow=[("orthogonal",)]))
def test_checkpoints_move_both_ways(name):
    def loads(manager):
        whole = _model(name)
        sharded = _convert(copy.deepcopy(whole), manager)
        other = copy.deepcopy(whole.state_dict())
        for value in other.values():
            value.copy_(torch.linspace(0.5, 1.5, value.numel()).view(value.shape))
        for source, target in ((other, sharded), (sharded.state_dict(), whole)):
            target.load_state_dict(source)
            assert all(torch.equal(target.state_dict()[key], other[key]) for key in other)

    on_threads(2, loads)


def test_the_rule_is_that_of_the_plain_type():
    def convert(manager):
        model = _convert(_model("spectral"), manager)
        assert isinstance(model[0], DomainParallelConv2d)
        assert "kernel_size=(3, 3)" in repr(model[0])
        assert type(model[1]).__bases__ == (nn.Conv2d,)
        assert type(model[3]).__bases__ == (_Channels,)

    on_threads(2, convert)

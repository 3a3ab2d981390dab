"""Every sharded layer equals the layer on the whole globe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
    DomainParallelPeriodicConv2d,
    shard_tensor,
)
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import OPERATOR, assert_same_as_whole_globe
from tests.ranks import PROCESSES, on_processes, on_threads, seeded

RANKS = st.sampled_from([2, 3, 4])


def _norm(groups, affine):
    norm = nn.GroupNorm(groups, 4, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@given(
    ranks=RANKS,
    height=st.integers(4, 13),
    groups=st.sampled_from([1, 2, 4]),
    affine=st.booleans(),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_group_norm(ranks, height, groups, affine, offset):
    tolerance = OPERATOR * max(1.0, 100 * offset)
    args = (_norm, (groups, affine), (2, 4, height, 5), tolerance, offset)
    on_threads(ranks, assert_same_as_whole_globe, *args)


def _stack(norm):
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1)]
    return nn.Sequential(*layers, *([nn.GroupNorm(2, 4)] if norm else []), nn.Conv2d(4, 3, 5, 1, 2))


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("height", [8, 61])
@pytest.mark.parametrize("ranks", PROCESSES)
def test_a_stack_on_gloo_ranks(ranks, planned, height):
    args = (_stack, (True,), (2, 2, height, 5), 1e-11, 0.0, planned)
    on_processes(ranks, assert_same_as_whole_globe, *args)


def _by_hand(manager, wrap, make, shape):
    """Build a wrapper without the converter, on bands that differ from the balanced ones."""
    generator = seeded(0)
    layer = make().double()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    cut = {2: (0, 3, shape[-2]), 3: (0, 1, 6, shape[-2])}[manager.domain_parallel_size]
    rank = manager.domain_rank
    y = wrap(layer, manager=manager)(x[..., cut[rank] : cut[rank + 1], :].contiguous())
    expected = layer(x)
    bounds = manager.bands[expected.shape[-2]].rows(rank)
    torch.testing.assert_close(y, expected[..., bounds, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 3, padding=1)),
        (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 4, stride=2, padding=1)),
        (DomainParallelConvTranspose2d, lambda: nn.ConvTranspose2d(2, 4, 4, 2, 1)),
        (DomainParallelGroupNorm, lambda: nn.GroupNorm(1, 2)),
        (DomainParallelPeriodicConv2d, lambda: PeriodicConv2d(2, 4)),
    ],
)
def test_wrappers_built_by_hand_take_any_bands(ranks, wrap, make):
    on_threads(ranks, _by_hand, wrap, make, (1, 2, 10, 4))


def test_attributes_of_the_wrappers():
    norm = DomainParallelGroupNorm(nn.GroupNorm(2, 4, eps=1e-3))
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (2, 4, 1e-3, True)


class _Checkpointed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x


def _checkpointed():
    return _Checkpointed(*(_stack(True) for _ in range(2)), nn.Conv2d(3, 2, 1))[:1]


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("ranks", [2, 3])
def test_checkpointed_layers_exchange_again(ranks):
    on_threads(ranks, assert_same_as_whole_globe, _checkpointed, (), (2, 2, 16, 5), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_in_half_precision_is_as_exact_as_torch(dtype):
    def half(manager):
        generator = seeded(0)
        x = (300 * torch.randn(1, 4, 12, 8, generator=generator)).to(dtype)
        layer = DomainParallelGroupNorm(nn.GroupNorm(2, 4).to(dtype), manager=manager)
        y = layer(shard_tensor(x, manager=manager))
        exact = shard_tensor(nn.functional.group_norm(x.double(), 2), manager=manager)
        assert y.dtype == dtype
        assert (y.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps

    on_threads(2, half)


def _float32_norm(manager):
    generator = seeded(0)
    x = torch.randn(1, 4, 16, 32, generator=generator) + 1e4
    layer = DomainParallelGroupNorm(nn.GroupNorm(2, 4), manager=manager)
    y = layer(shard_tensor(x, manager=manager))
    exact = nn.functional.group_norm(x.double(), 2)
    band = shard_tensor(exact, manager=manager)
    whole = nn.functional.group_norm(x, 2)
    error = (y.double() - band).abs().max()
    assert error <= 4 * (whole.double() - exact).abs().max()


def test_group_norm_in_float32_is_as_exact_as_torch():
    on_threads(3, _float32_norm)

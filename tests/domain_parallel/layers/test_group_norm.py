"""Group norm over bands: any memory format and dtype, as exact and as lean as torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelGroupNorm,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.halo_exchange import CHANNELS_LAST_FORMATS
from credit_dp.domain_parallel.layers import base, group_norm
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import on_threads, seeded


@pytest.fixture(params=["small", "chunked", "as on GPUs"])
def way(request, monkeypatch):
    """Run a test in all ways to normalise."""
    if request.param == "small":
        request.getfixturevalue("small_bands")
    monkeypatch.setattr(group_norm, "is_chunked", lambda x: request.param != "as on GPUs")


@given(
    ranks=st.sampled_from([2, 3, 8]),
    groups=st.sampled_from([1, 2, 3, 6]),
    batch=st.integers(1, 4),
    affine=st.booleans(),
    at_once=st.none() | st.integers(1, 400),
    others=st.sampled_from([(), (2,)]),
    build=st.sampled_from(
        [nn.GroupNorm, lambda *args: nn.Sequential(_Last(), nn.GroupNorm(*args))]
    ),
)
def test_exact_in_pieces_and_small(ranks, groups, batch, affine, at_once, others, build):
    shape = (batch, 6, *others, ranks + 3, 5)
    with pytest.MonkeyPatch.context() as patch:
        if at_once is None:
            patch.setattr(base, "SMALL_BAND_ENTRIES", 2**16)
        else:
            patch.setattr(group_norm, "CHUNK_ENTRIES", at_once)
        args = (build, (groups, 6, 1e-5, affine), shape)
        on_threads(ranks, assert_same_as_whole_globe, *args)


class _Last(nn.Module):
    """Puts channels last."""

    def forward(self, x):
        return _last(x)


def _last(x):
    return x.to(memory_format=CHANNELS_LAST_FORMATS[x.ndim])


def _step(layer, x, cotangent):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(cotangent)
    return [y.detach(), x.grad], [p.grad for p in layer.parameters()]


def _both(manager, dtype, mean, change=lambda x: x, shape=(2, 6, 17, 16)):
    """Return the results of torch, of torch in float64, and of the sharded layer."""
    generator = seeded(0)
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    cotangent = torch.randn(shape, generator=generator).to(dtype)
    norms = [nn.GroupNorm(3, 6).to(kind) for kind in (dtype, torch.float64, dtype)]
    with torch.no_grad():
        norms[0].weight.uniform_(0.5, 2, generator=generator)
    for norm in norms[1:]:
        norm.load_state_dict(norms[0].state_dict())
    whole = _step(norms[0], x, cotangent)
    exact = _step(norms[1], x.double(), cotangent.double())
    layer = DomainParallelGroupNorm(norms[2], manager=manager)
    band, its = (change(shard_tensor(t, manager=manager)) for t in (x, cotangent))
    fields, grads = _step(layer, band, its)
    sharded = [gather_tensor(t, manager=manager) for t in fields]
    totals = [manager.transport.all_reduce(g) for g in grads]
    return sharded + totals, [*whole[0], *whole[1]], [*exact[0], *exact[1]]


def _as_exact_as_torch(manager, dtype, mean, change, shape=(2, 6, 17, 16)):
    for ours, theirs, exact in zip(*_both(manager, dtype, mean, change, shape), strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - exact).abs().max()
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        assert error <= 2 * (theirs.double() - exact).abs().max() + 2 * rounding


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        (torch.float32, 0.0),
        (torch.float32, 1e4),
        (torch.bfloat16, 3.0),
        (torch.float16, 3.0),
    ],
)
@pytest.mark.parametrize("change", [lambda x: x, _last])
@pytest.mark.usefixtures("way")
def test_as_exact_as_torch(dtype, mean, change):
    on_threads(3, _as_exact_as_torch, dtype, mean, change)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.usefixtures("way")
def test_large_mean_of_many_rows(ranks):
    args = (torch.float32, 1e5, _last, (1, 6, 22 * ranks, 64))
    on_threads(ranks, _as_exact_as_torch, *args)


def _mixed(manager, fields, cotangents):
    """Channels last for some ranks' fields and cotangents only."""
    calls = iter((fields, cotangents))

    def change(x):
        return _last(x) if manager.rank in next(calls) else x

    for ours, _, exact in zip(*_both(manager, torch.float64, 2.0, change), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fields", [(0, 1, 2), (1,), ()])
@pytest.mark.parametrize("cotangents", [(0, 1, 2), (0, 2), ()])
@pytest.mark.usefixtures("way")
def test_channels_last_on_some_ranks(fields, cotangents):
    on_threads(3, _mixed, fields, cotangents)


def _empty(manager):
    x = torch.zeros(0, 6, 4, 5, requires_grad=True)
    y = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)


@pytest.mark.usefixtures("way")
def test_no_samples():
    on_threads(2, _empty)


def _too_many_channels(manager):
    with pytest.raises(RuntimeError):
        DomainParallelGroupNorm(nn.GroupNorm(2, 2), manager=manager)(torch.ones(1, 4, 4, 5))


@pytest.mark.usefixtures("way")
def test_other_channels_are_refused_as_by_torch():
    on_threads(2, _too_many_channels)


def _before_writes():
    norms = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6), nn.BatchNorm2d(6)
    return nn.Sequential(*(layer for norm in norms for layer in (norm, nn.ReLU(inplace=True))))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("ranks", [2, 3])
def test_its_output_may_be_changed_in_place(ranks):
    shape = (2, 6, 2 * ranks + 1, 5)
    on_threads(ranks, assert_same_as_whole_globe, _before_writes, (), shape, 1e-11)


def _large_constant(manager):
    x = _last(shard_tensor(torch.full((2, 6, 40, 37), 5e5 / 3), manager=manager))
    for norm in (nn.GroupNorm(3, 6), nn.BatchNorm2d(6), nn.InstanceNorm2d(6)):
        assert not convert_to_domain_parallel(norm, manager)(x).any()


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_constant_input(ranks):
    on_threads(ranks, _large_constant)


def _constant(manager):
    x = torch.full((1, 6, 9, 5), 7.0)
    layer = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)
    fields, _ = _step(layer, shard_tensor(x, manager=manager), torch.ones(()).expand(1, 6, 3, 5))
    assert fields[0].abs().max() <= 1e-5 * layer.eps**-0.5
    assert fields[1].isfinite().all()


@pytest.mark.usefixtures("way")
def test_constant_input():
    on_threads(3, _constant)


def _collectives(manager):
    x = shard_tensor(torch.randn(2, 6, 8, 5), manager=manager)
    layer = convert_to_domain_parallel(nn.GroupNorm(3, 6), manager, input_shape=(2, 6, 8, 5))
    layer.eval()  # without the comparison of parameters
    found = []
    for needs in (True, False):
        before = manager.transport.traffic.collectives
        y = layer(x.requires_grad_(needs))
        forward = manager.transport.traffic.collectives
        y.sum().backward()
        found.append((forward - before, manager.transport.traffic.collectives - forward))
    assert found == [(1, 1), (1, 0)]


@pytest.mark.usefixtures("way")
def test_one_collective_forward_and_one_backward():
    on_threads(2, _collectives)


def _kept(manager):
    x = shard_tensor(torch.randn(1, 6, 64, 64).bfloat16(), manager=manager).requires_grad_()
    layer = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.silu(layer(x))
    return sum(t.untyped_storage().nbytes() for t in kept) / x.untyped_storage().nbytes()


def test_half_precision_keeps_no_float32_copy():
    assert max(on_threads(2, _kept)) < 2.1  # its input, and that of SiLU

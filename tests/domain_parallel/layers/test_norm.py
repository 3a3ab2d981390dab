"""Norms over rows equal those of the whole globe, with their running statistics."""

from __future__ import annotations

import copy

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
    plan_report,
    shard_tensor,
)
from credit_dp.domain_parallel.bands import group_norm
from credit_dp.domain_parallel.halo_exchange import CHANNELS_LAST_FORMATS
from tests.domain_parallel.equality import (
    OPERATOR,
    THREADS,
    assert_same_as_whole_globe,
    halos_travel,
)
from tests.ranks import on_threads, seeded
from tests.tables import entry

OFFSETS = st.sampled_from([0.0, 1e4])


def _tolerance(offset):
    return OPERATOR * max(1.0, 100 * offset)


def _randomised(norm, training=True):
    """Give a layer random parameters and running statistics."""
    generator = seeded(1)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    return norm.train(training)


@st.composite
def statistics(draw):
    options = {
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.1, 0.7, None])),
        "eps": draw(st.sampled_from([1e-5, 1e-2])),
    }
    return options, draw(st.booleans())


class _Tokens(nn.Module):
    """Rows and columns in one dimension, as transformers have them."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.flatten(2)).unflatten(2, x.shape[2:])


def _norm(kind, options, training):
    norm = _randomised(kind(4, **options), training)
    return _Tokens(norm) if "1d" in kind.__name__ else norm


@pytest.mark.parametrize("ranks", THREADS)
@given(
    kind=st.sampled_from(
        [getattr(nn, f"{name}Norm{n}d") for name in ("Batch", "Instance") for n in (1, 2, 3)]
    ),
    options=statistics(),
    height=st.integers(8, 17),
    offset=OFFSETS,
)
def test_batch_and_instance_norm(ranks, kind, options, height, offset):
    shape = (2, 4, 2, height, 3) if "3d" in kind.__name__ else (3, 4, height, 5)
    args = (_norm, (kind, *options), shape, _tolerance(max(offset, 0.1)), offset)
    on_threads(ranks, assert_same_as_whole_globe, *args)


def _layer_norm(kind, shape, options):
    return _randomised(kind(shape, **options))


@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(8, 17),
    leading=st.integers(0, 2),
    affine=st.booleans(),
    eps=st.sampled_from([None, 1e-5, 1e-2]),
    offset=OFFSETS,
    data=st.data(),
)
def test_layer_and_rms_norm(ranks, height, leading, affine, eps, offset, data):
    shape = (2, 4, height, 5)
    options = {"elementwise_affine": affine, "eps": eps}
    kind = nn.RMSNorm
    if eps is not None and data.draw(st.booleans()):
        kind, options["bias"] = nn.LayerNorm, data.draw(st.booleans())
    args = (_layer_norm, (kind, shape[leading + 1 :], options), shape, _tolerance(offset), offset)
    on_threads(ranks, assert_same_as_whole_globe, *args)


def _last(x):
    return x.to(memory_format=CHANNELS_LAST_FORMATS[x.ndim])


class _Last(nn.Module):
    """Puts channels last."""

    def forward(self, x):
        return _last(x)


@pytest.mark.parametrize("ranks", THREADS)
@given(
    groups=st.sampled_from([1, 2, 3, 6]),
    batch=st.integers(1, 4),
    affine=st.booleans(),
    at_once=st.none() | st.integers(1, 400),
    others=st.sampled_from([(), (2,)]),
    more=st.integers(0, 8),
    build=st.sampled_from(
        [
            lambda *args: _randomised(nn.GroupNorm(*args)),
            lambda *args: nn.Sequential(_Last(), _randomised(nn.GroupNorm(*args))),
        ]
    ),
)
def test_group_norm_in_pieces_and_small(ranks, groups, batch, affine, at_once, others, more, build):
    args = (build, (groups, 6, 1e-5, affine), (batch, 6, *others, ranks + more, 5))
    with pytest.MonkeyPatch.context() as patch, halos_travel(meanwhile=at_once is not None):
        if at_once is not None:
            patch.setattr(group_norm, "CHUNK_ENTRIES", at_once)
        on_threads(ranks, assert_same_as_whole_globe, *args)


class _Moves(nn.Module):
    """A norm of a field whose dimensions are in another order."""

    def __init__(self, norm, order):
        super().__init__()
        self.norm = norm
        self.order = order

    def forward(self, x):
        return self.norm(x.permute(self.order)).permute([self.order.index(d) for d in range(4)])


# Build, shape of the input and tolerance.
OTHERS = {
    # The sums over a band of one entry are its entries, of which backward makes the gradient.
    "one entry, batch": (lambda: nn.BatchNorm2d(4), (1, 4, 3, 1), 1e-10),
    "one entry, instance": (lambda: nn.InstanceNorm2d(4, affine=True), (1, 4, 3, 1), 1e-10),
    "one entry, layer": (lambda: nn.LayerNorm((3, 1)), (1, 4, 3, 1), 1e-10),
    "one entry, root mean square": (lambda: nn.RMSNorm((3, 1)), (1, 4, 3, 1), 1e-10),
    "groups of tokens": (lambda: _Tokens(nn.GroupNorm(2, 4)), (2, 4, 10, 3), 1e-11),
    "one group of tokens": (lambda: _Tokens(nn.GroupNorm(1, 4)), (2, 4, 10, 3), 1e-11),
    "no batch": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        (4, 10, 5),
        1e-12,
    ),
    "rows are samples": (
        lambda: _Moves(nn.BatchNorm2d(4), (2, 1, 0, 3)),
        (2, 4, 9, 5),
        1e-11,
    ),
    "rows are columns": (lambda: _Moves(nn.BatchNorm2d(4), (0, 1, 3, 2)), (2, 4, 9, 5), 1e-11),
    "instances, rows are columns": (
        lambda: _Moves(nn.InstanceNorm2d(4), (0, 1, 3, 2)),
        (2, 4, 9, 5),
        1e-11,
    ),
} | {
    f"{kind.__name__} over {dims}": (
        lambda kind=kind, dims=dims, order=order: _Moves(kind(dims), order),
        (2, 4, 9, 5),
        1e-11,
    )
    for kind in (nn.LayerNorm, nn.RMSNorm)
    for dims, order in (
        ((9, 4), (0, 3, 2, 1)),
        ((9, 5, 4), (0, 2, 3, 1)),
        ((5, 4), (0, 2, 3, 1)),
    )
}


def test_norms_of_other_dimensions_and_sizes():
    for name, (build, shape, tolerance) in OTHERS.items():
        with entry(name):
            args = (lambda build: _randomised(build()), (build,), shape, tolerance)
            on_threads(3, assert_same_as_whole_globe, *args)


def _stack():
    norms = [
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((4, 7, 5)),
        nn.RMSNorm((7, 5)),
    ]
    layers = [layer for norm in norms for layer in (_randomised(norm), nn.ReLU(inplace=True))]
    first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
    return nn.Sequential(first, *layers, nn.Conv2d(4, 3, 3, padding=1))


def test_norms_with_one_row_per_rank():
    on_threads(7, assert_same_as_whole_globe, _stack, (), (1, 2, 14, 9), 1e-11)


def _trains(manager, kind, momentum):
    """Several batches, then evaluation: what a run does to running statistics."""
    generator = seeded(0)
    whole = nn.Sequential(kind(4, momentum=momentum, track_running_stats=True)).double()
    sharded = copy.deepcopy(whole)
    convert_to_domain_parallel(sharded, manager, input_shape=(2, 4, 11, 5))
    for _ in range(3):
        x = torch.randn(2, 4, 11, 5, generator=generator, dtype=torch.float64) + 3
        whole(x)
        sharded(shard_tensor(x, manager=manager))
    before = vars(manager.transport.traffic).copy()
    y = sharded.eval()(shard_tensor(x, manager=manager))
    assert vars(manager.transport.traffic) == before
    expected = shard_tensor(whole.eval()(x), manager=manager)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for name, buffer in sharded.named_buffers():
        torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-12, atol=0)
        everyones = manager.transport.all_gather(buffer)
        assert all(torch.equal(one, buffer) for one in everyones)
    return len(list(sharded.buffers()))


def test_running_statistics_are_the_globes_on_every_rank():
    for kind in (nn.BatchNorm2d, nn.InstanceNorm2d):
        for momentum in (0.3, None):
            with entry((kind, momentum)):
                assert on_threads(3, _trains, kind, momentum) == [3, 3, 3]


def test_a_plan_needs_no_number_of_batches():
    model = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.AdaptiveAvgPool2d(1))
    model.append(nn.BatchNorm2d(4, momentum=None))
    report = plan_report(model, (2, 4, 9, 5), 3)
    assert not report.problems
    assert [layer.forward[0].collectives for layer in report.layers] == [1, 1, 0]
    assert all(norm.num_batches_tracked == 0 for norm in model[::2])


def test_norms_of_channels_stay_as_they_are():
    def types(manager):
        model = nn.Sequential(nn.LayerNorm(5), nn.RMSNorm(5), nn.LocalResponseNorm(2))
        convert_to_domain_parallel(model, manager, input_shape=(1, 4, 6, 5))
        return [type(layer) for layer in model]

    assert on_threads(2, types)[0] == [nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm]


# --- the ways in which a group norm computes -----------------------------------------------


@pytest.fixture(params=["small", "chunked", "as on GPUs"])
def way(request, monkeypatch):
    """Run a test in all ways to normalise."""
    if request.param == "small":
        request.getfixturevalue("small_bands")
    monkeypatch.setattr(group_norm, "is_chunked", lambda x: request.param != "as on GPUs")


def _mixed(manager, fields, cotangents):
    """Compare with channels last for some ranks' fields and cotangents only."""
    generator = seeded(0)
    shape = (2, 6, 17, 16)
    x, cotangent = (torch.randn(shape, generator=generator).double() for _ in range(2))
    whole = _randomised(nn.GroupNorm(3, 6)).double()
    layer = DomainParallelGroupNorm(copy.deepcopy(whole), manager=manager)
    found = []
    for norm, shard in ((whole, False), (layer, True)):
        y, grad = x + 2.0, cotangent
        if shard:
            y, grad = (shard_tensor(t, manager=manager) for t in (y, grad))
            y = _last(y) if manager.rank in fields else y
            grad = _last(grad) if manager.rank in cotangents else grad
        y = y.clone().requires_grad_()
        output = norm(y)
        output.backward(grad)
        found.append([output.detach(), y.grad, *(p.grad for p in norm.parameters())])
    wanted, made = found
    made = [gather_tensor(t, manager=manager) for t in made[:2]] + [
        manager.transport.all_reduce(t) for t in made[2:]
    ]
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-11)


def _no_samples_and_others_channels(manager):
    x = torch.zeros(0, 6, 4, 5, requires_grad=True)
    y = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)
    with pytest.raises(RuntimeError):
        DomainParallelGroupNorm(nn.GroupNorm(2, 2), manager=manager)(torch.ones(1, 4, 4, 5))


def _constant(manager):
    x = torch.full((1, 6, 9, 5), 7.0)
    layer = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)
    band = shard_tensor(x, manager=manager).clone().requires_grad_()
    y = layer(band)
    y.backward(torch.ones(()).expand(1, 6, 3, 5))
    assert y.abs().max() <= 1e-5 * layer.eps**-0.5
    assert band.grad.isfinite().all()


@pytest.mark.usefixtures("way")
def test_a_group_norm_in_every_way():
    for fields in [(0, 1, 2), (1,), ()]:
        for cotangents in [(0, 1, 2), (0, 2), ()]:
            with entry((fields, cotangents)):
                on_threads(3, _mixed, fields, cotangents)
    on_threads(3, _constant)
    on_threads(2, _no_samples_and_others_channels)
    on_threads(3, assert_same_as_whole_globe, _stack, (), (2, 2, 14, 9), 1e-11)


def _large_constant(manager):
    x = _last(shard_tensor(torch.full((2, 6, 40, 37), 5e5 / 3), manager=manager))
    for norm in (nn.GroupNorm(3, 6), nn.BatchNorm2d(6), nn.InstanceNorm2d(6)):
        assert not convert_to_domain_parallel(norm, manager)(x).any()


@pytest.mark.usefixtures("small_bands")
def test_large_constant_input():
    on_threads(3, _large_constant)


def _kept(manager):
    x = shard_tensor(torch.randn(1, 6, 64, 64).bfloat16(), manager=manager).requires_grad_()
    layer = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=manager)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.silu(layer(x))
    return sum(t.untyped_storage().nbytes() for t in kept) / x.untyped_storage().nbytes()


def test_half_precision_keeps_no_float32_copy():
    assert max(on_threads(2, _kept)) < 2.1  # its input, and that of SiLU

"""Norms over rows equal those of the whole globe, with their running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from credit_dp.domain_parallel import convert_to_domain_parallel, plan_report, shard_tensor
from credit_dp.domain_parallel.layers import (
    DomainParallelBatchNorm,
    DomainParallelInstanceNorm,
    DomainParallelLayerNorm,
    DomainParallelRMSNorm,
)
from credit_dp.domain_parallel.layers.norm import cast_for_autocast, cast_for_rms_norm
from credit_dp.errors import UserError
from tests.domain_parallel.equality import OPERATOR, assert_same_as_whole_globe
from tests.ranks import on_processes, on_threads, seeded

RANKS = st.sampled_from([2, 3, 4, 8])
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


def _shape(kind, height):
    return (2, 4, 2, height, 3) if "3d" in kind.__name__ else (3, 4, height, 5)


@st.composite
def statistics(draw):
    options = {
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.1, 0.7, None])),
        "eps": draw(st.sampled_from([1e-5, 1e-2])),
    }
    return options, draw(st.booleans())


def _norm(kind, options, training):
    return _randomised(kind(4, **options), training)


@given(
    ranks=RANKS,
    kind=st.sampled_from([nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.InstanceNorm3d]),
    options=statistics(),
    height=st.integers(8, 17),
    offset=OFFSETS,
)
def test_batch_and_instance_norm(ranks, kind, options, height, offset):
    args = (_norm, (kind, *options), _shape(kind, height), _tolerance(offset), offset)
    on_threads(ranks, assert_same_as_whole_globe, *args)


ONE_COLUMN = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer": lambda: nn.LayerNorm((3, 1)),  # its weight has one value on each rank, another one
    "root mean square": lambda: nn.RMSNorm((3, 1)),
}


def _of_one_column(name):
    return _randomised(ONE_COLUMN[name]())


@pytest.mark.parametrize("name", ONE_COLUMN)
def test_bands_of_one_entry(name):
    """The sums over a band are its entries, of which backward makes the gradient of the input."""
    on_threads(3, assert_same_as_whole_globe, _of_one_column, (name,), (1, 4, 3, 1), 1e-10)


class _Tokens(nn.Module):
    """Rows and columns in one dimension, as transformers have them."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.flatten(2)).unflatten(2, x.shape[2:])


def _tokens(kind, options, training):
    return _Tokens(_randomised(kind(4, **options), training))


def _tokens_of_groups(groups):
    return _Tokens(_randomised(nn.GroupNorm(groups, 4)))


@given(
    ranks=RANKS,
    kind=st.sampled_from([nn.BatchNorm1d, nn.InstanceNorm1d]),
    options=statistics(),
    height=st.integers(8, 17),
)
def test_norms_of_tokens(ranks, kind, options, height):
    on_threads(
        ranks, assert_same_as_whole_globe, _tokens, (kind, *options), (2, 4, height, 3), 1e-11
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm_of_tokens(groups):
    shape = (2, 4, 10, 3)
    on_threads(3, assert_same_as_whole_globe, _tokens_of_groups, (groups,), shape, 1e-11)


def _layer_norm(kind, shape, options):
    return _randomised(kind(shape, **options))


@given(
    ranks=RANKS,
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


class _ChannelsLast(nn.Module):
    """`(B, C, H, W)` normalised over rows and channels of `(B, W, H, C)`, or over `(H, W, C)`."""

    def __init__(self, norm, order):
        super().__init__()
        self.norm = norm
        self.order = order
        self.back = [order.index(d) for d in range(4)]

    def forward(self, x):
        return self.norm(x.permute(self.order)).permute(self.back)


def _channels_last(kind, shape, order):
    return _ChannelsLast(_randomised(kind(shape)), order)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    ("shape", "order"),
    [((9, 4), (0, 3, 2, 1)), ((9, 5, 4), (0, 2, 3, 1)), ((5, 4), (0, 2, 3, 1))],
)
def test_norms_over_rows_and_channels(kind, shape, order):
    on_threads(
        3, assert_same_as_whole_globe, _channels_last, (kind, shape, order), (2, 4, 9, 5), 1e-11
    )


def _stack(kind):
    norms = {
        "batch": nn.BatchNorm2d(4),
        "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "layer": nn.LayerNorm((4, 7, 5)),
        "rms": nn.RMSNorm((7, 5)),
    }
    first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
    return nn.Sequential(first, _randomised(norms[kind]), nn.SiLU(), nn.Conv2d(4, 3, 3, padding=1))


KINDS = ["batch", "instance", "layer", "rms"]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_on_gloo_ranks(kind, planned):
    args = (_stack, (kind,), (2, 2, 14, 9), 1e-11, 0.0, planned)
    on_processes(3, assert_same_as_whole_globe, *args)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_with_one_row_per_rank(kind):
    on_threads(7, assert_same_as_whole_globe, _stack, (kind,), (1, 2, 14, 9), 1e-11)


def _without_batch():
    return _randomised(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


def test_an_instance_norm_without_batch():
    on_threads(3, assert_same_as_whole_globe, _without_batch, (), (4, 10, 5))


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


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_are_the_globes_on_every_rank(kind, momentum):
    assert on_threads(3, _trains, kind, momentum) == [3, 3, 3]


def _one_collective_each_way(manager, kind):
    model = convert_to_domain_parallel(_stack(kind)[1:2], manager, input_shape=(2, 4, 7, 5))
    rows = manager.rows(7)
    traffic = manager.transport.traffic
    y = model(torch.randn(2, 4, rows.stop - rows.start, 5, requires_grad=True))
    assert traffic.collectives == 1
    y.sum().backward()
    assert (traffic.collectives, traffic.messages) == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_forward_and_one_backward(kind):
    on_threads(3, _one_collective_each_way, kind)


def _close_to_exact(manager, kind, dtype, offset, factor):
    """Compare with the float64 result: the error is at most the plain layer's times a factor."""
    generator = seeded(0)
    x = (torch.randn(2, 4, 7, 5, generator=generator) + offset).to(dtype)
    layer = _stack(kind)[1].to(dtype)
    whole = layer(x)
    exact = copy.deepcopy(layer).double()(x.double())
    model = convert_to_domain_parallel(nn.Sequential(layer), manager, input_shape=x.shape)
    y = model(shard_tensor(x, manager=manager))
    assert y.dtype == dtype
    error = (y - shard_tensor(exact, manager=manager)).abs().max()
    assert error <= factor * (whole - exact).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_norms_in_float32_are_as_exact_as_torch(kind):
    on_threads(3, _close_to_exact, kind, torch.float32, 1e4, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_in_half_precision_are_as_exact_as_torch(kind, dtype):
    on_threads(2, _close_to_exact, kind, dtype, 3.0, 2)


def test_a_plan_needs_no_number_of_batches():
    model = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.AdaptiveAvgPool2d(1))
    model.append(nn.BatchNorm2d(4, momentum=None))
    report = plan_report(model, (2, 4, 9, 5), 3)
    assert not report.problems
    assert [layer.forward[0].collectives for layer in report.layers] == [1, 1, 0]
    assert all(norm.num_batches_tracked == 0 for norm in model[::2])


@pytest.mark.parametrize(
    ("operation", "cast"),
    [
        (lambda x: functional.layer_norm(x, (3,)), cast_for_autocast),
        (lambda x: functional.rms_norm(x, (3,)), cast_for_rms_norm),
        (lambda x: x.softmax(-1), cast_for_autocast),
        (lambda x: x.log_softmax(-1), cast_for_autocast),
        (lambda x: x.sum(-1), cast_for_autocast),
        (lambda x: x.mean(-1), lambda x: x),
        (lambda x: functional.batch_norm(x, None, None, training=True), lambda x: x),
    ],
)
def test_what_autocast_widens_on_gpus(operation, cast):
    with FakeTensorMode():
        x = torch.zeros(2, 3, dtype=torch.bfloat16, device="cuda")
        assert cast_for_autocast(x).dtype == cast_for_rms_norm(x).dtype == torch.bfloat16
        torch.set_autocast_enabled("cuda", True)
        try:
            assert operation(x).dtype == cast(x).dtype
            assert cast_for_autocast(x).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_channel_norms_stay_as_they_are():
    def types(manager):
        model = nn.Sequential(nn.LayerNorm(5), nn.RMSNorm(5), nn.LocalResponseNorm(2))
        convert_to_domain_parallel(model, manager, input_shape=(1, 4, 6, 5))
        return [type(layer) for layer in model]

    assert on_threads(2, types)[0] == [nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm]


def _local_response():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.LocalResponseNorm(3, alpha=0.5))


def test_local_response_norm():
    on_threads(3, assert_same_as_whole_globe, _local_response, (), (2, 4, 9, 5))


class _Moves(nn.Module):
    """A norm of a field whose dimensions are in another order."""

    def __init__(self, norm, order):
        super().__init__()
        self.norm = norm
        self.order = order

    def forward(self, x):
        return self.norm(x.permute(self.order)).permute([self.order.index(d) for d in range(4)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.SyncBatchNorm(4), "SyncBatchNorm has no rule"),
        (_Moves(nn.BatchNorm2d(9), (0, 2, 1, 3)), "rows are in the channels' dimension"),
        (
            _Moves(nn.InstanceNorm2d(9, affine=True), (0, 2, 1, 3)),
            "rows are in the channels' dimension",
        ),
        (
            _Moves(nn.InstanceNorm2d(4, track_running_stats=True), (2, 1, 0, 3)),
            "rows are in the samples' dimension, over which running statistics are averaged",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(model, message):
    def refused(manager):
        copied = nn.Sequential(copy.deepcopy(model))
        with pytest.raises(UserError, match=message) as caught:
            convert_to_domain_parallel(
                copied, manager, input_shape=(2, 4, 9, 5), whole_ops="refuse"
            )
        assert "\n" not in str(caught.value)

    on_threads(3, refused)


def _moved(kind, order):
    return _Moves(_randomised(kind(4)), order)


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (nn.BatchNorm2d, (2, 1, 0, 3)),
        (nn.BatchNorm2d, (0, 1, 3, 2)),
        (nn.InstanceNorm2d, (0, 1, 3, 2)),
    ],
)
def test_rows_may_be_in_other_dimensions(kind, order):
    on_threads(3, assert_same_as_whole_globe, _moved, (kind, order), (2, 4, 9, 5), 1e-11)


def _wrong_shape(manager):
    layer = DomainParallelLayerNorm(nn.LayerNorm((10, 5)), manager=manager)
    with pytest.raises(UserError, match=r"the globe has 9 rows, normalized_shape is \(10, 5\)"):
        layer(torch.zeros(1, 2, 3, 5))


def test_a_normalized_shape_of_another_globe_is_refused():
    on_threads(3, _wrong_shape)


def _by_hand(manager, wrap, make, shape):
    """Build a wrapper without the converter, on bands that differ from the balanced ones."""
    x = torch.randn(shape, dtype=torch.float64, generator=seeded(0))
    norm = _randomised(make()).double()
    cut = (0, 1, 6, shape[-2])[manager.domain_rank :]
    y = wrap(copy.deepcopy(norm), manager=manager)(x[..., cut[0] : cut[1], :])
    torch.testing.assert_close(y, norm(x)[..., cut[0] : cut[1], :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        (DomainParallelBatchNorm, lambda: nn.BatchNorm2d(2)),
        (DomainParallelInstanceNorm, lambda: nn.InstanceNorm2d(2)),
        (DomainParallelLayerNorm, lambda: nn.LayerNorm((2, 10, 4))),
        (DomainParallelRMSNorm, lambda: nn.RMSNorm((10, 4))),
        (DomainParallelLayerNorm, lambda: nn.LayerNorm(4)),
    ],
)
def test_wrappers_built_by_hand_take_any_bands(wrap, make):
    on_threads(3, _by_hand, wrap, make, (2, 2, 10, 4))

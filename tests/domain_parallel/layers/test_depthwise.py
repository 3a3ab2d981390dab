"""Depthwise convolutions on bands of rows, with halos and with transposes of rows to channels."""

from __future__ import annotations

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.channel_parallel import DistributedDepthwiseConv2d
from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    plan_report,
)
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.layers import (
    DomainParallelConv2d,
    DomainParallelDepthwiseConv2d,
    DomainParallelDistributedDepthwiseConv2d,
)
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.errors import UserError
from tests.domain_parallel.equality import RANDOM_LOCK, THREADS, assert_same_as_whole_globe
from tests.ranks import DEVICE, on_processes, on_threads
from tests.tables import entry
from tests.tier_cases import tiers

BYTES = 8  # float64
TRANSPOSE_MOVES_LESS = DepthwiseLayer._transpose_moves_less


@contextmanager
def _forced_to(transpose):
    """Let every layer transpose, or none: the plan chooses by the size of the kernel."""
    DepthwiseLayer._transpose_moves_less = lambda self, bands: transpose
    try:
        yield
    finally:
        DepthwiseLayer._transpose_moves_less = TRANSPOSE_MOVES_LESS


def _conv(channels, multiplier, kernel, stride, padding, dilation, mode, bias=True):
    return nn.Conv2d(
        channels, multiplier * channels, kernel, stride, padding, dilation, channels, bias, mode
    )


def _distributed(channels, kernel, groups, bias):
    return DistributedDepthwiseConv2d(channels, kernel, groups, bias, device=DEVICE)


@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(4, 14),
    channels=st.integers(2, 5),
    multiplier=st.sampled_from([1, 1, 2]),
    kernel=st.tuples(st.integers(2, 9), st.integers(1, 4)),
    stride=st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (3, 2)]),
    padding=st.tuples(st.integers(0, 9), st.integers(0, 3)),
    dilation=st.sampled_from([1, 2, (2, 1)]),
    mode=st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]),
    bias=st.booleans(),
    transpose=st.booleans(),
)
def test_depthwise(
    ranks, height, channels, multiplier, kernel, stride, padding, dilation, mode, bias, transpose
):
    rows, columns = (dilation, dilation) if isinstance(dilation, int) else dilation
    out = (height + 2 * padding[0] - rows * (kernel[0] - 1) - 1) // stride[0] + 1
    assume(out >= ranks)
    assume(8 + 2 * padding[1] > columns * (kernel[1] - 1))
    assume(mode in ("zeros", "replicate") or padding[0] < height)
    args = (channels, multiplier, kernel, stride, padding, dilation, mode, bias)
    with _forced_to(transpose):
        _same(ranks, _conv, args, (2, channels, height, 8))


def _same(ranks, build, args, shape):
    on_threads(ranks, assert_same_as_whole_globe, build, args, shape)


@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(4, 14),
    groups=st.sampled_from([1, 2, 3, 6]),
    kernel=st.tuples(st.integers(2, 30), st.integers(1, 4)),
    bias=st.booleans(),
    transpose=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_distributed_depthwise(ranks, height, groups, kernel, bias, transpose):
    with _forced_to(transpose):
        _same(ranks, _distributed, (6, kernel, groups, bias), (2, 6, height, 5))


def test_a_tensor_without_batch():
    for transpose in (True, False):
        with _forced_to(transpose), entry(transpose):
            _same(3, _conv, (4, 2, (9, 3), 1, "same", 1, "zeros"), (4, 8, 5))


def _planned_later(manager):
    args = (_conv, (3, 1, (17, 3), 1, "same", 1, "zeros"), (2, 3, 9, 6))
    assert_same_as_whole_globe(manager, *args, planned=False)


def test_planned_at_the_first_forward():
    on_threads(4, _planned_later)


class _Twice(nn.Module):
    """A layer at two heights, and layers with kernels of several sizes on the same tensor."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 3, 2, 2)
        self.mixes = nn.ModuleList(
            nn.Conv2d(3, 3, (k, 1), padding="same", groups=3) for k in (3, 5, 17, 25)
        )

    def forward(self, x):
        x = sum(mix(x) for mix in self.mixes)
        return self.mixes[2](self.down(x))


def test_several_heights_and_readers_of_the_same_tensor():
    _same(3, _Twice, (), (2, 3, 24, 6))


class _Block(nn.Module):
    """Recomputation in backward has to end at the same operation on every rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 2, 1)
        self.mix = nn.Conv2d(2, 2, (25, 1), padding="same", groups=2)

    def forward(self, x):
        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(self._mix, self.first(x), use_reentrant=False)

    def _mix(self, x):
        return self.mix(torch.sin(x)) + x


@pytest.mark.slow
def test_recomputation_with_fewer_channels_than_ranks():
    on_processes(3, assert_same_as_whole_globe, _Block, (), (2, 2, 13, 4))


def _step(manager, kernel, channels, rows):
    """Run a training step; return its messages and bytes (forward, total) and the plan."""
    with RANDOM_LOCK:
        torch.manual_seed(0)
        conv = _conv(channels, 1, kernel, 1, "same", 1, "zeros")
        model = nn.Sequential(nn.Conv2d(channels, channels, 1), conv).double()
        x = torch.randn(2, channels, rows, 5, dtype=torch.float64)
    shape = tuple(x.shape)
    sharded = convert_to_domain_parallel(model, manager, input_shape=shape)
    traffic = manager.transport.traffic
    y = sharded(x[..., manager.rows(rows), :].contiguous())
    forward = (traffic.messages, traffic.bytes)
    y.sum().backward()
    transposes = sharded[1].transposes(rows)
    return forward, (traffic.messages, traffic.bytes), transposes, sharded[1].title


def _transpose_traffic(ranks, rank, rows, channels):
    """Return the messages and bytes of one rank in both transposes, counted one by one."""
    bands, shares = ([n // ranks + (r < n % ranks) for r in range(ranks)] for n in (rows, channels))
    to_channels = [bands[rank] * shares[r] for r in range(ranks) if r != rank]
    to_rows = [shares[rank] * bands[r] for r in range(ranks) if r != rank]
    return sum(n > 0 for n in to_channels + to_rows), sum(to_channels + to_rows) * 2 * 5 * BYTES


@pytest.mark.parametrize(
    ("ranks", "rows", "channels"),
    tiers(fast=[(3, 11, 5)], slow=[], exhaustive=[(4, 7, 2), (2, 9, 4), (4, 14, 4)]),
)
def test_traffic_of_a_transpose(ranks, rows, channels):
    kernel = (2 * rows - 1, 3)
    steps = on_threads(ranks, _step, kernel, channels, rows)
    for rank, (forward, both, transposes, _) in enumerate(steps):
        assert transposes
        messages, size = _transpose_traffic(ranks, rank, rows, channels)
        assert forward == (messages, size)
        assert both == (2 * messages, 2 * size)

    model = nn.Sequential(
        nn.Conv2d(channels, channels, 1), _conv(channels, 1, kernel, 1, "same", 1, "zeros")
    ).double()
    report = plan_report(model, (2, channels, rows, 5), ranks)
    assert not report.problems
    assert [(s.messages, s.bytes) for s in report.forward] == [step[0] for step in steps]
    assert [s.bytes for s in report.backward] == [step[0][1] for step in steps]
    assert report.levels[0].excess == 1


@pytest.mark.parametrize("ranks", THREADS)
def test_all_ranks_choose_what_sends_less(ranks):
    for kernel in (3, 17, 31):
        args = ((kernel, 1), 4, 24)
        chosen = on_threads(ranks, _step, *args)
        sent = {}
        for transpose in (True, False):
            with _forced_to(transpose):
                sent[transpose] = sum(step[0][1] for step in on_threads(ranks, _step, *args))
        assert sum(step[0][1] for step in chosen) == min(sent.values()), kernel
        choices = {step[2] for step in chosen}
        assert choices == {sent[True] <= sent[False]}, kernel
        title = "(transpose)" if True in choices else "(halo)"
        assert {step[3].split()[1] for step in chosen} == {title}, kernel


def test_smallest_kernel_that_transposes():
    """The numbers that the documentation gives for 721 rows."""
    for ranks, smallest in [(4, 363), (16, 93), (32, 47)]:
        manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
        for kernel, transposes in ((smallest - 2, False), (smallest, True)):
            conv = nn.Conv2d(64, 64, (kernel, 1), padding="same", groups=64, device="meta")
            layer = DomainParallelDepthwiseConv2d(conv, manager=manager)
            layer.set_plan(-2, {721: 721})
            assert layer.transposes(721) is transposes, (ranks, kernel)


def test_the_choice_is_logged_and_reported(caplog):
    def build():
        return nn.Sequential(
            *(nn.Conv2d(2, 2, (kernel, 1), padding="same", groups=2) for kernel in (3, 47))
        )

    def convert(manager):
        return convert_to_domain_parallel(build(), manager, input_shape=(1, 2, 24, 4))

    with caplog.at_level(logging.INFO):
        model, _ = on_threads(2, convert)
    assert "2 DomainParallelDepthwiseConv2d; rows transposed to channels: 1; " in caplog.text
    titles = [layer.type for layer in plan_report(build(), (1, 2, 24, 4), 2).layers]
    assert titles == [
        "DomainParallelDepthwiseConv2d (halo)",
        "DomainParallelDepthwiseConv2d (transpose)",
    ]
    assert model[1].title == titles[1]


def _by_hand(manager):
    conv = nn.Conv2d(2, 2, (9, 1), padding="same", groups=2)
    layer = DomainParallelDepthwiseConv2d(conv, manager=manager)
    x = torch.randn(1, 2, 4, 3)
    assert layer(x).shape == x.shape
    assert not layer.transposes(8)
    assert layer.title == "DomainParallelDepthwiseConv2d (halo)"


def test_without_a_plan_rows_are_fetched():
    on_threads(2, _by_hand)


def _copied(manager):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        model = nn.Sequential(
            _conv(3, 1, (15, 3), 1, "same", 1, "zeros"), _distributed(3, 15, 1, True)
        )
        x = torch.randn(1, 3, 8, 4)
    expected = model(x)
    names = list(model.state_dict())
    convert_to_domain_parallel(model, manager, input_shape=(1, 3, 8, 4))
    kinds = (DomainParallelDepthwiseConv2d, DomainParallelDistributedDepthwiseConv2d)
    assert tuple(map(type, model)) == kinds
    assert all(layer.transposes(8) for layer in model)
    rows = manager.rows(8)
    for sharded in (model, copy.deepcopy(model)):
        assert list(sharded.state_dict()) == names
        made = sharded(x[..., rows, :].contiguous())
        torch.testing.assert_close(made, expected[..., rows, :])
    convert_from_domain_parallel(model)
    assert tuple(map(type, model)) == (nn.Conv2d, DistributedDepthwiseConv2d)
    torch.testing.assert_close(model(x), expected)


def test_copies_and_the_way_back():
    on_threads(2, _copied)


class _WithGroup(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.mix, self.group = _distributed(4, 5, 2, False), group

    def forward(self, x):
        return self.mix(self.mix(x, None), cp_group=self.group)


def test_a_group_for_channels_is_refused_where_rows_are_sharded():
    _same(2, _WithGroup, (None,), (1, 4, 8, 4))

    def convert(manager):
        layer = DomainParallelDistributedDepthwiseConv2d(
            _distributed(4, 5, 2, False), manager=manager
        )
        with pytest.raises(UserError, match="without cp_group"):
            layer(torch.zeros(1, 4, 4, 4), cp_group=object())

    on_threads(2, convert)


def _types(manager):
    model = nn.Sequential(
        nn.Conv2d(4, 4, (1, 3), padding=(0, 1), groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        DistributedDepthwiseConv2d(4, (1, 5), device=DEVICE),
    )
    convert_to_domain_parallel(model, manager, input_shape=(1, 4, 8, 4))
    return [type(layer) for layer in model]


def test_which_layers_are_depthwise():
    expected = [
        nn.Conv2d,
        DomainParallelConv2d,
        DomainParallelDepthwiseConv2d,
        DistributedDepthwiseConv2d,
    ]
    assert on_threads(2, _types) == [expected, expected]
    with pytest.raises(UserError, match="2 groups of 4 channels"):
        DomainParallelDepthwiseConv2d(nn.Conv2d(4, 4, 3, groups=2))

"""The plan's report predicts what a real step sends and saves for backward."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from credit_dp.config import UNetConfig
from credit_dp.domain_parallel import (
    HaloExchange,
    convert_to_domain_parallel,
    plan_report,
)
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.domain_parallel.layers import DomainParallelRowGroups
from credit_dp.domain_parallel.planning import model_plan
from credit_dp.errors import UserError
from credit_dp.models.row_groups import GroupedRows, windows
from credit_dp.models.unet import UNet
from tests.domain_parallel.equality import RANDOM_LOCK, THREADS
from tests.ranks import on_threads
from tests.tier_cases import tiers


def _unet():
    return UNet(UNetConfig(channels=[4, 8, 8], blocks=1, groups=2), 3, 2).double()


def _mixed():
    return nn.Sequential(
        nn.Conv2d(3, 4, (4, 3), stride=(3, 1), padding=(5, 1), padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(4, 4, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.InstanceNorm2d(4, affine=True),
        nn.ConvTranspose2d(4, 2, 3, stride=2),
        nn.GroupNorm(1, 2),
    ).double()


class _Branches(nn.Module):
    """Layers of several kernels that read one tensor, and share its exchange."""

    def __init__(self):
        super().__init__()
        kernels = 3, 5, 9
        self.branches = nn.ModuleList(nn.Conv2d(3, 2, k, padding=k // 2) for k in kernels)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


def _branches():
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), _Branches(), nn.GroupNorm(1, 6)).double()


class _PadsByHand(nn.Module):
    """What a custom converter may use: a halo, and a convolution without padding of rows."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.halo = conv, HaloExchange(1)

    def forward(self, x):
        return F.conv2d(self.halo(x), self.conv.weight, self.conv.bias, padding=(0, 1))


class _Conv(nn.Conv2d):
    """A convolution of a type without a rule."""


def _by_hand():
    return nn.Sequential(
        _Conv(3, 4, 3, padding=1), nn.GroupNorm(2, 4), _Conv(4, 2, 3, padding=1)
    ).double()


class _Kept:
    """Sums the bytes that autograd saves, without parameters and buffers."""

    def __init__(self, model):
        own = (*model.parameters(), *model.buffers())
        self.own = {x.untyped_storage().data_ptr() for x in own}
        self.storages = {}

    def __call__(self, x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages[storage.data_ptr()] = storage
        return x

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def _traffic(manager):
    return Counter(vars(manager.transport.traffic))


CONVERTERS = {_Conv: _PadsByHand}


def _real_step(manager, model, shape):
    """Return what this rank sends forward (by layer, in total) and backward, and what it saves."""
    with RANDOM_LOCK:
        model = copy.deepcopy(model)
        convert_to_domain_parallel(model, manager, custom_converters=CONVERTERS, input_shape=shape)
        x = torch.randn(*shape[:-2], manager.partition(shape[-2]).sizes[manager.rank], shape[-1])
    by_layer = {}
    for name, layer in row_layers(model).items():
        by_layer[name] = Counter()

        def enter(*_, name=name):
            by_layer[name].subtract(_traffic(manager))

        def leave(*_, name=name):
            by_layer[name].update(_traffic(manager))

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    kept = _Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
        y = model(x.double())
    forward = _traffic(manager)
    y.sum().backward()
    return by_layer, forward, _traffic(manager) - forward, kept.bytes


BUILDS = {
    "unet": _unet, "mixed": _mixed, "by hand": _by_hand,
    "branches": _branches,
}  # fmt: skip


@pytest.mark.parametrize("ranks", THREADS)
@pytest.mark.parametrize(
    "name",
    tiers([("mixed",)], [("unet",), ("branches",)], [("by hand",)]),
)
def test_a_real_step_sends_and_keeps_what_the_report_says(name, ranks):
    build = BUILDS[name]
    model, shape = build(), (2, 3, 33, 16)
    report = plan_report(model, shape, ranks, custom_converters=CONVERTERS)
    assert report.problems == ()
    for rank, (by_layer, forward, backward, kept) in enumerate(
        on_threads(ranks, _real_step, model, shape)
    ):
        assert Counter(vars(report.forward[rank])) == forward
        assert Counter(vars(report.backward[rank])) == backward
        for layer in report.layers:
            sent = Counter(vars(layer.forward[rank]))
            assert sent == by_layer.get(layer.path, sent), layer.path
        # Ranks with as many rows may need different halos: an estimate.
        assert report.saved_bytes[rank] == pytest.approx(kept, rel=0.1 if build is _mixed else 0.0)
    assert report.forward[0].messages > 0
    assert report.forward[0].collectives > 0
    for level in report.levels:
        assert level.sent_bytes == level.least_bytes, level.rows
    if build is not _by_hand:  # whose messages are of no layer
        sent = sum(sent.bytes for sent in (*report.forward, *report.backward))
        assert sum(level.sent_bytes for level in report.levels) == sent > 0


def test_the_least_is_of_needs_and_not_of_messages(monkeypatch):
    def excess():
        return [level.excess for level in plan_report(_branches(), (2, 3, 33, 16), 3).levels]

    assert excess() == [1.0]
    monkeypatch.setattr(model_plan, "share_exchanges", lambda *_: None)
    # Rows sent for the first layer, and for kernels 3, 5 and 9: 1 forward; 1, 2 and 4 both ways.
    assert excess() == [pytest.approx((1 + 2 * 7) / (1 + 2 * 4))]


class _Windows(GroupedRows):
    """Windows of rows, whose channels double on the way."""

    def __init__(self, size, shift):
        super().__init__()
        self.size, self.shift = size, shift

    def groups(self, height):
        return windows(height, self.size, self.shift)

    def treat(self, x, groups, height):
        return torch.cat([x, x], 1)


def test_the_least_of_whole_groups():
    for size, shift, away in [
        (4, 0, 0),  # 8 and 8 rows
        (4, 2, 2 + 2),  # the windows over the middle, and around the poles
        (6, 0, 2),  # rows 6 to 11, of which one rank has 2
        (16, 0, 8),
    ]:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), _Windows(size, shift)).double()
        rules = {_Windows: DomainParallelRowGroups}
        report = plan_report(model, (2, 3, 16, 8), 2, custom_converters=rules)
        assert report.problems == (), size
        (level,) = report.levels
        row = 2 * 4 * 8 * 8  # bytes, of what goes in; twice as many come out
        assert level.least_bytes == away * (row + 2 * row) * 2, (size, shift)
        assert level.sent_bytes >= level.least_bytes, (size, shift)


def test_what_is_computed_again_is_fetched_again():
    config = UNetConfig(channels=[4, 8], blocks=1, groups=2, activation_checkpointing=True)
    report = plan_report(UNet(config, 3, 2), (1, 3, 24, 8), 3)
    assert [level.excess for level in report.levels] == [1.0, 1.0]
    once = sum(sent.bytes for sent in report.forward)
    assert sum(level.sent_bytes for level in report.levels) > 2 * once


@pytest.mark.slow
def test_levels_and_parameters():
    report = plan_report(_unet(), (1, 3, 24, 8), 4, custom_converters=CONVERTERS)
    assert [(level.rows, level.bands) for level in report.levels] == [
        (24, (6, 6, 6, 6)),
        (12, (3, 3, 3, 3)),
        (6, (2, 2, 1, 1)),
    ]
    assert report.levels[2].imbalance == pytest.approx(2 / 1.5)
    parameters = list(_unet().parameters())
    assert report.parameters == sum(p.numel() for p in parameters)
    assert report.parameter_bytes == 8 * report.parameters


def test_the_model_and_random_state_are_left_as_they_are():
    model = _mixed()
    before, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    state = torch.get_rng_state()
    plan_report(model, (2, 3, 33, 16), 3)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        empty = _unet()
    shape = (2, 3, 33, 16)
    assert plan_report(empty, shape, 3, custom_converters=CONVERTERS) == plan_report(
        _unet(), shape, 3, custom_converters=CONVERTERS
    )


def test_no_ranks_and_no_input_are_refused():
    with pytest.raises(UserError, match=r"^ranks: needs at least 1, got 0\.$"):
        plan_report(nn.Conv2d(2, 2, 3), (1, 2, 9, 6), 0)
    with pytest.raises(UserError, match=r"^input_shape: needs the whole globe's"):
        plan_report(nn.Conv2d(2, 2, 3), (), 2)


def test_one_rank_sends_nothing():
    report = plan_report(_unet(), (1, 3, 24, 8), 1, custom_converters=CONVERTERS)
    assert report.problems == ()
    assert {sent.messages for sent in (*report.forward, *report.backward)} == {0}
    assert report.saved_bytes[0] > 0


class _FailsInTraining(nn.Conv2d):
    def forward(self, x):
        if torch.is_grad_enabled():
            raise RuntimeError("only without gradients")
        return super().forward(x)


def test_a_step_that_fails_is_a_problem():
    model = nn.Sequential(_FailsInTraining(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1))
    report = plan_report(model, (1, 2, 16, 4), 2)
    assert not report.unplanned
    assert "only without gradients" in report.problems[0]


class _WeightsInTraining(nn.Module):
    def forward(self, weight):
        if torch.is_grad_enabled():
            raise RuntimeError("only without gradients")
        return weight


def test_a_layer_that_fails_in_a_step_is_named_with_what_it_ran_on():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    register_parametrization(conv, "weight", _WeightsInTraining(), unsafe=True)
    (problem,) = plan_report(nn.Sequential(nn.Conv2d(2, 2, 1), conv), (1, 2, 16, 4), 2).problems
    assert problem.startswith("1 (DomainParallelConv2d), ")
    assert "fails on rank 0's band of the input (RuntimeError: only without gradients)" in problem
    assert "called with (1, 2, 8, 4) of torch.float32" in problem


class _CropsInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, :, 1:] if torch.is_grad_enabled() else x)


def test_a_layer_that_gets_other_rows_in_a_step_is_named():
    (problem,) = plan_report(_CropsInTraining(), (1, 2, 16, 4), 2).problems
    assert problem.startswith("conv (DomainParallelConv2d), ")
    assert "rank 0 got 7 rows, the plan has {16: 8}" in problem

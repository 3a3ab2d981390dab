"""The converter: names stay, layers without a rule are refused, planning changes nothing."""

from __future__ import annotations

import copy
import logging
import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelGroupNorm,
    DomainParallelPeriodicConv2d,
    convert_to_domain_parallel,
    validate_sharding_constraints,
)
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.domain_parallel.models import small_cnn
from tests.ranks import on_threads
from tests.tables import entry


def _mock():
    """Return a manager that has a size and nothing else."""
    return Mock(spec=["domain_parallel_size"], domain_parallel_size=2)


def test_replaced_and_kept_layers():
    model = small_cnn()
    pointwise, parameters = model[3], dict(model.named_parameters())
    keys = list(model.state_dict())
    converted = convert_to_domain_parallel(model, _mock())
    assert converted is model
    assert [type(m) for m in (model[0], model[1], *model[4])] == [
        DomainParallelConv2d,
        DomainParallelGroupNorm,
        DomainParallelConv2d,
        nn.ConvTranspose2d,  # its kernel equals its stride
    ]
    assert model[3] is pointwise
    assert list(model.state_dict()) == keys
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in after)


def test_conversion_is_idempotent_and_one_rank_converts_nothing():
    model = convert_to_domain_parallel(small_cnn(), _mock())
    layers = list(model.modules())
    convert_to_domain_parallel(model, _mock())
    assert list(model.modules()) == layers
    single = Mock(spec=["domain_parallel_size"], domain_parallel_size=1)
    plain = small_cnn()
    types = [type(m) for m in plain.modules()]
    assert [type(m) for m in convert_to_domain_parallel(plain, single).modules()] == types


def test_a_layer_used_twice_stays_one_layer():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = convert_to_domain_parallel(
        nn.ModuleDict({"a": conv, "b": nn.Sequential(conv)}), _mock()
    )
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], DomainParallelConv2d)


def test_casts_copies_loads_and_modes_reach_the_wrapped_layer():
    model = convert_to_domain_parallel(small_cnn(), _mock())
    model.double()
    assert model[0].conv.weight.dtype == torch.float64
    other = copy.deepcopy(model)
    assert other[0].conv.weight is other[0].weight
    assert other[0].weight is not model[0].weight
    plain = small_cnn().double()
    model.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(model[0].conv.weight, plain[0].weight)
    assert model[0].weight is model[0].conv.weight
    model.eval()
    assert not model[0].conv.training
    assert "kernel_size=(3, 3)" in repr(model[0])


def test_custom_converters_replace_wrappers_with_children():
    model = nn.Sequential(PeriodicConv2d(2, 3), nn.Conv2d(3, 3, 3, padding=1))
    keys = list(model.state_dict())
    convert_to_domain_parallel(
        model,
        _mock(),
        custom_converters={PeriodicConv2d: lambda m: DomainParallelPeriodicConv2d(m)},
    )
    assert isinstance(model[0], DomainParallelPeriodicConv2d)
    assert type(model[0].conv) is nn.Conv2d
    assert list(model.state_dict()) == keys


class _Subclass(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-2))


class _Leaf(nn.Module):
    def forward(self, x):
        return x


class _LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 4)[:, None, None])

    def forward(self, x):
        return self.gamma * x


class _ChannelNorm(nn.Module):
    """Normalises over channels, at each point separately."""

    def forward(self, x):
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt()


class _GlobeNorm(nn.Module):
    def forward(self, x):
        return x / (x.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()


def test_a_leaf_can_be_registered():
    model = nn.Sequential(_Leaf())
    convert_to_domain_parallel(model, _mock(), custom_converters={_Leaf: lambda m: m})
    assert type(model[0]) is _Leaf


SHAPE = (2, 4, 13, 6)


def _between_convolutions(*leaves):
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *leaves, nn.Conv2d(4, 4, 3, padding=1))


def test_user_leaves_that_keep_rows_apart_stay_and_are_listed(caplog):
    def build():
        return _between_convolutions(
            _LayerScale(), _ChannelNorm(), _LayerScale(), _Subclass1x1(4, 4, 1)
        )

    with caplog.at_level(logging.INFO):
        on_threads(3, assert_same_as_whole_globe, build, (), SHAPE)
    summary_part = (
        "layers of your own, kept and compared: 1 _ChannelNorm, 2 _LayerScale, 1 _Subclass1x1"
    )
    assert summary_part in caplog.text


class _Subclass1x1(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + x


def test_user_leaves_that_need_rows_of_others_compute_on_the_globe():
    for leaf, message in [
        (_GlobeNorm(), r"^1 \(_GlobeNorm\), \S+test_convert\.py:\d+: aten\.mean needs rows"),
        (_Subclass(4, 4, 3, padding=1), r"^1 \(_Subclass\), \S+:\d+: aten\.flip needs rows"),
    ]:
        with entry(leaf):
            report = plan_report(_between_convolutions(leaf), SHAPE, 2)
            assert re.search(message, report.refusal)
            assert not report.problems


def test_the_summary_says_what_became_of_the_layers(caplog):
    def convert(manager):
        model = _between_convolutions(nn.GroupNorm(2, 4), _Leaf(), _Subclass(4, 4, 3))
        convert_to_domain_parallel(
            model, manager, input_shape=SHAPE,
            custom_converters={_Leaf: lambda m: m, _Subclass: lambda m: nn.Identity()},
        )  # fmt: skip

    with caplog.at_level(logging.INFO):
        on_threads(3, convert)
    line = (
        "domain parallel: 2 DomainParallelConv2d, 1 DomainParallelGroupNorm; trusted: "
        "1 Identity, 1 _Leaf; not verified numerically: credit-dp verify does"
    )
    assert [record.getMessage() for record in caplog.records] == [line] * 3


def test_the_summary_of_an_unplanned_model_says_so(caplog):
    with caplog.at_level(logging.INFO):
        convert_to_domain_parallel(small_cnn(), _mock())
    assert "planned and compared at the first forward; not verified" in caplog.text


def test_only_rows_are_sharded():
    longitude = r"shard_dim: -?\d is longitude, which can't be sharded"
    for dim, shape, message in [
        (-3, None, "only latitude rows"),
        (1, None, "only latitude rows"),
        (2, (1, 2, 3, 8, 8), "only latitude rows"),
        (-1, None, longitude),
        (3, (1, 2, 8, 8), longitude),
        (3, ((1, 2, 8, 8),), longitude),
    ]:
        with entry((dim, shape)), pytest.raises(UserError, match=message):
            convert_to_domain_parallel(small_cnn(), _mock(), shard_dim=dim, input_shape=shape)


def test_longitude_is_refused_at_the_first_forward():
    def refused(manager):
        model = convert_to_domain_parallel(small_cnn(), manager, shard_dim=3)
        with pytest.raises(UserError, match="3 is longitude"):
            model(torch.zeros(1, 2, 4, 6))

    on_threads(2, refused)


def test_rows_may_be_counted_from_the_start():
    def planned(manager):
        for dim, shape in [(2, (1, 4, 8, 6)), (3, (1, 4, 3, 8, 6)), (-2, (1, 4, 3, 8, 6))]:
            kind = nn.Conv2d if len(shape) == 4 else nn.Conv3d
            model = nn.Sequential(kind(4, 4, 3, padding=1))
            convert_to_domain_parallel(model, manager, shard_dim=dim, input_shape=shape)
            assert model(torch.zeros(*shape[:-2], 4, 6)).shape[-2] == 4, (dim, shape)

    on_threads(2, planned)


class _Attention(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


def test_windows_are_read_from_the_model():
    down = (nn.Conv2d(1, 1, 4, 2, 1), nn.Conv3d(1, 1, (1, 3, 3), (1, 3, 1)))
    model = nn.Sequential(
        _Attention(window_size=(2, 7, 12)), down[0], _Attention(window=4, window_size=5),
        _Attention(window_size=None), down[1], nn.ModuleList([_Attention(window_size=[5, 3])]),
    )  # fmt: skip
    assert validate_sharding_constraints(model, 2 * 3 * 7 * 20) == []
    assert validate_sharding_constraints(model, 16) == [
        "level 0: 16 rows are not a multiple of the window 7",
        "level 1: 8 rows are not a multiple of the stride 3",
        "level 1: 8 rows are not a multiple of the window 5",
        "level 2: 2 rows are not a multiple of the window 5",
    ]
    assert validate_sharding_constraints(model, 16, [8, 4, 1]) == [
        "level 1: 8 rows are not a multiple of the stride 3",
    ]


def test_constraints_are_readable():
    model = nn.Sequential(nn.Conv2d(1, 1, 4, 2, 1), nn.Conv2d(1, 1, 3, 2, 1))
    assert validate_sharding_constraints(model, 16) == []
    assert validate_sharding_constraints(model, 6) == [
        "level 1: 3 rows are not a multiple of the stride 2"
    ]
    assert (
        "not a multiple of the window 5" in validate_sharding_constraints(model, 16, [5, 4, 2])[0]
    )
    assert validate_sharding_constraints(model, 16, [8, 4, 2, 3]) == [
        "level 2: 4 rows are not a multiple of the window 3"
    ]
    assert "less than one row" in validate_sharding_constraints(model, 2)[-1]
    converted = convert_to_domain_parallel(model, _mock())
    assert validate_sharding_constraints(converted, 6) != []

"""The converter: names stay, what has no rule is refused, planning changes nothing."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
    DomainParallelPeriodicConv2d,
    convert_to_domain_parallel,
    validate_sharding_constraints,
)
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import on_threads


def _model():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 1),
        nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2)),
    )


def _mock():
    """A manager that can tell its size and nothing else."""
    return Mock(spec=["domain_parallel_size"], domain_parallel_size=2)


def test_what_is_replaced_and_what_stays():
    model = _model()
    pointwise, parameters = model[3], dict(model.named_parameters())
    keys = list(model.state_dict())
    converted = convert_to_domain_parallel(model, _mock())
    assert converted is model
    assert [type(m) for m in (model[0], model[1], *model[4])] == [
        DomainParallelConv2d,
        DomainParallelGroupNorm,
        DomainParallelConv2d,
        DomainParallelConvTranspose2d,
    ]
    assert model[3] is pointwise
    assert list(model.state_dict()) == keys
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in after)


def test_conversion_is_idempotent_and_one_rank_converts_nothing():
    model = convert_to_domain_parallel(_model(), _mock())
    layers = list(model.modules())
    convert_to_domain_parallel(model, _mock())
    assert list(model.modules()) == layers
    single = Mock(spec=["domain_parallel_size"], domain_parallel_size=1)
    plain = _model()
    types = [type(m) for m in plain.modules()]
    assert [type(m) for m in convert_to_domain_parallel(plain, single).modules()] == types


def test_a_layer_used_twice_stays_one_layer():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = convert_to_domain_parallel(
        nn.ModuleDict({"a": conv, "b": nn.Sequential(conv)}), _mock()
    )
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], DomainParallelConv2d)


def test_the_root_may_be_a_layer():
    conv = nn.Conv2d(2, 2, 3)
    converted = convert_to_domain_parallel(conv, _mock())
    assert isinstance(converted, DomainParallelConv2d)
    assert converted.weight is conv.weight


def test_casts_copies_loads_and_modes_reach_the_wrapped_layer():
    model = convert_to_domain_parallel(_model(), _mock())
    model.double()
    assert model[0].conv.weight.dtype == torch.float64
    other = copy.deepcopy(model)
    assert other[0].conv.weight is other[0].weight
    assert other[0].weight is not model[0].weight
    plain = _model().double()
    model.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(model[0].conv.weight, plain[0].weight)
    assert model[0].weight is model[0].conv.weight
    model.eval()
    assert not model[0].conv.training
    assert "kernel_size=(3, 3)" in repr(model[0])


def test_custom_converters_replace_whole_wrappers():
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


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(4), "0: BatchNorm2d has no rule for bands of rows"),
        (nn.LayerNorm((8, 8)), "0: LayerNorm over"),
        (nn.AvgPool2d(2), "0: AvgPool2d has no rule"),
        (nn.MultiheadAttention(4, 2), "0: MultiheadAttention has no rule"),
    ],
)
def test_layers_without_a_rule_are_refused(layer, message):
    with pytest.raises(UserError, match=message) as caught:
        convert_to_domain_parallel(nn.Sequential(layer), _mock())
    assert "custom_converters" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_leaf_can_be_registered():
    model = nn.Sequential(_Leaf())
    convert_to_domain_parallel(model, _mock(), custom_converters={_Leaf: lambda m: m})
    assert type(model[0]) is _Leaf


@pytest.mark.parametrize(("dim", "shape"), [(-1, None), (-3, None), (3, (1, 2, 8, 8)), (1, None)])
def test_only_rows_are_sharded(dim, shape):
    with pytest.raises(UserError, match="only latitude rows"):
        convert_to_domain_parallel(_model(), _mock(), shard_dim=dim, input_shape=shape)


def test_constraints_are_readable():
    model = nn.Sequential(nn.Conv2d(1, 1, 4, 2, 1), nn.Conv2d(1, 1, 3, 2, 1))
    assert validate_sharding_constraints(model, 16) == []
    assert validate_sharding_constraints(model, 6) == [
        "level 1: 3 rows are no multiple of the stride 2"
    ]
    assert "no multiple of the window 5" in validate_sharding_constraints(model, 16, [5, 4, 2])[0]
    assert "less than one row" in validate_sharding_constraints(model, 2)[-1]
    converted = convert_to_domain_parallel(model, _mock())
    assert validate_sharding_constraints(converted, 6) != []


def test_equality_finds_a_wrong_layer():
    class Wrong(nn.Sequential):
        row_rules = {_Subclass: "keep"}  # noqa: RUF012

    from tests.ranks import RankError

    with pytest.raises(RankError, match="output"):
        on_threads(
            2, assert_same_as_whole_globe, lambda: Wrong(_Subclass(2, 2, 1)), (), (1, 2, 6, 4)
        )

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
    HaloExchange,
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


def _planned(manager, model, shape):
    convert_to_domain_parallel(model, manager, input_shape=shape)


def _changes_nothing(manager):
    model = _model()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    _planned(manager, model, (1, 2, 10, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert vars(manager.transport.traffic) == dict.fromkeys(vars(manager.transport.traffic), 0)


def test_planning_sends_nothing_and_changes_nothing():
    # One rank of two: a message or a collective would wait for the other.
    on_threads(1, _alone_of_two)


def _alone_of_two(manager):
    from credit_dp.domain_parallel import DomainParallelManager
    from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld

    _changes_nothing(
        DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2, timeout=1.0), 0))
    )


class _Flips(nn.Module):
    """Code between layers that drops rows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x[..., 1:, :])


class _CropsOutput(_Flips):
    def forward(self, x):
        return self.conv(x)[..., 1:, :]


class _Decides(_Flips):
    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else x


class _HasMask(_Flips):
    def __init__(self):
        super().__init__()
        self.mask = nn.Parameter(torch.ones(9, 1))

    def forward(self, x):
        return self.conv(x) * self.mask


class _CountsRows(_Flips):
    def forward(self, x):
        return self.conv(x), x.shape[-2]


class _ChoosesLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return self.a(x) if x.shape[-2] > 6 else self.b(x)


class _OrdersLayers(_ChoosesLayer):
    def forward(self, x):
        layers = [self.a, self.b] if x.shape[-2] > 6 else [self.b, self.a]
        return layers[1](layers[0](x))


class _Remembers(_Flips):
    """State that a forward changes: a buffer's value, a new buffer, an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.seen = None

    def forward(self, x):
        self.calls.add_(1)
        self.last = self.last + 1
        self.seen = x.detach()
        return self.conv(x)


@pytest.mark.parametrize(
    ("model", "rows", "message"),
    [
        (
            _model(),
            5,
            "4.0: 2 rows can't be shared by 3 ranks. Lower parallel.domain to 2",
        ),
        (_Flips(), 8, "conv: rank 0 of 3 has 2 rows where its band of 7 rows has 3"),
        (_CropsOutput(), 9, r"test_convert.py:\d+: aten.slice: mixes rows"),
        (_HasMask(), 9, r"test_convert.py:\d+: fails on a band of rows .*the globe's rows"),
        (_CountsRows(), 9, "output: is 9 of the globe and 3 of a band of rows"),
        (nn.Sequential(nn.Softmax(-2)), 9, "aten._softmax: mixes rows"),
        (_Decides(), 9, r"test_convert.py:\d+: control flow or shapes that depend on data"),
    ],
)
def test_what_cannot_be_planned_is_refused(model, rows, message):
    def refused(manager):
        with pytest.raises(UserError, match=message) as caught:
            _planned(manager, copy.deepcopy(model), (1, 2, rows, 6))
        assert "\n" not in str(caught.value)

    on_threads(3, refused)


@pytest.mark.parametrize("model", [_ChoosesLayer(), _OrdersLayers()])
def test_layers_chosen_by_the_number_of_rows_are_refused(model):
    def refused(manager):
        with pytest.raises(UserError, match="control flow depends on the number of rows"):
            _planned(manager, copy.deepcopy(model), (1, 2, 9, 6))

    on_threads(3, refused)


def test_a_refused_model_is_the_plain_one_again():
    def refused(manager):
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), _CropsOutput())
        types = [type(m) for m in model.modules()]
        with pytest.raises(UserError):
            _planned(manager, model, (1, 2, 9, 6))
        assert [type(m) for m in model.modules()] == types
        with pytest.raises(UserError):
            convert_to_domain_parallel(nn.Sequential(model, nn.AvgPool2d(2)), manager)
        assert [type(m) for m in model.modules()] == types

    on_threads(3, refused)


def test_a_refusal_at_the_first_forward_stays():
    def refused(manager):
        model = convert_to_domain_parallel(_CropsOutput(), manager)
        for _ in range(2):
            with pytest.raises(UserError, match="mixes rows"):
                model(torch.zeros(1, 2, 3, 6))

    on_threads(3, refused)


def test_copies_of_an_unplanned_model_plan_for_themselves():
    def copies(manager):
        model = convert_to_domain_parallel(_model(), manager)
        other = copy.deepcopy(model)
        for one in (other, model):
            assert one(torch.zeros(1, 2, 4, 6)).shape == (1, 2, 4, 6)
            assert not one._forward_pre_hooks
            assert one[0]._planned == {8: 8}

    on_threads(2, copies)


def test_planning_leaves_state_and_modes_alone():
    def state(manager):
        model = _Remembers().eval()
        calls, last = model.calls, model.last
        convert_to_domain_parallel(model, manager, input_shape=(1, 2, 9, 6))
        assert model.calls is calls
        assert model.last is last
        assert (calls.item(), last.item(), model.seen) == (0, 0, None)
        assert not any(m.training for m in model.modules())
        assert type(model(torch.zeros(1, 2, 3, 6))) is torch.Tensor

    on_threads(3, state)


def test_looking_at_bands_changes_no_plan():
    def look(manager):
        if manager.domain_rank == 1:
            manager.rows(61)
        model = nn.Sequential(*(nn.Conv2d(2, 2, 3, 2, 1) for _ in range(2)))
        _planned(manager, model, (1, 2, 61, 6))
        return manager.partition(61)

    assert len(set(on_threads(4, look))) == 1


class _PadsByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.halo, self.conv = HaloExchange(1), nn.Conv2d(2, 2, 3, padding=(0, 1))

    def forward(self, x):
        return self.conv(self.halo(x))


def test_halo_exchange_inside_a_registered_module():
    def pads(manager):
        generator = torch.Generator().manual_seed(0)
        plain = nn.Conv2d(2, 2, 3, padding=1)
        x = torch.randn(1, 2, 9, 6, generator=generator)

        def by_hand(conv):
            module = _PadsByHand()
            module.conv.load_state_dict(conv.state_dict())
            return module

        model = nn.Sequential(copy.deepcopy(plain))
        convert_to_domain_parallel(
            model, manager, custom_converters={nn.Conv2d: by_hand}, input_shape=(1, 2, 9, 6)
        )
        y = model(x[..., manager.rows(9), :])
        torch.testing.assert_close(y, plain(x)[..., manager.rows(9), :])

    on_threads(3, pads)


def test_backward_hooks_of_a_layer_stay():
    calls = []

    def hooked(manager):
        model = _model()
        model[0].register_full_backward_hook(lambda *_: calls.append(1))
        convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        model(torch.zeros(1, 2, 4, 6, requires_grad=True)).sum().backward()

    on_threads(2, hooked)
    assert calls == [1, 1]


def _wrong_height(manager):
    model = convert_to_domain_parallel(_model(), manager, input_shape=(1, 2, 8, 6))
    with pytest.raises(UserError, match=r"rank \d got 5 rows, the plan has \{8: 4\}"):
        model(torch.zeros(1, 2, 5, 6))


def test_another_height_than_planned_is_refused():
    on_threads(2, _wrong_height)


def _two_batches(manager):
    model = convert_to_domain_parallel(_model(), manager, input_shape=(1, 2, 8, 6))
    for batch in (1, 3):
        assert model(torch.zeros(batch, 2, 4, 6)).shape == (batch, 2, 4, 6)


def test_any_batch_size_runs():
    on_threads(2, _two_batches)


class _TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x, scale):
        return self.conv(x) * scale


def _two_inputs(manager):
    shapes = ((1, 2, 8, 6), (1, 2, 1, 1))
    model = convert_to_domain_parallel(_TwoInputs(), manager, input_shape=shapes)
    assert model(torch.ones(1, 2, 4, 6), torch.ones(1, 2, 1, 1)).shape == (1, 2, 4, 6)


def test_an_input_without_rows_is_replicated():
    on_threads(2, _two_inputs)


def test_hooks_run_once():
    def hooked(manager):
        calls = []
        model = _model()
        model[0].register_forward_hook(lambda *_: calls.append(1))
        convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        planning = len(calls)
        model(torch.zeros(1, 2, 8 // manager.domain_parallel_size, 6))
        return len(calls) - planning

    assert on_threads(2, hooked) == [1, 1]


def test_no_gradients_no_exchange_backward():
    def frozen(manager):
        model = convert_to_domain_parallel(_model(), manager, input_shape=(1, 2, 8, 6))
        with torch.no_grad():
            model(torch.zeros(1, 2, 4, 6))
        forward = manager.transport.traffic.messages
        model(torch.zeros(1, 2, 4, 6)).sum().backward()
        # Only the first layer exchanges here, and its input needs no gradient.
        assert manager.transport.traffic.messages == 2 * forward

    on_threads(2, frozen)


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

"""Converting back, planning again, and models whose parameters have no data yet."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelManager,
    DomainParallelPeriodicConv2d,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    replan,
    shard_tensor,
)
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.ranks import DEVICE, on_threads, seeded

SHAPE = (2, 3, 13, 6)


class UserModel(nn.Module):
    """Has code, a shared layer, a row tensor, and a layer that a custom converter replaces."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.blocks = nn.Sequential(self.conv, nn.GroupNorm(3, 3), nn.SiLU(), self.conv)
        self.periodic = PeriodicConv2d(3, 3)
        self.columns = nn.Parameter(torch.randn(3, 1, 6))
        self.batch = nn.BatchNorm2d(3)
        self.replaced = Doubles()
        self.register_buffer("constant", torch.ones(3, 1, 1))

    def forward(self, x):
        x = self.blocks(x + self.columns) * self.constant + torch.arange(3.0)[:, None, None]
        x = self.batch(self.periodic(self.replaced(x)))
        return x - x.mean(1, keepdim=True)


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        return self.weight * x


class AlsoDoubles(Doubles):
    """Replaces `Doubles`, with the same names and other parameters."""


CONVERTERS = {
    PeriodicConv2d: lambda module: DomainParallelPeriodicConv2d(module),
    Doubles: lambda module: AlsoDoubles().to(module.weight.device),
}


def _converted(model, manager, **settings):
    return convert_to_domain_parallel(
        model, manager, custom_converters=CONVERTERS, **{"input_shape": SHAPE, **settings}
    )


def _description(model):
    """Return everything that a conversion may have changed."""
    return [
        (name, module, type(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def _convert_and_back(manager, plain, planned):
    model, state = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
    before = _description(model)
    x = torch.randn(SHAPE, generator=seeded(0))
    expected = plain(x)
    for _ in range(2):
        converted = _converted(model, manager, input_shape=SHAPE if planned else None)
        assert converted is model
        band = converted.eval()(shard_tensor(x, manager=manager))
        assert any(isinstance(module, RowLayer) for module in model.modules())
        assert convert_from_domain_parallel(model) is model
        assert _description(model) == before
        assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
        assert not model.conv.training
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(gather_tensor(band, manager=manager), expected)


@pytest.mark.parametrize("planned", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_convert_and_back(planned):
    on_threads(3, _convert_and_back, UserModel().eval(), planned)


def _trained(manager, plain):
    """Values, dtypes and hooks of the converted model stay after converting back."""
    model = _converted(copy.deepcopy(plain), manager)
    model.load_state_dict({k: 2 * v for k, v in plain.state_dict().items()}, assign=True)
    model.double()
    hooked = []
    model.conv.register_full_backward_hook(lambda *_: hooked.append(1))
    convert_from_domain_parallel(model)
    assert type(model.replaced) is Doubles
    assert model.replaced.weight.item() == 4.0
    assert all(p.dtype == torch.float64 for p in model.parameters())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], 2 * value.double(), check_dtype=False)
    model(torch.randn(SHAPE, dtype=torch.float64)).sum().backward()
    assert hooked


def test_values_and_hooks_since_conversion_stay():
    on_threads(2, _trained, UserModel().eval())


def test_the_root_may_be_a_layer():
    def root(manager):
        conv = nn.Conv2d(2, 2, 3)
        converted = convert_to_domain_parallel(conv, manager, input_shape=(1, 2, 9, 6))
        assert type(converted) is DomainParallelConv2d
        assert convert_from_domain_parallel(converted) is conv
        assert convert_from_domain_parallel(DomainParallelConv2d(conv)) is conv
        by_hand = nn.Sequential(DomainParallelConv2d(conv))
        assert convert_from_domain_parallel(by_hand)[0] is conv

    on_threads(2, root)


def test_a_layer_that_was_exchanged_meanwhile_stays():
    def exchanged(manager):
        conv = nn.Conv2d(3, 3, 3, padding=1)
        model = nn.Sequential(conv, Doubles(), nn.Conv2d(3, 3, 1), Doubles())
        mine = nn.Conv2d(3, 3, 5, padding=2), nn.Identity(), nn.Tanh()
        before = model[3]
        _converted(model, manager)
        model[0], model[1], model[2] = mine
        convert_from_domain_parallel(model)
        assert tuple(model) == (*mine, before)

    on_threads(2, exchanged)


class AddsFlipped(nn.Module):
    """Sends rows to the other end of the globe, which only tensors of the globe can."""

    def forward(self, x):
        return x + x.flip(-2)


@pytest.mark.parametrize("other", [nn.Identity, AddsFlipped])
def test_a_module_that_was_put_around_a_layer_meanwhile_stays(other):
    layers = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
    unsharded = nn.Sequential(next(layers), other(), next(layers)).double()
    x = torch.randn(SHAPE, dtype=torch.float64)

    def around_the_first(model):
        model[0] = nn.Sequential(model[0], nn.ReLU())
        return model[0]

    def wrapped(manager):
        model = copy.deepcopy(unsharded)
        layer = model[0]
        convert_to_domain_parallel(model, manager)
        around = around_the_first(model)
        band = model(shard_tensor(x, manager=manager))
        torch.testing.assert_close(gather_tensor(band, manager=manager), expected)
        convert_from_domain_parallel(model)
        assert model[0] is around
        assert around[0] is layer

    expected = copy.deepcopy(unsharded)
    around_the_first(expected)
    expected = expected(x)
    on_threads(2, wrapped)


def test_conversions_of_parts_and_of_all_are_undone():
    def parts(manager):
        model = UserModel()
        before = _description(model)
        convert_to_domain_parallel(model.blocks, manager)
        _converted(model, manager)
        _converted(model, manager)
        band = model(shard_tensor(torch.ones(SHAPE), manager=manager))
        assert band.shape[2] == manager.partition(13).sizes[manager.domain_rank]
        convert_from_domain_parallel(model)
        assert _description(model) == before
        assert model(torch.ones(SHAPE)).shape == SHAPE

    on_threads(2, parts)


def test_a_copy_converts_back_by_itself():
    def copied(manager):
        model = _converted(UserModel(), manager)
        other = copy.deepcopy(model)
        convert_from_domain_parallel(other)
        assert not any(isinstance(module, RowLayer) for module in other.modules())
        assert isinstance(model.conv, RowLayer)
        assert model.columns.shape == other.columns.shape == (3, 1, 6)
        model(shard_tensor(torch.ones(SHAPE), manager=manager))
        assert other(torch.ones(SHAPE)).shape == SHAPE

    on_threads(2, copied)


def test_a_plain_model_and_one_rank_are_left_alone():
    model = UserModel()
    before = _description(model)
    assert convert_from_domain_parallel(model) is model
    convert_to_domain_parallel(model, DomainParallelManager(1, 1))
    assert _description(model) == before
    with pytest.raises(UserError, match="was not converted"):
        replan(model, SHAPE)


def _replanned(manager, plain):
    model = convert_to_domain_parallel(copy.deepcopy(plain), manager, input_shape=(1, 3, 13, 6))
    for height in (13, 20, 9):
        if height != 13:
            replan(model, (1, 3, height, 6))
        x = torch.randn(1, 3, height, 6, generator=seeded(height))
        band = model(shard_tensor(x, manager=manager))
        torch.testing.assert_close(gather_tensor(band, manager=manager), plain(x))
    # The first of the levels with too few rows, and how many ranks the lowest of them allows.
    with pytest.raises(UserError, match=r"2 rows can't be shared by 3 ranks\. .* to 1\.$"):
        replan(model, (1, 3, 2, 6))
    model(shard_tensor(torch.ones(1, 3, 9, 6), manager=manager))  # the old plan stays


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 3, 3, stride=2, padding=1)

    def forward(self, x):
        y = self.down(x)
        return y - y.mean(1, True)


def test_replan():
    on_threads(3, _replanned, Strided())


def test_replan_before_the_first_forward():
    plain = Strided()

    def later(manager):
        model = convert_to_domain_parallel(copy.deepcopy(plain), manager)
        replan(model, (1, 3, 8, 6))
        assert model(torch.ones(1, 3, 4, 6)).shape == (1, 3, 2, 3)
        replan(model, (1, 3, 16, 6))
        assert model(torch.ones(1, 3, 8, 6)).shape == (1, 3, 4, 3)

    on_threads(2, later)


def _without_data(manager, planned):
    plain = UserModel().eval().double()
    with torch.random.fork_rng(devices=[]):
        generator = seeded(0)
        for tensor in plain.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5, generator=generator)
    with torch.device("meta"):
        model = UserModel().eval().double()
    _converted(model, manager, input_shape=SHAPE if planned else None)
    assert all(p.device.type == "meta" and type(p) is nn.Parameter for p in model.parameters())
    assert all(b.device.type == "meta" for b in model.buffers())
    model.to_empty(device=DEVICE)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    band = model(shard_tensor(x, manager=manager))
    torch.testing.assert_close(gather_tensor(band, manager=manager), plain(x))
    convert_from_domain_parallel(model)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("planned", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_parameters_on_the_meta_device(planned):
    on_threads(3, _without_data, planned)

"""Planning: refusals, state left alone, and calls of the planned model."""

from __future__ import annotations

import copy
import random
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelManager,
    HaloExchange,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.convert import PlanAtFirstForward
from credit_dp.domain_parallel.decide import counting_manager, plan_report
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.domain_parallel.models import small_cnn
from tests.ranks import on_threads, seeded
from tests.tables import entry


def _planned(manager, model, shape):
    convert_to_domain_parallel(model, manager, input_shape=shape, whole_ops="refuse")


@pytest.mark.slow
def test_a_plan_in_a_thread_leaves_the_driver_alone(monkeypatch):
    """Torch would replace it by an object that ends with the thread; see `FakeModeOfThread`."""
    calls = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: calls.append(1))
    on_threads(2, lambda manager: _planned(manager, small_cnn(), (1, 2, 10, 6)))
    assert not calls


def _changes_nothing(manager):
    model = small_cnn()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    _planned(manager, model, (1, 2, 10, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert vars(manager.transport.traffic) == dict.fromkeys(vars(manager.transport.traffic), 0)


def test_planning_sends_nothing_and_changes_nothing():
    # One rank of two: a message or a collective would wait for the other.
    transport = ThreadTransport(ThreadWorld(2, timeout=1.0), 0)
    _changes_nothing(DomainParallelManager(2, 2, transport=transport))


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


class _SortsRows(_Flips):
    def forward(self, x):
        return self.conv(x).sort(-2).values


class _Decides(_Flips):
    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else x


class _HasPlainMask(_Flips):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(9, 1)

    def forward(self, x):
        return self.conv(x) * self.mask


class _CountsRows(_Flips):
    def forward(self, x):
        return self.conv(x), x.shape[-2]


class _ListsRows(_Flips):
    def forward(self, x):
        return self.conv(x), list(range(x.shape[-2]))


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


class _AsksTypes(nn.Module):
    """Branches on the type of a layer, which sharding replaces."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                x = torch.tanh(x)
        return x


class _Draws(nn.Module):
    """Runs a layer by chance."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x) if random.random() < 2 else x


def test_numbers_of_python_stay_where_a_model_draws_some():
    states = random.getstate(), np.random.get_state()[1].tolist()
    manager = counting_manager(2)
    convert_to_domain_parallel(_Draws(), manager, input_shape=(1, 2, 9, 6))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


FILE = r"test_model_plan.py:\d+: "
OTHERWISE = "is called otherwise on a band than on the globe"
# A model, rows, and why its code can't run on plain bands.
ON_GLOBE = [
    (small_cnn, 5, "4.0: 2 rows can't be shared by 3 ranks. Lower parallel.domain to 2"),
    (_Flips, 8, FILE + "aten.slice changes the bands of ranks"),
    (_CropsOutput, 9, FILE + "aten.slice changes the bands of ranks"),
    (_HasPlainMask, 9, FILE + OTHERWISE + ".* 9"),
    (_ListsRows, 9, "output: " + OTHERWISE),
    (_CountsRows, 9, "output: " + OTHERWISE),
    (lambda: nn.Sequential(nn.Flatten(1)), 9, "output: .* has its rows elsewhere"),
    (_SortsRows, 9, FILE + "aten.sort needs rows of other ranks"),
    (_Decides, 9, FILE + "aten.sum needs rows of other ranks"),
    (_ChoosesLayer, 9, FILE + "control flow depends on the number of rows"),
    (_OrdersLayers, 9, FILE + "control flow depends on the number of rows"),
    (_AsksTypes, 9, FILE + OTHERWISE),
    (_Draws, 9, "^_Draws: draws random numbers of Python or NumPy"),
]


def test_what_plain_bands_can_not_compute_computes_on_the_globe():
    for build, rows, message in ON_GLOBE:
        with entry((build, message)):
            report = plan_report(build(), (1, 2, rows, 6), 3)
            assert re.search(message, report.refusal), report.refusal
            assert "\n" not in report.refusal
            assert not report.problems


class _Wide(_Flips):
    """Code of many operators that acts on each row by itself."""

    def __init__(self):
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.3), nn.Linear(2, 2)
        self.place = nn.Parameter(torch.randn(2, 1, 6))

    def forward(self, x):
        y = self.conv(x).relu_()
        y[:, :1] *= 2
        tokens = self.mix(y.permute(0, 2, 3, 1)).flatten(1, 2).softmax(-1)
        y = self.drop(tokens.view(len(x), -1, 6, 2).permute(0, 3, 1, 2))
        return torch.cat([y[..., ::2], y[..., 1::2]], -1) * self.place + x.mean(1, keepdim=True)


class _DropsPooled(_Flips):
    def __init__(self):
        super().__init__()
        self.pool, self.drop = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.3)

    def forward(self, x):
        return x * self.drop(self.pool(x))


class _AddsUp(_Flips):
    """Keeps for the next step what ranks would have to sum up."""

    def __init__(self):
        super().__init__()
        self.total = None

    def forward(self, x):
        self.total = x.detach().sum((2, 3), keepdim=True)
        return self.conv(x)


class _AtPlaces(_Flips):
    """Treats one place of the globe, as plain code does on one of several equal bands."""

    def __init__(self, treat):
        super().__init__()
        self.treat = treat

    def forward(self, x):
        return self.treat(self.conv(x))


def _first_row(y):
    y[:, :, 0] = 0
    return y


def _last_row(y):
    y[:, :, -1] = 0
    return y


AT_PLACES = {
    "first row": _first_row,
    "last row": _last_row,
    "triangle": torch.tril,
    "filled row": lambda y: y.index_fill(2, torch.tensor([1]), 0.0),
    "every second row": lambda y: y[:, :, ::2],
}


class _Sized(_Flips):
    def forward(self, x):
        return self.conv(x) / x.shape[-2]


class _Filled(_Flips):
    def forward(self, x):
        return self.conv(x) + torch.full_like(x[:, :, :1], x.shape[-2])


def test_only_what_rows_have_in_common_runs_on_plain_bands():
    assert not plan_report(_Wide(), (2, 2, 9, 6), 3).refusal
    for kind in (_DropsPooled, _AddsUp, _Sized, _Filled):
        assert plan_report(kind(), (2, 2, 9, 6), 3).refusal, kind
    for name, treat in AT_PLACES.items():
        for height in (9, 12):  # of three rows, or of four
            for ranks in (3, height // 3):
                report = plan_report(_AtPlaces(treat), (2, 2, height, 6), ranks)
                assert report.refusal, (name, height, ranks)


def _handled(y):
    with suppress(UserError):
        y[:, :, :1].zero_()
    return y


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.norm())


class _Around(torch.autograd.Function):
    """Calls a layer, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.norm()), None


class _ClipsLayer(_Flips):
    def forward(self, x):
        return _Around.apply(x, self.conv)


class _CentresSamples(_Flips):
    """Takes means over rows of so many samples in training only."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def forward(self, x):
        x = self.conv(x)
        return x - x.mean(-2, True) if self.training and len(x) == self.samples else x


class _ClipsWeight(_Flips):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x):
        return self.conv(x) * _Clip.apply(self.weight)


class _Patched(_Flips):
    """Layers that somebody has changed: a linear one, and the padding of a convolution."""

    def __init__(self, name):
        super().__init__()
        self.mix = nn.Linear(6, 6)
        module, self.patched = (self.mix, nn.Linear.forward)
        if name != "forward":
            module, self.patched = self.conv, nn.Conv2d._conv_forward
        patched = self.patched
        setattr(module, name, lambda *args: patched(module, *args) - args[0].mean(-2, True))

    def forward(self, x):
        return self.mix(self.conv(x))


class _Dilates(_Flips):
    def forward(self, x):
        for d in (1, 2):
            self.conv.dilation = self.conv.padding = (d, d)
            x = self.conv(x)
        return x


class _WritesToOne(_Flips):
    def forward(self, x):
        a, b = x * 2, x * 2
        (a if x.shape[-2] > 6 else b).add_(1)
        return self.conv(a)


class _AsksWhatItHas(_Flips):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        y = self.conv(x)
        return y.tanh() if self.ask(self.conv) else y


def _hooked():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())
    model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] / grads[0].norm(),))
    return model


HIDDEN = {
    "handled refusal": lambda: _AtPlaces(_handled),
    "function of a weight": _ClipsWeight,
    "function around a layer": _ClipsLayer,
    "one sample in training": lambda: _CentresSamples(1),
    "as many samples as are planned": lambda: _CentresSamples(2),
    "patched linear": lambda: _Patched("forward"),
    "patched convolution": lambda: _Patched("_conv_forward"),
    "changed settings": _Dilates,
    "equal tensors": _WritesToOne,
    "hook of gradients": _hooked,
    "exact type": lambda: _AsksWhatItHas(lambda conv: type(conv) is nn.Conv2d),
    "subclass": lambda: _AsksWhatItHas(lambda conv: issubclass(type(conv), nn.Conv2d)),
    "attribute": lambda: _AsksWhatItHas(lambda conv: hasattr(conv, "halo_exchange")),
}


def test_what_code_hides_computes_on_the_globe():
    for name, build in HIDDEN.items():
        with entry(name):
            assert plan_report(build(), (2, 2, 12, 6), 3).refusal


def test_a_model_on_the_globe_keeps_its_layers():
    def converted(manager):
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), _CropsOutput())
        types = [type(m) for m in model.modules()]
        _planned(manager, model, (1, 2, 9, 6))
        assert [type(m) for m in model.modules()] == types

    on_threads(3, converted)


class _Scaled(nn.Module):
    """A field and a number for each channel, in either order."""

    def __init__(self, field_first):
        super().__init__()
        self.conv, self.field_first = nn.Conv2d(2, 2, 3, padding=1), field_first

    def forward(self, a, b):
        field, scale = (a, b) if self.field_first else (b, a)
        return self.conv(field) * scale


def test_one_row_on_every_rank_is_refused_without_input_shape():
    field, row, number = (torch.ones(1, 2, *size) for size in ((3, 6), (1, 6), (1, 1)))

    def refused(manager):
        inputs = [((row, number), True), ((number, row), False), ((row, field), False)]
        for given, field_first in inputs:
            model = convert_to_domain_parallel(_Scaled(field_first), manager)
            with pytest.raises(UserError, match=r"every rank was given one row.* input_shape"):
                model(*given)
        plain = _Scaled(True)
        model = convert_to_domain_parallel(
            copy.deepcopy(plain), manager, input_shape=((1, 2, 2, 6), (1, 2, 1, 1))
        )
        rows = slice(manager.domain_rank, manager.domain_rank + 1)
        expected = plain(torch.ones(1, 2, 2, 6), number)[..., rows, :]
        torch.testing.assert_close(model(row, number), expected)

    def taken(manager):
        for given, field_first in [((field, number), True), ((number, field), False)]:
            model = convert_to_domain_parallel(_Scaled(field_first), manager)
            assert model(*given).shape == (1, 2, 3, 6)

    on_threads(2, refused)
    on_threads(2, taken)


@pytest.mark.slow
def test_copies_of_an_unplanned_model_plan_for_themselves():
    def copies(manager):
        model = convert_to_domain_parallel(small_cnn(), manager)
        other = copy.deepcopy(model)
        for one in (other, model):
            assert one(torch.zeros(1, 2, 4, 6)).shape == (1, 2, 4, 6)
            hooks = one._forward_pre_hooks.values()
            assert not any(isinstance(hook, PlanAtFirstForward) for hook in hooks)
            assert one[0]._planned_heights == {8: 8}

    on_threads(2, copies)


class _Keeps(nn.Module):
    """Keeps earlier results in a dictionary and in a list."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.made, self.past = {}, []

    def forward(self, x):
        if "scale" not in self.made:
            self.made["scale"] = torch.full((2, 1, 1), 2.0, dtype=x.dtype)
        self.past.append(x)
        return self.conv(x) * self.made["scale"]


def test_planning_leaves_what_a_model_keeps_alone():
    on_threads(3, assert_same_as_whole_globe, _Keeps, (), (1, 2, 9, 6))


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


@pytest.mark.slow
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
        generator = seeded(0)
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
        model = small_cnn()
        model[0].register_full_backward_hook(lambda *_: calls.append(1))
        convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        model(torch.zeros(1, 2, 4, 6, requires_grad=True)).sum().backward()

    on_threads(2, hooked)
    assert calls == [1, 1]


def _wrong_height(manager):
    model = convert_to_domain_parallel(small_cnn(), manager, input_shape=(1, 2, 8, 6))
    with pytest.raises(UserError, match=r"rank \d got 5 rows, the plan has \{8: 4\}"):
        model(torch.zeros(1, 2, 5, 6))


def test_another_height_than_planned_is_refused():
    on_threads(2, _wrong_height)


def _two_batches(manager, plain):
    model = convert_to_domain_parallel(copy.deepcopy(plain), manager, input_shape=(1, 2, 8, 6))
    for batch in (1, 3):
        assert model(torch.zeros(batch, 2, 4, 6)).shape == (batch, 2, 4, 6)


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


def test_any_batch_size_and_inputs_without_rows():
    on_threads(2, _two_batches, small_cnn())
    on_threads(2, _two_inputs)


@pytest.mark.slow
def test_hooks_run_once():
    def hooked(manager):
        calls = []
        model = small_cnn()
        model[0].register_forward_hook(lambda *_: calls.append(1))
        convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        planning = len(calls)
        model(torch.zeros(1, 2, 8 // manager.domain_parallel_size, 6))
        return len(calls) - planning

    assert on_threads(2, hooked) == [1, 1]


class _TakesMore(nn.Module):
    """Inputs of three dimensions beside one of four: with the batch, or without it."""

    def __init__(self, with_batch):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.with_batch = with_batch

    def forward(self, x, more):
        more = more[:, None] if self.with_batch else more[:1].expand(len(x), -1, -1, -1)
        return self.conv(torch.cat([x, more], 1))


def _inputs_of_three_dimensions(manager, with_batch):
    generator = seeded(0)
    whole = _TakesMore(with_batch).double()
    for parameter in whole.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    shapes = ((2, 2, 9, 6), (2, 9, 6))
    x, more = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    model = convert_to_domain_parallel(copy.deepcopy(whole), manager, input_shape=shapes)
    y = model(*(shard_tensor(t, manager=manager) for t in (x, more)))
    torch.testing.assert_close(gather_tensor(y, manager=manager), whole(x, more))


def test_inputs_with_and_without_a_batch_dimension():
    for with_batch in (True, False):
        on_threads(2, _inputs_of_three_dimensions, with_batch)


class _Fails(nn.Module):
    """Fails unsharded: either by its input's shape, or whatever the shape is."""

    def __init__(self, by_shape):
        super().__init__()
        self.by_shape = by_shape
        self.mix = nn.Linear(5, 3)
        self.register_buffer("weight", torch.ones(3, 3, dtype=torch.complex128))

    def forward(self, x):
        if self.by_shape:
            return self.mix(x)
        return torch.einsum("bchw,cd->bdhw", torch.fft.rfft(x), self.weight)


_DTYPES_CHECKED = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="einsum without values mixes dtypes"
)


@pytest.mark.parametrize(
    ("by_shape", "cause"),
    [(True, "[165, 8] X [5, 3]"), pytest.param(False, "complex128", marks=_DTYPES_CHECKED)],
)
def test_a_failure_has_the_cause_that_torch_names(by_shape, cause):
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    with pytest.raises(UserError) as error:
        convert_to_domain_parallel(_Fails(by_shape), manager, input_shape=(2, 3, 11, 8))
    assert cause in str(error.value)
    assert "3, 11, 8) of torch.float32" in str(error.value)
    assert ("Set input_shape" in str(error.value)) == by_shape

"""Subclasses of torch's layers are sharded only if they compute what their layer does."""

from __future__ import annotations

from contextlib import suppress

import pytest
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from credit_dp.domain_parallel import (
    DomainParallelBatchNorm,
    DomainParallelConv2d,
    DomainParallelPeriodicConv2d,
    convert_to_domain_parallel,
)
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.layers.pad import DomainParallelPadLayer
from credit_dp.domain_parallel.rules import REGISTERED, RULES, register
from credit_dp.errors import UserError
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tables import entry

SHAPE = (2, 4, 11, 6)


class Conv3x3(nn.Conv2d):
    """Differs from its layer in `__init__` only."""

    def __init__(self):
        super().__init__(4, 4, 3, padding=1)
        self.activation = nn.ReLU()

    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.1)
        nn.init.zeros_(self.bias)

    def extra_repr(self):
        return "3x3"


class Deeper(Conv3x3):
    """A subclass of a subclass."""

    gain = 2


class Border(nn.ZeroPad2d):
    def __init__(self):
        super().__init__(1)


class Norm(nn.GroupNorm):
    def __init__(self):
        super().__init__(2, 4)


class Narrow(nn.Softmax2d):
    """Kept, and audited."""


LAYERS = (Conv3x3, Deeper, Border, Norm, Narrow, lambda: spectral_norm(Conv3x3()))


def test_what_acts_as_its_layer_has_its_rule():
    for make in LAYERS:

        def build(make=make):
            return nn.Sequential(nn.Conv2d(4, 4, 1), make())

        def converted(manager, make=make, build=build):
            model = convert_to_domain_parallel(build(), manager, input_shape=SHAPE)
            assert isinstance(model[1], RowLayer) == (make is not Narrow)

        with entry(make):
            on_threads(3, assert_same_as_whole_globe, build, (), SHAPE, 1e-11)
            on_threads(2, converted)


class Flipped(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-1))


class FromInside(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Called(nn.Conv2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Frozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class Mixin:
    def forward(self, x):
        return -super().forward(x)


class Mixed(Mixin, nn.Conv2d):
    pass


class OwnPad(nn.ZeroPad2d):
    def forward(self, x):
        return 2 * super().forward(x)


def _patched():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.forward = lambda x: x
    return conv


OWN = [
    (DomainParallelConv2d, lambda: Flipped(4, 4, 3), "Flipped overrides forward"),
    (DomainParallelConv2d, lambda: FromInside(4, 4, 3), "FromInside overrides _conv_forward"),
    (DomainParallelConv2d, lambda: Called(4, 4, 3), "Called overrides __call__"),
    (DomainParallelConv2d, lambda: Mixed(4, 4, 3), "Mixed overrides forward"),
    (DomainParallelConv2d, _patched, "Conv2d overrides forward"),
    (DomainParallelBatchNorm, lambda: Frozen(4), "Frozen overrides train"),
    (DomainParallelPadLayer, lambda: OwnPad(1), "OwnPad overrides forward"),
]


def test_a_wrapper_by_hand_refuses_what_it_would_leave_out():
    for wrapper, make, message in OWN:
        with entry(message), pytest.raises(UserError, match=message):
            wrapper(make())


def test_a_conversion_refuses_or_compares_them():
    def converted(manager):
        for _, make, message in OWN:
            model = nn.Sequential(nn.Conv2d(4, 4, 1), make())
            if isinstance(model[1], Frozen):
                model.eval()
            before = type(model[1])
            with suppress(UserError):
                convert_to_domain_parallel(model, manager, input_shape=SHAPE)
            assert type(model[1]) is before, message

    on_threads(2, converted)


class Single(nn.Unfold):
    def __init__(self):
        super().__init__(1)


class Unlike(Single):
    def forward(self, x):
        return x + 1


class Mirrored(nn.Module):
    def forward(self, x):
        return x.flip(-2)


@pytest.fixture
def unfold_rule():
    yield register(nn.Unfold)(lambda layer: Mirrored())
    REGISTERED.remove(nn.Unfold)
    del RULES[nn.Unfold]


@pytest.mark.usefixtures("unfold_rule")
def test_a_registered_rule_is_trusted_for_what_acts_as_its_layer():
    def converted(manager):
        for make in (lambda: nn.Unfold(1), Single, Unlike):
            model = nn.Sequential(nn.Conv2d(4, 4, 1), make())
            convert_to_domain_parallel(model, manager, input_shape=SHAPE, whole_ops="refuse")
            assert type(model[1]) is (Unlike if make is Unlike else Mirrored), make

    on_threads(2, converted)


class Periodic(nn.Module):
    poles, padding = "reflect", 1

    def __init__(self):
        super().__init__()
        self.conv = FromInside(4, 4, 3)

    def forward(self, x):
        x = nn.functional.pad(x, (1, 1, 0, 0), mode="circular")
        return self.conv(nn.functional.pad(x, (0, 0, 1, 1), mode="reflect"))

    converters: dict  # set below: its own type


Periodic.converters = {Periodic: DomainParallelPeriodicConv2d}


def test_a_users_module_runs_its_inner_layer_sharded():
    assert isinstance(DomainParallelPeriodicConv2d(Periodic()), RowLayer)
    on_threads(3, assert_same_as_whole_globe, Periodic, (), SHAPE, 1e-11)

"""The outputs of sharded layers may be changed in place, as those of torch's layers may."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import functional
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import on_threads

LAYERS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "convolution that glues": lambda: nn.Conv2d(4, 4, 4, stride=2, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 4, 2, 1),
    "transposed without overlap": lambda: nn.ConvTranspose2d(4, 4, 2, 2),
    "pad": lambda: nn.ReflectionPad2d(2),
    "constant pad": lambda: nn.ZeroPad2d(1),
    "crop": lambda: nn.ZeroPad2d((0, 0, -1, -2)),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest upsample": lambda: nn.Upsample(scale_factor=2),
    "largest": lambda: nn.MaxPool2d(2),
    "average": lambda: nn.AvgPool2d(3, 1, 1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((5, 4)),
    "layer norm": lambda: nn.LayerNorm((12, 6)),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
}


class _ChangedInPlace(nn.Module):
    """Adds to the output of a layer and applies an activation, both in place."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.layer = nn.Conv2d(4, 4, 1), layer()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.layer(self.before(x))
        y += 0.1
        return self.activation(y)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_changed_in_place(layer):
    on_threads(3, assert_same_as_whole_globe, _ChangedInPlace, (layer,), (2, 4, 12, 6), 1e-11)


OF_SAME_ROWS = {
    "upsample": lambda: nn.Upsample((12, 6), mode="bilinear"),
    "nearest upsample": lambda: nn.Upsample(scale_factor=1),
    "constant pad": lambda: nn.ZeroPad2d(0),
    "circular pad": lambda: nn.CircularPad2d(0),
    "largest": lambda: nn.MaxPool2d(1),
    "average": lambda: nn.AvgPool2d(1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((12, 6)),
}


class _InputIsKept(nn.Module):
    """Changes the output of a layer in place, then reads the layer's input."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.layer = nn.Conv2d(4, 4, 1), layer()

    def forward(self, x):
        x = self.before(x)
        y = self.layer(x)
        y *= 2
        return x + y


@pytest.mark.parametrize("layer", OF_SAME_ROWS.values(), ids=OF_SAME_ROWS)
def test_outputs_equal_to_the_input_are_copies(layer):
    on_threads(3, assert_same_as_whole_globe, _InputIsKept, (layer,), (2, 4, 12, 6), 1e-11)


def _roll_around(manager):
    x = torch.randn(1, 2, 3, 4)
    y = functional.roll(x, 6, -2, manager=manager)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()


def test_fields_rolled_around_are_copies():
    on_threads(2, _roll_around)

"""Layers keep the memory format channels last, of fields and of their gradients."""

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel
from credit_dp.domain_parallel.exchange import CHANNELS_LAST_FORMATS
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from tests.ranks import on_threads


class Branches(nn.Module):
    """Two convolutions that share an exchange."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = (nn.Conv2d(6, 6, k, padding=k // 2) for k in (5, 3))

    def forward(self, x):
        return self.wide(x) + self.narrow(x)


LAYERS = {
    "convolution": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 6, 3, padding=1, stride=2),
    "branches": Branches,
    "maximum": lambda: nn.MaxPool2d(2),
    "mean": lambda: nn.AvgPool2d(3, 2, 1),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "group norm": lambda: nn.GroupNorm(3, 6),
}


def channels_last(x):
    return x.to(memory_format=CHANNELS_LAST_FORMATS[x.ndim])


def keeps_format(layer, x):
    """Return whether a layer's output and the gradient of its input are channels last."""
    x_leaf = x.detach().requires_grad_()
    output = layer(x_leaf)
    output.backward(channels_last(torch.randn(output.shape)))
    fields = output, x_leaf.grad
    return all(t.is_contiguous(memory_format=CHANNELS_LAST_FORMATS[t.ndim]) for t in fields)


def layer_keeps(manager, name):
    model = nn.Sequential(LAYERS[name]()).to(memory_format=torch.channels_last)
    sharded = convert_to_domain_parallel(model, manager, input_shape=(2, 6, 24, 8))
    return keeps_format(sharded, channels_last(torch.randn(2, 6, 8, 8)))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_channels_last(name):
    assert all(on_threads(3, layer_keeps, name))


def exchange_keeps(manager, shape):
    return keeps_format(HaloExchange(2, manager=manager), channels_last(torch.randn(shape)))


@pytest.mark.parametrize("shape", [(2, 6, 7, 5), (1, 6, 2, 7, 5)])
def test_a_halo_exchange_keeps_channels_last(shape):
    assert all(on_threads(3, exchange_keeps, shape))


def exchange_of_rows_keeps(manager):
    exchange = HaloExchange(2, manager=manager)
    return keeps_format(lambda x: exchange(x[..., 1:, :]), channels_last(torch.randn(2, 6, 7, 5)))


def test_samples_with_gaps_keep_channels_last():
    assert all(on_threads(3, exchange_of_rows_keeps))

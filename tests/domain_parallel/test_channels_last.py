"""Fields whose channels lie last stay so, and so do their cotangents."""

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


def last(x):
    return x.to(memory_format=CHANNELS_LAST_FORMATS[x.ndim])


def stays(layer, x):
    """Whether what a layer makes and the cotangent of what it is given lie so."""
    given = x.detach().requires_grad_()
    made = layer(given)
    made.backward(last(torch.randn(made.shape)))
    fields = made, given.grad
    return all(t.is_contiguous(memory_format=CHANNELS_LAST_FORMATS[t.ndim]) for t in fields)


def layer_keeps(manager, name):
    model = nn.Sequential(LAYERS[name]()).to(memory_format=torch.channels_last)
    sharded = convert_to_domain_parallel(model, manager, input_shape=(2, 6, 24, 8))
    return stays(sharded, last(torch.randn(2, 6, 8, 8)))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_it(name):
    assert all(on_threads(3, layer_keeps, name))


def exchange_keeps(manager, shape):
    return stays(HaloExchange(2, manager=manager), last(torch.randn(shape)))


@pytest.mark.parametrize("shape", [(2, 6, 7, 5), (1, 6, 2, 7, 5)])
def test_a_halo_exchange_keeps_it(shape):
    assert all(on_threads(3, exchange_keeps, shape))


def exchange_of_rows_keeps(manager):
    exchange = HaloExchange(2, manager=manager)
    return stays(lambda x: exchange(x[..., 1:, :]), last(torch.randn(2, 6, 7, 5)))


def test_samples_that_lie_apart_keep_it():
    assert all(on_threads(3, exchange_of_rows_keeps))

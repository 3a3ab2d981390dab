"""Linear layers on bands, which are one node of autograd where each row is computed by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain, detach_domain
from tests.domain_parallel.band_tensor import functions

CHANNELS_LAST = (0, 2, 3, 1)


def _linear(model, x):
    return model.encoder.linear1(x.permute(CHANNELS_LAST))


def _without_gradients(model, x):
    with torch.no_grad():
        return _linear(model, x)


def _gradient(model, x):
    x = x.permute(CHANNELS_LAST)
    y = model.encoder.linear1(x).square().sum()
    return torch.autograd.grad(y, x, create_graph=True)[0]


FUNCTIONS = {
    "rows": _linear,
    "tokens": lambda m, x: m.encoder.linear1(x.flatten(2).mT),
    "rows as features": lambda m, x: m.encoder.linear1(x[:, :, :8].transpose(2, 3)),
    "gradient in other bands": lambda m, x: _linear(m, x).flip(1).cumsum(1),
    "a row": lambda m, x: m.encoder.linear1(x.permute(CHANNELS_LAST)[:, 2]),
    "weight of two layers": lambda m, x: _linear(m, x) @ m.encoder.linear1.weight,
    "computed again": lambda m, x: checkpoint(
        m.encoder.linear1, x.permute(CHANNELS_LAST), use_reentrant=False
    ),
    "without gradients": lambda m, x: _without_gradients(m, x) + x.permute(CHANNELS_LAST),
    "gradient of a gradient": _gradient,
}


@pytest.mark.parametrize("ranks", functions.RANKS)
def test_linear_layers_are_those_of_the_globe(ranks):
    height = 13 if ranks == 3 else 8  # one layer needs 8 rows
    for name, function in FUNCTIONS.items():
        shape = (2, functions.CHANNELS, height, functions.COLUMNS)
        found = None if name in ("rows as features", "gradient in other bands") else ()
        functions.check(function, shape, ranks, found)


class _OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.nodes = []

    def forward(self, x):
        y = self.layer(x)
        self.nodes.append(None if y.grad_fn is None else y.grad_fn.name())
        with torch.autocast("cpu", torch.bfloat16):
            assert self.layer(x).dtype == torch.bfloat16
        return y


def test_a_layer_is_one_node_as_long_as_its_model_computes_on_tensors_of_the_globe():
    model = _OneLayer()
    x = torch.randn(1, 2, 4, 6)
    attach_domain(model, DomainParallelManager(1, 1), [tuple(x.shape)])
    copied = copy.deepcopy(model)
    copied(x)
    with torch.no_grad():
        copied(x)
    assert copied.nodes == ["OnRowsBackward", None]
    assert copied.layer.forward.args == (copied.layer,)
    detach_domain(model)
    model(x)
    assert "forward" not in vars(model.layer)
    (node,) = model.nodes
    assert "View" in node  # by torch's operators again

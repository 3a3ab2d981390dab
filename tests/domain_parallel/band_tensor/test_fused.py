"""Linear layers and norms on bands: one node of autograd where each row is computed by itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain, detach_domain
from tests.domain_parallel.band_tensor import functions

CHANNELS_LAST = (0, 2, 3, 1)


def _linear(model, x):
    return model.encoder.linear1(x.permute(CHANNELS_LAST).contiguous())


def _without_gradients(model, x):
    with torch.no_grad():
        return _linear(model, x)


def _second(function, x):
    x = x.permute(CHANNELS_LAST).contiguous()
    return torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)[0]


def _added(x, weight):
    """Write to a field that is not contiguous, of which torch has saved a copy."""
    y = F.linear(x.permute(CHANNELS_LAST), weight)
    x += y.permute(0, 3, 1, 2)
    return x


def _gradient(model, x):
    return _second(model.encoder.linear1, x)


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
    "a function": lambda m, x: F.linear(x.permute(CHANNELS_LAST), m.matrix),
    "twice": lambda m, x: _second(
        lambda y: F.linear(F.linear(y, m.matrix, m.scale).sin(), m.matrix, m.scale), x
    ),
    "operands of each other": lambda m, x: _second(
        lambda y: F.linear(y, m.matrix * y.mean(), (m.matrix * m.scale).sum(0)), x
    ),
    "penalty on a weight": lambda m, x: torch.autograd.grad(
        F.linear(x.permute(CHANNELS_LAST).contiguous(), m.matrix, m.scale).sin().sum(),
        [m.matrix, m.scale],
        create_graph=True,
    ),
    "vectors": lambda m, x: F.linear(x.permute(CHANNELS_LAST).contiguous(), m.scale),
    "bias for columns": lambda m, x: F.linear(
        x.permute(CHANNELS_LAST).contiguous(), m.matrix, m.rows[:6, :1]
    ),
    "added to its field": lambda m, x: _added(x * 1, m.matrix),
    "norm": lambda m, x: F.layer_norm(x.permute(CHANNELS_LAST), (8,), m.scale, m.scale, 1e-3),
    "norm by one parameter": lambda m, x: _second(
        lambda y: F.layer_norm(y, (8,), m.scale, m.scale), x
    ),
    "norm without weights": lambda m, x: F.layer_norm(x.permute(0, 2, 1, 3), (8, 6)) * x.mT.sum(),
    "norm of a norm": lambda m, x: F.layer_norm(
        F.layer_norm(x.mT, x.shape[2:3]).permute(CHANNELS_LAST), (8,), m.scale
    ),
    "norm, gradient of a gradient": lambda m, x: _second(
        lambda y: F.layer_norm(y, (8,), m.scale), x
    ),
    "norm, computed again": lambda m, x: checkpoint(
        lambda y: F.layer_norm(y, (8,), m.scale), x.permute(CHANNELS_LAST), use_reentrant=False
    ),
    "norm, gradient in other bands": lambda m, x: (
        F.layer_norm(x.permute(CHANNELS_LAST), (8,)).flip(1).cumsum(1)
    ),
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
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.nodes = []

    def forward(self, x):
        y = self.layer(x)
        for node in (y.grad_fn, self.norm(y).grad_fn):
            self.nodes.append(None if node is None else type(node).__name__)
        with torch.autocast("cpu", torch.bfloat16):
            assert self.layer(x).dtype == torch.bfloat16
        return y


def test_a_layer_is_one_node_as_long_as_its_model_computes_on_tensors_of_the_globe():
    model = _OneLayer()
    x = torch.randn(1, 2, 4, 6, requires_grad=True)
    attach_domain(model, DomainParallelManager(1, 1), [tuple(x.shape)])
    model(x)
    with torch.no_grad():
        model(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        model(x)  # a checkpoint, say, which sees what torch's operators save
    detach_domain(model)
    model(x)
    first, without_gradients, seen, plain = zip(model.nodes[::2], model.nodes[1::2], strict=True)
    assert first == ("OnRowsBackward",) * 2
    assert without_gradients == (None, None)
    assert "View" in seen[0]
    assert seen == plain


class Doubled(TorchFunctionMode):
    """Doubles linear functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


class Tripled(torch.Tensor):
    """Triples linear functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 3 if func is F.linear else result


def _written(model, x):
    x = x.permute(CHANNELS_LAST).contiguous()
    bias = model.scale * 1
    y = F.linear(x, model.matrix, bias)
    bias.zero_()  # torch does not save it
    return y


def test_code_that_sees_functions_still_does():
    def plain(m, x):
        return F.linear(x.permute(CHANNELS_LAST).contiguous(), m.matrix)

    def owned(m, x):
        return F.linear(x.permute(CHANNELS_LAST).contiguous(), m.matrix.as_subclass(Tripled))

    x = torch.randn(2, functions.CHANNELS, 5, 6, requires_grad=True)
    for function, mode in ((owned, nullcontext()), (plain, Doubled())):
        model = functions.Model(function)
        with mode:
            expected = model.outputs(x)[0]
        attach_domain(model, DomainParallelManager(1, 1), [tuple(x.shape)])
        with mode:
            found = model.outputs(x)[0]
        assert torch.allclose(found, expected)


def test_what_torch_does_not_save_may_be_written_to():
    functions.check(_written, (2, functions.CHANNELS, 13, 6), 3)

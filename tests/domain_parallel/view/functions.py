"""Compare a function of fields through the global view with the same function on the globe."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel import shard_tensor
from credit_dp.domain_parallel.view.attach import attach_view
from tests.ranks import on_threads

CHANNELS = 8
COLUMNS = 6
TOLERANCE = 1e-11
RANKS = (2, 3, 4)
# On one of the numbers of ranks each has a single row, on others bands are uneven.
HEIGHTS = {2: 7, 3: 13, 4: 4}


class Model(nn.Module):
    """A function between parameters that all entries depend on."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(CHANNELS) + 0.5)
        self.matrix = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.rows = nn.Parameter(torch.randn(16, COLUMNS))
        self.attention = nn.MultiheadAttention(CHANNELS, 2)
        self.lstm = nn.LSTM(CHANNELS, CHANNELS, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(CHANNELS, CHANNELS)
        self.cell = nn.LSTMCell(CHANNELS, CHANNELS)
        self.encoder = nn.TransformerEncoderLayer(CHANNELS, 2, 8, 0.0, batch_first=True)
        self.instance_norm = nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.function(self, x * self.scale[:, None, None])

    def outputs(self, x):
        """Return the outputs as a list, complex ones as pairs of real numbers."""
        tensors = [y for y in tree_leaves(self(x)) if isinstance(y, torch.Tensor)]
        return [torch.view_as_real(y).movedim(-1, 0) if y.is_complex() else y for y in tensors]


class Cube(torch.autograd.Function):
    """A function of the user's, with its own backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def run_whole(model, x):
    """Return outputs and gradients of the unsharded model, and the weights of its loss."""
    model = copy.deepcopy(model)
    x = x.clone().requires_grad_()
    outputs = model.outputs(x)
    weights = [torch.randn(y.shape, dtype=x.dtype) for y in outputs]
    return outputs, weights, *backward(model, x, outputs, weights)


def backward(model, x, outputs, weights):
    """Return the gradients of the weighted sum of outputs, of input and parameters; and buffers."""
    losses = [
        (y * weight).sum()
        for y, weight in zip(outputs, weights, strict=True)
        if y.dtype.is_floating_point and y.requires_grad
    ]
    if losses:
        sum(losses).backward()
    parameters = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    input_grad = torch.zeros_like(x) if x.grad is None else x.grad
    return input_grad, parameters, dict(model.named_buffers())


def run_band(manager, model, x, expected, weights):
    """Return a rank's outputs and gradients, and the functions that ran whole."""
    model = copy.deepcopy(model)
    view = attach_view(model, manager, [tuple(x.shape)])
    local = shard_tensor(x, manager=manager).clone().requires_grad_()
    outputs = model.outputs(local)
    parts = [
        weight / manager.domain_parallel_size
        if y.shape == whole.shape
        else shard_tensor(weight, manager=manager)
        for y, whole, weight in zip(outputs, expected, weights, strict=True)
    ]
    return outputs, *backward(model, local, outputs, parts), set(view.whole_calls)


def check(function, shape, ranks, whole=()):
    """Compare a function on ranks with that of the globe, and what runs whole; None: anything."""
    torch.manual_seed(0)
    model = Model(function).double()
    x = torch.randn(shape, dtype=torch.float64)
    expected, weights, input_grad, parameters, buffers = run_whole(model, x)
    detached = [y.detach() for y in expected]
    results = on_threads(ranks, run_band, model, x, detached, weights)
    outputs, input_grads, all_parameters, all_buffers, whole_calls = zip(*results, strict=True)
    for i, y in enumerate(detached):
        parts = [part[i].detach() for part in outputs]
        joined = parts[0] if parts[0].shape == y.shape else torch.cat(parts, -2)
        assert_close(joined, y, "output")
    assert_close(torch.cat(input_grads, -2), input_grad, "input gradient")
    # Gradients that are zero but for rounding are compared with the largest one of the model.
    largest = max(float(grad.abs().max()) for grad in parameters.values())
    for name, grad in parameters.items():
        total = sum(part[name] for part in all_parameters)
        assert_close(total, grad, name, 1e-3 * largest)
    for name, buffer in buffers.items():
        assert_close(all_buffers[0][name], buffer, name)
    assert whole is None or whole_calls[0] == set(whole)


def assert_close(actual, expected, what, scale=0.0):
    __tracebackhide__ = True
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if actual.dtype.is_floating_point:
        largest = max(float(expected.nan_to_num().abs().max()), scale, 1e-3)
        assert torch.equal(actual.isnan(), expected.isnan()), what
        difference = (actual - expected).nan_to_num().abs()
        assert (float(difference.max()) if difference.numel() else 0.0) <= TOLERANCE * largest, what
    else:
        assert torch.equal(actual, expected), what


def rows_sent(manager, function, shape):
    """Return the rows that a rank sends in a forward and in a backward."""
    return tuple(rows for rows, _ in rows_and_messages(manager, function, shape))


def rows_and_messages(manager, function, shape):
    """Return what a rank sends in a forward and in a backward; nothing may run whole."""
    model = Model(function).double()
    view = attach_view(model, manager, [shape])
    x = torch.randn(shape, dtype=torch.float64)
    traffic = manager.transport.traffic
    counts = [(traffic.bytes, traffic.messages)]
    y = model(shard_tensor(x, manager=manager))
    counts.append((traffic.bytes, traffic.messages))
    y.sum().backward()
    counts.append((traffic.bytes, traffic.messages))
    assert not view.whole_calls
    row = x[:, :, 0].numel() * x.element_size()
    return [
        ((sent - before) / row, messages - earlier)
        for (before, earlier), (sent, messages) in pairwise(counts)
    ]

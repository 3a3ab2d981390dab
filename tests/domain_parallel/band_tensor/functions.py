"""Compare a function `f(model, x)` of fields on bands with the same function on the globe.

Tables of such functions say what has to equal one process: outputs and gradients. How a model comes
to compute on bands is known to `compute_on_bands` and `dim_of_bands` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor, is_band
from tests.ranks import RankError, on_threads
from tests.tables import entry

CHANNELS = 8
COLUMNS = 6
TOLERANCE = 1e-11
# Of three ranks bands are uneven, of four each has a single row.
RANKS = [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.exhaustive)]
HEIGHTS = {2: 7, 3: 13, 4: 4}
Function = Callable[[Any, torch.Tensor], Any]


def compute_on_bands(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[tuple[int, ...]]
) -> Mapping[str, int]:
    """Let a model compute on bands; return how often functions run whole, which a forward fills."""
    return attach_domain(model, manager, shapes).whole_calls


PLAIN = -1  # instead of a dimension


def dim_of_bands(y: torch.Tensor) -> int | None:
    """Return in which dimension a field is in bands: in none, or PLAIN where there are no ranks."""
    if not isinstance(y, BandTensor):
        return PLAIN
    return y.ndim + y.rows.dim if is_band(y) else None


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
    """Return a rank's outputs and gradients, the functions that ran whole, and what it sent.

    That is, for a forward and for its backward, a pair: rows of the field, and messages.
    """
    model = copy.deepcopy(model)
    whole_calls = compute_on_bands(model, manager, [tuple(x.shape)])
    local = shard_tensor(x, manager=manager).clone().requires_grad_()
    traffic = manager.transport.traffic
    counts = [(traffic.bytes, traffic.messages)]
    outputs = model.outputs(local)
    counts.append((traffic.bytes, traffic.messages))
    parts = [
        weight / manager.domain_parallel_size
        if y.shape == whole.shape
        else shard_tensor(weight, manager=manager)
        for y, whole, weight in zip(outputs, expected, weights, strict=True)
    ]
    gradients = backward(model, local, outputs, parts)
    counts.append((traffic.bytes, traffic.messages))
    row = x[:, :, 0].numel() * x.element_size()
    sent = [
        ((after - before) / row, messages - earlier)
        for (before, earlier), (after, messages) in pairwise(counts)
    ]
    return outputs, *gradients, set(whole_calls), sent


def check(
    function: Function,
    shape: tuple[int, ...] = (2, CHANNELS, HEIGHTS[3], COLUMNS),
    ranks: int = 3,
    whole: Collection[str] | None = (),
) -> list[list[tuple[float, int]]]:
    """Compare a function on ranks with that of the globe, and what runs whole; None: anything.

    Returns:
        what each rank sent, see `run_band`.
    """
    torch.manual_seed(0)
    model = Model(function).double()
    x = torch.randn(shape, dtype=torch.float64)
    expected, weights, input_grad, parameters, buffers = run_whole(model, x)
    detached = [y.detach() for y in expected]
    results = on_threads(ranks, run_band, model, x, detached, weights)
    outputs, input_grads, all_parameters, all_buffers, whole_calls, sent = zip(
        *results, strict=True
    )
    for i, y in enumerate(detached):
        parts = [part[i].detach() for part in outputs]
        joined = parts[0] if parts[0].shape == y.shape else torch.cat(parts, -2)
        assert_close(joined, y, f"output {i}")
    assert_close(torch.cat(input_grads, -2), input_grad, "input gradient")
    # Gradients that are zero but for rounding are compared with the largest one of the model.
    largest = max(float(grad.abs().max()) for grad in parameters.values())
    for name, grad in parameters.items():
        total = sum(part[name] for part in all_parameters)
        assert_close(total, grad, name, 1e-3 * largest)
    for name, buffer in buffers.items():
        assert_close(all_buffers[0][name], buffer, name)
    assert whole is None or whole_calls[0] == set(whole), whole_calls[0]
    return list(sent)


def check_table(
    functions: Mapping[str, Function], ranks: int, whole: Collection[str] | None = ()
) -> None:
    """Compare each function of a table; raise the errors of all that fail."""
    errors: list[Exception] = []
    for name, function in functions.items():
        try:
            with entry(name):
                check(function, (2, CHANNELS, HEIGHTS[ranks], COLUMNS), ranks, whole)
        except (AssertionError, RankError) as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(functions)} functions", errors)


def check_together(functions: Mapping[str, Function], whole: Collection[str] | None = ()) -> None:
    """Compare functions of one field in one model; if that fails, say which one is wrong."""
    try:
        check(lambda m, x: [function(m, x * 1) for function in functions.values()], whole=whole)
    except (AssertionError, RankError) as error:
        for name, function in functions.items():
            with entry(name):
                check(function, whole=whole)
        error.add_note(f"together only: {list(functions)}")
        raise


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

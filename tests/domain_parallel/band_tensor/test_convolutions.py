"""Convolutions of tensors of the globe, in both ways: values, gradients, and what they send."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.function_tables import dilated, kernel
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, HEIGHTS, RANKS, check
from tests.ranks import on_threads
from tests.tables import entry

pytestmark = pytest.mark.usefixtures("overlap")


def transposed(m, x, *sizes, **settings):
    return F.conv_transpose2d(x, kernel(m, *sizes), m.scale, **settings)


def penalty(convolve):
    """Return the gradient of a convolution's square, which is differentiated again."""

    def function(m, x):
        loss = convolve(m, x).square().sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    return function


CASES = {
    "same, wider than bands": lambda m, x: F.conv2d(x, kernel(m, 11, 3), m.scale, padding=(5, 1)),
    "even kernel": lambda m, x: F.conv2d(x, kernel(m, 4, 2), padding=(2, 1)),
    "even kernel, even dilation": lambda m, x: F.conv2d(
        x, kernel(m, 2, 1), padding=(1, 0), dilation=(2, 1)
    ),
    "strided": lambda m, x: F.conv2d(x, kernel(m, 3, 3), m.scale, (3, 2), 1),
    "steps over rows": lambda m, x: F.conv2d(x, kernel(m, 1, 1), m.scale, (3, 1)),
    "one row": lambda m, x: F.conv2d(x, kernel(m, x.shape[2], 1)).expand(-1, -1, 3, -1),
    "depthwise": lambda m, x: F.conv2d(x, kernel(m, 3, 3)[:, :1], padding=1, groups=CHANNELS),
    "transposed": lambda m, x: transposed(m, x, 4, 4, stride=2, padding=1),
    "transposed with rows that nothing reaches": lambda m, x: transposed(
        m, x, 1, 2, stride=(3, 1), output_padding=(2, 0)
    ),
    "transposed and dilated": lambda m, x: transposed(
        m, x, 3, 1, stride=2, padding=(2, 0), output_padding=1, dilation=(2, 1)
    ),
    "one dimension": lambda m, x: F.conv1d(x[..., 0], kernel(m, 3, 1)[..., 0], padding=1),
    "three dimensions": lambda m, x: F.conv3d(
        x[:, :, None], kernel(m, 3, 3)[:, :, None], padding=(0, 1, 1)
    ),
    "rows in the middle": lambda m, x: F.conv3d(
        x[..., None], kernel(m, 3, 3)[..., None], padding=(1, 1, 0)
    ),
    "rows last": lambda m, x: F.conv2d(x.mT, kernel(m, 3, 3), stride=(1, 2), padding=1),
    "rows are samples": lambda m, x: F.conv2d(x.transpose(0, 2), kernel(m, 1, 3)),
    "folded rows are samples": lambda m, x: F.conv1d(
        x.transpose(1, 2).flatten(0, 1), kernel(m, 3, 1)[..., 0], padding=1
    ),
    "folded rows": lambda m, x: F.conv1d(
        x.transpose(0, 1).flatten(1, 2)[None, ..., 0], kernel(m, 3, 1)[..., 0], padding=1
    ),
    "rows are channels": lambda m, x: F.conv2d(
        x.transpose(1, 2), m.rows[:3, :1, None, None].expand(-1, x.shape[2], 3, 1)
    ),
    "no batch": lambda m, x: F.conv2d(x[0], kernel(m, 3, 3), padding=1),
    "few rows": lambda m, x: dilated(m, x[:, :, 1:3], 2),
    "few rows, strided": lambda m, x: F.conv2d(x[:, :, :3], kernel(m, 2, 1), stride=2),
    "few rows, transposed": lambda m, x: transposed(m, x[:, :, :2], 3, 1, stride=3),
    "a kernel made of the field": lambda m, x: F.conv2d(
        x, kernel(m, 3, 3) * x.mean(), x.mean((0, 2, 3)), padding=1
    ),
    "a field that every rank has": lambda m, x: (
        x + F.conv2d(m.rows[: x.shape[2]].expand(1, CHANNELS, -1, -1), kernel(m, 3, 3), padding=1)
    ),
}
PENALTIES = {
    "same": lambda m, x: F.conv2d(x, kernel(m, 3, 3), m.scale, padding=1),
    "strided": lambda m, x: F.conv2d(x, kernel(m, 3, 3), stride=2, padding=1),
    "dilated": lambda m, x: F.conv2d(x, kernel(m, 3, 1), dilation=(2, 1)),
    "transposed": lambda m, x: transposed(m, x, 4, 4, stride=2, padding=1),
    "rows are samples": lambda m, x: F.conv2d(x.transpose(0, 2), kernel(m, 1, 2)),
}


@pytest.mark.parametrize("ranks", RANKS)
def test_convolutions_equal_those_of_the_globe(ranks):
    functions.check_table(CASES, ranks)


@pytest.mark.slow
def test_convolutions_of_one_row_of_each_rank():
    for name, function in CASES.items():
        with entry(name):
            check(function, (1, CHANNELS, 7, COLUMNS), 7)


def test_gradients_are_differentiated_again():
    functions.check_table({name: penalty(PENALTIES[name]) for name in PENALTIES}, 3)


def _traffic(manager, function, shape):
    """Return the rows that a rank sends in the forward and in the backward of a function."""
    model = functions.Model(function).double()
    model.scale.requires_grad_(False)
    attach_domain(model, manager, [shape])
    local = shard_tensor(torch.randn(shape, dtype=torch.float64), manager=manager)
    traffic, row = manager.transport.traffic, shape[0] * CHANNELS * COLUMNS * 8
    y = model(local.requires_grad_())
    forward = traffic.bytes
    y.backward(torch.ones_like(y))
    return forward / row, (traffic.bytes - forward) / row


def changed_between(m, x):
    y = x * 1
    with torch.no_grad():
        first = dilated(m, y, 1)
    y.mul_(2)
    return first + dilated(m, y, 1)


TWO_EDGES = 4.0  # of three ranks' bands: the rows next to each edge
SENT = {
    "once": (lambda m, x: dilated(m, x, 1), TWO_EDGES, TWO_EDGES),
    "twice": (lambda m, x: dilated(m, x, 1) + dilated(m, x, 1).sin(), TWO_EDGES, TWO_EDGES),
    "wider ones": (
        lambda m, x: x + sum(dilated(m, x, d) for d in (3, 1, 2)) + x.sin(),
        3 * TWO_EDGES,
        3 * TWO_EDGES,
    ),
    "recomputed": (
        lambda m, x: checkpoint(lambda y: dilated(m, y, 1).sin(), x, use_reentrant=False),
        TWO_EDGES,
        TWO_EDGES,
    ),
    "after a write": (changed_between, 2 * TWO_EDGES, TWO_EDGES),
    "a pool and a convolution": (
        lambda m, x: F.max_pool2d(x, 3, 1, 1) + dilated(m, x, 1), TWO_EDGES, TWO_EDGES
    ),
}  # fmt: skip


def test_rows_are_sent_once():
    for name, (function, forward, backward) in SENT.items():
        with entry(name):
            sent = on_threads(3, _traffic, function, (2, CHANNELS, 24, COLUMNS))
            assert [sum(rows) for rows in zip(*sent, strict=True)] == [forward, backward]


def _write_without_count(m, x):
    with torch.no_grad():
        y = x * 1
        first = dilated(m, y, 1)
        y.detach().data.mul_(2)
        return first + dilated(m, y, 1)


def test_writes_that_torch_does_not_count_are_seen():
    check(_write_without_count)


def _half_precision(manager, model, x):
    """Return output, input gradient and the weight's gradient."""
    model = copy.deepcopy(model)
    if manager is not None:
        attach_domain(model, manager, [tuple(x.shape)])
        x = shard_tensor(x, manager=manager)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, model.weight.grad


def test_half_precision():
    torch.manual_seed(0)
    model = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).bfloat16()
    x = torch.randn(2, CHANNELS, HEIGHTS[3], COLUMNS, dtype=torch.bfloat16)
    outputs, input_grads, weight_grads = zip(*on_threads(3, _half_precision, model, x), strict=True)
    found = torch.cat(outputs, -2), torch.cat(input_grads, -2), sum(weight_grads)
    for actual, expected in zip(found, _half_precision(None, model, x), strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual - expected).abs().max() <= 2**-7 * expected.abs().max()

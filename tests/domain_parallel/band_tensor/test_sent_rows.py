"""What is sent on tensors of the globe: rows once, and in backward no more than in the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, Model
from tests.domain_parallel.band_tensor.sent_rows import ROWS, cases, conv, shifted_bands
from tests.ranks import on_threads
from tests.tables import entry

SHAPE = (2, CHANNELS, ROWS, COLUMNS)
# Rules of slices, flips and indices are not what is tested here.
OF_VIEWS = {
    "slices", "rolled slices", "earth", "new zeros", "circular",
    "coarse rows lie where fine ones are", "shifted windows move there and back",
    "fewer rows than ranks stay at the poles", "a norm returns the bands that it gets",
    "fields are joined in the bands of layers",
}  # fmt: skip


def sent_by_all(function: Callable[..., Any], ranks: int) -> list[list[float]]:
    """Return rows and messages of all ranks, of the forward and of the backward; exact results."""
    sent = functions.check(function, SHAPE, ranks, None)
    return [[sum(counts) for counts in zip(*each, strict=True)] for each in zip(*sent, strict=True)]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_are_sent_once(ranks: int) -> None:
    for name, (function, rows, messages) in cases(ranks).items():
        if name in OF_VIEWS:
            continue
        with entry(name):
            for found in sent_by_all(function, ranks):
                assert found[0] == pytest.approx(rows)
                assert messages in (None, found[1])


# ---------------------------------------------------------------- what backward reads again


def attention(m: Any, x: Tensor) -> Tensor:
    query = x.flatten(2).mT
    scores = (query @ (query * 2).mT).softmax(-1)
    return (scores @ (query * 3)).mT.reshape(x.shape)


def sampled(m: Any, x: Tensor) -> Tensor:
    return F.grid_sample(x * 1, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False)


@pytest.mark.parametrize("function", [attention, sampled])
def test_what_is_gathered_stays_for_backward(function: Callable[..., Any]) -> None:
    forward, backward = sent_by_all(function, 3)
    # The gradients of all that was sent return.
    assert backward == forward


def test_what_was_written_since_is_moved_again() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        keys = x.flatten(2).mT * 1
        with torch.no_grad():
            first = x.flatten(2) @ keys
            keys *= 2
        return x + (first + x.flatten(2) @ keys).sum() * 1e-3

    functions.check(function, SHAPE, 3, None)


def test_gradients_return_to_the_bands_of_the_forward_once() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        # Each of these operators has saved a field in bands that are not those of the result.
        shifted = shifted_bands(conv(m, x, rows=1))
        for _ in range(3):
            shifted = (shifted * 2).tanh()
        return shifted + x

    _, backward = sent_by_all(function, 3)
    once = sent_by_all(lambda m, x: shifted_bands(conv(m, x, rows=1)) + x, 3)[1]
    assert backward == once


def test_gradients_of_gradients_return_too() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = (attention(m, x) * 1e-2 + shifted_bands(x).tanh() * x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad * x

    functions.check(function, SHAPE, 3, None)


# ---------------------------------------------------------------- gradients in parts


def modulated(m: Any, x: Tensor) -> Tensor:
    """Return fields that numbers scale which a network makes of no field."""
    hidden = F.layer_norm(F.silu(m.matrix @ m.scale), (CHANNELS,))
    scale, shift = torch.stack([hidden, F.leaky_relu(hidden)]).unbind()
    return x * scale[:, None, None] + shift[:, None, None]


def standardised(m: Any, x: Tensor) -> Tensor:
    """Return a convolution whose weight is standardised."""
    weight = m.matrix - m.matrix.mean(1, keepdim=True)
    return F.conv2d(x, (weight / weight.std(1, keepdim=True))[:, :, None, None])


def split_bias(m: Any, x: Tensor) -> Tensor:
    """Return fields to which both parts of a parameter are added."""
    first, second = m.matrix.split([3, 5])
    return x + torch.cat([second, first])[:, 0, None, None]


def gated(m: Any, x: Tensor) -> Tensor:
    """Return fields scaled by what a network makes of their means."""
    gate = F.silu(x.mean((2, 3)) @ m.matrix) @ m.matrix
    return x * gate.sigmoid()[..., None, None]


def collectives_of_rank(
    manager: DomainParallelManager, function: Callable[..., Any]
) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Model(function).double()
    attach_domain(model, manager, [SHAPE])
    x = shard_tensor(torch.randn(SHAPE, dtype=torch.float64), manager=manager).requires_grad_()
    traffic = manager.transport.traffic
    y = model(x)
    forward = traffic.collectives
    y.square().sum().backward()
    return forward, traffic.collectives - forward


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (modulated, 0, 0),
        (standardised, 0, 0),
        (split_bias, 0, 0),
        # The gradient of a mean is summed up once, where it meets the field.
        (gated, 1, 1),
    ],
)
def test_gradients_of_parameters_are_not_summed_up(
    function: Callable[..., Any], forward: int, backward: int
) -> None:
    functions.check(function, SHAPE, 3, None)
    assert on_threads(3, collectives_of_rank, function) == [(forward, backward)] * 3


def test_activations_send_nothing() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = F.leaky_relu(F.hardtanh(F.elu(x), -3, 3), 0.1) + F.softshrink(x) + F.hardswish(x)
        return F.softplus(F.mish(x)) + F.logsigmoid(x) + F.prelu(x, m.scale)

    assert sent_by_all(function, 3) == [[0, 0], [0, 0]]
    functions.check(function, whole=())

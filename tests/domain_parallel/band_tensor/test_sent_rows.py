"""What is sent and held on tensors of the globe: rows once, whatever form padding has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor
from credit_dp.domain_parallel.dry_run import kept_by
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, Model
from tests.domain_parallel.band_tensor.sent_rows import (
    ROWS,
    cases,
    conv,
    dilated,
    joined,
    shifted_bands,
)
from tests.ranks import on_threads
from tests.tables import entry

SHAPE = (2, CHANNELS, ROWS, COLUMNS)


def sent_by_all(function: Callable[..., Any], ranks: int) -> list[list[float]]:
    """Return rows and messages of all ranks, of the forward and of the backward; exact results."""
    sent = functions.check(function, SHAPE, ranks, None)
    return [[sum(counts) for counts in zip(*each, strict=True)] for each in zip(*sent, strict=True)]


@pytest.mark.parametrize("ranks", functions.RANKS)
def test_rows_are_sent_once(ranks: int) -> None:
    for name, (function, rows, messages) in cases(ranks).items():
        with entry(name):
            for found in sent_by_all(function, ranks):
                assert found[0] == pytest.approx(rows)
                assert messages in (None, found[1])


def test_the_gradient_of_a_table_is_not_sent() -> None:
    """A row of it is read for several latitudes: the table's gradient stays a sum of parts."""
    rows = torch.arange(ROWS) % 16
    assert sent_by_all(lambda m, x: x + m.rows[rows], 3) == [[0, 0], [0, 0]]
    # That of a field has its bands: two ranks send what they have of the 16 rows of the first one.
    assert sent_by_all(lambda m, x: x[:, :, rows], 3) == [[32, 2], [32, 2]]


@pytest.mark.parametrize(
    ("dilations", "rows"),
    [
        # Bands of 4 rows: the kernel reaches over the next one, of which it needs no row, or half.
        ((8,), [4, 4, 4, 4]),
        pytest.param((6,), [4, 6, 6, 4], marks=pytest.mark.exhaustive),
        pytest.param((4, 6, 8), [8, 12, 12, 8], marks=pytest.mark.exhaustive),
    ],
)
def test_convolutions_that_reach_over_a_band_send_each_row_once(
    dilations: tuple[int, ...], rows: list[int], overlap: bool
) -> None:
    def function(m: Any, x: Tensor) -> Any:
        return sum(dilated(m, x, dilation) for dilation in dilations)

    forward, backward = zip(*functions.check(function, (2, CHANNELS, 16, COLUMNS), 4), strict=True)
    assert [sent for sent, _ in forward] == rows
    # Every rank returns the gradients of as many rows as it has received.
    assert sum(sent for sent, _ in backward) == sum(rows)


@pytest.mark.slow
def test_rows_of_poles_stay_there() -> None:
    def beyond(rows: Tensor) -> Tensor:
        return rows.flip(2).roll(COLUMNS // 2, -1)

    def function(m: Any, x: Tensor) -> Tensor:
        return conv(m, joined(x, 4, beyond), rows=9)

    sent = functions.check(function, (2, CHANNELS, 24, COLUMNS), 4)
    halos = [4, 8, 8, 4]
    assert [forward for (forward, _), _ in sent] == halos
    assert sum(backward for _, (backward, _) in sent) == sum(halos)


def change_rows(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    rows = y[:, :, :5]
    rows += 1
    return rows


def change_rows_and_read_all(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y[:, :, :5] += 1
    return y


def test_rows_are_changed_where_they_are() -> None:
    # A part of the rows gets the bands of outputs when the model returns it.
    read, changed, both = (
        [forward[1] for forward, _ in functions.check(function, (2, CHANNELS, 12, COLUMNS))]
        for function in (lambda m, x: x[:, :, :5], change_rows, change_rows_and_read_all)
    )
    assert changed == read
    assert not any(both)


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


def spectral(m: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x) * m.scale[:, None, None]
    return torch.fft.irfft2(spectrum, s=x.shape[-2:])


def few_waves(m: Any, x: Tensor) -> Tensor:
    waves = torch.fft.rfft(x, dim=2)[:, :, :9] * m.scale[:, None, None]
    return torch.fft.irfft(torch.view_as_complex(torch.view_as_real(waves) * 2), ROWS, dim=2)


@pytest.mark.parametrize("function", [spectral, few_waves])
def test_zeros_of_spectra_are_not_sent(function: Callable[..., Any]) -> None:
    functions.check(function, SHAPE, 3)
    (forward, _), (backward, _) = sent_by_all(function, 3)
    # The gradient of half a spectrum is that of all of it, with zeros.
    assert backward == pytest.approx(forward, rel=0.01)


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


def table(m: Any, x: Tensor) -> Tensor:
    """Return fields scaled by entries of a table which a network makes of few numbers."""
    entries = F.linear(F.silu(F.linear(m.rows[:3, :1], m.scale[:, None])), m.matrix[:2])
    return x * entries[torch.arange(COLUMNS) % 3, 0]


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
        (table, 0, 0),
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


# ---------------------------------------------------------------- attention


def attention_costs(
    manager: DomainParallelManager, count: int, shape: tuple[int, ...]
) -> tuple[float, float, float]:
    """Return what a rank sends in a forward and in a backward, and holds, relative to the tokens.

    With attention of `count` heads.
    """

    def attend_and_scale(model: Any, x: Tensor) -> Tensor:
        q = x.flatten(2).transpose(1, 2).contiguous().unflatten(-1, (count, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q * 2, q * 3, q * 4)
        return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)

    model = Model(attend_and_scale).double()
    attach_domain(model, manager, [shape])
    x = torch.randn(shape, dtype=torch.float64)
    local = shard_tensor(x, manager=manager)
    traffic = manager.transport.traffic
    before = traffic.bytes
    saved: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        saved.append(y)
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        y = model(local)
    forward = traffic.bytes - before
    fields = [x for x in saved if isinstance(x, BandTensor)]
    every = [x.local for x in fields] + [kept for x in fields for kept in kept_by(x)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in every if x.ndim > 3}
    held = sum(storage.nbytes() for storage in storages.values())
    y.sum().backward()
    size = x.numel() * x.element_size()
    return forward / size, (traffic.bytes - before - forward) / size, held / size


@pytest.mark.parametrize(
    ("heads", "sent", "held"),
    [
        # Each rank has the queries, keys and values of one head, and sends their results back: of
        # four tensors, 3/4 of its quarter. It holds these, and its parts of them and of the input.
        (4, 4 * 3 / 16, 1 + 5 / 4),
        # Pairs of ranks share a head: its keys and values are sent to both.
        (2, 2 * (1 / 4 * 1 / 2) + 2 * (1 / 4 * 3 / 2), 2 * (1 / 2 + 1 / 4) + 5 / 4),
        # With one head keys and values are sent to all.
        (1, 2 * 3 / 4, 2 + 5 / 4),
    ],
)
def test_attention_sends_and_holds_what_its_heads_need(
    heads: int, sent: float, held: float
) -> None:
    costs = on_threads(4, attention_costs, heads, (1, CHANNELS, 16, COLUMNS))
    assert [forward for forward, _, _ in costs] == [sent] * 4
    assert [backward for _, backward, _ in costs] == [sent] * 4
    assert max(of_rank for _, _, of_rank in costs) <= held

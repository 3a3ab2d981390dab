"""Pools of bands equal those of the whole globe, positions of maxima included."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, gather_tensor, shard_tensor
from credit_dp.domain_parallel.layers import (
    DomainParallelAvgPool,
    DomainParallelMaxPool,
    pool,
)
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.domain_parallel.models import Moved
from tests.ranks import on_threads, seeded
from tests.tables import entry

MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVG = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
# Where each leaves rows: (B, C, H) of every column, (B, C, H, W), (B, C, D, H, W) by a new D.
MOVES = {1: "columns", 2: "nothing", 3: "levels"}


class _Levels(nn.Module):
    """Calls a pool with channels as levels of one channel."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x[:, None])


def _model(kind, options, move="nothing"):
    return _Levels(kind(**options)) if move == "levels" else Moved(kind(**options), move)


@st.composite
def windows(draw, kinds):
    """A kind of pool and its options; rows have the most of them."""
    spatial = draw(st.integers(1, 3))
    others = spatial - 1
    kernel = (*(draw(st.integers(1, 3)) for _ in range(others)), draw(st.integers(1, 6)))
    stride = (*(draw(st.integers(1, 2)) for _ in range(others)), draw(st.integers(1, 4)))
    options = {"kernel_size": kernel, "stride": stride, "ceil_mode": draw(st.booleans())}
    options["padding"] = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    if kinds is MAX:
        options["dilation"] = (*[1] * others, draw(st.integers(1, 3)))
    if kinds is AVG:
        options["count_include_pad"] = draw(st.booleans())
        if spatial > 1 and draw(st.booleans()):
            options["divisor_override"] = draw(st.integers(1, 5))
    for name, value in options.items():
        if isinstance(value, tuple):  # rows are the last dimension but one, or the only one
            options[name] = (*value[:-2], value[-1], value[-2]) if others else value[0]
    return kinds[spatial - 1], options, MOVES[spatial]


def _assert_pool(ranks, model, height):
    shape = (2, 3, height, 4)
    _, options, _ = model
    kernel, padding, dilation = (
        value if isinstance(value, int) else value[-2]
        for value in (options["kernel_size"], options.get("padding", 0), options.get("dilation", 1))
    )
    assume(height + 2 * padding >= (kernel - 1) * dilation + 1)
    made = _model(*model)(torch.zeros(shape))
    assume(made.shape[-2] >= ranks and not made.isinf().any())
    on_threads(ranks, assert_same_as_whole_globe, _model, model, shape)


@pytest.mark.parametrize("ranks", THREADS)
@given(model=windows(MAX), height=st.integers(8, 24))
def test_max_pool(ranks, model, height):
    _assert_pool(ranks, model, height)


@pytest.mark.parametrize("ranks", THREADS)
@given(model=windows(AVG), height=st.integers(8, 24))
def test_avg_pool(ranks, model, height):
    _assert_pool(ranks, model, height)


@pytest.mark.parametrize("ranks", THREADS)
@given(
    kind=st.sampled_from(["Avg", "Max"]),
    spatial=st.integers(1, 3),
    height=st.integers(8, 24),
    rows=st.none() | st.integers(8, 30),
    columns=st.sampled_from([None, 1, 3, 7]),
)
def test_adaptive_pool(ranks, kind, spatial, height, rows, columns):
    assume(spatial > 1 or rows is not None)
    size = rows if spatial == 1 else (2, rows, columns)[3 - spatial :]
    model = (getattr(nn, f"Adaptive{kind}Pool{spatial}d"), {"output_size": size}, MOVES[spatial])
    on_threads(ranks, assert_same_as_whole_globe, _model, model, (2, 3, height, 4))


def _indices(manager, kind, options, x, move):
    model = convert_to_domain_parallel(_model(kind, options), manager, input_shape=tuple(x.shape))
    made, indices = model(shard_tensor(x, manager=manager))
    return gather_tensor(made, manager=manager), gather_tensor(indices, manager=manager)


VALUES = ["random", "ties", "all -inf"]
CASES_OF_INDICES = [
    (nn.MaxPool2d, {"kernel_size": 3, "stride": 2, "padding": 1}),
    (nn.MaxPool2d, {"kernel_size": (3, 2), "stride": (2, 1), "dilation": (2, 1)}),
    (nn.MaxPool2d, {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    (nn.MaxPool3d, {"kernel_size": (2, 3, 2), "stride": (1, 2, 1), "padding": (1, 1, 0)}),
    (nn.AdaptiveMaxPool2d, {"output_size": (7, 3)}),
    (nn.AdaptiveMaxPool2d, {"output_size": 5}),
    (nn.AdaptiveMaxPool2d, {"output_size": (None, 1)}),
    (nn.AdaptiveMaxPool3d, {"output_size": (2, 5, 3)}),
]


def test_positions_of_maxima_are_those_on_the_globe():
    for (kind, options), values in zip(CASES_OF_INDICES, itertools.cycle(VALUES), strict=False):
        shape = (2, 3, 13, 6) if "2d" in kind.__name__ else (2, 2, 3, 13, 6)
        x = torch.randn(shape)
        if values == "ties":
            x = x.round()
        if values == "all -inf":
            x = torch.full_like(x, -torch.inf)
        settings = options | {"return_indices": True}
        whole, places = kind(**settings)(x)
        for made, indices in on_threads(4, _indices, kind, settings, x, "nothing"):
            assert torch.equal(made, whole), (kind, options, values)
            assert torch.equal(indices, places), (kind, options, values)


def test_one_row_per_rank():
    """Seven rows become four, and all four ranks have one."""
    options = {"kernel_size": 3, "stride": 2, "padding": 1}
    for kind, settings in [
        (nn.MaxPool2d, options),
        (nn.AvgPool2d, options),
        (nn.AdaptiveMaxPool2d, {"output_size": (5, 2)}),
        (nn.AdaptiveAvgPool2d, {"output_size": (5, 2)}),
    ]:
        for planned in (True, False):
            args = (_model, (kind, settings), (2, 2, 7, 5), 1e-12, 0.0, planned)
            with entry((kind, planned)):
                on_threads(4, assert_same_as_whole_globe, *args)


def test_rows_in_other_dimensions():
    window = {"kernel_size": 2, "stride": 1}
    cases = [(kind, window) for kind in (nn.MaxPool2d, nn.AvgPool2d)]
    cases += [(nn.LPPool2d, window | {"norm_type": 2})]
    models = [(*case, move) for case in cases for move in ("channels", "turned")]
    models += [
        (getattr(nn, f"{kind.__name__[:-2]}3d"), options | {"kernel_size": (2, 1, 2)}, "times")
        for kind, options in cases
    ]
    models += [
        (kind, {"output_size": (4, 5)}, move)
        for kind in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
        for move in ("channels", "turned")
    ]
    for model in models:
        with entry(model):
            on_threads(3, assert_same_as_whole_globe, _model, model, (2, 3, 9, 5))


def _kept(manager, dimensions):
    """Return the dtypes that a max pool saves, whose gradient has the gradient of torch's."""
    generator = seeded(0)
    kind = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dimensions]
    pool = DomainParallelMaxPool(kind(3, 2, 1), manager=manager)
    x = torch.randn((2, 4, *[8] * dimensions), dtype=torch.float64, generator=generator)
    if dimensions == 2:
        x = x.to(memory_format=torch.channels_last)
    band = shard_tensor(x, manager=manager).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        y = pool(band)
    of_band, of_globe = (
        torch.autograd.grad(grad.square().sum() + z.pow(3).sum(), inputs)[0]
        for z, inputs in ((y, band), (pool.wrapped(x.requires_grad_()), x))
        for grad in torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
    )
    torch.testing.assert_close(of_band, shard_tensor(of_globe, manager=manager))
    return [z.dtype for z in kept]


def test_max_pools_keep_no_copy_of_their_input():
    for dimensions in (2, 3):
        assert on_threads(2, _kept, dimensions) == [[torch.int64]] * 2, dimensions


def _averaged(manager, x, cotangent):
    """Return the band's output and gradient, both in channels last."""
    layer = DomainParallelAvgPool(nn.AvgPool2d((2, 3), 1, 1), manager=manager)
    x, cotangent = (
        shard_tensor(y, manager=manager).to(memory_format=torch.channels_last)
        for y in (x, cotangent)
    )
    y = layer(x.requires_grad_())
    y.backward(cotangent)
    assert y.is_contiguous(memory_format=torch.channels_last)
    return y.detach(), x.grad


@pytest.mark.parametrize("wrong", [None, True])
def test_padded_averages_of_channels_last_have_the_gradient_of_contiguous_ones(wrong, monkeypatch):
    if wrong:
        monkeypatch.setattr(pool, "has_wrong_gradient", lambda x: True)
    generator = seeded(0)
    x = torch.randn((2, 4, 13, 5), dtype=torch.float64, generator=generator).requires_grad_()
    y = nn.functional.avg_pool2d(x, (2, 3), 1, 1)
    cotangent = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    y.backward(cotangent)
    outputs, gradients = zip(*on_threads(3, _averaged, x.detach(), cotangent), strict=True)
    torch.testing.assert_close(torch.cat(outputs, -2), y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients, -2), x.grad, rtol=1e-12, atol=1e-12)

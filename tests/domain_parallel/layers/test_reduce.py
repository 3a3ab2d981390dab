"""Reductions over rows equal those of the whole globe, for any bands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import build, convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.layers.base import FunctionModule
from credit_dp.domain_parallel.layers.reduce import (
    DomainParallelMax,
    DomainParallelMean,
    DomainParallelSum,
)
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.ranks import on_threads, seeded
from tests.tables import entry

REDUCTIONS = {
    torch.mean: DomainParallelMean,
    torch.sum: DomainParallelSum,
    torch.amax: DomainParallelMax,
}


@pytest.fixture(autouse=True, scope="module")
def _rule_of_reductions():
    def sharded(plain):
        return REDUCTIONS[plain.function](*plain.settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.RULES, "reduction", sharded)
        yield


class _Rounds(nn.Module):
    """Makes equal entries; the gradient passes."""

    def forward(self, x):
        return x.detach().round() + (x - x.detach())


class _Reduces(nn.Module):
    """A user's module that reduces, beside what keeps the rows."""

    row_rules = {FunctionModule: "reduction"}  # noqa: RUF012

    def __init__(self, function, dims, keepdim, ties):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 3)[:, None, None])
        self.reduce = FunctionModule(function, dims, keepdim)
        self.rounds = _Rounds() if ties else nn.Identity()

    def forward(self, x):
        x = self.scale * self.rounds(x)
        return self.reduce(x), x.sin()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(8, 17),
    function=st.sampled_from(list(REDUCTIONS)),
    dims=st.sampled_from([(), (-2,), (2, 3), (-1, -2), (0, 2), (1, -2, 3), (3,), (-3, 0)]),
    keepdim=st.booleans(),
    ties=st.booleans(),
)
def test_reductions(ranks, height, function, dims, keepdim, ties):
    assume(
        keepdim or dims not in ((3,), (-3, 0))
    )  # an output's rows are its last dimension but one
    args = (function, dims, keepdim, ties)
    on_threads(ranks, assert_same_as_whole_globe, _Reduces, args, (2, 3, height, 5))


KINDS = {
    "mean": [nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d],
    "max": [nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d],
}


def _pool(kind, size, ties):
    return nn.Sequential(_Rounds() if ties else nn.Identity(), kind(size))


SIZES = {2: [1, (1, 1), (1, None), (1, 4)], 3: [1, (1, 1, 1), (None, 1, 2), (2, 1, None)]}


@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(8, 17),
    kind=st.sampled_from(["mean", "max"]),
    space=st.sampled_from([2, 3]),
    ties=st.booleans(),
    data=st.data(),
)
def test_pools_to_one_row(ranks, height, kind, space, ties, data):
    size = data.draw(st.sampled_from(SIZES[space]))
    shape = (2, 3, height, 5) if space == 2 else (2, 3, 4, height, 5)
    args = (KINDS[kind][space - 1], size, ties)
    on_threads(ranks, assert_same_as_whole_globe, _pool, args, shape)


class _PoolsTokens(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.pool = kind(1)

    def forward(self, x):
        return self.pool(x.flatten(2))


def test_pools_of_tokens():
    for kind in (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d):
        on_threads(3, assert_same_as_whole_globe, _PoolsTokens, (kind,), (2, 3, 10, 4))


def _indices(manager, space, size):
    pool = KINDS["max"][space - 1](size, return_indices=True)
    shape = (2, 3, 9, 6) if space == 2 else (2, 3, 4, 9, 6)
    x = torch.randint(0, 4, shape, generator=seeded(0)).double()
    model = convert_to_domain_parallel(nn.Sequential(pool), manager, input_shape=shape)
    for made, expected in zip(model(shard_tensor(x, manager=manager)), pool(x), strict=True):
        assert torch.equal(made, expected)


def test_indices_are_those_of_the_globe():
    for space, size in [(2, 1), (2, (1, 3)), (3, 1), (3, (2, 1, 3))]:
        with entry((space, size)):
            on_threads(3, _indices, space, size)


class _SqueezeExcitation(nn.Module):
    """Channels weighed by what the whole globe shows of them (Hu et al. 2018)."""

    def __init__(self, channels, pool):
        super().__init__()
        self.pool = pool
        self.down = nn.Conv2d(channels, 2, 1)
        self.norm = nn.BatchNorm2d(2, momentum=None)  # of a tensor without rows
        self.up = nn.Conv2d(2, channels, 1)

    def forward(self, x):
        gate = self.up(torch.relu(self.norm(self.down(self.pool(x)))))
        return x * torch.sigmoid(gate)


class _LinearExcitation(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(
            nn.Linear(channels, 2), nn.SiLU(), nn.Linear(2, channels), nn.Sigmoid()
        )

    def forward(self, x):
        return x * self.gate(self.pool(x).flatten(1))[..., None, None]


def _excited(kind):
    gate = {
        "mean": lambda: _SqueezeExcitation(4, nn.AdaptiveAvgPool2d(1)),
        "max": lambda: _SqueezeExcitation(4, nn.AdaptiveMaxPool2d(1)),
        "linear": lambda: _LinearExcitation(4),
    }[kind]
    convs = (nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 3, 3, padding=1))
    return nn.Sequential(convs[0], gate(), convs[1])


def test_squeeze_and_excitation():
    for kind in ("mean", "max", "linear"):
        for planned in (True, False):
            args = (_excited, (kind,), (2, 2, 14, 5), 1e-11, 0.0, planned)
            with entry((kind, planned)):  # of seven ranks each has a row after the stride
                on_threads(7, assert_same_as_whole_globe, *args)


def _classifier():
    """A head on the pooled globe: its output has no rows."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), pool, nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_head_on_the_pooled_globe():
    on_threads(3, assert_same_as_whole_globe, _classifier, (), (3, 2, 11, 5), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(8, 17),
    kind=st.sampled_from([nn.Softmax, nn.LogSoftmax, nn.Softmin]),
    dim=st.sampled_from([2, -2, 1, -1]),
    scale=st.sampled_from([1.0, 50.0]),
)
def test_softmax(ranks, height, kind, dim, scale):
    args = (_scaled_softmax, (kind, dim, scale), (2, 3, height, 4))
    on_threads(ranks, assert_same_as_whole_globe, *args)


class _Scales(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return self.scale * x


def _scaled_softmax(kind, dim, scale):
    return nn.Sequential(_Scales(scale), kind(dim))


class _Masked(nn.Module):
    """Softmax over rows of which some, a whole band's among them, are left out."""

    def __init__(self, kind):
        super().__init__()
        self.softmax = kind(-2)

    def forward(self, x):
        y = self.softmax(x.masked_fill(x < -0.2, -torch.inf))
        return y.masked_fill(y.isinf(), 0.0)


def test_softmax_of_masked_rows():
    for kind in (nn.Softmax, nn.LogSoftmax):  # of eight ranks some have masked rows only
        on_threads(8, assert_same_as_whole_globe, _Masked, (kind,), (1, 2, 16, 4))


class _SoftmaxOfTokens(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.softmax = nn.Softmax(dim)

    def forward(self, x):
        return self.softmax(x.flatten(2)).unflatten(2, x.shape[2:])


def test_softmax_of_tokens():
    for dim in (-1, 1):
        on_threads(3, assert_same_as_whole_globe, _SoftmaxOfTokens, (dim,), (2, 3, 10, 4))

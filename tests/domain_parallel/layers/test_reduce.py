"""Reductions over rows equal those of the whole globe, for any bands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tables import entry


class _Rounds(nn.Module):
    """Makes equal entries; the gradient passes."""

    def forward(self, x):
        return x.detach().round() + (x - x.detach())


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

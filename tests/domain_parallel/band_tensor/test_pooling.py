"""Pools and sliding windows of tensors of the globe: values, positions and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, RANKS, check
from tests.tables import entry


def fold_again(x, size, **settings):
    windows = F.unfold(x, size, **settings)
    return F.fold(windows * windows, x.shape[-2:], size, **settings)


def folded(x):
    """Return samples and rows in one dimension, before columns."""
    return x.transpose(0, 1).flatten(1, 2)


CASES = {
    "maxima": lambda m, x: (
        F.max_pool2d(x, 3, 2, 1, return_indices=True),
        F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 1), ceil_mode=True),
        F.max_pool2d(x[0].mT, 2, ceil_mode=True, return_indices=True),
        F.max_pool1d(x[..., 0], 3, 2, 1),
        F.max_pool3d(x[:, :, None], (1, 3, 2), return_indices=True),
        F.max_pool3d(x[..., None], (3, 2, 1), (2, 3, 1), (1, 1, 0), return_indices=True),
        F.max_pool2d(x.transpose(0, 2), 2, return_indices=True),
        F.max_pool2d(x.transpose(1, 2), 2),
        F.max_pool2d(folded(x), 2, return_indices=True),
    ),
    "averages": lambda m, x: (
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), True, False),
        F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
        F.avg_pool2d(x[0].mT, 2, ceil_mode=True),
        F.avg_pool1d(x[..., 0], 3, 2, 1, count_include_pad=False),
        F.avg_pool3d(x[:, :, None], (1, 3, 2), (1, 2, 2), (0, 1, 0)),
        F.avg_pool3d(x[..., None], (3, 2, 1), (2, 3, 1), (1, 1, 0), True, False),
        F.avg_pool2d(x.transpose(0, 2), 2),
        F.avg_pool2d(x.transpose(1, 2), 2),
        F.avg_pool2d(folded(x), 2, 1),
        F.lp_pool2d(x.abs(), 2, (3, 2), (2, 2)),
    ),
    "adaptive maxima": lambda m, x: (
        F.adaptive_max_pool2d(x, (4, 2), return_indices=True),
        F.adaptive_max_pool2d(x, (None, 1)),
        F.adaptive_max_pool2d(x, (2, 3), return_indices=True),
        F.adaptive_max_pool2d(x, 1, return_indices=True),
        F.adaptive_max_pool2d(x.mT, (1, 1), return_indices=True),
        F.adaptive_max_pool2d(x.mT, (3, 5), return_indices=True),
        F.adaptive_max_pool1d(x[..., 0], 4),
        F.adaptive_max_pool3d(x[..., None], (4, 2, 1), return_indices=True),
        F.adaptive_max_pool3d(x[:, :, None], (1, 1, 3), return_indices=True),
        F.adaptive_max_pool2d(x.transpose(0, 2), 2, return_indices=True),
        F.adaptive_max_pool2d(folded(x), (3, 2)),
    ),
    "windows": lambda m, x: (
        F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1)),
        F.unfold(x.mT, (2, 3), padding=(0, 1)),
        F.unfold(x.transpose(0, 2), 2),
        F.unfold(x.transpose(1, 2), (2, 1)),
        F.unfold(x[0], 3, padding=1),
        F.unfold(folded(x), (2, 1)),
    ),
    "sums of windows": lambda m, x: (
        fold_again(x, 3, padding=1),
        fold_again(x, (2, 3), dilation=(2, 1), padding=(1, 1), stride=(2, 1)),
        fold_again(x.mT, (2, 3), padding=(0, 1)),
        fold_again(x.transpose(0, 2), 2),
        fold_again(x.transpose(1, 2), 2),
        # Folded rows are channels, of which a window's points are on several ranks.
        F.fold(x.reshape(4, -1, COLUMNS)[:, :12], (3, 4), 2),
    ),
    "few rows": lambda m, x: (
        F.max_pool2d(x[:, :, 1:3], 2, 1, 1, return_indices=True),
        F.avg_pool2d(x[:, :, :3], 2),
        F.avg_pool2d(F.max_pool2d(x, (x.shape[2] // 2, 1)), (2, 1), 1, (1, 0)),
        F.adaptive_max_pool2d(x[:, :, :2], (2, 3), return_indices=True),
        F.adaptive_max_pool2d(x[:, :, 2:3], 1, return_indices=True),
        fold_again(x[:, :, -2:], 2, padding=1),
    ),
}


@pytest.mark.parametrize("ranks", RANKS)
def test_pools_equal_those_of_the_globe(ranks):
    functions.check_table(CASES, ranks)


@pytest.mark.slow
def test_pools_of_one_row_of_each_rank():
    for name, function in CASES.items():
        with entry(name):
            check(function, (2, CHANNELS, 7, COLUMNS), 7)


def test_first_of_equal_maxima():
    def positions(m, x):
        rows = torch.arange(x.shape[2]).view(-1, 1)
        lowest = torch.where(rows < 6, -torch.inf, x.detach().sign())
        missing = torch.where(rows == 7, torch.nan, lowest)
        values = []
        for y in (lowest, missing, (lowest[:, :, 6:] * 3).long()):
            values += F.max_pool2d(y.double(), 3, 2, 1, return_indices=True)[1:]
            values += F.adaptive_max_pool2d(y.double(), 1, return_indices=True)[1:]
            values += F.adaptive_max_pool2d(y.double(), (5, 1), return_indices=True)[1:]
        return [x, *(v.double() for v in values), F.max_pool2d(lowest[:, :, 6:].long(), 3, 1, 1)]

    check(positions)


def test_gradients_are_differentiated_again():
    def penalty(pool):
        def function(m, x):
            return torch.autograd.grad(pool(x).square().sum(), x, create_graph=True)[0]

        return function

    pools = {
        "maxima": lambda x: F.max_pool2d(x, 3, 2, 1),
        "averages": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "adaptive maxima": lambda x: F.adaptive_max_pool2d(x, (4, 2)),
        "windows": lambda x: F.unfold(x, 3, padding=1),
    }
    functions.check_table({name: penalty(pool) for name, pool in pools.items()}, 3)

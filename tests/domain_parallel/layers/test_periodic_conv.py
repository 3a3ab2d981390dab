"""Longitude-periodic convolutions on bands equal those of the whole globe."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import DomainParallelPeriodicConv2d
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import PROCESSES, on_processes, on_threads


class _Model(nn.Sequential):
    """A model whose table of rules names its layer."""

    row_rules = {PeriodicConv2d: "periodic_conv"}  # noqa: RUF012


def _periodic(kernel, stride, poles, column_mode="circular"):
    return _Model(PeriodicConv2d(2, 3, kernel, stride, poles, column_mode))


POLES = ["reflect", "zeros", "mirror", "earth"]
EDGES = ["replicate", "reflect", "zeros"]  # of regions


@pytest.mark.usefixtures("overlap")
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    height=st.integers(5, 20),
    kernel=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 3),
    poles=st.sampled_from(POLES),
)
def test_periodic_conv(ranks, height, kernel, stride, poles):
    assume((height - 1) // stride + 1 >= ranks)
    shape = (2, 2, height, 7)
    on_threads(ranks, assert_same_as_whole_globe, _periodic, (kernel, stride, poles), shape)


@pytest.mark.usefixtures("overlap")
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    height=st.integers(5, 20),
    kernel=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 3),
    edges=st.sampled_from(EDGES),
)
def test_conv_on_a_region(ranks, height, kernel, stride, edges):
    assume((height - 1) // stride + 1 >= ranks)
    args = (_periodic, (kernel, stride, edges, edges), (2, 2, height, 7))
    on_threads(ranks, assert_same_as_whole_globe, *args)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("poles", POLES)
def test_one_row_per_rank(poles):
    args = (_periodic, (7, 1, poles), (1, 2, 8, 7))
    on_threads(8, assert_same_as_whole_globe, *args)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("ranks", PROCESSES)
def test_on_gloo_ranks(ranks):
    on_processes(ranks, assert_same_as_whole_globe, _periodic, (5, 2, "reflect"), (2, 2, 17, 7))


class _EvenAndDilated(nn.Module):
    """Pads as the original does, before any convolution that doesn't pad."""

    def __init__(self, padding, *args):
        super().__init__()
        self.padding, self.conv = padding, nn.Conv2d(2, 3, *args)

    def forward(self, x):
        x = F.pad(x, (self.padding, self.padding, 0, 0), mode="circular")
        return self.conv(F.pad(x, (0, 0, self.padding, self.padding), mode="reflect"))


class _Others(nn.Sequential):
    row_rules = {_EvenAndDilated: "periodic_conv"}  # noqa: RUF012


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(
    "args", [(1, 4), (2, 4, 2), (3, 3, 2, 0, 2), (0, 5), (2, (5, 1), (1, 3)), (1, 1)]
)
def test_any_inner_convolution(args):
    def build():
        return _Others(_EvenAndDilated(*args))

    on_threads(3, assert_same_as_whole_globe, build, (), (2, 2, 14, 7))


class _PerRow(nn.Module):
    """Convolves over levels and longitudes of every row; rows are among the samples."""

    row_rules = {PeriodicConv2d: "periodic_conv"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.conv = PeriodicConv2d(2, 3)

    def forward(self, x):
        y = self.conv(x.permute(0, 3, 1, 2, 4).flatten(0, 1))
        return y.unflatten(0, (len(x), x.shape[3])).permute(0, 2, 3, 1, 4)


def test_rows_among_the_samples():
    on_threads(3, assert_same_as_whole_globe, _PerRow, (), (2, 2, 4, 9, 6))


def test_a_periodic_conv_that_pads_twice_is_refused():
    layer = PeriodicConv2d(1, 1)
    layer.conv.padding = (1, 1)
    with pytest.raises(UserError, match="leave padding to the module around it"):
        DomainParallelPeriodicConv2d(layer)


def test_attributes():
    periodic = DomainParallelPeriodicConv2d(PeriodicConv2d(1, 2, 5))
    assert (periodic.padding, periodic.shard_dim, periodic.halo_exchange.halo_width) == (2, -2, 2)
    assert periodic.weight is periodic.conv.weight
    assert periodic.bias is periodic.conv.bias

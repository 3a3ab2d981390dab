"""Constants are made once, except where a cached one would be wrong."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from credit_dp import constants
from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.layers.group_norm import DomainParallelGroupNorm
from credit_dp.domain_parallel.layers.norm import DomainParallelInstanceNorm
from credit_dp.domain_parallel.layers.row_groups import insert_zero_rows, remove_zero_rows
from tests.ranks import on_threads

CPU = torch.device("cpu")


def halves(numbers: tuple[int, ...]) -> list[float]:
    return [number / 2 for number in numbers]


@pytest.fixture
def made(monkeypatch) -> list[object]:
    """Return a list of the constants that are made from now on."""
    values: list[object] = []
    make = constants.constant_tensor

    def recorded(numbers, *args):
        values.append(numbers)
        return make(numbers, *args)

    constants._cached_constant.cache_clear()
    monkeypatch.setattr(constants, "constant_tensor", recorded)
    return values


def test_a_constant_is_made_once_for_each_dtype(made):
    first = cached_constant(halves, (1, 2), CPU, torch.float64)
    assert cached_constant(halves, (1, 2), CPU, torch.float64) is first
    assert cached_constant(halves, (1, 2), CPU, torch.float32).dtype is torch.float32
    assert first.tolist() == [0.5, 1.0]
    assert len(made) == 2


def test_a_constant_is_kept_beside_many_others(made):
    """A CUDA graph may go on to read its memory."""
    first = cached_constant(list, (1,), CPU, torch.float64)
    for number in range(2, 1200):
        cached_constant(list, (number,), CPU, torch.float64)
    assert cached_constant(list, (1,), CPU, torch.float64) is first


def test_a_fake_constant_is_not_kept(made):
    with FakeTensorMode():
        assert isinstance(cached_constant(halves, (3,), CPU, torch.float64), FakeTensor)
    assert cached_constant(halves, (3,), CPU, torch.float64).tolist() == [1.5]


def test_a_constant_of_inference_serves_training(made):
    with torch.inference_mode():
        cached_constant(list, (1, 0), CPU, torch.int64)
    x = torch.ones(2, requires_grad=True)
    x[cached_constant(list, (1, 0), CPU, torch.int64)].sum().backward()
    assert len(made) == 1


def test_a_constant_of_a_transform_is_not_kept(made):
    def product(x):
        return (x * cached_constant(halves, (1, 2), CPU, torch.float64)).sum()

    x = torch.ones(2, dtype=torch.float64)
    assert torch.func.grad(product)(x).tolist() == [0.5, 1.0]
    copy.deepcopy(cached_constant(halves, (1, 2), CPU, torch.float64))  # not a transform's tensor


@pytest.mark.parametrize(
    "layer",
    [
        lambda manager: DomainParallelGroupNorm(nn.GroupNorm(2, 4).double(), manager=manager),
        lambda manager: DomainParallelInstanceNorm(nn.InstanceNorm2d(4), manager=manager),
    ],
    ids=["group norm", "instance norm"],
)
def test_norms_make_no_constants_after_their_first_pass(made, layer):
    def passes(manager):
        norm = layer(manager)
        x = torch.randn(1, 4, 3 - manager.domain_rank, 5, dtype=torch.float64, requires_grad=True)
        norm(x).sum().backward()

    on_threads(3, passes)
    of_first = len(made)  # threads that ask at the same time make one each
    assert 1 <= of_first <= 3
    assert made == [[3 / 6, 2 / 6, 1 / 6]] * of_first
    on_threads(3, passes)
    assert len(made) == of_first


def test_rows_of_zeros_make_no_constants_after_their_first_pass(made):
    order = (3, None, 1, None, 2)
    x = torch.randn(1, 1, 3, 2)
    for _ in range(2):
        rows = insert_zero_rows(x, order, -2)
        assert rows[0, 0, :, 0].tolist() == [x[0, 0, 0, 0], 0, x[0, 0, 1, 0], 0, x[0, 0, 2, 0]]
        assert torch.equal(remove_zero_rows(rows, order, -2), x)
    assert made == [[0, 3, 1, 4, 2], [0, 2, 4]]

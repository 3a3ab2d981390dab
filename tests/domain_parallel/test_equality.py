"""The comparison of all exactness tests notices a wrong output, gradient or buffer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import RankError, on_threads
from tests.tables import entry


class _Scaled(torch.autograd.Function):
    """Scales the output, or the gradient of the input, of bands that are not the whole globe."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        return x * forward

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.backward, None, None


class _Wrong(nn.Module):
    """A layer that a model's rules keep, though it is wrong on bands of fewer than all rows."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.weight = nn.Parameter(torch.ones(2, 1, 1))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        factors = {
            name: 1.0 + 1e-9 * (name == self.wrong and x.shape[-2] < 9)
            for name in ("output", "input gradient", "weight", "buffer")
        }
        self.mean = torch.ones((), dtype=x.dtype) * factors["buffer"]
        weight = _Scaled.apply(self.weight, 1.0, factors["weight"])
        return weight * _Scaled.apply(x, factors["output"], factors["input gradient"])


class _Model(nn.Sequential):
    converters = {_Wrong: lambda module: module}  # noqa: RUF012

    def __init__(self, wrong):
        super().__init__(_Wrong(wrong))


def test_every_kind_of_error_is_noticed():
    shape = (1, 2, 9, 4)
    on_threads(3, assert_same_as_whole_globe, _Model, ("nothing",), shape)
    for wrong in ("output", "input gradient", "weight", "buffer"):
        with entry(wrong), pytest.raises(RankError, match=wrong):
            on_threads(3, assert_same_as_whole_globe, _Model, (wrong,), shape)

"""Functions of users whose backward computes modules again, as reversible blocks do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    convert_to_domain_parallel,
    plan_report,
    shard_tensor,
    verify_domain_parallel,
)
from tests.domain_parallel.equality import Clip
from tests.ranks import DEVICE, cpu_only, on_processes, seeded
from tests.tables import each

WIDTH = 4


class Reversible(torch.autograd.Function):
    """Keeps its output only: backward computes the inputs and the graphs of both blocks again."""

    @staticmethod
    def forward(ctx, x, f, g, check):
        ctx.f, ctx.g = f, g
        a, b = x.chunk(2, 1)
        states = [torch.get_rng_state()]
        y = a + f(b)
        states.append(torch.get_rng_state())
        y = torch.cat([y, b + g(y)], 1)
        ctx.states = states
        ctx.save_for_backward(y, *([x] if check else []))
        return y

    @staticmethod
    def _again(ctx, block, x, grad):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.states.pop())
            x = x.detach().requires_grad_()
            y = block(x)
            y.backward(grad)
        return y.detach(), x.grad

    @staticmethod
    def backward(ctx, grad):
        y, *wanted = ctx.saved_tensors
        (a, b), (grad_a, grad_b) = y.chunk(2, 1), grad.chunk(2, 1)
        again, of_a = Reversible._again(ctx, ctx.g, a, grad_b)
        b, grad_a = b - again, grad_a + of_a
        again, of_b = Reversible._again(ctx, ctx.f, b, grad_a)
        for x in wanted:
            torch.testing.assert_close(torch.cat([a - again, b], 1), x)
        return torch.cat([grad_a, grad_b + of_b], 1), None, None, None


class Recomputed(torch.autograd.Function):
    """Checkpoints a function, as packages do that are older than torch's."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Checkpointed(nn.Module):
    def __init__(self, block, use_reentrant):
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Clipped(nn.Module):
    """Gradients that are not linear in what comes, of a function and of hooks."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        block.register_full_backward_hook(lambda m, gi, go: (gi[0] / (1 + gi[0].norm()),))

    def forward(self, x):
        y = Clip.apply(self.block(Clip.apply(x)))
        if y.requires_grad:
            y.register_hook(lambda grad: grad / (1 + grad.norm()))
        return y


class ReversibleBlock(nn.Module):
    def __init__(self, f, g, check=False):
        super().__init__()
        self.f, self.g, self.check = f, g, check

    def forward(self, x):
        return Reversible.apply(x, self.f, self.g, self.check)


def _conv(width=2):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU())


BLOCKS = {
    "reversible": lambda: ReversibleBlock(_conv(), _conv()),
    "shared block": lambda: ReversibleBlock(*[_conv()] * 2),
    "nested": lambda: ReversibleBlock(
        ReversibleBlock(_conv(1), _conv(1)),
        nn.Sequential(_conv(), ReversibleBlock(*[_conv(1)] * 2)),
    ),
    "checkpoint": lambda: ReversibleBlock(
        Checkpointed(_conv(), use_reentrant=False), Checkpointed(_conv(), use_reentrant=True)
    ),
    "other gradients": lambda: ReversibleBlock(Clipped(_conv()), _conv()),
}


class Model(nn.Module):
    def __init__(self, block, function=None):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.block = block
        self.function = function
        self.head = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        x = self.function(self, x) if self.function else self.block(x)
        return self.head(x)


# The model runs without gradients first, to see whether it is random.
RUNS_WITHOUT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@RUNS_WITHOUT
@each("block", BLOCKS.values())
def test_blocks_equal_those_of_the_unsharded_model(block):
    _check(lambda: Model(block()), 3)


@pytest.mark.exhaustive
@RUNS_WITHOUT
@each("ranks, block", [(ranks, block) for ranks in (2, 4) for block in BLOCKS.values()])
def test_blocks_on_other_ranks(ranks, block):
    _check(lambda: Model(block()), ranks)


def test_a_function_that_checkpoints_equals_the_unsharded_model():
    function = lambda m, x: Recomputed.apply(lambda y: m.block(y) * m.head.bias.mean(), x)  # noqa: E731
    _check(lambda: Model(_conv(WIDTH), function), 3)


def _check(build_model, ranks):
    report = verify_domain_parallel(build_model, (2, 3, 11, 8), ranks, device=DEVICE)
    assert report.passed, report.worst


def _draw_again(manager):
    torch.manual_seed(manager.domain_rank)
    drop = lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.5))  # noqa: E731
    block = ReversibleBlock(drop(), drop(), check=True)
    nested = ReversibleBlock(block.f, nn.Sequential(ReversibleBlock(nn.Dropout(), nn.Dropout())))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(nn.Sequential(block, nested)).double()
    for p in model.parameters():
        nn.init.uniform_(p, -1, 1, generator=seeded(0))
    convert_to_domain_parallel(model, manager, input_shape=(1, 3, 11, 8))
    x = torch.randn(1, 3, 11, 8, generator=seeded(1)).double()
    model(shard_tensor(x, manager=manager)).sum().backward()
    return model.stem.weight.grad.isfinite().all().item()


@pytest.mark.slow
@cpu_only("its function keeps the state of the CPU's random numbers")
def test_backward_draws_the_numbers_of_forward():
    assert on_processes(3, _draw_again) == [True] * 3


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient here")


def _backward_hook(model, x):
    x.register_hook(lambda grad: grad * grad.data_ptr())
    return x


def test_a_plan_with_costs_runs_code_in_backward():
    for function, message in (
        (lambda m, x: Fails.apply(x), r"test_backward_code.py:\d+: .*no gradient here"),
        (_backward_hook, r"test_backward_code.py:\d+: data_ptr: uses the memory"),
    ):
        (problem, *_) = plan_report(Model(None, function), (2, 3, 11, 8), 2).problems
        assert re.search(message, problem)

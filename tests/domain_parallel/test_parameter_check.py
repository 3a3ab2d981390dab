"""Training loops of users: ranks whose parameters drift apart raise an error, others none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    shard_tensor,
    sum_gradients,
)
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.parameter_check import COMPARED_FORWARDS
from credit_dp.errors import UserError
from credit_dp.models.segments import Segment, SegmentedModel
from credit_dp.pipeline_parallel.stages import cut_model
from tests.ranks import cpu_only, on_processes

pytestmark = cpu_only("gloo sums the gradients")

SHAPE = (1, 2, 7, 6)  # 4 and 3 rows
Convert = Callable[[nn.Module, DomainParallelManager], nn.Module]


class FlipsRows(nn.Module):
    """Computes on tensors of the globe."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x) + x.flip(-2)


class FirstRankOnly(nn.Module):
    """A parameter that takes part in the output of the first rank only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.spare = nn.Parameter(torch.ones(()))
        self.first = False

    def forward(self, x):
        return self.conv(x) * self.spare if self.first else self.conv(x)


class InSegments(SegmentedModel):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 2, 1)

    def segments(self):
        return [
            Segment("first", lambda state: (self.first(state[0]),), ("first",)),
            Segment("last", lambda state: state, ()),
        ]


def by_layers(model, manager):
    return convert_to_domain_parallel(model, manager, input_shape=SHAPE, whole_ops="refuse")


def on_globe(model, manager):
    return convert_to_domain_parallel(model, manager, input_shape=SHAPE)


def planned_later(model, manager):
    return convert_to_domain_parallel(model, manager)


def converted_twice(model, manager):
    return by_layers(convert_from_domain_parallel(by_layers(model, manager)), manager)


def copied(model, manager):
    return copy.deepcopy(by_layers(model, manager))


def convnet():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1))


def train(manager, build, convert: Convert, total=False, call=None, steps=3):
    """Train, and return the steps that were done and the error that ended them."""
    model = convert(build(), manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    globe = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    x = shard_tensor(globe, manager=manager).requires_grad_()
    for step in range(steps):
        try:
            output = (call or nn.Module.__call__)(model, x)
        except UserError as error:
            return step, str(error)
        optimizer.zero_grad()
        output.square().mean().backward()
        if total:
            sum_gradients(model, manager)
        optimizer.step()
    return steps, ""


def only_on_first(model, manager):
    """Use a parameter on the first rank only, so that the others have no gradient of it."""
    model.first = manager.rank == 0
    converted = convert_to_domain_parallel(model, manager, input_shape=SHAPE)
    converted.conv.requires_grad_(False)
    return converted


def other_weights(model, manager):
    nn.init.constant_(model[0].bias, manager.rank)
    return by_layers(model, manager)


def not_a_number(model, manager):
    nn.init.constant_(model[0].bias, float("nan"))
    return by_layers(model, manager)


def one_layer():
    torch.manual_seed(3)
    return nn.Conv2d(2, 2, 3, padding=1)


LOOPS: dict[str, tuple[Callable[[], nn.Module], Convert]] = {
    "layers": (convnet, by_layers),
    "globe": (FlipsRows, on_globe),
    "planned in the first forward": (convnet, planned_later),
    "view planned in the first forward": (FlipsRows, planned_later),
    "root replaced": (one_layer, by_layers),
    "copy": (convnet, copied),
    "converted twice": (convnet, converted_twice),
    "gradient on one rank": (FirstRankOnly, only_on_first),
    "not a number": (convnet, not_a_number),
}


REFUSED = [name for name in LOOPS if name != "not a number"]


def run_loops(manager, names, total):
    return {name: train(manager, *LOOPS[name], total) for name in names}


def test_loops_without_sum_of_gradients_are_refused_on_all_ranks():
    first, second = on_processes(2, run_loops, REFUSED, False)
    assert first == second
    for name, (step, error) in first.items():
        assert step == 1, name
        assert "differs between the domain ranks 0 and 1" in error, name
        assert "call sum_gradients(model, manager) of credit_dp.domain_parallel" in error, name


def test_loops_with_sum_of_gradients_are_not():
    assert on_processes(2, run_loops, list(LOOPS), True) == [dict.fromkeys(LOOPS, (3, ""))] * 2


def start_from_other_weights(manager):
    return train(manager, convnet, other_weights, True)


def test_other_initial_weights_are_refused_on_three_ranks():
    assert {step for step, _ in on_processes(3, start_from_other_weights)} == {1}


def in_ddp(manager):
    def convert(model, manager):
        return DistributedDataParallel(by_layers(model, manager))

    return train(manager, convnet, convert)


def checkpointed(manager, use_reentrant, total):
    def call(model, x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    return train(manager, convnet, by_layers, total, call)


def several_forwards(manager):
    """Call the model three times for a step, and without gradients and in eval mode in between."""

    def call(model, x):
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        return model(model(model(x)))

    return train(manager, convnet, by_layers, False, call, 5)


@pytest.mark.slow
def test_ways_to_train_are_told_apart():
    assert on_processes(2, in_ddp) == [(3, ""), (3, "")]
    # What backward computes again is no forward: the second and not the first step is refused.
    assert {step for step, _ in on_processes(2, checkpointed, False, False)} == {1}
    for use_reentrant in (False, True):
        assert on_processes(2, checkpointed, use_reentrant, True) == [(3, ""), (3, "")]
    # Forward 8 is the second of step 3.
    assert {step for step, _ in on_processes(2, several_forwards)} == {2}


def collectives_by_forward(manager, convert: Convert, compiled: bool):
    model = convert(nn.Sequential(nn.Conv2d(2, 2, 1)), manager)
    if compiled:
        model.compile(backend="eager", fullgraph=True)
    x = shard_tensor(torch.zeros(SHAPE), manager=manager)
    model(x)
    found = []
    for forward in range(2, COMPARED_FORWARDS[-1] + 3):
        before = manager.transport.traffic.collectives
        model(x)
        if manager.transport.traffic.collectives > before:
            found.append(forward)
    return found


def of_own_loop(manager, compiled=False):
    return collectives_by_forward(manager, by_layers, compiled)


def of_trainer(manager):
    return collectives_by_forward(manager, lambda m, manager: shard_model(m, manager, SHAPE), False)


def is_stage(manager):
    def convert(model, manager):
        model = convert_to_domain_parallel(InSegments(), manager, input_shape=SHAPE)
        return cut_model(model, manager, [slice(0, 1), slice(1, 2)], SHAPE)[0].module

    return collectives_by_forward(manager, convert, False)


@pytest.mark.slow
def test_messages_are_those_of_three_forwards():
    assert on_processes(2, of_own_loop) == [list(COMPARED_FORWARDS)] * 2
    assert on_processes(2, of_own_loop, True) == [[], []]
    assert on_processes(2, of_trainer) == [[], []]
    assert on_processes(2, is_stage) == [[], []]

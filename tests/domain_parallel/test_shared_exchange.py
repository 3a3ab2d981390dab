"""Layers that read the same tensor share an exchange: exact, minimal traffic, no extra memory."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from tests.domain_parallel.equality import (
    MODEL,
    RANDOM_LOCK,
    THREADS,
    assert_same_as_whole_globe,
    error,
)
from tests.ranks import on_processes, on_threads
from tests.tier_cases import every

SHAPE = (2, 3, 64, 8)


def _direct(branch, x):
    return branch(x)


def _recomputed(branch, x):
    return checkpoint(branch, x, use_reentrant=False, preserve_rng_state=False)


def _recomputed_reentrant(branch, x):
    return checkpoint(branch, x, use_reentrant=True, preserve_rng_state=False)


class Branches(nn.Module):
    """Windows of several sizes around the same points; `call` calls each convolution."""

    def __init__(self, sizes=(4, 8, 16), step=4, mode="zeros", call=_direct, first=_direct):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Conv2d(3, 2, (size, 4), (step, 4), ((size - step) // 2, 0), padding_mode=mode)
            for size in sizes
        )
        self.call, self.first = call, first

    def forward(self, x):
        first, *others = self.branches
        outputs = [self.first(first, x), *(self.call(branch, x) for branch in others)]
        return torch.cat(outputs, 1)


class Model(nn.Module):
    def __init__(self, way=_direct, **options):
        super().__init__()
        self.before = nn.Conv2d(3, 3, 1)
        self.branches = Branches(**options)
        self.way = way

    def forward(self, x):
        return torch.tanh(self.way(self.branches, torch.tanh(self.before(x))))


class Twice(Model):
    """Runs the branches on two tensors, and one branch of them twice on the same."""

    def forward(self, x):
        y = torch.tanh(self.before(x))
        return self.branches(y) + self.branches(y * y)


class Again(Branches):
    def forward(self, x):
        return super().forward(x) + super().forward(x) ** 2


class Changed(Branches):
    """Writes into the tensor between two readers."""

    def forward(self, x):
        x = x * 2
        outputs = [self.branches[0](x), self.branches[1](x)]
        x[..., :4] *= 3
        return torch.cat([*outputs, self.branches[2](x)], 1)


class ChangedData(Branches):
    """Writes there without counting it, so that it computes on tensors of the globe."""

    def forward(self, x):
        x = x * 2
        outputs = [self.branches[0](x), self.branches[1](x)]
        x.data[..., :4] *= 3
        return torch.cat([*outputs, self.branches[2](x)], 1)


class Otherwise(Branches):
    """Behaves differently from the plan if `scale` is set."""

    scale = None

    def forward(self, x):
        *others, last = self.branches
        scaled = x if self.scale is None else self.scale * x
        return torch.cat([*(branch(x) for branch in others), last(scaled)], 1)


class WhileTraining(Branches):
    """Reads another tensor in training mode."""

    def forward(self, x):
        first, *others = self.branches
        outputs = [first(x * 2 if self.training else x), *(branch(x) for branch in others)]
        return torch.cat(outputs, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
@given(
    sizes=st.sampled_from([(4, 8), (4, 8, 16), (8, 16, 32), (6, 10, 4)]),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    height=st.sampled_from([36, 50, 64]),
)
def test_exact(ranks, sizes, mode, height):
    def build():
        return Model(sizes=sizes, mode=mode)

    on_threads(ranks, assert_same_as_whole_globe, build, (), (2, 3, height, 8))


WAYS = {
    "two tensors": Twice,
    "twice the same": Again,
    "otherwise while training": WhileTraining,
    "equal bands": lambda: Branches((3, 5, 3), 1),
    "recomputed": lambda: Model(_recomputed),
    "recomputed by itself": lambda: Model(call=_recomputed, first=_recomputed),
    "first recomputed": lambda: Model(first=_recomputed),
    "others recomputed": lambda: Model(call=_recomputed),
    "recomputed the old way": lambda: Model(_recomputed_reentrant),
    "first recomputed the old way": lambda: Model(first=_recomputed_reentrant),
    "others recomputed the old way": lambda: Model(call=_recomputed_reentrant),
}


# Planning runs without gradients: reentrant checkpointing warns.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "planned"), every(5, itertools.product(WAYS, (True, False))))
def test_exact_however_it_is_run(name, planned):
    on_threads(3, _exact, WAYS[name], planned)


def _exact(manager, build, planned):
    assert_same_as_whole_globe(manager, build, (), SHAPE, MODEL, planned=planned)


def _model(way=_direct):
    return Model(way)


@pytest.mark.slow
def test_exact_on_gloo_ranks():
    on_processes(3, assert_same_as_whole_globe, _model, (_recomputed,), SHAPE)


def _sharded(manager, build=Model):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        unsharded, x = build(), torch.randn(SHAPE)
        sharded = convert_to_domain_parallel(copy.deepcopy(unsharded), manager, input_shape=SHAPE)
    return unsharded, sharded, x


def _sent(manager, act):
    before = vars(manager.transport.traffic).copy()
    act()
    after = vars(manager.transport.traffic)
    return after["messages"] - before["messages"], after["bytes"] - before["bytes"]


def _each_row_once(manager):
    _, model, x = _sharded(manager)
    band = shard_tensor(x, manager=manager)
    neighbours = len([r for r in manager.neighbor_ranks() if r is not None])
    rows = (16 - 4) // 2  # the largest window needs as many of either neighbour
    row = x[:, :, 0].numel() * x.element_size()
    outputs = []
    for _ in range(2):
        forward = _sent(manager, lambda: outputs.append(model(band)))
        assert forward == (neighbours, neighbours * rows * row)
        assert _sent(manager, lambda: outputs[-1].sum().backward()) == forward
        with torch.no_grad():
            assert _sent(manager, lambda: model(band)) == forward


def test_each_row_is_sent_once():
    on_threads(4, _each_row_once)


def _alone(manager):
    unsharded, model, x = _sharded(manager)
    band = shard_tensor(x, manager=manager)
    branch, original = model.branches.branches[1], unsharded.branches.branches[1]
    for _ in range(2):
        y = gather_tensor(branch(band).detach(), manager=manager)
        assert error(y, original(x).detach()) <= 1e-6
    y = gather_tensor(model(band).detach(), manager=manager)
    assert error(y, unsharded(x).detach()) <= 1e-6


def test_a_reader_that_is_called_alone():
    on_threads(2, _alone)


def _written(manager, build):
    unsharded, model, x = _sharded(manager, build)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = gather_tensor(model(shard_tensor(x, manager=manager)), manager=manager)
            assert error(y, unsharded(x)) <= 1e-6


def test_a_tensor_written_to_between_two_readers():
    for build in (Changed, ChangedData):
        on_threads(2, _written, build)


def _otherwise(manager):
    unsharded, model, x = _sharded(manager, Otherwise)
    unsharded.scale = model.scale = 3.0
    y = gather_tensor(model(shard_tensor(x, manager=manager)).detach(), manager=manager)
    assert error(y, unsharded(x).detach()) <= 1e-6


def test_other_tensors_than_planned():
    on_threads(2, _otherwise)


def _held(manager):
    _, model, x = _sharded(manager)
    band = shard_tensor(x, manager=manager)
    seen = []
    hook = model.branches.register_forward_pre_hook(lambda m, i: seen.append(weakref.ref(i[0])))
    last = model.branches.branches[-1]

    def fail(module, inputs):
        raise RuntimeError("stopped")

    with torch.no_grad():
        model(band)
        stop = last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stopped"):
            model(band)
    stop.remove()
    hook.remove()
    gc.collect()
    assert len(seen) == 2
    assert [x() for x in seen] == [None, None]


def test_fetched_rows_are_released():
    on_threads(2, _held)


def _copies(manager):
    unsharded, model, x = _sharded(manager)
    band = shard_tensor(x, manager=manager)
    twin = copy.deepcopy(model)
    shared = twin.branches.branches[1].shared_exchange
    assert shared.readers[-1] is twin.branches.branches[-1]
    assert torch.equal(twin(band), model(band))
    plain = convert_from_domain_parallel(model)
    assert not plain.branches._forward_pre_hooks
    assert torch.equal(plain(x), unsharded(x))


def test_copied_and_converted_back():
    on_threads(2, _copies)

"""Writes in place to parts of a field: every other part that shares memory sees them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import shard_tensor
from credit_dp.domain_parallel.decide import Wanted, counting_manager, decide_view
from credit_dp.domain_parallel.view.running import running_view
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.functions import (
    CHANNELS,
    COLUMNS,
    RANKS,
    Model,
    check,
    check_together,
    compute_on_bands,
)
from tests.domain_parallel.band_tensor.writes import (
    FILLS,
    WRITES,
    WRITTEN_HEIGHTS,
    clip,
    double,
    empty,
    random_filling,
    random_program,
    runs_on_one_process,
)
from tests.ranks import RankError, cpu_only, on_threads
from tests.tables import entry


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", WRITES)
def test_all_parts_of_a_field_see_what_is_written_to_one(function, ranks):
    check(function, (2, CHANNELS, WRITTEN_HEIGHTS[ranks], COLUMNS), ranks, whole=None)


# The order of entries in memory may not be known.
REFUSALS = ("whether both share memory", "expand: its result is detached")


def _tiers(fast, slow, exhaustive):
    """Return ranges of seeds, each of which is a test of another tier."""
    marks = (), pytest.mark.slow, pytest.mark.exhaustive
    bounds = 0, fast, fast + slow, fast + slow + exhaustive
    return [
        pytest.param(range(start, end), marks=mark, id=f"{start}-{end - 1}")
        for (start, end), mark in zip(pairwise(bounds), marks, strict=True)
    ]


def _check_random(seeds, program, accept=lambda function, shape, ranks: True, refusals=()):
    """Compare random programs that torch and `accept` accept; some may be refused, but not all.

    On 2, 3 and 4 ranks in turn.
    """
    compared = 0
    for seed in seeds:
        shape, ranks, function = (2, CHANNELS, 9 + seed % 5, COLUMNS), 2 + seed % 3, program(seed)
        if not (runs_on_one_process(function, shape) and accept(function, shape, ranks)):
            continue
        with entry(seed):
            try:
                check(function, shape, ranks, whole=None)
            except RankError as error:
                if not any(text in str(error) for text in refusals):
                    raise
            else:
                compared += 1
    assert compared > 0


def _is_planned(function, shape, ranks):
    """Return whether a plan accepts a program, which then runs."""
    manager, model = counting_manager(ranks), Model(function).double()
    decision = decide_view(model, manager, [shape], Wanted(limit=None), ["as the test wants"])
    if decision.problems:
        assert any(text in decision.problems[0] for text in REFUSALS)
    return not decision.problems


@pytest.mark.parametrize("seeds", _tiers(8, 52, 140))
def test_random_programs_of_views_and_writes_equal_those_of_one_process(seeds):
    _check_random(seeds, random_program, _is_planned)


# Of the first seeds, few programs that torch accepts have hooks.
@pytest.mark.parametrize("seeds", _tiers(16, 44, 60))
def test_hooks_of_random_programs_see_the_gradients_of_one_process_or_are_refused(seeds):
    program = partial(random_program, hooks=True)
    _check_random(seeds, program, refusals=(*REFUSALS, "register_hook"))


# ---------------------------------------------------------------- tensors that a model fills


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", FILLS)
def test_tensors_that_are_filled_become_bands(function, ranks):
    check(function, (2, CHANNELS, WRITTEN_HEIGHTS[ranks], COLUMNS), ranks)


def with_another_name(m, x):
    y, z = empty(x), empty(x)
    detached, array = y.detach(), z.numpy()
    y[:, 1:], z[:, 1:] = x[:, 1:], x.detach()[:, 1:]
    return y, detached * x, z * x, torch.from_numpy(array) * x


def with_a_hook(m, x):
    y = empty(x)
    y[:, 0] = m.scale[0]
    y.register_hook(double)
    y[:, 1:] = x[:, 1:]
    return y


def viewed_in_another_way(m, x):
    size = x.shape[2]
    y, z = empty(x, 2, size, size), empty(x)
    assert y.type() == torch.zeros(1, dtype=x.dtype).type()
    y[:, 0] = m.rows[0, 0]
    column = y[:, :, 0]
    y.transpose_(1, 2)
    column[:, 1:] = x[:, 0, 1:, 0]
    z.label = "z"
    z[:, 1:] = x[:, 1:]
    return column, y.sum((1, 2)), z, x if z.label == "z" else z


def with_a_gradient_that_is_kept(m, x):
    y = empty(x)
    y[:, 0] = m.scale[0]
    y.retain_grad()
    y[:, 1:] = x[:, 1:]
    return y


def read_on_one_rank(m, x):
    y, z = empty(x), empty(x)
    views = y[:, 2], z.flatten(2)
    view = running_view()
    if view is not None and view.rank == 1:  # as for a message
        assert y.detach().mean() == z.numpy().mean()
    y[:, 1:], z[:, 1:] = x[:, 1:], x[:, 1:]
    return y, z, *(view * m.scale[0] for view in views)


NO_ARRAYS = cpu_only("NumPy has no arrays on GPUs")
SHARED = [
    pytest.param(with_another_name, marks=NO_ARRAYS),
    with_a_hook,
    viewed_in_another_way,
    with_a_gradient_that_is_kept,
    pytest.param(read_on_one_rank, marks=NO_ARRAYS),
]


@pytest.mark.parametrize("function", SHARED)
def test_tensors_that_something_else_shares_stay_whole(function):
    check(function, (2, CHANNELS, 13, COLUMNS), 3, {"__setitem__"})


@pytest.mark.parametrize("seeds", _tiers(8, 52, 140))
def test_random_fillings_equal_those_of_one_process(seeds):
    _check_random(seeds, random_filling, refusals=REFUSALS[:1])


def _hook_of_a_base(x):
    x[:, :, :3].mul_(2)
    first = x[:, :, :2]
    first.mul_(2)
    x.register_hook(clip)
    return first


def _hook_of_a_view_assigned_to_itself(x):
    rows = x[:, :, :5]
    rows.register_hook(double)
    rows[:, 1:3] = rows[:, 1:3]
    return rows


def _hook_of_what_may_be_a_view(x):
    y = x.mT.reshape(2, -1)
    y.register_hook(clip)
    y.mul_(2)
    return x


def _hook_of_a_view_of_a_copy(x):
    y = x * 1
    copy = y.mT.ravel()
    copy.register_hook(clip)
    y.add_(1)
    copy.mul_(copy.detach())
    return copy


def _repeated_past_autograd(x):
    pair = x.expand(2, *x.shape).detach()
    pair[1:, :, 2:] *= 2
    return pair[0]


def _same_shape_only(x):
    torch.add(x.detach(), 1, out=x.detach().new_empty(0))


def _with_gradient(x):
    torch.add(x, 1, out=torch.empty_like(x))


def _unknown_strides(x):
    y = x.permute(0, 2, 3, 1) * 2
    z = y.reshape(2, -1)
    y.add_(1)
    return z + 1


def _of_moved_rows(x):
    y = x.permute(0, 2, 3, 1)[:, :5].clone()
    z = y.reshape(2, -1)
    y.add_(1)
    return z + 1


def _gradient_by_what_is_written_without_gradients(x):
    """On one process it counts what was computed before the write, too."""
    y = x * 1
    same, z = y.view(y.shape), y * 2
    with torch.no_grad():
        same.mul_(3)
    return torch.autograd.grad((z + y * 5).sum(), y, create_graph=True)[0]


def _copy_of_another_order(function):
    """Return a function that writes to a copy of what another one returns as a new tensor."""

    def run(x):
        y = function(x.mT).mT * 1
        y.contiguous().add_(1)
        return y * 1

    return run


def _view_of_another_order(function):
    """Return a function that writes to a view of what another one returns as a new tensor."""

    def run(x):
        y = function(x.mT)
        y.flatten(2).add_(1)
        return y * 1

    return run


HOOKED = "register_hook: a field with a hook shares memory"
CHANGED = "reshape: its result or argument was changed in place"
REFUSED = [
    (_copy_of_another_order(F.instance_norm), "contiguous: its result"),
    (_copy_of_another_order(lambda x: F.max_pool2d(x, 3, 1, 1)), "contiguous: its result"),
    (_view_of_another_order(lambda x: x.softmax(-1)), "flatten: its result"),
    (_gradient_by_what_is_written_without_gradients, "autograd.grad: a field shares memory"),
    (_repeated_past_autograd, "expand: its result is detached"),
    (_same_shape_only, "add: out= has shape"),
    (_with_gradient, "out= can't be differentiated"),
    (_unknown_strides, CHANGED),
    (_of_moved_rows, CHANGED),
    (_hook_of_a_base, HOOKED),
    (_hook_of_a_view_assigned_to_itself, HOOKED),
    (_hook_of_a_view_of_a_copy, HOOKED),
    (_hook_of_what_may_be_a_view, HOOKED),
]


def test_refuses_what_is_not_known():
    def run(manager, function):
        model = Model(lambda m, x: function(x)).double()
        compute_on_bands(model, manager, [(2, CHANNELS, 7, COLUMNS)])
        x = torch.randn(2, CHANNELS, 7, COLUMNS, dtype=torch.float64)
        with pytest.raises(UserError) as error:
            model(shard_tensor(x, manager=manager))
        return str(error.value)

    for i, (function, message) in enumerate(REFUSED):
        for found in on_threads(2, run, function):
            assert message in found, (i, function)


def test_the_input_of_a_model_is_changed_as_on_one_process():
    def change(x):
        tokens = x.flatten(2)
        x[:, :, :3] = 0.5
        x.select(2, -1).mul_(2)
        tokens[:, 1].add_(1)
        return tokens.sum(1, keepdim=True).expand(x.shape[0], 2, -1).unflatten(2, x.shape[2:])

    def run(manager, x):
        model = nn.Identity()
        model.forward = change
        compute_on_bands(model, manager, [tuple(x.shape)])
        band = shard_tensor(x, manager=manager).clone()
        model(band)
        return band

    x = torch.randn(2, 3, 7, 4)
    bands = on_threads(3, run, x)
    expected = x.clone()
    change(expected)
    torch.testing.assert_close(torch.cat(bands, 2), expected)


# Functions that return their argument as it is.
AS_IT_IS = {
    "flatten one dimension": lambda x: x.flatten(1, 1),
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "atleast_1d": torch.atleast_1d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[1],
    "double": lambda x: x.double(),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "real": lambda x: x.real,
    "plus": lambda x: +x,
}
# The same, a view, or a copy: of a field and of a part of its rows.
SAME_OR_NOT = AS_IT_IS | {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(x.shape),
    "alias": torch.ops.aten.alias,
    "clone": torch.clone,
    "dropout of one sample": lambda x: F.dropout3d(x, 0.5, False),
    "dropout of nothing": lambda x: F.dropout1d(x[0, 0], 0.0),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 1),
    "pixel_shuffle of columns": lambda x: F.pixel_shuffle(x.mT, 1),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, CHANNELS),
    "operator contiguous": torch.ops.aten.contiguous,
    "operator contiguous of one type": lambda x: torch.ops.aten.contiguous.default(self=x),
    "operator reshape": lambda x: torch.ops.aten.reshape(x.mT, (*x.shape[:2], -1)),
}


def hook_of_result(function):
    def run(model, x):
        y = function(x)
        y.register_hook(lambda grad: 1.5 * grad)
        return y * 2, x * 3

    return run


def gradient_of_result(function):
    def run(model, x):
        y = function(x)
        return torch.autograd.grad((y**3).sum() + x.sin().sum(), y, create_graph=True)[0] * 2

    return run


def write_to_result(function):
    def run(model, x):
        x = x * 1
        y = function(x)
        y.mul_(2)
        return y * 1, x * 1

    return run


@pytest.mark.parametrize("is_part", [False, True], ids=["field", "rows"])
@pytest.mark.parametrize("use", [hook_of_result, gradient_of_result, write_to_result])
def test_results_are_the_argument_where_they_are_on_one_process(use, is_part):
    uses = {name: use(function) for name, function in SAME_OR_NOT.items()}
    if is_part:
        uses = {
            name: lambda model, x, run=run: run(model, x[:, :, 1:8]) for name, run in uses.items()
        }
    check_together(uses, whole=None)


def saved_by_a_function(x):
    y = x.sin().exp()
    y.data.mul_(2)
    return y


def saved_by_a_write(x):
    y = x * 1
    data = y.data
    y.tanh_()
    data[:, 0] = 0.5
    return y


def saved_by_a_reader(x):
    y = x * 1
    z = y.square()
    y.detach()[:, :, :1] = 0.5
    return z


def test_refuses_gradients_by_saved_values_that_were_changed_past_autograd():
    def run(manager, x, write):
        model = Model(lambda m, x: write(x)).double()
        compute_on_bands(model, manager, [tuple(x.shape)])
        y = model(shard_tensor(x, manager=manager))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return y.shape[2]

    x = torch.randn(2, CHANNELS, 7, COLUMNS, dtype=torch.float64)
    for write in (saved_by_a_function, saved_by_a_write, saved_by_a_reader):
        assert on_threads(2, run, x, write) == [4, 3], write


def test_a_field_that_is_returned_as_it_is_is_the_same():
    functions = {
        name: lambda model, x, function=function: x * (2.0 if function(x) is x else 3.0)
        for name, function in AS_IT_IS.items()
    }
    check_together(functions, whole=None)

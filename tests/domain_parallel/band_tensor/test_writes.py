"""Writes in place to parts of a field: every other part that shares memory sees them."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import shard_tensor
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor
from credit_dp.domain_parallel.recomputation import checkpoint_modules
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.functions import (
    CHANNELS,
    COLUMNS,
    RANKS,
    Model,
    assert_close,
    check,
    check_together,
    compute_on_bands,
)
from tests.domain_parallel.band_tensor.writes import (
    FILLS,
    WRITES,
    WRITTEN_HEIGHTS,
    a_state_in_a_loop,
    clip,
    double,
    empty,
    filled_in_a_checkpoint,
    random_filling,
    random_program,
    results_that_are_views_or_copies,
    runs_on_one_process,
)
from tests.ranks import cpu_only, on_threads
from tests.tables import entry


def test_samples_of_every_second_row_in_one_dimension():
    def function(m, x):
        y = x * m.scale[:, None, None]
        odd = y[:, 6:, 1::2, ::2].flatten(1, 2)
        y.mul_(2)
        odd[:, 3:].add_(1)
        return y, odd.sum(1)

    # Some ranks have one row more of the field than twice those of the slice.
    check(function, (2, CHANNELS, 12, COLUMNS), 4)
    check(function, (2, CHANNELS, 14, COLUMNS), 3)


# It gives rows another order in one dimension.
MAY_RUN_WHOLE = (results_that_are_views_or_copies,)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_parts_of_a_field_see_what_is_written_to_one(ranks):
    for function in WRITES:
        with entry(function.__name__):
            whole = None if function in MAY_RUN_WHOLE else ()
            check(function, (2, CHANNELS, WRITTEN_HEIGHTS[ranks], COLUMNS), ranks, whole)


def _tiers(fast, slow, exhaustive):
    """Return ranges of seeds, each of which is a test of another tier."""
    marks = (), pytest.mark.slow, pytest.mark.exhaustive
    bounds = 0, fast, fast + slow, fast + slow + exhaustive
    return [
        pytest.param(range(start, end), marks=mark, id=f"{start}-{end - 1}")
        for (start, end), mark in zip(pairwise(bounds), marks, strict=True)
    ]


def _check_random(seeds, program):
    """Compare random programs that torch accepts, on 2, 3 and 4 ranks in turn."""
    compared = 0
    for seed in seeds:
        shape, ranks, function = (2, CHANNELS, 9 + seed % 5, COLUMNS), 2 + seed % 3, program(seed)
        if runs_on_one_process(function, shape):
            with entry(seed):
                check(function, shape, ranks, whole=None)
            compared += 1
    assert compared > 0


PROGRAMS = {
    "views and writes": random_program,
    # Of the first seeds, few programs that torch accepts have hooks.
    "views, writes and hooks": partial(random_program, hooks=True),
    "fillings": random_filling,
}


@pytest.mark.parametrize("seeds", _tiers(16, 44, 140))
@pytest.mark.parametrize("kind", PROGRAMS)
def test_random_programs_equal_those_of_one_process(kind, seeds):
    _check_random(seeds, PROGRAMS[kind])


# ---------------------------------------------------------------- tensors that a model fills


@pytest.mark.parametrize("ranks", RANKS)
def test_tensors_that_are_filled_become_bands(ranks):
    for function in FILLS:
        with entry(function.__name__):
            check(function, (2, CHANNELS, WRITTEN_HEIGHTS[ranks], COLUMNS), ranks)


def test_what_torch_computes_again_fills_tensors_that_stay_whole():
    # A forward of its own knows nothing of the model that runs.
    shape = (2, CHANNELS, WRITTEN_HEIGHTS[3], COLUMNS)
    check(filled_in_a_checkpoint, shape, 3, {"copy_", "as_strided"})


class Filled(nn.Module):
    """Fills a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1))

    def forward(self, x):
        y = torch.zeros(x.shape, dtype=x.dtype)
        y[:, 2:], y[:, :, 0] = (x * self.scale)[:, 2:], self.scale[None, :, 0]
        return y.flip(2).sin()


def test_modules_that_are_computed_again_fill_the_same_bands():
    def run(manager, model, x):
        model = copy.deepcopy(model)
        whole_calls = compute_on_bands(model, manager, [tuple(x.shape)])
        checkpoint_modules(model, ["0", "1"])
        y = model(shard_tensor(x, manager=manager))
        y.square().sum().backward()
        return y.detach(), [p.grad for p in model.parameters()], dict(whole_calls)

    model = nn.Sequential(Filled(), Filled()).double()
    x = torch.randn(2, CHANNELS, 13, COLUMNS, dtype=torch.float64)
    outputs, gradients, whole_calls = zip(*on_threads(3, run, model, x), strict=True)
    expected = model(x)
    expected.square().sum().backward()
    assert_close(torch.cat(outputs, 2), expected.detach(), "output")
    for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        assert_close(sum(parts), parameter.grad, "gradient")
    assert whole_calls == ({}, {}, {})


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


def with_attributes(m, x):
    z = empty(x)
    assert z.type() == torch.zeros(1, dtype=x.dtype).type()
    z.label = "z"
    z[:, 1:] = x[:, 1:]
    return z, x if z.label == "z" else z


def with_a_gradient_that_is_kept(m, x):
    y = empty(x)
    y[:, 0] = m.scale[0]
    y.retain_grad()
    y[:, 1:] = x[:, 1:]
    return y


def as_data_of_another(m, x):
    y, z = torch.arange(3), empty(x)
    plain = torch.tensor([1.0], dtype=x.dtype)
    plain.data = x.detach() * 2
    z.data = x.detach()
    z[:, :2] += 1
    return x * plain * z, y


NO_ARRAYS = cpu_only("NumPy has no arrays on GPUs")
SHARED = [
    pytest.param(with_another_name, marks=NO_ARRAYS),
    with_a_hook,
    with_attributes,
    with_a_gradient_that_is_kept,
    as_data_of_another,
]


@pytest.mark.parametrize("function", SHARED)
def test_what_else_shares_a_filled_tensor_sees_what_is_written(function):
    check(function, (2, CHANNELS, 13, COLUMNS), 3, whole=None)


def test_only_tensors_of_the_model_are_bands():
    """Not integers, masks, or those that have a gradient; attributes are torch's own afterwards."""

    def run(manager):
        def function(m, x):
            m.mean, m.table = x.detach().mean((2, 3)), torch.zeros(4)
            m.table[1:] += 2
            others = [torch.zeros(3, dtype=dtype) for dtype in (torch.long, torch.bool)]
            assert not any(type(y) is BandTensor for y in (*others, torch.ones(())))
            assert type(torch.zeros(3, requires_grad=True)) is torch.Tensor
            return x

        model = Model(function)
        compute_on_bands(model, manager, [(2, CHANNELS, 7, COLUMNS)])
        model(shard_tensor(torch.randn(2, CHANNELS, 7, COLUMNS), manager=manager))
        assert type(model.mean) is type(model.table) is type(torch.zeros(1)) is torch.Tensor
        return model.table.tolist()

    assert on_threads(2, run) == [[0, 2, 2, 2]] * 2


def _rows_one_by_one(m, x):
    y = torch.zeros_like(x)
    for i in range(x.shape[2]):
        y[:, :, i] = x[:, :, i] * m.scale[:, None]
    return y


def test_rows_are_sent_when_they_are_read():
    # Each to the two other ranks; nothing of what is written.
    for function, rows in ((_rows_one_by_one, 2 * 13), (a_state_in_a_loop, 2 * (2 * 13 + 2 * 12))):
        sent = check(function, (2, CHANNELS, 13, COLUMNS), 3)
        forward, _ = ([sum(n) for n in zip(*each, strict=True)] for each in zip(*sent, strict=True))
        assert forward == pytest.approx([rows, rows]), function.__name__


# ---------------------------------------------------------------- refused, or not


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


def _shape_of_what_has_views(x):
    y = x * 1
    column = y[..., 0]
    y.transpose_(1, 2)
    return y, column


def _shape_of_a_view_that_is_written(x):
    y = x * 1
    part = y[:, 2:].transpose_(1, 2)
    part.mul_(2)
    return y


def _shape_of_a_view_of_what_is_written(x):
    y = x.new_zeros(x.shape)
    part = y[:, 2:].transpose_(1, 2)
    y.add_(x)
    return part * 2


REFUSED = [
    (_same_shape_only, "add: gives a field of (0,) the shape"),
    (_with_gradient, "out=... arguments don't support automatic differentiation"),
    (_shape_of_what_has_views, "transpose_: changes the shape in place of a field that"),
    (_shape_of_a_view_that_is_written, "changed its shape in place"),
    (_shape_of_a_view_of_what_is_written, "changed its shape in place"),
]
ALLOWED = {
    "copies of another order": _copy_of_another_order(F.instance_norm),
    "pools of another order": _copy_of_another_order(lambda x: F.max_pool2d(x, 3, 1, 1)),
    "views of another order": _view_of_another_order(lambda x: x.sin() + x),
    "gradient past autograd": _gradient_by_what_is_written_without_gradients,
    "repeated past autograd": _repeated_past_autograd,
    "strides": _unknown_strides,
    "strides of moved rows": _of_moved_rows,
    "hook of a base": _hook_of_a_base,
    "hook of a view assigned to itself": _hook_of_a_view_assigned_to_itself,
    "hook of what may be a view": _hook_of_what_may_be_a_view,
    "shape of a view": lambda x: (x * 1)[:, 2:].transpose_(1, 2).unsqueeze_(0)[0] * 2,
    "shape before views": lambda x: (x * 1).transpose_(1, 2)[:, 1:].mul_(2),
}


def test_what_hooks_views_and_orders_in_memory_are_allowed():
    functions = {
        name: lambda model, x, function=function: function(x) * model.scale.sum()
        for name, function in ALLOWED.items()
    }
    check_together(functions, whole=None)


def test_refuses_what_is_not_known():
    def run(manager, function):
        model = Model(lambda m, x: function(x)).double()
        compute_on_bands(model, manager, [(2, CHANNELS, 7, COLUMNS)])
        x = torch.randn(2, CHANNELS, 7, COLUMNS, dtype=torch.float64)
        with pytest.raises((UserError, RuntimeError)) as error:
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
    """Write past torch's count: also on one process gradients are those of what is there then."""
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


def test_saved_values_that_were_changed_past_autograd():
    for function in (saved_by_a_function, saved_by_a_write):
        check(lambda m, x: function(x) * m.scale[:, None, None], whole=None)  # noqa: B023

    def run(manager, x):
        model = Model(lambda m, x: saved_by_a_reader(x)).double()
        compute_on_bands(model, manager, [tuple(x.shape)])
        y = model(shard_tensor(x, manager=manager))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return y.shape[2]

    x = torch.randn(2, CHANNELS, 7, COLUMNS, dtype=torch.float64)
    assert on_threads(2, run, x) == [4, 3]


def test_a_field_that_is_returned_as_it_is_is_the_same():
    functions = {
        name: lambda model, x, function=function: x * (2.0 if function(x) is x else 3.0)
        for name, function in AS_IT_IS.items()
    }
    check_together(functions, whole=None)

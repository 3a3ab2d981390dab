"""Functions on bands equal those of the globe: outputs and gradients, and none runs whole."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import shard_tensor
from tests.domain_parallel.band_tensor.function_tables import (
    FAMILIES,
    LAYERS,
    RUN_WHOLE,
    SDPA,
    SLICES,
    change_windows_in_place,
    dilated,
)
from tests.domain_parallel.band_tensor.functions import (
    CHANNELS,
    COLUMNS,
    HEIGHTS,
    PLAIN,
    RANKS,
    Model,
    assert_close,
    check,
    check_table,
    compute_on_bands,
    dim_of_bands,
)
from tests.ranks import RankError, on_threads
from tests.tables import entry

# Of torch on GPUs, where recurrent layers get copies of their weights.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_equal_those_of_the_globe(family, ranks):
    check_table(FAMILIES[family], ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_slices_of_few_rows(ranks):
    check_table(SLICES, ranks)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("ranks", RANKS)
def test_convolutions_that_fetch_their_rows_first(ranks):
    check_table({name: LAYERS[name] for name in LAYERS if "convolution" in name}, ranks)


def test_antialiased_interpolation_to_fewer_rows_stays_in_bands():
    modes = "bilinear", "bicubic"
    check(lambda m, x: [F.interpolate(x, None, 0.4, mode, antialias=True) for mode in modes])


def test_what_no_rule_can_do_runs_whole():
    for name, function in RUN_WHOLE.items():
        with entry(name):
            check(function, whole={name, f"{name}_backward"})


def attend_with_learned_mask(model, x):
    """Attention in windows of 5 rows, with a mask that is a parameter."""
    y = F.pad(x, (0, 0, 0, -x.shape[2] % 5)).unflatten(2, (-1, 5))
    windows = y.permute(0, 2, 4, 3, 1).flatten(0, 2)
    y = SDPA(windows, windows, windows, attn_mask=model.matrix[:5, :5])
    y = y.unflatten(0, (len(x), -1, COLUMNS)).permute(0, 4, 1, 3, 2).flatten(2, 3)
    return y[:, :, : x.shape[2]]


def _has_gradient(manager, model, x):
    model = copy.deepcopy(model)
    compute_on_bands(model, manager, [tuple(x.shape)])
    model(shard_tensor(x, manager=manager)).sum().backward()
    return model.matrix.grad is not None


def test_masks_have_gradients_on_ranks_without_windows():
    model = Model(attend_with_learned_mask).double()
    # More ranks than channels or columns: bands can't move there.
    shape = (1, CHANNELS, 9, COLUMNS)
    assert (
        on_threads(9, _has_gradient, model, torch.randn(shape, dtype=torch.float64)) == [True] * 9
    )
    check(attend_with_learned_mask, shape, 9)


def test_windows_that_share_rows_are_not_changed_in_place():
    for size in (3, 11):
        message = "unfold: its result, to which is written, has entries of a field at several"
        with pytest.raises(RankError, match=message):
            check(lambda m, x: change_windows_in_place(m, x, size, -2), whole=None)  # noqa: B023


def _double(model, y, function):
    """Return a field with twice as many rows and columns."""
    if function == "conv_transpose2d":
        return F.conv_transpose2d(y, model.matrix[:, :, None, None].expand(-1, -1, 2, 2), stride=2)
    return F.interpolate(y, scale_factor=2, mode=function)


def halve_and_double(model, x, function, ranks):
    """Halve a field twice, to fewer rows than ranks, and double it again."""
    weight = model.matrix[:, :, None, None].expand(-1, -1, 3, 3)
    levels = [x, F.conv2d(x, weight, stride=2, padding=1)]
    y = dilated(model, F.max_pool2d(levels[1], 2, ceil_mode=True), 1)
    for level in levels[::-1]:
        height, width = level.shape[2:]
        y = _double(model, y, function)[:, :, :height, :width]
        assert height < ranks or dim_of_bands(y) in (2, PLAIN)
        y = F.group_norm(dilated(model, y + level, 1), 2)
    return y


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", ["conv_transpose2d", "nearest", "bilinear"])
def test_fewer_rows_than_ranks_have_bands_of_columns(function, ranks):
    shape = (2, CHANNELS, {2: 3, 3: 5, 4: 7}[ranks], 19)
    check(lambda m, x: halve_and_double(m, x, function, ranks), shape, ranks)


@pytest.mark.parametrize(
    "function", ["nearest", pytest.param("conv_transpose2d", marks=pytest.mark.exhaustive)]
)
def test_whole_fields_have_bands_again_where_rows_are_enough(function):
    shape = (2, CHANNELS, 5, 6)
    check(lambda m, x: halve_and_double(m, x, function, 4), shape, 4)


def _gradients_of_heads(manager, model, x, order):
    """Return the gradient of the input, and which weights have one, after a pass for each head."""
    model = copy.deepcopy(model)
    if manager is not None:
        compute_on_bands(model, manager, [tuple(x.shape)])
        x = shard_tensor(x, manager=manager)
    x = x.clone().requires_grad_()
    outputs = model(x)
    for i in order:
        outputs[i].square().sum().backward()
    return x.grad, [head.weight.grad is not None for head in model]


class Heads(nn.ModuleList):
    """Convolutions of one field, which is the input or made without keeping anything."""

    def __init__(self, of_input):
        super().__init__(nn.Conv2d(2, 2, n, padding=n // 2) for n in (3, 5, 1, 3))
        self.of_input = of_input

    def forward(self, x):
        x = x if self.of_input else x + 1
        return [head(x) for head in self]


@pytest.mark.usefixtures("overlap")
def test_convolutions_of_one_field_have_backward_passes_of_their_own():
    x = torch.randn(1, 2, 12, COLUMNS, dtype=torch.float64)
    for of_input, order in product((True, False), [(0, 1), (1, 3, 0), (3,)]):
        model, case = Heads(of_input).double(), f"{of_input=}, {order=}"
        found, have_grads = zip(*on_threads(3, _gradients_of_heads, model, x, order), strict=True)
        expected, expected_grads = _gradients_of_heads(None, model, x, order)
        assert_close(torch.cat(found, -2), expected, f"input gradient, {case}")
        assert list(have_grads) == [expected_grads] * 3, case


def _raises_as_torch(manager, function, x):
    model = Model(function).double()
    with pytest.raises((RuntimeError, TypeError)) as expected:
        model(x)
    compute_on_bands(model, manager, [tuple(x.shape)])
    with pytest.raises(expected.type) as found:
        model(shard_tensor(x, manager=manager))
    assert str(found.value) == str(expected.value)


def test_wrong_indices_raise_the_error_of_torch():
    def scatter_by_fewer_dimensions(model, x):
        return x.scatter_add(2, torch.zeros(3, dtype=torch.long), x)

    x = torch.randn(2, CHANNELS, HEIGHTS[3], COLUMNS, dtype=torch.float64)
    on_threads(3, _raises_as_torch, scatter_by_fewer_dimensions, x)


def _assign_to_a_smaller_mask(manager):
    def assign(model, x):
        x = x * 1
        x[torch.ones(1, 1, dtype=torch.bool)] = 0.0
        return x

    model = Model(assign)
    compute_on_bands(model, manager, [(2, CHANNELS, 8, COLUMNS)])
    with pytest.raises(IndexError, match="mask"):
        model(torch.randn(2, CHANNELS, 4, COLUMNS))


def test_masks_are_not_broadcast():
    on_threads(2, _assign_to_a_smaller_mask)

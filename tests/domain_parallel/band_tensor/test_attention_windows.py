"""Windows of rows: exact, and no row moves farther than to the end of a window."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.decide import Wanted, counting_manager, decide_on_globe, plan_report
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, RANKS, Model, check
from tests.ranks import on_threads
from tests.tables import entry
from tests.tier_cases import tiers


def _attend(x, size):
    """Return the attention of each point to those of its window of rows, in each column."""
    windows = x.unflatten(2, (-1, size)).permute(0, 2, 4, 3, 1)
    y = F.scaled_dot_product_attention(windows, windows, windows)
    return y.permute(0, 4, 1, 3, 2).flatten(2, 3)


def _by_index(order, size, m, x):
    """Add the attention among rows in another order, padded to whole windows in the south."""
    height = x.shape[2]
    padded = F.pad(x, (0, 0, 0, -height % size))
    order = torch.tensor(order(padded.shape[2], size))
    y = _attend(padded.index_select(2, order), size)
    return x + y.index_select(2, order.argsort()[:height])


def _in_order(height, size):
    return list(range(height))


def _shifted(height, size):
    return [(row + size // 2) % height for row in range(height)]


def _dilated(height, size):
    step = height // size
    return [first + step * i for first in range(step) for i in range(size)]


ORDERS = [_in_order, _shifted, _dilated]


# Ten rows have fewer windows of six than there are ranks.
HEIGHTS_AND_SIZES = [(48, 8), (46, 4), (25, 6), (13, 3), (10, 6), (7, 7)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("order", ORDERS)
def test_attention_in_windows_is_that_of_the_globe(order, ranks):
    for height, size in HEIGHTS_AND_SIZES:
        with entry((height, size)):
            check(partial(_by_index, order, size), (2, CHANNELS, height, COLUMNS), ranks)


def test_bands_move_to_the_nearest_windows():
    # Bands of 12 rows become 16, 8, 16 and 8, and what is added to them moves back.
    sent = check(lambda m, x: x + _attend(x, 8), (2, CHANNELS, 48, COLUMNS), 4)
    assert [forward for (forward, _), _ in sent] == [4, 4, 4, 4]
    assert sum(backward for _, (backward, _) in sent) == 16


def test_shifted_windows_stay_with_the_rows_that_they_are_added_to():
    def blocks(m, x):
        return _by_index(_shifted, 6, m, _by_index(_in_order, 6, m, x))

    # Bands of 12, 11, 11 and 11 rows, and three of padding on the last rank. One row of the third
    # rank, and two of the last one, belong to windows of the rank before: to attention, and to be
    # added to its result. Then each rank sends the three rows by which windows are shifted, and
    # their results back. At the end outputs get the bands of inputs.
    sent = check(blocks, (2, CHANNELS, 45, COLUMNS), 4)
    expected = [3 + 3, 3 + 3 + 1, 1 + 1 + 3 + 3 + 2, 2 + 2 + 3 + 3]
    assert [forward for (forward, _), _ in sent] == expected
    assert sum(backward for _, (backward, _) in sent) == 33


def _in_windows(size, m, x):
    """Return linear layers and attention in windows of channels last, as those of a Swin."""
    (rows, columns), x = size, x.permute(0, 2, 3, 1)
    batch, height, width, channels = x.shape
    x = x.view(batch, height // rows, rows, width // columns, columns, channels)
    windows = F.linear(x.transpose(2, 3).reshape(-1, rows * columns, channels), m.matrix).tanh()
    y = F.linear(F.scaled_dot_product_attention(windows, windows, windows), m.matrix)
    y = y.view(batch, height // rows, width // columns, rows, columns, channels)
    return y.transpose(2, 3).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_windows_of_rows_and_columns_are_those_of_the_globe(ranks):
    for height, columns, size in [
        (6, 8, (3, 2)), (7, 12, (7, 3)), (10, 8, (5, 4)), (8, 10, (4, 1)), (6, 18, (2, 2))
    ]:  # fmt: skip
        with entry((height, columns, size)):
            check(partial(_in_windows, size), (2, CHANNELS, height, columns), ranks)


def test_few_windows_of_rows_move_to_columns_and_back():
    # There is not a window of rows for each of three ranks, but one of columns: 2/3 of the six rows
    # move there, and back. Channels, though more, would move again to be mixed.
    sent = check(partial(_in_windows, (3, 2)), (2, CHANNELS, 6, 6))
    assert [forward for (forward, _), _ in sent] == pytest.approx([2 * 2 * 2 / 3] * 3)
    assert sum(backward for _, (backward, _) in sent) == pytest.approx(2 * 6 * 2 / 3)


def test_bounds_move_to_the_nearest_multiples_that_are_as_even():
    for bands, unit, expected in [
        ((25,) * 8, 10, (30, 20, 30, 20, 30, 20, 30, 20)),
        ((12, 11), 6, (12, 11)),
        # Balanced if the nearest bounds would leave a rank without any, or give one more.
        ((2, 18), 5, (10, 10)),
        ((14, 6, 10), 5, (10, 10, 10)),
        ((7, 7, 6), 9, (9, 9, 2)),
    ]:
        moved = RowPartition.from_sizes(list(bands)).moved_to_multiples_of(unit)
        assert moved.sizes == expected, bands


def _send_in_planned_bands(manager, model, x):
    """Return a rank's output and input gradient in planned bands, these and the bytes it sends."""
    model = convert_to_domain_parallel(model, manager, input_shape=x.shape)
    assert attached_domain(model) is not None
    local = shard_tensor(x, manager=manager).clone().requires_grad_()
    traffic = manager.transport.traffic
    before = traffic.bytes
    y = model(local)
    y.sin().sum().backward()
    sizes = manager.partition(x.shape[2]).sizes
    return y.detach(), local.grad, model.matrix.grad, sizes, traffic.bytes - before


@pytest.mark.parametrize(
    ("height", "bands"),
    [
        (70, (24, 24, 22)),
        pytest.param(46, (24, 22), marks=pytest.mark.exhaustive),
        pytest.param(94, (24, 24, 24, 22), marks=pytest.mark.exhaustive),
    ],
)
def test_planned_bands_end_where_padded_windows_do(height, bands):
    def blocks(m, x):
        x = _by_index(_in_order, 8, m, x)
        x = x + F.linear(x.movedim(1, -1), m.matrix).movedim(-1, 1)
        return _by_index(_in_order, 8, m, x)

    torch.manual_seed(0)
    model = Model(blocks).double()
    x = torch.randn(2, CHANNELS, height, COLUMNS, dtype=torch.float64, requires_grad=True)
    sharded = on_threads(
        len(bands), lambda manager: _send_in_planned_bands(manager, deepcopy(model), x.detach())
    )
    outputs, input_grads, grads, sizes, sent = zip(*sharded, strict=True)
    assert set(sizes) == {bands}
    assert not any(sent)
    y = model(x)
    y.sin().sum().backward()
    torch.testing.assert_close(torch.cat(outputs, 2), y.detach())
    torch.testing.assert_close(torch.cat(input_grads, 2), x.grad)
    torch.testing.assert_close(sum(grads), model.matrix.grad)


class _InWindows(nn.Module):
    """Attends in windows by code that layers refuse, after a convolution, which they plan."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        return _by_index(_in_order, 8, self, self.conv(x))


class _InLevels(nn.Module):
    """Adds up rows, which layers refuse, after they have planned two strides."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(*(nn.Conv2d(CHANNELS, CHANNELS, 2, 2) for _ in range(2)))

    def forward(self, x):
        return self.down(x).cumsum(2)


@pytest.mark.parametrize(
    ("kind", "height", "bands"), [(_InWindows, 46, (24, 22)), (_InLevels, 92, (32, 32, 28))]
)
def test_a_refused_plan_of_layers_leaves_the_bands_free(kind, height, bands):
    decision = plan_report(kind(), (2, CHANNELS, height, COLUMNS), len(bands))
    assert decision.on_globe
    assert [partition.sizes for partition in decision.bands] == [bands]


class _Inverts(_InLevels):
    def forward(self, x):
        return torch.linalg.pinv(self.down(x)).mT


def test_a_refused_model_leaves_no_bands():
    manager = counting_manager(3)
    with pytest.raises(UserError, match="pinv runs whole"):
        convert_to_domain_parallel(
            _Inverts(), manager, input_shape=(2, CHANNELS, 92, COLUMNS), whole_ops="refuse"
        )
    assert manager.bands.planned_partitions == ()


def test_bands_stay_balanced_where_windows_would_make_them_uneven():
    shape = (2, CHANNELS, 25, COLUMNS)
    manager = counting_manager(4)
    model = Model(partial(_by_index, _in_order, 6))
    decision = decide_on_globe(model, manager, [shape], Wanted(limit=None), ["as the test wants"])
    assert decision.bands == (RowPartition.balanced(25, 4),)


def _sent_bytes(plan):
    assert not plan.problems
    return sum(part.bytes for part in (*plan.forward, *plan.backward))


@pytest.mark.parametrize(
    ("name", "most"),
    tiers([], [("unet_base", 1.11)], [("pangu_base", 1.0), ("crossformer_base", 1.37)]),
)
def test_presets_send_little_more_than_their_layers(name, most):
    from credit_dp.cli.compose import Composer
    from credit_dp.costs.budget import model_and_shape

    options = [f"model={name}", "data.grid=721x1440", "model.activation_checkpointing=false"]
    config = Composer("train").compose_config(options)
    config = replace(config, data=replace(config.data, batch_size=1))
    model, shape = model_and_shape(config, 1)
    layers = plan_report(model, shape, 8)
    assert not layers.on_globe
    wanted = Wanted(limit=None, costs=True)
    on_globe = decide_on_globe(model, counting_manager(8), [shape], wanted, ["compared"])
    assert _sent_bytes(on_globe) <= most * _sent_bytes(layers)

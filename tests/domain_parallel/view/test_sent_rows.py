"""Rows are sent once through the view, whatever form padding has, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit_dp.models.blocks import pad_poles
from tests.domain_parallel.view.functions import (
    CHANNELS,
    COLUMNS,
    RANKS,
    check,
    rows_and_messages,
)
from tests.ranks import on_threads

ROWS = 48


def _check_sent(function, ranks, rows, messages):
    shape = (2, CHANNELS, ROWS, COLUMNS)
    of_ranks = on_threads(ranks, rows_and_messages, function, shape)
    for of_pass in zip(*of_ranks, strict=True):
        assert tuple(map(sum, zip(*of_pass, strict=True))) == (rows, messages)
    check(function, shape, ranks)


def _conv(m, x, rows=3, stride=1):
    weight = m.matrix[:, :, None, None].expand(-1, -1, rows, 1)
    return F.conv2d(x, weight, stride=(stride, 1))


def _joined(x, width, beyond):
    """Return `x` with what a function makes of the rows before each pole."""
    return torch.cat([beyond(x[..., :width, :]), x, beyond(x[:, :, -width:])], -2)


PADDED = {
    "zeros": lambda x: F.pad(x, (0, 0, 1, 1)),
    "a value": lambda x: F.pad(x, (0, 0, 1, 1), value=2.0),
    "reflect": lambda x: F.pad(x, (0, 0, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (0, 0, 1, 1), mode="replicate"),
    "slices": lambda x: _joined(x, 1, lambda rows: -rows),
    "rolled slices": lambda x: _joined(x, 1, lambda rows: rows.flip(-2).roll(3, -1)),
    "earth": lambda x: pad_poles(x, 1, "earth"),
    "new zeros": lambda x: _joined(x, 1, lambda rows: x.new_zeros(rows.shape)),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("form", PADDED)
def test_a_padded_convolution_sends_the_rows_next_to_its_bands(form, ranks):
    def residual(m, x):
        return x + _conv(m, PADDED[form](x))

    edges = 2 * (ranks - 1)  # each rank needs the row next to each edge of its band
    _check_sent(residual, ranks, edges, edges)


@pytest.mark.parametrize("ranks", RANKS)
def test_circular_rows_are_sent_by_the_rank_at_the_other_pole(ranks):
    def circular(m, x):
        return _conv(m, F.pad(x, (0, 0, 1, 1), mode="circular"))

    _check_sent(circular, ranks, 2 * ranks, 2 * ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_fewer_rows_than_ranks_stay_at_the_poles(ranks):
    width = ranks - 1

    def wide(m, x):
        return _conv(m, pad_poles(x, width, "earth"), rows=2 * width + 1)

    _check_sent(wide, ranks, 2 * width * (ranks - 1), 2 * (ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_coarse_rows_lie_where_the_fine_ones_are(ranks):
    def there_and_back(m, x):
        coarse = _conv(m, pad_poles(x, 1, "reflect"), stride=2)
        return x * coarse.repeat_interleave(2, -2)

    # Each coarse row is in the middle of three fine ones, of which the last band has two at least.
    _check_sent(there_and_back, ranks, ranks - 1, ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_shifted_windows_move_there_and_back(ranks):
    def shifted(m, x):
        order = torch.arange(2, ROWS + 2) % ROWS
        windows = x.index_select(2, order).unflatten(2, (-1, 4))
        mixed = (windows + windows.mean(3, keepdim=True)).flatten(2, 3)
        return x + mixed.index_select(2, (order - 4) % ROWS)

    # Each rank gets two rows of the next one, and returns them.
    _check_sent(shifted, ranks, 4 * ranks, 2 * ranks)


def _shifted_bands(x):
    """Return a field whose bands end one row further south than those of layers."""
    return F.pad(x, (0, 0, 1, 1))[..., :ROWS, :]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_norm_returns_the_bands_that_it_gets(ranks):
    def normed(m, x):
        return _conv(m, F.pad(F.group_norm(_shifted_bands(x), 2), (0, 0, 1, 1)))

    _check_sent(normed, ranks, 2 * (ranks - 1), ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_fields_are_joined_in_the_bands_of_layers(ranks):
    def skip(m, x):
        both = torch.cat([_shifted_bands(x), x], 1)
        total = both[:, :CHANNELS] + both[:, CHANNELS:]
        return total + _conv(m, F.pad(total, (0, 0, 1, 1)))

    # The shifted rows return, and the convolution needs those next to its bands.
    _check_sent(skip, ranks, 3 * (ranks - 1), 3 * (ranks - 1))

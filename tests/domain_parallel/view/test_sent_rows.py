"""Rows are sent once through the view, whatever form padding has, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from credit_dp.domain_parallel import shard_tensor
from credit_dp.models.blocks import pad_poles
from tests.domain_parallel.view.functions import (
    CHANNELS,
    COLUMNS,
    RANKS,
    Model,
    check,
    compute_on_bands,
)
from tests.ranks import on_threads
from tests.tables import entry

ROWS = 48


def conv(m, x, rows=3, stride=1):
    weight = m.matrix[:, :, None, None].expand(-1, -1, rows, 1)
    return F.conv2d(x, weight, stride=(stride, 1))


def joined(x, width, beyond):
    """Return `x` with what a function makes of the rows before each pole."""
    return torch.cat([beyond(x[..., :width, :]), x, beyond(x[:, :, -width:])], -2)


PADDED = {
    "zeros": lambda x: F.pad(x, (0, 0, 1, 1)),
    "a value": lambda x: F.pad(x, (0, 0, 1, 1), value=2.0),
    "reflect": lambda x: F.pad(x, (0, 0, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (0, 0, 1, 1), mode="replicate"),
    "slices": lambda x: joined(x, 1, lambda rows: -rows),
    "rolled slices": lambda x: joined(x, 1, lambda rows: rows.flip(-2).roll(3, -1)),
    "earth": lambda x: pad_poles(x, 1, "earth"),
    "new zeros": lambda x: joined(x, 1, lambda rows: x.new_zeros(rows.shape)),
    "cropped": lambda x: F.pad(F.pad(x, (0, 0, 2, 2)), (0, 0, -1, -1)),
}


def circular(m, x):
    return conv(m, F.pad(x, (0, 0, 1, 1), mode="circular"))


def wide(m, x, ranks):
    width = ranks - 1
    return conv(m, pad_poles(x, width, "earth"), rows=2 * width + 1)


def there_and_back(m, x):
    coarse = conv(m, pad_poles(x, 1, "reflect"), stride=2)
    return x * coarse.repeat_interleave(2, -2)


def shifted(m, x):
    order = torch.arange(2, ROWS + 2) % ROWS
    windows = x.index_select(2, order).unflatten(2, (-1, 4))
    mixed = (windows + windows.mean(3, keepdim=True)).flatten(2, 3)
    return x + mixed.index_select(2, (order - 4) % ROWS)


def shifted_bands(x):
    """Return a field whose bands end one row further south than those of layers."""
    return F.pad(x, (0, 0, 1, 1))[..., :ROWS, :]


def normed(m, x):
    return conv(m, F.pad(F.group_norm(shifted_bands(x), 2), (0, 0, 1, 1)))


def skip(m, x):
    both = torch.cat([shifted_bands(x), x], 1)
    total = both[:, :CHANNELS] + both[:, CHANNELS:]
    return total + conv(m, F.pad(total, (0, 0, 1, 1)))


def dilated(m, x, dilation):
    weight = m.matrix[:, :, None, None].expand(-1, -1, 3, 3) / 8
    return F.conv2d(x, weight, padding=dilation, dilation=dilation)


def product(coefficients, m, x):
    """Return products with a matrix that mixes all rows, and with its transpose."""
    table = torch.linspace(-1, 1, ROWS * coefficients, dtype=x.dtype).view(coefficients, -1).cos()
    spectrum = torch.einsum("bchw,gh->bcgw", x, table)
    return torch.einsum("bcgw,gh->bchw", spectrum, table)


class Sent(NamedTuple):
    """A function of fields, and what all ranks together send in a forward or backward of it."""

    function: Callable
    rows: float
    messages: int | None = None


def cases(ranks: int) -> dict[str, Sent]:
    """Return functions by name; each rank needs the row next to each edge of its band, say."""
    edges = 2 * (ranks - 1)
    padded = {
        name: Sent(lambda m, x, pad=pad: x + conv(m, pad(x)), edges, edges)
        for name, pad in PADDED.items()
    }
    # Each rank gets what others have of its channels, and returns it.
    moved = 2 * ROWS * (ranks - 1) / ranks
    return padded | {
        # The rank at the other pole sends rows, too.
        "circular": Sent(circular, 2 * ranks, 2 * ranks),
        "fewer rows than ranks stay at the poles": Sent(
            partial(wide, ranks=ranks), (ranks - 1) * edges, edges
        ),
        # Each coarse row is in the middle of three fine ones, of which the last band has two.
        "coarse rows lie where fine ones are": Sent(there_and_back, ranks - 1, ranks - 1),
        # Each rank gets two rows of the next one, and returns them.
        "shifted windows move there and back": Sent(shifted, 4 * ranks, 2 * ranks),
        "a norm returns the bands that it gets": Sent(normed, edges, ranks - 1),
        # The shifted rows return, and the convolution needs those next to its bands.
        "fields are joined in the bands of layers": Sent(skip, 1.5 * edges, 3 * (ranks - 1)),
        # Rows next to an edge once, whatever reads them, and in whatever order.
        "convolutions of one field": Sent(
            lambda m, x: sum(dilated(m, x, d) for d in (3, 1, 2)), 3 * edges
        ),
        "products over rows move bands to channels": Sent(partial(product, ROWS), moved),
        "products with fewer rows than ranks are summed": Sent(partial(product, ranks - 1), 0),
    }


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_are_sent_once(ranks):
    for name, (function, rows, messages) in cases(ranks).items():
        with entry(name):
            sent = check(function, (2, CHANNELS, ROWS, COLUMNS), ranks)
            for of_pass in zip(*sent, strict=True):
                found = [sum(counts) for counts in zip(*of_pass, strict=True)]
                assert found[0] == pytest.approx(rows)
                assert messages in (None, found[1])


@pytest.mark.parametrize(
    ("dilations", "rows", "again"),
    [
        # Bands of 4 rows: the kernel reaches over the next one, of which it needs no row, or half.
        # Halos wider than the band are not kept: backward fetches their rows again. Of small bands
        # all rows are kept.
        ((8,), [4, 4, 4, 4], True),
        pytest.param((6,), [4, 6, 6, 4], True, marks=pytest.mark.exhaustive),
        pytest.param((4, 6, 8), [8, 12, 12, 8], False, marks=pytest.mark.exhaustive),
    ],
)
def test_convolutions_that_reach_over_a_band_send_each_row_once(dilations, rows, again, overlap):
    def function(m, x):
        return sum(dilated(m, x, dilation) for dilation in dilations)

    forward, backward = zip(*check(function, (2, CHANNELS, 16, COLUMNS), 4), strict=True)
    assert [sent for sent, _ in forward] == rows
    # Every rank returns the gradients of as many rows as it has received.
    assert sum(sent for sent, _ in backward) == (1 + (again and overlap)) * sum(rows)


@pytest.mark.slow
def test_many_rows_of_poles_become_bands():
    def beyond(rows):
        return rows.flip(2).roll(COLUMNS // 2, -1)

    def function(m, x):
        return conv(m, joined(x, 4, beyond), rows=9)

    sent = check(function, (2, CHANNELS, 24, COLUMNS), 4)
    # The slice of each pole becomes bands of one row, which are exchanged by the flip, and return.
    halos, of_poles = [4, 8, 8, 4], [3 + 2 + 1, 2 + 2, 2 + 2, 3 + 2 + 1]
    assert [forward for (forward, _), _ in sent] == [
        halo + of_pole for halo, of_pole in zip(halos, of_poles, strict=True)
    ]
    assert sum(backward for _, (backward, _) in sent) == sum(halos) + sum(of_poles)


def _change_rows(m, x):
    y = x * 1
    rows = y[:, :, :5]
    rows += 1
    return rows


def _change_rows_and_read_all(m, x):
    y = x * 1
    y[:, :, :5] += 1
    return y


def test_rows_move_once_to_where_they_are_changed_and_once_back():
    read, changed, both = (
        [forward[1] for forward, _ in check(function, (2, CHANNELS, 12, COLUMNS))]
        for function in (lambda m, x: x[:, :, :5], _change_rows, _change_rows_and_read_all)
    )
    assert changed == read
    assert sum(both) == 2 * sum(read) > 0


def _attention_costs(manager, count, shape):
    """Return what a rank sends in a forward and in a backward, and holds, relative to the tokens.

    With attention of `count` heads.
    """

    def attend_and_scale(model, x):
        q = x.flatten(2).transpose(1, 2).unflatten(-1, (count, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q * 2, q * 3, q * 4)
        return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)

    model = Model(attend_and_scale).double()
    compute_on_bands(model, manager, [shape])
    x = torch.randn(shape, dtype=torch.float64)
    local = shard_tensor(x, manager=manager)
    traffic = manager.transport.traffic
    before = traffic.bytes
    saved = {}

    def keep(y):
        saved[y.untyped_storage()._cdata] = y
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        y = model(local)
    forward = traffic.bytes - before
    held = sum(y.untyped_storage().nbytes() for y in saved.values() if y.ndim > 3)
    y.sum().backward()
    size = x.numel() * x.element_size()
    return forward / size, (traffic.bytes - before - forward) / size, held / size


@pytest.mark.parametrize(
    ("heads", "sent", "held"),
    [
        # Each rank has the queries, keys and values of two heads, and sends their results back: of
        # four tensors, 3/4 of its quarter. It holds its part of those and the input.
        (8, 4 * 3 / 16, 5 / 4),
        # Pairs of ranks share a head: its keys and values are sent to both.
        (2, 2 * (1 / 4 * 1 / 2) + 2 * (1 / 4 * 3 / 2), 2 * 1 / 2 + 3 / 4),
        # With one head keys and values are sent to all.
        (1, 2 * 3 / 4, 2 + 3 / 4),
    ],
)
def test_attention_sends_and_holds_what_its_heads_need(heads, sent, held):
    costs = on_threads(4, _attention_costs, heads, (1, CHANNELS, 16, COLUMNS))
    assert [forward for forward, _, _ in costs] == [sent] * 4
    assert [backward for _, backward, _ in costs] == [sent] * 4
    assert max(of_rank for _, _, of_rank in costs) <= held

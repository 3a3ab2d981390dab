"""Padding of bands equals padding of the whole globe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, gather_tensor, shard_tensor
from credit_dp.models.blocks import POLE_PADDINGS, PolePad
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, on_threads
from tests.tables import entry

KINDS = ["Zero", "Constant", "Reflection", "Replication", "Circular"]
MOVES = {1: "columns", 2: "nothing", 3: "times"}


def _model(kind, args, move="nothing"):
    return Moved(kind(*args), move)


@pytest.mark.parametrize("ranks", THREADS)
@given(
    kind=st.sampled_from(KINDS),
    spatial=st.integers(1, 3),
    more=st.integers(0, 8),
    data=st.data(),
)
def test_pad(ranks, kind, spatial, more, data):
    """Any widths that torch takes: wider than a band, negative, north and south apart."""
    height = ranks + more
    side = st.integers(-3, height + (3 if kind in ("Zero", "Constant", "Replication") else 0))
    rows = (data.draw(side), data.draw(side))
    columns = (data.draw(st.integers(-1, 2)), data.draw(st.integers(0, 3)))
    sides = {1: rows, 2: columns + rows, 3: (*columns, 0, 0, *rows)}[spatial]
    args = (sides, 1.5) if kind == "Constant" else (sides,)
    module = getattr(nn, f"{kind}Pad{spatial}d")
    assume(height + sum(rows) >= ranks)
    if kind == "Reflection":
        assume(max(rows) < height)
    if kind == "Circular":  # what torch wraps around is what cropping leaves
        assume(max(rows) <= height + min(0, *rows))
    model = (module, args, MOVES[spatial])
    on_threads(ranks, assert_same_as_whole_globe, _model, model, (2, 2, height, 4))


def test_rows_apart_and_wider_than_two_bands():
    for kind in KINDS:
        args = ((1, 2, 3, 2), -0.5) if kind == "Constant" else ((1, 2, 3, 2),)
        model = (getattr(nn, f"{kind}Pad2d"), args)
        with entry(kind):  # of four ranks three have a single row
            on_threads(4, assert_same_as_whole_globe, _model, model, (2, 2, 5, 5))
    for kind in ("Zero", "Reflection", "Replication"):
        for move, spatial in (("channels", 2), ("samples", 1)):
            model = (getattr(nn, f"{kind}Pad{spatial}d"), (1,), move)
            with entry((kind, move)):
                on_threads(3, assert_same_as_whole_globe, _model, model, (2, 3, 7, 4))


class _PolePadded(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.pad = PolePad(*args)
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, x):
        return self.conv(self.pad(x))


@pytest.mark.parametrize("ranks", THREADS)
@given(
    poles=st.sampled_from(POLE_PADDINGS),
    more=st.integers(0, 6),
    columns=st.sampled_from([None, 0, 2]),
    longitudes=st.sampled_from([5, 6]),
    data=st.data(),
)
def test_pole_pad(ranks, poles, more, columns, longitudes, data):
    height = ranks + more
    width = data.draw(st.integers(1, height - (poles == "reflect")))
    columns = min(width, longitudes) if columns is None else columns
    args = (width, poles, max(columns, 1))
    on_threads(ranks, assert_same_as_whole_globe, _PolePadded, args, (2, 2, height, longitudes))


def _converted(manager, x):
    model = convert_to_domain_parallel(PolePad(2, "earth"), manager)
    return gather_tensor(model(shard_tensor(x, manager=manager)), manager=manager)


def test_a_model_that_is_a_pole_pad():
    x = torch.randn(1, 1, 5, 6)
    for made in on_threads(3, _converted, x):
        assert torch.equal(made, PolePad(2, "earth")(x))


def test_pole_padding_keeps_channels_last():
    for poles in ("earth", "mirror", "replicate", "zeros"):
        if poles == "replicate" and DEVICE != "cpu":
            continue  # torch makes copies on GPUs
        x = torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last)
        y = PolePad(2, poles)(x)
        assert y.is_contiguous(memory_format=torch.channels_last), poles
        assert torch.equal(y, PolePad(2, poles)(x.contiguous())), poles


def test_a_walk_across_the_pole():
    """Rows 0 and 1 come again in the opposite order, turned by three of six columns."""
    x = torch.arange(24.0).view(1, 1, 4, 6)
    made = PolePad(2, "earth", 0)(x)[0, 0]
    assert made.shape == (8, 6)
    assert made[1].tolist() == [3, 4, 5, 0, 1, 2]
    assert made[0].tolist() == [9, 10, 11, 6, 7, 8]
    assert made[6].tolist() == [21, 22, 23, 18, 19, 20]
    assert PolePad(1)(x)[0, 0, 0].tolist() == [5, 0, 1, 2, 3, 4, 5, 0]
    # Of odd longitudes half a column less.
    odd = torch.arange(5.0).view(1, 1, 1, 5)
    assert PolePad(1, "earth", 0)(odd)[0, 0, 0].tolist() == [3, 4, 0, 1, 2]


def test_pole_pad_refuses_what_there_is_not():
    for args, message in [
        ((1, "north"), "poles has to be one of"),
        ((-1,), "widths can't be negative"),
        ((5, "earth", 1), "5 rows beyond each pole"),
        ((5, "mirror", 1), "5 rows beyond each pole"),
        ((4, "reflect", 1), "4 rows beyond each pole"),
    ]:
        with entry(args), pytest.raises(ValueError, match=message):
            PolePad(*args)(torch.zeros(1, 1, 4, 6))

"""Convolutions on bands equal the convolution of the whole globe, whatever their options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelPeriodicConv2d,
    shard_tensor,
)
from credit_dp.domain_parallel.layers import base
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import (
    THREADS,
    assert_same_as_whole_globe,
    halos_travel,
    in_both_ways,
)
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, on_threads
from tests.tables import entry

SLOW = pytest.mark.slow
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Sizes of the other dimensions than the rows': columns last, times or levels first.
OTHERS = {1: (), 2: (6,), 3: (5, 6)}


def _along(spatial, row, others):
    """Return a setting of all spatial dimensions, the rows' at its index."""
    return (*others[: spatial - 2], row, *others[spatial - 2 :]) if spatial > 1 else (row,)


@st.composite
def cases(draw, spatial, ranks):
    """Options, and a height at which no rank is without an output row; often some has only one."""
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    kernel, stride, dilation = (draw(st.integers(1, n)) for n in (6, 4, 3))
    padding = draw(st.integers(0, 5))
    others = [[draw(st.integers(a, b)) for _ in OTHERS[spatial]] for a, b in ((1, 3), (1, 2))]
    options = {
        "kernel_size": _along(spatial, kernel, others[0]),
        "stride": _along(spatial, stride, others[1]),
        "padding": _along(spatial, padding, [draw(st.integers(0, 2)) for _ in OTHERS[spatial]]),
        "dilation": _along(spatial, dilation, [draw(st.integers(1, 2)) for _ in OTHERS[spatial]]),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
        "padding_mode": mode,
    }
    named = draw(st.sampled_from([None, None, "same", "valid"]))
    if named is not None:
        stride = 1 if named == "same" else stride
        options |= {"padding": named} | ({"stride": 1} if named == "same" else {})
        padding = dilation * (kernel - 1) // 2 if named == "same" else 0
    least = (ranks - 1) * stride + dilation * (kernel - 1) + 1 - 2 * padding
    return options, max(ranks, least, padding + 2) + draw(st.integers(0, 12))


def _shape(spatial, height, batch=(2,)):
    """The input's shape; a 1d convolution's rows are in columns, which it gets as samples."""
    others = OTHERS[spatial] or (3,)
    return (*batch, 2, *others[:-1], height, others[-1])


def _conv(spatial, options):
    conv = CONVS[spatial](2, 4, **options)
    return conv if spatial > 1 else Moved(conv, "columns")


def _exists(spatial, options, shape, ranks):
    """Return whether torch accepts the padding for these columns, and every rank gets a row."""
    try:
        made = _conv(spatial, options).to("meta")(torch.empty(shape, device="meta"))
    except RuntimeError:
        return False
    return made.shape[-2] >= ranks


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("ranks", THREADS)
@pytest.mark.parametrize("spatial", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
@given(meanwhile=st.booleans(), data=st.data())
def test_conv(ranks, spatial, meanwhile, data):
    options, height = data.draw(cases(spatial, ranks))
    shape = _shape(spatial, height)
    assume(_exists(spatial, options, shape, ranks))
    with halos_travel(meanwhile=meanwhile):
        on_threads(ranks, assert_same_as_whole_globe, _conv, (spatial, options), shape)


# Padding of every kind around bands of one row, which need rows of all others; no batch.
NARROW = [
    ({"kernel_size": 7, "padding": 3, "padding_mode": mode}, 4, (2,))
    for mode in ("zeros", "circular", "reflect", "replicate")
] + [({"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "circular"}, 11, ())]


@in_both_ways
def test_one_row_per_rank_and_no_batch():
    for options, height, batch in NARROW:
        shape = _shape(2, height, batch)
        with entry((options, height)):
            on_threads(4, assert_same_as_whole_globe, _conv, (2, options), shape)


# A convolution that pads around the globe, with its rows' and columns' edges.
EDGES = [
    *((poles, "circular") for poles in ("reflect", "zeros", "mirror", "earth")),
    *((edges, edges) for edges in ("replicate", "reflect", "zeros")),  # of regions
]


def _periodic(kernel, stride, edges):
    return nn.Sequential(PeriodicConv2d(2, 3, kernel, stride, *edges))


@pytest.mark.parametrize("ranks", THREADS)
@given(
    height=st.integers(5, 20),
    kernel=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 3),
    edges=st.sampled_from(EDGES),
    meanwhile=st.booleans(),
)
def test_periodic_conv(ranks, height, kernel, stride, edges, meanwhile):
    assume((height - 1) // stride + 1 >= ranks)
    args = (_periodic, (kernel, stride, edges), (2, 2, height, 7))
    with halos_travel(meanwhile=meanwhile):
        on_threads(ranks, assert_same_as_whole_globe, *args)


@in_both_ways
def test_rows_beyond_every_kind_of_edge():
    for edges in EDGES:
        with entry(edges):
            args = (_periodic, (7, 1, edges), (1, 2, 8, 7))
            on_threads(4, assert_same_as_whole_globe, *args)


class _EvenAndDilated(nn.Module):
    """Pads as the original does, before any convolution that doesn't pad."""

    def __init__(self, padding, *args):
        super().__init__()
        self.padding, self.conv = padding, nn.Conv2d(2, 3, *args)

    def forward(self, x):
        x = F.pad(x, (self.padding, self.padding, 0, 0), mode="circular")
        return self.conv(F.pad(x, (0, 0, self.padding, self.padding), mode="reflect"))


class _Others(nn.Sequential):
    converters = {_EvenAndDilated: DomainParallelPeriodicConv2d}  # noqa: RUF012


class _PerRow(nn.Module):
    """Convolves over levels and longitudes of every row; rows are among the samples."""

    def __init__(self):
        super().__init__()
        self.conv = PeriodicConv2d(2, 3)

    def forward(self, x):
        y = self.conv(x.permute(0, 3, 1, 2, 4).flatten(0, 1))
        return y.unflatten(0, (len(x), x.shape[3])).permute(0, 2, 3, 1, 4)


@in_both_ways
def test_any_convolution_inside_of_a_periodic_one():
    for args in [(1, 4), (2, 4, 2), (3, 3, 2, 0, 2), (0, 5), (2, (5, 1), (1, 3)), (1, 1)]:
        with entry(args):
            case = (lambda *args: _Others(_EvenAndDilated(*args)), args, (2, 2, 14, 7))
            on_threads(3, assert_same_as_whole_globe, *case)
    on_threads(3, assert_same_as_whole_globe, _PerRow, (), (2, 2, 4, 9, 6))


def test_a_periodic_conv_that_pads_twice_is_refused():
    layer = PeriodicConv2d(1, 1)
    layer.conv.padding = (1, 1)
    with pytest.raises(UserError, match="leave padding to the module around it"):
        DomainParallelPeriodicConv2d(layer)


MOVED = [
    ("samples", lambda: nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular")),
    ("samples", lambda: nn.Conv1d(2, 4, 3, stride=2)),
    ("tokens", lambda: nn.Conv1d(2, 4, 5, padding=2)),
    ("turned", lambda: nn.Conv2d(2, 4, (3, 1), padding=(1, 0), padding_mode="circular")),
    ("times", lambda: nn.Conv3d(2, 4, (1, 1, 3), padding=(0, 0, 1))),
    ("times", lambda: nn.Conv3d(2, 4, (1, 1, 3), stride=(1, 2, 1), padding=(0, 1, 1))),
    ("columns", lambda: nn.Conv1d(2, 4, 1)),
    ("nothing", lambda: nn.Conv2d(2, 4, (1, 3), padding=(0, 1), padding_mode="circular")),
    ("nothing", lambda: nn.Conv2d(2, 4, 1, padding=1)),
    ("samples", lambda: nn.ConvTranspose1d(2, 4, 4, 2)),
    ("turned", lambda: nn.ConvTranspose2d(2, 4, (4, 1), (2, 1))),
    ("times", lambda: nn.ConvTranspose3d(2, 4, (1, 1, 3))),
    ("nothing", lambda: nn.ConvTranspose2d(2, 4, (1, 3))),
]


def test_rows_elsewhere_than_where_the_kernel_is():
    for move, conv in MOVED:
        with entry((move, conv())):
            case = (lambda conv, move: Moved(conv(), move), (conv, move), (2, 2, 9, 6))
            on_threads(3, assert_same_as_whole_globe, *case)


def _twice():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(conv, nn.SiLU(), nn.Sequential(conv))


class _Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 5, padding="same")

    def forward(self, x):
        return x + self.conv(x)


def _residual():
    """The sibling's cotangent is the layer's own: whoever writes into it spoils both."""
    return nn.Sequential(_Residual(), nn.GroupNorm(2, 4), _Residual(), nn.SiLU(), _Residual())


@in_both_ways
def test_a_layer_under_two_names_and_a_residual_that_keeps_its_cotangent():
    on_threads(3, assert_same_as_whole_globe, _twice, (), (2, 2, 9, 6))
    on_threads(3, assert_same_as_whole_globe, _residual, (), (2, 4, 9, 5), 1e-11)


# --- a band is convolved while its halo travels --------------------------------------------


class _Log(TorchDispatchMode):
    """Records convolutions of whole bands, and messages started and waited for."""

    def __init__(self, transport, rows):
        super().__init__()
        self.notes, self.rows, self.start = [], rows, transport._start
        transport._start = self.started

    def started(self, send, receive):
        self.notes.append("start")
        finish = self.start(send, receive)

        def wait():
            self.notes.append("wait")
            finish()

        return wait

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("convolution") and args[0].shape[-2] == self.rows:
            self.notes.append(name)
        return func(*args, **(kwargs or {}))


def _overlap(manager):
    x = torch.randn(1, 2, 12, 6)
    layer = DomainParallelConv2d(nn.Conv2d(2, 2, 3, padding=1), manager=manager)
    band = shard_tensor(x, manager=manager).requires_grad_()
    layer(band)  # learns the bands
    with _Log(manager.transport, band.shape[-2]) as log:
        layer(band).sum().backward()
    forward, backward = ["start", "convolution", "wait"], ["start", "convolution_backward", "wait"]
    assert log.notes == forward + backward


def test_bands_are_convolved_while_halos_travel():
    on_threads(3, _overlap)


def _overlaps(manager):
    """Return whether the convolution of bands of 4 and 3 rows, 48 and 36 entries, overlaps."""
    layer = DomainParallelConv2d(nn.Conv2d(2, 2, 3, padding=1), manager=manager)
    y = layer(shard_tensor(torch.randn(1, 2, 7, 6), manager=manager))
    return {"_BandConvBackward": True, "ConvolutionBackward0": False}[y.grad_fn.name()]


def test_ranks_agree_whether_bands_are_small(monkeypatch):
    for entries in (36, 47, 48):
        monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", entries)
        assert on_threads(2, _overlaps) == [entries < 48] * 2, entries


def _wide(manager, width):
    """Return the most rows of a tensor that a dilated convolution keeps, and its messages.

    They are the exchanges and collectives in forward, one of which is for the bands, and backward.
    """
    x = torch.randn(1, 2, 12, 6)
    conv = nn.Conv2d(2, 2, 3, padding=width, dilation=width)
    layer = DomainParallelConv2d(conv, manager=manager)
    band = shard_tensor(x, manager=manager).requires_grad_()
    layer(band)  # learns the bands
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        calls = manager.transport.calls
        y = layer(band)
        forward = manager.transport.calls - calls
    y.sum().backward()
    return max(y.shape[-2] for y in kept), forward, manager.transport.calls - calls - forward


def test_a_halo_wider_than_the_band_is_fetched_again():
    for width, expected in [(4, (8, 2, 1)), (5, (4, 2, 2))]:
        assert on_threads(3, _wide, width) == [expected] * 3, width


def _dtype(manager, dtype):
    x = torch.randn(1, 2, 12, 6, dtype=dtype)
    layer = DomainParallelConv2d(nn.Conv2d(2, 2, 3, padding=1).to(dtype), manager=manager)
    band = shard_tensor(x, manager=manager).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(band).dtype == layer.conv(x).dtype
    layer(band).sum().backward()
    assert band.grad.dtype == layer.weight.grad.dtype == dtype


@in_both_ways
def test_types_are_those_of_the_whole_layer():
    for dtype in (torch.float32, torch.bfloat16):
        on_threads(2, _dtype, dtype)

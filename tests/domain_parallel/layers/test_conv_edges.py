"""Convolutions that compute edge rows apart are exact; halos travel during the others' work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.domain_parallel import DomainParallelConv2d, halo_exchange, shard_tensor
from credit_dp.domain_parallel.layers import base, conv, conv_bands
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import DEVICE, PROCESSES, RankError, on_processes, on_threads

RANKS = st.sampled_from([2, 3, 4, 8])
CONVS = {2: nn.Conv2d, 3: nn.Conv3d}

EDGES_OF, CONVOLVE_BAND = conv_bands.edges_of, conv_bands.convolve_band  # before they are replaced
HALO_PART = conv_bands.BandEdge.halo_part


@st.composite
def cases(draw):
    """Convolutions that keep the number of rows; often some rank has fewer rows than the halo."""
    ranks, spatial = draw(RANKS), draw(st.sampled_from([2, 2, 3]))
    taps, dilation = draw(st.sampled_from([(3, 1), (5, 1), (7, 1), (3, 2), (2, 2), (4, 2), (3, 3)]))
    width = dilation * (taps - 1) // 2
    kernel, step, spread = (draw(st.integers(1, n)) for n in (3, 2, 2))
    column_padding = draw(st.integers(0, 2))
    levels = (draw(st.integers(1, 2)), 1, draw(st.integers(0, 1)), 1)
    settings = zip(
        ("kernel_size", "stride", "padding", "dilation"),
        levels,
        (taps, 1, width, dilation),
        (kernel, step, column_padding, spread),
        strict=True,
    )
    options = {name: each[3 - spatial :] for name, *each in settings}
    options |= {
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
    }
    height = max(ranks, width + 1) + draw(st.integers(0, 12))
    others = (draw(st.integers(1, 2)), 4, *(3,) * (spatial - 2))
    return ranks, spatial, options, (*others, height, 7)


def _conv(spatial, options):
    # Never depthwise: such a layer may trade its rows for channels, and has no halo then.
    return CONVS[spatial](4, 4, **options)


@pytest.mark.slow
@given(case=cases())
def test_exact(case):
    ranks, spatial, options, shape = case
    calls = []

    def convolve_band(*args):
        calls.append(args)
        return CONVOLVE_BAND(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "convolve_band", convolve_band)
        on_threads(ranks, assert_same_as_whole_globe, _conv, (spatial, options), shape)
    assert len(calls) == ranks


def _residual():
    """The sibling's cotangent is the layer's own: whoever writes into it spoils both."""
    return nn.Sequential(_Residual(), nn.GroupNorm(2, 4), _Residual(), nn.SiLU(), _Residual())


class _Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 5, padding="same")

    def forward(self, x):
        return x + self.conv(x)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_residual_keeps_its_cotangent(ranks):
    on_threads(ranks, assert_same_as_whole_globe, _residual, (), (2, 4, 9, 5), 1e-11)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("ranks", PROCESSES)
def test_exact_on_gloo_ranks(ranks, mode):
    options = {"kernel_size": (5, 3), "padding": (2, 1), "padding_mode": mode}
    for rows in (ranks, 13):
        if mode == "zeros" or rows > ranks:
            on_processes(ranks, assert_same_as_whole_globe, _conv, (2, options), (2, 4, rows, 5))


def _nothing(*args):
    """Leave out one contribution."""


def _no_halo_part(edge, grad_rows):
    return torch.zeros_like(HALO_PART(edge, grad_rows))


def _south_is_as_far_as_north(kernel, rows, taps):
    north, _ = EDGES_OF(kernel, rows, taps)
    return north, north


@pytest.mark.parametrize(
    ("where", "name", "mutant", "found"),
    [
        (halo_exchange, "_unpack_add", _nothing, "input gradient"),
        (conv_bands.BandEdge, "add", _nothing, "output"),
        (conv_bands.BandEdge, "halo_part", _no_halo_part, "input gradient"),
        (conv_bands.BandEdge, "add_weight_grad", _nothing, "weight"),
        (conv_bands, "edges_of", _south_is_as_far_as_north, "output"),
        (conv_bands.Halo, "is_blank", lambda halo, edge: edge.halo[0] == 0, "output"),
    ],
)
def test_a_broken_edge_fails_the_comparison(monkeypatch, where, name, mutant, found):
    case = (3, assert_same_as_whole_globe, _residual, (), (2, 4, 9, 5), 1e-11)
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(RankError, match=found):
        on_threads(*case)


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


@pytest.mark.parametrize("entries", [36, 47, 48])
def test_ranks_agree_whether_bands_are_small(monkeypatch, entries):
    monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", entries)
    assert on_threads(2, _overlaps) == [entries < 48] * 2


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


@pytest.mark.parametrize(("width", "expected"), [(4, (8, 2, 1)), (5, (4, 2, 2))])
def test_a_halo_wider_than_the_band_is_fetched_again(width, expected):
    assert on_threads(3, _wide, width) == [expected] * 3


def _dtype(manager, dtype):
    x = torch.randn(1, 2, 12, 6, dtype=dtype)
    layer = DomainParallelConv2d(nn.Conv2d(2, 2, 3, padding=1).to(dtype), manager=manager)
    band = shard_tensor(x, manager=manager).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(band).dtype == layer.conv(x).dtype
    layer(band).sum().backward()
    assert band.grad.dtype == layer.weight.grad.dtype == dtype


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_those_of_the_whole_layer(dtype):
    on_threads(2, _dtype, dtype)

"""Layers keep the memory format channels last, of fields and of their gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.halo_exchange import CHANNELS_LAST_FORMATS, HaloExchange
from credit_dp.domain_parallel.layers import (
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
    group_norm,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.models.unet import LongRangeConv2d, PeriodicConv2d, PeriodicUpsample, UNet
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import cpu_only, on_threads


class Branches(nn.Module):
    """Two convolutions that share an exchange."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = (nn.Conv2d(6, 6, k, padding=k // 2) for k in (5, 3))

    def forward(self, x):
        return self.wide(x) + self.narrow(x)


class Layer(nn.Sequential):
    """A layer by itself, with the rules of a U-Net's layers."""

    row_rules = UNet.row_rules


LAYERS = {
    "convolution": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "circular convolution": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"),
    "convolution across the poles": lambda: PeriodicConv2d(6, 6, poles="earth"),
    "strided": lambda: nn.Conv2d(6, 6, 3, padding=1, stride=2),
    "strided across the poles": lambda: PeriodicConv2d(6, 6, stride=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "long": lambda: LongRangeConv2d(6, (5, 7)),
    "branches": Branches,
    "circular padding": lambda: nn.CircularPad2d(2),
    "reflection": lambda: nn.ReflectionPad2d(2),
    "zeros": lambda: nn.ZeroPad2d(2),
    "maximum": lambda: nn.MaxPool2d(2),
    "overlapping maximum": lambda: nn.MaxPool2d(3, 2, 1),
    "mean": lambda: nn.AvgPool2d(3, 2, 1),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "group norm": lambda: nn.GroupNorm(3, 6),
    "layer norm": lambda: nn.LayerNorm((24, 8)),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 4, 2, 1),
    "transposed without overlap": lambda: nn.ConvTranspose2d(6, 6, 2, 2),
    "transposed with gaps": lambda: nn.ConvTranspose2d(6, 6, 1, 2, output_padding=1),
    "upsampling around the globe": lambda: PeriodicUpsample("earth"),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest to fewer rows": lambda: nn.Upsample((15, 16), mode="nearest-exact"),
    "bilinear": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d((9, 4)),
    "adaptive maximum": lambda: nn.AdaptiveMaxPool2d((9, 4)),
    "pixel shuffle": lambda: nn.Sequential(nn.Conv2d(6, 12, 1), nn.PixelShuffle(2)),
    "pixel unshuffle": lambda: nn.PixelUnshuffle(2),
}
NAMES = [
    pytest.param(name, marks=cpu_only("torch's gradient is wrong on GPUs"))
    if name == "mean"
    else name
    for name in LAYERS
]
ROWS = 8  # of a band


def channels_last(x):
    return x.to(memory_format=CHANNELS_LAST_FORMATS[x.ndim])


class Copies(TorchDispatchMode):
    """Notes copies of whole bands to another memory format.

    Messages are contiguous whatever the format of the bands is, but have a few rows only.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "slice_backward", "cat"):
            source = args[1] if name == "copy_" else args[0]
            source = max(source, key=torch.numel) if name == "cat" else source
            is_band = source.ndim >= 4 and min(source.shape[-2], result.shape[-2]) >= ROWS // 2
            # A view of some columns is contiguous in no format, but its channels are adjacent.
            if is_band and (source.stride(1) == 1) is not (result.stride(1) == 1):
                self.found.append((name, tuple(source.shape)))
        return result


def keeps_format(layer, x, copies):
    """Return whether a layer's output and the gradient of its input are channels last.

    `copies` is a context for both passes.
    """
    x_leaf = x.detach().requires_grad_()
    with copies:
        output = layer(x_leaf)
    cotangent = channels_last(torch.randn(output.shape))
    with copies:
        output.backward(cotangent)
    fields = output, x_leaf.grad
    return all(t.is_contiguous(memory_format=CHANNELS_LAST_FORMATS[t.ndim]) for t in fields)


def layer_keeps(manager, name):
    model = Layer(LAYERS[name]()).to(memory_format=torch.channels_last)
    sharded = shard_model(model, manager, (2, 6, 24, 8), "refuse", None)
    copies = Copies()
    keeps = keeps_format(sharded, channels_last(torch.randn(2, 6, ROWS, 8)), copies)
    assert copies.found == []
    return keeps


@pytest.mark.parametrize(
    "name",
    [
        # On GPUs torch itself copies what it reflects, and averages are copied for its gradient.
        pytest.param(name, marks=cpu_only("torch makes copies on GPUs"))
        if name in ("reflection", "mean")
        else name
        for name in LAYERS
    ],
)
def test_layers_keep_channels_last(name):
    assert all(on_threads(3, layer_keeps, name))


SMALL = [name for name in LAYERS if "convolution" in name or name in ("depthwise", "long")]


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("name", SMALL)
def test_convolutions_of_small_bands_keep_channels_last(name):
    assert all(on_threads(3, layer_keeps, name))


class InChannelsLast(Layer):
    """A layer whose input and whose output's gradient are channels last."""

    def __init__(self, name):
        super().__init__(LAYERS[name]())

    def forward(self, x):
        y = super().forward(channels_last(x))
        if y.requires_grad:
            y.register_hook(channels_last)
        return y


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_layers_are_exact_in_channels_last(ranks, name):
    on_threads(ranks, assert_same_as_whole_globe, InChannelsLast, (name,), (2, 6, 24, 8), 1e-11)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("name", SMALL)
def test_convolutions_of_small_bands_are_exact_in_channels_last(name):
    on_threads(3, assert_same_as_whole_globe, InChannelsLast, (name,), (2, 6, 24, 8), 1e-11)


def test_a_group_norm_keeps_channels_last_on_gpus(monkeypatch):
    monkeypatch.setattr(group_norm, "is_chunked", lambda x: False)
    assert all(on_threads(3, layer_keeps, "group norm"))


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [
        (DomainParallelPixelShuffle, nn.PixelShuffle(2)),
        (DomainParallelPixelUnshuffle, nn.PixelUnshuffle(2)),
    ],
)
def test_pixel_shuffles_keep_channels_last_on_gpus(kind, shuffle):
    """As a GPU, the meta device has no kernels of its own for them."""
    layer = kind(shuffle, manager=DomainParallelManager(1, 1))
    x = channels_last(torch.empty(2, 8, 6, 4, device="meta")).requires_grad_()
    y = layer(x)
    (grad,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert y.shape == shuffle(x).shape
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, grad))


def exchange_keeps(manager, shape):
    exchange = HaloExchange(2, manager=manager)
    return keeps_format(exchange, channels_last(torch.randn(shape)), nullcontext())


@pytest.mark.parametrize("shape", [(2, 6, 7, 5), (1, 6, 2, 7, 5)])
def test_a_halo_exchange_keeps_channels_last(shape):
    assert all(on_threads(3, exchange_keeps, shape))


def exchange_of_rows_keeps(manager):
    exchange = HaloExchange(2, manager=manager)
    x = channels_last(torch.randn(2, 6, 7, 5))
    return keeps_format(lambda x: exchange(x[..., 1:, :]), x, nullcontext())


def test_samples_with_gaps_keep_channels_last():
    assert all(on_threads(3, exchange_of_rows_keeps))

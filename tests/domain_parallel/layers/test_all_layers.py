"""Every kind of layer on uneven bands equals the layer on the whole globe, however it is run."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
    DomainParallelManager,
    DomainParallelPeriodicConv2d,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.bands import group_norm
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.domain_parallel.halo_exchange import CHANNELS_LAST_FORMATS, HaloExchange
from credit_dp.domain_parallel.layers import (
    DomainParallelAvgPool,
    DomainParallelBatchNorm,
    DomainParallelInstanceNorm,
    DomainParallelPixelShuffle,
    DomainParallelPixelUnshuffle,
)
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import (
    MODEL,
    RANDOM_LOCK,
    assert_same_as_whole_globe,
    error,
    halos_travel,
    in_both_ways,
)
from tests.domain_parallel.layers.kinds import (
    CONVOLUTIONS,
    FORMAT_STAYS,
    LAYERS,
    SHAPE,
    SOFTMAXES,
    WITHOUT_ROWS,
)
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, on_processes, on_threads, seeded
from tests.tables import entry
from tests.tier_cases import tiers


class ChangedInPlace(nn.Sequential):
    """Changes the output of a layer in place, as torch's layers allow."""

    def __init__(self, name):
        super().__init__(nn.Conv2d(6, 6, 1), LAYERS[name]())
        self.allowed = name not in SOFTMAXES

    def forward(self, x):
        y = super().forward(x)
        if not self.allowed:
            return y
        y += 0.1
        return nn.functional.leaky_relu(y, 0.1, inplace=True)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_the_whole_globe(name):
    for meanwhile in (True, False) if name in CONVOLUTIONS else (True,):
        with halos_travel(meanwhile=meanwhile):
            on_threads(3, assert_same_as_whole_globe, ChangedInPlace, (name,), SHAPE, MODEL)


def every_layer_planned_or_not(manager):
    for name in LAYERS:
        for planned in (True, False):
            with entry(f"{name}, planned: {planned}"):
                settings = {"planned": planned}
                assert_same_as_whole_globe(
                    manager, ChangedInPlace, (name,), SHAPE, MODEL, **settings
                )


@pytest.mark.parametrize("ranks", tiers([], [(2,), (3,)], [(4,)]))
def test_every_layer_on_gloo_ranks(ranks):
    on_processes(ranks, every_layer_planned_or_not)


def _stack():
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1)]
    return nn.Sequential(*layers, nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 5, 1, 2))


@pytest.mark.parametrize("planned", [True, False])
def test_a_stack_on_gloo_ranks(planned):
    for meanwhile in (True, False):
        for height in (8, 61):  # some bands have two rows
            args = (_stack, (), (2, 2, height, 5), 1e-11, 0.0, planned)
            with halos_travel(meanwhile=meanwhile), entry(height):
                on_processes(3, assert_same_as_whole_globe, *args)


class _Checkpointed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x


def _checkpointed():
    pools = nn.Sequential(
        nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.Upsample(scale_factor=1.7, mode="bilinear"), nn.ReflectionPad2d(2),
        nn.ConstantPad2d(1, 2.0), nn.AdaptiveMaxPool2d((9, 5)), nn.AdaptiveAvgPool2d((8, 5)),
    )  # fmt: skip
    return _Checkpointed(_stack(), pools)


@in_both_ways
def test_checkpointed_layers_exchange_again():
    for planned in (True, False):
        args = (_checkpointed, (), (2, 2, 16, 5), 1e-11, 0.0, planned)
        on_threads(3, assert_same_as_whole_globe, *args)


# --- the memory format channels last -------------------------------------------------------


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
            is_band = source.ndim >= 4 and min(source.shape[-2], result.shape[-2]) >= 4
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
    model = nn.Sequential(LAYERS[name]()).to(memory_format=torch.channels_last)
    sharded = shard_model(model, manager, SHAPE, "refuse", None)
    copies = Copies()
    band = shard_tensor(channels_last(torch.randn(SHAPE)), manager=manager)
    keeps = keeps_format(sharded, channels_last(band), copies)
    assert copies.found == []
    return keeps


class InChannelsLast(nn.Sequential):
    """A layer whose input and whose output's gradient are channels last."""

    def __init__(self, name):
        super().__init__(LAYERS[name]())

    def forward(self, x):
        y = super().forward(channels_last(x))
        if y.requires_grad:
            y.register_hook(channels_last)
        return y


FAMILIES = {
    "convolutions": CONVOLUTIONS,
    "norms": [name for name in FORMAT_STAYS if "norm" in name],
    "others": [name for name in FORMAT_STAYS if name not in CONVOLUTIONS and "norm" not in name],
}


def test_these_layers_compute_on_plain_bands():
    """Otherwise the tests of this file would say nothing of them."""
    for name in FORMAT_STAYS:
        with entry(name):
            model = nn.Sequential(LAYERS[name]())
            report = plan_report(model, SHAPE, 3)
            assert not report.refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_keep_channels_last_and_are_exact(family):
    for name in FAMILIES[family]:
        if DEVICE != "cpu" and name in ("mean", "reflection"):
            continue  # torch's gradient of the one is wrong on GPUs, and it copies for the other
        for meanwhile in (True, False) if name in CONVOLUTIONS else (True,):
            with halos_travel(meanwhile=meanwhile), entry(name):
                assert all(on_threads(3, layer_keeps, name))
                on_threads(3, assert_same_as_whole_globe, InChannelsLast, (name,), SHAPE, MODEL)


def test_norms_and_shuffles_keep_channels_last_on_gpus(monkeypatch):
    """As a GPU, the meta device has no kernels of its own for shuffles."""
    monkeypatch.setattr(group_norm, "is_chunked", lambda x: False)
    assert all(on_threads(3, layer_keeps, "group norm"))
    for kind, shuffle in (
        (DomainParallelPixelShuffle, nn.PixelShuffle(2)),
        (DomainParallelPixelUnshuffle, nn.PixelUnshuffle(2)),
    ):
        layer = kind(shuffle, manager=DomainParallelManager(1, 1))
        x = channels_last(torch.empty(2, 8, 6, 4, device="meta")).requires_grad_()
        y = layer(x)
        (grad,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert y.shape == shuffle(x).shape
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, grad)), kind


def exchanges_keep(manager):
    exchange = HaloExchange(2, manager=manager)
    for shape in ((2, 6, 7, 5), (1, 6, 2, 7, 5)):
        assert keeps_format(exchange, channels_last(torch.randn(shape)), nullcontext()), shape
    x = channels_last(torch.randn(2, 6, 7, 5))  # whose samples have gaps
    assert keeps_format(lambda x: exchange(x[..., 1:, :]), x, nullcontext())


def test_a_halo_exchange_keeps_channels_last():
    on_threads(3, exchanges_keep)


# --- outputs are copies --------------------------------------------------------------------

OF_SAME_ROWS = {
    "upsample": lambda: nn.Upsample((12, 6), mode="bilinear"),
    "nearest upsample": lambda: nn.Upsample(scale_factor=1),
    "constant pad": lambda: nn.ZeroPad2d(0),
    "circular pad": lambda: nn.CircularPad2d(0),
    "largest": lambda: nn.MaxPool2d(1),
    "average": lambda: nn.AvgPool2d(1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((12, 6)),
}


class _InputIsKept(nn.Module):
    """Changes the output of a layer in place, then reads the layer's input."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.layer = nn.Conv2d(4, 4, 1), layer()

    def forward(self, x):
        x = self.before(x)
        y = self.layer(x)
        y *= 2
        return x + y


def test_outputs_equal_to_the_input_are_copies():
    for name, layer in OF_SAME_ROWS.items():
        with entry(name):
            on_threads(3, assert_same_as_whole_globe, _InputIsKept, (layer,), (2, 4, 12, 6), MODEL)


# --- gradients of gradients ----------------------------------------------------------------

TWICE = {
    "convolutions": [
        "convolution", "circular convolution", "reflected convolution", "even kernel", "branches",
        "convolution wider than a band", "transposed rows", "transposed",
    ],
    "norms": ["group norm", "batch norm", "instance norm", "layer norm", "root mean square norm"],
    "others": [
        "softmax", "log softmax", "overlapping maximum", "maximum of the globe", "bicubic",
        "circular padding",
    ],
}  # fmt: skip


def _penalty(model, x, share=1.0):
    """Return the square of the gradient of the cubed output, and the gradient of that."""
    x = x.clone().requires_grad_()
    y = model(x).pow(3).sum() * share
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = gradient.square().sum()
    penalty.backward()
    return penalty.detach(), x.grad


def _penalised(manager, name):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        whole = nn.Sequential(LAYERS[name]()).double()
        x = torch.randn(SHAPE, dtype=torch.float64)
        sharded = shard_model(copy.deepcopy(whole), manager, SHAPE, "refuse", None)
    band = shard_tensor(x, manager=manager)
    is_replicated = name in WITHOUT_ROWS  # it counts once, not once a rank
    penalty, grad = _penalty(sharded, band, 1 / manager.domain_parallel_size**is_replicated)
    expected, expected_grad = _penalty(whole, x)
    assert error(manager.transport.all_reduce(penalty), expected) <= MODEL
    assert error(gather_tensor(grad, manager=manager), expected_grad) <= MODEL
    largest = max((p.grad.abs().max().item() for p in whole.parameters()), default=0.0)
    for (key, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        total = manager.transport.all_reduce(ours.grad)
        assert error(total, theirs.grad, 1e-3 * largest) <= MODEL, key


@pytest.mark.parametrize("family", TWICE)
def test_gradients_of_gradients(family):
    for name in TWICE[family]:
        for meanwhile in (True, False) if family == "convolutions" else (True,):
            with halos_travel(meanwhile=meanwhile), entry(name):
                on_threads(3, _penalised, name)


# --- rounding and collectives --------------------------------------------------------------


def _randomised(layer):
    generator = seeded(1)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    return layer


SUMS = {  # layers that sum over rows
    "batch norm": lambda: _randomised(nn.BatchNorm2d(4)),
    "instance norm": lambda: _randomised(nn.InstanceNorm2d(4, affine=True)),
    "group norm": lambda: _randomised(nn.GroupNorm(2, 4)),
    "layer norm": lambda: _randomised(nn.LayerNorm((4, 40, 8))),
    "root mean square norm": lambda: _randomised(nn.RMSNorm((40, 8))),
    "softmax": lambda: nn.Softmax(-2),
    "log softmax": lambda: nn.LogSoftmax(-2),
    "mean": lambda: nn.AdaptiveAvgPool2d(1),
}


def _as_exact_as_torch(manager, name, dtype, offset, change):
    """Compare with the result in float64: the error is at most a few times that of torch."""
    generator = seeded(0)
    x = (torch.randn(2, 4, 40, 8, generator=generator) + offset).to(dtype)
    cotangent = torch.randn(x.shape, generator=generator).to(dtype)
    whole = SUMS[name]().to(dtype)
    sharded = nn.Sequential(copy.deepcopy(whole))
    convert_to_domain_parallel(sharded, manager, input_shape=x.shape)
    exact = copy.deepcopy(whole).double()
    band, its = (change(shard_tensor(t, manager=manager)) for t in (x, cotangent))
    found = [
        _step(layer, y, c if name != "mean" else None)
        for layer, y, c in (
            (sharded, band, its),
            (whole, x, cotangent),
            (exact, x.double(), cotangent.double()),
        )
    ]
    for ours, theirs, right in list(zip(*found, strict=True))[: 1 + (name == "group norm")]:
        assert ours.dtype == dtype
        wanted = right if right.shape == ours.shape else shard_tensor(right, manager=manager)
        off = (ours.double() - wanted).abs()
        rounding = torch.finfo(dtype).eps
        times = 4 if dtype == torch.float32 else 2
        most = times * (theirs.double() - right).abs().max() + 2 * rounding * right.abs().max()
        assert off.max() <= most
        if dtype != torch.float32 and "norm" not in name:
            assert (off / wanted.abs()).max() <= rounding


def _step(layer, x, cotangent):
    """Return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if cotangent is None else cotangent)
    return y.detach(), x.grad


@pytest.mark.parametrize("name", SUMS)
def test_rounding_is_no_worse_than_torchs(name, monkeypatch):
    half = [(torch.bfloat16, 3.0), (torch.float16, 3.0)]
    for dtype, offset in [(torch.float32, 0.0), (torch.float32, 1e4), *half]:
        for change in (lambda x: x, channels_last):
            with entry((dtype, offset)):
                on_threads(3, _as_exact_as_torch, name, dtype, offset, change)
    if name == "group norm":
        monkeypatch.setattr(group_norm, "is_chunked", lambda x: False)  # as on GPUs
        for dtype, offset in half:
            on_threads(3, _as_exact_as_torch, name, dtype, offset, channels_last)


COLLECTIVES = [
    (lambda: nn.BatchNorm2d(3), 1),
    (lambda: nn.InstanceNorm2d(3, affine=True), 1),
    (lambda: nn.GroupNorm(3, 3), 1),
    (lambda: nn.LayerNorm((3, 10, 4)), 1),
    (lambda: nn.RMSNorm((10, 4)), 1),
    (lambda: nn.Softmax(-2), 1),
    (lambda: nn.Softmax(1), 0),
    (lambda: nn.Softmax2d(), 0),
    (lambda: nn.AdaptiveAvgPool2d(1), 1),
    (lambda: nn.AdaptiveMaxPool2d(1), 1),
]


def _collectives(manager, build):
    """Return the collectives of a forward, of its backward, and the messages of both."""
    shape = (2, 3, 10, 4)
    model = convert_to_domain_parallel(nn.Sequential(build()), manager, input_shape=shape)
    traffic = manager.transport.traffic
    y = model(shard_tensor(torch.randn(shape), manager=manager).requires_grad_())
    forward = traffic.collectives
    y.sum().backward()
    return forward, traffic.collectives - forward, traffic.messages


def test_what_sums_over_rows_needs_one_collective_forward_and_one_backward():
    for build, number in COLLECTIVES:
        assert on_threads(3, _collectives, build) == [(number, number, 0)] * 3, build()


# --- which layers are replaced, and wrappers built by hand ---------------------------------

WRAPPERS_BY_HAND = [
    (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 3, padding=1), (1, 2, 10, 4)),
    (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 4, stride=2, padding=1), (1, 2, 16, 4)),
    (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 3, 3), (1, 2, 15, 4)),
    (DomainParallelConv3d, lambda: nn.Conv3d(2, 4, 3, 3, 1), (1, 2, 3, 15, 4)),
    (DomainParallelConv3d, lambda: nn.Conv3d(2, 4, 3, 1, 1), (2, 3, 15, 4)),
    (DomainParallelConvTranspose2d, lambda: nn.ConvTranspose2d(2, 4, 4, 2, 1), (1, 2, 10, 4)),
    (DomainParallelPeriodicConv2d, lambda: PeriodicConv2d(2, 4), (1, 2, 10, 4)),
    (DomainParallelGroupNorm, lambda: nn.GroupNorm(1, 2), (1, 2, 10, 4)),
    (DomainParallelBatchNorm, lambda: nn.BatchNorm2d(2), (2, 2, 10, 4)),
    (DomainParallelInstanceNorm, lambda: nn.InstanceNorm2d(2), (2, 2, 10, 4)),
]
KEEPS_BANDS = (DomainParallelBatchNorm, DomainParallelInstanceNorm)


def _by_hand(manager, wrap, make, shape):
    """Build a wrapper without the converter, on bands that differ from the balanced ones."""
    layer = _randomised(make()).double()
    x = torch.randn(shape, dtype=torch.float64, generator=seeded(0))
    rows = -2
    cut = (0, 1, 7, shape[rows])
    start, stop = cut[manager.domain_rank : manager.domain_rank + 2]
    y = wrap(copy.deepcopy(layer), manager=manager)(x.narrow(rows, start, stop - start))
    expected = layer(x)
    if wrap not in KEEPS_BANDS:
        bounds = manager.bands[expected.shape[rows]].rows(manager.domain_rank)
        start, stop = bounds.start, bounds.stop
    torch.testing.assert_close(
        y, expected.narrow(rows, start, stop - start), rtol=1e-12, atol=1e-12
    )


@in_both_ways
def test_wrappers_built_by_hand_take_any_bands():
    for wrap, make, shape in WRAPPERS_BY_HAND:
        with entry((make(), shape)):
            on_threads(3, _by_hand, wrap, make, shape)


REFUSED_SETTINGS = [
    (lambda: DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=-1), "only latitude rows"),
    (lambda: DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=3), "got shard_dim=3"),
    (lambda: DomainParallelConv3d(nn.Conv3d(1, 1, 3), shard_dim=2), "only latitude rows"),
    (lambda: DomainParallelAvgPool(nn.AvgPool2d(2), -1), "only latitude rows"),
]


def test_settings_that_no_band_can_have_are_refused():
    for build, message in REFUSED_SETTINGS:
        with entry(message), pytest.raises(UserError, match=message):
            build()


# A model that moves rows, and why its layer can not be converted.
APART_FROM_BANDS = [
    ("turned", lambda: nn.Conv2d(2, 4, 3, padding=1), "conv: DomainParallelConv2d: rows are in"),
    ("turned", lambda: nn.Conv2d(2, 4, (1, 3)), "aten.convolution needs rows of other ranks"),
    ("times", lambda: nn.Conv3d(2, 4, (3, 1, 1)), "aten.convolution needs rows of other ranks"),
    ("times", lambda: nn.Conv3d(2, 4, (3, 1, 1), padding=(1, 0, 0)), "needs rows of other ranks"),
    ("channels", lambda: nn.Conv2d(9, 9, 1), "aten.convolution needs rows of other ranks"),
    ("turned", lambda: nn.ConvTranspose2d(2, 4, 1, (1, 2), 0, (0, 1)), "convolution: is called"),
    ("nothing", lambda: nn.SyncBatchNorm(2), "aten.native_batch_norm needs rows of other ranks"),
    ("channels", lambda: nn.BatchNorm2d(9), "rows are in the channels' dimension"),
    ("channels", lambda: nn.InstanceNorm2d(9, affine=True), "rows are in the channels' dimension"),
    (
        "samples",
        lambda: nn.InstanceNorm1d(2, track_running_stats=True),
        "aten.native_batch_norm needs rows of other ranks",
    ),
    ("channels", lambda: nn.PixelShuffle(3), "rows are in the channels' dimension"),
    ("nothing", lambda: nn.Conv2d(2, 2, 4, 4), "2 rows can't be shared by 3 ranks. Lower"),
    ("nothing", lambda: nn.Conv2d(2, 2, (8, 1)), "2 rows can't be shared by 3 ranks"),
    ("nothing", lambda: nn.ConvTranspose2d(2, 2, 1, padding=(4, 0)), "1 rows can't be shared by 3"),
    ("nothing", lambda: _OwnForward(2, 2, 3, padding=1), r"layers.py:\d+: aten.convolution needs"),
]


class _OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-1))


def test_layers_that_no_band_can_compute_run_on_the_globe():
    for move, build, message in APART_FROM_BANDS:
        with entry((move, message)):
            report = plan_report(Moved(build(), move), (2, 2, 9, 6), 3)
            assert re.search(message, report.refusal), report.refusal
            assert "\n" not in report.refusal
            assert not report.problems

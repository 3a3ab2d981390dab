"""The interface that other code relies on: names, attributes and signatures."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from credit_dp.domain_parallel import convert, halo_exchange, layers
from credit_dp.domain_parallel.convert import (
    _needs_halo_conv2d,
    _needs_halo_conv3d,
    _needs_halo_conv_transpose2d,
    _needs_halo_conv_transpose3d,
    _replace_module,
    convert_to_domain_parallel,
    validate_sharding_constraints,
)
from credit_dp.domain_parallel.halo_exchange import HaloExchange, _HaloExchangeFunction
from credit_dp.domain_parallel.layers import (
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelConvTranspose2d,
    DomainParallelConvTranspose3d,
    DomainParallelGroupNorm,
    DomainParallelInterpolate,
    DomainParallelPadLayer,
    DomainParallelPeriodicConv2d,
)
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads, seeded
from tests.tables import entry


def test_convolutions_that_need_a_halo():
    assert not _needs_halo_conv2d(nn.Conv2d(1, 1, (1, 3)))
    assert _needs_halo_conv2d(nn.Conv2d(1, 1, (3, 1)))
    assert not _needs_halo_conv3d(nn.Conv3d(1, 1, (3, 1, 3)))
    assert _needs_halo_conv3d(nn.Conv3d(1, 1, (1, 3, 1)))
    assert not _needs_halo_conv_transpose2d(nn.ConvTranspose2d(1, 1, 2, stride=2))
    assert _needs_halo_conv_transpose2d(nn.ConvTranspose2d(1, 1, 4, stride=2, padding=1))
    assert not _needs_halo_conv_transpose3d(nn.ConvTranspose3d(1, 1, (2, 4, 4), (2, 4, 4)))
    assert _needs_halo_conv_transpose3d(nn.ConvTranspose3d(1, 1, (2, 4, 2), 2))


def test_replacing_a_child():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    new = nn.Identity()
    _replace_module(model, "0", model[0], new)
    assert model[0] is new
    assert convert.logger.name == "credit_dp.domain_parallel.convert"


WRAPPERS = {
    DomainParallelConv2d: (nn.Conv2d(2, 2, 3, padding=1), -2, "conv halo_exchange weight bias"),
    DomainParallelConv3d: (nn.Conv3d(2, 2, 3, padding=1), 3, "conv halo_exchange"),
    DomainParallelConvTranspose2d: (
        nn.ConvTranspose2d(2, 2, 4, 2, 1),
        -2,
        "conv halo_width halo_exchange",
    ),
    DomainParallelConvTranspose3d: (
        nn.ConvTranspose3d(2, 2, 4, 2, 1),
        3,
        "conv halo_width halo_exchange",
    ),
    DomainParallelPeriodicConv2d: (
        PeriodicConv2d(2, 2),
        -2,
        "conv padding halo_exchange weight bias",
    ),
}


def test_wrappers():
    for wrapper, (wrapped, dim, names) in WRAPPERS.items():
        first, shard_dim, *rest = list(inspect.signature(wrapper).parameters.values())
        periodic = wrapper is DomainParallelPeriodicConv2d
        assert first.name == ("periodic_conv" if periodic else "conv")
        assert shard_dim.default == dim, wrapper
        assert all(parameter.kind == inspect.Parameter.KEYWORD_ONLY for parameter in rest), wrapper
        for layer in (wrapper(wrapped), wrapper(wrapped, dim), wrapper(wrapped, shard_dim=dim)):
            assert layer.shard_dim == dim, wrapper
            assert isinstance(layer.halo_exchange, HaloExchange), wrapper
            assert all(hasattr(layer, name) for name in names.split()), wrapper
            conv = wrapped.conv if periodic else wrapped
            assert layer.weight is conv.weight, wrapper
            assert layer.bias is conv.bias, wrapper
    for args, halo in [((3, 1, 1), 1), ((4, 2, 1), 1), ((32, 2, 15), 15)]:
        conv = nn.Conv2d(1, 1, *args)
        layer = DomainParallelConv2d(conv)
        assert (layer.halo_width, layer.halo_exchange.halo_width) == (halo, halo), args
        assert layer.conv is conv
    assert DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=2).dim == -2
    patches = DomainParallelConvTranspose3d(nn.ConvTranspose3d(1, 1, (2, 4, 4), (2, 4, 4)))
    assert (patches.halo_width, patches.dim) == (0, -2)


def test_the_other_wrappers():
    norm = DomainParallelGroupNorm(nn.GroupNorm(2, 4, eps=1e-3, affine=False))
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (2, 4, 1e-3, False)
    resize = DomainParallelInterpolate((20, 30))
    assert (resize.size, resize.mode, resize.shard_dim) == ((20, 30), "bilinear", -2)
    assert isinstance(resize.halo_exchange, HaloExchange)
    assert DomainParallelInterpolate((20, 30), "nearest", -2).mode == "nearest"
    halo = HaloExchange(2)
    assert (halo.halo_width, halo.dim) == (2, -2)


class Periodic(nn.Module):
    """Convolutions in wrappers that pad, beside layers of torch."""

    def __init__(self):
        super().__init__()
        self.first = PeriodicConv2d(3, 8)
        self.body = nn.Sequential(
            nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.Conv2d(8, 8, 1),
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.PixelShuffle(2),
        )  # fmt: skip
        self.last = PeriodicConv2d(2, 3)

    def forward(self, x):
        return self.last(self.body(self.first(x)))


def _example(manager, shape):
    model = convert_to_domain_parallel(
        copy.deepcopy(Periodic()),
        manager,
        custom_converters={PeriodicConv2d: lambda m: DomainParallelPeriodicConv2d(m)},
    )
    assert isinstance(model.first, DomainParallelPeriodicConv2d)
    assert type(model.first.conv) is nn.Conv2d
    assert type(model.body[3]) is nn.Conv2d
    assert validate_sharding_constraints(model, shape[-2] // manager.domain_parallel_size) == []


def test_custom_converters():
    on_threads(3, _example, (1, 3, 12, 6))
    on_threads(3, assert_same_as_whole_globe, Periodic, (), (2, 3, 18, 6), MODEL)


def _function(manager, width, dim):
    generator = seeded(0)
    x = torch.randn(2, 3, 13, 5, dtype=torch.float64, generator=generator)
    band = x[..., manager.rows(13), :].clone().requires_grad_()
    padded = _HaloExchangeFunction.apply(band, width, dim, manager)
    module = HaloExchange(width, dim, manager=manager)(band)
    assert torch.equal(padded, module)
    cotangent = torch.randn(padded.shape, dtype=torch.float64, generator=generator)
    cotangent_before = cotangent.clone()
    (grad,) = torch.autograd.grad(padded, band, cotangent)
    assert torch.equal(cotangent, cotangent_before)
    (expected,) = torch.autograd.grad(module, band, cotangent)
    assert torch.equal(grad, expected)
    if width:  # it is what layers run, too
        layer = DomainParallelPadLayer(nn.ReflectionPad2d((0, 0, width, width)), manager=manager)
        assert layer(band).grad_fn.name() == padded.grad_fn.name()


def test_the_halo_function_is_the_halo_module():
    for width, dim in [(0, -2), (1, 2), (3, -2)]:
        with entry((width, dim)):
            on_threads(3, _function, width, dim)


def test_names_are_importable():
    assert halo_exchange.HaloExchange is HaloExchange
    assert layers.DomainParallelGroupNorm is DomainParallelGroupNorm
    assert issubclass(_HaloExchangeFunction, torch.autograd.Function)

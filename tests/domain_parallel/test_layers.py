"""Every sharded layer equals the layer on the whole globe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    DomainParallelConv2d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
    DomainParallelPeriodicConv2d,
    shard_tensor,
)
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicConv2d
from tests.domain_parallel.equality import OPERATOR, assert_same_as_whole_globe
from tests.ranks import on_processes, on_threads

RANKS = st.sampled_from([2, 3, 4])


@st.composite
def convs(draw):
    kernel, stride, dilation = (draw(st.integers(1, n)) for n in (5, 3, 2))
    groups = draw(st.sampled_from([1, 2]))
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    options = {
        "kernel_size": (kernel, draw(st.integers(1, 3))),
        "stride": (stride, draw(st.integers(1, 2))),
        "padding": (draw(st.integers(0, 4)), draw(st.integers(0, 2))),
        "dilation": (dilation, 1),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": mode,
    }
    if draw(st.booleans()) and stride == 1:
        options["padding"] = draw(st.sampled_from(["same", "valid"]))
        options["stride"] = 1
    return options


def _conv(options):
    return nn.Conv2d(2, 4, **options)


@given(ranks=RANKS, options=convs(), height=st.integers(2, 24))
def test_conv(ranks, options, height):
    conv = _conv(options)
    width = 6
    _, _, north, south = conv._reversed_padding_repeated_twice
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    out = (height + north + south - reach) // conv.stride[0] + 1
    assume(height >= ranks and out >= ranks)
    assume(options["padding_mode"] in ("zeros", "replicate") or max(north, south) < height)
    on_threads(ranks, assert_same_as_whole_globe, _conv, (options,), (2, 2, height, width))


def _conv_transpose(options):
    return nn.ConvTranspose2d(2, 4, **options)


@given(ranks=RANKS, height=st.integers(2, 16), data=st.data())
def test_conv_transpose(ranks, height, data):
    draw = data.draw
    stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    options = {
        "kernel_size": (draw(st.integers(1, 5)), 2),
        "stride": (stride, 2),
        "padding": (draw(st.integers(0, 3)), 0),
        "dilation": (dilation, 1),
        "output_padding": (draw(st.integers(0, max(stride, dilation) - 1)), 1),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
    }
    conv = _conv_transpose(options)
    reach = dilation * (conv.kernel_size[0] - 1) + 1
    out = (height - 1) * stride + reach + conv.output_padding[0] - 2 * conv.padding[0]
    assume(height >= ranks and out >= ranks)
    on_threads(ranks, assert_same_as_whole_globe, _conv_transpose, (options,), (2, 2, height, 3))


def _periodic(kernel, stride, poles):
    return PeriodicConv2d(2, 3, kernel, stride, poles)


class _PeriodicModel(nn.Sequential):
    """A model whose table of rules names its layer."""

    row_rules = {PeriodicConv2d: "periodic_conv"}  # noqa: RUF012


def _periodic_model(kernel, stride, poles):
    return _PeriodicModel(_periodic(kernel, stride, poles))


@given(
    ranks=RANKS,
    height=st.integers(5, 20),
    kernel=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 3),
    poles=st.sampled_from(["reflect", "zeros", "mirror", "earth"]),
)
def test_periodic_conv(ranks, height, kernel, stride, poles):
    assume((height - 1) // stride + 1 >= ranks)
    shape = (2, 2, height, 7)
    on_threads(ranks, assert_same_as_whole_globe, _periodic_model, (kernel, stride, poles), shape)


def _norm(groups, affine):
    norm = nn.GroupNorm(groups, 4, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@given(
    ranks=RANKS,
    height=st.integers(4, 13),
    groups=st.sampled_from([1, 2, 4]),
    affine=st.booleans(),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_group_norm(ranks, height, groups, affine, offset):
    tolerance = OPERATOR * max(1.0, 100 * offset)
    args = (_norm, (groups, affine), (2, 4, height, 5), tolerance, offset)
    on_threads(ranks, assert_same_as_whole_globe, *args)


def _stack(norm):
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1)]
    return nn.Sequential(*layers, *([nn.GroupNorm(2, 4)] if norm else []), nn.Conv2d(4, 3, 5, 1, 2))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("height", [8, 61])
def test_a_stack_on_gloo_ranks(ranks, planned, height):
    args = (_stack, (True,), (2, 2, height, 5), 1e-11, 0.0, planned)
    on_processes(ranks, assert_same_as_whole_globe, *args)


def test_one_row_per_rank():
    on_threads(
        4, assert_same_as_whole_globe, _conv, ({"kernel_size": 7, "padding": 3},), (1, 2, 4, 7)
    )


def _by_hand(manager, wrap, make, shape):
    """A wrapper made without a converter, on bands that differ from the balanced ones."""
    generator = torch.Generator().manual_seed(0)
    layer = make().double()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    cut = {2: (0, 3, shape[-2]), 3: (0, 1, 6, shape[-2])}[manager.domain_parallel_size]
    rank = manager.domain_rank
    y = wrap(layer, manager=manager)(x[..., cut[rank] : cut[rank + 1], :].contiguous())
    expected = layer(x)
    bounds = manager.bands[expected.shape[-2]].rows(rank)
    torch.testing.assert_close(y, expected[..., bounds, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 3, padding=1)),
        (DomainParallelConv2d, lambda: nn.Conv2d(2, 4, 4, stride=2, padding=1)),
        (DomainParallelConvTranspose2d, lambda: nn.ConvTranspose2d(2, 4, 4, 2, 1)),
        (DomainParallelGroupNorm, lambda: nn.GroupNorm(1, 2)),
        (DomainParallelPeriodicConv2d, lambda: PeriodicConv2d(2, 4)),
    ],
)
def test_wrappers_made_by_hand_take_any_bands(ranks, wrap, make):
    on_threads(ranks, _by_hand, wrap, make, (1, 2, 10, 4))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "halo"), [(3, 1, 1, 1), (4, 2, 1, 1), (32, 2, 15, 15)]
)
def test_halo_width(kernel, stride, padding, halo):
    conv = nn.Conv2d(1, 1, kernel, stride, padding)
    layer = DomainParallelConv2d(conv)
    assert layer.halo_width == halo
    assert layer.halo_exchange.halo_width == halo
    assert layer.conv is conv
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    assert layer.shard_dim == -2


def test_attributes_of_the_wrappers():
    periodic = DomainParallelPeriodicConv2d(PeriodicConv2d(1, 2, 5))
    assert (periodic.padding, periodic.shard_dim, periodic.halo_exchange.halo_width) == (2, -2, 2)
    assert periodic.weight is periodic.conv.weight
    norm = DomainParallelGroupNorm(nn.GroupNorm(2, 4, eps=1e-3))
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (2, 4, 1e-3, True)
    up = DomainParallelConvTranspose2d(nn.ConvTranspose2d(1, 1, 4, 2, 1))
    assert (up.halo_width, up.halo_exchange.halo_width, up.shard_dim) == (1, 1, -2)


def test_wrappers_shard_rows_only():
    with pytest.raises(UserError, match="only latitude rows"):
        DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=-1)
    assert DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=2).dim == -2


def test_a_periodic_conv_that_pads_twice_is_refused():
    layer = PeriodicConv2d(1, 1)
    layer.conv.padding = (1, 1)
    with pytest.raises(UserError, match="leave padding to the module around it"):
        DomainParallelPeriodicConv2d(layer)


def _normed_periodic():
    layer = PeriodicConv2d(2, 3)
    nn.utils.parametrizations.weight_norm(layer.conv)
    return _PeriodicModel(layer)


def test_a_periodic_conv_runs_its_inner_layer():
    on_threads(3, assert_same_as_whole_globe, _normed_periodic, (), (2, 2, 9, 6), 1e-11)


class _Checkpointed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return x


def _checkpointed():
    return _Checkpointed(*(_stack(True) for _ in range(2)), nn.Conv2d(3, 2, 1))[:1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_checkpointed_layers_exchange_again(ranks):
    on_threads(ranks, assert_same_as_whole_globe, _checkpointed, (), (2, 2, 16, 5), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_in_half_precision_is_as_exact_as_torch(dtype):
    def half(manager):
        generator = torch.Generator().manual_seed(0)
        x = (300 * torch.randn(1, 4, 12, 8, generator=generator)).to(dtype)
        layer = DomainParallelGroupNorm(nn.GroupNorm(2, 4).to(dtype), manager=manager)
        y = layer(shard_tensor(x, manager=manager))
        exact = shard_tensor(nn.functional.group_norm(x.double(), 2), manager=manager)
        assert y.dtype == dtype
        assert (y.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps

    on_threads(2, half)


def _output_size(manager):
    layer = DomainParallelConvTranspose2d(nn.ConvTranspose2d(1, 1, 3, 2, 1), manager=manager)
    with pytest.raises(UserError, match="output_size has no meaning on a band"):
        layer(torch.zeros(1, 1, 4, 4), output_size=[8, 8])


def test_output_size_is_refused():
    on_threads(2, _output_size)


def _float32_norm(manager):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 16, 32, generator=generator) + 1e4
    layer = DomainParallelGroupNorm(nn.GroupNorm(2, 4), manager=manager)
    y = layer(shard_tensor(x, manager=manager))
    exact = nn.functional.group_norm(x.double(), 2)
    band = shard_tensor(exact, manager=manager)
    whole = nn.functional.group_norm(x, 2)
    error = (y.double() - band).abs().max()
    assert error <= 4 * (whole.double() - exact).abs().max()


def test_group_norm_in_float32_is_as_exact_as_torch():
    on_threads(3, _float32_norm)

"""What the U-Net can have besides: each option changes it, and is the same on bands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit_dp.config import UNetConfig
from credit_dp.config.model import UNET_UPSAMPLING
from credit_dp.errors import UserError
from credit_dp.models.blocks import StochasticDepth, draw_stochastic_depths
from credit_dp.models.unet import (
    GlobalConditioning,
    LongRangeConv2d,
    PeriodicUpsample,
    SqueezeExcite,
    UNet,
    modulate,
)
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import assert_same_numbers, on_processes, on_threads
from tests.tables import entry
from tests.tier_cases import tiers

BATCH = 3
ALL = {
    "stochastic_depth": 0.5,
    "squeeze_excite": True,
    "global_conditioning": True,
    "activation_checkpointing": True,
}


def _unet(channels=(4, 8, 8), blocks=2, **options):
    config = UNetConfig(channels=list(channels), blocks=blocks, groups=4, **options)
    model = UNet(config, 5, 3)
    draw_stochastic_depths(model, seed=1, step=2, samples=range(BATCH))
    return model


def _large(options):
    return _unet(**options)


def _small(options):
    return _unet(channels=(4, 8), blocks=1, **options)


def _evaluating(options):
    return _small(options).eval()


MIXER = {"block": "global_depthwise", "kernel": [9, 5]}
KEPT = {**ALL, "activation_checkpointing": False}
# Every upsampling, each with another row beyond the poles.
UPSAMPLING = tuple(zip(UNET_UPSAMPLING, ("earth", "reflect", "mirror"), strict=True))
OPTIONS = {
    "all": KEPT,
    "mixer": KEPT | MIXER,
    "large mixer": MIXER | {"kernel": [31, 31]},
    **{upsample: {"upsample": upsample, "poles": poles} for upsample, poles in UPSAMPLING},
}


@pytest.mark.parametrize(
    ("ranks", "rows", "name"),
    tiers(
        fast=[(3, 33, "all"), (3, 21, "mixer"), *((3, 22, x) for x in UNET_UPSAMPLING)],
        slow=[],
        exhaustive=[
            (2, 19, "all"),
            (4, 16, "mixer"),
            (2, 17, "large mixer"),
            *((2, 16, x) for x in UNET_UPSAMPLING),
        ],
    ),
)
def test_options_on_bands_equal_whole(ranks, rows, name):
    _same(ranks, _small, OPTIONS[name], (BATCH, 5, rows, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_each_option_alone_on_bands_equals_whole(name):
    _same(3, _small, {name: ALL[name]}, (BATCH, 5, 32, 9))


@pytest.mark.slow
def test_all_options_on_bands_equal_whole():
    _same(2, _large, {**ALL, **MIXER}, (BATCH, 5, 33, 9))


@pytest.mark.slow
def test_sharded_equals_whole_without_training():
    _same(3, _evaluating, {**ALL, "dropout": 0.5}, (BATCH, 5, 33, 8))


def _same(ranks, build, options, shape):
    # Computing again restores the state of random numbers, which threads would share.
    start = on_processes if options.get("activation_checkpointing") else on_threads
    start(ranks, assert_same_as_whole_globe, build, (options,), shape, MODEL)


def _gradients(options):
    torch.manual_seed(0)
    model = _large(options).double()
    x = torch.randn(BATCH, 5, 9, 8, dtype=torch.float64).requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_computing_again_changes_no_gradient():
    options = {**ALL, "dropout": 0.2}
    again = _gradients(options)
    kept = _gradients({**options, "activation_checkpointing": False})
    assert_same_numbers(*(torch.cat([x.flatten() for x in grads]) for grads in (again, kept)))


@pytest.mark.slow
def test_computing_again_keeps_less():
    def kept_bytes(**options):
        sizes = {}

        def note(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = _unet(**options)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = model(torch.randn(BATCH, 5, 32, 32))
        assert out.requires_grad
        return sum(sizes.values())

    assert kept_bytes(activation_checkpointing=True) < 0.7 * kept_bytes()


def test_what_is_dropped_is_there_without_training():
    for option in ("dropout", "stochastic_depth"):
        torch.manual_seed(0)
        plain, model = _unet(), _unet(**{option: 0.5})
        model.load_state_dict(plain.state_dict())  # neither has parameters
        x = torch.randn(BATCH, 5, 9, 8)
        assert not torch.allclose(model(x), plain(x)), option
        with entry(option):
            torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_a_gate_scales_channels_by_what_their_global_means_say():
    torch.manual_seed(0)
    gate, x = SqueezeExcite(8), torch.rand(2, 8, 6, 5) + 1
    scale = gate(x) / x
    assert 0 < scale.min() <= scale.max() < 1
    torch.testing.assert_close(scale, scale[:, :, :1, :1].expand_as(x))
    torch.testing.assert_close(gate(x.flip(-2)), gate(x).flip(-2))
    assert not torch.allclose(scale, gate(2 * x) / (2 * x))


def test_conditioning_goes_by_global_means_only():
    known = GlobalConditioning(4, (2, 3))
    x = torch.randn(2, 4, 6, 5)
    made = known(x)
    assert [tuple(part.shape) for part in made] == [(2, 4, 1, 1), (2, 6, 1, 1)]
    torch.testing.assert_close(made, known(x.mean((-2, -1), keepdim=True)))
    y, scale_and_shift = torch.ones(1, 2, 1, 1), torch.tensor([1.0, 2.0, 0.5, -3.0])
    assert modulate(y, scale_and_shift.view(1, 4, 1, 1)).flatten().tolist() == [2.5, 0.0]


def test_a_resized_field_without_contrasts_has_no_checkerboard():
    torch.manual_seed(0)
    flat = torch.ones(1, 8, 5, 4)
    for upsample in ("nearest", "bilinear"):
        finer = _unet(upsample=upsample).up[0](flat)
        assert finer.shape == (1, 4, 10, 8)
        with entry(upsample):
            torch.testing.assert_close(finer, finer[..., :1, :1].expand_as(finer))
    assert _unet(upsample="transpose").up[0](flat).std((-2, -1)).min() > 0


def test_bilinear_goes_around_the_globe_and_over_the_poles():
    """Longitudes may be turned, and the pole's row meets those on the opposite side."""
    layer, x = PeriodicUpsample("earth"), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x.roll(3, -1)), layer(x).roll(6, -1))
    torch.testing.assert_close(layer(x.flip(-2)), layer(x).flip(-2))
    inside = F.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(layer(x)[..., 1:-1, 1:-1], inside[..., 1:-1, 1:-1])
    across = (3 * x[..., 0, :] + x[..., 0, :].roll(4, -1)) / 4  # the row in the middle of columns
    north = layer(x)[..., 0, :]
    torch.testing.assert_close((north[..., ::2] + north[..., 1::2]) / 2, _blurred(across))
    # Beyond the poles it sees what convolutions see.
    x = torch.tensor([1.0, 5.0, 9.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    for poles, beyond in (("zeros", 0.0), ("mirror", 1.0), ("reflect", 5.0)):
        first = PeriodicUpsample(poles)(x)[0, 0, 0]
        assert first.tolist() == [(3 * 1.0 + beyond) / 4] * 8, poles


def _blurred(x):
    """Of neighbours on a circle what the two finer points of each have in the mean."""
    return (x.roll(1, -1) + 6 * x + x.roll(-1, -1)) / 8


def test_rates_rise_from_the_first_block_to_the_last():
    model = _unet(channels=(4, 8), blocks=2, stochastic_depth=0.5)
    order = []
    for layer in model.modules():
        if isinstance(layer, StochasticDepth):
            layer.register_forward_hook(lambda layer, *_: order.append(layer.rate))
    model(torch.randn(BATCH, 5, 8, 8))
    assert order == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def _wrapped(x, columns):
    """The field between copies of itself, cut to some columns around it."""
    width = x.shape[-1]
    turns = -(-columns // width)
    around = torch.cat([x] * (2 * turns + 1), -1)
    return around[..., turns * width - columns : (turns + 1) * width + columns]


def test_long_range_kernels_go_around_the_globe_and_not_over_the_poles():
    for columns in (1, 5, 11, 31):
        torch.manual_seed(0)
        layer, x = LongRangeConv2d(3, (7, columns)), torch.randn(2, 3, 5, 6)
        plain = F.pad(_wrapped(x, columns // 2), (0, 0, 3, 3))
        expected = F.conv2d(plain, layer.weight, layer.bias, groups=3)
        with entry(columns):
            torch.testing.assert_close(layer(x), expected)
        turned = layer(x.roll(2, -1)).roll(-2, -1)
        with entry(columns):
            torch.testing.assert_close(turned, expected)


def test_choices_that_are_refused():
    for options, message in (
        ({"upsample": "cubic"}, r"model\.upsample: needs one of transpose, nearest, bilinear"),
        ({"block": "global"}, r"model\.block: needs one of residual, global_depthwise"),
        ({"kernel": [31]}, r"model\.kernel: needs 2 entries, got 1"),
        ({"kernel": [31, 4]}, r"model\.kernel: needs odd numbers of rows and columns, got 4"),
        ({"kernel": [-1, 3]}, r"model\.kernel: .*got -1"),
    ):
        with pytest.raises(UserError, match=message):
            UNetConfig(**options)
    with pytest.raises(UserError, match=r"model\.global_conditioning: .*model\.channels"):
        _unet(channels=(8,), global_conditioning=True)  # one level has no decoder to condition


def _names(**options):
    return set(_unet(**options).state_dict())


def test_options_add_names_and_change_none():
    def up(name):
        return {key for key in _names(upsample=name) if key.startswith("up.0.")}

    plain = _names()
    assert _names(dropout=0.1, stochastic_depth=0.1, activation_checkpointing=True) == plain
    added = _names(squeeze_excite=True, global_conditioning=True)
    assert plain < added
    assert {name.split(".")[-3] for name in added - plain} <= {"gate", "globe", "heads"}
    assert up("transpose") == {"up.0.weight", "up.0.bias"}
    assert up("nearest") == up("bilinear") == {"up.0.0.weight", "up.0.0.bias"}
    mixer = _unet(**MIXER)
    assert mixer.get_parameter("encoder.0.0.mix.weight").shape == (4, 1, 9, 5)
    assert [s.name for s in mixer.segments()] == [s.name for s in _unet().segments()]


def test_recomputing_a_block_leaves_the_draws_of_the_next_forward():
    model = _small(ALL)
    output = model(torch.zeros(BATCH, 5, 8, 8))
    draw_stochastic_depths(model, seed=1, step=3, samples=range(BATCH))
    layers = [layer for layer in model.modules() if isinstance(layer, StochasticDepth)]
    before = [layer.draws for layer in layers]
    output.sum().backward()  # torch ends a recomputation by an error as soon as it has all it needs
    assert all(layer.draws is draws for layer, draws in zip(layers, before, strict=True))

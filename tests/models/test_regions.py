"""Models of regional grids: padding by `model.edges`, no way round the globe, exact on bands."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from credit_dp.config import (
    CrossFormerConfig,
    OwnModelConfig,
    PanguConfig,
    SwinConfig,
    UNetConfig,
)
from credit_dp.data.grid import Grid
from credit_dp.domain_parallel import shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models import build_model
from credit_dp.models.blocks import PolePad, pad_columns, pad_poles
from credit_dp.models.unet import LongRangeConv2d, PeriodicConv2d, PeriodicUpsample
from tests.domain_parallel.band_tensor.functions import assert_close, backward, run_whole
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tables import entry
from tests.tier_cases import tiers

EDGES = ("replicate", "reflect", "zeros")
NUMPY_MODES = {"replicate": "edge", "reflect": "reflect", "zeros": "constant"}
FLAT = Fields.flat(2, 1)
LEVELS = Fields(((1, 2, 3), (4, 5, 6)), (0,), others=1)
UNET = UNetConfig(channels=[4, 8], groups=4)
DEPTHWISE = UNetConfig(channels=[4, 8], groups=4, block="global_depthwise", kernel=[5, 3])
PANGU = PanguConfig(
    width=4, depths=[2, 2, 1, 2], heads=[2, 2, 1, 1], patch=[2, 2, 2], window=[2, 2, 4], mlp_ratio=1
)
SWIN = SwinConfig(
    width=4, depths=[2, 2, 2], heads=[2, 2, 1], patch=[2, 2], window=[2, 4], mlp_ratio=1
)
CROSSFORMER = CrossFormerConfig(
    channels=[8, 8],
    depths=[1, 1],
    head_channels=4,
    kernels=[[2, 4], [2]],
    local_windows=[2, 2],
    global_windows=[2, 1],
    mlp_ratio=1,
    groups=4,
)


def _fields(config):
    return LEVELS if isinstance(config, PanguConfig) else FLAT


def _model(config, grid, is_global=False, is_periodic=None):
    return build_model(config, _fields(config), GridShape(grid, is_global, is_periodic))


def _numpy_pad(x, rows, columns, edges):
    padded = np.pad(x.cpu(), ((0, 0), (0, 0), rows, columns), NUMPY_MODES[edges])
    return torch.from_numpy(padded).to(x.device)


def test_padding_is_that_of_numpy():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    for edges in EDGES:
        expected = _numpy_pad(x, (2, 2), (3, 3), edges)
        assert torch.equal(pad_columns(pad_poles(x, 2, edges), 3, edges), expected), edges
        assert torch.equal(PolePad(2, edges, 3, edges)(x), expected), edges


def test_convolutions_pad_all_four_sides_alike():
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    for edges in EDGES:
        for layer in (
            PeriodicConv2d(3, 2, 5, 2, edges, edges),
            LongRangeConv2d(3, (5, 5), edges, edges),
        ):
            conv = layer.double()
            inner = conv if isinstance(conv, nn.Conv2d) else conv.conv
            padded = _numpy_pad(x, (2, 2), (2, 2), edges)
            expected = F.conv2d(padded, inner.weight, inner.bias, inner.stride, groups=inner.groups)
            with entry((type(layer).__name__, edges)):
                torch.testing.assert_close(conv(x), expected)


def test_rows_have_edges_and_columns_go_round_in_a_band_of_latitudes():
    for config, name, rows, columns in (
        (UNET, "stem", (1, 1), (1, 1)),
        (DEPTHWISE, "encoder.0.0.mix", (2, 2), (1, 1)),
        (CROSSFORMER, "enlarge", (4, 3), (2, 1)),
    ):
        for edges in EDGES:
            changed = type(config)(**vars(config) | {"edges": edges, "poles": "mirror"})
            layer = _model(changed, (9, 13), False, True).double().get_submodule(name)
            x = torch.randn(2, 4 if "mix" in name else 3, 9, 13, dtype=torch.float64)
            wide = torch.from_numpy(np.pad(x, ((0, 0), (0, 0), (0, 0), columns), "wrap"))
            expected = _numpy_pad(wide, rows, (0, 0), edges)
            if name != "enlarge":
                conv = getattr(layer, "conv", layer)
                expected = F.conv2d(expected, conv.weight, conv.bias, groups=conv.groups)
            with entry((name, edges)):
                torch.testing.assert_close(layer(x), expected)


def test_a_band_of_latitudes_has_no_seam():
    """Turned by half a circle, a state has the same forecast, turned; of a box it has another."""
    for config, grid, changes in (
        (UNET, (9, 64), {"edges": "replicate"}),
        (DEPTHWISE, (9, 64), {"edges": "reflect"}),
        (PANGU, (9, 64), {"edges": "zeros", "depths": [2, 2, 1, 1]}),
        (SWIN, (9, 64), {"edges": "reflect"}),
        (CROSSFORMER, (8, 96), {"edges": "zeros"}),
    ):
        changed = type(config)(**vars(config) | changes)
        x = torch.randn(1, _fields(config).inputs, *grid, dtype=torch.float64)
        half = grid[1] // 2
        for is_periodic in (True, False):
            torch.manual_seed(0)
            model = _model(changed, grid, False, is_periodic).double()
            turned = model(x.roll(half, -1)).roll(-half, -1)
            error = (turned - model(x)).abs().max() / turned.abs().max()
            assert (error < 1e-12) == is_periodic, config


def test_upsampling_with_replicated_edges_is_that_of_torch():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = F.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(PeriodicUpsample("replicate", "replicate")(x), expected)


def test_whole_windows_of_the_crossformer_pad_the_region():
    for edges in EDGES:
        model = _model(CrossFormerConfig(**vars(CROSSFORMER) | {"edges": edges}), (9, 13))
        x = torch.randn(1, 3, 9, 13, dtype=torch.float64)
        wide = model.enlarge(x)
        assert wide.shape == (1, 3, 16, 16)
        # An odd number of rows or columns is rounded up, and one cut off in the south or east.
        assert torch.equal(wide, _numpy_pad(x, (4, 3), (2, 1), edges)), edges
        assert torch.equal(model.crop(wide), x), edges


def test_whole_cubes_of_pangu_pad_the_region():
    for edges in EDGES:
        config = PanguConfig(**vars(PANGU) | {"edges": edges, "patch": [2, 2, 3]})
        embedding = _model(config, (7, 10)).double().embedding
        x = torch.randn(1, LEVELS.inputs, 7, 10, dtype=torch.float64)
        levels = x[:, [1, 2, 3, 4, 5, 6]].unflatten(1, (2, 3))
        widths = ((0, 0), (0, 0), (0, 1), (0, 1), (0, 2))
        upper = torch.from_numpy(np.pad(levels.cpu(), widths, NUMPY_MODES[edges])).to(x.device)
        conv = embedding.upper[1]
        tokens = F.conv3d(upper, conv.weight, conv.bias, (2, 2, 3))
        conv = embedding.surface[1]
        surface = _numpy_pad(x[:, [0, 7]], (0, 1), (0, 2), edges)
        surface = F.conv2d(surface, conv.weight, conv.bias, (2, 3))
        expected = torch.cat([tokens, surface[:, :, None]], 2)
        with entry(edges):
            torch.testing.assert_close(embedding(x), expected)


CONFIGS = {
    "unet": (UNET, (16, 64), "replicate"),
    "unet of far rows": (DEPTHWISE, (16, 64), "zeros"),
    "pangu": (PANGU, (9, 64), "reflect"),
    "pangu whose windows don't divide the columns": (PANGU, (9, 76), "replicate"),
    "swin": (SWIN, (9, 64), "zeros"),
    "swin whose windows don't divide the columns": (SWIN, (9, 76), "reflect"),
    "crossformer": (CROSSFORMER, (8, 96), "replicate"),
}


@pytest.mark.parametrize(
    "name",
    tiers(
        fast=[("unet of far rows",), ("pangu",), ("swin whose windows don't divide the columns",)],
        slow=[("crossformer",)],
        exhaustive=[("unet",), ("swin",), ("pangu whose windows don't divide the columns",)],
    ),
)
def test_a_region_has_no_way_round_the_globe(name):
    """Models without what depends on the whole grid: norms of groups, groups of distant points."""
    config, grid, edges = CONFIGS[name]
    changes = {"edges": edges, "depths": [1, 2, 1, 1]} if config is PANGU else {"edges": edges}
    changes |= {"depths": [1, 2, 1]} if config is SWIN else {}
    changes |= {"global_windows": [1, 1], "poles": "mirror"} if config is CROSSFORMER else {}
    config = type(config)(**vars(config) | changes)

    def reaches(is_global):
        """Return in which columns the westmost column of the output sees the input."""
        torch.manual_seed(0)
        model = _model(config, grid, is_global).double()
        for module in list(model.modules()):
            for child_name, child in module.named_children():
                if isinstance(child, nn.GroupNorm):
                    setattr(module, child_name, nn.Identity())
        x = torch.randn(1, _fields(config).inputs, *grid, dtype=torch.float64, requires_grad=True)
        model(x)[..., 0].square().sum().backward()
        return x.grad.abs().amax((0, 1, 2)) > 0

    region, globe = reaches(False), reaches(True)
    half = grid[1] // 2
    assert globe[[0, 1, -1]].all()
    assert not globe[half]
    assert region[:2].all()
    assert not region[half:].any()


def test_a_region_has_no_way_across_a_pole():
    torch.manual_seed(0)
    layer = _model(UNetConfig(**vars(UNET) | {"poles": "earth"}), (8, 16)).stem
    x = torch.randn(1, 3, 8, 16, requires_grad=True)
    layer(x)[..., 0, 0].square().sum().backward()
    assert not x.grad[..., 2:].any()


@st.composite
def _cases(draw, kind):
    """Return ranks, a config and a grid that they fit: odd sizes, often one row on each rank."""
    ranks, edges = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from(EDGES))
    numbers = st.integers(1, 3)
    if kind is UNetConfig:
        levels = draw(numbers)
        coarsest = draw(st.integers(max(ranks, 3), 6))
        factor = 2 ** (levels - 1)
        grid = (coarsest * factor - draw(st.integers(0, factor - 1)), 3 * factor + 1)
        return ranks, grid, UNetConfig(
            channels=[4, 8, 4][:levels],
            groups=2,
            blocks=draw(st.integers(1, 2)),
            block=draw(st.sampled_from(["residual", "global_depthwise"])),
            kernel=draw(st.sampled_from([[1, 5], [3, 1], [5, 3]])),
            upsample=draw(st.sampled_from(["bilinear", "nearest", "transpose"])),
            squeeze_excite=draw(st.booleans()),
            edges=edges,
        )  # fmt: skip
    if kind is PanguConfig:
        patch = [draw(st.integers(1, 2)), draw(numbers), draw(numbers)]
        tokens = draw(st.integers(2 * max(ranks, 2) - 1, 9))
        rows = tokens * patch[1] - draw(st.integers(0, patch[1] - 1))
        config = PanguConfig(**vars(PANGU) | {
            "patch": patch,
            "window": [draw(numbers), draw(st.integers(1, 4)), draw(st.integers(2, 5))],
            "depths": [2, draw(st.integers(1, 2)), 1, 1],
            "edges": edges,
        })  # fmt: skip
        columns = 3 * patch[2] + draw(st.integers(0, 12))
        return ranks, (rows, columns), config
    if kind is SwinConfig:
        patch = [draw(numbers), draw(numbers)]
        tokens = draw(st.integers(2 * max(ranks, 2) - 1, 9))
        depths = st.integers(0, 2)
        config = SwinConfig(**vars(SWIN) | {
            "patch": patch,
            "window": [draw(st.integers(1, 4)), draw(st.integers(2, 5))],
            "depths": [draw(depths), draw(st.integers(1, 2)), draw(depths)],
            "edges": edges,
        })  # fmt: skip
        rows = tokens * patch[0] - draw(st.integers(0, patch[0] - 1))
        return ranks, (rows, 3 * patch[1] + draw(st.integers(0, 12))), config
    strides = [draw(st.integers(1, 2)), draw(st.integers(1, 2))]
    config = CrossFormerConfig(**vars(CROSSFORMER) | {
        "strides": strides,
        "kernels": [[stride, stride + 2] for stride in strides],
        "local_windows": [draw(numbers), draw(st.integers(2, 3))],
        "global_windows": [draw(st.integers(1, 2)), draw(st.integers(1, 2))],
        "edges": edges,
    })  # fmt: skip
    multiple = config.grid_multiple
    coarsest = multiple // (strides[0] * strides[1])
    padded = max(-(-ranks // coarsest), 1) * multiple
    rows = max(padded - draw(st.integers(0, 5)), padded // 2 + 1, ranks)
    return ranks, (rows, multiple - multiple // 4), config


@pytest.mark.parametrize("kind", [UNetConfig, PanguConfig, SwinConfig, CrossFormerConfig])
@settings(max_examples=max(2, settings.default.max_examples // 4))
@given(data=st.data())
def test_bands_of_a_region_equal_the_whole(kind, data):
    ranks, grid, config = data.draw(_cases(kind))
    shape = (2, _fields(config).inputs, *grid)
    arguments = (config, grid, False, data.draw(st.booleans()))
    on_threads(ranks, assert_same_as_whole_globe, _model, arguments, shape, MODEL)


def test_a_rank_without_windows_takes_part():
    """One window of rows for two ranks, and two windows of columns, of which the last is masked."""
    config = PanguConfig(
        name="pangu", width=4, depths=[2, 1, 1, 1], heads=[2, 2, 1, 1], patch=[1, 1, 1],
        window=[1, 3, 2], mlp_ratio=1,
    )  # fmt: skip
    shape = (2, _fields(config).inputs, 3, 4)
    on_threads(2, assert_same_as_whole_globe, _model, (config, (3, 4)), shape, MODEL)


class _Whole(nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.model = _model(*arguments)

    def outputs(self, x):
        return [self(x)]

    def forward(self, x):
        return self.model(x)


def _band_on_globe(manager, model, x, weights):
    model = copy.deepcopy(model)
    attach_domain(model, manager, [tuple(x.shape)])
    band = shard_tensor(x, manager=manager).clone().requires_grad_()
    outputs = model.outputs(band)
    local = [shard_tensor(weight, manager=manager) for weight in weights]
    return outputs[0].detach(), *backward(model, band, outputs, local)[:2]


ON_GLOBE = {
    "unet": (UNET, (11, 7), False, "replicate"),
    "unet of far rows": (DEPTHWISE, (11, 7), True, "reflect"),
    "pangu": (PANGU, (13, 20), False, "replicate"),
    "swin": (SWIN, (13, 20), False, "reflect"),
    "crossformer": (CROSSFORMER, (9, 13), False, "replicate"),
}


@pytest.mark.parametrize(
    "name",
    tiers(
        fast=[("unet of far rows",), ("pangu",)],
        slow=[("crossformer",)],
        exhaustive=[("unet",), ("swin",)],
    ),
)
def test_a_region_on_tensors_of_the_globe_equals_the_whole(name):
    torch.manual_seed(0)
    config, grid, is_periodic, edges = ON_GLOBE[name]
    config = type(config)(**vars(config) | {"edges": edges})
    model = _Whole(config, grid, False, is_periodic).double()
    x = torch.randn(2, _fields(config).inputs, *grid, dtype=torch.float64)
    (expected,), weights, input_grad, parameters, _ = run_whole(model, x)
    ranks = 2 if name == "crossformer" else 3
    results = on_threads(ranks, _band_on_globe, model, x, weights)
    outputs, input_grads, grads = zip(*results, strict=True)
    assert_close(torch.cat(outputs, -2), expected.detach(), "output")
    assert_close(torch.cat(input_grads, -2), input_grad, "input gradient")
    largest = max(float(grad.abs().max()) for grad in parameters.values())
    for parameter, grad in parameters.items():
        assert_close(sum(part[parameter] for part in grads), grad, parameter, 1e-3 * largest)


def test_a_shape_is_a_tuple_that_knows_whether_it_is_a_region():
    grid = GridShape((9, 8), is_global=False)
    rows, columns = grid
    assert grid == (9, 8) == (rows, columns)
    assert not grid.is_periodic
    assert GridShape((9, 8)).is_global
    assert GridShape((9, 8)).is_periodic
    pickled = pickle.loads(pickle.dumps(grid))  # noqa: S301
    for same in (copy.deepcopy(grid), copy.copy(grid), pickled):
        assert same == grid
        assert not same.is_global
    assert copy.copy(GridShape((9, 8), False, True)).is_periodic


@dataclass
class _OwnConfig(OwnModelConfig):
    name: str = "own"

    def build(self, in_channels, out_channels, grid):
        model = nn.Conv2d(in_channels, out_channels, 1)
        model.seen = (tuple(grid), grid.is_global, grid.is_periodic)
        return model


def test_own_models_learn_whether_the_grid_is_a_region():
    assert build_model(_OwnConfig(), FLAT, (9, 8)).seen == ((9, 8), True, True)
    assert _model(_OwnConfig(), (9, 8)).seen == ((9, 8), False, False)
    tropics = Grid(np.linspace(20, -20, 9), np.arange(8) * 45.0)
    assert build_model(_OwnConfig(), FLAT, tropics).seen == ((9, 8), False, True)


def test_edges_that_are_unknown_or_that_reflection_can_not_show_are_refused():
    for config, changes, grid, message in (
        (DEPTHWISE, {"kernel": [7, 3]}, (5, 9), r"model.kernel: can have up to 5 .* level has 3"),
        (PANGU, {"patch": [8, 2, 2]}, (9, 9), "cubes of 8 levels from 3"),
    ):
        changed = vars(config) | changes
        _model(type(config)(**changed), grid)  # replicated edges have no limit
        with pytest.raises(UserError, match=message):
            _model(type(config)(**changed | {"edges": "reflect"}), grid)
    with pytest.raises(UserError, match=r"model\.edges"):
        UNetConfig(edges="circular")
    with pytest.raises(ValueError, match="reflect padding it has 3"):
        pad_columns(torch.zeros(1, 1, 4, 4), 4, "reflect")
    with pytest.raises(ValueError, match="column_mode has to be one of circular, zeros"):
        PolePad(1, "zeros", 1, "earth")


def test_only_the_globe_is_advised_to_have_a_finer_grid():
    for config, grid in (
        (UNET, (2, 2)),
        (PANGU, (4, 4)),
        (CROSSFORMER, (1, 1)),
        (CrossFormerConfig(**vars(CROSSFORMER) | {"kernels": [[32], [2]]}), (9, 8)),
    ):
        for is_global in (True, False):
            with pytest.raises(UserError) as error:
                _model(config, grid, is_global)
            line = str(error.value)
            assert line.endswith(" or a finer data.grid.") == is_global, (config, line)
            assert ("data.grid" in line) == is_global, (config, line)

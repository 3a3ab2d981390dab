"""The U-Net: any grid, its padding, its presets, and equality under sharding."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from credit_dp.config import UNetConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.models.unet import PeriodicConv2d, UNet, pad_poles
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import PROCESSES, on_processes, on_threads
from tests.tier_cases import tiers


def _unet(poles="reflect", channels=(4, 8, 8), blocks=1):
    config = UNetConfig(channels=list(channels), blocks=blocks, groups=4, poles=poles)
    return UNet(config, 5, 3)


@pytest.mark.parametrize(
    ("ranks", "rows", "poles"),
    tiers(
        fast=[(3, 61, "earth"), (3, 33, "zeros")],
        slow=[(2, 61, "zeros"), (4, 33, "earth")],
        exhaustive=[(2, 16, "earth"), (3, 32, "reflect"), (4, 19, "zeros")],
    ),
)
def test_sharded_equals_whole(ranks, rows, poles):
    on_threads(ranks, assert_same_as_whole_globe, _unet, (poles,), (2, 5, rows, 9), MODEL)


@pytest.mark.parametrize("ranks", PROCESSES)
def test_sharded_equals_whole_on_processes(ranks):
    on_processes(ranks, assert_same_as_whole_globe, _unet, (), (1, 5, 37, 8), MODEL)


def test_any_grid():
    for grid in ((32, 64), (9, 7), (121, 240), (5, 5)):
        assert _unet()(torch.zeros(1, 5, *grid)).shape == (1, 3, *grid)


def test_longitude_is_periodic():
    x = torch.randn(1, 5, 8, 16)
    model = _unet()
    torch.testing.assert_close(model(x.roll(4, -1)), model(x).roll(4, -1))


def test_rows_beyond_the_poles():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.equal(pad_poles(x, 1, "reflect"), F.pad(x, (0, 0, 1, 1), mode="reflect"))
    assert pad_poles(x, 1, "zeros")[0, 0, 0].tolist() == [0, 0, 0, 0]
    assert pad_poles(x, 1, "mirror")[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert pad_poles(x, 2, "earth")[0, 0, :2].tolist() == [[6, 7, 4, 5], [2, 3, 0, 1]]
    assert pad_poles(x, 1, "earth")[0, 0, -1].tolist() == [10, 11, 8, 9]


def test_periodic_conv_has_the_attributes_of_the_seeds():
    layer = PeriodicConv2d(2, 3, 5)
    assert (layer.padding, type(layer.conv)) == (2, torch.nn.Conv2d)


@pytest.mark.slow
def test_the_base_preset_fits_era5():
    config = UNetConfig(**_preset("unet_base"))
    with torch.device("meta"):
        model = build_model(config, Fields.flat(70, 5), (721, 1440))
    assert sum(p.numel() for p in model.parameters()) >= 60e6


def _preset(name):
    values = OmegaConf.load(f"conf/model/{name}.yaml")
    values.pop("defaults")
    return OmegaConf.to_container(values)


@pytest.mark.parametrize(
    ("name", "rows"),
    tiers(fast=[("unet", 32)], slow=[("unet_base", 721)], exhaustive=[("unet_small", 181)]),
)
def test_presets_plan_on_their_grids(name, rows):
    ranks = 4
    transport = ThreadTransport(ThreadWorld(ranks, timeout=1.0), 0)
    manager = DomainParallelManager(ranks, ranks, transport=transport)
    with torch.device("meta"):
        model = build_model(UNetConfig(**_preset(name)), Fields.flat(8, 2), (rows, 32))
    shard_model(model, manager, (1, 10, rows, 32))
    sizes = manager.partition(rows).sizes
    assert sum(sizes) == rows
    assert max(sizes) <= 1.1 * rows / ranks


def test_a_grid_too_small_for_the_levels_and_even_kernels_are_refused():
    with pytest.raises(ValueError, match="kernel_size has to be odd, got 4"):
        PeriodicConv2d(1, 1, 4)
    with pytest.raises(UserError, match="3 levels need at least 5 rows and columns"):
        build_model(UNetConfig(channels=[8, 8, 8], groups=4), Fields.flat(2), (4, 64))


@pytest.mark.slow
def test_a_tiny_model_on_a_large_grid_warns(caplog):
    with caplog.at_level(logging.WARNING):
        build_model(UNetConfig(channels=[8, 8], groups=4), Fields.flat(2), (181, 360))
        assert not caplog.records
        build_model(UNetConfig(channels=[8, 8], groups=4), Fields.flat(2), (721, 1440))
    assert "meant for small grids" in caplog.text

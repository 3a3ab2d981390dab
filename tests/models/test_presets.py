"""The presets for the quickstart data are exact under sharding at any height."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from credit_dp.cli.compose import Composer
from credit_dp.config import OwnModelConfig, UNetConfig
from credit_dp.config.model import MODELS
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.fields import Fields
from credit_dp.models import BUILDERS, build_model, build_on_meta
from credit_dp.training.build_training import build_training
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tier_cases import tiers

# Three variables on three levels and one at the surface, a forcing and a static field.
FIELDS = Fields(((0, 1, 2), (4, 5, 6), (7, 8, 9)), (3,), others=2)
COLUMNS = 16
# Each preset on a height that divides into its patches and windows, and on some that do not.
CASES = tiers(
    fast=[],
    slow=[("unet", 3, 61), ("pangu", 3, 61), ("swin", 3, 33), ("sfno", 3, 33)],
    exhaustive=[
        ("crossformer", 3, 33),
        ("unet", 2, 32), ("unet", 4, 121), ("pangu", 4, 32), ("swin", 4, 61),
        ("crossformer", 4, 61), ("sfno", 2, 32), ("sfno", 4, 61), ("sfno", 4, 8),
    ],
)  # fmt: skip


def _built(preset, rows):
    config = Composer("train").compose_config([f"model={preset}"]).model
    return lambda: build_model(config, FIELDS, (rows, COLUMNS))


@dataclass
class ReadsValues(OwnModelConfig):
    """A model whose constructor reads values, so that it can't be built on the meta device."""

    name: str = "reads_values"

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> nn.Module:
        model = nn.Conv2d(in_channels, out_channels, 1)
        model.twin = nn.Conv2d(in_channels, out_channels, 1)
        model.twin.weight = model.weight
        rates = [float(x) for x in torch.linspace(0, 1, 3)]
        model.register_buffer("rates", torch.tensor(rates))
        return model


def test_a_plan_has_the_values_of_buffers_and_no_others():
    model = build_on_meta(ReadsValues(), FIELDS, (4, COLUMNS))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.twin.weight is model.weight
    assert model.rates.tolist() == [0, 0.5, 1]


def test_each_config_has_a_builder():
    assert list(MODELS) == ["unet", "diffusion", "pangu", "crossformer", "swin", "sfno"]
    assert set(MODELS.values()) == BUILDERS.keys()


@pytest.mark.parametrize(("preset", "ranks", "rows"), CASES)
def test_sharded_equals_whole(preset, ranks, rows):
    shape = (1, FIELDS.inputs, rows, COLUMNS)
    options = (0.0, True, 0, None, "allow") if preset == "sfno" else ()
    on_threads(ranks, assert_same_as_whole_globe, _built(preset, rows), (), shape, MODEL, *options)


@pytest.mark.slow
def test_all_unets_go_back_up_alike():
    names = [name for name in Composer("train").groups["model"] if name.startswith("unet")]
    assert len(names) == 5
    configs = [Composer("train").compose_config([f"model={name}"]).model for name in names]
    assert {config.upsample for config in configs} == {UNetConfig().upsample} == {"bilinear"}


@pytest.mark.parametrize(
    ("preset", "most"),
    tiers(fast=[], slow=[("pangu_base", 91)], exhaustive=[("unet_base", 91), ("swin_base", 91)]),
)
def test_a_level_with_too_few_rows_leaves_layers_out(preset, most):
    config = Composer("train").compose_config([f"model={preset}"]).model
    with torch.device("meta"):
        model = build_model(config, FIELDS, (721, 1440))
    shape = (1, FIELDS.inputs, 721, 1440)
    assert plan_report(model, shape, most).problems == ()
    more = plan_report(model, shape, most + 1)
    assert f"{most} rows can't be shared by {most + 1} ranks" in more.refusal


# Channels of the presets of a billion parameters, and a sixteenth of them.
LARGE = {
    "unet_large": ([512, 1024, 2048, 4096], "model.channels=[32,64,128,256]"),
    "crossformer_large": ([320, 640, 1280, 2560], "model.channels=[32,64,96,160]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", LARGE)
def test_presets_of_a_billion_parameters_are_planned(preset):
    config = Composer("train").compose_config([f"model={preset}"]).model
    assert config.channels == LARGE[preset][0]
    with torch.device("meta"):
        model = build_model(config, FIELDS, (721, 1440))
    assert 0.9e9 < sum(p.numel() for p in model.parameters()) < 1.25e9
    shape = (1, FIELDS.inputs, 721, 1440)
    report = plan_report(model, shape, 32, whole_ops="refuse")
    assert report.problems == ()
    one = plan_report(model, shape, 1)
    assert max(report.saved_bytes) < 2 / 32 * one.saved_bytes[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", LARGE)
def test_a_step_of_a_large_preset(preset, tmp_path):
    keys = [f"model={preset}", LARGE[preset][1], "experiment=fast", "model.groups=16"]
    if preset == "crossformer_large":
        windows = ["model.local_windows=[2,2,2,2]", "model.global_windows=[2,1,1,1]"]
        keys += ["model.head_channels=16", *windows]
    config = Composer("train").compose_config(
        [*keys, "data.grid=24x48", "data.batch_size=1", f"data.cache={tmp_path}", "device=cpu"]
    )
    data = prepare_training_data(config.data)
    training = build_training(config, data, DomainParallelManager(1, 1), torch.device("cpu"))
    with training.loader:
        training.trainer.start()
        record = training.trainer.train_step(next(training.loader))
    assert record.loss is not None
    assert 0 < record.loss < 100

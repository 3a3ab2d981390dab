"""A run with weights in channels last is the run with contiguous weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from credit_dp.config import LionConfig, MuonConfig
from credit_dp.errors import UserError
from tests.tier_cases import every
from tests.training.meshes import (
    HALF_WAY,
    MODELS,
    ONE,
    STEPS,
    Mesh,
    assert_same_trajectory,
    on_mesh,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.runs import alone, built, make_config, make_store, tiny_unet

OPTIMIZERS = {
    "muon": MuonConfig(lr=1e-2),
    "lion": LionConfig(lr=1e-3),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), 17)


def both(config):
    """Return the config with contiguous weights, and with weights in channels last."""
    return (
        replace(config, trainer=replace(config.trainer, channels_last=value))
        for value in (False, True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", every(3, ["unet", "crossformer", "pangu"], pytest.mark.exhaustive)
)
def test_a_run_is_the_same_and_its_checkpoints_serve_both(store, tmp_path, model):
    """On one process; `test_features.py` compares it with ranks."""
    config = make_config(store, tmp_path / "run", MODELS[model], steps=STEPS)
    contiguous, channels_last = both(config)
    wanted = run_on_mesh(ONE, train_from_start, contiguous, tmp_path / "contiguous")
    found = run_on_mesh(ONE, train_from_start, channels_last, tmp_path / "channels_last")
    assert_same_trajectory(found, wanted)
    half = wanted[0][HALF_WAY:]
    for folder, other in (("contiguous", channels_last), ("channels_last", contiguous)):
        numbers, weights = run_on_mesh(ONE, train_from_checkpoint, other, tmp_path / folder)
        assert_same_trajectory((numbers, weights), (half, wanted[1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, OPTIMIZERS, pytest.mark.exhaustive))
def test_optimizers_update_channels_last_weights_alike(store, tmp_path, name):
    config = replace(
        make_config(store, tmp_path, tiny_unet(upsample="transpose"), steps=3),
        optimizer=replace(OPTIMIZERS[name], ema=0.9),
    )
    wanted, found = (run_on_mesh(ONE, train_from_start, c, None) for c in both(config))
    assert_same_trajectory(found, wanted)


def test_the_key_sets_the_format_of_convolutions(store, tmp_path):
    for value in (False, True):
        model = tiny_unet(upsample="transpose")
        trainer = built(make_config(store, tmp_path, model, channels_last=value), alone()).trainer
        modules = [module for part in trainer.state.parts for module in part.modules()]
        for kind in (nn.Conv2d, nn.ConvTranspose2d):
            weights = [m.weight for m in modules if isinstance(m, kind)]
            assert any(not w.is_contiguous() for w in weights) is value, kind
            last = all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
            assert last or not value, kind


def test_fsdp2_is_refused(store, tmp_path):
    config = make_config(store, tmp_path, channels_last=True)
    with pytest.raises(UserError, match=r"trainer\.channels_last: needs .*=ddp, got fsdp2"):
        on_mesh(config, Mesh(1, 2, 1, "fsdp2"))

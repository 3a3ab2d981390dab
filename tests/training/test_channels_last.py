"""A run with weights in channels last is the run with contiguous weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from credit_dp.config import LionConfig, MuonConfig, SoapConfig
from credit_dp.errors import UserError
from tests.training.meshes import (
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

MESHES = {
    "one": ONE,
    "domain": Mesh(1, 1, 2),
    "data": Mesh(1, 2, 1),
    "pipeline": Mesh(2, 1, 1),
}
OPTIMIZERS = {
    "lion": LionConfig(lr=1e-3),
    "muon": MuonConfig(lr=1e-2),
    "soap": SoapConfig(lr=1e-2),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), 33)


def both(config):
    """Return the config with contiguous weights, and with weights in channels last."""
    return (
        replace(config, trainer=replace(config.trainer, channels_last=value))
        for value in (False, True)
    )


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("unet", "one"),
        ("unet", "domain"),
        *(
            pytest.param(model, mesh, marks=pytest.mark.slow)
            for model in ("unet", "crossformer", "pangu")
            for mesh in MESHES
            if (model, mesh) not in {("unet", "one"), ("unet", "domain")}
        ),
    ],
)
def test_a_run_is_the_same_and_its_checkpoints_serve_both(store, tmp_path, model, mesh):
    config = make_config(store, tmp_path / "run", MODELS[model], steps=STEPS)
    contiguous, channels_last = both(config)
    wanted = run_on_mesh(ONE, train_from_start, contiguous, tmp_path / "contiguous")
    found = run_on_mesh(MESHES[mesh], train_from_start, channels_last, tmp_path / "channels_last")
    assert_same_trajectory(found, wanted)
    half = wanted[0][-len(wanted[0]) // 2 :]
    for folder, other in (("contiguous", channels_last), ("channels_last", contiguous)):
        numbers, weights = run_on_mesh(
            MESHES[mesh], train_from_checkpoint, other, tmp_path / folder
        )
        assert_same_trajectory((numbers, weights), (half, wanted[1]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_channels_last_weights_alike(store, tmp_path, name):
    config = replace(
        make_config(store, tmp_path, tiny_unet(upsample="transpose"), steps=STEPS),
        optimizer=replace(OPTIMIZERS[name], ema=0.9),
    )
    wanted, found = (run_on_mesh(ONE, train_from_start, c, None) for c in both(config))
    assert_same_trajectory(found, wanted)


@pytest.mark.parametrize("value", [False, True])
def test_the_key_sets_the_format_of_convolutions(store, tmp_path, value):
    config = make_config(store, tmp_path, tiny_unet(upsample="transpose"), channels_last=value)
    trainer = built(config, alone()).trainer
    kinds = nn.Conv2d, nn.ConvTranspose2d
    modules = [module for part in trainer.state.parts for module in part.modules()]
    for kind in kinds:
        weights = [m.weight for m in modules if isinstance(m, kind)]
        assert any(not w.is_contiguous() for w in weights) is value
        assert not value or all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def test_fsdp2_is_refused(store, tmp_path):
    config = make_config(store, tmp_path, channels_last=True)
    with pytest.raises(UserError, match=r"trainer\.channels_last: needs .*=ddp, got fsdp2"):
        on_mesh(config, Mesh(1, 2, 1, "fsdp2"))

"""Autocast: bfloat16 in the model, the weights' dtype elsewhere, on every mesh."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from credit_dp.config import Config
from credit_dp.domain_parallel import DomainParallelManager
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.meshes import Mesh, on_mesh, record_trajectory
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    tiny_crossformer,
    tiny_sfno,
    tiny_unet,
)

MODELS = {"unet": tiny_unet(), "crossformer": tiny_crossformer(), "sfno": tiny_sfno()}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    folder = tmp_path_factory.mktemp("run")
    config = make_config(store, folder, steps=2, dtype="float32", autocast="bfloat16")
    return replace(config, data=replace(config.data, batch_size=8))


def numbers_of(manager: DomainParallelManager, config: Config) -> np.ndarray:
    """Return loss and gradient norm of each step; check dtypes in between."""
    training = built(config, manager)
    state, seen = training.trainer.state, set()
    for part in state.parts:
        for module in part.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                module.register_forward_hook(lambda m, given, made: seen.add(made.dtype))
    found = np.array(record_trajectory(training)[0])
    assert seen == {torch.bfloat16 if config.trainer.autocast else torch.float32}
    tensors = state.tensors().values()
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float32}
    assert {p.grad.dtype for p in state.trainable_parameters.values()} == {torch.float32}
    return found


@pytest.mark.slow
def test_numbers_are_close_to_those_without(config):
    plain = replace(config, trainer=replace(config.trainer, autocast=None))
    found, exact = numbers_of(alone(), config), numbers_of(alone(), plain)
    assert found == pytest.approx(exact, rel=2e-2)
    assert (found != exact).all()


def test_the_model_returns_what_its_weights_are(config):
    training = built(config, alone())
    training.loader.close()
    parameters = training.trainer.state.parameters
    made = training.forecast_step.model(
        torch.zeros(1, parameters["stem.conv.weight"].shape[1], 17, 16)
    )
    assert {made.dtype} == {p.dtype for p in parameters.values()} == {torch.float32}


@pytest.mark.slow
def test_blocks_computed_again_are_the_same(config):
    again = replace(config, model=tiny_unet(activation_checkpointing=True))
    assert (numbers_of(alone(), again) == numbers_of(alone(), config)).all()


MESHES = tiers(
    [],
    [("unet", Mesh(1, 1, 3)), ("crossformer", Mesh(2, 1, 1, "fsdp2", "interleaved"))],
    [
        ("crossformer", Mesh(1, 1, 2)),
        ("sfno", Mesh(1, 1, 2)),
        ("unet", Mesh(1, 2, 1, "fsdp2")),
        ("unet", Mesh(2, 1, 1)),
    ],
)


@pytest.mark.parametrize(("model", "mesh"), MESHES)
def test_meshes_agree_within_the_rounding(config, model, mesh):
    config = replace(config, model=MODELS[model])
    wanted = numbers_of(alone(), config)
    given = (mesh.ranks, numbers_of, on_mesh(config, mesh))
    for found in on_processes(*given, domain=mesh.domain, pipeline=mesh.pipeline):
        assert found == pytest.approx(wanted, rel=1e-2)

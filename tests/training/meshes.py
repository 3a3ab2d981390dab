"""Training runs on meshes of pipeline x data x domain ranks, and what is compared of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from credit_dp.config import Config, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build_training import Training
from credit_dp.training.checkpoint import load_checkpoint
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.training.plugins import DecidingConfig, PartlyUsedConfig
from tests.training.runs import TINY_MODELS, alone, built, step_records, tiny_unet

ROWS = 33  # no multiple of 2 or 3
STEPS, HALF_WAY = 5, 2
CLIP = 0.02  # of norms above: every step is clipped

MODELS = {
    "unet": tiny_unet(global_conditioning=True, squeeze_excite=True),
    "crossformer": replace(TINY_MODELS["crossformer"], stochastic_depth=0.0),
    "deciding": DecidingConfig(),
    "depth": tiny_unet(stochastic_depth=0.4, activation_checkpointing=True),
    "pangu": TINY_MODELS["pangu"],
    "swin": TINY_MODELS["swin"],
    "sfno": TINY_MODELS["sfno"],
    "partly used": PartlyUsedConfig(),
    "plug-ins": tiny_unet(),  # with a loss and an optimizer of the user's own
}

Numbers = list[tuple[float, float]]  # loss and gradient norm of each step
Weights = dict[str, np.ndarray]
Trajectory = tuple[Numbers, Weights]


class Mesh(NamedTuple):
    """Ranks along each axis, and how the axes work."""

    pipeline: int
    data: int
    domain: int
    mode: str = "ddp"
    schedule: str = "1f1b"
    ensemble: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.ensemble * self.domain

    def __str__(self) -> str:
        schedule = f"-{self.schedule}" if self.pipeline > 1 else ""
        members = f"x{self.ensemble}" if self.ensemble > 1 else ""
        return f"{self.pipeline}x{self.data}{members}x{self.domain}-{self.mode}{schedule}"


ONE = Mesh(1, 1, 1)


def on_mesh(config: Config, mesh: Mesh) -> Config:
    """Return the config of the run on a mesh."""
    parallel = ParallelConfig(
        pipeline=mesh.pipeline,
        data=mesh.data,
        domain=mesh.domain,
        data_mode=mesh.mode,
        schedule=mesh.schedule,
        ensemble=mesh.ensemble,
    )
    return replace(config, parallel=parallel)


def run_on_mesh(mesh: Mesh, fn: Any, config: Config, *args: Any) -> Trajectory:
    """Return what `fn` returns on all ranks: the numbers, equal on all, and the joined weights."""
    config = on_mesh(config, mesh)
    if mesh.ranks == 1:
        return fn(alone(), config, *args)
    axes = {"domain": mesh.domain, "pipeline": mesh.pipeline, "ensemble": mesh.ensemble}
    found = on_processes(mesh.ranks, fn, config, *args, **axes)
    weights: Weights = {}
    for numbers, part in found:
        assert numbers == found[0][0]
        for name, value in part.items():
            assert name not in weights or np.array_equal(weights[name], value)
            weights[name] = value
    return found[0][0], weights


def record_trajectory(training: Training, save_to: Path | None = None) -> Trajectory:
    """Train to the end; with `save_to` save a checkpoint half way."""
    trainer, numbers = training.trainer, []
    with training.loader:
        for record in step_records(training):
            numbers.append((record.loss, record.grad_norm))
            if save_to is not None and record.step == HALF_WAY:
                save_checkpoint(save_to, trainer.state, "")
    weights = {}
    for name, parameter in trainer.state.parameters.items():
        value = parameter.detach()
        weights[name] = (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
    return numbers, weights


def train_from_start(
    manager: DomainParallelManager, config: Config, save_to: Path | None
) -> Trajectory:
    """Train all steps; with `save_to` save a checkpoint half way."""
    return record_trajectory(built(config, manager), save_to)


def train_from_checkpoint(manager: DomainParallelManager, config: Config, path: Path) -> Trajectory:
    """Train the second half of the steps from a checkpoint."""
    training = built(config, manager)
    load_checkpoint(path, training.trainer.state)
    assert training.trainer.state.step == HALF_WAY
    return record_trajectory(training)


def assert_same_trajectory(found: Trajectory, wanted: Trajectory) -> None:
    """Compare losses and gradient norms of each step, and all weights at the end."""
    assert np.array(found[0]) == pytest.approx(np.array(wanted[0]), rel=1e-10, abs=0)
    assert found[1].keys() == wanted[1].keys()
    a, b = (np.concatenate([w[name].ravel() for name in sorted(w)]) for w in (found[1], wanted[1]))
    assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b)


def assert_resuming_changes_no_bit(config: Config, folder: Path) -> None:
    """Train a run on one process at once, and from a checkpoint half way, and compare."""
    numbers, trained = run_on_mesh(ONE, train_from_start, config, folder)
    assert len({loss for loss, _ in numbers}) == config.trainer.steps
    again_numbers, again = run_on_mesh(ONE, train_from_checkpoint, config, folder)
    assert again_numbers == numbers[HALF_WAY:]
    assert all(np.array_equal(again[name], weight) for name, weight in trained.items())


Gradients = tuple[float, dict[str, torch.Tensor]]  # the loss, and gradients by parameter


def first_gradients(training: Training) -> Gradients:
    """Return the loss and the gradients of the first batch, on the whole globe; collective."""
    trainer = training.trainer
    trainer.state.train()
    with training.loader:
        share = trainer.compute_gradients(next(training.loader))
    gradients = {}
    for name, parameter in trainer.state.parameters.items():
        grad = parameter.grad
        assert grad is not None
        gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return float(trainer.sum_over_mesh(share)) / trainer.manager.dp_world_size, gradients


def assert_same_gradients(found: Gradients, wanted: Gradients, tolerance: float = 1e-10) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(grad.abs().max()) for grad in wanted[1].values())
    for name, grad in wanted[1].items():
        size = max(float(grad.abs().max()), 1e-3 * largest)
        assert float((found[1][name] - grad).abs().max()) <= tolerance * size, name


def with_ema(config: Config, decay: float | None) -> Config:
    """Return the config with this decay of the moving average of weights."""
    return replace(config, optimizer=replace(config.optimizer, ema=decay))


def full_arrays(parameters: Mapping[str, nn.Parameter]) -> Weights:
    """Return copies of parameters; parameters that FSDP2 shards are gathered. Collective."""
    found = {}
    for name, parameter in parameters.items():
        assert isinstance(parameter, nn.Parameter)
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.clone().numpy()  # FSDP2 frees the storage of its own
    return found

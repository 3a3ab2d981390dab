"""Training states of small models, as checkpoints save and restore them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from credit_dp.config import AdamWConfig, ModelConfig, OptimizerConfig, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.pipeline_parallel.stages import cut_model
from credit_dp.training.optim import build_optimizer, build_schedule
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters
from credit_dp.training.state import TrainingState
from tests.training.runs import tiny_crossformer, tiny_unet

ROWS, COLUMNS = 16, 16
FIELDS = Fields(((0, 1),), (2,), 2, 1)
MODELS: dict[str, ModelConfig] = {
    "unet": tiny_unet(),
    "crossformer": tiny_crossformer(),
}


class SampleCounter:
    """Stands for the sequence of samples: its state is one number."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def small_state(
    channels: int = 4,
    seed: int = 0,
    layers: int = 2,
    config: OptimizerConfig | None = None,
    steps: int = 10,
) -> TrainingState:
    """Return the state of a few convolutions before the first step."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Conv2d(channels, channels, 3) for _ in range(layers)))
    return state_of_model(model, seed, config, steps)


def state_of_model(
    model: nn.Module, seed: int = 0, config: OptimizerConfig | None = None, steps: int = 10
) -> TrainingState:
    """Return the state of a model on one process before the first step."""
    config = config or AdamWConfig()
    parameters = dict(sorted(model.named_parameters()))
    optimiser = build_optimizer(parameters, config)
    schedule = build_schedule(optimiser, config, steps)
    return TrainingState(
        (model,),
        optimiser,
        schedule,
        SampleCounter(),
        {},
        seed,
        optimizer_name=config.name,
    )


class TiedAndUnused(nn.Module):
    """Tied and unused parameters, one of no dimension, and buffers of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.tied = self.conv
        self.weight = self.conv.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.unused = nn.Parameter(torch.rand(3))
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mask", torch.rand(4, 1, 1) > 0.3)
        self.register_buffer("turned", torch.rand(5, 3).T)
        self.register_buffer("derived", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x + torch.rand_like(x))) * self.mask * self.scale


def take_step(state: TrainingState) -> None:
    """Train one step on ones; the sampler moves by three."""
    state.optimizer.zero_grad()
    state.parts[0](torch.ones(1, 4, 8, 8)).square().sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.step += 1
    state.sampler.value += 3


def same_tensors(a: TrainingState, b: TrainingState) -> bool:
    """Return whether models, optimizers and generators hold the same tensors."""
    ours, theirs = a.tensors(), b.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def state_on(manager: DomainParallelManager, name: str, seed: int, shared: bool) -> TrainingState:
    """Return the state of a rank before the first step.

    `shared` says that FSDP2 shards the parameters over the data ranks.
    """
    torch.manual_seed(seed)
    model = build_model(MODELS[name], FIELDS, (ROWS, COLUMNS)).double()
    model.register_buffer("turned", torch.arange(6).view(2, 3).T * seed)
    shape = (2, FIELDS.inputs, ROWS, COLUMNS)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, shape)
    parts: tuple[nn.Module, ...] = (model,)
    if manager.pipeline_parallel_size > 1:
        cuts = [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, None)]  # two for each rank
        parts = tuple(stage.module for stage in cut_model(model, manager, cuts, shape))
    shares = fsdp_mesh(manager) if shared else None
    if shares is not None:
        for part in parts:
            shard_parameters(part, shares, ParallelConfig(), torch.float64)
    parameters = dict(sorted(p for part in parts for p in part.named_parameters()))
    optimiser = build_optimizer(parameters, AdamWConfig())
    schedule = build_schedule(optimiser, AdamWConfig(), 10)
    return TrainingState(parts, optimiser, schedule, SampleCounter(), {}, seed)


def full_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return a rank's tensors; tensors that FSDP2 shards are gathered. Collective."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.tensors().items()
    }


def file_names(folder: Path) -> list[str]:
    """Return the names of files and folders in a folder."""
    return sorted(path.name for path in folder.iterdir())

"""Puts a training run together: model, shards, optimiser, loss and loader, from the config."""

import warnings
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_dp.config import Config, OwnModelConfig
from credit_dp.data.loader import Loader
from credit_dp.data.normalise import Normaliser
from credit_dp.data.prepare import Prepared
from credit_dp.data.sampling import SampleSequence, sample_times
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.trial import check_model
from credit_dp.forecast.step import ForecastStep
from credit_dp.models import build_model
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.data_description import describe_data
from credit_dp.training.loss import build_loss
from credit_dp.training.optimisation import build_optimiser, build_schedule
from credit_dp.training.trainer import Trainer

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@final
@dataclass(frozen=True)
class Training:
    """A run ready to start.

    `forecast` is for use outside training: it calls the model without its DDP wrapper. `like` has
    the device and dtype of everything.
    """

    trainer: Trainer
    loader: Loader
    forecast: ForecastStep
    like: Tensor
    rows: slice


def build_training(
    config: Config, prepared: Prepared, manager: DomainParallelManager, device: torch.device
) -> Training:
    """Build everything that trains, the same on every rank but for its rows and samples.

    Raises:
        UserError: what was asked for does not exist, does not fit the grid, or does not divide.
    """
    like = torch.zeros((), device=device, dtype=DTYPES[config.trainer.dtype])
    # First of all: it refuses a batch that does not divide among the data ranks.
    sequence = build_sequence(config, prepared, manager)
    model = build_sharded(config, prepared, manager, like)
    rows = manager.rows(prepared.store.grid[0])
    optimiser = build_optimiser(model, config.optimizer)
    schedule = build_schedule(optimiser, config.optimizer, config.trainer.steps)
    loader = Loader(
        prepared,
        "train",
        rows,
        sequence,
        like.dtype,
        config.data.prefetch,
        like.device,
        config.model.frames,
    )
    data = describe_data(prepared, config.model)
    state = TrainingState(model, optimiser, schedule, loader, data, config.seed)
    scale = Normaliser(prepared.statistics, like.dtype, like.device).tendency_scale
    channels, latitude = prepared.store.channels, prepared.store.latitude
    loss = build_loss(config.loss, channels, latitude, rows, scale)
    residual = config.model.residual
    step = ForecastStep(averaging(model, manager, device), scale, residual)
    trainer = Trainer(config.trainer, state, step, loss, manager)
    return Training(trainer, loader, ForecastStep(model, scale, residual), like, rows)


def build_sharded(
    config: Config, prepared: Prepared, manager: DomainParallelManager, like: Tensor
) -> nn.Module:
    """The model on this rank's rows, with the same parameters on every rank."""
    store = prepared.store
    # Every rank draws the whole model from the same seed: no weights need to be sent.
    torch.manual_seed(config.seed)
    fields = store.channels.fields(config.model.frames)
    model = build_model(config.model, fields, store.grid)
    if isinstance(config.model, OwnModelConfig):
        check_model(model, fields.inputs, fields.outputs, store.grid)
    model = model.to(like)
    batch = config.data.batch_size // manager.dp_world_size
    return shard_model(model, manager, (batch, fields.inputs, *store.grid))


def averaging(model: nn.Module, manager: DomainParallelManager, device: torch.device) -> nn.Module:
    """The model, its gradients averaged over all ranks of the run if there are several."""
    if manager.world_size == 1:
        return model
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name still sends buffers once, and 2.11
        # does not know it.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,  # they follow from the config, and may be of own rows
            gradient_as_bucket_view=True,
        )


def build_sequence(
    config: Config, prepared: Prepared, manager: DomainParallelManager
) -> SampleSequence:
    """The order in which this rank meets its share of the samples.

    Raises:
        UserError: the global batch does not divide among the data ranks, or samples are too few.
    """
    return SampleSequence(
        len(sample_times(prepared, "train", config.model.frames)),
        config.data.batch_size,
        manager.dp_rank,
        manager.dp_world_size,
        config.seed,
    )

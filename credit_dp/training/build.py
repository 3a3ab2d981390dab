"""Puts a training run together: model, shards, optimiser, loss and loader, from the config."""

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from credit_dp.config import Config, OwnLossConfig
from credit_dp.data.loader import Loader, Reads
from credit_dp.data.normalise import Normaliser
from credit_dp.data.prepare import Prepared
from credit_dp.data.sampling import Lengths, SampleSequence, sample_times
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.gloo_threads import let_senders_finish
from credit_dp.evaluation.valid_points import ValidPoints
from credit_dp.forecast.step import ForecastStep, Model
from credit_dp.pipeline_parallel.model_layout import home_device
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.data_description import describe_data
from credit_dp.training.loss import WeightedLoss, build_loss, of_plugin
from credit_dp.training.loss_names import LossNames
from credit_dp.training.model_parts import build_parts
from credit_dp.training.optimisation import (
    build_optimiser,
    build_schedule,
    state_layout,
    try_schedule,
)
from credit_dp.training.shared_reading import share_reading
from credit_dp.training.state import named_parameters, saved_parameters
from credit_dp.training.trainer import Trainer
from credit_dp.training.weight_average import WeightAverage

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@final
@dataclass(frozen=True)
class Training:
    """A run ready to start.

    `forecast` is for use outside training; with a pipeline or fsdp2 all ranks call it together.
    `like` has the device and dtype of everything.
    """

    trainer: Trainer
    loader: Loader
    forecast: ForecastStep
    like: Tensor
    rows: slice


def try_plugins(config: Config) -> None:
    """Refuse a loss or a schedule of the user's own for what can be said of it without data.

    Raises:
        UserError: see `of_plugin` and `try_schedule`.
    """
    if isinstance(config.loss, OwnLossConfig):
        of_plugin(config.loss, torch.zeros((), dtype=DTYPES[config.trainer.dtype]))
    try_schedule(config.optimizer, config.trainer.steps)


def build_training(
    config: Config, prepared: Prepared, manager: DomainParallelManager, device: torch.device
) -> Training:
    """Build everything that trains, the same on every rank but for its rows, stages and samples.

    Raises:
        UserError: what was asked for does not exist, does not fit the grid, or does not divide.
    """
    first_gpu = device.index or 0  # before the layout says where the output goes
    device = home_device(config.parallel.layout, device, first_gpu)
    like = torch.zeros((), device=device, dtype=DTYPES[config.trainer.dtype])
    # First of all: it refuses a batch that does not divide among the data ranks.
    sequence = build_sequence(config, prepared, manager)
    model = build_parts(config, prepared, manager, like, first_gpu)
    rows = manager.rows(prepared.store.grid[0])
    loader = Loader(
        prepared,
        "train",
        rows,
        sequence,
        like.dtype,
        config.data.prefetch,
        like.device,
        config.model.frames,
        reads_of(config, manager),
        share_reading(prepared.store, manager),
        rollout_lengths(config, sequence),
    )
    parameters = named_parameters(model.parts)
    layout = state_layout(parameters, config.optimizer, config.parallel)
    optimiser = build_optimiser(parameters, config.optimizer)
    schedule = build_schedule(optimiser, config.optimizer, config.trainer.steps)
    data = describe_data(prepared, config.model)
    average = None
    if config.optimizer.ema is not None:
        average = WeightAverage(saved_parameters(model.parts), config.optimizer.ema)
    state = TrainingState(
        model.parts,
        optimiser,
        schedule,
        loader,
        data,
        config.seed,
        static=lambda: prepared.store.static(slice(None)),
        valid=lambda: prepared.store.masks(slice(None)),
        average=average,
        optimizer=config.optimizer.name,
        layout=layout,
    )
    forecast, loss = build_step(config, prepared, manager, model.forecasting, like)
    gradients = model.gradients(config, manager, forecast, loss)
    every = config.parallel.check_replicas_every
    variables = tuple(channel.variable for channel in prepared.store.channels.out)
    names = LossNames(variables, prepared.store.config.step_hours)
    trainer = Trainer(config.trainer, state, gradients, manager, every, names=names)
    let_senders_finish()  # in groups that were made meanwhile
    return Training(trainer, loader, forecast, like, rows)


def build_step(
    config: Config,
    prepared: Prepared,
    manager: DomainParallelManager,
    model: Model,
    like: Tensor,
) -> tuple[ForecastStep, WeightedLoss]:
    """What is made of the model's output, and how far that is from the truth.

    Collective where a variable has points without values.

    Raises:
        UserError: see `build_loss`.
    """
    store = prepared.store
    rows = manager.rows(store.grid[0])
    normaliser = Normaliser.of(prepared, like.dtype, like.device)
    tendency = normaliser.tendency_scale[: store.channels.states]
    scale = torch.cat([tendency, tendency.new_ones(len(store.channels.diagnostic), 1, 1)])
    points = ValidPoints.of(store.masks(rows), like, manager.transport.sum)
    loss = build_loss(config.loss, store.channels, store.latitude, rows, scale, points)
    fill = None
    if points is not None:
        fill = partial(points.filled, fills=normaliser.fills)
    return ForecastStep(model, tendency, config.model.residual, fill), loss


def reads_of(config: Config, manager: DomainParallelManager) -> Reads:
    """What of a sample this rank's stages need: the first inputs, the last what the loss does."""
    first = manager.pipeline_rank == 0
    last = manager.pipeline_rank == manager.pipeline_parallel_size - 1
    return Reads(inputs=first, last=last and config.model.residual, target=last)


def build_sequence(
    config: Config, prepared: Prepared, manager: DomainParallelManager
) -> SampleSequence:
    """The order in which this rank meets its share of the samples.

    Raises:
        UserError: the global batch does not divide among the data ranks, or samples are too few.
    """
    return SampleSequence(
        len(
            sample_times(
                prepared.store, "train", config.model.frames, config.trainer.longest_rollout
            )
        ),
        config.data.batch_size,
        manager.dp_rank,
        manager.dp_world_size,
        config.seed,
    )


def rollout_lengths(config: Config, sequence: SampleSequence) -> Lengths:
    """How long the rollout of each batch is: batch number n is that of optimiser step n."""
    trainer, batches = config.trainer, sequence.batches_per_epoch
    return Lengths(trainer.longest_rollout, partial(trainer.rollout_at, steps_per_epoch=batches))

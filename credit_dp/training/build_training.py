"""Builds a training run from the config: model, loader, loss, optimizer and trainer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from credit_dp.config import Config, DiffusionConfig, ModelConfig, TrainerConfig
from credit_dp.data.loader import BatchSelection, Loader
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.sampling import RolloutLengths, SampleSequence, sample_times
from credit_dp.data.setup import TrainingData
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import use_batch_scheduling_for_gloo
from credit_dp.errors import UserError
from credit_dp.physics.columns import pressures_of
from credit_dp.pipeline_parallel.module_placement import model_output_device
from credit_dp.training.augmentation import build_augmentation
from credit_dp.training.cuda_graph import StepGraph, use_own_stream
from credit_dp.training.data_description import describe_data
from credit_dp.training.diffusion import Denoising
from credit_dp.training.forecast_step import (
    EnsembleForecast,
    ForecastStep,
    Model,
    build_forecast_step,
)
from credit_dp.training.loss import WeightedLoss, build_loss
from credit_dp.training.model_parts import build_model_parts
from credit_dp.training.optim import (
    WeightAverage,
    build_optimizer,
    build_schedule,
    learning_rate_factors,
)
from credit_dp.training.shared_reading import build_chunk_exchange
from credit_dp.training.state import TrainingState, named_parameters, trainable_saved_parameters
from credit_dp.training.trainer import LossNames, Trainer, own_members


@final
@dataclass(frozen=True)
class Training:
    """A training run that is ready to start.

    Attributes:
        trainer: takes the steps.
        loader: reads the batches.
        forecast_step: for forecasts outside training; collective with a pipeline or fsdp2.
        ensemble: the same with all members.
        like: a tensor with the device and dtype of all fields.
        rows: the band of this rank.
    """

    trainer: Trainer
    loader: Loader
    forecast_step: ForecastStep
    ensemble: EnsembleForecast
    like: Tensor
    rows: slice


def build_training(
    config: Config, prepared: TrainingData, manager: DomainParallelManager, device: torch.device
) -> Training:
    """Build a training run for this rank; collective, as process groups are created.

    Ranks differ in their rows, pipeline stages, samples and members only.

    Raises:
        UserError: the config does not fit the data, the grid or the mesh.
    """
    if config.trainer.cuda_graph:
        if device.type != "cuda":
            raise UserError(
                f"trainer.cuda_graph: needs a GPU, got device={device.type}. Set "
                "trainer.cuda_graph=false."
            )
        use_own_stream(device)
    first_gpu = device.index or 0  # before `device` becomes that of the model's output
    device = model_output_device(config.parallel.layout, device, first_gpu)
    like = torch.zeros((), device=device, dtype=getattr(torch, config.trainer.dtype))
    # Before the model, which takes longer: a batch must divide among the data ranks.
    sequence = build_sample_sequence(config, prepared, manager)
    model = build_model_parts(config, prepared, manager, like, first_gpu)
    rows = manager.rows(prepared.store.grid[0])
    loader = Loader(
        prepared,
        "train",
        rows,
        sequence,
        dtype=like.dtype,
        prefetch=config.data.prefetch,
        device=like.device,
        frames=config.model.frames,
        selection=batch_selection_of_rank(config.model, manager),
        exchange=build_chunk_exchange(prepared.store, manager),
        rollout_lengths=rollout_lengths(config.trainer, sequence),
    )
    # Taken after sharding, which replaces parameters: the optimizer must update the shards.
    parameters = named_parameters(model.parts)
    factors = learning_rate_factors(model.parts, config.optimizer)
    skips_on_device = config.trainer.check_finite == "late"
    optimizer = build_optimizer(
        parameters, config.optimizer, factors, skips_on_device=skips_on_device
    )
    schedule = build_schedule(optimizer, config.optimizer, config.trainer.steps)
    data = describe_data(prepared, config.model)
    average = None
    if config.optimizer.ema is not None:
        average = WeightAverage(trainable_saved_parameters(model.parts), config.optimizer.ema)
    state = TrainingState(
        model.parts,
        optimizer,
        schedule,
        loader,
        data,
        config.seed,
        static=lambda: prepared.store.read_static(slice(None)),
        valid=lambda: prepared.store.valid_mask(slice(None)),
        average=average,
        optimizer_name=config.optimizer.name,
    )
    forecast_step, loss = build_forecast_step_and_loss(
        config, prepared, manager, model.forecast_model, like
    )
    denoising = None
    trained_step = forecast_step
    if isinstance(config.model, DiffusionConfig):
        trained_step = forecast_step.without_fixers()
        denoising = Denoising(config.model, trained_step, rows, config.seed, loss.points)
    forward_backward = model.build_forward_backward(config, manager, trained_step, loss)
    check_every = config.parallel.check_replicas_every
    variables = tuple(channel.variable for channel in prepared.store.channels.output_channels)
    names = LossNames(variables, prepared.store.config.step_hours)
    augmentation = build_augmentation(config, prepared, manager, like)
    graph = None
    if config.trainer.cuda_graph:
        traffic = [manager.transport.traffic, manager.ensemble_transport.traffic]
        graph = StepGraph(forward_backward, state.trainable_parameters.values(), traffic)
    trainer = Trainer(
        config.trainer,
        state,
        forward_backward,
        manager,
        check_every,
        names,
        augmentation,
        denoising,
        graph,
    )
    use_batch_scheduling_for_gloo()  # again, for the threads of groups that were created since
    members = own_members(config.trainer.scored_members, manager)
    ensemble = EnsembleForecast(
        forecast_step, model.draw_noise, members, config.seed, manager.ensemble_transport
    )
    return Training(trainer, loader, forecast_step, ensemble, like, rows)


def build_forecast_step_and_loss(
    config: Config,
    prepared: TrainingData,
    manager: DomainParallelManager,
    model: Model,
    like: Tensor,
) -> tuple[ForecastStep, WeightedLoss]:
    """Return the forecast step around a model, and the loss of its forecasts.

    Collective if a variable has points without values.
    """
    store = prepared.store
    rows = manager.rows(store.grid[0])
    normaliser = Normaliser.of(prepared, like.dtype, like.device)
    tendency = normaliser.tendency_scale[: store.channels.num_states]
    scale = torch.cat([tendency, tendency.new_ones(len(store.channels.diagnostic), 1, 1)])
    points = ValidPoints.of(store.valid_mask(rows), like)
    scored = ValidPoints.of(store.scored_mask(rows), like, manager.transport.all_reduce)
    pressures = pressures_of(store) if config.loss.level_weight else None
    loss = build_loss(
        config.loss, store.channels, store.grid, rows, scale, scored, manager, pressures
    )
    step = build_forecast_step(
        config.model, prepared, manager, model, normaliser, points, store.given_share(rows)
    )
    return step, loss


def batch_selection_of_rank(model: ModelConfig, manager: DomainParallelManager) -> BatchSelection:
    """Return the parts of a sample that this rank's stages need.

    The first pipeline rank needs the inputs, the last one what the loss is computed from. In
    diffusion a noisy target is among the inputs, and both depend on the newest state.
    """
    first = manager.pipeline_rank == 0
    last = manager.pipeline_rank == manager.pipeline_parallel_size - 1
    uses_state = model.residual or bool(model.fixers)
    target = last or (first and model.denoises)
    return BatchSelection(inputs=first, last=last and uses_state, target=target)


def build_sample_sequence(
    config: Config, prepared: TrainingData, manager: DomainParallelManager
) -> SampleSequence:
    """Return the order in which this rank reads its samples.

    Raises:
        UserError: the global batch does not divide among the data ranks, or samples are too few.
    """
    times = sample_times(
        prepared.store, "train", config.model.frames, config.trainer.longest_rollout
    )
    return SampleSequence(
        prepared.store.num_members * len(times),
        config.data.batch_size,
        manager.dp_rank,
        manager.dp_world_size,
        config.seed,
    )


def rollout_lengths(trainer: TrainerConfig, sequence: SampleSequence) -> RolloutLengths:
    """Return the rollout length of each batch; batch number n is that of optimizer step n."""
    batches = sequence.batches_per_epoch
    return RolloutLengths(
        trainer.longest_rollout, partial(trainer.rollout_at, steps_per_epoch=batches)
    )

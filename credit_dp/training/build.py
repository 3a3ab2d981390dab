"""Puts a training run together: model, shards, optimizer, loss and loader, from the config."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from credit_dp import checks
from credit_dp.config import (
    Config,
    OwnLossConfig,
    OwnModelConfig,
    ParallelConfig,
    microbatches_per_step,
)
from credit_dp.data.loader import BatchSelection, Loader, Normaliser
from credit_dp.data.sampling import RolloutLengths, SampleSequence, sample_times
from credit_dp.data.setup import TrainingData
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.planning.plan import check_model
from credit_dp.domain_parallel.transport import use_batch_scheduling_for_gloo
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import ValidPoints
from credit_dp.models import build_model
from credit_dp.models.blocks import number_stochastic_depths
from credit_dp.pipeline_parallel.placement import model_output_device, place_model
from credit_dp.pipeline_parallel.stages import Stage, cut_model, segment_costs, stage_slices
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.data_description import describe_data
from credit_dp.training.forecast_step import ForecastStep, Model
from credit_dp.training.forward_backward import (
    ActivationCheckpointWrapper,
    ForwardBackward,
    ModelForwardBackward,
    PipelineForwardBackward,
    new_stage_group,
)
from credit_dp.training.loss import WeightedLoss, build_loss, build_plugin_error
from credit_dp.training.optim import (
    WeightAverage,
    build_optimizer,
    build_schedule,
    check_schedule,
    state_layout,
)
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters
from credit_dp.training.shared_reading import build_chunk_exchange
from credit_dp.training.state import named_parameters, trainable_saved_parameters
from credit_dp.training.trainer import LossNames, Trainer

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let nothing train whose name one of the patterns matches, in the whole model, in place.

    Args:
        model: all of it, so that every rank of a mesh freezes, or refuses, the same.
        patterns: of full names of parameters, with the wildcards of file names.

    Raises:
        UserError: a pattern matches no parameter, or none is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"trainer.freeze: needs patterns of parameters' names, but {pattern!r} matches "
                f"none of {len(parameters)}.{_suggest_pattern(pattern, parameters)}"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"trainer.freeze: leaves no parameter to train, it matches all {len(parameters)}. "
            "Take patterns out of trainer.freeze."
        )


def _suggest_pattern(pattern: str, names: Collection[str]) -> str:
    """What may have been meant: a module's name lacks the wildcard."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" Did you mean {pattern}.*?"
    return checks.did_you_mean(pattern, names) or f" Names are like {next(iter(names), '')}."


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Let a model be compiled at its first call, in place: names of parameters stay.

    Args:
        model: converted and shared out already.
        device: on which it computes.

    Raises:
        UserError: the CPU's code needs a C++ compiler, and there is none.
    """
    if device.type == "cpu":
        # Where torch's compiler looks for it.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(name) is None:
            raise UserError(
                f"compile: needs a C++ compiler on the CPU, but {name} is not found. Install one, "
                "name it in the environment variable CXX, or set compile=false."
            )
    model.compile()


def enable_autocast(part: nn.Module, dtype: torch.dtype, like: Tensor) -> None:
    """Let a model, or a stage of one, run under autocast, in place.

    Weights, their gradients and updates keep their dtype. What it returns has that of `like`: the
    loss is computed in that, and stages of a pipeline hand it on.

    Args:
        part: ready to be called; whatever calls it, it computes so.
        dtype: of the layers for which torch's autocast takes it to be safe.
        like: has the device it computes on, and the dtype of what it returns.
    """
    forward, device = part.forward, like.device.type

    def restored(x: Tensor) -> Tensor:
        return x.to(like.dtype) if x.is_floating_point() else x

    def forward_in(*inputs: Any) -> Any:
        with torch.autocast(device, dtype):
            made = forward(*inputs)
        return tree_map_only(Tensor, restored, made)

    part.forward = forward_in


@final
@dataclass(frozen=True)
class ModelParts:
    """What this rank has of the model.

    Attributes:
        parts: its stretches of it, converted to this rank's rows; see `TrainingState`.
        pipeline: of which they are the stages, if there is one.
    """

    parts: tuple[nn.Module, ...]
    pipeline: Pipeline | None = None

    @property
    def forecast_model(self) -> Model:
        """The whole model outside of training, on all ranks of a pipeline together."""
        return self.parts[0] if self.pipeline is None else self.pipeline.forward

    def build_forward_backward(
        self,
        config: Config,
        manager: DomainParallelManager,
        forecast: ForecastStep,
        loss: WeightedLoss,
    ) -> ForwardBackward:
        """How gradients come about: `forecast` says what is made of the model's output."""
        micros = microbatches_per_step(config)
        ddp = config.parallel.data_mode == "ddp"
        if self.pipeline is not None:
            group = new_stage_group(manager) if ddp else None
            return PipelineForwardBackward(self.pipeline, forecast, loss, micros, manager, group)
        model = self.parts[0]
        if config.trainer.checkpoint_activations:
            model = ActivationCheckpointWrapper(model)
        if ddp and manager.world_size > 1:
            model = wrap_in_ddp(model, config.parallel)
        return ModelForwardBackward(
            model, forecast.of(model), loss, micros, manager.domain_world_size
        )


def build_model_parts(
    config: Config,
    prepared: TrainingData,
    manager: DomainParallelManager,
    like: Tensor,
    first_gpu: int = 0,
) -> ModelParts:
    """Build the model and what this rank holds of it, with the same parameters on every mesh.

    Args:
        config: of the run.
        prepared: says which fields there are, on which grid.
        manager: this rank's place in the mesh.
        like: has the dtype of the model, and the device of its output.
        first_gpu: the GPU that `cuda:0` of a layout stands for on this rank.

    Raises:
        UserError: the model or the mesh does not fit the grid, or the model can't be cut or placed.
    """
    store, parallel = prepared.store, config.parallel
    # Every rank draws the whole model from the same seed: no weights need to be sent.
    torch.manual_seed(config.seed)
    fields = store.channels.fields(config.model.frames)
    model = build_model(config.model, fields, store.grid)
    if isinstance(config.model, OwnModelConfig):
        check_model(model, fields.inputs, fields.outputs, store.grid)
    number_stochastic_depths(model)
    freeze(model, config.trainer.freeze)
    shares = fsdp_mesh(manager) if parallel.data_mode == "fsdp2" else None
    batch = config.data.batch_size // manager.dp_world_size // microbatches_per_step(config)
    shape = (batch, fields.inputs, *store.grid)
    if parallel.pipeline > 1:
        # Here, for torch's schedules bring its compiler, which takes a second: for pipelines alone.
        from credit_dp.pipeline_parallel.pipeline import Pipeline

        model = model.to(like.dtype)
        stages = _build_stages(model, parallel, manager, shape)
        for stage in stages:
            _move_and_shard(stage.module, shares, parallel, like)
            _enable_configured_autocast(stage.module, config, like)
        pipeline = Pipeline(stages, manager, parallel.schedule, microbatches_per_step(config))
        return ModelParts(pipeline.parts, pipeline)
    model = shard_model(model.to(like.dtype), manager, shape)
    _move_and_shard(model, shares, parallel, like)
    model = place_model(model, parallel.layout, first_gpu)
    _enable_configured_autocast(model, config, like)
    if config.compile:
        compile_model(model, like.device)
    return ModelParts((model,))


def _build_stages(
    model: nn.Module,
    parallel: ParallelConfig,
    manager: DomainParallelManager,
    shape: Sequence[int],
) -> list[Stage]:
    """This rank's stages, cut after conversion, at places that are the same on every rank."""
    costs = segment_costs(model, shape)  # of the whole globe, for bands differ
    virtual = parallel.virtual_stages
    cuts = stage_slices(costs, parallel.pipeline * virtual, parallel.stages, virtual=virtual)
    return cut_model(shard_model(model, manager, shape), manager, cuts, shape)


def _move_and_shard(
    part: nn.Module, shares: DeviceMesh | None, parallel: ParallelConfig, like: Tensor
) -> None:
    """Bring a part to its device, and its parameters to the data ranks, if they share them."""
    if shares is None or not parallel.cpu_offload:
        part.to(like.device)
    if shares is not None:
        shard_parameters(part, shares, parallel, like.dtype)


def _enable_configured_autocast(part: nn.Module, config: Config, like: Tensor) -> None:
    """Let a part compute in the dtype that the config asks for, if it does."""
    if config.trainer.autocast is not None:
        enable_autocast(part, getattr(torch, config.trainer.autocast), like)


def wrap_in_ddp(model: nn.Module, parallel: ParallelConfig) -> nn.Module:
    """The model, its gradients averaged over all ranks of the run."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    on_one_gpu = device.type == "cuda" and not parallel.layout
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name still sends buffers once, and 2.11
        # does not know it.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[device] if on_one_gpu else None,
            broadcast_buffers=False,  # they follow from the config, and may be of own rows
            gradient_as_bucket_view=True,
        )


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


def check_plugins(config: Config) -> None:
    """Refuse a loss or a schedule of the user's own for what can be said of it without data.

    Raises:
        UserError: see `build_plugin_error` and `check_schedule`.
    """
    if isinstance(config.loss, OwnLossConfig):
        build_plugin_error(config.loss, torch.zeros((), dtype=DTYPES[config.trainer.dtype]))
    check_schedule(config.optimizer, config.trainer.steps)


def build_training(
    config: Config, prepared: TrainingData, manager: DomainParallelManager, device: torch.device
) -> Training:
    """Build everything that trains, the same on every rank but for its rows, stages and samples.

    Raises:
        UserError: what was asked for does not exist, does not fit the grid, or does not divide.
    """
    first_gpu = device.index or 0  # before the layout says where the output goes
    device = model_output_device(config.parallel.layout, device, first_gpu)
    like = torch.zeros((), device=device, dtype=DTYPES[config.trainer.dtype])
    # First of all: it refuses a batch that does not divide among the data ranks.
    sequence = build_sample_sequence(config, prepared, manager)
    model = build_model_parts(config, prepared, manager, like, first_gpu)
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
        batch_selection_of_rank(config, manager),
        build_chunk_exchange(prepared.store, manager),
        rollout_lengths(config, sequence),
    )
    parameters = named_parameters(model.parts)
    layout = state_layout(parameters, config.optimizer, config.parallel)
    optimiser = build_optimizer(parameters, config.optimizer)
    schedule = build_schedule(optimiser, config.optimizer, config.trainer.steps)
    data = describe_data(prepared, config.model)
    average = None
    if config.optimizer.ema is not None:
        average = WeightAverage(trainable_saved_parameters(model.parts), config.optimizer.ema)
    state = TrainingState(
        model.parts,
        optimiser,
        schedule,
        loader,
        data,
        config.seed,
        static=lambda: prepared.store.static(slice(None)),
        valid=lambda: prepared.store.valid_mask(slice(None)),
        average=average,
        optimizer_name=config.optimizer.name,
        layout=layout,
    )
    forecast, loss = build_forecast_step_and_loss(
        config, prepared, manager, model.forecast_model, like
    )
    gradients = model.build_forward_backward(config, manager, forecast, loss)
    every = config.parallel.check_replicas_every
    variables = tuple(channel.variable for channel in prepared.store.channels.output_channels)
    names = LossNames(variables, prepared.store.config.step_hours)
    trainer = Trainer(config.trainer, state, gradients, manager, every, names=names)
    use_batch_scheduling_for_gloo()  # in groups that were made meanwhile
    return Training(trainer, loader, forecast, like, rows)


def build_forecast_step_and_loss(
    config: Config,
    prepared: TrainingData,
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
    points = ValidPoints.of(store.valid_mask(rows), like, manager.transport.sum)
    loss = build_loss(config.loss, store.channels, store.latitude, rows, scale, points)
    fill = None
    if points is not None:
        fill = partial(points.fill_invalid, fills=normaliser.fills)
    return ForecastStep(model, tendency, config.model.residual, fill), loss


def batch_selection_of_rank(config: Config, manager: DomainParallelManager) -> BatchSelection:
    """What of a sample this rank's stages need: the first inputs, the last what the loss does."""
    first = manager.pipeline_rank == 0
    last = manager.pipeline_rank == manager.pipeline_parallel_size - 1
    return BatchSelection(inputs=first, last=last and config.model.residual, target=last)


def build_sample_sequence(
    config: Config, prepared: TrainingData, manager: DomainParallelManager
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


def rollout_lengths(config: Config, sequence: SampleSequence) -> RolloutLengths:
    """How long the rollout of each batch is: batch number n is that of optimiser step n."""
    trainer, batches = config.trainer, sequence.batches_per_epoch
    return RolloutLengths(
        trainer.longest_rollout, partial(trainer.rollout_at, steps_per_epoch=batches)
    )

"""Builds this rank's parts of the model, the same on every mesh: `build_model_parts`.

1. Build the complete model on every rank from the same seed, in the host's memory, and freeze
   parameters.
2. Convert its layers to work on this rank's band of rows (`shard_model`); with a pipeline, also cut
   it into stages.
3. Move it to the device. With FSDP2, block by block, of which a rank keeps its shards.
4. Checkpoint the activations of its blocks, enable autocast and compile.

DDP and checkpointing of whole steps wrap the model only where gradients are computed
(`ModelParts.build_forward_backward`), so that names of parameters do not depend on them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from credit_dp import checks
from credit_dp.config import (
    Config,
    DiffusionConfig,
    ModelConfig,
    MuonConfig,
    OwnModelConfig,
    ParallelConfig,
    TrainerConfig,
    members_per_rank,
    microbatches_per_step,
)
from credit_dp.data.setup import TrainingData
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.planning.model_plan import check_model, parameters_outside_graph
from credit_dp.domain_parallel.recomputation import checkpoint_modules
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model, cast_model
from credit_dp.models.blocks import (
    draw_noise,
    draws_from_torch,
    keep_draws,
    number_stochastic_depths,
)
from credit_dp.pipeline_parallel.module_placement import place_model
from credit_dp.pipeline_parallel.stages import Stage, cut_model, segment_costs, stage_slices
from credit_dp.random_streams import random_seed, seed_python
from credit_dp.torch_private import apply_to_tensors, never_measure, tree_map_only
from credit_dp.training.compilation import compile_model, obstacle_to_compilation
from credit_dp.training.diffusion import Sampler
from credit_dp.training.forecast_step import ForecastStep, Model, NoiseKeys
from credit_dp.training.forward_backward import (
    ActivationCheckpointWrapper,
    ForwardBackward,
    ModelForwardBackward,
    PipelineForwardBackward,
    new_stage_group,
    recomputed_modules,
)
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)


def enable_autocast(part: nn.Module, dtype: torch.dtype, like: Tensor) -> None:
    """Run a model, or a stage of one, under autocast, in place.

    Weights, gradients and updates keep their dtype. Outputs have the dtype of `like`: the loss is
    computed in it, and pipeline stages send it to the next stage.

    Args:
        like: has the device of the computation, and the dtype of outputs.
    """
    forward = part.forward
    device_type = like.device.type

    def restore_dtype(x: Tensor) -> Tensor:
        return x.to(like.dtype) if x.is_floating_point() else x

    def forward_with_autocast(*inputs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            output = forward(*inputs)
        return tree_map_only(Tensor, restore_dtype, output)

    # Replacing `forward` rather than wrapping the module keeps the names of parameters.
    part.forward = forward_with_autocast


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of 2-D convolutions in channels-last memory, in place.

    Convolutions return fields in the memory format of their weights.
    """

    def convert(x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            apply_to_tensors(module, convert, recurse=False)


@final
@dataclass(frozen=True)
class ModelParts:
    """The parts of the model that this rank holds.

    Attributes:
        parts: the pipeline stages of this rank, or the complete model without a pipeline; both
            converted to this rank's rows.
        pipeline: the pipeline of these stages, if there is one.
        sampler: samples the output of a diffusion model, if it is one.
        without_gradient: names of parameters that the output does not depend on.
    """

    parts: tuple[nn.Module, ...]
    pipeline: Pipeline | None = None
    sampler: Sampler | None = None
    without_gradient: tuple[str, ...] = ()

    @property
    def network(self) -> Model:
        """Return the complete network for use outside training; collective with a pipeline."""
        return self.parts[0] if self.pipeline is None else self.pipeline.forward

    @property
    def forecast_model(self) -> Model:
        """Return what forecasts: the network, or a sampler that calls it; collective likewise."""
        return self.network if self.sampler is None else self.sampler

    def draw_noise(self, keys: NoiseKeys) -> None:
        """Draw the noise of the coming call of `forecast_model`, if it has any."""
        if self.sampler is not None:
            self.sampler.keys = keys
            return
        for part in self.parts:
            draw_noise(part, keys)

    def build_forward_backward(
        self,
        config: Config,
        manager: DomainParallelManager,
        forecast_step: ForecastStep,
        loss: WeightedLoss,
    ) -> ForwardBackward:
        """Return the object that computes the gradients of a batch on this mesh."""
        n_microbatches = microbatches_per_step(config)
        uses_ddp = config.parallel.data_mode == "ddp"
        if self.pipeline is not None:
            group = new_stage_group(manager) if uses_ddp else None
            return PipelineForwardBackward(
                self.pipeline,
                forecast_step,
                loss,
                n_microbatches,
                manager,
                group,
                members_per_rank(config),
            )
        model = self.parts[0]
        without_gradient = [model.get_parameter(name) for name in self.without_gradient]
        # Inside DDP, whose forward would otherwise run once more in the backward pass.
        if config.trainer.checkpoint_activations == "step":
            model = ActivationCheckpointWrapper(model)
        if uses_ddp and manager.world_size > 1:
            model = wrap_in_ddp(model, config.parallel, without_gradient)
        return ModelForwardBackward(
            model,
            forecast_step.with_model(model),
            loss,
            n_microbatches,
            manager.ranks_per_sample,
            sum_whole_gradients=config.parallel.sums_whole_gradients,
            members=members_per_rank(config),
            without_gradient=without_gradient,
        )


def build_model_parts(
    config: Config,
    prepared: TrainingData,
    manager: DomainParallelManager,
    like: Tensor,
    first_gpu: int = 0,
) -> ModelParts:
    """Build the model, and its sampler if it is a diffusion model; see `build_network`."""
    parts = build_network(config, prepared, manager, like, first_gpu)
    if not isinstance(config.model, DiffusionConfig):
        return parts
    store = prepared.store
    rows = manager.rows(store.grid[0])
    points = ValidPoints.of(store.scored_mask(rows), like)
    outputs = store.channels.num_outputs
    sampler = Sampler(config.model, parts.network, parts.parts, outputs, rows, points)
    return replace(parts, sampler=sampler)


def build_network(
    config: Config,
    prepared: TrainingData,
    manager: DomainParallelManager,
    like: Tensor,
    first_gpu: int = 0,
) -> ModelParts:
    """Build the model and return this rank's parts, with the same initial weights on every mesh.

    Args:
        like: has the dtype of the model, and the device of its output.
        first_gpu: the GPU that `cuda:0` in `parallel.layout` means on this rank.

    Raises:
        UserError: the model or the mesh does not fit the grid, or the model can't be cut or placed.
    """
    store = prepared.store
    parallel = config.parallel
    mesh = fsdp_mesh(manager) if parallel.data_mode == "fsdp2" else None
    fields = store.channels.fields(config.model.frames, config.model.denoises)
    # Every rank draws the complete model from the same seed, so that no weights are sent.
    torch.manual_seed(config.seed)
    seed_python(random_seed(config.seed))  # plans of models that draw by them are then alike
    model = build_model(config.model, fields, store.grid)
    check_has_values(model)
    check_planned_model(model, config.model, fields, store.grid)
    # Before the model is cut: layers are numbered, and patterns matched, over the complete model.
    number_stochastic_depths(model)
    check_parameter_patterns(model, config)
    freeze(model, config.trainer.freeze)
    if config.trainer.channels_last:
        use_channels_last(model)
    batch = config.data.batch_size // manager.dp_world_size // microbatches_per_step(config)
    shape = (batch * members_per_rank(config), fields.inputs, *store.grid)
    if parallel.pipeline > 1:
        # Imported here: torch's pipeline schedules import its compiler, which takes a second.
        from credit_dp.pipeline_parallel.pipeline import Pipeline

        model = cast_model(model, like.dtype)
        stages = _build_stages(model, parallel, manager, shape)
        for stage in stages:
            _move_and_shard(stage.module, mesh, parallel, like)
            _enable_configured_autocast(stage.module, config.trainer, like)
        pipeline = Pipeline(stages, manager, parallel.schedule, microbatches_per_step(config))
        return ModelParts(pipeline.stage_modules, pipeline)
    without_gradient: tuple[str, ...] = ()
    if isinstance(config.model, OwnModelConfig) and mesh is None and manager.world_size > 1:
        without_gradient = parameters_outside_graph(model, fields.inputs, store.grid)
    # Of the complete model: conversion changes types.
    blocks = recomputed_modules(model, config, parallel.domain)
    model = cast_model(model, like.dtype)
    model = shard_model(model, manager, shape, parallel.whole_ops, parallel.whole_ops_limit)
    _set_loss_factor(model, manager)
    _move_and_shard(model, mesh, parallel, like)
    model = place_model(model, parallel.layout, first_gpu)
    if config.trainer.checkpoint_activations == "blocks":
        checkpoint_modules(model, blocks, keep_draws)
    elif config.trainer.checkpoint_activations == "false":  # by model.activation_checkpointing
        checkpoint_modules(model, blocks, keep_draws, draws_from_torch)
    _enable_configured_autocast(model, config.trainer, like)
    if config.compile:
        obstacle = obstacle_to_compilation(model, config.model)
        if not obstacle:
            compile_model(model, like.device)
        elif manager.rank == 0:
            logger.warning("compile: %s", obstacle)
    return ModelParts((model,), without_gradient=without_gradient)


def _build_stages(
    model: nn.Module,
    parallel: ParallelConfig,
    manager: DomainParallelManager,
    shape: Sequence[int],
) -> list[Stage]:
    # Costs are those of the unsharded model: bands differ in size, so each rank would cut the
    # converted model elsewhere.
    costs = segment_costs(model, shape)
    virtual = parallel.virtual_stages
    cuts = stage_slices(costs, parallel.pipeline * virtual, parallel.stages, virtual=virtual)
    converted = shard_model(model, manager, shape, parallel.whole_ops, parallel.whole_ops_limit)
    stages = cut_model(converted, manager, cuts, shape)
    for stage in stages:
        _set_loss_factor(stage.module, manager)
    return stages


def _set_loss_factor(part: nn.Module, manager: DomainParallelManager) -> None:
    """Tell the domain of a part, if it has one, what `ForwardBackward` multiplies the loss by."""
    domain = attached_domain(part)
    if domain is not None:
        domain.loss_factor = manager.ranks_per_sample


def _move_and_shard(
    part: nn.Module,
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    like: Tensor,
) -> None:
    """Move a part to its device, or have FSDP2 move and shard it over the `mesh`."""
    if mesh is None:
        apply_to_tensors(part, lambda x: x.to(like.device))
    else:
        shard_parameters(part, mesh, parallel, like.dtype)


def _enable_configured_autocast(part: nn.Module, trainer: TrainerConfig, like: Tensor) -> None:
    if trainer.autocast is not None:
        enable_autocast(part, getattr(torch, trainer.autocast), like)


def wrap_in_ddp(
    model: nn.Module, parallel: ParallelConfig, without_gradient: Sequence[nn.Parameter] = ()
) -> nn.Module:
    """Wrap a model in DDP, which averages its gradients over all ranks of the run.

    DDP waits for the gradient of each parameter that learns when it wraps the model: parameters
    that never get one learn only afterwards.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    on_one_gpu = device.type == "cuda" and not parallel.layout
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers. The new name still sends buffers once, and torch
        # 2.11 does not have it.
        warnings.simplefilter("ignore", FutureWarning)
        for parameter in without_gradient:
            parameter.requires_grad_(False)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if on_one_gpu else None,
            # Buffers follow from the config, so they need not be sent. Buffers of a band of rows
            # differ between ranks: rank 0's must not replace them.
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    # It would measure one forward pass in a hundred by events, which a CUDA graph can't hold.
    never_measure(wrapped)
    for parameter in without_gradient:
        parameter.requires_grad_(True)
    return wrapped


# Checks of the complete model, before it is sharded: all ranks raise the same errors.


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern, in place.

    Args:
        model: the complete model, so that all ranks freeze the same and raise the same errors.
        patterns: full names of parameters, with the wildcards of file names.

    Raises:
        UserError: a pattern matches no parameter, or no parameter is left to train.
    """
    for parameter in parameters_to_freeze(model, patterns):
        parameter.requires_grad_(False)


def parameters_to_freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters whose names match a pattern; see `freeze`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matching = [
        parameters[name]
        for pattern in patterns
        for name in match_names("trainer.freeze", pattern, parameters)
    ]
    frozen = set(map(id, matching))
    trained = [p for p in parameters.values() if p.requires_grad and id(p) not in frozen]
    if patterns and not trained:
        raise UserError(
            "trainer.freeze: leaves no parameter to train, it matches all "
            f"{len(parameters)}. Remove patterns from trainer.freeze."
        )
    return matching


def check_planned_model(
    model: nn.Module, config: ModelConfig, fields: Fields, grid: tuple[int, int]
) -> None:
    """Refuse a model that a run would refuse, as far as that is known without its weights.

    Args:
        model: complete and unconverted; its parameters may be on the meta device.

    Raises:
        UserError: it has lazy layers, fails, or returns another shape than is needed.
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            raise _no_values_error(name)
    if isinstance(config, OwnModelConfig):
        check_model(model, fields.inputs, fields.outputs, grid)


def _no_values_error(name: str) -> UserError:
    return UserError(
        f"model: {name} has no values: it is of a lazy layer, or on the meta device. Give it its "
        "size and its values where the model is built."
    )


def check_has_values(model: nn.Module) -> None:
    """Refuse parameters and buffers without values."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or x.is_meta:
            raise _no_values_error(name)


def check_parameter_patterns(model: nn.Module, config: Config) -> None:
    """Refuse patterns of the config that match no parameter of a complete model, or freeze all."""
    parameters_to_freeze(model, config.trainer.freeze)
    if isinstance(config.optimizer, MuonConfig):
        # The optimizer knows a shared parameter under the first of its names only.
        first_names = dict(model.named_parameters())
        for pattern in config.optimizer.adamw:
            match_names("optimizer.adamw", pattern, first_names)


def match_names(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names of parameters that a pattern of a config key matches.

    Raises:
        UserError: there is none.
    """
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise UserError(
            f"{key}: needs patterns of parameters' names, but {pattern!r} matches none of "
            f"{len(names)}.{_suggest_pattern(pattern, names)}"
        )
    return matched


def _suggest_pattern(pattern: str, names: Collection[str]) -> str:
    if any(name.startswith(f"{pattern}.") for name in names):  # a wildcard is missing
        return f" Did you mean {pattern}.*?"
    return checks.did_you_mean(pattern, names) or f" Names are like {next(iter(names), '')}."

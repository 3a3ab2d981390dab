"""Builds a training run from the config: model, optimizer, loss, loader and trainer.

`build_training` is the entry. The model goes through `build_model_parts`, in this order:

1. Build the complete model on every rank from the same seed, and freeze parameters. If FSDP2 is to
   shard the parameters, they stay without data for now.
2. Convert its layers to work on this rank's band of rows (`shard_model`); with a pipeline, also cut
   it into stages.
3. Move it to the device, and shard its parameters with FSDP2 if the config says so. Each rank then
   computes its shards of the initial weights.
4. Checkpoint the activations of its blocks, enable autocast and compile.

DDP and checkpointing of whole steps wrap the model only where gradients are computed
(`ModelParts.build_forward_backward`), so that names of parameters do not depend on them.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from credit_dp import checks
from credit_dp.config import (
    Config,
    DiffusionConfig,
    ModelConfig,
    MuonConfig,
    OwnLossConfig,
    OwnModelConfig,
    ParallelConfig,
    SoapConfig,
    members_per_rank,
    microbatches_per_step,
)
from credit_dp.data.loader import BatchSelection, Loader
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.sampling import RolloutLengths, SampleSequence, sample_times
from credit_dp.data.setup import TrainingData
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.functional import attached_contexts, is_user_module
from credit_dp.domain_parallel.layers.resample import InterpolationLayer
from credit_dp.domain_parallel.planning.model_plan import check_model, parameters_outside_graph
from credit_dp.domain_parallel.recomputation import checkpoint_modules
from credit_dp.domain_parallel.transport import use_batch_scheduling_for_gloo
from credit_dp.domain_parallel.view.attach import attached_view
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model, cast_model
from credit_dp.models.blocks import draw_noise, keep_draws, number_stochastic_depths
from credit_dp.models.initial_weights import InitialWeights, build_without_weights
from credit_dp.physics.columns import pressures_of
from credit_dp.physics.fixers import fixers_of_run
from credit_dp.pipeline_parallel.module_placement import model_output_device, place_model
from credit_dp.pipeline_parallel.stages import Stage, cut_model, segment_costs, stage_slices
from credit_dp.random_streams import random_seed, seed_python
from credit_dp.training.augmentation import build_augmentation
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.cuda_graph import StepGraph, use_own_stream
from credit_dp.training.data_description import describe_data
from credit_dp.training.diffusion import Denoising, Sampler
from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep, Model, NoiseKeys
from credit_dp.training.forward_backward import (
    ActivationCheckpointWrapper,
    ForwardBackward,
    ModelForwardBackward,
    PipelineForwardBackward,
    new_stage_group,
    recomputed_modules,
)
from credit_dp.training.loss import WeightedLoss, build_loss, build_plugin_error
from credit_dp.training.optim import (
    WeightAverage,
    build_optimizer,
    build_schedule,
    check_schedule,
    learning_rate_factors,
    state_layout,
)
from credit_dp.training.parameter_shards import (
    fill_shards,
    fsdp_mesh,
    is_fsdp_module,
    shard_parameters,
)
from credit_dp.training.shared_reading import build_chunk_exchange
from credit_dp.training.state import named_parameters, trainable_saved_parameters
from credit_dp.training.trainer import LossNames, Trainer, own_members

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)


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
        config: of the model.
        fields: that it gets and returns.
        grid: rows and columns.

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


def check_has_values(model: nn.Module, weights: InitialWeights | None) -> None:
    """Refuse parameters and buffers without values: their shards would be what memory held before.

    Args:
        model: as it was built.
        weights: of its parameters that are on the meta device for now; None without any.
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or (x.is_meta and (weights is None or name not in weights)):
            raise _no_values_error(name)


def check_parameter_patterns(model: nn.Module, config: Config) -> None:
    """Refuse patterns of the config that match no parameter of a complete model, or freeze all."""
    parameters_to_freeze(model, config.trainer.freeze)
    if isinstance(config.optimizer, MuonConfig | SoapConfig):
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
    """Suggest another pattern or name: often a module's name lacks the wildcard."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" Did you mean {pattern}.*?"
    return checks.did_you_mean(pattern, names) or f" Names are like {next(iter(names), '')}."


VERSIONS_OF_MODULE = 8  # of compiled code that a module may have


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile a model at its first call, in place; names of parameters stay.

    With FSDP2 its blocks are compiled instead, without the hooks around them, which gather and free
    parameters and would cut the model's graph.

    Args:
        model: converted, and sharded if it is to be.
        device: on which it computes.

    Raises:
        UserError: code for the CPU needs a C++ compiler, and none is installed.
    """
    if device.type == "cpu":
        # Torch's compiler looks for g++ or clang++ in the same way, but fails at the first step.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(name) is None:
            raise UserError(
                f"compile: needs a C++ compiler on the CPU, but {name} is not found. Install one, "
                "name it in the environment variable CXX, or set compile=false."
            )
    from torch._dynamo import config as limits  # takes seconds
    from torch._functorch import config as functorch

    # Blocks are called under the autocast of the model. By default torch compiles their backward
    # pass for it, too, and rounds gradients in it that an uncompiled step keeps in float32.
    functorch.backward_pass_autocast = "off"
    units = [module for module in model.modules() if is_fsdp_module(module)]
    # Each shape has code of its own. By default torch compiles code for any shape when it sees the
    # second one, also of another block. A step that is computed again could then find this code for
    # a block that has run other code before, which keeps other tensors.
    copies = 1
    if not units:
        model.compile(dynamic=False)
        if attached_contexts(model):
            copies = _most_copies_of_code(model)
    else:
        # The model itself is a unit, too: the first one, and the only one without blocks.
        blocks: list[Any] = units[1:] or units
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        copies = len(blocks)
    # Modules of a class share code. Torch compiles 8 versions of it, and runs others uncompiled: a
    # module has several by itself, for training, validation and scores.
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, limit, max(getattr(limits, limit), VERSIONS_OF_MODULE * copies))


def _most_copies_of_code(model: nn.Module) -> int:
    """Return how many modules of a sharded model share code, at most.

    They share what is compiled, too, unless the model's graph is cut within them: then each has a
    version of its own, as its layers have plans of their own.
    """
    copies = Counter(type(module) for module in model.modules() if is_user_module(module))
    interpolations = sum(isinstance(module, InterpolationLayer) for module in model.modules())
    return max(interpolations, *copies.values())


def enable_autocast(part: nn.Module, dtype: torch.dtype, like: Tensor) -> None:
    """Run a model, or a stage of one, under autocast, in place.

    Weights, gradients and updates keep their dtype. Outputs have the dtype of `like`: the loss is
    computed in it, and pipeline stages send it to the next stage.

    Args:
        part: the model or stage.
        dtype: of the operations that torch's autocast runs in lower precision.
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
    points = ValidPoints.of(store.valid_mask(rows), like)
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
        config: of the run.
        prepared: has the channels and the grid.
        manager: this rank's position in the mesh.
        like: has the dtype of the model, and the device of its output.
        first_gpu: the GPU that `cuda:0` in `parallel.layout` means on this rank.

    Raises:
        UserError: the model or the mesh does not fit the grid, or the model can't be cut or placed.
    """
    store = prepared.store
    parallel = config.parallel
    mesh = fsdp_mesh(manager) if parallel.data_mode == "fsdp2" else None
    fields = store.channels.fields(config.model.frames, config.model.denoises)
    build = partial(build_model, config.model, fields, store.grid)
    # Every rank draws the complete model from the same seed, so that no weights are sent.
    torch.manual_seed(config.seed)
    seed_python(random_seed(config.seed))  # plans of models that draw by them are then alike
    model, weights = (build(), None) if mesh is None else _build_for_shards(build, config.seed)
    check_has_values(model, weights)
    check_planned_model(model, config.model, fields, store.grid)
    # Before the model is cut: layers are numbered, and patterns matched, over the complete model.
    number_stochastic_depths(model)
    check_parameter_patterns(model, config)
    freeze(model, config.trainer.freeze)
    batch = config.data.batch_size // manager.dp_world_size // microbatches_per_step(config)
    shape = (batch * members_per_rank(config), fields.inputs, *store.grid)
    if parallel.pipeline > 1:
        # Imported here: torch's pipeline schedules import its compiler, which takes a second.
        from credit_dp.pipeline_parallel.pipeline import Pipeline

        model = cast_model(model, like.dtype)
        stages = _build_stages(model, parallel, manager, shape)
        for stage in stages:
            _move_and_shard(stage.module, mesh, parallel, like, weights)
            _enable_configured_autocast(stage.module, config, like)
        pipeline = Pipeline(stages, manager, parallel.schedule, microbatches_per_step(config))
        return ModelParts(pipeline.stage_modules, pipeline)
    without_gradient: tuple[str, ...] = ()
    if isinstance(config.model, OwnModelConfig) and mesh is None and manager.world_size > 1:
        without_gradient = parameters_outside_graph(model, fields.inputs, store.grid)
    blocks = recomputed_modules(model, config)  # of the complete model: conversion changes types
    model = cast_model(model, like.dtype)
    model = shard_model(model, manager, shape, parallel.whole_ops, parallel.whole_ops_limit)
    _set_loss_factor(model, manager)
    _move_and_shard(model, mesh, parallel, like, weights)
    model = place_model(model, parallel.layout, first_gpu)
    if config.trainer.checkpoint_activations == "blocks":
        checkpoint_modules(model, blocks, keep_draws)
    _enable_configured_autocast(model, config, like)
    if config.compile:
        obstacle = _obstacle_to_compilation(model, config)
        if not obstacle:
            compile_model(model, like.device)
        elif manager.rank == 0:
            logger.warning("compile: %s", obstacle)
    return ModelParts((model,), without_gradient=without_gradient)


def _obstacle_to_compilation(model: nn.Module, config: Config) -> str:
    """Return why a model runs uncompiled, the same on all ranks; empty if nothing stands against.

    torch 2.13 fails at operators that keep their order in a compiled function that computes parts
    of itself again. A complete compiled step can be computed again: its operators receive what the
    transport has kept.
    """
    if attached_view(model) is not None:
        return (
            "this model computes through the global view, whose functions can't be compiled. It "
            "runs uncompiled."
        )
    contexts = attached_contexts(model)  # none of a model that is not sharded
    if contexts and torch.__version__ < "2.12":
        return (
            f"torch {torch.__version__} computes wrong gradients of compiled sharded layers. The "
            "model runs uncompiled. Install torch 2.12 or newer to compile it."
        )
    by_key = bool(getattr(config.model, "activation_checkpointing", False))
    if contexts and (by_key or any(context.is_recomputed for context in contexts)):
        return (
            "a sharded model that recomputes blocks can't be compiled. It runs uncompiled. To "
            "compile it set model.activation_checkpointing=false, or remove torch.utils.checkpoint "
            "from its code; trainer.checkpoint_activations=step saves memory, too."
        )
    return ""


def _build_stages(
    model: nn.Module,
    parallel: ParallelConfig,
    manager: DomainParallelManager,
    shape: Sequence[int],
) -> list[Stage]:
    """Return this rank's pipeline stages, cut between the same segments on every rank."""
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
    """Tell the view of a part, if it has one, what `ForwardBackward` multiplies the loss by."""
    view = attached_view(part)
    if view is not None:
        view.loss_factor = manager.ranks_per_sample


def _build_for_shards(
    build: Callable[[], nn.Module], seed: int
) -> tuple[nn.Module, InitialWeights | None]:
    """Build a model of which a rank is going to hold shards, as far as possible without weights."""
    try:
        return build_without_weights(build)
    except Exception as error:  # noqa: BLE001 - of code that is carried out again
        torch.manual_seed(seed)
        model = build()
        logger.warning(
            "parallel.data_mode: each rank builds the complete model before it keeps its shards, "
            "as initial weights can't be computed one by one (%s)",
            " ".join(str(error).split()),
        )
        return model, None


def _move_and_shard(
    part: nn.Module,
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    like: Tensor,
    weights: InitialWeights | None,
) -> None:
    """Move a part to its device, and shard its parameters over the `mesh`, if there is one.

    Parameters on the meta device get shards of these weights.
    """
    if mesh is None or not parallel.cpu_offload:  # offloaded parameters stay in the host's memory
        part._apply(lambda x: x if x.is_meta else x.to(like.device))  # type: ignore[no-untyped-call]
    if mesh is not None:
        shard_parameters(part, mesh, parallel, like.dtype)
    if weights is not None:
        fill_shards(part, weights, torch.device("cpu") if parallel.cpu_offload else like.device)


def _enable_configured_autocast(part: nn.Module, config: Config, like: Tensor) -> None:
    """Enable autocast for a part if `trainer.autocast` is set."""
    if config.trainer.autocast is not None:
        enable_autocast(part, getattr(torch, config.trainer.autocast), like)


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
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)  # type: ignore[no-untyped-call]
    for parameter in without_gradient:
        parameter.requires_grad_(True)
    return wrapped


NEVER = 2**31 - 1  # the largest number of passes that torch takes

DTYPES = {"float32": torch.float32, "float64": torch.float64}


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


def check_plugins(config: Config) -> None:
    """Check a user's own loss and schedule as far as that needs no data."""
    if isinstance(config.loss, OwnLossConfig):
        build_plugin_error(config.loss, torch.zeros((), dtype=DTYPES[config.trainer.dtype]))
    check_schedule(config.optimizer, config.trainer.steps)


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
    like = torch.zeros((), device=device, dtype=DTYPES[config.trainer.dtype])
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
        selection=batch_selection_of_rank(config, manager),
        exchange=build_chunk_exchange(prepared.store, manager),
        rollout_lengths=rollout_lengths(config, sequence),
    )
    # Taken after sharding, which replaces parameters: the optimizer must update the shards.
    parameters = named_parameters(model.parts)
    layout = state_layout(parameters, config.optimizer, config.parallel)
    factors = learning_rate_factors(model.parts, config.optimizer)
    late = config.trainer.check_finite == "late"
    optimizer = build_optimizer(parameters, config.optimizer, factors, can_leave_out=late)
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
        layout=layout,
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
    points = ValidPoints.of(store.valid_mask(rows), like, manager.transport.all_reduce)
    pressures = pressures_of(store) if config.loss.level_weight else None
    loss = build_loss(
        config.loss, store.channels, store.latitude, rows, scale, points, manager, pressures
    )
    return build_forecast_step(config, prepared, manager, model, normaliser, points), loss


def build_forecast_step(
    config: Config,
    prepared: TrainingData,
    manager: DomainParallelManager,
    model: Model,
    normaliser: Normaliser,
    points: ValidPoints | None,
) -> ForecastStep:
    """Return the forecast step around a model, of training and of forecasts alike.

    Args:
        normaliser: on the device of the model's output.
        points: with values, on this rank's rows; None: all of them.

    Raises:
        UserError: see `fixers_of_run`.
    """
    tendency = normaliser.tendency_scale
    fill = None if points is None else partial(points.fill_invalid, fills=normaliser.fills)
    return ForecastStep(
        model,
        tendency[: prepared.store.channels.num_states],
        config.model.residual,
        fill,
        fixers_of_run(config.model, prepared, manager, tendency.device),
    )


def batch_selection_of_rank(config: Config, manager: DomainParallelManager) -> BatchSelection:
    """Return the parts of a sample that this rank's stages need.

    The first pipeline rank needs the inputs, the last one what the loss is computed from. In
    diffusion a noisy target is among the inputs, and both depend on the newest state.
    """
    first = manager.pipeline_rank == 0
    last = manager.pipeline_rank == manager.pipeline_parallel_size - 1
    uses_state = config.model.residual or bool(config.model.fixers)
    target = last or (first and config.model.denoises)
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
        len(times),
        config.data.batch_size,
        manager.dp_rank,
        manager.dp_world_size,
        config.seed,
    )


def rollout_lengths(config: Config, sequence: SampleSequence) -> RolloutLengths:
    """Return the rollout length of each batch; batch number n is that of optimizer step n."""
    trainer = config.trainer
    batches = sequence.batches_per_epoch
    return RolloutLengths(
        trainer.longest_rollout, partial(trainer.rollout_at, steps_per_epoch=batches)
    )

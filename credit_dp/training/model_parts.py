"""The model as this rank holds it: whole or in stages, its parameters its own or shared out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from credit_dp.config import Config, OwnModelConfig, ParallelConfig, microbatches
from credit_dp.data.prepare import Prepared
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.trial import check_model
from credit_dp.forecast.step import ForecastStep, Model
from credit_dp.models import build_model
from credit_dp.models.blocks import number_depths
from credit_dp.pipeline_parallel.costs import cut_points, segment_costs
from credit_dp.pipeline_parallel.model_layout import place_model
from credit_dp.pipeline_parallel.stages import Stage, cut_model
from credit_dp.training.autocast import compute_in
from credit_dp.training.compilation import compile_model
from credit_dp.training.freezing import freeze
from credit_dp.training.gradients import replicas
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.parameter_shards import replicas_and_shards, shard_parameters
from credit_dp.training.passes import ModelPass, Pass, PipelinePass
from credit_dp.training.recomputed import Recomputed

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline


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
    def forecasting(self) -> Model:
        """The whole model outside of training, on all ranks of a pipeline together."""
        return self.parts[0] if self.pipeline is None else self.pipeline.forward

    def gradients(
        self,
        config: Config,
        manager: DomainParallelManager,
        forecast: ForecastStep,
        loss: WeightedLoss,
    ) -> Pass:
        """How gradients come about: `forecast` says what is made of the model's output."""
        micros = microbatches(config)
        ddp = config.parallel.data_mode == "ddp"
        if self.pipeline is not None:
            group = replicas(manager) if ddp else None
            return PipelinePass(self.pipeline, forecast, loss, micros, manager, group)
        model = self.parts[0]
        if config.trainer.checkpoint_activations:
            model = Recomputed(model)
        if ddp and manager.world_size > 1:
            model = averaging(model, config.parallel)
        return ModelPass(model, forecast.of(model), loss, micros, manager.domain_world_size)


def build_parts(
    config: Config,
    prepared: Prepared,
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
    number_depths(model)
    freeze(model, config.trainer.freeze)
    shares = replicas_and_shards(manager) if parallel.data_mode == "fsdp2" else None
    batch = config.data.batch_size // manager.dp_world_size // microbatches(config)
    shape = (batch, fields.inputs, *store.grid)
    if parallel.pipeline > 1:
        # Here, for torch's schedules bring its compiler, which takes a second: for pipelines alone.
        from credit_dp.pipeline_parallel.pipeline import Pipeline

        model = model.to(like.dtype)
        stages = _stages(model, parallel, manager, shape)
        for stage in stages:
            _share_out(stage.module, shares, parallel, like)
            _autocast(stage.module, config, like)
        pipeline = Pipeline(stages, manager, parallel.schedule, microbatches(config))
        return ModelParts(pipeline.parts, pipeline)
    model = shard_model(model.to(like.dtype), manager, shape)
    _share_out(model, shares, parallel, like)
    model = place_model(model, parallel.layout, first_gpu)
    _autocast(model, config, like)
    if config.compile:
        compile_model(model, like.device)
    return ModelParts((model,))


def _stages(
    model: nn.Module,
    parallel: ParallelConfig,
    manager: DomainParallelManager,
    shape: Sequence[int],
) -> list[Stage]:
    """This rank's stages, cut after conversion, at places that are the same on every rank."""
    costs = segment_costs(model, shape)  # of the whole globe, for bands differ
    virtual = parallel.virtual_stages
    cuts = cut_points(costs, parallel.pipeline * virtual, parallel.stages, virtual=virtual)
    return cut_model(shard_model(model, manager, shape), manager, cuts, shape)


def _share_out(
    part: nn.Module, shares: DeviceMesh | None, parallel: ParallelConfig, like: Tensor
) -> None:
    """Bring a part to its device, and its parameters to the data ranks, if they share them."""
    if shares is None or not parallel.cpu_offload:
        part.to(like.device)
    if shares is not None:
        shard_parameters(part, shares, parallel, like.dtype)


def _autocast(part: nn.Module, config: Config, like: Tensor) -> None:
    """Let a part compute in the dtype that the config asks for, if it does."""
    if config.trainer.autocast is not None:
        compute_in(part, getattr(torch, config.trainer.autocast), like)


def averaging(model: nn.Module, parallel: ParallelConfig) -> nn.Module:
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

"""Memory and traffic of each rank in a training step, on any mesh, without ranks or data.

`plan_step` traces one micro-batch of the configured model on tensors without data (rows exchanged
and activations saved), adds what the parameters need under ddp and fsdp2, and, with a pipeline,
cuts the model as training does. `compare_meshes` repeats this for growing domains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
import torch
from torch import nn

from credit_dp.config import Config, ParallelConfig, members_per_rank, microbatches_per_step
from credit_dp.data.setup import expected_data, open_on_own_grid
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.data.transforms import QUANTILE_SCORES
from credit_dp.distributed.placement import check_batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import convert_to_domain_parallel, shard_model
from credit_dp.domain_parallel.count_transport import RankTraffic
from credit_dp.domain_parallel.decide import Decision, counting_manager, plan_report
from credit_dp.domain_parallel.partition import too_few_rows_messages
from credit_dp.domain_parallel.planning.trace import copy_model
from credit_dp.errors import UserError
from credit_dp.models import cast_model
from credit_dp.physics.columns import Hybrid, PhysicalChannels, hybrid_of
from credit_dp.physics.fixers import FixerMemory, count_fixer_memory
from credit_dp.pipeline_parallel.pipeline import (
    count_gathers,
    peak_saved_bytes,
    schedule_actions,
    theoretical_bubble,
)
from credit_dp.pipeline_parallel.stages import (
    Stage,
    cut_model,
    measure_stage,
    segment_costs,
    stage_slices,
    state_bytes,
)
from credit_dp.training.forward_backward import recomputed_modules
from credit_dp.training.loss import members_sent
from credit_dp.training.optim import moments_per_parameter
from credit_dp.training.parameter_shards import fsdp_blocks, shards_of
from credit_dp.training.start_checks import planned_model


class StepPlan(NamedTuple):
    """The costs of a training step; no budgets if the model can't be sharded on the mesh."""

    report: Decision
    budgets: Sequence[RankBudget]
    pipeline: PipelinePlan | None


def plan_step(config: Config, store: Store | None = None) -> StepPlan:
    """Plan one micro-batch of the configured model, and from it a training step.

    Args:
        config: of the run.
        store: of the data, if it is open already.

    Raises:
        UserError: grid, batch or variables are wrong, or the model can't be cut into stages.
    """
    data = config.parallel.data or 1
    check_batch(config, data)
    model, shape = model_and_shape(config, data * microbatches_per_step(config), store)
    report = _report(model, shape, config.parallel.domain, config)
    if report.problems or report.unplanned:
        return StepPlan(report, (), None)
    if config.parallel.pipeline == 1:
        return StepPlan(report, model_budget(model, report, config), None)
    pipeline = plan_pipeline(model, report, config)
    samples = report.input_shapes[0][0]
    return StepPlan(report, pipeline_budget(pipeline, samples, config), pipeline)


def model_and_shape(
    config: Config, parts: int, store: Store | None = None
) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the model, its parameters without data, and the input shape of 1/`parts` of the batch.

    Members of a sample that a rank computes count as samples.

    Raises:
        UserError: the grid or the variables are wrong, the model returns another shape, or a
            pattern matches no parameter.
    """
    data = expected_data(config.data) if store is None else store
    fields, grid = data.channels.fields(config.model.frames, config.model.denoises), data.grid
    model = cast_model(planned_model(config, fields, grid), getattr(torch, config.trainer.dtype))
    samples = config.data.batch_size // parts * members_per_rank(config)
    return model, (samples, fields.inputs, *grid)


@final
@dataclass(frozen=True)
class ParameterBudget:
    """Bytes for parameters on the fullest rank, held and sent in a step (collectives as rings).

    Attributes:
        weights: what is held between steps.
        gradients: what is held at once, at most.
        moments: the state of the optimizer.
        gathered: parameters of other ranks, held while a block computes (fsdp2).
        sent_gradients: what is sent to reduce gradients.
        sent_weights: what is sent to gather sharded parameters.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int = 0
    sent_gradients: int = 0
    sent_weights: int = 0

    def __add__(self, other: ParameterBudget) -> ParameterBudget:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ParameterBudget(*(a + b for a, b in pairs))


def replicated_budget(module: nn.Module, replicas: int, moments: int) -> ParameterBudget:
    """Return the budget of a rank that holds all parameters of the model, or of a stage (ddp).

    So many `replicas` hold them, over the data, the ensemble and the domain axis. The optimizer
    keeps so many `moments` for each parameter.
    """
    weights = sum(p.nbytes for p in module.parameters())
    trainable = sum(p.nbytes for p in _trainable(module.parameters()))
    sent = ring_all_reduce_bytes(trainable, replicas)
    return ParameterBudget(weights, trainable, moments * trainable, 0, sent)


def sharded_budget(
    module: nn.Module,
    parallel: ParallelConfig,
    replicas: int,
    microbatches: int,
    *,
    moments: int,
    gathers: int | None = None,
) -> ParameterBudget:
    """Return the budget of a rank if replicas shard the converted model, or a stage of it (fsdp2).

    A step has so many `microbatches`. In a pipeline a block is gathered `gathers` times in a step;
    without one it is None. For the others see `replicated_budget`.
    """
    parameters = list(module.parameters())
    trainable = list(_trainable(parameters))
    shards = shards_of(replicas)
    units = fsdp_units(module, parallel, replicas)
    *blocks, rest = units
    reduced_bytes = sum(unit.reduced for unit in units)
    if gathers is None:
        gathered_bytes = microbatches * sum(unit.gathers * unit.gathered for unit in units)
    else:
        gathered_bytes = gathers * sum(block.gathered for block in blocks) + rest.gathered
    # Reduce-scatter over the ranks of one copy, then an all-reduce of the shard over the copies.
    sent_to_reduce = (shards - 1) * reduced_bytes // shards + ring_all_reduce_bytes(
        reduced_bytes // shards, replicas // shards
    )
    gradients = _shard_bytes(trainable, shards)
    gathered = rest.gathered + max((block.gathered for block in blocks), default=0)
    if gathers is None and not parallel.sums_whole_gradients:
        sent_to_reduce *= microbatches
    elif microbatches > 1 or gathers is not None:
        # Gradients are reduced once, at the end of the step; until then they are unsharded.
        gradients = max(reduced_bytes, gradients)
    if gathers is not None:
        # After a backward a stage stays gathered until its next forward.
        gathered = rest.gathered + sum(block.gathered for block in blocks)
    return ParameterBudget(
        weights=_shard_bytes(parameters, shards),
        gradients=gradients,
        moments=moments * _shard_bytes(trainable, shards),
        gathered=gathered,
        sent_gradients=sent_to_reduce,
        sent_weights=(shards - 1) * gathered_bytes // shards,
    )


@final
class FsdpUnit(NamedTuple):
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        gathered: bytes of the parameters, padded to equal shards.
        reduced: bytes of the gradients, padded likewise.
        gathers: how often they are gathered in forward and backward.
    """

    gathered: int
    reduced: int
    gathers: int


def fsdp_units(module: nn.Module, parallel: ParallelConfig, replicas: int) -> list[FsdpUnit]:
    """Return the blocks of a model that are units of FSDP, and at last the rest, maybe empty."""
    shards = shards_of(replicas)
    blocks = [list(block.parameters()) for block in fsdp_blocks(module)]
    in_blocks = {id(p) for block in blocks for p in block}
    rest = [p for p in module.parameters() if id(p) not in in_blocks]
    compute_dtype = parallel.param_dtype
    reduce_dtype = parallel.reduce_dtype or parallel.param_dtype
    return [
        # FSDP pads dimension 0, so that every rank has a shard of the largest size.
        FsdpUnit(
            shards * _shard_bytes(parameters, shards, compute_dtype),
            shards * _shard_bytes(list(_trainable(parameters)), shards, reduce_dtype),
            # Blocks are gathered for forward and again for backward. Parameters outside of blocks
            # belong to the root, which stays gathered from forward to backward.
            gathers=1 if parameters is rest else 2,
        )
        for parameters in (*blocks, rest)
    ]


def ring_all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * size // ranks


def _trainable(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return (p for p in parameters if p.requires_grad)


def _shard_bytes(parameters: Sequence[nn.Parameter], ranks: int, dtype: str | None = None) -> int:
    """Return the bytes of the first rank's shards, the largest: FSDP splits dimension 0."""
    total = 0
    for parameter in parameters:
        rows = -(-parameter.shape[0] // ranks)
        size = parameter.element_size() if dtype is None else getattr(torch, dtype).itemsize
        total += rows * (parameter.numel() // parameter.shape[0]) * size
    return total


@final
@dataclass(frozen=True)
class Cut:
    """The beginning of a pipeline stage.

    Attributes:
        stage: the index of the stage.
        pipeline_rank: the rank on the pipeline axis that holds it.
        first: the name of its first segment.
        cost: its share of the model's multiply-adds.
        state_bytes: what one rank receives from the stage before, for each micro-batch.
    """

    stage: int
    pipeline_rank: int
    first: str
    cost: float
    state_bytes: int


@final
@dataclass(frozen=True)
class PipelinePlan:
    """All stages of a pipeline, as the fullest rank of a domain holds them.

    Attributes:
        manager: the mesh as that rank sees it, without communication.
        bubble: the share of a step in which a rank waits, if all stages cost the same.
        input_shape: the shape of the model's input on the globe.
    """

    stages: tuple[Stage, ...]
    cuts: tuple[Cut, ...]
    manager: DomainParallelManager
    bubble: float
    input_shape: tuple[int, ...]


def plan_pipeline(model: nn.Module, report: Decision, config: Config) -> PipelinePlan:
    """Cut a copy of a model into stages, as training does; the report is that of the uncut model.

    Raises:
        UserError: the model can't be cut into that many stages.
    """
    parallel = config.parallel
    microbatches = microbatches_per_step(config)
    shape = report.input_shapes[0]
    stages_per_rank = parallel.virtual_stages
    costs = segment_costs(model, shape)
    slices = stage_slices(
        costs, parallel.pipeline * stages_per_rank, parallel.stages, virtual=stages_per_rank
    )
    manager = counting_manager(report.ranks)
    # Bands differ in height and so in saved activations: plan for the fullest rank.
    manager.rank = report.saved_bytes.index(max(report.saved_bytes))
    converted = shard_model(
        copy_model(model), manager, shape, parallel.whole_ops, parallel.whole_ops_limit
    )
    stages = cut_model(converted, manager, slices, shape)
    cost_shares = [sum(list(costs.values())[cut]) / sum(costs.values()) for cut in slices]
    cuts = [
        Cut(
            stage=stage.index,
            pipeline_rank=stage.index % parallel.pipeline,
            first=list(costs)[cut.start],
            cost=cost_share,
            state_bytes=0 if stage.is_first else state_bytes(stage.input_specs, shape[0]),
        )
        for stage, cut, cost_share in zip(stages, slices, cost_shares, strict=True)
    ]
    bubble = theoretical_bubble(parallel.pipeline, microbatches, stages_per_rank)
    return PipelinePlan(tuple(stages), tuple(cuts), manager, bubble, tuple(shape))


@final
@dataclass(frozen=True)
class RankBudget:
    """Bytes of the fullest rank at one position of the pipeline axis, by item.

    Attributes:
        mode: ddp or fsdp2.
        held: what is held at once, at most.
        sent: what is sent in a step.
    """

    mode: str
    pipeline_rank: int
    held: dict[str, int]
    sent: dict[str, int]

    @property
    def total_held(self) -> int:
        """Return the sum of `held`."""
        return sum(self.held.values())

    def fits(self, memory: float) -> bool:
        """Return whether `held` fits in `memory` GiB."""
        return self.total_held <= memory * 2**30


def model_budget(model: nn.Module, report: Decision, config: Config) -> list[RankBudget]:
    """Return the budget of a rank that holds the uncut model: ddp and, if it can be sharded, fsdp2.

    The model is not converted, and its report is for one micro-batch.
    """
    microbatches = microbatches_per_step(config)
    replicas = (config.parallel.data or 1) * config.parallel.ensemble * report.ranks
    moments = moments_per_parameter(config.optimizer)
    traffic = [a + b for a, b in zip(report.forward, report.backward, strict=True)]
    budgets = {"ddp": replicated_budget(model, replicas, moments)}
    if replicas > 1:
        sharded = model
        if not report.refusal:  # otherwise none of its layers are converted
            sharded = convert_to_domain_parallel(copy_model(model), counting_manager(report.ranks))
        budgets["fsdp2"] = sharded_budget(
            sharded, config.parallel, replicas, microbatches, moments=moments
        )
    saved = max(report.saved_bytes)
    recomputed = max(report.recomputed_bytes, default=0)
    rows = _max_bytes_sent(traffic)
    fixers = fixer_memory(config, report.input_shapes[0], report.ranks)
    samples, _, height, columns = report.input_shapes[0]
    largest = [max(level.bands) for level in report.levels if level.rows == height]
    points = max(largest, default=height) * columns
    sent = {"rows": rows * microbatches, "members": _members_sent(samples, points, config)}
    return [
        _rank_budget(mode, 0, budget, (saved, 0), sent, recomputed, fixers)
        for mode, budget in budgets.items()
    ]


def _members_sent(samples: int, points: int, config: Config) -> int:
    """Return the bytes that the loss of an ensemble sends in a step, on the busiest rank.

    Ranks that have all members send none. `samples` are those of a micro-batch, times the members
    that a rank computes; `points` are those of the largest band.
    """
    ranks = config.parallel.ensemble
    if ranks == 1:
        return 0  # without opening the store again for its channels
    samples = samples // members_per_rank(config) * microbatches_per_step(config)
    channels = expected_data(config.data).channels.num_outputs
    values = max(
        members_sent(samples, config.trainer.members, channels, points, rank, ranks)
        for rank in range(ranks)
    )
    itemsize: int = getattr(torch, config.trainer.dtype).itemsize
    return values * itemsize


def fixer_memory(config: Config, shape: Sequence[int], domain: int) -> FixerMemory:
    """Return what the fixers of one forecast step need on the rank with most rows.

    `shape` is that of the model's input on the globe, `(B, C, H, W)`, which `domain` ranks share.

    Raises:
        UserError: the data lack what a fixer needs.
    """
    if not config.model.fixers:
        return FixerMemory()
    channels = expected_data(config.data).channels
    hybrid: Hybrid = {}
    if config.model.budgets:  # not of the quickstart, which has no water
        hybrid = hybrid_of(open_on_own_grid(config.data))
    samples, _, height, columns = shape
    rows = -(-height // domain)
    ones, zeros = np.ones(channels.num_outputs), np.zeros(channels.num_outputs)
    none = np.empty(0)
    quantiles = np.tile(QUANTILE_SCORES, (channels.num_outputs, 1))
    statistics = Statistics(
        zeros, ones, ones, none, none, none, none, zeros, ones, quantiles=quantiles
    )
    physical = PhysicalChannels(
        channels.output_channels,
        config.data.variables,
        statistics,
        hybrid,
        torch.zeros(rows, columns),
    )
    return count_fixer_memory(
        config.model,
        physical,
        config.data.step_hours,
        (samples, rows, columns),
        channels.num_states,
        getattr(torch, config.trainer.dtype),
    )


def pipeline_budget(plan: PipelinePlan, samples: int, config: Config) -> list[RankBudget]:
    """Return the budgets at each position of the pipeline; `samples` are those of a micro-batch."""
    ranks = config.parallel.pipeline
    return [
        budget
        for rank in range(ranks)
        for budget in _stage_budgets(plan.stages[rank::ranks], rank, plan, samples, config)
    ]


def _stage_budgets(
    stages: Sequence[Stage], rank: int, plan: PipelinePlan, samples: int, config: Config
) -> list[RankBudget]:
    """Return the budgets of one pipeline rank, which may hold several stages: ddp, then fsdp2."""
    parallel = config.parallel
    microbatches = microbatches_per_step(config)
    replicas = (parallel.data or 1) * parallel.ensemble * plan.manager.domain_parallel_size
    order = schedule_actions(
        parallel.schedule, rank, parallel.pipeline, microbatches, parallel.virtual_stages
    )
    moments = moments_per_parameter(config.optimizer)
    replicated = [replicated_budget(stage.module, replicas, moments) for stage in stages]
    budgets = {"ddp": _sum_budgets(replicated)}
    if replicas > 1:
        gathers = count_gathers(order)
        sharded = [
            sharded_budget(
                stage.module,
                parallel,
                replicas,
                microbatches,
                moments=moments,
                gathers=gathers[index],
            )
            for index, stage in enumerate(stages)
        ]
        budgets["fsdp2"] = _sum_budgets(sharded)
    footprints = [measure_stage(stage, plan.manager, samples) for stage in stages]
    received, passed_on = _state_traffic(stages, samples)
    # torch's pipeline stages have a receive buffer for each micro-batch; activations are only kept
    # for the micro-batches in flight.
    activations = peak_saved_bytes(order, [footprint.saved_bytes for footprint in footprints])
    held = activations, received * microbatches
    fixers = FixerMemory()
    if stages[-1].is_last:  # which computes the loss
        fixers = fixer_memory(
            config, (samples, *plan.input_shape[1:]), plan.manager.domain_parallel_size
        )
        kept = [fixers.kept if stage.is_last else 0 for stage in stages]
        fixers = fixers._replace(kept=peak_saved_bytes(order, kept))
    rows = sum(_max_bytes_sent(footprint.sent) for footprint in footprints)
    sent = {"rows": rows * microbatches, "states": passed_on * microbatches}
    if any(stage.is_last for stage in stages):
        rows, columns = expected_data(config.data).grid
        points = max(plan.manager.partition(rows).sizes) * columns
        sent["members"] = _members_sent(samples, points, config)
    return [
        _rank_budget(mode, rank, budget, held, sent, fixers=fixers)
        for mode, budget in budgets.items()
    ]


def _state_traffic(stages: Sequence[Stage], samples: int) -> tuple[int, int]:
    """Return the bytes that these stages receive and send per micro-batch, forward and backward."""
    later = [stage.input_specs for stage in stages if not stage.is_first]
    earlier = [stage.output_specs for stage in stages if not stage.is_last]
    states_in, gradients_out = (
        sum(state_bytes(specs, samples, gradients=gradients) for specs in later)
        for gradients in (False, True)
    )
    states_out, gradients_in = (
        sum(state_bytes(specs, samples, gradients=gradients) for specs in earlier)
        for gradients in (False, True)
    )
    return states_in + gradients_in, states_out + gradients_out


def _rank_budget(
    mode: str,
    rank: int,
    parameters: ParameterBudget,
    held: tuple[int, int],
    sent: Mapping[str, int],
    recomputed: int = 0,
    fixers: FixerMemory = FixerMemory(),  # noqa: B008 - a tuple
) -> RankBudget:
    """Return a budget from its parts; `held` is (activations, states), `sent` what is counted."""
    return RankBudget(
        mode,
        rank,
        {
            "weights": parameters.weights,
            "gradients": parameters.gradients,
            "moments": parameters.moments,
            "gathered": parameters.gathered,
            "activations": held[0],
            "recomputed": recomputed,
            "fixers": fixers.kept,
            "fixers again": fixers.recomputed,
            "states": held[1],
        },
        {
            "rows": 0,
            "gradients": parameters.sent_gradients,
            "weights": parameters.sent_weights,
            "states": 0,
            "members": 0,
            **sent,
        },
    )


def _sum_budgets(budgets: Sequence[ParameterBudget]) -> ParameterBudget:
    return sum(budgets[1:], budgets[0])


def _max_bytes_sent(sent: Sequence[RankTraffic]) -> int:
    """Return the bytes of the rank that sends most, with collectives as rings."""
    return max(
        traffic.bytes + ring_all_reduce_bytes(traffic.collective_bytes, len(sent))
        for traffic in sent
    )


POWERS = 7  # domains of 1, 2, 4 ... 64 ranks are compared, and the largest that the model allows


@final
@dataclass(frozen=True)
class MeshBudget:
    """A mesh of `data` x `domain` ranks, with one sample at a time on each data rank.

    Attributes:
        rows: height of the smallest band at the coarsest level.
        imbalance: rows of the largest band over the mean, at the level with the largest ratio.
        budgets: those of its fullest rank, with ddp and fsdp2.
    """

    domain: int
    data: int
    rows: int
    imbalance: float
    budgets: tuple[RankBudget, ...]


@final
@dataclass(frozen=True)
class MeshComparison:
    """The meshes that were planned; `limit` says why the domain can't be larger than the last."""

    up_to: int
    meshes: tuple[MeshBudget, ...]
    limit: str


def compare_meshes(
    model: nn.Module, shape: tuple[int, ...], config: Config, up_to: int
) -> MeshComparison:
    """Plan one sample on domains of growing size, each with as many data ranks as fit in `up_to`.

    The model is not converted; `shape` is that of one sample on the globe, `(1, C, H, W)`.

    Raises:
        UserError: the config sets a mesh already.
    """
    _check_up_to(config.parallel, up_to)
    largest = config.model.coarsest_rows(shape[-2])
    meshes: list[MeshBudget] = []
    for domain in domain_sizes(min(largest, up_to)):
        report = _report(model, shape, domain, config)
        if report.problems or report.unplanned:
            limit = next(iter(report.problems), report.unplanned)
            return MeshComparison(up_to, tuple(meshes), limit)
        meshes.append(_mesh_budget(model, report, config, up_to // domain))
    limit = ""
    if largest < up_to and not report.refusal:  # what computes on the globe may have empty bands
        (limit,) = too_few_rows_messages({largest: ""}, largest + 1)
    return MeshComparison(up_to, tuple(meshes), limit)


def domain_sizes(largest: int) -> Iterator[int]:
    """Yield the domain sizes to compare: powers of two below `largest`, then `largest`."""
    yield from (2**power for power in range(POWERS) if 2**power < largest)
    yield largest


def _report(model: nn.Module, shape: tuple[int, ...], domain: int, config: Config) -> Decision:
    return plan_report(
        model,
        shape,
        domain,
        whole_ops=config.parallel.whole_ops,
        whole_ops_limit=config.parallel.whole_ops_limit,
        # On one rank, too: what a model checkpoints by itself would not be counted.
        recomputed=recomputed_modules(model, config, max(domain, 2)),
    )


def _mesh_budget(model: nn.Module, report: Decision, config: Config, data: int) -> MeshBudget:
    parallel = replace(config.parallel, domain=report.ranks, data=data)
    trainer = replace(config.trainer, accumulate=1)
    mesh_config = replace(config, parallel=parallel, trainer=trainer)
    coarsest = report.levels[-1]
    return MeshBudget(
        domain=report.ranks,
        data=data,
        rows=min(coarsest.bands),
        imbalance=max(level.imbalance for level in report.levels),
        budgets=tuple(model_budget(model, report, mesh_config)),
    )


def _check_up_to(parallel: ParallelConfig, up_to: int) -> None:
    if up_to < 1:
        raise UserError(f"--up-to: needs at least 1 rank, got {up_to}.")
    for key in ("domain", "ensemble", "pipeline"):
        if getattr(parallel, key) > 1:
            raise UserError(
                f"--up-to: chooses the meshes of data x domain ranks itself, got parallel.{key}="
                f"{getattr(parallel, key)}. Leave that key out."
            )
    if parallel.data is not None:
        raise UserError(
            f"--up-to: gives every mesh as many data ranks as fit, got parallel.data="
            f"{parallel.data}. Leave that key out."
        )


def training_memory(held: Mapping[str, int], config: Config) -> dict[str, int]:
    """Return the bytes that a rank holds in training, by item, from those of one forecast step.

    A rollout keeps the activations of all its steps, and the fields of fixers, but computes them
    again one at a time; in bfloat16 activations take half, and a copy of the weights is added.
    """
    trainer = config.trainer
    memory = dict(held)
    for item in memory.keys() & {"activations", "fixers"}:
        memory[item] *= trainer.longest_rollout
    if trainer.autocast is not None:
        for item in memory.keys() & {"activations", "recomputed"}:
            memory[item] //= 2
        memory["weights in bfloat16"] = held["weights"] // 2
    if config.optimizer.ema is not None:
        memory["averages"] = held["weights"]
    return memory

"""What each rank of a mesh holds and sends in a step: rows, activations, weights, states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import nn

from credit_dp.config import Config, ParallelConfig, microbatches_per_step
from credit_dp.distributed.placement import check_batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import declared_converters, shard_model
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.costs.report import plan_report
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.planning.trace import copy_model
from credit_dp.domain_parallel.row_tensors import cuts
from credit_dp.errors import UserError
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
from credit_dp.training.optim import moments_per_parameter
from credit_dp.training.parameter_shards import fsdp_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from credit_dp.domain_parallel.costs.report import PlanReport


class StepPlan(NamedTuple):
    """What the command found; no budgets if the model can't be sharded so."""

    report: PlanReport
    budgets: Sequence[RankBudget]
    pipeline: PipelinePlan | None


def plan_step(config: Config) -> StepPlan:
    """Plan a micro-batch of the configured model, and from it what a step takes.

    Raises:
        UserError: grid, batch or variables are not as needed, or the model can't be cut.
    """
    report, model = _report_and_model(config)
    if report.problems:
        return StepPlan(report, (), None)
    # torch

    if config.parallel.pipeline == 1:
        return StepPlan(report, model_budget(model, report, config), None)
    pipeline = plan_pipeline(model, report, config)
    samples = report.input_shapes[0][0]
    return StepPlan(report, pipeline_budget(pipeline, samples, config), pipeline)


def _report_and_model(config: Config) -> tuple[PlanReport, nn.Module]:
    from credit_dp.domain_parallel.build import declared_converters  # torch
    from credit_dp.domain_parallel.costs.report import plan_report

    data = config.parallel.data or 1
    check_batch(config, data)
    model, shape = model_and_shape(config, data * microbatches_per_step(config))
    converters = declared_converters(model)
    return plan_report(model, shape, config.parallel.domain, custom_converters=converters), model


def model_and_shape(config: Config, parts: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Build the model without data for its parameters; the shape of one of `parts` of the batch.

    Raises:
        UserError: the grid or the variables are not as needed.
    """
    import torch  # takes seconds: not for --help

    from credit_dp.data.channel_preview import expected_channels, expected_grid
    from credit_dp.models import build_model

    grid = expected_grid(config.data)
    fields = expected_channels(config.data).fields(config.model.frames)
    try:
        with torch.device("meta"):
            model = build_model(config.model, fields, grid)
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        model = build_model(config.model, fields, grid)
    model = model.to(getattr(torch, config.trainer.dtype))
    return model, (config.data.batch_size // parts, fields.inputs, *grid)


@final
@dataclass(frozen=True)
class ParameterBudget:
    """Bytes on the fullest rank, and those that it sends in a step if reductions go in rings.

    Attributes:
        weights: as they are between steps.
        gradients: most of them at once.
        moments: of the optimizer.
        gathered: parameters of others that are here while a block computes.
        sent_gradients: to add gradients up.
        sent_weights: to gather what is shared out.
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


def replicated_budget(part: nn.Module, replicas: int, moments: int) -> ParameterBudget:
    """Return what it takes if each rank has all of a part (ddp).

    Args:
        part: the model, or a stage of it.
        replicas: ranks that have it, over the data and the domain axis.
        moments: of the optimizer, for each parameter.
    """
    weights = sum(p.nbytes for p in part.parameters())
    learning = sum(p.nbytes for p in _trainable(part.parameters()))
    sent = ring_all_reduce_bytes(learning, replicas)
    return ParameterBudget(weights, learning, moments * learning, 0, sent)


def sharded_budget(
    part: nn.Module,
    parallel: ParallelConfig,
    data: int,
    domain: int,
    micros: int,
    *,
    moments: int,
    gathers: int | None = None,
) -> ParameterBudget:
    """Return what it takes if the data ranks share out a part (fsdp2).

    Args:
        part: the converted model, or a stage of it.
        parallel: dtypes.
        data: ranks that share.
        domain: ranks that have the same shares.
        micros: micro-batches of a step.
        moments: of the optimizer, for each parameter.
        gathers: how often a block is gathered in a step of a pipeline, whose stages keep gradients
            whole until its end; None without a pipeline.
    """
    blocks = [list(block.parameters()) for block in fsdp_blocks(part)]
    in_blocks = {id(p) for block in blocks for p in block}
    rest = [p for p in part.parameters() if id(p) not in in_blocks]
    whole = [*(p for block in blocks for p in block), *rest]
    learning = list(_trainable(whole))
    compute, reduce = parallel.param_dtype, parallel.reduce_dtype or parallel.param_dtype
    # Without a pipeline for forward and for backward; what belongs to no block stays in between.
    times = 2 * micros if gathers is None else gathers
    once = micros if gathers is None else 1
    padded = data * _shard_bytes(learning, data, reduce)
    in_block = [data * _shard_bytes(block, data, compute) for block in blocks]
    of_rest = data * _shard_bytes(rest, data, compute)
    total = times * sum(in_block) + once * of_rest
    reduced = (data - 1) * padded // data + ring_all_reduce_bytes(padded // data, domain)
    return ParameterBudget(
        _shard_bytes(whole, data),
        _shard_bytes(learning, data)
        if gathers is None
        else max(padded, _shard_bytes(learning, data)),
        moments * _shard_bytes(learning, data),
        of_rest + (max(in_block, default=0) if gathers is None else sum(in_block)),
        once * reduced,
        (data - 1) * total // data,
    )


def ring_all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends to add up `size` bytes in a ring."""
    return 2 * (ranks - 1) * size // ranks


def _trainable(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return (p for p in parameters if p.requires_grad)


def _shard_bytes(parameters: Sequence[nn.Parameter], ranks: int, dtype: str | None = None) -> int:
    """Return the bytes of the first rank's shares, which are the largest: rows of dimension 0."""
    total = 0
    for p in parameters:
        rows = -(-p.shape[0] // ranks)
        size = p.element_size() if dtype is None else getattr(torch, dtype).itemsize
        total += rows * (p.numel() // p.shape[0]) * size
    return total


@final
@dataclass(frozen=True)
class Cut:
    """Where a stage begins.

    Attributes:
        stage: which one.
        pipeline_rank: that has it.
        first: its first segment.
        cost: its share of the model's multiply-adds.
        state_bytes: what one rank is handed by the stage before with each micro-batch.
    """

    stage: int
    pipeline_rank: int
    first: str
    cost: float
    state_bytes: int


@final
@dataclass(frozen=True)
class PipelinePlan:
    """All stages, as the fullest rank of a domain has them.

    Attributes:
        manager: of that rank; nothing is sent.
        bubble: the share of a step in which a rank waits, if all stages cost the same.
    """

    stages: tuple[Stage, ...]
    cuts: tuple[Cut, ...]
    manager: DomainParallelManager
    bubble: float


def plan_pipeline(model: nn.Module, report: PlanReport, config: Config) -> PipelinePlan:
    """Cut a model as training does.

    Args:
        model: not converted; left as it is.
        report: of the whole model, for one micro-batch.

    Raises:
        UserError: the model can't be cut so.
    """
    parallel, micros = config.parallel, microbatches_per_step(config)
    shape, virtual = report.input_shapes[0], parallel.virtual_stages
    costs = segment_costs(model, shape)
    slices = stage_slices(costs, parallel.pipeline * virtual, parallel.stages, virtual=virtual)
    manager = dry_run_manager(report.ranks)
    manager.rank = report.saved_bytes.index(max(report.saved_bytes))
    stages = cut_model(shard_model(copy_model(model), manager, shape), manager, slices, shape)
    shares = [sum(list(costs.values())[cut]) / sum(costs.values()) for cut in slices]
    cuts = [
        Cut(
            stage.index,
            stage.index % parallel.pipeline,
            list(costs)[cut.start],
            share,
            0 if stage.is_first else state_bytes(stage.input_specs, shape[0]),
        )
        for stage, cut, share in zip(stages, slices, shares, strict=True)
    ]
    idle = theoretical_bubble(parallel.pipeline, micros, virtual)
    return PipelinePlan(tuple(stages), tuple(cuts), manager, idle)


def dry_run_manager(domain: int) -> DomainParallelManager:
    """Return the manager of one rank of a domain, which sends nothing."""
    return DomainParallelManager(domain, domain, transport=CountingTransport(0, domain))


@final
@dataclass(frozen=True)
class RankBudget:
    """Bytes of the fullest rank of a place on the pipeline axis, by item.

    Attributes:
        mode: how parameters are held: ddp or fsdp2.
        held: at most.
        sent: in a step.
    """

    mode: str
    pipeline_rank: int
    held: dict[str, int]
    sent: dict[str, int]

    @property
    def total_held(self) -> int:
        """Return the sum of what is held."""
        return sum(self.held.values())

    @property
    def total_sent(self) -> int:
        """Return the sum of what is sent."""
        return sum(self.sent.values())

    def fits(self, memory: float) -> bool:
        """Return whether what is held fits in so many GiB."""
        return self.total_held <= memory * 2**30


def model_budget(model: nn.Module, report: PlanReport, config: Config) -> list[RankBudget]:
    """Return the budget of a rank that has the whole model: with ddp and, if it can be, fsdp2.

    Args:
        model: not converted; left as it is.
        report: for one micro-batch.
    """
    micros, data = microbatches_per_step(config), config.parallel.data or 1
    moments = moments_per_parameter(model, config)
    both = [a + b for a, b in zip(report.forward, report.backward, strict=True)]
    budgets = {"ddp": replicated_budget(model, data * report.ranks, moments)}
    sharded = _converted_copy(model, report)
    if _can_shard(sharded, data * report.ranks):
        budgets["fsdp2"] = sharded_budget(
            sharded, config.parallel, data, report.ranks, micros, moments=moments
        )
    kept, rows = max(report.saved_bytes), _max_bytes_sent(both)
    return [
        _rank_budget(mode, 0, of, (kept, 0), (rows * micros, 0)) for mode, of in budgets.items()
    ]


def pipeline_budget(plan: PipelinePlan, samples: int, config: Config) -> list[RankBudget]:
    """Return the budget of each rank of a pipeline.

    Args:
        samples: of a micro-batch.
    """
    ranks = config.parallel.pipeline
    return [
        budget
        for rank in range(ranks)
        for budget in _stage_budgets(plan.stages[rank::ranks], rank, plan, samples, config)
    ]


def _stage_budgets(
    stages: Sequence[Stage], rank: int, plan: PipelinePlan, samples: int, config: Config
) -> list[RankBudget]:
    parallel, micros, data = (
        config.parallel,
        microbatches_per_step(config),
        config.parallel.data or 1,
    )
    domain = plan.manager.domain_parallel_size
    order = schedule_actions(
        parallel.schedule, rank, parallel.pipeline, micros, parallel.virtual_stages
    )
    moments = [moments_per_parameter(stage.module, config) for stage in stages]
    whole = [
        replicated_budget(stage.module, data * domain, of)
        for stage, of in zip(stages, moments, strict=True)
    ]
    budgets = {"ddp": _sum_budgets(whole)}
    if all(_can_shard(stage.module, data * domain) for stage in stages):
        times = count_gathers(order)
        shares = [
            sharded_budget(
                stage.module,
                parallel,
                data,
                domain,
                micros,
                moments=moments[part],
                gathers=times[part],
            )
            for part, stage in enumerate(stages)
        ]
        budgets["fsdp2"] = _sum_budgets(shares)
    runs = [measure_stage(stage, plan.manager, samples) for stage in stages]
    received, handed = _state_traffic(stages, samples)
    held = peak_saved_bytes(order, [run.saved_bytes for run in runs]), received * micros
    sent = sum(_max_bytes_sent(run.sent) for run in runs) * micros, handed * micros
    return [_rank_budget(mode, rank, of, held, sent) for mode, of in budgets.items()]


def _state_traffic(stages: Sequence[Stage], samples: int) -> tuple[int, int]:
    """Return the bytes that these stages receive and send with each micro-batch, both ways."""
    later = [s.input_specs for s in stages if not s.is_first]
    earlier = [s.output_specs for s in stages if not s.is_last]
    taken, home = (sum(state_bytes(s, samples, gradients=g) for s in later) for g in (False, True))
    made, back = (sum(state_bytes(s, samples, gradients=g) for s in earlier) for g in (False, True))
    return taken + back, made + home


def _rank_budget(
    mode: str, rank: int, of: ParameterBudget, held: tuple[int, int], sent: tuple[int, int]
) -> RankBudget:
    return RankBudget(
        mode,
        rank,
        {
            "weights": of.weights,
            "gradients": of.gradients,
            "moments": of.moments,
            "gathered": of.gathered,
            "activations": held[0],
            "states": held[1],
        },
        {
            "rows": sent[0],
            "gradients": of.sent_gradients,
            "weights": of.sent_weights,
            "states": sent[1],
        },
    )


def _sum_budgets(budgets: Sequence[ParameterBudget]) -> ParameterBudget:
    return sum(budgets[1:], budgets[0])


def _max_bytes_sent(sent: Sequence[RankTraffic]) -> int:
    """Return the bytes of the rank that sends most; collectives as rings."""
    return max(of.bytes + ring_all_reduce_bytes(of.collective_bytes, len(sent)) for of in sent)


def _can_shard(part: nn.Module, replicas: int) -> bool:
    return replicas > 1 and not any(of_owner for _, of_owner in cuts(part))


def _converted_copy(model: nn.Module, report: PlanReport) -> nn.Module:
    """Return a converted copy, planned only if a parameter may have rows, for that takes long."""
    heights = {level.rows for level in report.levels}
    manager = dry_run_manager(report.ranks)
    if any(heights & {*p.shape} for p in model.parameters()):
        return shard_model(copy_model(model), manager, report.input_shapes[0])
    converters = declared_converters(model)
    return convert_to_domain_parallel(copy_model(model), manager, custom_converters=converters)


POWERS = 7  # domains of 1, 2, 4 ... 64 ranks, and of as many as the model allows


@final
@dataclass(frozen=True)
class MeshBudget:
    """A mesh of `data` x `domain` ranks, each data rank with one sample at a time.

    Attributes:
        rows: of the smallest band at the coarsest level.
        imbalance: rows of the largest band over the mean, at the level where that is most.
        budgets: of its fullest rank, with ddp and fsdp2.
    """

    domain: int
    data: int
    rows: int
    imbalance: float
    budgets: tuple[RankBudget, ...]


@final
@dataclass(frozen=True)
class MeshComparison:
    """All lines, and why the domain can't be larger than that of the last one."""

    up_to: int
    lines: tuple[MeshBudget, ...]
    refused: str


def compare_meshes(
    model: nn.Module, shape: tuple[int, ...], config: Config, up_to: int
) -> MeshComparison:
    """Plan a sample on domains of growing size, with as many data ranks as there are ranks for.

    Args:
        model: not converted; left as it is.
        shape: of a sample of the whole globe, `(1, C, H, W)`.
        up_to: ranks that there are.

    Raises:
        UserError: the config has a mesh already.
    """
    _check_up_to(config, up_to)
    most = config.model.coarsest_rows(shape[-2])
    lines: list[MeshBudget] = []
    for domain in domain_sizes(min(most, up_to)):
        report = _report(model, shape, domain)
        if report.problems:
            return MeshComparison(up_to, tuple(lines), report.problems[0])
        lines.append(_mesh_budget(model, report, config, up_to // domain))
    refused = ""
    if most < up_to:
        refused = next(iter(_report(model, shape, most + 1).problems), "")
    return MeshComparison(up_to, tuple(lines), refused)


def domain_sizes(most: int, powers: int = POWERS) -> Iterator[int]:
    """Numbers of ranks to compare: so many powers of two, and as many as there can be."""
    yield from (2**power for power in range(powers) if 2**power < most)
    yield most


def _report(model: nn.Module, shape: tuple[int, ...], domain: int) -> PlanReport:
    return plan_report(model, shape, domain, custom_converters=declared_converters(model))


def _mesh_budget(model: nn.Module, report: PlanReport, config: Config, data: int) -> MeshBudget:
    parallel = replace(config.parallel, domain=report.ranks, data=data)
    trainer = replace(config.trainer, accumulate=1)
    of_mesh = replace(config, parallel=parallel, trainer=trainer)
    coarsest = report.levels[-1]
    return MeshBudget(
        report.ranks,
        data,
        min(coarsest.bands),
        max(level.imbalance for level in report.levels),
        tuple(model_budget(model, report, of_mesh)),
    )


def _check_up_to(config: Config, up_to: int) -> None:
    parallel = config.parallel
    if up_to < 1:
        raise UserError(f"--up-to: needs at least 1 rank, got {up_to}.")
    for key in ("domain", "pipeline"):
        if getattr(parallel, key) > 1:
            raise UserError(
                f"--up-to: tries meshes of data x domain ranks, got parallel.{key}="
                f"{getattr(parallel, key)}. Leave it out."
            )
    if parallel.data is not None:
        raise UserError(
            f"--up-to: gives every mesh all the data ranks it can have, got parallel.data="
            f"{parallel.data}. Leave it out."
        )

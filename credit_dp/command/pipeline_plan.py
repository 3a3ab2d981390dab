"""Where the plan cuts a model into stages, and what each of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import nn

from credit_dp.config import Config, microbatches
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.copies import copied
from credit_dp.domain_parallel.tally import Tally
from credit_dp.pipeline_parallel.bubble import theoretical_bubble
from credit_dp.pipeline_parallel.costs import cut_points, segment_costs
from credit_dp.pipeline_parallel.stage_run import state_bytes
from credit_dp.pipeline_parallel.stages import Stage, cut_model

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport


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
    parallel, micros = config.parallel, microbatches(config)
    shape, virtual = report.input_shapes[0], parallel.virtual_stages
    costs = segment_costs(model, shape)
    slices = cut_points(costs, parallel.pipeline * virtual, parallel.stages, virtual=virtual)
    manager = nobody_else(report.ranks)
    manager.rank = report.saved_bytes.index(max(report.saved_bytes))
    stages = cut_model(shard_model(copied(model), manager, shape), manager, slices, shape)
    shares = [sum(list(costs.values())[cut]) / sum(costs.values()) for cut in slices]
    cuts = [
        Cut(
            stage.index,
            stage.index % parallel.pipeline,
            list(costs)[cut.start],
            share,
            0 if stage.is_first else state_bytes(stage.takes, shape[0]),
        )
        for stage, cut, share in zip(stages, slices, shares, strict=True)
    ]
    idle = theoretical_bubble(parallel.pipeline, micros, virtual)
    return PipelinePlan(tuple(stages), tuple(cuts), manager, idle)


def nobody_else(domain: int) -> DomainParallelManager:
    """Return the manager of one rank of a domain, which sends nothing."""
    return DomainParallelManager(domain, domain, transport=Tally(0, domain))

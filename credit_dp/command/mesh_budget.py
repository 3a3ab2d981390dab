"""What each rank of a mesh holds and sends in a step: rows, activations, weights, states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import nn

from credit_dp.command.parameter_budget import ParameterBudget, all_reduced, of_all, of_shares
from credit_dp.command.pipeline_plan import PipelinePlan, nobody_else
from credit_dp.config import Config, microbatches
from credit_dp.domain_parallel.build import declared_converters, shard_model
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.copies import copied
from credit_dp.domain_parallel.row_tensors import cuts
from credit_dp.domain_parallel.tally import Sent
from credit_dp.pipeline_parallel.order import most_kept, times_gathered, work_order
from credit_dp.pipeline_parallel.stage_run import run_stage, state_bytes
from credit_dp.pipeline_parallel.stages import Stage
from credit_dp.training.optimisation import moments_of

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport


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
    def all_held(self) -> int:
        """Return the sum of what is held."""
        return sum(self.held.values())

    @property
    def all_sent(self) -> int:
        """Return the sum of what is sent."""
        return sum(self.sent.values())

    def fits(self, memory: float) -> bool:
        """Return whether what is held fits in so many GiB."""
        return self.all_held <= memory * 2**30


def model_budget(model: nn.Module, report: PlanReport, config: Config) -> list[RankBudget]:
    """Return the budget of a rank that has the whole model: with ddp and, if it can be, fsdp2.

    Args:
        model: not converted; left as it is.
        report: for one micro-batch.
    """
    micros, data = microbatches(config), config.parallel.data or 1
    moments = moments_of(model, config)
    both = [a + b for a, b in zip(report.forward, report.backward, strict=True)]
    budgets = {"ddp": of_all(model, data * report.ranks, moments)}
    sharded = _converted(model, report)
    if _can_share(sharded, data * report.ranks):
        budgets["fsdp2"] = of_shares(
            sharded, config.parallel, data, report.ranks, micros, moments=moments
        )
    kept, rows = max(report.saved_bytes), _most_sent(both)
    return [_budget(mode, 0, of, (kept, 0), (rows * micros, 0)) for mode, of in budgets.items()]


def pipeline_budget(plan: PipelinePlan, samples: int, config: Config) -> list[RankBudget]:
    """Return the budget of each rank of a pipeline.

    Args:
        samples: of a micro-batch.
    """
    ranks = config.parallel.pipeline
    return [
        budget
        for rank in range(ranks)
        for budget in _of_stages(plan.stages[rank::ranks], rank, plan, samples, config)
    ]


def _of_stages(
    stages: Sequence[Stage], rank: int, plan: PipelinePlan, samples: int, config: Config
) -> list[RankBudget]:
    parallel, micros, data = config.parallel, microbatches(config), config.parallel.data or 1
    domain = plan.manager.domain_parallel_size
    order = work_order(parallel.schedule, rank, parallel.pipeline, micros, parallel.virtual_stages)
    moments = [moments_of(stage.module, config) for stage in stages]
    whole = [
        of_all(stage.module, data * domain, of) for stage, of in zip(stages, moments, strict=True)
    ]
    budgets = {"ddp": _total(whole)}
    if all(_can_share(stage.module, data * domain) for stage in stages):
        times = times_gathered(order)
        shares = [
            of_shares(
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
        budgets["fsdp2"] = _total(shares)
    runs = [run_stage(stage, plan.manager, samples) for stage in stages]
    received, handed = _states(stages, samples)
    held = most_kept(order, [run.kept_bytes for run in runs]), received * micros
    sent = sum(_most_sent(run.sent) for run in runs) * micros, handed * micros
    return [_budget(mode, rank, of, held, sent) for mode, of in budgets.items()]


def _states(stages: Sequence[Stage], samples: int) -> tuple[int, int]:
    """Return the bytes that these stages receive and send with each micro-batch, both ways."""
    later = [s.takes for s in stages if not s.is_first]
    earlier = [s.makes for s in stages if not s.is_last]
    taken, home = (sum(state_bytes(s, samples, gradients=g) for s in later) for g in (False, True))
    made, back = (sum(state_bytes(s, samples, gradients=g) for s in earlier) for g in (False, True))
    return taken + back, made + home


def _budget(
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


def _total(budgets: Sequence[ParameterBudget]) -> ParameterBudget:
    return sum(budgets[1:], budgets[0])


def _most_sent(sent: Sequence[Sent]) -> int:
    """Return the bytes of the rank that sends most; collectives as rings."""
    return max(of.bytes + all_reduced(of.collective_bytes, len(sent)) for of in sent)


def _can_share(part: nn.Module, replicas: int) -> bool:
    return replicas > 1 and not any(of_owner for _, of_owner in cuts(part))


def _converted(model: nn.Module, report: PlanReport) -> nn.Module:
    """Return a converted copy, planned only if a parameter may have rows, for that takes long."""
    heights = {level.rows for level in report.levels}
    manager = nobody_else(report.ranks)
    if any(heights & {*p.shape} for p in model.parameters()):
        return shard_model(copied(model), manager, report.input_shapes[0])
    converters = declared_converters(model)
    return convert_to_domain_parallel(copied(model), manager, custom_converters=converters)

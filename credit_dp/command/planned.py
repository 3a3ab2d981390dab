"""What the plan command finds out: the report on a model, and the budget of its mesh."""

from typing import TYPE_CHECKING, NamedTuple

from credit_dp.config import Config, microbatches
from credit_dp.launch.layout import check_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from credit_dp.command.mesh_budget import RankBudget
    from credit_dp.command.pipeline_plan import PipelinePlan
    from credit_dp.domain_parallel.report import PlanReport


class Plan(NamedTuple):
    """What the command found; no budgets if the model can't be sharded so."""

    report: "PlanReport"
    budgets: "Sequence[RankBudget]"
    pipeline: "PipelinePlan | None"


def plan_of(config: Config) -> Plan:
    """Plan a micro-batch of the configured model, and from it what a step takes.

    Raises:
        UserError: grid, batch or variables are not as needed, or the model can't be cut.
    """
    report, model = _report(config)
    if report.problems:
        return Plan(report, (), None)
    from credit_dp.command.mesh_budget import model_budget, pipeline_budget  # torch
    from credit_dp.command.pipeline_plan import plan_pipeline

    if config.parallel.pipeline == 1:
        return Plan(report, model_budget(model, report, config), None)
    pipeline = plan_pipeline(model, report, config)
    samples = report.input_shapes[0][0]
    return Plan(report, pipeline_budget(pipeline, samples, config), pipeline)


def _report(config: Config) -> "tuple[PlanReport, nn.Module]":
    from credit_dp.domain_parallel.build import declared_converters  # torch
    from credit_dp.domain_parallel.report import plan_report

    data = config.parallel.data or 1
    check_batch(config, data)
    model, shape = model_and_shape(config, data * microbatches(config))
    converters = declared_converters(model)
    return plan_report(model, shape, config.parallel.domain, custom_converters=converters), model


def model_and_shape(config: Config, parts: int) -> "tuple[nn.Module, tuple[int, ...]]":
    """Build the model without data for its parameters; the shape of one of `parts` of the batch.

    Raises:
        UserError: the grid or the variables are not as needed.
    """
    import torch  # takes seconds: not for --help

    from credit_dp.data.expected import expected_channels, expected_grid
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

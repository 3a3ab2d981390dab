"""`--check`: what a run would take, before anything starts."""

import sys
from collections.abc import Mapping

from credit_dp.command.planned import Plan, plan_of
from credit_dp.command.tables import amount
from credit_dp.config import Config, DataConfig, OwnLossConfig
from credit_dp.errors import UserError


def check_and_tell(config: Config) -> int:
    """Plan a valid config and say what each rank would hold and send; the exit code.

    A store that can't be seen from here is no mistake in the config: it is told, and no plan made.

    Raises:
        UserError: the batch does not divide, the model can't be built or cut, or a loss or an
            optimizer of the user's own would not train exactly.
    """
    try_loss(config)
    sys.stdout.write("The config is valid.\n")
    missing = why_unseen(config.data)
    if missing is not None:
        sys.stdout.write(f"There is no plan, as the data can't be seen from here: {missing}\n")
        return 0
    plan = plan_of(config)
    sys.stdout.write("".join(f"{line}\n" for line in lines(plan, config)))
    return 1 if plan.report.problems else 0


def try_loss(config: Config) -> None:
    """Refuse a loss of the user's own that would be refused when the run starts.

    Raises:
        UserError: see `of_plugin`.
    """
    if isinstance(config.loss, OwnLossConfig):
        import torch  # takes seconds

        from credit_dp.training.loss import of_plugin

        of_plugin(config.loss, torch.zeros((), dtype=getattr(torch, config.trainer.dtype)))


def why_unseen(data: DataConfig) -> str | None:
    """Why the grid and the variables are not known; None if they are."""
    from credit_dp.data.expected import expected_channels, expected_grid  # takes seconds

    if data.name == "quickstart":
        return None  # nothing to be opened: what is wrong there is wrong in the config
    try:
        expected_channels(data)
        expected_grid(data)
    except UserError as error:
        return str(error)
    return None


def lines(plan: Plan, config: Config) -> list[str]:
    """The model, and a line for each rank of a pipeline, or one for all ranks."""
    from credit_dp.training.out_of_memory import in_training  # takes seconds

    report, parallel = plan.report, config.parallel
    if report.problems:
        return ["It can't be sharded so:", *(f"  {problem}" for problem in report.problems)]
    axes = {"pipeline": parallel.pipeline, "data": parallel.data or 1, "domain": parallel.domain}
    mesh = " x ".join(f"{name} {ranks}" for name, ranks in axes.items())
    found = [
        f"model   {config.model.name}, {report.parameters:,} parameters",
        f"mesh    {mesh}{'' if parallel.data else ', for parallel.data is not given'}",
    ]
    modes = {budget.mode for budget in plan.budgets}
    mode = parallel.data_mode if parallel.data_mode in modes else "ddp"
    for budget in plan.budgets:
        if budget.mode == mode:
            whose = f"pipeline {budget.pipeline_rank}" if parallel.pipeline > 1 else "each rank"
            held, sent = in_training(budget.held, config), sent_in(config, budget.sent)
            items = ", ".join(f"{name} {amount(size)}" for name, size in held.items() if size)
            found.append(f"memory  {whose}: about {amount(sum(held.values()))} ({items})")
            found.append(f"sent    {whose}: {amount(sum(sent.values()))} in a step")
    return found


def sent_in(config: Config, sent: Mapping[str, int]) -> dict[str, int]:
    """What is sent by item, for the longest rollout."""
    return {**sent, "rows": config.trainer.longest_rollout * sent["rows"]}

"""The plan command's tables about meshes: what ranks hold and send, and where the cuts are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from credit_dp.command.tables import amount, table
from credit_dp.config import Config

if TYPE_CHECKING:
    from credit_dp.command.mesh_budget import RankBudget
    from credit_dp.command.meshes import Meshes
    from credit_dp.command.pipeline_plan import PipelinePlan

LARGE = ("domain", "data", "rows", "imbalance")


def held_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """What the fullest rank of each place on the pipeline axis holds."""
    columns = [name for name in budgets[0].held if any(b.held[name] for b in budgets)]
    rows = [
        (*_place(budget), *(amount(budget.held[name]) for name in columns), amount(budget.all_held))
        for budget in budgets
    ]
    lines = table(("a rank holds", "pipeline", *columns, "all"), rows, left=1)
    if "gathered" in columns:
        lines.append("gathered: weights of other ranks, while a block of segments computes")
    if "states" in columns:
        lines.append("states: room for what stages hand on, and its gradients")
    return [
        *lines,
        "activations: an estimate. What an operation needs while it runs comes on top",
    ]


def sent_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """What the rank that sends most, of each place on the pipeline axis, sends in a step."""
    columns = [name for name in budgets[0].sent if any(b.sent[name] for b in budgets)]
    if not columns:
        return []
    rows = [
        (*_place(budget), *(amount(budget.sent[name]) for name in columns), amount(budget.all_sent))
        for budget in budgets
    ]
    return [
        "",
        *table(("a rank sends", "pipeline", *columns, "all"), rows, left=1),
        "in a step; rows and states are counted, gradients and weights go round in rings",
    ]


def cuts_table(plan: "PipelinePlan") -> list[str]:
    """The stages of a pipeline."""
    rows = [
        (
            cut.first,
            str(cut.stage),
            str(cut.pipeline_rank),
            f"{cut.cost:.1%}",
            amount(cut.state_bytes) if cut.stage else "-",
        )
        for cut in plan.cuts
    ]
    return [
        *table(("first segment", "stage", "pipeline", "cost", "state"), rows, left=1),
        "cost: share of the multiply-adds; state: bytes that a rank is handed for a micro-batch",
        f"bubble: a rank waits {plan.bubble:.1%} of a step, if all stages cost the same",
    ]


def meshes_table(meshes: "Meshes", config: Config, memory: float) -> str:
    """Lines for people: one for each number of domain ranks."""
    if not meshes.lines:
        return f"It can't be sharded:\n  {meshes.refused}\n"
    rows = []
    for line in meshes.lines:
        of = {budget.mode: budget for budget in line.budgets}
        ddp, shared = of["ddp"], of.get("fsdp2")
        fits = [mode for mode, budget in of.items() if budget.fits(memory)]
        rows.append(
            (
                *(str(line.domain), str(line.data), str(line.rows), f"{line.imbalance:.3f}"),
                amount(ddp.held["activations"]),
                amount(ddp.all_held),
                amount(shared.all_held) if shared else "-",
                amount(ddp.sent["rows"]),
                amount(ddp.sent["gradients"]),
                amount(shared.sent["gradients"] + shared.sent["weights"]) if shared else "-",
                ", ".join(fits) or "-",
            )
        )
    names = ("activations", "with ddp", "with fsdp2", "rows", "for ddp", "for fsdp2")
    lines = [f"model   {config.model.name}, {config.trainer.dtype}", ""]
    lines += [*table((*LARGE, *names, f"fits {memory:g} GiB"), rows), *_legend(meshes)]
    return "\n".join(lines) + "\n"


def _legend(meshes: "Meshes") -> list[str]:
    alone = meshes.lines[0].budgets[0].held
    weights, moments = amount(alone["weights"]), amount(alone["moments"])
    lines = [
        "",
        f"Meshes of at most {meshes.up_to} ranks; every data rank works on one sample at a time.",
        "rows: the smallest band at the coarsest level; imbalance: the largest band over the mean",
        "activations, with ddp, with fsdp2: what the fullest rank holds; the last two all of it",
        f"  with ddp: weights {weights}, gradients as much, moments {moments}, activations",
        "  with fsdp2: shares of these, the largest block gathered, activations",
        "rows, for ddp, for fsdp2: what the rank that sends most sends in a step",
    ]
    return [*lines, f"No larger domain: {meshes.refused}"] if meshes.refused else lines


def _place(budget: "RankBudget") -> tuple[str, str]:
    return budget.mode, str(budget.pipeline_rank)

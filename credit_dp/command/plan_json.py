"""The answers of the plan command as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from credit_dp.config import Config

if TYPE_CHECKING:
    from credit_dp.command.meshes import Meshes, MeshLine
    from credit_dp.command.planned import Plan


def plan_json(plan: "Plan", config: Config) -> str:
    """The whole report, every rank's numbers in lists in the order of the ranks."""
    report = plan.report
    content: dict[str, Any] = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        **asdict(report),
        "forward": [vars(sent) for sent in report.forward],
        "backward": [vars(sent) for sent in report.backward],
        "budget": [asdict(budget) for budget in plan.budgets],
    }
    if plan.pipeline is not None:
        content["cuts"] = [asdict(cut) for cut in plan.pipeline.cuts]
        content["bubble"] = plan.pipeline.bubble
    for level, written in zip(report.levels, content["levels"], strict=True):
        written |= {"imbalance": level.imbalance, "excess": level.excess}
    return json.dumps(content, indent=2) + "\n"


def meshes_json(meshes: "Meshes", config: Config, memory: float) -> str:
    """One entry for each number of domain ranks."""
    content = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        "up_to": meshes.up_to,
        "memory_gib": memory,
        "refused": meshes.refused,
        "meshes": [_line(line, memory) for line in meshes.lines],
    }
    return json.dumps(content, indent=2) + "\n"


def _line(line: "MeshLine", memory: float) -> dict[str, Any]:
    fits: Sequence[str] = [b.mode for b in line.budgets if b.fits(memory)]
    return {**asdict(line), "fits": fits}

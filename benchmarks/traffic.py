"""Compare what a step sends with the least possible: `python benchmarks/traffic.py`."""

from __future__ import annotations

import torch
from memory import FIELDS
from pinned import on_pinned_ranks
from side_by_side import Row
from table import show

from credit_dp.cli.compose import Composer
from credit_dp.config import ModelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.decide import Decision, plan_report
from credit_dp.models import build_model

MODELS = ("unet", "pangu", "crossformer", "swin")
GRID = (64, 128)
DOMAINS = (2, 3)


def counted(manager: DomainParallelManager, config: ModelConfig) -> tuple[int, int]:
    """Return the bytes of rows and the messages that this rank sends in a forward and backward."""
    model = build_model(config, FIELDS, GRID)
    shard_model(model, manager, (1, FIELDS.inputs, *GRID))
    rows = len(range(GRID[0])[manager.rows(GRID[0])])
    before = manager.transport.traffic.bytes, manager.transport.traffic.messages
    model(torch.randn(1, FIELDS.inputs, rows, GRID[1])).sum().backward()
    traffic = manager.transport.traffic
    return traffic.bytes - before[0], traffic.messages - before[1]


def planned(config: ModelConfig, ranks: int) -> Decision:
    """Return the plan of the same step."""
    with torch.device("meta"):
        model = build_model(config, FIELDS, GRID)
    return plan_report(model, (1, FIELDS.inputs, *GRID), ranks)


def rows() -> list[Row]:
    """Return bytes relative to the least for these bands, and messages relative to the plan."""
    made = []
    for name in MODELS:
        config = Composer("train").compose_config([f"model={name}"]).model
        for ranks in DOMAINS:
            sent = on_pinned_ranks(counted, config, ranks=ranks)
            plan = planned(config, ranks)
            least = sum(level.least_bytes for level in plan.levels)
            messages = sum(part.messages for part in (*plan.forward, *plan.backward))
            all_bytes, all_messages = (sum(of_rank) for of_rank in zip(*sent, strict=True))
            what = f"{name} at {GRID[0]}x{GRID[1]}, domain {ranks}"
            made += [
                Row(
                    f"bytes of a step, {what}", "the least for these bands", all_bytes / least, 1.0
                ),
                Row(f"messages of a step, {what}", "the plan", all_messages / messages, 1.0),
            ]
    return made


if __name__ == "__main__":
    show(rows())

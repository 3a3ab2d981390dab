"""Measure the memory of a rank when a model's fields are sharded: `python benchmarks/memory.py`.

This is the growth of its resident memory in a forward and backward. Weights, gradients and
optimizer states are allocated before and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peak import forget_peak, peak, resident
from pinned import frees_at_once, on_pinned_ranks
from side_by_side import Row
from table import show

from credit_dp.cli.compose import Composer
from credit_dp.config import ModelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.fields import Fields
from credit_dp.models import build_model

MODELS = {"unet_small": (128, 256), "pangu_small": (128, 256), "crossformer_small": (128, 256)}
FIELDS = Fields((tuple(range(7)), tuple(range(7, 14))), (14,), others=4)
DOMAINS = (2, 4)
SLACK = 0.03  # for temporary memory of operations
MIB = 2**20


def growth(manager: DomainParallelManager, config: ModelConfig, grid: tuple[int, int]) -> int:
    """Return the largest growth of a rank's memory in a step, in bytes."""
    rows, columns = grid
    model = build_model(config, FIELDS, grid)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, (1, FIELDS.inputs, *grid))
        rows = len(range(rows)[manager.rows(rows)])
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)
    x = torch.randn(1, FIELDS.inputs, rows, columns)
    model(x).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    before = resident()
    forget_peak()
    model(x).square().mean().backward()
    return peak() - before


def rows() -> list[Row]:
    """Return the growth on 2 and 4 ranks relative to one; the goal is the largest band's share."""
    with frees_at_once():
        return [row for name, grid in MODELS.items() for row in rows_of(name, grid)]


def rows_of(name: str, grid: tuple[int, int]) -> Iterator[Row]:
    """Yield the figures of one model."""
    config = Composer("train").compose_config([f"model={name}"]).model
    alone = max(on_pinned_ranks(growth, config, grid, ranks=1))
    for ranks in DOMAINS:
        found = max(on_pinned_ranks(growth, config, grid, ranks=ranks))
        band, kept = expected(config, grid, ranks)
        # Halos that are saved for backward are not part of the goal, which is so a little stricter.
        yield Row(
            f"activation memory of a rank, {name} at {grid[0]}x{grid[1]}, domain {ranks}",
            "one process",
            found / alone,
            band + SLACK,
            note=f"{found / MIB:.0f} of {alone / MIB:.0f} MiB; largest band / rows "
            f"{band:.3f}, tensors kept for backward {kept:.3f}",
        )


def expected(config: ModelConfig, grid: tuple[int, int], ranks: int) -> tuple[float, float]:
    """Return the largest band's share of the rows, and the share of tensors saved for backward."""
    with torch.device("meta"):
        model = build_model(config, FIELDS, grid)
    shape = (1, FIELDS.inputs, *grid)
    reports = [plan_report(model, shape, n) for n in (1, ranks)]
    alone, sharded = (max(report.saved_bytes) for report in reports)
    bands = next(level.bands for level in reports[1].levels if level.rows == grid[0])
    return max(bands) / grid[0], sharded / alone


if __name__ == "__main__":
    show(rows())

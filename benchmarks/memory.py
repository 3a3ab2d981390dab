"""What a rank holds of each model when its fields are sharded: `python benchmarks/memory.py`.

Growth is that of a rank's resident memory over a forward and backward, above weights, gradients and
optimiser states, which are there before.
"""

from __future__ import annotations

import argparse
import os

# Freed tensors go back to the system at once: what is resident is what is held. Read by the C
# library as a process starts, so by the ranks.
os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"

import torch
from peak import forget_peak, peak, resident
from pinned import on_pinned_ranks

from credit_dp.command.compose import Composer
from credit_dp.config import ModelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import declared_converters, shard_model
from credit_dp.domain_parallel.report import plan_report
from credit_dp.fields import Fields
from credit_dp.models import build_model

MODELS = {"unet_small": (128, 256), "pangu_small": (128, 256), "crossformer_small": (128, 256)}
FIELDS = Fields((tuple(range(7)), tuple(range(7, 14))), (14,), others=4)
DOMAINS = (1, 2, 4)


def growth(manager: DomainParallelManager, config: ModelConfig, grid: tuple[int, int]) -> int:
    """Return by how many bytes a rank's memory grows at most in a step."""
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


def main() -> None:
    """Print each model's growth on 2 and 4 ranks relative to one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    print("model              rows  ranks   band / rows     growth  / one rank  planned")
    for name in parser.parse_args().models:
        grid = MODELS[name]
        config = Composer("train").config([f"model={name}"]).model
        alone = 0
        for ranks in DOMAINS:
            found = max(on_pinned_ranks(growth, config, grid, ranks=ranks))
            alone = alone or found
            share, planned = expected(config, grid, ranks)
            print(
                f"{name:<18} {grid[0]:4} {ranks:6} {share:13.3f} {found / 2**20:8.0f} M "
                f"{found / alone:11.3f} {planned:8.3f}"
            )


def expected(config: ModelConfig, grid: tuple[int, int], ranks: int) -> tuple[float, float]:
    """Return the largest band's share of the rows, and the share that the plan says is kept."""
    with torch.device("meta"):
        model = build_model(config, FIELDS, grid)
    shape = (1, FIELDS.inputs, *grid)
    reports = [
        plan_report(model, shape, n, custom_converters=declared_converters(model))
        for n in (1, ranks)
    ]
    alone, sharded = (max(report.saved_bytes) for report in reports)
    bands = next(level.bands for level in reports[1].levels if level.rows == grid[0])
    return max(bands) / grid[0], sharded / alone


if __name__ == "__main__":
    main()

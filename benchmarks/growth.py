"""Draw how the cost of a training step grows: `python benchmarks/growth.py`.

Measures time, growth of a rank's memory, and bytes that a rank sends, in a forward and backward of
the U-Net, for several numbers of rows, channels and ranks, and draws `docs/growth.png`. With more
ranks than cores, the time shows the work of all ranks, not a speed-up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from memory import FIELDS, MIB
from peak import forget_peak, peak, resident
from pinned import RANKS, frees_at_once, on_pinned_ranks

from credit_dp.cli.compose import Composer
from credit_dp.config import ModelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.evaluation.figure_style import figure_style
from credit_dp.models import build_model

PLOT = Path(__file__).parents[1] / "docs/growth.png"
ROWS, WIDTHS, DOMAINS = (64, 128, 192, 256), (16, 32, 48, 64), (1, 2, 3, 4, 8)
GRID, WIDTH = (96, 192), 32
STEPS = 3


class Cost(NamedTuple):
    """The costs of a step, each of the rank on which it is largest."""

    seconds: float
    growth: float  # MiB
    sent: float  # MiB


class Case(NamedTuple):
    """The grid, the channels of the first level, and the number of ranks."""

    grid: tuple[int, int] = GRID
    width: int = WIDTH
    ranks: int = RANKS


def cost(manager: DomainParallelManager, config: ModelConfig, grid: tuple[int, int]) -> Cost:
    """Return the costs of this rank."""
    model = build_model(config, FIELDS, grid)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, (1, FIELDS.inputs, *grid))
    x = torch.randn(1, FIELDS.inputs, len(range(grid[0])[manager.rows(grid[0])]), grid[1])
    model(x).sum().backward()
    before, sent = resident(), manager.transport.traffic.bytes
    forget_peak()
    model(x).sum().backward()
    growth = peak() - before
    sent = manager.transport.traffic.bytes - sent
    seconds = float("inf")
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        model(x).sum().backward()
        seconds = min(seconds, time.perf_counter() - began)
    return Cost(seconds, growth / MIB, sent / MIB)


def measure(case: Case) -> Cost:
    """Return the largest costs of all ranks.

    Memory is measured on ranks that return freed tensors to the system at once. They are slow, so
    time is measured on others.
    """
    channels = f"model.channels=[{case.width},{2 * case.width},{4 * case.width}]"
    config = Composer("train").compose_config(["model=unet", channels]).model
    with frees_at_once():
        held = on_pinned_ranks(cost, config, case.grid, ranks=case.ranks)
    found = on_pinned_ranks(cost, config, case.grid, ranks=case.ranks)
    return Cost(
        max(each.seconds for each in found),
        max(each.growth for each in held),
        max(each.sent for each in found),
    )


@figure_style()
def main() -> None:
    """Measure, print and draw."""
    along: dict[str, Sequence[tuple[int, Case]]] = {
        "rows": [(rows, Case(grid=(rows, GRID[1]))) for rows in ROWS],
        "channels of the first level": [(width, Case(width=width)) for width in WIDTHS],
        "ranks": [(ranks, Case(ranks=ranks)) for ranks in DOMAINS],
    }
    names = ("time of a step (s)", "growth of memory (MiB)", "sent by a rank (MiB)")
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(len(names), len(along))
    for column, (what, cases) in zip(axes.T, along.items(), strict=True):
        found = [measure(case) for _, case in cases]
        for (at, _), costs in zip(cases, found, strict=True):
            print(f"{what:<28} {at:4} " + " ".join(f"{value:9.3f}" for value in costs), flush=True)
        for axis, name, values in zip(column, names, zip(*found, strict=True), strict=True):
            axis.plot([at for at, _ in cases], values, "o-")
            axis.set(xlabel=what, ylabel=name, ylim=(0, None))
    figure.suptitle(f"U-Net, {GRID[0]}x{GRID[1]}, width {WIDTH}, {RANKS} ranks unless varied")
    figure.savefig(PLOT, dpi=80)


if __name__ == "__main__":
    main()

"""Measure how long the ranks of a pipeline wait for each other: `python benchmarks/bubble.py`.

Two ranks train a U-Net in stages. The theory assumes stages of equal cost, so the cost of the most
expensive stage, relative to the mean, is printed beside it.
"""

from __future__ import annotations

from statistics import median

import torch
from pinned import RANKS, on_pinned_ranks
from torch import Tensor

from credit_dp.config import UNetConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.models.unet import UNet
from credit_dp.pipeline_parallel.pipeline import Pipeline, theoretical_bubble
from credit_dp.pipeline_parallel.stages import cut_model, segment_costs, stage_slices

CHANNELS = 16
GRID = (91, 180)
MODEL = UNetConfig(channels=[32, 64, 128], blocks=2)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # stages of each rank
MICROBATCHES = (2, 4, 8)  # of one sample
ROUNDS = 7


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


def measured(_: DomainParallelManager, schedule: str, microbatches: int) -> tuple[float, float]:
    """Return the median share of waiting, and the largest cost of a stage over the mean cost."""
    manager = DomainParallelManager(RANKS, 1, pipeline_parallel_size=RANKS)
    torch.manual_seed(0)
    model = UNet(MODEL, CHANNELS, CHANNELS)
    shape = (microbatches, CHANNELS, *GRID)
    costs = segment_costs(model, shape)
    cuts = stage_slices(costs, SCHEDULES[schedule] * RANKS)
    pipeline = Pipeline(cut_model(model, manager, cuts, shape), manager, schedule, microbatches)
    x = torch.randn(shape)
    found = []
    for _ in range(1 + ROUNDS):
        pipeline.forward_backward(x, x, squared)
        found.append(pipeline.bubble())
    of_stages = [sum(list(costs.values())[cut]) for cut in cuts]
    return median(found[1:]), max(of_stages) * len(cuts) / sum(of_stages)


def main() -> None:
    """Print a table."""
    print(f"U-Net {MODEL.channels} on {GRID[0]}x{GRID[1]}, {RANKS} ranks of one thread")
    for schedule, virtual in SCHEDULES.items():
        for microbatches in MICROBATCHES:
            bubble, costliest = on_pinned_ranks(measured, schedule, microbatches)[0]
            theory = theoretical_bubble(RANKS, microbatches, virtual)
            print(
                f"{schedule:<12}{microbatches:2} micro-batches   measured {bubble:6.1%}   "
                f"theory {theory:6.1%}   costliest stage {costliest:.2f} x the mean"
            )


if __name__ == "__main__":
    main()

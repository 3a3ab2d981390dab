"""Measure the overhead of layers: a sharded step on tiny inputs.

`python benchmarks/small_layers.py`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from pinned import RANKS, Contestants, team
from side_by_side import Entry, Row, times
from table import show
from torch import nn

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel

LAYERS = 20
SHAPE = (1, 8, 16, 16)
PER_LAYER = 50e-6  # seconds of overhead allowed per layer, besides its messages


def contestants(manager: DomainParallelManager) -> Contestants:
    """Return the stack on its band without exchange, the sharded stack, and only its messages."""
    band = (*SHAPE[:2], SHAPE[2] // RANKS, SHAPE[3])
    alone = stack()
    sharded = convert_to_domain_parallel(stack(), manager, input_shape=SHAPE)
    x = torch.randn(band, requires_grad=True)
    cotangent = torch.randn(band)
    return {
        "band": lambda: alone(x).backward(cotangent),
        "sharded": lambda: sharded(x).backward(cotangent),
        "messages": messages(SHAPE[1], SHAPE[3]),
    }


def stack() -> nn.Sequential:
    """Return convolutions, each with a group norm."""
    channels = SHAPE[1]
    blocks = [
        (nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def messages(channels: int, columns: int) -> Callable[[], None]:
    """Return a function that sends the messages and reductions of a step one after the other."""
    rank = dist.get_rank()
    row, received = torch.zeros(2, 1, channels, 1, columns)
    swap = [dist.P2POp(dist.isend, row, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    moments = torch.zeros(2, 1, 2)
    gathered = list(torch.zeros(RANKS, *moments.shape).unbind(0))

    def send() -> None:
        for forward in (True, False):
            for _ in range(LAYERS):
                for work in dist.batch_isend_irecv(swap):
                    work.wait()
                if forward:
                    dist.all_gather(gathered, moments)
                else:
                    dist.all_reduce(moments)

    return send


def rows(rounds: int) -> list[Row]:
    """Return the time of the sharded step, and what sharding adds to a step without exchange."""
    with team(contestants) as ranks:
        labels = ("messages", "band", "sharded", "messages")
        entries = [Entry(f"{label} {at}", ranks, label) for at, label in enumerate(labels)]
        first, band, sharded, second = times(entries, 5 * rounds).values()
    bare = min(*first, *second)
    goal = 1.5 + LAYERS * PER_LAYER / bare
    spread = max(min(first), min(second)) / bare
    typical = median([*first, *second])
    shown = {"messages": bare, "band": min(band), "sharded": min(sharded)}
    note = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in shown.items())
    what = f"{LAYERS} x [Conv2d, GroupNorm] on {SHAPE}"
    return [
        Row(
            f"sharded step of {what}",
            "bare messages and reductions of the same sizes",
            min(sharded) / bare, goal, median(sharded) / typical, spread, note=note,
        ),
        Row(
            f"what sharding adds to the step of {what}",
            "bare messages and reductions of the same sizes",
            (min(sharded) - min(band)) / bare, None,
            (median(sharded) - median(band)) / typical, spread, note=note,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    show(rows(int(sys.argv[1]) if sys.argv[1:] else 20))

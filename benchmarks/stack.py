"""Measure what sharding adds to 4 x [Conv2d 3x3, GroupNorm, SiLU]: `python benchmarks/stack.py`.

Two ranks have half a globe each. `band` is the same stack on the same half without any exchange:
its results are wrong at the edge, but it shows the cost without messages. `meeting` is the same,
but the ranks wait for each other wherever the sharded stack needs rows or sums.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peak import forget_peak, peak, resident
from pinned import RANKS, Contestants, field, layout, on_pinned_ranks, team
from side_by_side import Entry, Row, ratio, times
from table import show
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel

SHAPE = (1, 64, 180, 720)
BAND = (1, 64, 180 // RANKS, 720)
KINDS = ("band", "sharded")


def plain() -> nn.Sequential:
    """Build the stack."""
    layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU()) for _ in range(4)]
    model = nn.Sequential(*(layer for block in layers for layer in block))
    return model.to(memory_format=layout())


class _Meet(torch.autograd.Function):
    """Waits for the other ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(1))
        return grad


class Meeting(nn.Module):
    """A layer before which the ranks wait for each other."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer."""
        return self.layer(_Meet.apply(x))


def build(manager: DomainParallelManager, kind: str) -> nn.Module:
    """Build one of the contestants: `band`, `meeting` or `sharded`."""
    model = plain()
    if kind == "band":
        return model
    if kind == "meeting":
        meets = (nn.Conv2d, nn.GroupNorm)
        return nn.Sequential(*(Meeting(x) if isinstance(x, meets) else x for x in model))
    return convert_to_domain_parallel(model, manager, input_shape=SHAPE)


def step(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward."""
    model(x).sum().backward()


def contestants(manager: DomainParallelManager) -> Contestants:
    """Return a step of each contestant."""
    x = field(*BAND, requires_grad=True)
    models = {kind: build(manager, kind) for kind in (*KINDS, "meeting")}
    return {kind: partial(step, model, x) for kind, model in models.items()}


def growth(manager: DomainParallelManager, kind: str) -> int:
    """Return the growth of a rank's peak memory over three steps, in bytes."""
    model = build(manager, kind)
    step(model, field(1, 64, BAND[-2], 8, requires_grad=True))
    x = field(*BAND, requires_grad=True)
    before = resident()
    forget_peak()
    for _ in range(3):
        step(model, x)
    return peak() - before


def saved(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes that a forward saves for its backward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = model(field(*shape, requires_grad=True))
    y.sum().backward()
    return sum(kept.values())


def saved_shares(manager: DomainParallelManager) -> float:
    """Return this rank's bytes saved for backward over those of the unsharded stack."""
    return saved(build(manager, "sharded"), BAND) / saved(plain(), SHAPE)


def rows(rounds: int) -> list[Row]:
    """Return times, and growth of peak memory (the median of three starts) with the saved bytes."""
    with team(contestants) as ranks:
        entries = [
            Entry("first", ranks, "band"),
            Entry("sharded", ranks, "sharded"),
            Entry("meeting", ranks, "meeting"),
            Entry("second", ranks, "band"),
        ]
        found = times(entries, rounds)
    against = ratio(found["sharded"], found["first"], found["second"])
    meeting = ratio(found["meeting"], found["first"], found["second"])
    memory = {
        kind: sorted(max(on_pinned_ranks(growth, kind)) for _ in range(3))[1] for kind in KINDS
    }
    stack = f"4 x [Conv2d 3x3, GroupNorm, SiLU] at {SHAPE}, domain {RANKS}"
    share = max(on_pinned_ranks(saved_shares))
    return [
        Row(
            stack, "its band without exchange", against.best, 1.05, against.typical, against.spread,
            with_spread=True,
            note=f"{1e3 * min(found['sharded']):.0f} ms",
        ),
        Row(
            f"band of {stack}, whose ranks only wait for each other", "its band without exchange",
            meeting.best, None, meeting.typical, meeting.spread,
        ),
        Row(
            f"peak memory of {stack}", "its band without exchange",
            memory["sharded"] / memory["band"], 1.1,
            note=f"{memory['sharded'] / 2**20:.0f} MiB; kept for backward {share:.3f} of the whole",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    show(rows(int(sys.argv[1]) if sys.argv[1:] else 20))

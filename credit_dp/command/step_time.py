"""What a step takes on a machine: the equations of a prediction, and nothing else.

A rank's operations run one after the other, each at the rate of what it waits for. Where they are
started in turn, their overhead comes on top; where the host runs ahead, the slower of both counts:

    busy    = sum over operations of max(FLOPs / FLOPs per s, bytes / bytes per s)
    compute = busy + operations x overhead, or max(busy, operations x overhead)

An exchange waits for its busiest rank, which sends and receives at once, over the links that its
messages take; a collective of n ranks goes round in a ring, after a latency for each of log2(n)
doublings:

    exchange   = latency + max(sent, received) / bytes per s
    collective = log2(n) x latency + bytes that a rank sends in the ring / bytes per s
    reduction  = buckets x log2(n) x latency + 2 (n - 1) / n x gradients / bytes per s

Nothing overlaps: neither exchanges nor the reduction are taken to hide behind operations.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from credit_dp.command.machine import Link, Machine

if TYPE_CHECKING:
    from credit_dp.domain_parallel.operation_costs import Operation
    from credit_dp.domain_parallel.rounds import Message
    from credit_dp.domain_parallel.step_work import StepWork

BUCKET = 25 * 2**20  # bytes of gradients that torch's DistributedDataParallel sends at once


@final
@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, one part after the other."""

    compute: float
    exchange: float
    reduction: float

    @property
    def step(self) -> float:
        """Return the sum."""
        return self.compute + self.exchange + self.reduction


def compute_seconds(operations: Counter[Operation], machine: Machine, dtype: str) -> float:
    """Return what operations take on one rank, their multiplications in a dtype of `tflops`."""
    busy = 0.0
    for operation, times in operations.items():
        arithmetic = operation.flops / machine.flops_per_s(dtype, operation.convolves)
        busy += times * max(arithmetic, operation.bytes / machine.bytes_per_s)
    starting = operations.total() * machine.overhead_us * 1e-6
    return max(busy, starting) if machine.runs_ahead else busy + starting


def exchange_seconds(work: StepWork, machine: Machine, data: int) -> float:
    """Return what the messages and collectives of the slowest of `data` domains take."""
    return max(
        sum(
            times * round_seconds(messages, machine, first)
            for messages, times in work.exchanges.items()
        )
        + sum(
            times * collective_seconds(size, work.ranks, machine, first)
            for size, times in work.collectives.items()
        )
        for first in _first_ranks(work.ranks, data, machine)
    )


def round_seconds(messages: Iterable[Message], machine: Machine, first: int) -> float:
    """Return what messages that are under way at once take.

    Args:
        first: rank of the world that is the first one of the domain.
    """
    latency: dict[int, float] = defaultdict(float)
    sending: dict[int, float] = defaultdict(float)
    receiving: dict[int, float] = defaultdict(float)
    for sender, receiver, size in messages:
        ends = {_node(first + rank, machine) for rank in (sender, receiver)}
        link = machine.link(between=len(ends) > 1)
        sending[sender] += link.seconds(size)
        receiving[receiver] += link.seconds(size)
        for rank in (sender, receiver):
            latency[rank] = max(latency[rank], link.latency)
    return max(latency[rank] + max(sending[rank], receiving[rank]) for rank in latency)


def collective_seconds(size: float, ranks: int, machine: Machine, first: int = 0) -> float:
    """Return what a ring takes in which each of `ranks` neighbours sends `size` bytes."""
    if ranks == 1:
        return 0.0
    link = ring_link(ranks, machine, first)
    return math.ceil(math.log2(ranks)) * link.latency + link.seconds(size)


def ring_link(ranks: int, machine: Machine, first: int = 0) -> Link:
    """Return the link that a collective goes over.

    As many rings as a node has members of the group run side by side, each over its own share of
    the node's way out; the node with the fewest members bounds them.
    """
    size = machine.ranks_per_node
    within, between = machine.link(between=False), machine.link(between=True)
    in_first = size - first % size
    if ranks <= in_first:
        return within
    in_last = (ranks - in_first) % size or size
    out = min(in_first, in_last) * between.gb_per_s
    return Link(between.latency_us, min(within.gb_per_s, out))


def reduction_seconds(gradients: int, ranks: int, machine: Machine) -> float:
    """Return what adding up `gradients` bytes over all ranks takes."""
    buckets = math.ceil(gradients / BUCKET)
    if ranks == 1 or not buckets:
        return 0.0
    size = 2 * (ranks - 1) / ranks * gradients
    return buckets * collective_seconds(size / buckets, ranks, machine)


def _node(rank: int, machine: Machine) -> int:
    return rank // machine.ranks_per_node


def _first_ranks(domain: int, data: int, machine: Machine) -> set[int]:
    """Return one first rank for each way in which domains may lie on nodes."""
    per_node = machine.ranks_per_node
    return {number * domain % per_node for number in range(min(data, per_node))}

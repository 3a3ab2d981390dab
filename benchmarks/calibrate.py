"""Measure this machine's figures for predictions: rates of a core, and of messages between two.

They come from single operations and messages; no step of a model is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pinned import RANKS, on_pinned_ranks
from torch import nn

from credit_dp.domain_parallel import DomainParallelManager

FIELD = (1, 64, 64, 128)  # of a convolution
ADDED = 2**22  # numbers: more than fit in the caches, like the tensors that backward needs
CHAIN = 500  # operations on one number
LARGE = 2**22  # bytes of a message
REPEATS = 15


def machine_figures(memory_gib: float) -> dict[str, Any]:
    """Return the content of a machine file; everything except the memory is measured."""
    latency_us, gb_per_s = max(on_pinned_ranks(_links), key=lambda of_rank: of_rank[0])
    computed = on_pinned_ranks(_computing, ranks=RANKS)  # at once, as in a step
    tflops, memory, overhead = (statistics.mean(each) for each in zip(*computed, strict=True))
    link = {"latency_us": latency_us, "gb_per_s": gb_per_s}
    return {
        "name": f"{RANKS} cores of this machine, gloo",
        "source": f"benchmarks/modelled.py, one thread for each rank, torch {torch.__version__}",
        "ranks_per_node": RANKS,
        "memory_gib": memory_gib,
        "tflops": {"float32": tflops},
        "tflops_reached": 1,
        "memory_gb_per_s": memory,
        "memory_reached": 1,
        "overhead_us": overhead,
        "runs_ahead": False,
        "within_node": link,
        "between_nodes": dict(link),  # there is one node
        "links_reached": 1,
    }


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of the fastest of several calls."""
    found = []
    for _ in range(REPEATS):
        began = clock()
        call()
        found.append(clock() - began)
    return min(found)


def busy(call: Callable[[], object]) -> float:
    """Return the fastest call's seconds of the processor, which other programs change less."""
    return seconds(call, time.process_time)


def _computing(manager: DomainParallelManager) -> tuple[float, float, float]:
    """Return TFLOP/s of a convolution, GB/s of an addition, microseconds of a tiny operation."""
    channels, rows, columns = FIELD[1:]
    conv = nn.Conv2d(channels, channels, 3, padding=1)
    x = torch.randn(FIELD, requires_grad=True)
    cotangent = torch.randn(FIELD)
    flops = 3 * 2 * 9 * channels**2 * rows * columns  # forward and two gradients
    tflops = flops / busy(lambda: conv(x).backward(cotangent)) / 1e12
    a, b = torch.randn(ADDED), torch.randn(ADDED)
    memory = 3 * a.nbytes / busy(lambda: torch.add(a, b)) / 1e9
    return tflops, memory, 1e6 * busy(_chain) / (2 * CHAIN)


def _chain() -> None:
    """Run forward and backward of operations whose only cost is their start."""
    x = torch.ones(1, requires_grad=True)
    for _ in range(CHAIN):
        x = x * 1.0
    x.backward()


def _links(manager: DomainParallelManager) -> tuple[float, float]:
    """Return microseconds of an exchange of one number, and GB/s of a large exchange."""
    small = _exchange_seconds(manager, 4)
    large = _exchange_seconds(manager, LARGE)
    return 1e6 * small, LARGE / (large - small) / 1e9


def _exchange_seconds(manager: DomainParallelManager, size: int) -> float:
    other = 1 - manager.rank
    sent, received = torch.zeros(size // 4), torch.empty(size // 4)

    def exchange() -> None:
        ends = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    dist.barrier()
    return seconds(exchange)

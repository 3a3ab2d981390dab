"""Measure what the global view adds to each function of torch in forward.

Bands are small, so that mainly the time of Python is measured. Run it on an idle machine:

    python benchmarks/view_overhead.py
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.view.attach import attach_view
from credit_dp.domain_parallel.view.running import run_in
from credit_dp.domain_parallel.view.tensor import GlobalTensor, Layout

SHAPE = (1, 8, 8, 8)
CALLS = 500
REPEATS = 5

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x + 1": lambda x, w: x + 1,
    "x * x": lambda x, w: x * x,
    "x * w": lambda x, w: x * w,
    "gelu": lambda x, w: F.gelu(x),
    "relu": lambda x, w: torch.relu(x),
    "to": lambda x, w: x.to(torch.float32),
    "permute": lambda x, w: x.permute(0, 2, 3, 1),
    "flatten": lambda x, w: x.flatten(2),
    "view": lambda x, w: x.view(1, 8, 2, 4, 8),
    "softmax": lambda x, w: x.softmax(1),
    "mean over channels": lambda x, w: x.mean(1),
    "columns": lambda x, w: x[..., :4],
    "linear": lambda x, w: F.linear(x, w[:, 0, 0].expand(8, 8)),
    "shape": lambda x, w: x.shape,
}


def microseconds(call: Callable[[], object]) -> float:
    """Return the time of a call: the best of several measurements."""
    # Processor time, so that other processes count less.
    times = timeit.repeat(call, timer=time.process_time, number=CALLS, repeat=REPEATS)
    return min(times) / CALLS * 1e6


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    view = attach_view(torch.nn.Identity(), manager, (SHAPE,))
    partition = manager.partition(SHAPE[-2])
    local = torch.randn(1, 8, partition.sizes[0], 8)
    plain = torch.randn(SHAPE)
    weight = torch.randn(8, 1, 1)
    shown = GlobalTensor(local, Layout(2, 1, partition), view)
    print("microseconds per call   plain    view    more")
    more = []
    for name, function in FUNCTIONS.items():
        before = microseconds(lambda function=function: function(plain, weight))  # type: ignore[misc]
        with run_in(view):
            after = microseconds(lambda function=function: function(shown, weight))  # type: ignore[misc]
        more.append(after - before)
        print(f"{name:20}{before:9.1f}{after:8.1f}{after - before:8.1f}", flush=True)
    print(f"{'mean':20}{'':17}{sum(more) / len(more):8.1f}")


if __name__ == "__main__":
    main()

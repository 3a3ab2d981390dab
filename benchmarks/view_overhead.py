"""Measure what the global view adds to each function of torch in forward.

Fields are small and on one rank, so that mainly the time of Python is measured: nothing is sent.
Run it on an idle machine:

    python benchmarks/view_overhead.py
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.view.attach import attach_view
from credit_dp.domain_parallel.view.running import run_in
from credit_dp.domain_parallel.view.tensor import GlobalTensor, Layout

SHAPE = (1, 8, 8, 8)
CALLS = 500
REPEATS = 5
VECTOR = nn.Parameter(torch.ones(8))
MATRIX = nn.Parameter(torch.ones(8, 8))
KERNEL = nn.Parameter(torch.ones(8, 8, 3, 3))

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda x, w: x.add_(1),  # before there are views of the tensor
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
    "linear": lambda x, w: F.linear(x, MATRIX),
    "dropout": lambda x, w: F.dropout(x, 0.0),
    "transpose": lambda x, w: x.transpose(1, 2),
    "reshape": lambda x, w: x.reshape(1, 8, 64),
    "contiguous": lambda x, w: x.contiguous(),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "matmul": lambda x, w: x @ MATRIX,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), VECTOR, VECTOR),
    "batch_norm": lambda x, w: F.batch_norm(x, VECTOR, VECTOR, VECTOR, VECTOR),
    "group_norm": lambda x, w: F.group_norm(x, 2, VECTOR, VECTOR),
    "conv2d": lambda x, w: F.conv2d(x, KERNEL, VECTOR, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "interpolate": lambda x, w: F.interpolate(x, scale_factor=2),
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
    manager = DomainParallelManager(1, 1)
    view = attach_view(torch.nn.Identity(), manager, (SHAPE,))
    partition = manager.partition(SHAPE[-2])
    plain = torch.randn(SHAPE)
    weight = torch.randn(8, 1, 1)
    shown = GlobalTensor(torch.randn(SHAPE), Layout(2, 1, partition), view)
    print("microseconds per call   plain    view    more")
    more = []
    for name, function in FUNCTIONS.items():
        with torch.no_grad():
            before = microseconds(lambda function=function: function(plain, weight))  # type: ignore[misc]
            with run_in(view):
                after = microseconds(lambda function=function: function(shown, weight))  # type: ignore[misc]
        more.append(after - before)
        print(f"{name:20}{before:9.1f}{after:8.1f}{after - before:8.1f}", flush=True)
    print(f"{'mean':20}{'':17}{sum(more) / len(more):8.1f}")


if __name__ == "__main__":
    main()

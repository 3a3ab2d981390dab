"""Measure what the global view adds to each function of torch in forward.

Fields are small and on one rank, so that mainly the time of Python is measured: nothing is sent.
The column `bare` is what a subclass of tensors adds that shows another shape and does nothing else:
the least for anything that is called for each function in Python. Run it on an idle machine:

    python benchmarks/view_overhead.py
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.view.attach import attach_view
from credit_dp.domain_parallel.view.running import run_in
from credit_dp.domain_parallel.view.tensor import GlobalTensor, Layout
from credit_dp.torch_private import new_wrapper

SHAPE = (1, 8, 8, 8)
CALLS = 50
REPEATS = 40  # short ones, as the clock of a processor changes
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


class BareTensor(Tensor):
    """A tensor that shows a shape and calls functions with the tensor that it holds."""

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor) -> BareTensor:
        """Return a tensor without memory."""
        shown: BareTensor = new_wrapper(cls, local.shape, dtype=local.dtype, device=local.device)
        shown.local = local
        return shown

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of which the first argument may be such a tensor, or have some in it."""
        first, *others = args
        if isinstance(first, list):
            first = [x.local for x in first]
        else:
            first = first.local
            others = [x.local if type(x) is BareTensor else x for x in others]
        result = func(first, *others, **(kwargs or {}))
        return BareTensor(result) if isinstance(result, Tensor) else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Exist, as torch needs it."""
        raise NotImplementedError


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    manager = DomainParallelManager(1, 1)
    view = attach_view(torch.nn.Identity(), manager, (SHAPE,))
    partition = manager.partition(SHAPE[-2])
    weight = torch.randn(8, 1, 1)
    shown = {
        "plain": torch.randn(SHAPE),
        "bare": BareTensor(torch.randn(SHAPE)),
        "view": GlobalTensor(torch.randn(SHAPE), Layout(2, 1, partition), view),
    }

    def microseconds(function: Callable[[Tensor, Tensor], object], kind: str) -> float:
        with run_in(view) if kind == "view" else nullcontext():
            # Processor time, so that other processes count less.
            seconds = timeit.timeit(
                lambda: function(shown[kind], weight), timer=time.process_time, number=CALLS
            )
        return seconds / CALLS * 1e6

    print("microseconds per call   plain    bare    view  (what these add)")
    added = []
    for name, function in FUNCTIONS.items():
        with torch.no_grad():
            times = [[microseconds(function, kind) for kind in shown] for _ in range(REPEATS)]
        alone, bare, through = map(min, *times)
        added.append((bare - alone, through - alone))
        print(f"{name:20}{alone:9.1f}{added[-1][0]:8.1f}{added[-1][1]:8.1f}", flush=True)
    means = [sum(column) / len(added) for column in zip(*added, strict=True)]
    print(f"{'mean':20}{'':9}{means[0]:8.1f}{means[1]:8.1f}")


if __name__ == "__main__":
    main()

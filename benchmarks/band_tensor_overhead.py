"""Measure what a tensor of the globe adds to each function of torch, forward and backward.

Fields are small and on one rank, so that mainly the time of Python is measured: nothing is sent.
The columns `bare` are what a subclass adds that calls each operator with the tensor that it holds,
and does nothing else: the least for anything below autograd that is written in Python. Run it on an
idle machine:

    python benchmarks/band_tensor_overhead.py [FUNCTION ...]
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor import boundary  # noqa: F401  # registers the rules
from credit_dp.domain_parallel.band_tensor.tensor import Band, BandTensor, Domain
from credit_dp.torch_private import DISABLED_TORCH_FUNCTION, new_wrapper

SHAPE = (1, 8, 8, 8)
CALLS = 20
REPEATS = 40  # short ones, as the clock of a processor changes
VECTOR = nn.Parameter(torch.ones(8))
MATRIX = nn.Parameter(torch.ones(8, 8))
LINEAR = nn.Linear(8, 8)
KERNEL = nn.Parameter(torch.ones(8, 8, 3, 3))

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x + 1": lambda x, w: x + 1,
    "x * x": lambda x, w: x * x,
    "x * w": lambda x, w: x * w,
    "gelu": lambda x, w: F.gelu(x),
    "relu": lambda x, w: torch.relu(x),
    "permute": lambda x, w: x.permute(0, 2, 3, 1),
    "flatten": lambda x, w: x.flatten(2),
    "view": lambda x, w: x.view(1, 8, 2, 4, 8),
    "softmax": lambda x, w: x.softmax(1),
    "mean over channels": lambda x, w: x.mean(1),
    "columns": lambda x, w: x[..., :4],
    "linear layer": lambda x, w: LINEAR(x),
    "linear": lambda x, w: F.linear(x, MATRIX),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x, w: F.dropout(x, 0.0),
    "transpose": lambda x, w: x.transpose(1, 2),
    "reshape": lambda x, w: x.reshape(1, 8, 64),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "matmul": lambda x, w: x @ MATRIX,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), VECTOR, VECTOR),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, VECTOR, VECTOR, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 2, VECTOR, VECTOR),
    "conv2d": lambda x, w: F.conv2d(x, KERNEL, VECTOR, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "interpolate": lambda x, w: F.interpolate(x, scale_factor=2),
}


class BareTensor(Tensor):
    """A tensor that shows a shape and calls operators with the tensor that it holds."""

    local: Tensor
    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, local: Tensor) -> BareTensor:
        """Return a tensor without memory."""
        shown: BareTensor = new_wrapper(
            cls,
            local.shape,
            local.stride(),
            local.storage_offset(),
            dtype=local.dtype,
            device=local.device,
        )
        shown.local = local
        return shown

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator."""
        result = func(*[_local(x) for x in args], **(kwargs or {}))
        return tuple(map(_shown, result)) if isinstance(result, tuple) else _shown(result)


def _local(x: Any) -> Any:
    if type(x) is list:
        return [_local(each) for each in x]
    return x.local if type(x) is BareTensor else x


def _shown(x: Any) -> Any:
    return BareTensor(x) if isinstance(x, Tensor) else x


DOMAIN = Domain(DomainParallelManager(1, 1))
ROWS = Band(-2, 1, (0, SHAPE[-2]))
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "bare": BareTensor,
    "band": lambda x: BandTensor(x, ROWS, DOMAIN),
}


def microseconds(function: Callable[[], object]) -> float:
    """Return the time of a call in processor time, so that other processes count less."""
    return timeit.timeit(function, timer=time.thread_time, number=CALLS) / CALLS * 1e6


def measured(function: Callable[[Tensor, Tensor], Any], kind: str) -> tuple[float, float]:
    """Return the time of a forward without gradients, and of a forward with a backward."""
    weight = torch.randn(8, 1, 1)
    x = KINDS[kind](torch.randn(SHAPE)).requires_grad_()
    y = function(x, weight)
    grad = torch.ones_like(y).detach()
    inputs = [x, *(p for p in (VECTOR, MATRIX, KERNEL, *LINEAR.parameters()))]
    found = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    inputs = [x for x, gradient in zip(inputs, found, strict=True) if gradient is not None]

    def step() -> None:
        torch.autograd.grad(function(x, weight), inputs, grad)

    with torch.no_grad():
        forward = min(microseconds(lambda: function(x, weight)) for _ in range(REPEATS))
    return forward, min(microseconds(step) for _ in range(REPEATS))


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("microseconds           forward (what is added)     with backward (added)")
    print(f"{'':20}{'plain':>9}{'bare':>8}{'band':>8}{'plain':>11}{'bare':>8}{'band':>8}")
    rows = []
    for name in sys.argv[1:] or FUNCTIONS:
        times = [measured(FUNCTIONS[name], kind) for kind in KINDS]
        rows.append([(t[0], *(x - t[0] for x in t[1:])) for t in zip(*times, strict=True)])
        print(name.ljust(20) + _columns(rows[-1]), flush=True)
    means = [
        [sum(column) / len(rows) for column in zip(*each, strict=True)]
        for each in zip(*rows, strict=True)
    ]
    print("mean".ljust(20) + _columns(means))


def _columns(row: Sequence[Sequence[float]]) -> str:
    return "  ".join(f"{a:9.1f}{b:8.1f}{c:8.1f}" for a, b, c in row)


if __name__ == "__main__":
    main()

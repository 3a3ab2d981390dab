"""Rules of Fourier transforms: bands move to columns while rows are transformed, and back.

A transform of several dimensions is one of each, one after the other. Those without rows are local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.partition import falls_into_equal_parts
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    function_name,
    layout_of,
    rule_for,
)
from credit_dp.domain_parallel.view.shapes import move_rows, with_rows_everywhere
from credit_dp.domain_parallel.view.tensor import GlobalTensor


@rule_for("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
def transform(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Fourier transforms of one dimension."""
    defaults = {"n": None, "dim": -1, "norm": None}
    arguments = defaults | bind(("input", "n", "dim", "norm"), args, kwargs)
    x = arguments["input"]
    dim = arguments["dim"] % x.ndim
    # The bands of orders that a Legendre transform has left become rows of fields again.
    rows = x.ndim - 2
    fits = dim > rows >= 0 and falls_into_equal_parts(x.shape[rows], x.view_.ranks)
    return _along(func, x, arguments["n"], dim, arguments["norm"], [rows] if fits else [])


def _along(
    func: Function,
    x: GlobalTensor,
    size: int | None,
    dim: int,
    norm: str | None,
    others: Sequence[int],
) -> GlobalTensor:
    """Return a transform along one dimension, of which each rank needs all entries.

    Bands are moved to one of the `others` if they can be: channels are mixed between transforms.
    """
    if layout_of(x).dim == dim:
        x = move_rows(x, [dim], others)
    x = with_rows_everywhere(x)  # libraries refuse transforms of no rows
    return GlobalTensor(func(x.local, size, dim, norm), layout_of(x), x.view_)


# Transforms of several dimensions: that of the last dimension and that of all others.
PARTS = {
    "fft": (torch.fft.fft, torch.fft.fft),
    "ifft": (torch.fft.ifft, torch.fft.ifft),
    "rfft": (torch.fft.rfft, torch.fft.fft),
    "irfft": (torch.fft.irfft, torch.fft.ifft),
}


@rule_for("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")
def transform_dims(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Fourier transforms of several dimensions."""
    name = function_name(func).removeprefix("fft_")
    default = (-2, -1) if name.endswith("2") else None
    arguments: dict[str, Any] = {"s": None, "dim": default, "norm": None}
    arguments |= bind(("input", "s", "dim", "norm"), args, kwargs)
    x, norm = arguments["input"], arguments["norm"]
    dims, sizes = _dims_and_sizes(x, arguments["dim"], arguments["s"])
    last, others = PARTS[name[:-1]]
    pairs = list(zip(dims, sizes, strict=True))
    # A transform from or to real numbers has its half spectrum along the last dimension: it comes
    # first, or last.
    first, *rest = pairs[::-1]
    order = [(last, first), *((others, pair) for pair in rest)]
    if name.startswith("irfft"):
        order = order[1:] + order[:1]
    else:
        order = _local_ones_first(order, layout_of(x).dim, name)
    for function, (dim, size) in order:
        x = _along(function, x, size, dim, norm, [d for d in dims if d != dim])
    return x


def _dims_and_sizes(
    x: Tensor, dims: Sequence[int] | None, sizes: Sequence[int] | None
) -> tuple[list[int], list[int | None]]:
    """Return the dimensions of a transform, from 0, and the size of each if that is passed."""
    if dims is None:
        count = x.ndim if sizes is None else len(sizes)
        dims = range(x.ndim - count, x.ndim)
    resolved = [d % x.ndim for d in dims]
    if sizes is None:
        return resolved, [None] * len(resolved)
    if len(sizes) != len(resolved) or not resolved:
        raise NoRuleError
    return resolved, [None if size == -1 else size for size in sizes]


def _local_ones_first(order: list[Any], row_dim: int, name: str) -> list[Any]:
    """Return transforms with that of the rows last, unless it has to come first."""
    if name.startswith("rfft"):
        return order[:1] + sorted(order[1:], key=lambda step: step[1][0] == row_dim)
    return sorted(order, key=lambda step: step[1][0] == row_dim)


@rule_for("fftshift", "ifftshift")
def shift(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Rolls that put the zero frequency in the middle, or back."""
    arguments = {"dim": None} | bind(("input", "dim"), args, kwargs)
    x, dims = arguments["input"], arguments["dim"]
    if dims is None:
        dims = range(x.ndim)
    dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
    forward = function_name(func).endswith("_fftshift")
    halves = [x.shape[d] // 2 for d in dims]
    shifts = [half if forward else -half for half in halves]
    return x.roll(shifts, dims)

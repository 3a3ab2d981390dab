"""Tensors made of Python numbers."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from credit_dp.torch_private import is_dispatch_mode_active, is_transform_active

K = TypeVar("K", bound=Hashable)


def constant_tensor(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the numbers as a tensor on a device, without making the host wait for a GPU."""
    # `torch.tensor(..., device="cuda")` waits for all work queued on the GPU; a non-blocking copy
    # joins the queue.
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)


def cached_constant(
    compute: Callable[[K], Sequence[Any]], key: K, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return `compute(key)` as a tensor, which is made once for each key, device and dtype.

    For numbers that every forward pass needs again. Nobody may write into the tensor.

    Args:
        compute: a function of a module, as the cache keeps it. It depends on `key` alone.
    """
    # A dispatch mode may replace new tensors, for example by fake ones while a model is planned.
    # This thread's modes count: torch has a flag, too, but only one for all threads.
    # In a transform of `torch.func` new tensors belong to it. The compiler can't see through the
    # cache, and has one of its own.
    if torch.compiler.is_compiling() or is_dispatch_mode_active() or is_transform_active():
        return constant_tensor(compute(key), device, dtype)
    return _cached_constant(compute, key, device, dtype)


@cache  # without a limit: a CUDA graph reads the memory of what it has used as long as it lives
def _cached_constant(
    compute: Callable[[K], Sequence[Any]], key: K, device: torch.device, dtype: torch.dtype
) -> Tensor:
    # A tensor that is made in inference mode can't be saved for a later backward pass.
    with torch.inference_mode(False):
        return constant_tensor(compute(key), device, dtype)

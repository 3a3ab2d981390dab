"""Tensors made of Python numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def constant_tensor(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the numbers as a tensor on a device, without making the host wait for a GPU."""
    # `torch.tensor(..., device="cuda")` waits for all work queued on the GPU; a non-blocking copy
    # joins the queue.
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)

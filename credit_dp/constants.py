"""Tensors of numbers that Python knows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def constant_tensor(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers on a device. The host doesn't wait until a GPU has them."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)

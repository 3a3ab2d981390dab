"""How fields lie in memory: what is made of them lies alike, or every layer would rearrange it."""

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def format_of(x: Tensor) -> torch.memory_format:
    """Channels last where a tensor is, else rows by rows."""
    last = CHANNELS_LAST.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last

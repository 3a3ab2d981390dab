"""How fields lie in memory: what is made of them lies alike, or every layer would rearrange it."""

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def format_of(x: Tensor) -> torch.memory_format:
    """Channels last where each sample of a tensor has them so, else row by row."""
    last = CHANNELS_LAST.get(x.ndim)
    if last is None or x.is_contiguous():
        return torch.contiguous_format
    one = x[:1]  # of bands cut from larger ones only single samples are without gaps
    lies_last = one.is_contiguous(memory_format=last) and not one.is_contiguous()
    return last if lies_last else torch.contiguous_format

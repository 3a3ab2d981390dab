"""Models that compute in a smaller dtype than their weights have."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def compute_in(part: nn.Module, dtype: torch.dtype, like: Tensor) -> None:
    """Let a model, or a stage of one, run under autocast, in place.

    Weights, their gradients and updates keep their dtype. What it returns has that of `like`: the
    loss is computed in that, and stages of a pipeline hand it on.

    Args:
        part: ready to be called; whatever calls it, it computes so.
        dtype: of the layers for which torch's autocast takes it to be safe.
        like: has the device it computes on, and the dtype of what it returns.
    """
    forward, device = part.forward, like.device.type

    def restored(x: Tensor) -> Tensor:
        return x.to(like.dtype) if x.is_floating_point() else x

    def forward_in(*inputs: Any) -> Any:
        with torch.autocast(device, dtype):
            made = forward(*inputs)
        return tree_map_only(Tensor, restored, made)

    part.forward = forward_in

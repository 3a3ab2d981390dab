"""Counts the bytes that this process sends to other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sent(TorchDispatchMode):
    """Counts the bytes of messages, and of collectives as if they ran in rings."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operation of `torch.distributed`."""
        if func.namespace == "c10d":
            self.bytes += _sent(func.name().removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: tuple[Any, ...]) -> float:
    sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
    if name == "send":
        return sum(sizes)
    if name in ("recv_", "recv_any_source_", "barrier"):
        return 0.0
    # The group is the first of the script objects; a second one is the kind of reduction.
    group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
    ring = (group.size() - 1) / group.size()
    # Of a gather or scatter the larger of the two tensors counts, which holds all shares.
    return (2 if name == "allreduce_" else 1) * ring * max(sizes)

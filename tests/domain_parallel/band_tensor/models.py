"""A model around any function of fields, and how it is compared with the unsharded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_to_domain_parallel,
    verify_domain_parallel,
)
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from tests.ranks import DEVICE

WIDTH = 8


class Block(nn.Module):
    """A residual block that draws random numbers, without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # The thread of a GPU's backward, in which it may run again, has no default device.
        factor = torch.rand(x.shape[0], 1, 1, 1, device=x.device).mul(0).add(1)
        return x + F.gelu(self.norm(self.conv(x))) * factor


class Model(nn.Module):
    """A function of fields between two convolutions, beside modules that it may call.

    Multiplying by coordinates made from the height is what conversion of layers refuses.
    """

    def __init__(self, function: Callable[[Any, Tensor], Tensor], trains: bool = True) -> None:
        super().__init__()
        self.function = function
        self.trains = trains
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.block = Block()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Conv2d(WIDTH, 3, 1)

    def train(self, mode: bool = True) -> Model:
        """Set the mode, or evaluation."""
        return super().train(mode and self.trains)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * torch.linspace(-1, 1, x.shape[-2], dtype=x.dtype)[:, None]
        return self.head(self.function(self, x))


def check(build_model: Callable[[], nn.Module], ranks: int = 3) -> None:
    """Compare a model on uneven bands with the unsharded one: output, gradients, buffers."""
    shape = (2, 3, 13, 8)
    report = verify_domain_parallel(build_model, shape, ranks, whole_ops="allow", device=DEVICE)
    assert report.passed, report.worst


def convert(
    model: nn.Module, shape: tuple[int, ...] = (2, 3, 14, 8), whole_ops: str = "allow"
) -> nn.Module:
    """Return the converted model of the first of two ranks."""
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    return convert_to_domain_parallel(model, manager, input_shape=shape, whole_ops=whole_ops)

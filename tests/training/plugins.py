"""A loss, an optimizer and a model as a user's plug-ins define them, importable by ranks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from credit_dp.config import OwnLossConfig, OwnModelConfig, OwnOptimizerConfig


@dataclass
class LogCoshConfig(OwnLossConfig):
    """`log cosh d`, which does not come from a difference alone: positive truth weighs more."""

    name: str = "logcosh"
    above: float = 1.5

    def build(self) -> Callable[[Tensor, Tensor], Tensor]:
        def error(forecast: Tensor, truth: Tensor) -> Tensor:
            d = forecast - truth
            return (d + functional.softplus(-2 * d)) * torch.where(truth > 0, self.above, 1.0)

        return error


@dataclass
class TorchOptimizerConfig(OwnOptimizerConfig):
    """Any optimizer of torch, by its class name."""

    name: str = "of_torch"
    kind: str = "NAdam"
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self.kind)
        return kind(groups, **self.options)  # type: ignore[no-any-return]


class PartlyUsed(nn.Module):
    """Has parameters that its output does not depend on, as a classifier's head left in place."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)
        self.last = nn.Conv2d(8, out_channels, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.silu(self.first(x))) * self.scale.detach().mean()


@dataclass
class PartlyUsedConfig(OwnModelConfig):
    """A user's model that leaves parameters unused."""

    name: str = "partly_used"

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> nn.Module:
        return PartlyUsed(in_channels, out_channels)


class Deciding(nn.Module):
    """Decides by its fields, and by random numbers of Python and NumPy, which layers run."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 5, padding=2)
        self.last = nn.Conv2d(8, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.first(x))
        if torch.isnan(x).any():
            raise ValueError("the input has NaN")
        if self.training and random.random() < 0.5:
            x = x + self.second(x)
        else:
            x = x - 2 * self.second(x)
        turns = np.random.rand() if self.training else 0.5
        x = x.roll(1, -1) if turns < 0.5 and x.mean() > -1 else x.flip(-2)
        return self.last(x)


@dataclass
class DecidingConfig(OwnModelConfig):
    """A user's model whose control flow depends on data and chance."""

    name: str = "deciding"

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> nn.Module:
        return Deciding(in_channels, out_channels)


class Interpolating(nn.Module):
    """Ten blocks that interpolate: a sharded layer that torch's compiler does not look into."""

    def __init__(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, 4, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(grid) for _ in range(10))
        self.last = nn.Conv2d(4, out_channels, 1)

    @staticmethod
    def _block(grid: tuple[int, int]) -> nn.Module:
        return Coarsening(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Upsample(grid))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Coarsening(nn.Module):
    """A convolution with a stride, and back to the grid."""

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.up = down, up

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.up(self.down(x)))


@dataclass
class InterpolatingConfig(OwnModelConfig):
    """A user's model whose graph is cut in each of its blocks."""

    name: str = "interpolating"

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> nn.Module:
        return Interpolating(in_channels, out_channels, grid)

"""A loss and an optimizer as a user's plug-ins define them, importable by ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from credit_dp.config import OwnLossConfig, OwnOptimizerConfig


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

"""The moving average of weights that forecasts are made with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class WeightAverage:
    """An exponential moving average of parameters, of this rank's shares where they are shared out.

    Args:
        parameters: by name; what they are averaged of.
        decay: of the average in one step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.averages: dict[str, Tensor] = {n: p.detach().clone() for n, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in what the parameters are now."""
        for name, parameter in self.parameters.items():
            self.averages[name].lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages for its parameters meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            now = parameter.detach().clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(now)

"""The moving average of weights that forecasts are made with."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from credit_dp.training.replicas import shard


@final
class WeightAverage:
    """An exponential moving average of parameters, of this rank's shares where they are shared out.

    Nothing is sent: the average of a share is the share of the average. Buffers are not averaged.

    Args:
        parameters: by name; what they are averaged of. They have to be in their shared-out form.
        decay: of the average in one update, once it has seen enough of them; see `decay_now`.

    Attributes:
        averages: by the names of the parameters, and shared out as they are.
        updates: that the average has taken in.

    Source: Polyak & Juditsky 1992; the weights of early updates as the documentation of
    TensorFlow's `ExponentialMovingAverage` gives them for `num_updates`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        self.averages: dict[str, Tensor] = {n: p.detach().clone() for n, p in parameters.items()}

    @property
    def decay_now(self) -> float:
        """What the next update leaves of the average: little at first, when weights are random."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self) -> None:
        """Take in what the parameters are now.

        All in one operation on this rank's shares: one each would cost a GPU more time to start
        than to do, and through `DTensor` many times that.
        """
        if self.parameters:
            averages = [shard(self.averages[name]) for name in self.parameters]
            now = [shard(parameter) for parameter in self.parameters.values()]
            take_in = get_ema_multi_avg_fn(self.decay_now)  # type: ignore[no-untyped-call]
            take_in(averages, now, self.updates)
        self.updates += 1

    @torch.no_grad()
    def start_from_weights(self, names: Collection[str], updates: int = 0) -> None:
        """Forget the averages of these names: they are what the parameters are now.

        Args:
            names: of parameters.
            updates: that those of other names have taken in.
        """
        for name in names:
            self.averages[name].copy_(self.parameters[name])
        self.updates = updates

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

"""One forecast step in normalised space, and rollouts made of such steps.

Everything acts on the rank's own band of rows: the globe is never gathered between steps.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]  # (B, channels in, h, W) -> (B, channels out, h, W)


@final
class ForecastStep:
    """The state one step later: `next = last + model([now, forcing, static]) * tendency_scale`.

    `now` is one state, or several that are one step apart with the `last` one last. The model's
    output is the tendency in units of each channel's tendency standard deviation, so that all its
    outputs have about unit variance, whatever the channel; without `residual`, the next state.

    Shapes:
        now `(B, frames * C, h, W)`, forcing `(B, F, h, W)`, static `(B, S, h, W)` ->
        `(B, C, h, W)`, where h are the rank's own rows.

    Units:
        Normalised: minus the channel's mean, divided by its standard deviation.

    Args:
        model: `(B, frames * C + F + S, h, W)` -> `(B, C, h, W)`.
        tendency_scale: `(C, 1, 1)`, tendency standard deviation over standard deviation.
        residual: the model predicts the tendency.
    """

    def __init__(
        self,
        model: Model,
        tendency_scale: Tensor,
        residual: bool = True,
    ) -> None:
        self.model = model
        self.tendency_scale = tendency_scale
        self.residual = residual

    def __call__(self, now: Tensor, forcing: Tensor, static: Tensor) -> Tensor:
        """The state one step after `now`."""
        output: Tensor = self.model(torch.cat([now, forcing, static], dim=1))
        return self.state(output, now[:, -len(self.tendency_scale) :])

    def state(self, output: Tensor, last: Tensor) -> Tensor:
        """The state that an output of the model stands for, one step after `last`."""
        return last + output * self.tendency_scale if self.residual else output

    def rollout(self, now: Tensor, forcings: Iterable[Tensor], static: Tensor) -> Iterator[Tensor]:
        """Yield the state after one step, two steps and so on, one for each forcing.

        `forcings` are those at the time that each step starts from. With several states in `now`,
        each step drops the oldest.
        """
        for forcing in forcings:
            later = self(now, forcing, static)
            yield later
            kept = now[:, later.shape[1] :]
            now = torch.cat([kept, later], dim=1) if kept.shape[1] else later

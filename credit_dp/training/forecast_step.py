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
    """The fields one step later: `next = last + model([now, forcing, static]) * tendency_scale`.

    `now` is one state, or several that are one step apart with the `last` one last. The model's
    output is the tendency in units of each channel's tendency standard deviation, so that all its
    outputs have about unit variance, whatever the channel; without `residual`, the next state.
    Diagnostic fields, which follow the state, are the model's output as it is, and never go in.

    Shapes:
        now `(B, frames * C, h, W)`, forcing `(B, F, h, W)`, static `(B, S, h, W)` ->
        `(B, C + D, h, W)`, where h are the rank's own rows and D the diagnostic channels.

    Units:
        Normalised: minus the channel's mean, divided by its standard deviation.

    Args:
        model: `(B, frames * C + F + S, h, W)` -> `(B, C + D, h, W)`.
        tendency_scale: `(C, 1, 1)`, tendency standard deviation over standard deviation.
        residual: the model predicts the tendency.
        fill: puts into a forecast, `(B, C + D, h, W)`, what stands for points that have no values,
            so that the next step starts from what the model has met in training.
    """

    def __init__(
        self,
        model: Model,
        tendency_scale: Tensor,
        residual: bool = True,
        fill: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.tendency_scale = tendency_scale
        self.residual = residual
        self.fill = fill

    @property
    def states(self) -> int:
        """Channels of one state."""
        return len(self.tendency_scale)

    def of(self, model: Model) -> "ForecastStep":
        """The same step of another model."""
        return ForecastStep(model, self.tendency_scale, self.residual, self.fill)

    def __call__(self, now: Tensor, forcing: Tensor, static: Tensor) -> Tensor:
        """The fields one step after `now`, whatever they are where there are no values."""
        output: Tensor = self.model(torch.cat([now, forcing, static], dim=1))
        return self.fields_from_output(output, now[:, -self.states :])

    def fields_from_output(self, output: Tensor, last: Tensor) -> Tensor:
        """The fields that an output of the model stands for, one step after the state `last`."""
        if not self.residual:
            return output
        state, diagnostic = output[:, : self.states], output[:, self.states :]
        state = last + state * self.tendency_scale
        return torch.cat([state, diagnostic], dim=1) if diagnostic.shape[1] else state

    def rollout(self, now: Tensor, forcings: Iterable[Tensor], static: Tensor) -> Iterator[Tensor]:
        """Yield the fields after one step, two steps and so on, one for each forcing.

        `forcings` are those at the time that each step starts from. With several states in `now`,
        each step drops the oldest.
        """
        for forcing in forcings:
            later = self(now, forcing, static)
            if self.fill is not None:
                later = self.fill(later)
            yield later
            kept, state = now[:, self.states :], later[:, : self.states]
            now = torch.cat([kept, state], dim=1) if kept.shape[1] else state

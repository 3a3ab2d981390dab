"""One forecast step in normalised space, and rollouts of several steps.

Everything acts on the rank's band of rows: the globe is never gathered between steps.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor

from credit_dp.physics.fixers import Fixers

Model = Callable[[Tensor], Tensor]  # (B, channels in, h, W) -> (B, channels out, h, W)


@final
class ForecastStep:
    """Predicts the next fields: `next = last + model([state, forcing, static]) * tendency_scale`.

    `state` has one state, or several that are one step apart, the `last` one at the end. The
    model's output is the tendency in units of each channel's tendency standard deviation, so that
    outputs of all channels have about unit variance. Without `residual` it is the next state.
    Diagnostic fields follow the state in the output. They are never inputs, and are predicted
    directly, not as tendencies.

    Shapes:
        state `(B, frames * C, h, W)`, forcing `(B, F, h, W)`, static `(B, S, h, W)` ->
        `(B, C + D, h, W)`, where h are the rank's rows and D the diagnostic channels.

    Units:
        Normalised: minus the channel's mean, divided by its standard deviation.

    Args:
        model: `(B, frames * C + F + S, h, W)` -> `(B, C + D, h, W)`.
        tendency_scale: `(C, 1, 1)`, tendency standard deviation divided by standard deviation.
        residual: whether the model predicts the tendency.
        fill: sets points of a forecast, `(B, C + D, h, W)`, that have no values to those that the
            model was trained with, so that the next step starts from inputs of the same kind.
        fixers: correct the fields after a step, given the last state; collective if a budget is
            among them.
    """

    def __init__(
        self,
        model: Model,
        tendency_scale: Tensor,
        residual: bool = True,
        fill: Callable[[Tensor], Tensor] | None = None,
        fixers: Fixers | None = None,
    ) -> None:
        self.model = model
        self.tendency_scale = tendency_scale
        self.residual = residual
        self.fill = fill
        self.fixers = fixers

    @property
    def states(self) -> int:
        """Return the number of channels of one state."""
        return len(self.tendency_scale)

    def with_model(self, model: Model) -> "ForecastStep":
        """Return the same step with another model."""
        return ForecastStep(model, self.tendency_scale, self.residual, self.fill, self.fixers)

    def __call__(self, state: Tensor, forcing: Tensor, static: Tensor) -> Tensor:
        """Return the fields one step after `state`; points without values are not filled."""
        output: Tensor = self.model(torch.cat([state, forcing, static], dim=1))
        return self.fields_from_output(output, state[:, -self.states :])

    def fields_from_output(self, output: Tensor, last: Tensor) -> Tensor:
        """Return the corrected fields of the model's output, one step after the state `last`."""
        fields = self._add_tendency(output, last) if self.residual else output
        if self.fixers is None:
            return fields
        corrected: Tensor = self.fixers(fields, last)
        return corrected

    def _add_tendency(self, output: Tensor, last: Tensor) -> Tensor:
        state, diagnostic = output[:, : self.states], output[:, self.states :]
        state = last + state * self.tendency_scale
        return torch.cat([state, diagnostic], dim=1) if diagnostic.shape[1] else state

    def rollout(
        self, state: Tensor, forcings: Iterable[Tensor], static: Tensor
    ) -> Iterator[Tensor]:
        """Yield the fields after one step, two steps and so on, one for each forcing.

        Each forcing is that of the time from which its step starts. If `state` has several states,
        each step drops the oldest.
        """
        for forcing in forcings:
            fields = self(state, forcing, static)
            if self.fill is not None:
                fields = self.fill(fields)
            yield fields
            # The diagnostic channels, at the end of the fields, are no inputs of the next step.
            newer_states = state[:, self.states :]
            next_state = fields[:, : self.states]
            state = (
                torch.cat([newer_states, next_state], dim=1)
                if newer_states.shape[1]
                else next_state
            )

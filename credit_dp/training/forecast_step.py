"""One forecast step in normalised space, rollouts of several steps, and ensembles of them.

Everything acts on the rank's band of rows: the globe is never gathered between steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import ModelConfig
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import TrainingData
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import SingleRankTransport, Transport
from credit_dp.physics.fixers import Fixers, fixers_of_run
from credit_dp.random_streams import time_key

Model = Callable[[Tensor], Tensor]  # (B, channels in, h, W) -> (B, channels out, h, W)
NoiseKeys = Sequence[tuple[int, ...]]  # of the random stream of each sample


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
        given_share: of a region with a rim, the share of the given state after each step of a
            rollout, `(h, W)`: 1 on the rim.

    Attributes:
        corrections: channels after those of the output; see `with_corrections`.
    """

    def __init__(
        self,
        model: Model,
        tendency_scale: Tensor,
        residual: bool = True,
        fill: Callable[[Tensor], Tensor] | None = None,
        fixers: Fixers | None = None,
        given_share: Tensor | None = None,
    ) -> None:
        self.model = model
        self.tendency_scale = tendency_scale
        self.residual = residual
        self.fill = fill
        self.fixers = fixers
        self.given_share = given_share
        self.corrections = 0

    @property
    def states(self) -> int:
        """Return the number of channels of one state."""
        return len(self.tendency_scale)

    def with_model(self, model: Model) -> "ForecastStep":
        """Return the same step with another model."""
        step = copy(self)
        step.model = model
        return step

    def without_fixers(self) -> "ForecastStep":
        """Return the same step without fixers."""
        step = copy(self)
        step.fixers = None
        return step

    def with_corrections(self) -> "ForecastStep":
        """Return the same step, whose fields end with the corrections of fixers of budgets.

        These are in physical units, in the order of the fixers. For forecasts: nothing is computed
        again in backward.
        """
        step, fill = copy(self), self.fill
        step.corrections = count = 0 if self.fixers is None else self.fixers.num_corrections
        if count and fill is not None:
            step.fill = lambda x: torch.cat([fill(x[:, :-count]), x[:, -count:]], dim=1)
        return step

    def __call__(self, state: Tensor, forcing: Tensor, static: Tensor) -> Tensor:
        """Return the fields one step after `state`; points without values are not filled."""
        output: Tensor = self.model(torch.cat([state, forcing, static], dim=1))
        return self.fields_from_output(output, state[:, -self.states :])

    def fields_from_output(self, output: Tensor, last: Tensor) -> Tensor:
        """Return the corrected fields of the model's output, one step after the state `last`."""
        fields = output
        if self.residual:
            fields = self._with_state(output, lambda change: last + change * self.tendency_scale)
        if self.fixers is None:
            return fields
        if not self.corrections:
            corrected: Tensor = self.fixers(fields, last)
            return corrected
        fields, corrections = self.fixers.fields_and_corrections(fields, last)
        return torch.cat([fields, *(field.to(fields) for field in corrections)], dim=1)

    def output_from_fields(self, fields: Tensor, last: Tensor) -> Tensor:
        """Return the output that becomes these fields, if no fixer corrects them."""
        if not self.residual:
            return fields
        return self._with_state(fields, lambda state: (state - last) / self.tendency_scale)

    def _with_given(self, fields: Tensor, given: Tensor, share: Tensor) -> Tensor:
        given = given[:, : self.states]

        def mixed(state: Tensor) -> Tensor:
            drawn = torch.where(share > 0, torch.lerp(state, given, share), state)
            return torch.where(share == 1, given, drawn)  # whatever is predicted there, also NaN

        return self._with_state(fields, mixed)

    def _with_state(self, fields: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return fields with another state; diagnostic channels stay as they are."""
        state, diagnostic = change(fields[:, : self.states]), fields[:, self.states :]
        return torch.cat([state, diagnostic], dim=1) if diagnostic.shape[1] else state

    def rollout(
        self,
        state: Tensor,
        forcings: Iterable[Tensor],
        static: Tensor,
        given: Iterable[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the fields after one step, two steps and so on, one for each forcing.

        Each forcing is that of the time from which its step starts. If `state` has several states,
        each step drops the oldest. With a rim, `given` are the states after each step, `(B, C or
        more, h, W)`, of which each point takes its share.
        """
        if self.given_share is not None and given is None:
            raise ValueError("the rim of each state has to be given")
        after = repeat(None) if self.given_share is None or given is None else given
        for forcing, truth in zip(forcings, after, strict=False):
            fields = self(state, forcing, static)
            if truth is not None and self.given_share is not None:
                fields = self._with_given(fields, truth, self.given_share)
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


def repeat_members(x: Tensor, members: int) -> Tensor:
    """Repeat each sample for its members, which become neighbours: `(B, ...)` -> `(B * M, ...)`."""
    return x.repeat_interleave(members, 0) if members > 1 else x


@final
@dataclass(frozen=True)
class EnsembleForecast:
    """Rollouts whose members differ in the model's noise, if it has any.

    The noise depends on the initial time, the step and the member only, never on the mesh.

    Attributes:
        step: the forecast step.
        draw: draws the noise of the coming step of all samples; None: the model has none.
        members: the numbers of the members of this rank.
        seed: of the noise.
        ensemble: connects the ranks that compute the other members; each gets all of them.
    """

    step: ForecastStep
    draw: Callable[[NoiseKeys], None] | None = None
    members: Sequence[int] = (0,)
    seed: int = 0
    ensemble: Transport = field(default_factory=SingleRankTransport)

    def rollout(
        self,
        times: NDArray[np.datetime64],
        state: Tensor,
        forcings: Iterable[Tensor],
        static: Tensor,
        given: Iterable[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the members after one step, two steps and so on, one for each forcing.

        Ranks that share the members call it together; gradients do not go back to the others.

        Args:
            times: initial times, `(B,)`.
            state: of these times; all arguments are those of `ForecastStep.rollout`.
            given: states after each step, of whose rim each is the start of the next.

        Shapes:
            each of the results is `(B, M, C + D, h, W)`, with the members of all ranks.
        """
        keys = [time_key(time) for time in times]
        members, count = self.members, len(self.members)

        def draw_and_repeat() -> Iterator[Tensor]:
            # A step takes its forcing at its beginning: the noise is that of this step.
            for step, forcing in enumerate(forcings, start=1):
                if self.draw is not None:
                    self.draw([(self.seed, key, m, step) for key in keys for m in members])
                yield repeat_members(forcing, count)

        rims = None if given is None else (repeat_members(fields, count) for fields in given)
        state, static = repeat_members(state, count), repeat_members(static, count)
        for fields in self.step.rollout(state, draw_and_repeat(), static, rims):
            own = fields.view(-1, count, *fields.shape[1:])
            yield self.ensemble.all_gather(own).transpose(0, 1).flatten(1, 2)


def build_forecast_step(
    config: ModelConfig,
    prepared: TrainingData,
    manager: DomainParallelManager,
    model: Model,
    normaliser: Normaliser,
    points: ValidPoints | None,
    given_share: NDArray[np.float64] | None = None,
) -> ForecastStep:
    """Return the forecast step around a model, of training and of forecasts alike.

    Args:
        normaliser: on the device of the model's output.
        points: with values, on this rank's rows; None: all of them.
        given_share: on this rank's rows; see `Store.given_share`.

    Raises:
        UserError: see `fixers_of_run`.
    """
    tendency = normaliser.tendency_scale
    fill = None if points is None else partial(points.fill_invalid, fills=normaliser.fills)
    return ForecastStep(
        model,
        tendency[: prepared.store.channels.num_states],
        config.residual,
        fill,
        fixers_of_run(config, prepared, manager, tendency.device),
        None if given_share is None else torch.from_numpy(given_share).to(tendency),
    )

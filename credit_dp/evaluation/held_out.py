"""Held-out dates as a model sees them: normalised fields of the rank's own rows, on its device."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import Config, TrainerConfig
from credit_dp.data.dates import Dated, Times
from credit_dp.data.grid import row_weights
from credit_dp.data.nonnegative import is_nonnegative
from credit_dp.data.normalise import Normaliser
from credit_dp.data.prepare import Prepared
from credit_dp.data.sampling import frame_steps, initial_times
from credit_dp.evaluation.valid_points import ValidPoints

PROBES = 4  # initial times looked at before training, first and last among them


@final
@dataclass(frozen=True)
class Dates:
    """From which dates to forecast, and how far.

    Attributes:
        split: train, valid or test.
        hours: lead times.
        stride_hours: the least between initial times.
        most: initial times, evenly spread; None: all.
    """

    split: str
    hours: tuple[int, ...]
    stride_hours: int
    most: int | None = None

    @classmethod
    def tested(cls, trainer: TrainerConfig) -> "Dates":
        """Those of a run's final scores."""
        return cls("test", tuple(trainer.evaluate_hours), trainer.evaluate_stride_hours)

    def initial_times(self, store: Dated, frames: int) -> Times:
        """`(N,)`, rising.

        Raises:
            UserError: as in `initial_times`.
        """
        found = initial_times(store, self.split, self.hours, self.stride_hours, frames)
        return found if self.most is None else found[spread(len(found), self.most)]


def spread(count: int, most: int) -> NDArray[np.intp]:
    """Evenly spread places among `count`, at most so many, first and last among them."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.intp))


@final
class HeldOut:
    """Reads what forecasts of held-out dates start from and are compared with.

    Args:
        rows: the rank's own.
        like: its device and dtype are those of every tensor returned.
        chosen: which dates; None: those of the final scores.

    Attributes:
        hours, leads: lead times, rising, in hours and in steps of `step`.
        area_weights: `(h,)`, the globe's have mean 1.
        points: those with values, if not all fields have them everywhere.
        initial_times: every one has the states that a forecast starts from and all steps to the
            longest lead within the split.

    Raises:
        UserError: a lead time is no multiple of the data's step, no date has them all, or one of
            the few fields that are read at once has gaps.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        rows: slice,
        like: Tensor,
        chosen: Dates | None = None,
    ) -> None:
        chosen = chosen or Dates.tested(config.trainer)
        self.prepared = prepared
        self.rows = rows
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        frames = config.model.frames
        self.initial_times: Times = chosen.initial_times(prepared.store, frames)
        self.hours = tuple(sorted(chosen.hours))
        self.leads = tuple(hour // config.data.step_hours for hour in self.hours)
        self.step = np.timedelta64(config.data.step_hours, "h")
        self._frames = frame_steps(frames, config.data.step_hours)
        self.area_weights = torch.as_tensor(row_weights(prepared.store.latitude)[rows]).to(like)
        self.points = ValidPoints.of(prepared.store.masks(rows), like)
        self._bent = bent_channels(prepared)
        self._static = self.normaliser.static(prepared.store.static(rows))
        self._probe()

    def _probe(self) -> None:
        """Read some of what evaluation needs: gaps should not come to light after training."""
        for start in self.initial_times[spread(len(self.initial_times), PROBES)]:
            self.prepared.store.forcing(start, self.rows)
            for time in (*(start + self._frames), start + self.leads[-1] * self.step):
                self.prepared.store.read_outputs(np.array([time]), self.rows)

    def states(self, times: Times) -> Tensor:
        """Normalised prognostic fields, `(B, C, h, W)`."""
        return self.normaliser.state(self.prepared.store.read_times(times, self.rows))

    def fields(self, times: Times) -> Tensor:
        """Normalised fields of all that a model makes, `(B, C + D, h, W)`."""
        return self.normaliser.state(self.prepared.store.read_outputs(times, self.rows))

    def newest(self, times: Times, starts: Tensor) -> Tensor:
        """As `fields`, at the newest time of what forecasts start from, read as far as need be."""
        channels = self.prepared.store.channels
        return self.fields(times) if channels.diagnostic else starts[:, -channels.states :]

    def starts(self, times: Times) -> Tensor:
        """What forecasts from these times start from, `(B, frames * C, h, W)`, the newest last.

        A state that is in several of them is read once.
        """
        if len(self._frames) == 1:
            return self.states(times)
        wanted, places = np.unique(times[:, None] + self._frames, return_inverse=True)
        read = self.prepared.store.read_times(wanted, self.rows)
        return self.normaliser.state(read[places.reshape(len(times), -1)]).flatten(1, 2)

    def climatology(self, times: Times) -> Tensor:
        """What the climatology expects at these times, normalised, `(B, C + D, h, W)`."""
        fields = [self.prepared.climatology.field(time, self.rows) for time in times]
        return self.normaliser.state(np.stack(fields))

    def physical(self, fields: Tensor) -> Tensor:
        """Normalised fields in the store's units: `(B, C + D, h, W)`; NaN where there are none."""
        return self.normaliser.physical(fields, None if self.points is None else self.points.valid)

    def difference(self, guess: Tensor, truth: Tensor) -> Tensor:
        """How far normalised fields are apart, in the store's units: `(B, C + D, h, W)`."""
        difference = (guess - truth) * self.normaliser.scale
        if self._bent:
            between = self.normaliser.physical(guess) - self.normaliser.physical(truth)
            difference[:, self._bent] = between[:, self._bent]
        return difference

    def forcing(self, times: Times) -> Tensor:
        """Normalised forcings, `(B, F, h, W)`."""
        return self.normaliser.forcing(self.prepared.store.forcing_times(times, self.rows))

    def static(self, count: int) -> Tensor:
        """Normalised static fields, the same for each of `count` samples, `(count, S, h, W)`."""
        return self._static.expand(count, -1, -1, -1)


def bent_channels(prepared: Prepared) -> list[int]:
    """The channels whose normalised differences say little of those in the store's units.

    Of all others the difference is scaled, which rounds less than two large numbers do.
    """
    config = prepared.store.config
    found = []
    for place, channel in enumerate(prepared.store.channels.out):
        variable = config.of(channel.variable)
        bent = not np.isnan(variable.log1p_scale) or is_nonnegative(channel.variable, variable)
        found += [place] if bent else []
    return found

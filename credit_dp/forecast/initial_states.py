"""Read initial states and forcing on this rank's rows, and perturb the members of an ensemble.

Perturbations are sums of random waves in space, whose covariance approaches a Gaussian of the
distance. A wave can be evaluated on any row alone, so that ranks need no communication.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.loader import Normaliser
from credit_dp.data.sampling import frame_offsets
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.forecast.request import ForecastJob, ForecastRequest, Times
from credit_dp.random_streams import random_stream

CORRELATION_LENGTH = 0.16  # in earth radii: about 1000 km
WAVE_COUNT = 256  # waves per perturbation

Matrix = NDArray[np.float64]


@final
class Perturbations:
    """Draws perturbations of initial states on this rank's rows.

    Args:
        seed: used together with the initial time and the member.
        latitude: of the rows, in degrees.
        longitude: of the columns, in degrees.
        channels: number of channels of a state; each is perturbed independently.
    """

    def __init__(self, seed: int, latitude: Matrix, longitude: Matrix, channels: int) -> None:
        self._seed = seed
        self._latitude = np.deg2rad(latitude)
        self._longitude = np.deg2rad(longitude)
        self._channels = channels

    def draw(self, time: np.datetime64, job: ForecastJob) -> Matrix:
        """Return fields of mean 0 and variance 1: `(C, h, W)`, independent of the partition."""
        # Seeds must not be negative, but hours since 1970 are before that.
        hours = int(time.astype("M8[h]").astype(np.int64)) + 2**40
        # Every rank draws the same waves and evaluates them on its own rows.
        random = random_stream(self._seed, hours, job.member)
        waves = random.standard_normal((WAVE_COUNT, 3)) / CORRELATION_LENGTH
        amplitudes = random.standard_normal((self._channels, 2 * WAVE_COUNT)) / np.sqrt(WAVE_COUNT)
        rows = [amplitudes @ self._wave_basis(waves, latitude) for latitude in self._latitude]
        return np.stack(rows, axis=1)

    def _wave_basis(self, waves: Matrix, latitude: float) -> Matrix:
        """Return cosines and sines of all waves on one row: `(2 * WAVE_COUNT, W)`."""
        radius = np.cos(latitude)
        # Cartesian coordinates on the unit sphere: waves are smooth across the poles.
        points = np.stack(
            [
                radius * np.cos(self._longitude),
                radius * np.sin(self._longitude),
                np.full_like(self._longitude, np.sin(latitude)),
            ]
        )
        angles = waves @ points
        return np.concatenate([np.cos(angles), np.sin(angles)])


@final
class InitialStates:
    """Reads and perturbs initial states, and reads forcing.

    Args:
        prepared: the store, with the statistics that the model was trained with.
        request: initial times, lead times and perturbation.
        frames: number of input states of the model.
        rows: this rank's band.
        like: gives device and dtype of every tensor returned.
    """

    def __init__(
        self,
        prepared: TrainingData,
        request: ForecastRequest,
        frames: int,
        rows: slice,
        like: Tensor,
    ) -> None:
        self.store = prepared.store
        self.rows = rows
        self.times: Times = request.initial_times()
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        step_hours = self.store.config.step_hours
        self._step = np.timedelta64(step_hours, "h")
        self._frames = frame_offsets(frames, step_hours)
        self.steps = request.lead_hours(step_hours)[-1] // step_hours
        self._static = self.normaliser.normalise_static(self.store.read_static(rows))
        masks = self.store.valid_mask(rows)
        self._valid = None if masks is None else torch.from_numpy(masks).to(like.device)
        self._amplitude = request.perturb
        states = self.store.channels.num_states
        self._std = self._normalised_std(prepared)[:states]
        self._perturbations = Perturbations(
            request.perturb_seed, self.store.latitude[rows], self.store.longitude, states
        )

    def _normalised_std(self, prepared: TrainingData) -> Tensor:
        """Return the standard deviation of each channel in normalised units, `(outputs, 1, 1)`."""
        # `tendency_scale` is the tendency's deviation over the channel's scale: times std over
        # the tendency's deviation that is std over scale, whatever the normalisation.
        statistics = prepared.statistics
        changes = np.where(statistics.tendency_std > 0, statistics.tendency_std, 1.0)
        ratio = torch.from_numpy(statistics.std / changes)[:, None, None]
        return self.normaliser.tendency_scale * ratio.to(self.normaliser.tendency_scale)

    def initial_state(self, job: ForecastJob) -> Tensor:
        """Return the input states of a forecast, `(1, frames * C, h, W)`, the newest last."""
        times = self.times[job.time] + self._frames
        states = self.normaliser.normalise_state(self.store.read_states(times, self.rows))
        if self._amplitude:
            noise = torch.from_numpy(self._perturbations.draw(self.times[job.time], job)).to(states)
            # The same noise on all input states: the tendency between them does not change.
            states = states + self._amplitude * self._std * noise
            if self._valid is not None:
                # Points without values get their fill back, as in training.
                count = states.shape[1]
                fills = self.normaliser.fills[:count]
                states = torch.where(self._valid[:count], states, fills)
        return states.flatten(0, 1)[None]

    def forcings(self, job: ForecastJob) -> Iterator[Tensor]:
        """Yield the forcing of each step, `(1, F, h, W)`; each is read when it is needed."""
        for step in range(self.steps):
            time = self.times[[job.time]] + step * self._step
            yield self.normaliser.normalise_forcing(self.store.read_forcing(time, self.rows))

    def denormalise(self, fields: Tensor) -> Tensor:
        """Return fields in the store's units, `(B, C + D, h, W)`; NaN on points without values."""
        return self.normaliser.denormalise(fields, self._valid)

    @property
    def static(self) -> Tensor:
        """Return normalised static fields, `(1, S, h, W)`."""
        return self._static[None]


def check_times(store: Store, request: ForecastRequest, frames: int) -> None:
    """Check that the store has all needed times, before a model is built or a file written.

    Raises:
        UserError: the store lacks an input state or the forcing of a step.
    """
    hours = store.config.step_hours
    times = request.initial_times()
    _refuse_missing(store, times[:, None] + frame_offsets(frames, hours), "a state")
    # The last step's forcing is that at its beginning, so that the last valid time is not needed.
    if any(name not in COMPUTED_FORCINGS for name in store.channels.forcing):
        steps = request.lead_hours(hours)[-1] // hours
        _refuse_missing(store, times[:, None] + frame_offsets(1, hours, steps - 1), "the forcing")


def _refuse_missing(store: Store, times: Times, what: str) -> None:
    missing = times[~np.isin(times, store.times)]
    if missing.size:
        first, last = (str(time.astype("M8[m]")) for time in store.times[[0, -1]])
        raise UserError(
            f"init: needs {what} at {missing.flat[0].astype('M8[m]')}, but {store.source.where} "
            f"has {first} to {last} in steps of {store.config.step} and lacks this time. Change "
            "init, lead or data.store."
        )

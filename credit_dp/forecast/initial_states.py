"""What forecasts start from: fields of the rank's rows, and perturbed members of an ensemble."""

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

CORRELATION_LENGTH = 0.16  # of the earth's radius: about 1000 km
WAVE_COUNT = 256

Matrix = NDArray[np.float64]


@final
class Perturbations:
    """Draws the perturbations of initial states on some rows.

    Args:
        seed: what they are drawn from, with the initial time and the member.
        latitude: of the rows, in degrees.
        longitude: of the columns.
        channels: of a state, each of which has a field of its own.
    """

    def __init__(self, seed: int, latitude: Matrix, longitude: Matrix, channels: int) -> None:
        self._seed = seed
        self._latitude, self._longitude = np.deg2rad(latitude), np.deg2rad(longitude)
        self._channels = channels

    def draw(self, time: np.datetime64, job: ForecastJob) -> Matrix:
        """Fields of mean 0 and variance 1: `(C, h, W)`, the same whatever the other rows are."""
        hours = int(time.astype("M8[h]").astype(np.int64)) + 2**40  # none is negative
        random = np.random.default_rng([self._seed, hours, job.member])
        waves = random.standard_normal((WAVE_COUNT, 3)) / CORRELATION_LENGTH
        amplitudes = random.standard_normal((self._channels, 2 * WAVE_COUNT)) / np.sqrt(WAVE_COUNT)
        rows = [amplitudes @ self._wave_basis(waves, latitude) for latitude in self._latitude]
        return np.stack(rows, axis=1)

    def _wave_basis(self, waves: Matrix, latitude: float) -> Matrix:
        """Cosines and sines on one row: `(2 WAVES, W)`."""
        around = np.cos(latitude)
        points = np.stack(
            [
                around * np.cos(self._longitude),
                around * np.sin(self._longitude),
                np.full_like(self._longitude, np.sin(latitude)),
            ]
        )
        angles = waves @ points
        return np.concatenate([np.cos(angles), np.sin(angles)])


@final
class InitialStates:
    """Reads initial states, perturbs them if there are members, and reads forcings.

    Args:
        prepared: the store and the statistics that the model was trained with.
        request: which initial times, lead times and members.
        frames: states that go in.
        rows: the rank's own.
        like: its device and dtype are those of every tensor returned.
    """

    def __init__(
        self,
        prepared: TrainingData,
        request: ForecastRequest,
        frames: int,
        rows: slice,
        like: Tensor,
    ) -> None:
        self.store, self.rows = prepared.store, rows
        self.times: Times = request.initial_times()
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        step_hours = self.store.config.step_hours
        self._step = np.timedelta64(step_hours, "h")
        self._frames = frame_offsets(frames, step_hours)
        self.steps = request.lead_hours(step_hours)[-1] // step_hours
        self._static = self.normaliser.static(self.store.static(rows))
        masks = self.store.valid_mask(rows)
        self._valid = None if masks is None else torch.from_numpy(masks).to(like.device)
        self._amplitude = request.perturb
        states = self.store.channels.states
        self._std = self._normalised_std(prepared)[:states]
        latitude, longitude = self.store.latitude[rows], self.store.longitude
        self._perturbations = Perturbations(request.perturb_seed, latitude, longitude, states)

    def _normalised_std(self, prepared: TrainingData) -> Tensor:
        """A standard deviation of each channel in normalised units, `(outputs, 1, 1)`."""
        statistics = prepared.statistics
        changes = np.where(statistics.tendency_std > 0, statistics.tendency_std, 1.0)
        ratio = torch.from_numpy(statistics.std / changes)[:, None, None]
        return self.normaliser.tendency_scale * ratio.to(self.normaliser.tendency_scale)

    def start(self, job: ForecastJob) -> Tensor:
        """What one forecast starts from, `(1, frames * C, h, W)`, the newest state last."""
        times = self.times[job.time] + self._frames
        states = self.normaliser.state(self.store.read_states(times, self.rows))
        if self._amplitude:
            noise = torch.from_numpy(self._perturbations.draw(self.times[job.time], job)).to(states)
            # The same on all states: the tendency between them stays as it was.
            states = states + self._amplitude * self._std * noise
            if self._valid is not None:
                count = states.shape[1]
                fills = self.normaliser.fills[:count]
                states = torch.where(self._valid[:count], states, fills)
        return states.flatten(0, 1)[None]

    def forcings(self, job: ForecastJob) -> Iterator[Tensor]:
        """Those of each step, `(1, F, h, W)`, read as they are needed."""
        for step in range(self.steps):
            time = self.times[[job.time]] + step * self._step
            yield self.normaliser.forcing(self.store.read_forcing(time, self.rows))

    def denormalise(self, fields: Tensor) -> Tensor:
        """Normalised fields in the store's units: `(B, C + D, h, W)`; NaN where there are none."""
        return self.normaliser.denormalise(fields, self._valid)

    @property
    def static(self) -> Tensor:
        """`(1, S, h, W)`."""
        return self._static[None]


def check_times(store: Store, request: ForecastRequest, frames: int) -> None:
    """Refuse initial times that the store can't serve, before anything is built or written.

    Raises:
        UserError: a time that a forecast starts from or is driven by is not in the store.
    """
    hours, times = store.config.step_hours, request.initial_times()
    _refuse_absent(store, times[:, None] + frame_offsets(frames, hours), "a state")
    if any(name not in COMPUTED_FORCINGS for name in store.channels.forcing):
        steps = request.lead_hours(hours)[-1] // hours
        _refuse_absent(store, times[:, None] + frame_offsets(1, hours, steps - 1), "the forcing")


def _refuse_absent(store: Store, wanted: Times, what: str) -> None:
    absent = wanted[~np.isin(wanted, store.times)]
    if absent.size:
        first, last = (str(time.astype("M8[m]")) for time in store.times[[0, -1]])
        raise UserError(
            f"init: needs {what} at {absent.flat[0].astype('M8[m]')}, but {store.source.where} has "
            f"{first} to {last} in steps of {store.config.step} and lacks that. Change init, lead "
            "or data.store."
        )

"""Random smooth fields on the sphere, equal on every mesh, that make an ensemble of one state.

A field is a sum of plane waves through space, looked at on the sphere: a Gaussian process with the
same variance everywhere, poles included, whose values at two points are correlated as
exp(-d^2 / (2 LENGTH^2)), d being the chord between them. Every rank draws the same waves and adds
them up on its own rows, so that no row depends on who has which.

Source: Rahimi & Recht 2007, "Random features for large-scale kernel machines".
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.forecast.jobs import Job

LENGTH = 0.16  # of the earth's radius: about 1000 km
WAVES = 256

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

    def draw(self, time: np.datetime64, job: Job) -> Matrix:
        """Fields of mean 0 and variance 1: `(C, h, W)`, the same whatever the other rows are."""
        hours = int(time.astype("M8[h]").astype(np.int64)) + 2**40  # none is negative
        random = np.random.default_rng([self._seed, hours, job.member])
        waves = random.standard_normal((WAVES, 3)) / LENGTH
        amplitudes = random.standard_normal((self._channels, 2 * WAVES)) / np.sqrt(WAVES)
        rows = [amplitudes @ self._waves(waves, latitude) for latitude in self._latitude]
        return np.stack(rows, axis=1)

    def _waves(self, waves: Matrix, latitude: float) -> Matrix:
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

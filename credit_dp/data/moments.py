"""Mean and variance of one channel over blocks that come one after another."""

from typing import final

import numpy as np
from numpy.typing import NDArray


@final
class Moments:
    """Mean and variance of one channel, merged block by block, never as E[x^2] - E[x]^2.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, with weights for counts.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._weights = weights
        self.weight = 0.0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, block: NDArray[np.floating]) -> None:
        """Take in `(T, H, W)`."""
        values = block.astype(np.float64)
        if not values.size:
            return
        weight = len(values) * values.shape[2] * float(self._weights.sum())
        mean = float(values.sum(axis=(0, 2)) @ self._weights) / weight
        values -= mean
        squares = float(np.einsum("thw,thw->h", values, values) @ self._weights)
        total = self.weight + weight
        shift = mean - self.mean
        self.mean += shift * weight / total
        self._squares += squares + shift**2 * self.weight * weight / total
        self.weight = total

    @property
    def std(self) -> float:
        """Standard deviation; 0 if what is there is no more than float32 rounding of the mean."""
        std = float(np.sqrt(self._squares / self.weight))
        return std if std > np.finfo(np.float32).eps * abs(self.mean) else 0.0

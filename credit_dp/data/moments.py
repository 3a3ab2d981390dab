"""Mean, variance and range of one channel, of blocks that come in any order and are merged."""

from dataclasses import astuple, dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True)
class Moments:
    """What is known of the values seen so far; merged with others, never as E[x^2] - E[x]^2.

    Attributes:
        weight: the sum of all weights.
        squares: the weighted sum of squared differences from the mean.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, with weights for counts.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = float("inf")
    maximum: float = float("-inf")

    @classmethod
    def of(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        """Those of `(T, h, W)` with the weights `(h,)` of its rows; NaN is left out."""
        if not values.size:
            return cls()
        sums = values.sum(axis=(0, 2))
        # A sum is NaN only if a value is: looking at each costs as much as the moments themselves.
        if np.isnan(sums).any():
            return cls._of_some(values, rows)
        weight = len(values) * values.shape[2] * float(rows.sum())
        mean = float(sums @ rows) / weight
        away = values - mean
        squares = float(np.einsum("thw,thw->h", away, away) @ rows)
        return cls(weight, mean, squares, float(values.min()), float(values.max()))

    @classmethod
    def _of_some(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        """As `of`, where some values are NaN."""
        valid = ~np.isnan(values)
        weight = float(valid.sum(axis=(0, 2)) @ rows)
        if not weight:
            return cls()
        mean = float(np.where(valid, values, 0).sum(axis=(0, 2)) @ rows) / weight
        away = np.where(valid, values - mean, 0)
        squares = float(np.einsum("thw,thw->h", away, away) @ rows)
        least, most = float(np.nanmin(values)), float(np.nanmax(values))
        return cls(weight, mean, squares, least, most)

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both."""
        weight = self.weight + other.weight
        if not (self.weight and other.weight):
            return self if self.weight else other
        shift = other.mean - self.mean
        return Moments(
            weight,
            self.mean + shift * other.weight / weight,
            self.squares + other.squares + shift**2 * self.weight * other.weight / weight,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @property
    def std(self) -> float:
        """Standard deviation; 0 if what is there is no more than float32 rounding of the mean."""
        if not self.weight:
            return 0.0
        std = float(np.sqrt(self.squares / self.weight))
        return std if std > np.finfo(np.float32).eps * abs(self.mean) else 0.0

    def numbers(self) -> list[float]:
        """All of it, for `Moments(*numbers)`."""
        return list(astuple(self))

"""Where forecasts are wrong: errors per grid point at one lead time, over all initial times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]


@final
@dataclass(frozen=True)
class ErrorMap:
    """The errors of one channel at one lead time.

    Shapes:
        rmse and bias `(H, W)`, in the channel's unit; NaN where there are no values.
    """

    channel: int
    hours: int
    rmse: Field
    bias: Field


@final
class ErrorMaps:
    """Sums errors of a few channels, so that memory does not grow with the forecasts.

    Args:
        channels: their places among all.
        lead: the place of the lead time.
    """

    def __init__(self, channels: Sequence[int], lead: int, hours: int, grid: tuple[int, int]):
        self._lead, self._hours = lead, hours
        self._count = 0
        self._errors = {channel: np.zeros(grid) for channel in channels}
        self._squares = {channel: np.zeros(grid) for channel in channels}

    def add(self, lead: int, first: int, error: Field) -> None:
        """Add errors `(C, H, W)` of the channels from `first` on, if this is the lead time.

        The first channel's forecasts are the ones that are counted.
        """
        if lead != self._lead:
            return
        self._count += first == 0
        for channel in self._errors:
            if first <= channel < first + len(error):
                self._errors[channel] += error[channel - first]
                self._squares[channel] += error[channel - first] ** 2

    def result(self) -> list[ErrorMap]:
        """One map for each channel."""
        return [
            ErrorMap(c, self._hours, np.sqrt(self._squares[c] / self._count), total / self._count)
            for c, total in self._errors.items()
        ]

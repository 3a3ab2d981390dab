"""Where forecasts are wrong: errors per grid point at one lead time, over all initial times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]
Fields = NDArray[np.float32]


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

    def add(self, leads: slice, first: int, forecast: Fields, truth: Fields) -> None:
        """Add the errors at the lead time, if it is among these.

        The first channel's forecasts are the ones that are counted.

        Args:
            leads: indices of the lead times.
            first: the index of the first of the channels.
            forecast: `(leads, M, C, H, W)`, of whose members the mean is taken.
            truth: `(leads, C, H, W)`.
        """
        if not leads.start <= self._lead < leads.stop:
            return
        self._count += first == 0
        lead = self._lead - leads.start
        for channel in self._errors:
            if first <= channel < first + truth.shape[1]:
                mean = forecast[lead, :, channel - first].mean(axis=0, dtype=np.float64)
                error = mean - truth[lead, channel - first]
                self._errors[channel] += error
                self._squares[channel] += error**2

    def result(self) -> list[ErrorMap]:
        """One map for each channel."""
        return [
            ErrorMap(c, self._hours, np.sqrt(self._squares[c] / self._count), total / self._count)
            for c, total in self._errors.items()
        ]

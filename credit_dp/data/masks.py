"""Where variables that are not defined everywhere have values: sea, land, ice, soil.

A variable with a `fill` has one mask for all times: the points that are NaN at the first date of
`data.dates.train`. At all times there are no values on them, and values everywhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Fields

Valid = NDArray[np.bool_]  # (rows, W), True where there are values
FirstFields = Callable[[Sequence[Channel], slice], Fields]


@final
class Masks:
    """The masks of the channels whose variables have a fill; each band is read once.

    Any thread may ask.
    """

    def __init__(self, channels: Sequence[Channel], first_fields: FirstFields) -> None:
        """Take what reads `(C, rows, W)` of the first training date, NaN where there is no value.

        What reads raises the errors of reading.
        """
        self.channels = tuple(channels)
        self._first_fields = first_fields
        self._known: dict[tuple[int, int], Mapping[Channel, Valid]] = {}
        self._lock = Lock()

    def of(self, band: slice) -> Mapping[Channel, Valid]:
        """The mask of each channel on rows `band`, whose ends are given."""
        if not self.channels:
            return {}
        key = (band.start, band.stop)
        with self._lock:
            if key not in self._known:
                fields = self._first_fields(self.channels, band)
                self._known[key] = dict(zip(self.channels, ~np.isnan(fields), strict=True))
            return self._known[key]

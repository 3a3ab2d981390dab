"""Where in the year a time lies: shared by the computed forcings and the climatology."""

import numpy as np
from numpy.typing import NDArray


def year_fraction(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """The part of its calendar year that has passed, 0 to 1, so that leap years keep the season.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    year = times.astype("datetime64[Y]")
    start = year.astype("datetime64[s]")
    end = (year + np.timedelta64(1, "Y")).astype("datetime64[s]")
    passed = (times.astype("datetime64[s]") - start).astype(np.float64)
    return np.asarray(passed / (end - start).astype(np.float64))

"""Where in the year and in the day a time lies: for computed forcings and the climatology."""

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


def day_fraction(times: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """The part of its day, by universal time, that has passed, 0 to 1.

    Shapes:
        `(T,)` -> `(T,)`, or a scalar -> a zero-dimensional array.
    """
    seconds = times.astype("datetime64[s]") - times.astype("datetime64[D]")
    return np.asarray(seconds.astype(np.float64) / 86400)

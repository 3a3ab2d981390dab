"""The dates of a split: `[first, last]` of the config as times, and as places on a time axis."""

from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.errors import UserError

Interval = tuple[np.datetime64, np.datetime64]


def whole(text: str) -> Interval:
    """First and last nanosecond of an ISO date: the whole day, or one instant if it has a time."""
    date = datetime.fromisoformat(text)
    if date.tzinfo is not None:
        date = date.astimezone(UTC).replace(tzinfo=None)
    first = np.datetime64(date, "ns")
    has_time = "T" in text or " " in text
    return first, first if has_time else first + np.timedelta64(24, "h") - np.timedelta64(1, "ns")


def split_span(config: DataConfig, split: str, times: NDArray[np.datetime64]) -> slice:
    """Which of the store's `times` belong to a split: from the first date to the end of the last.

    Raises:
        UserError: the dates reach outside the store's time axis, or no time lies between them.
    """
    key, where = f"data.dates.{split}", ", ".join(config.stores)
    dates: list[str] = getattr(config.dates, split)
    first, last = (whole(date) for date in dates)
    step = np.timedelta64(config.step_hours, "h")  # what is off the step is none of the times
    if first[1] <= times[0] - step or last[0] >= times[-1] + step:
        raise UserError(
            f"{where}: holds {_minute(times[0])} to {_minute(times[-1])}, but {key} asks "
            f"for {dates[0]} to {dates[1]}. Set {key} to dates within the store."
        )
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start == stop:
        raise UserError(
            f"{where}: has no time from {dates[0]} to {dates[1]}. Set {key} to other dates."
        )
    return slice(start, stop)


def one_step_pairs(
    times: NDArray[np.datetime64], step_hours: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places of all times that have another exactly one step later, and the places of the latter.

    No pair spans a gap, for a gap is a step that is missing.
    """
    later = times + np.timedelta64(step_hours, "h")
    place = np.searchsorted(times, later)
    found = place < len(times)
    found[found] = times[place[found]] == later[found]
    return np.flatnonzero(found), place[found]


def with_steps(
    times: NDArray[np.datetime64], step_hours: int, before: int, after: int
) -> NDArray[np.datetime64]:
    """The times that have the `before` steps before them and the `after` steps after them too."""
    found = np.ones(len(times), dtype=bool)
    for step in range(-before, after + 1):
        found &= np.isin(times + step * np.timedelta64(step_hours, "h"), times)
    return times[found]


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))

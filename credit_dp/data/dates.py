"""The dates of a split: `[first, last]` of the config as times, and as places on a time axis.

And how they are chosen where the config leaves that open (`auto`).
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.errors import UserError

Interval = tuple[np.datetime64, np.datetime64]
Times = NDArray[np.datetime64]

SPLIT_FRACTIONS = {"train": 0.8, "valid": 0.1, "test": 0.1}  # of the times, in this order


class HasTimes(Protocol):
    """Times on a step, `(T,)`, and a config whose dates are among them: an open store, for one."""

    config: DataConfig
    times: Times


class ResolvedDates(NamedTuple):
    """`[first, last]` for each split, and a note on those that were chosen, empty if none was."""

    dates: DatesConfig
    note: str


def date_interval(text: str) -> Interval:
    """First and last nanosecond of an ISO date: the whole day, or one instant if it has a time."""
    date = datetime.fromisoformat(text)
    if date.tzinfo is not None:
        date = date.astimezone(UTC).replace(tzinfo=None)
    first = np.datetime64(date, "ns")
    has_time = "T" in text or " " in text
    return first, first if has_time else first + np.timedelta64(24, "h") - np.timedelta64(1, "ns")


def split_slice(config: DataConfig, split: str, times: Times) -> slice:
    """Which of the store's `times` belong to a split: from the first date to the end of the last.

    Raises:
        UserError: the dates reach outside the store's time axis, or no time lies between them.
    """
    key, where = f"data.dates.{split}", ", ".join(config.stores)
    dates: list[str] = getattr(config.dates, split)
    first, last = (date_interval(date) for date in dates)
    step = np.timedelta64(config.step_hours, "h")  # what is off the step is none of the times
    if first[1] <= times[0] - step or last[0] >= times[-1] + step:
        raise UserError(
            f"{where}: holds {_format_minute(times[0])} to {_format_minute(times[-1])}, but "
            f"{key} asks "
            f"for {dates[0]} to {dates[1]}. Set {key} to dates within the store."
        )
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start == stop:
        raise UserError(
            f"{where}: has no time from {dates[0]} to {dates[1]}. Set {key} to other dates."
        )
    return slice(start, stop)


def resolve_dates(config: DataConfig, times: Times) -> ResolvedDates:
    """Choose what the config leaves open of its dates, among the `times` of the store on its step.

    Splits that are `auto` share the longest stretch of times that no other split has: the first
    80 % train, the next 10 % validate, the last 10 % test; see `_divide_times` for whole years. A
    preset's dates stay if the store has all of them; else they are `auto`, all of them. At last
    each split is cut to its first `data.dates.limit` times.

    Raises:
        UserError: there are too few times, or dates that were given are not in the store.
    """
    given = config.dates
    replaced = (
        []
        if all(_has_split_dates(config, split, times) for split in given.preset)
        else given.preset
    )
    chosen = [split for split in SPLITS if getattr(given, split) == AUTO or split in replaced]
    places = {split: split_slice(config, split, times) for split in SPLITS if split not in chosen}
    places |= _choose_slices(config, chosen, list(places.values()), times)
    dates: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for split, span in places.items():
        stop = span.stop if given.limit is None else min(span.stop, span.start + given.limit)
        counts[split] = stop - span.start
        dates[split] = [_iso(times[span.start]), _iso(times[stop - 1])]
        if split not in chosen and stop == span.stop:
            dates[split] = getattr(given, split)
    reason = f", as the store lacks dates of data={config.name}" if replaced else ""
    spans = (f"{x} {' to '.join(dates[x])} ({counts[x]} times)" for x in chosen)
    note = f"{AUTO}{reason}: {', '.join(spans)}" if chosen else ""
    return ResolvedDates(DatesConfig(dates["train"], dates["valid"], dates["test"]), note)


def _choose_slices(
    config: DataConfig, chosen: Sequence[str], given: Sequence[slice], times: Times
) -> dict[str, slice]:
    """Which of the times the splits get whose dates are chosen, if any."""
    if not chosen:
        return {}
    used = np.zeros(len(times), dtype=bool)
    for span in given:
        used[span] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]])))
    stretches = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    first, stop = max(stretches, key=lambda edge: edge[1] - edge[0], default=(0, 0))
    if stop - first < len(chosen):
        key = f"data.dates.{chosen[0]}"
        raise UserError(
            f"{', '.join(config.stores)}: {key} is chosen among the times that no other split has, "
            f"but of {len(times)} times there are only {stop - first} in a row. Give {key}, or "
            "fewer dates to the other splits."
        )
    sizes = _divide_times(
        times[first:stop], [SPLIT_FRACTIONS[split] for split in chosen], config.step_hours
    )
    bounds = np.cumsum([first, *sizes]).tolist()
    return {split: slice(*span) for split, span in zip(chosen, pairwise(bounds), strict=True)}


def _divide_times(times: Times, shares: Sequence[float], step_hours: int) -> list[int]:
    """How many of the times each share gets, in order: none is empty.

    Where there are at least as many whole years as shares, whole years are counted and not times,
    so that each share after the first begins on the first of January and has at least one whole
    year. What comes before the first whole year goes with the first share, what comes after the
    last one with the last.
    """
    years = _complete_years(times, step_hours)
    if len(years) < len(shares):
        return _proportional_counts(len(times), shares)
    counts = _proportional_counts(len(years), shares)
    later = np.cumsum(counts)[:-1]
    starts = np.searchsorted(times, years[later].astype(times.dtype)).tolist()
    return [stop - start for start, stop in pairwise([0, *starts, len(times)])]


def _proportional_counts(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in about these proportions, none zero; the first has what the others leave."""
    later = [max(1, round(total * share / sum(shares))) for share in shares[1:]]
    return [total - sum(later), *later]


def _complete_years(times: Times, step_hours: int) -> NDArray[np.datetime64]:
    """The calendar years that have times from their first step to their last."""
    step = np.timedelta64(step_hours, "h")
    years = np.unique(times.astype("datetime64[Y]"))
    starts, ends = years.astype(times.dtype), (years + 1).astype(times.dtype)
    first = times[np.searchsorted(times, starts)]
    last = times[np.searchsorted(times, ends) - 1]
    return years[(first - starts < step) & (ends - last <= step)]


def _has_split_dates(config: DataConfig, split: str, times: Times) -> bool:
    """Whether the store has the dates of a split."""
    try:
        split_slice(config, split, times)
    except UserError:
        return False
    return True


def one_step_pairs(times: Times, step_hours: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places of all times that have another exactly one step later, and the places of the latter.

    No pair spans a gap, for a gap is a step that is missing.
    """
    later = times + np.timedelta64(step_hours, "h")
    place = np.searchsorted(times, later)
    found = place < len(times)
    found[found] = times[place[found]] == later[found]
    return np.flatnonzero(found), place[found]


def times_with_steps(times: Times, step_hours: int, before: int, after: int) -> Times:
    """The times that have the `before` steps before them and the `after` steps after them too."""
    found = np.ones(len(times), dtype=bool)
    for step in range(-before, after + 1):
        found &= np.isin(times + step * np.timedelta64(step_hours, "h"), times)
    return times[found]


def _iso(time: np.datetime64) -> str:
    """One instant as ISO text: to the hour, if that is all there is to it."""
    hour = time.astype("datetime64[h]")
    return str(hour if hour == time else time.astype("datetime64[s]"))


def _format_minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))

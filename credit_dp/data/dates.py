"""The dates of the train, valid and test splits on a store's time axis, and times on a step.

`split_slice` turns `[first, last]` of the config into a slice of times. `resolve_dates` chooses the
dates that the config leaves to `auto`. The functions at the end find times that are whole steps
apart, and the times whose sums fill a step.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import Config, DataConfig, DatesConfig
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.errors import UserError, counted

Interval = tuple[np.datetime64, np.datetime64]

EPOCH = np.datetime64(0, "s")  # midnight 1970-01-01, from which steps are counted

SPLIT_FRACTIONS = {"train": 0.8, "valid": 0.1, "test": 0.1}  # of the times, in this order


class HasTimes(Protocol):
    """An object with times on a step, `(T,)`, and a data config, such as an open store."""

    config: DataConfig
    times: Times

    @property
    def calendar(self) -> Calendar:
        """The calendar of the times."""
        ...

    @property
    def num_members(self) -> int:
        """The number of members of an ensemble, which have these times each."""
        ...


class ResolvedDates(NamedTuple):
    """`[first, last]` of each split, and a note on the chosen ones (empty if none was chosen)."""

    dates: DatesConfig
    note: str


class TimesNeeded(NamedTuple):
    """The times in a row that a run needs of a split.

    Attributes:
        number: with the run's keys.
        least: with one sample in a batch, rollouts of one step and forecasts of one step.
    """

    number: int
    least: int


ONE_TIME = TimesNeeded(1, 1)


def times_needed(config: Config) -> dict[str, TimesNeeded]:
    """Return the times that each split needs for one batch, one validation and one forecast.

    A run without validations needs none of `valid`, nor one that validates only if there are dates.
    """
    frames, trainer = config.model.frames, config.trainer
    leads = [-(-hours // config.data.step_hours) for hours in trainer.evaluate_hours]
    train = frames + config.data.batch_size - 1 + trainer.longest_rollout
    needed = {
        "train": TimesNeeded(train, frames + 1),
        "valid": TimesNeeded(frames + min(leads), frames + 1),
        "test": TimesNeeded(frames + max(leads), frames + 1),
    }
    return (
        needed
        if trainer.validate_every or trainer.needs_validation
        else needed | {"valid": TimesNeeded(0, 0)}
    )


def date_interval(key: str, text: str, calendar: Calendar = STANDARD) -> Interval:
    """Return the first and last instant of an ISO date, which is a day unless it has a time."""
    first = calendar.parse(key, text)
    if "T" in text or " " in text:
        return first, first
    return first, first + np.timedelta64(24, "h") - calendar.instant


def split_slice(
    config: DataConfig, split: str, times: Times, calendar: Calendar = STANDARD
) -> slice:
    """Return the slice of `times` that belongs to a split, first and last date included.

    Raises:
        UserError: the dates are outside the store's time axis or not in its calendar, or no time
            lies between them.
    """
    key = f"data.dates.{split}"
    where = config.where
    dates: list[str] = getattr(config.dates, split)
    first, last = (date_interval(key, date, calendar) for date in dates)
    # `times` has only those on the step, so the store may hold up to one step more at each end.
    step = np.timedelta64(config.step_hours, "h")
    if first[1] <= times[0] - step or last[0] >= times[-1] + step:
        raise UserError(
            f"{where}: holds {calendar.text(times[0])} to {calendar.text(times[-1])}, but "
            f"{key} asks for {dates[0]} to {dates[1]}. Set {key} to dates within the store."
        )
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start >= stop:
        raise UserError(
            f"{where}: has no time from {dates[0]} to {dates[1]}. Set {key} to other dates."
        )
    return slice(start, stop)


def resolve_dates(
    config: DataConfig,
    times: Times,
    needed: Mapping[str, TimesNeeded] | None = None,
    calendar: Calendar = STANDARD,
) -> ResolvedDates:
    """Choose the dates that the config leaves to `auto`.

    The `auto` splits divide the longest run of times that no other split uses: the first 80 % for
    training, the next 10 % for validation, the last 10 % for testing, in complete years if there
    are enough of them. A preset's dates are kept if the store has all of them; otherwise all of
    them become `auto`. If validation or testing would get fewer times than a run needs of it, it
    gets these from training; if training then has too few, it gets them from what the others do not
    need. `valid` has the dates of `test` if it needs none and none are left. Finally
    each split is cut to its first `data.dates.limit` times.

    Args:
        needed: see `times_needed`; None: one time of each split.
    """
    requested = config.dates
    # A preset's dates belong together: if the store lacks one of them, all are replaced.
    has_preset = all(_has_split_dates(config, split, times, calendar) for split in requested.preset)
    replaced_splits = [] if has_preset else requested.preset
    auto_splits = [
        split for split in SPLITS if getattr(requested, split) == AUTO or split in replaced_splits
    ]
    slices = {
        split: split_slice(config, split, times, calendar)
        for split in SPLITS
        if split not in auto_splits
    }
    needed = needed or dict.fromkeys(SPLITS, ONE_TIME)
    chosen_needs = {split: needed[split] for split in auto_splits}
    slices |= _choose_slices(config, chosen_needs, list(slices.values()), times, calendar)
    if slices["valid"].start == slices["valid"].stop:
        slices["valid"] = slices["test"]
    dates: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for split, times_slice in slices.items():
        stop = times_slice.stop
        if requested.limit is not None:
            stop = min(stop, times_slice.start + requested.limit)
        counts[split] = stop - times_slice.start
        dates[split] = [calendar.short_text(time) for time in times[[times_slice.start, stop - 1]]]
        # Dates of the config keep their text, unless the limit cuts the split.
        if split not in auto_splits and stop == times_slice.stop:
            dates[split] = getattr(requested, split)
    reason = f", as the store lacks dates of data={config.name}" if replaced_splits else ""
    chosen = (
        f"{split} {' to '.join(dates[split])} ({counted(counts[split], 'time')})"
        for split in auto_splits
    )
    note = f"{AUTO}{reason}: {', '.join(chosen)}" if auto_splits else ""
    return ResolvedDates(DatesConfig(dates["train"], dates["valid"], dates["test"]), note)


def _choose_slices(
    config: DataConfig,
    needed: Mapping[str, TimesNeeded],
    occupied: Sequence[slice],
    times: Times,
    calendar: Calendar,
) -> dict[str, slice]:
    """Return the slice of `times` for each split in `needed`, outside the `occupied` slices."""
    if not needed:
        return {}
    used = np.zeros(len(times), dtype=bool)
    for times_slice in occupied:
        used[times_slice] = True
    # `used` changes at the ends of each run of free times. Bounded by used times on both sides, the
    # changes alternate between the start of a run and its stop.
    edges = np.flatnonzero(np.diff(np.concatenate([[True], used, [True]])))
    free_runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    first, stop = max(free_runs, key=lambda run: run[1] - run[0], default=(0, 0))
    if stop - first < sum(need.number for need in needed.values()):
        raise UserError(_too_few_times(config, needed, stop - first, len(times)))
    fractions = [SPLIT_FRACTIONS[split] for split in needed]
    sizes = _divide_times(times[first:stop], fractions, config.step_hours, calendar)
    least, *others = (need.number for need in needed.values())
    sizes[1:] = map(max, sizes[1:], others)
    sizes[0] = stop - first - sum(sizes[1:])
    for i, other in enumerate(others, start=1):
        moved = min(sizes[i] - other, max(least - sizes[0], 0))
        sizes[0], sizes[i] = sizes[0] + moved, sizes[i] - moved
    bounds = np.cumsum([first, *sizes]).tolist()
    return {
        split: slice(*times_slice)
        for split, times_slice in zip(needed, pairwise(bounds), strict=True)
    }


def _too_few_times(
    config: DataConfig, needed: Mapping[str, TimesNeeded], free: int, total: int
) -> str:
    key = f"data.dates.{next(iter(needed))}"
    line = (
        f"{config.where}: {key} is chosen among the times that no other split has, "
        f"which are at most {free} in a row of {counted(total, 'time')}"
    )
    if all(need == ONE_TIME for need in needed.values()):
        return f"{line}. Set {key}, or give the other splits fewer dates."
    count, least = (sum(numbers) for numbers in zip(*needed.values(), strict=True))
    parts = ", ".join(f"{need.number} for {split}" for split, need in needed.items() if need.number)
    if count == least:
        return f"{line}. This run needs {count}: {parts}. Give it more times."
    return (
        f"{line}. This run needs {count}: {parts}. Give it more times, or lower data.batch_size, "
        f"trainer.rollout or trainer.evaluate_hours: with 1, {{0: 1}} and [{config.step_hours}] it "
        f"needs {least}."
    )


def _divide_times(
    times: Times, fractions: Sequence[float], step_hours: int, calendar: Calendar
) -> list[int]:
    """Return how many of the times each fraction gets, in order, none of them zero.

    If there are at least as many complete years as fractions, years are divided instead of times:
    each part after the first then begins on 1 January, and each has at least one complete year.
    Times before the first complete year go to the first part, those after the last to the last.
    """
    years = _complete_years(times, step_hours, calendar)
    if len(years) < len(fractions):
        return _proportional_counts(len(times), fractions)
    counts = _proportional_counts(len(years), fractions)
    first_years = np.cumsum(counts)[:-1]
    starts = np.searchsorted(times, calendar.starts(years[first_years])).tolist()
    return [stop - start for start, stop in pairwise([0, *starts, len(times)])]


def _proportional_counts(total: int, proportions: Sequence[float]) -> list[int]:
    """Return integers near these proportions that add up to `total`, none of them zero."""
    others = [
        max(1, round(total * proportion / sum(proportions))) for proportion in proportions[1:]
    ]
    return [total - sum(others), *others]


def _complete_years(times: Times, step_hours: int, calendar: Calendar) -> Times:
    """Return the calendar years with times from their first step to their last."""
    step = np.timedelta64(step_hours, "h")
    years = np.unique(calendar.years(times))
    starts = calendar.starts(years)
    ends = calendar.starts(years + np.timedelta64(1, "Y"))
    first = times[np.searchsorted(times, starts)]
    last = times[np.searchsorted(times, ends) - 1]
    return years[(first - starts < step) & (ends - last <= step)]


def _has_split_dates(config: DataConfig, split: str, times: Times, calendar: Calendar) -> bool:
    try:
        split_slice(config, split, times, calendar)
    except UserError:
        return False
    return True


def time_spacing(times: Times) -> np.timedelta64:
    """Return the most common distance of neighbouring times; zero for a single time."""
    if len(times) < 2:
        return np.timedelta64(0, "s")
    # Neither the smallest nor the mean: gaps and single extra times should not count.
    steps, counts = np.unique(np.diff(times), return_counts=True)
    common: np.timedelta64 = steps[np.argmax(counts)]
    return common


def indices_on_step(
    times: Times, step: np.timedelta64, origin: np.datetime64 = EPOCH
) -> NDArray[np.intp]:
    """Return the indices of times that are whole steps before or after `origin`.

    If there are none, return those of times that are whole steps after the first time.
    """
    # Counting from a fixed date selects the same hours of the day in stores with different first
    # times.
    none = np.timedelta64(0, "D")
    indices = np.flatnonzero((times - origin) % step == none)
    return indices if len(indices) else np.flatnonzero((times - times[0]) % step == none)


class SumWindows(NamedTuple):
    """The sums of a store that add up to the sum over a step.

    Attributes:
        indices: `(T, N)`, of the sums of each time, the earliest first. Rows with fewer than N
            sums begin with -1.
        complete: `(T,)`, whether they fill the step.
    """

    indices: NDArray[np.intp]
    complete: NDArray[np.bool_]


def sum_windows(bounds: Times, times: Times, step: np.timedelta64) -> SumWindows:
    """Find the sums that fill `(t - step, t]` for each time `t`, without gap or overlap.

    Args:
        bounds: `(S, 2)`, begin and end of the stored sums; NaT for sums that are absent.
        times: `(T,)`, the times `t`.
        step: the length of a window.
    """
    present = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    present = present[np.argsort(bounds[present, 1], kind="stable")]
    begins, ends = bounds[present].T
    columns: list[NDArray[np.intp]] = []
    # The end of what is still to be filled, which moves back sum by sum.
    edges = times.copy()
    while len(present) and (edges > times - step).any():
        position = np.minimum(np.searchsorted(ends, edges), len(ends) - 1)
        found = (edges > times - step) & (ends[position] == edges)
        if not found.any():
            break
        columns.append(np.where(found, present[position], -1))
        edges = np.where(found, begins[position], edges)
    indices = np.stack(columns[::-1], axis=1) if columns else np.full((len(times), 1), -1)
    return SumWindows(indices, edges == times - step)


def one_step_pairs(times: Times, step_hours: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices of times that have another one step later, and the indices of the later.

    No pair spans a gap: across a gap the times are further apart than one step.
    """
    later = times + np.timedelta64(step_hours, "h")
    index = np.searchsorted(times, later)
    # The first time that is not before `later`; it is the next date only if it is equal.
    has_next = index < len(times)
    has_next[has_next] = times[index[has_next]] == later[has_next]
    return np.flatnonzero(has_next), index[has_next]


def times_with_steps(times: Times, step_hours: int, before: int, after: int) -> Times:
    """Return the times that have `before` earlier and `after` later steps without a gap."""
    complete = np.ones(len(times), dtype=bool)
    for step in range(-before, after + 1):
        complete &= np.isin(times + step * np.timedelta64(step_hours, "h"), times)
    return times[complete]

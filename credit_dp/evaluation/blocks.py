"""Reads stored forecasts beside what they are compared with, each chunk of a store once.

The order: groups of variables that share chunks in the truth; for each group parts of the lead
times, if there is no room for all at once; then initial times, rising. The truth and the
climatology slide along with these: a chunk is read when its first field is needed, and a field is
held until the last initial time that needs it has passed.

In memory are, of one group and part, the forecasts that are read at once, and truth and climatology
from an initial time to the end of its forecasts: at most `MAX_BYTES`, or one lead time if that is
more. Fields that share chunks with these are held beside them, up to as many bytes again; a block
is a copy of some. What finds no room is read once more when its turn comes, as is the truth for
each part of the lead times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.limits import extremes
from credit_dp.data.sources.base import Times
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import AlignedForecast
from credit_dp.evaluation.forecast_store import reorder_columns
from credit_dp.evaluation.request import translate_error_keys

MAX_BYTES = 2**30
READ_PARTS = 16  # in which the fields that fill half of the room are read, or chunk by chunk
UNSTABLE_HINT = ", or a model that has become unstable"

Fields = NDArray[np.float32]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]
VariableGroup = Mapping[
    str, slice
]  # of each variable the indices of its channels, which lie together


@final
@dataclass(frozen=True)
class Block:
    """The forecasts of one variable from one initial time, at some lead times.

    Attributes:
        channels: indices of the variable's channels.
        leads: indices among the lead times that are scored.
        forecast: `(leads, M, C, H, W)`.
        truth, normal: truth and climatology at the times of the forecasts, `(leads, C, H, W)`.
        start: the truth at the initial time, `(1, C, H, W)`.
    """

    variable: str
    channels: slice
    leads: slice
    forecast: Fields
    truth: Fields
    climatology: Fields
    start: Fields


def read_blocks(matched: AlignedForecast, valid: Mask | None) -> Iterator[Block]:
    """Read all that is scored, once.

    Args:
        valid: where the truth has values, `(C, H, W)`; None: everywhere.

    Raises:
        UserError: something can't be read, or has no value where the truth has one.
    """
    for group in group_variables(matched.truth):
        for leads in split_leads(matched, group):
            yield from GroupReader(matched, valid, group, leads).read_blocks()


@final
class TimeWindow:
    """Fields at rising times; those of one chunk are read at once and held until they are dropped.

    Args:
        times: all that will be needed, rising.
        chunks: the number of the chunk that each time lies in.
        read: reads the fields at some times, `(T, C, H, W)`.
        most: times beyond which no field is held that is not needed at once.
    """

    def __init__(
        self, times: Times, chunks: Indices, read: Callable[[Times], Fields], most: int
    ) -> None:
        self._times, self._chunks, self._read, self._max_times = times, chunks, read, most
        self._cache: dict[int, Fields] = {}  # (C, H, W) by the index of the time
        self._first = 0  # what is before it has been dropped

    def load(self, times: Times) -> None:
        """Read what is not held of some times, and others in their chunks as far as is room."""
        absent = np.setdiff1d(np.searchsorted(self._times, times), list(self._cache))
        if not len(absent):
            return
        sharing = np.flatnonzero(np.isin(self._chunks, self._chunks[absent]))
        others = np.setdiff1d(sharing[sharing >= self._first], [*absent, *self._cache])
        room = max(self._max_times - len(self._cache) - len(absent), 0)
        wanted = np.union1d(absent, others[:room])
        for part in self._split_at_chunks(wanted):
            # Fields are views of what is read at once, which is freed when the last is dropped.
            self._cache |= zip(part.tolist(), self._read(self._times[part]), strict=True)

    def _split_at_chunks(self, wanted: Indices) -> Iterator[Indices]:
        """Split indices between chunks, into parts of few of the times that may be held."""
        edges = np.flatnonzero(np.diff(self._chunks[wanted])) + 1
        first = 0
        for stop, after in pairwise([*edges.tolist(), len(wanted)]):
            if (after - first) * READ_PARTS > self._max_times:
                yield wanted[first:stop]
                first = stop
        yield wanted[first:]

    def select(self, times: Times, channels: slice) -> Fields:
        """Return some channels at some of the times that have been loaded: `(T, C, H, W)`."""
        indices = np.searchsorted(self._times, times).tolist()
        return np.stack([self._cache[index][channels] for index in indices])

    def drop_before(self, time: np.datetime64) -> None:
        """Let go of the fields before a time."""
        self._first = int(np.searchsorted(self._times, time))
        self._cache = {index: field for index, field in self._cache.items() if index >= self._first}


@final
class GroupReader:
    """Reads the blocks of a group of variables at some lead times.

    Args:
        leads: indices among the lead times that are scored.
    """

    def __init__(
        self, matched: AlignedForecast, valid: Mask | None, group: VariableGroup, leads: slice
    ) -> None:
        self._aligned, self._valid, self._group, self._leads = matched, valid, group, leads
        self._channels = group_slice(group)
        self._rows = slice(0, matched.truth.grid[0])
        self._initial_times = matched.forecast.initial_times[matched.initial_indices]
        self._lead_times = matched.forecast.leads[matched.leads[leads]]
        times = np.unique(self._initial_times[:, None] + self._lead_times)
        chunks = matched.climatology.chunk_numbers(times)
        self._climatology = TimeWindow(times, chunks, self._read_climatology, self._max_times)
        # The end of a forecast may be far from where it starts: then each has a window of its own.
        together = len(self._lead_times) == len(matched.leads)
        self._truth = self._truth_window(
            np.union1d(times, self._initial_times) if together else times
        )
        self._initial_truth = self._truth if together else self._truth_window(self._initial_times)

    def read_blocks(self) -> Iterator[Block]:
        """Return initial times one after the other; of each, the variables of the group."""
        for run in self._initial_time_batches():
            self._drop_before(self._initial_times[run[0]])
            # Before the forecasts, of which what the truth lacks would be said otherwise.
            self._load(self._initial_times[run])
            for name, channels in self._group.items():
                yield from self._blocks_of(name, channels, run)

    def _blocks_of(self, name: str, channels: slice, run: Indices) -> Iterator[Block]:
        """Return the blocks of one variable, whose forecasts are let go of with the last."""
        within = self._slice_in_group(channels)
        forecasts = self._read_forecasts(name, channels, run)
        for forecast, start in zip(forecasts, self._initial_times[run], strict=True):
            times = start + self._lead_times
            yield Block(
                variable=name,
                channels=channels,
                leads=self._leads,
                forecast=forecast,
                truth=self._truth.select(times, within),
                climatology=self._climatology.select(times, within),
                start=self._initial_truth.select(start[None], within),
            )

    @property
    def _max_times(self) -> int:
        """Fields of the group, one for each time, that fill half of the room."""
        height, width = self._aligned.truth.grid
        count: int = self._channels.stop - self._channels.start
        return MAX_BYTES // (2 * 4 * count * height * width)

    def _initial_time_batches(self) -> list[Indices]:
        """Return indices of initial times: those whose forecasts share chunks are read at once."""
        initials, forecast = self._aligned.initial_indices, self._aligned.forecast
        length = max(forecast.initial_times_per_chunk(name) for name in self._group)
        most = max(1, MAX_BYTES // (4 * forecast_bytes(self._aligned, self._group, self._leads)))
        edges = np.flatnonzero(np.diff(initials // length)) + 1
        return [
            np.arange(first, min(first + most, stop))
            for start, stop in pairwise([0, *edges.tolist(), len(initials)])
            for first in range(start, stop, most)
        ]

    def _drop_before(self, start: np.datetime64) -> None:
        """Let go of what no forecast from this initial time or a later one needs."""
        self._climatology.drop_before(start + self._lead_times[0])
        self._initial_truth.drop_before(start)
        if self._truth is not self._initial_truth:
            self._truth.drop_before(start + self._lead_times[0])

    def _load(self, starts: Times) -> None:
        """Read what the forecasts from some initial times are compared with."""
        times = np.unique(starts[:, None] + self._lead_times)
        if self._truth is self._initial_truth:
            self._truth.load(np.union1d(times, starts))
        else:
            self._truth.load(times)
            self._initial_truth.load(starts)
        self._climatology.load(times)

    def _truth_window(self, times: Times) -> TimeWindow:
        """Return the truth at these times."""
        truth = self._aligned.truth
        chunks = truth.chunk_numbers(truth.channels.output_channels[self._channels.start], times)
        return TimeWindow(times, chunks, self._read_truth, self._max_times)

    def _read_truth(self, times: Times) -> Fields:
        truth = self._aligned.truth
        with translate_error_keys("truth"):
            return truth.read_channels(
                truth.channels.output_channels[self._channels], times, self._rows
            )

    def _read_climatology(self, times: Times) -> Fields:
        """Read the climatology, which needs values wherever the truth has them."""
        with translate_error_keys("climatology"):
            fields = self._aligned.climatology.fields(times, self._channels, self._rows)
        if self._within_limits(fields, self._channels):
            return fields
        for name, channels in self._group.items():
            absent = self._count_missing(fields[:, self._slice_in_group(channels)], channels)
            if absent.any():
                first = int((absent > 0).argmax())
                what = f"{name} for {times[first].astype('M8[m]')}"
                raise missing_values_error(
                    self._aligned.climatology_description, what, absent[first]
                )
        dates = [str(time.astype("M8[m]")) for time in times]
        with translate_error_keys("climatology"):
            self._refuse_out_of_range(
                fields, self._channels, self._aligned.climatology_description, dates, forecast=False
            )
        return fields

    def _read_forecasts(self, name: str, channels: slice, run: Indices) -> Fields:
        """Read those of a variable, `(I, leads, M, C, H, W)`, which need values likewise."""
        matched, forecast = self._aligned, self._aligned.forecast
        levels = [channel.level for channel in matched.truth.channels.output_channels[channels]]
        present = tuple(level for level in levels if level is not None)
        inits, leads = matched.initial_indices[run], matched.leads[self._leads]
        fields = reorder_columns(forecast.read(name, present, inits, leads), matched.columns)
        one_by_one = fields.reshape(-1, *fields.shape[3:])
        if self._within_limits(one_by_one, channels):
            return fields
        absent = self._count_missing(fields, channels).sum(axis=-1)
        if absent.any():
            init, lead = np.unravel_index(int((absent > 0).argmax()), absent.shape)
            what = f"{name} {forecast.describe(inits[init], leads[lead])}"
            raise missing_values_error(forecast.where, what, absent[init, lead])
        dates = [
            f"{(forecast.initial_times[init] + forecast.leads[lead]).astype('M8[m]')} "
            f"({forecast.describe(init, lead)})"
            for init in inits
            for lead in leads
            for _ in range(forecast.members)
        ]
        with translate_error_keys("forecast"):
            self._refuse_out_of_range(one_by_one, channels, forecast.where, dates, forecast=True)
        return fields

    def _within_limits(self, fields: Fields, channels: slice) -> bool:
        """Whether all values of `(T, C, H, W)` exist and are in the range of the channel."""
        truth = self._aligned.truth
        found = truth.limits.in_range(truth.channels.output_channels[channels], *extremes(fields))
        return bool(found.all())

    def _refuse_out_of_range(
        self, fields: Fields, channels: slice, where: str, dates: Sequence[str], forecast: bool
    ) -> None:
        """Refuse values of `(T, C, H, W)` that are out of range where the truth has values.

        Args:
            where, dates: what has them, and when.
            forecast: see `ValueLimits.implausible`; a poor forecast is scored.

        Raises:
            UserError: names the value that is farthest away.
        """
        if self._valid is not None:
            fields = np.where(self._valid[channels], fields, np.float32(np.nan))
        limits, other = self._aligned.truth.limits, UNSTABLE_HINT if forecast else ""
        for place, channel in enumerate(self._aligned.truth.channels.output_channels[channels]):
            for date, field in zip(dates, fields[:, place], strict=True):
                at = limits.farthest_outlier(channel, field)
                if at is None or (forecast and not limits.is_implausible(channel, field)):
                    continue
                when = f"{date}, row {at[0]}, column {at[1]}"
                raise UserError(
                    f"{where}: {limits.out_of_range_message(channel, field, at, when, other)}"
                )

    def _slice_in_group(self, channels: slice) -> slice:
        """Return the indices of a variable's channels among those of the group."""
        first = self._channels.start
        return slice(channels.start - first, channels.stop - first)

    def _count_missing(self, fields: Fields, channels: slice) -> Indices:
        """Count the points without values where the truth has them: `(..., C, H, W)` -> `(...)`."""
        absent = ~np.isfinite(fields)
        if self._valid is not None:
            absent &= self._valid[channels]
        return np.asarray(np.count_nonzero(absent, axis=(-3, -2, -1)))


def missing_values_error(where: str, what: str, points: int) -> UserError:
    """Return the error of a field that lacks values."""
    return UserError(
        f"{where}: {what} has NaN or infinite values on {points} points where the truth has "
        "values. Leave it out with variables=, dates= or hours=, or complete it."
    )


def variable_slices(channels: Sequence[Channel]) -> dict[str, slice]:
    """Return the indices of each variable's channels, which lie together."""
    found, first = {}, 0
    for name, of_name in groupby(channels, lambda channel: channel.variable):
        count = len(list(of_name))
        found[name] = slice(first, first + count)
        first += count
    return found


def group_slice(group: VariableGroup) -> slice:
    """Return the indices of all channels of a group."""
    slices = list(group.values())
    return slice(slices[0].start, slices[-1].stop)


def group_variables(truth: Store) -> list[dict[str, slice]]:
    """Return the variables, those together that share chunks of the truth."""
    channels, source = truth.channels.output_channels, truth.source
    numbers = {
        channel: number
        for number, together in enumerate(source.group_by_chunk(channels))
        for channel in together
    }
    found: list[dict[str, slice]] = []
    for name, indices in variable_slices(channels).items():
        first, before = channels[indices.start], channels[indices.start - 1]
        shares = source.chunk_shape(first)[1] > 1 and numbers[first] == numbers[before]
        if found and shares:
            found[-1][name] = indices
        else:
            found.append({name: indices})
    return found


def split_leads(matched: AlignedForecast, group: VariableGroup) -> list[slice]:
    """Return the lead times in as few parts as there is room for, as indices."""
    count = len(matched.leads)
    for number in range(1, count + 1):
        edges = np.linspace(0, count, number + 1).astype(int).tolist()
        parts = [slice(first, stop) for first, stop in pairwise(edges)]
        if max(required_bytes(matched, group, part) for part in parts) <= MAX_BYTES:
            break
    return parts


def required_bytes(matched: AlignedForecast, group: VariableGroup, leads: slice) -> int:
    """Return the bytes of the fields that are needed at once at some of the lead times."""
    starts = matched.forecast.initial_times[matched.initial_indices]
    spans = matched.forecast.leads[matched.leads[leads]]
    times, first = np.unique(starts[:, None] + spans), starts + spans[0]
    if len(spans) == len(matched.leads):
        times, first = np.union1d(times, starts), starts
    stop = np.searchsorted(times, starts + spans[-1], side="right")
    most = int((stop - np.searchsorted(times, first)).max())
    channels: int = group_slice(group).stop - group_slice(group).start
    height, width = matched.truth.grid
    # Truth and climatology, float32.
    return 2 * 4 * most * channels * height * width + forecast_bytes(matched, group, leads)


def forecast_bytes(matched: AlignedForecast, group: VariableGroup, leads: slice) -> int:
    """Return the bytes of the forecasts from one initial time, of the largest variable."""
    channels: int = max(indices.stop - indices.start for indices in group.values())
    count: int = leads.stop - leads.start
    height, width = matched.truth.grid
    return 4 * count * matched.forecast.members * channels * height * width

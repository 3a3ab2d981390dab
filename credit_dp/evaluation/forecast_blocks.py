"""Read forecasts together with truth and climatology, so that each chunk is read only once.

The order of reading: groups of variables that share chunks in the truth; within a group, parts of
the lead times, if all of them do not fit into memory; within a part, initial times, rising. Truth
and climatology are sliding windows: a chunk is read when its first field is needed, and a field is
dropped after the last initial time that needs it.

Memory holds, for one group and part, one batch of forecasts, and the truth and climatology from an
initial time to the end of its forecasts: at most `MAX_BYTES`, or one lead time if that is more.
Other fields of the same chunks are kept as well, in up to as many bytes again; a `Block` copies
the fields it has. A field that does not fit is read a second time when it is needed, and the truth
is read once for each part of the lead times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray
from credit_dp.data.limits import extremes
from credit_dp.data.store import Store
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.alignment import AlignedForecast, translate_error_keys
from credit_dp.evaluation.forecast_store import reorder_columns

MAX_BYTES = 2**30
READ_PARTS = 16  # a window that fills half of `MAX_BYTES` is read in at least this many parts
UNSTABLE_HINT = ", or a model that has become unstable"

Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]
# For each variable, the indices of its channels, which are adjacent.
VariableGroup = Mapping[str, slice]


@final
@dataclass(frozen=True)
class Block:
    """The forecasts of one variable from one initial time, at some lead times.

    Attributes:
        leads: indices into the scored lead times.
        forecast: `(leads, M, C, H, W)`.
        truth, climatology: at the valid times of the forecasts, `(leads, C, H, W)`.
        start: the truth at the initial time, `(1, C, H, W)`.
    """

    variable: str
    initial_time: np.datetime64
    channels: slice
    leads: slice
    forecast: FieldArray
    truth: FieldArray
    climatology: FieldArray
    start: FieldArray


def read_blocks(aligned: AlignedForecast, valid: Mask | None) -> Iterator[Block]:
    """Yield every scored field once, with the truth and climatology of the same time.

    Args:
        valid: true where the truth has values, `(C, H, W)`; None: everywhere.

    Raises:
        UserError: a field can't be read, or has no value where the truth has one.
    """
    for group in group_variables(aligned.truth):
        for leads in split_leads(aligned, group):
            yield from GroupReader(aligned, valid, group, leads).read_blocks()


@final
class LeadReader:
    """Reads the blocks of one lead time after another, of forecasts that are not all there yet.

    The truth at the initial time is kept until that of another one is needed.
    """

    def __init__(self, aligned: AlignedForecast, valid: Mask | None) -> None:
        self._aligned = aligned
        self._valid = valid
        self._groups = group_variables(aligned.truth)
        self._start: int | None = None
        self._initial_truth: list[TimeWindow | None] = []

    def read_blocks(self, time: int, lead: int) -> Iterator[Block]:
        """Yield the blocks of scored times, by their numbers, with all variables."""
        if time != self._start:
            self._start, self._initial_truth = time, [None] * len(self._groups)
        aligned = self._aligned
        one = replace(
            aligned,
            initial_indices=aligned.initial_indices[time : time + 1],
            lead_indices=aligned.lead_indices[lead : lead + 1],
        )
        for number, group in enumerate(self._groups):
            start = self._initial_truth[number]
            reader = GroupReader(one, self._valid, group, slice(0, 1), start)
            self._initial_truth[number] = reader.initial_truth
            for block in reader.read_blocks():
                yield replace(block, leads=slice(lead, lead + 1))


@final
class TimeWindow:
    """A sliding window of fields: reads whole chunks and keeps fields until they are dropped.

    Args:
        chunks: the number of the chunk that each time is in.
        read: reads the fields at several times, `(T, C, H, W)`.
        max_times: how many fields to keep at most; more only while they are needed at once.
    """

    def __init__(
        self, times: Times, chunks: Indices, read: Callable[[Times], FieldArray], max_times: int
    ) -> None:
        self._times = times
        self._chunks = chunks
        self._read = read
        self._max_times = max_times
        self._cache: dict[int, FieldArray] = {}  # (C, H, W) by the index of the time
        self._first = 0  # index of the first time that has not been dropped

    def load(self, times: Times) -> None:
        """Read the times that are not in the window, and others of their chunks if they fit."""
        missing = np.setdiff1d(np.searchsorted(self._times, times), list(self._cache))
        if not len(missing):
            return
        # The rest of a chunk is decompressed anyway: what fits is kept for later initial times.
        sharing = np.flatnonzero(np.isin(self._chunks, self._chunks[missing]))
        others = np.setdiff1d(sharing[sharing >= self._first], [*missing, *self._cache])
        room = max(self._max_times - len(self._cache) - len(missing), 0)
        indices = np.union1d(missing, others[:room])
        for part in self._split_at_chunks(indices):
            # Fields are views of the array read at once, which is freed with the last of them.
            # Small parts keep one late field from holding the memory of many.
            self._cache |= zip(part.tolist(), self._read(self._times[part]), strict=True)

    def _split_at_chunks(self, indices: Indices) -> Iterator[Indices]:
        """Split indices at chunk boundaries, into parts of about 1 / `READ_PARTS` of the window."""
        edges = np.flatnonzero(np.diff(self._chunks[indices])) + 1
        first = 0
        for stop, after in pairwise([*edges.tolist(), len(indices)]):
            if (after - first) * READ_PARTS > self._max_times:
                yield indices[first:stop]
                first = stop
        yield indices[first:]

    def select(self, times: Times, channels: slice) -> FieldArray:
        """Return channels at times that have been loaded, as a copy: `(T, C, H, W)`."""
        indices = np.searchsorted(self._times, times).tolist()
        return np.stack([self._cache[index][channels] for index in indices])

    def drop_before(self, time: np.datetime64) -> None:
        """Forget the fields before a time."""
        self._first = int(np.searchsorted(self._times, time))
        self._cache = {index: field for index, field in self._cache.items() if index >= self._first}


@final
class GroupReader:
    """Reads the blocks of a group of variables at one part of the lead times.

    Args:
        initial_truth: has the truth at the initial times; None: it is read.
    """

    def __init__(
        self,
        aligned: AlignedForecast,
        valid: Mask | None,
        group: VariableGroup,
        leads: slice,
        initial_truth: TimeWindow | None = None,
    ) -> None:
        self._aligned = aligned
        self._valid = valid
        self._group = group
        self._leads = leads
        self._channels = group_slice(group)
        self._rows = slice(0, aligned.truth.grid[0])
        self._initial_times = aligned.forecast.initial_times[aligned.initial_indices]
        self._lead_times = aligned.forecast.lead_times[aligned.lead_indices[leads]]
        times = np.unique(self._initial_times[:, None] + self._lead_times)
        chunks = aligned.climatology.chunk_numbers(times)
        self._climatology = TimeWindow(times, chunks, self._read_climatology, self._max_times)
        # With all lead times, initial and valid times overlap and one window serves both. A part
        # of late lead times is far from its initial times: one window would hold all between.
        if initial_truth is not None:
            self._truth = self._truth_window(times)
            self.initial_truth = initial_truth
        elif len(self._lead_times) == len(aligned.lead_indices):
            self._truth = self._truth_window(np.union1d(times, self._initial_times))
            self.initial_truth = self._truth
        else:
            self._truth = self._truth_window(times)
            self.initial_truth = self._truth_window(self._initial_times)

    def read_blocks(self) -> Iterator[Block]:
        """Yield the blocks batch by batch of initial times, then variable by variable."""
        for batch in self._initial_time_batches():
            self._drop_before(self._initial_times[batch[0]])
            # Truth before forecasts: a gap in the truth is then reported as one of the truth.
            self._load(self._initial_times[batch])
            for name, channels in self._group.items():
                yield from self._blocks_of(name, channels, batch)

    def _blocks_of(self, name: str, channels: slice, batch: Indices) -> Iterator[Block]:
        """Yield the blocks of one variable; its forecasts are freed after the last."""
        within = self._slice_in_group(channels)
        forecasts = self._read_forecasts(name, channels, batch)
        for forecast, start in zip(forecasts, self._initial_times[batch], strict=True):
            times = start + self._lead_times
            yield Block(
                variable=name,
                initial_time=start,
                channels=channels,
                leads=self._leads,
                forecast=forecast,
                truth=self._truth.select(times, within),
                climatology=self._climatology.select(times, within),
                start=self.initial_truth.select(start[None], within),
            )

    @property
    def _max_times(self) -> int:
        height, width = self._aligned.truth.grid
        count: int = self._channels.stop - self._channels.start
        return MAX_BYTES // (2 * 4 * count * height * width)

    def _initial_time_batches(self) -> list[Indices]:
        initials = self._aligned.initial_indices
        forecast = self._aligned.forecast
        length = max(forecast.initial_times_per_chunk(name) for name in self._group)
        size = max(1, MAX_BYTES // (4 * forecast_bytes(self._aligned, self._group, self._leads)))
        # A chunk with several initial times is read at once, as far as it fits into memory.
        edges = np.flatnonzero(np.diff(initials // length)) + 1
        return [
            np.arange(first, min(first + size, stop))
            for start, stop in pairwise([0, *edges.tolist(), len(initials)])
            for first in range(start, stop, size)
        ]

    def _drop_before(self, start: np.datetime64) -> None:
        # Climatology is needed from the first valid time on, the truth from the initial time on.
        self._climatology.drop_before(start + self._lead_times[0])
        self.initial_truth.drop_before(start)
        if self._truth is not self.initial_truth:
            self._truth.drop_before(start + self._lead_times[0])

    def _load(self, starts: Times) -> None:
        times = np.unique(starts[:, None] + self._lead_times)
        if self._truth is self.initial_truth:
            self._truth.load(np.union1d(times, starts))
        else:
            self._truth.load(times)
            self.initial_truth.load(starts)
        self._climatology.load(times)

    def _truth_window(self, times: Times) -> TimeWindow:
        truth = self._aligned.truth
        chunks = truth.chunk_numbers(truth.channels.output_channels[self._channels.start], times)
        return TimeWindow(times, chunks, self._read_truth, self._max_times)

    def _read_truth(self, times: Times) -> FieldArray:
        truth = self._aligned.truth
        with translate_error_keys("truth"):
            fields = truth.read_channels(
                truth.channels.output_channels[self._channels], times, self._rows
            )
            # The store compares values with limits, but small fill values are within those of
            # unknown variables.
            if not self._within_limits(fields, self._channels):
                dates = [truth.calendar.text(time) for time in times]
                self._refuse_out_of_range(
                    fields, self._channels, truth.source.where, dates, forecast=False
                )
        return fields

    def _read_climatology(self, times: Times) -> FieldArray:
        """Read the climatology and check it."""
        with translate_error_keys("climatology"):
            fields = self._aligned.climatology.fields(times, self._channels, self._rows)
        if self._within_limits(fields, self._channels):
            return fields
        for name, channels in self._group.items():
            missing = self._count_missing(fields[:, self._slice_in_group(channels)], channels)
            if missing.any():
                first = int((missing > 0).argmax())
                what = f"{name} for {self._aligned.truth.calendar.text(times[first])}"
                raise missing_values_error(
                    self._aligned.climatology_description, what, missing[first]
                )
        dates = [self._aligned.truth.calendar.text(time) for time in times]
        with translate_error_keys("climatology"):
            self._refuse_out_of_range(
                fields, self._channels, self._aligned.climatology_description, dates, forecast=False
            )
        return fields

    def _read_forecasts(self, name: str, channels: slice, batch: Indices) -> FieldArray:
        """Read the forecasts of a variable, `(I, leads, M, C, H, W)`, and check them."""
        aligned = self._aligned
        forecast = aligned.forecast
        levels = [channel.level for channel in aligned.truth.channels.output_channels[channels]]
        present = tuple(level for level in levels if level is not None)
        inits = aligned.initial_indices[batch]
        leads = aligned.lead_indices[self._leads]
        fields = reorder_columns(forecast.read(name, present, inits, leads), aligned.columns)
        # The check of all extremes is cheap; the others only look for the culprit.
        flat = fields.reshape(-1, *fields.shape[3:])
        if self._within_limits(flat, channels):
            return fields
        missing = self._count_missing(fields, channels).sum(axis=-1)
        if missing.any():
            init, lead = np.unravel_index(int((missing > 0).argmax()), missing.shape)
            what = f"{name} {forecast.describe(inits[init], leads[lead])}"
            raise missing_values_error(forecast.where, what, missing[init, lead])
        dates = [
            f"{forecast.calendar.text(forecast.initial_times[init] + forecast.lead_times[lead])} "
            f"({forecast.describe(init, lead)})"
            for init in inits
            for lead in leads
            for _ in range(forecast.members)
        ]
        with translate_error_keys("forecast"):
            self._refuse_out_of_range(flat, channels, forecast.where, dates, forecast=True)
        return fields

    def _within_limits(self, fields: FieldArray, channels: slice) -> bool:
        truth = self._aligned.truth
        limits, scored = truth.limits, truth.channels.output_channels[channels]
        lowest, highest = extremes(fields)
        return bool(limits.in_range(scored, lowest, highest).all()) and not any(
            limits.is_undeclared_fill(channel, lowest[:, index], highest[:, index])
            for index, channel in enumerate(scored)
        )

    def _refuse_out_of_range(
        self, fields: FieldArray, channels: slice, where: str, dates: Sequence[str], forecast: bool
    ) -> None:
        """Refuse values of `(T, C, H, W)` that are out of range where the truth has values.

        Args:
            forecast: refuse only implausible fields; a merely poor forecast is scored.
        """
        if self._valid is not None:
            # Points that are not scored may have any value, such as a fill value.
            fields = np.where(self._valid[channels], fields, np.float32(np.nan))
        limits = self._aligned.truth.limits
        hint = UNSTABLE_HINT if forecast else ""
        for index, channel in enumerate(self._aligned.truth.channels.output_channels[channels]):
            for date, field in zip(dates, fields[:, index], strict=True):
                for value in (np.fmin.reduce(field, axis=None), np.fmax.reduce(field, axis=None)):
                    if limits.is_undeclared_fill(channel, value):
                        raise UserError(
                            f"{where}: {channel.name} is {value:.6g} at {date}, which looks like a "
                            "fill value that no attribute of the store declares. Declare it, as "
                            "by _FillValue, leave it out of variables, or if the values are "
                            f"right, give 'limits={{{channel.variable}:[LOW,HIGH]}}'."
                        )
                at = limits.farthest_outlier(channel, field)
                if at is None or (forecast and not limits.is_implausible(channel, field)):
                    continue
                when = f"{date}, row {at[0]}, column {at[1]}"
                raise UserError(
                    f"{where}: {limits.out_of_range_message(channel, field, at, when, hint)}"
                )

    def _slice_in_group(self, channels: slice) -> slice:
        first = self._channels.start
        return slice(channels.start - first, channels.stop - first)

    def _count_missing(self, fields: FieldArray, channels: slice) -> Indices:
        missing = ~np.isfinite(fields)
        if self._valid is not None:
            missing &= self._valid[channels]
        return np.asarray(np.count_nonzero(missing, axis=(-3, -2, -1)))


def missing_values_error(where: str, what: str, points: int) -> UserError:
    """Return the error for a field with missing values."""
    return UserError(
        f"{where}: {what} has NaN or infinite values on {counted(points, 'point')} where the "
        "truth has values. Complete it, or leave it out with variables=, dates= or hours=."
    )


def variable_slices(channels: Sequence[Channel]) -> dict[str, slice]:
    """Return the indices of each variable's channels, which are adjacent."""
    slices = {}
    first = 0
    for name, levels in groupby(channels, lambda channel: channel.variable):
        count = len(list(levels))
        slices[name] = slice(first, first + count)
        first += count
    return slices


def group_slice(group: VariableGroup) -> slice:
    """Return the indices of all channels of a group."""
    slices = list(group.values())
    return slice(slices[0].start, slices[-1].stop)


def group_variables(truth: Store) -> list[dict[str, slice]]:
    """Return the variables in groups that share chunks of the truth."""
    channels = truth.channels.output_channels
    source = truth.source
    numbers = {
        channel: number
        for number, sharing in enumerate(source.group_by_chunk(channels))
        for channel in sharing
    }
    groups: list[dict[str, slice]] = []
    for name, indices in variable_slices(channels).items():
        first = channels[indices.start]
        before = channels[indices.start - 1]
        # Groups are slices of channels, so that only neighbours can share one.
        shares = source.chunk_shape(first)[1] > 1 and numbers[first] == numbers[before]
        if groups and shares:
            groups[-1][name] = indices
        else:
            groups.append({name: indices})
    return groups


def split_leads(aligned: AlignedForecast, group: VariableGroup) -> list[slice]:
    """Return slices of the lead times: as few equal parts as `MAX_BYTES` allows."""
    # Every part reads the truth again: as few as possible, at worst one lead time each.
    count = len(aligned.lead_indices)
    for number in range(1, count + 1):
        edges = np.linspace(0, count, number + 1).astype(int).tolist()
        parts = [slice(first, stop) for first, stop in pairwise(edges)]
        if max(required_bytes(aligned, group, part) for part in parts) <= MAX_BYTES:
            break
    return parts


def required_bytes(aligned: AlignedForecast, group: VariableGroup, leads: slice) -> int:
    """Return the bytes of the fields that are needed at once for one part of the lead times."""
    starts = aligned.forecast.initial_times[aligned.initial_indices]
    lead_times = aligned.forecast.lead_times[aligned.lead_indices[leads]]
    times = np.unique(starts[:, None] + lead_times)
    first = starts + lead_times[0]
    if len(lead_times) == len(aligned.lead_indices):
        # One window of the truth holds the initial times, too: see `GroupReader`.
        times = np.union1d(times, starts)
        first = starts
    # The window is widest at the initial time with the most times from its start to its end.
    stop = np.searchsorted(times, starts + lead_times[-1], side="right")
    max_times = int((stop - np.searchsorted(times, first)).max())
    channels: int = group_slice(group).stop - group_slice(group).start
    height, width = aligned.truth.grid
    # Truth and climatology, float32.
    return 2 * 4 * max_times * channels * height * width + forecast_bytes(aligned, group, leads)


def forecast_bytes(aligned: AlignedForecast, group: VariableGroup, leads: slice) -> int:
    """Return the bytes of one initial time's forecasts of the largest variable."""
    channels: int = max(indices.stop - indices.start for indices in group.values())
    count: int = leads.stop - leads.start
    height, width = aligned.forecast.stored_grid
    return 4 * count * aligned.forecast.members * channels * height * width

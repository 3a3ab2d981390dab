"""The fields of an open store, as a model takes them: selected, converted, checked, by rows.

`Store` reads states, outputs, forcings and statics, and checks that no value is missing or out of
range (`credit_dp.data.limits`). Its `StepReader` reads them on the config's step: it sums
accumulated variables over the step and converts units.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES, SPLITS
from credit_dp.data.boundary import check_boundary, given_share, rim_mask
from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import (
    EPOCH,
    SumWindows,
    TimesNeeded,
    resolve_dates,
    split_slice,
    sum_windows,
    time_spacing,
)
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import Degrees, FieldArray
from credit_dp.data.limits import (
    ValidMask,
    ValueLimits,
    check_limit_keys,
    extremes,
    find_missing,
    missing_value_error,
    no_value_error,
)
from credit_dp.data.selection import data_step_indices, select_channels, without_absent_statics
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.source import Source, as_slice, describe_sums, hours_of
from credit_dp.data.units import (
    check_units,
    converted_unit,
    is_accumulated,
    parse_conversion,
    usual_unit,
)
from credit_dp.data.winds import lies_along_grid
from credit_dp.errors import UserError, counted

logger = logging.getLogger(__name__)

Masks = Mapping[Channel, ValidMask]  # of the globe, (H, W)

BLOCK_BYTES = 8 * 2**20  # fields read at once in a pass; more would not fit the processor's cache


@final
class Store:
    """An open store: float32 fields with row 0 northernmost and columns in the store's order.

    Values are in the units that the config converts to. Variables with a `fill` are NaN exactly
    outside their mask, or, in a store without masks, wherever they are NaN in the files; all other
    variables have values everywhere.

    The first member of an ensemble is read; `member` gives a store of another one.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        config: of the data, without absent statics; its dates are complete after `resolve_dates`.
        stored_forcing: the forcing channels that are read; the others are computed.
        times: `(T,)` datetime64, on the config's step, rising, possibly with gaps.
        num_skipped: times left out because a sum over the step before them lacks a time.
        levels: of the variables on levels, in channel order.
        filled_channels: those that change in time and whose variables have a fill.
        masks: of the filled channels, as far as they are known; see `with_masks`.
        dates_note: a line on the dates that were chosen automatically; empty if none were.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        masks: Masks | None = None,
        origin: np.datetime64 = EPOCH,
    ) -> None:
        """Select the channels and times of the config; nothing is read.

        Args:
            source: the open files.
            config: of the data.
            masks: see `with_masks`.
            origin: a time from which steps are counted.
        """
        config = without_absent_statics(source, config)
        self.config = config
        self.dates_note = ""
        self.channels = select_channels(source, config)
        levels = (channel.level for channel in self.channels.output_channels)
        self.levels = list(dict.fromkeys(level for level in levels if level is not None))
        self.grid = source.grid
        check_boundary(config.boundary, config.relaxation, self.grid, source.where)
        self.stored_forcing = [
            Channel(name) for name in config.forcing if name not in COMPUTED_FORCINGS
        ]
        self._static = [Channel(name) for name in config.static if name not in COMPUTED_STATICS]
        timed = [*self.channels.output_channels, *self.stored_forcing]
        variables = dict.fromkeys(channel.variable for channel in [*timed, *self._static])
        if source.members and not any(source.variables[x].has_members for x in variables):
            # Each member would be the same.
            source = source.of_members(())
        self.source = source
        self._step_reader = StepReader(source, config, variables, origin)
        check_limit_keys(config, [*timed, *self._static])
        self.limits = ValueLimits(source, config)
        self.times: Times = self._step_reader.times
        self.num_skipped = self._step_reader.num_skipped
        self.filled_channels = tuple(channel for channel in timed if self._has_fill(channel))
        self.masks: Masks = masks or {}

    @classmethod
    def open(cls, config: DataConfig, needed: Mapping[str, TimesNeeded] | None = None) -> "Store":
        """Open `config.store` and check all that can be checked without reading fields.

        Args:
            needed: the times that automatic dates leave to each split; see `times_needed`.

        Raises:
            UserError: variables, dims, units, coordinates, levels or dates don't fit the config.
        """
        store = cls(open_source(config), config)
        check_units(store.source, store.config)
        store.resolve_dates(needed)
        times = {x: split_slice(store.config, x, store.times, store.calendar) for x in SPLITS}
        for split in ("valid", "test"):
            stop = min(times["train"].stop, times[split].stop)
            shared = stop - max(times["train"].start, times[split].start)
            if shared > 0:
                text = "data.dates: train has %s of %s, too: scores of %s are too good"
                logger.info(text, counted(shared, "time"), split, split)
        return store

    def with_masks(self, masks: Masks) -> "Store":
        """Return the same store with masks of the globe for channels that have a fill."""
        store = copy(self)
        store.masks = masks
        return store

    @property
    def latitude(self) -> Degrees:
        """Degrees, falling from row to row: `(H,)`, or `(H, W)` on a projection."""
        return self.grid.latitude

    @property
    def longitude(self) -> Degrees:
        """Degrees in the store's order: `(W,)`, or `(H, W)` on a projection."""
        return self.grid.longitude

    @property
    def num_members(self) -> int:
        """The number of members of an ensemble; 1 of a store without."""
        return max(1, len(self.source.members))

    def member(self, index: int) -> "Store":
        """Return the same store with one of its members."""
        if self.num_members == 1:
            return self
        store = copy(self)
        store.source = self.source.of_members([self.source.members[index]])
        store._step_reader = self._step_reader.of_source(store.source)
        store.limits = ValueLimits(store.source, self.config)
        return store

    def resolve_dates(self, needed: Mapping[str, TimesNeeded] | None = None) -> None:
        """Choose the dates that the config leaves to `auto`, and set them in `config`."""
        if self.config.dates.undetermined:
            dates, self.dates_note = resolve_dates(self.config, self.times, needed, self.calendar)
            self.config = replace(self.config, dates=dates)

    @property
    def calendar(self) -> Calendar:
        """The calendar of the times."""
        return self.source.calendar

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read since opening, without metadata and shard indices."""
        return self.source.bytes_read

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read since opening."""
        return self.source.chunk_reads

    def read_states(self, times: Times, rows: slice) -> FieldArray:
        """Read the prognostic channels at several times, `(T, C, rows, W)`.

        A chunk that holds several of the times is read once.

        Raises:
            UserError: a time is not in the store, or a value is missing or out of range.
        """
        return self._read(self.channels.prognostic, self.time_indices(times), rows)

    def read_outputs(self, times: Times, rows: slice) -> FieldArray:
        """Read the prognostic, then the diagnostic channels, `(T, outputs, rows, W)`."""
        return self._read(self.channels.output_channels, self.time_indices(times), rows)

    def read_channels(self, channels: Sequence[Channel], times: Times, rows: slice) -> FieldArray:
        """Read any channels that change in time, `(T, C, rows, W)`.

        A chunk that holds several of the channels or times is read once.
        """
        return self._read(channels, self.time_indices(times), rows)

    def chunk_numbers(self, channel: Channel, times: Times) -> NDArray[np.intp]:
        """Return the chunk number of each time, rising; times with one number are decoded at once.

        A sum over a step may also need part of the chunk before.
        """
        return self._step_reader.chunk_numbers(channel, self.time_indices(times))

    def read_forcing(self, times: Times, rows: slice) -> FieldArray:
        """Read or compute the forcing channels at several times, `(T, F, rows, W)`."""
        band = self._bounded_rows(rows)
        names = self.channels.forcing
        shape = (len(times), len(names), band.stop - band.start, self.grid[1])
        fields = np.empty(shape, dtype=np.float32)
        is_stored = np.array([name not in COMPUTED_FORCINGS for name in names], dtype=bool)
        if self.stored_forcing:
            fields[:, is_stored] = self._read(self.stored_forcing, self.time_indices(times), band)
        for index in np.flatnonzero(~is_stored):
            fields[:, index] = self.computed_forcing(names[index], times, band)
        return fields

    def read_static(self, rows: slice) -> FieldArray:
        """Read or compute the static channels, `(S, rows, W)`."""
        band = self._bounded_rows(rows)
        names = self.channels.static
        fields = np.empty((len(names), band.stop - band.start, self.grid[1]), dtype=np.float32)
        stored = self._read_static(band) if self._static else fields[:0]
        stored_index = {channel.variable: index for index, channel in enumerate(self._static)}
        for out_index, name in enumerate(names):
            if name in stored_index:
                fields[out_index] = stored[stored_index[name]]
            else:
                fields[out_index] = COMPUTED_STATICS[name](*self.grid.coordinates(band))
        return fields

    def check_static(self) -> None:
        """Refuse static fields that differ between members."""
        if not any(self.source.variables[x.variable].has_members for x in self._static):
            return
        fields = self.member(0).read_static(slice(None))
        for index in range(1, self.num_members):
            store = self.member(index)
            others = store.read_static(slice(None))
            for name, field, other in zip(self.channels.static, fields, others, strict=True):
                if not np.array_equal(field, other, equal_nan=True):
                    raise UserError(
                        f"{store.source.where}: {name} is not that of the other members, but a "
                        "static field is read once. Choose one member with data.member, or leave "
                        f"{name} out of data.static."
                    )

    def computed_forcing(self, name: str, times: Times, rows: slice) -> FieldArray:
        """Compute a forcing that is not read, `(T, rows, W)`."""
        instants = np.asarray(times, dtype=self.calendar.dtype)
        coordinates = self.grid.coordinates(self._bounded_rows(rows))
        return COMPUTED_FORCINGS[name](instants, *coordinates, self.calendar).astype(np.float32)

    def valid_mask(self, rows: slice) -> NDArray[np.bool_] | None:
        """Return where the output channels have values, `(outputs, rows, W)`; None if everywhere.

        Whether it is None depends on the config alone, so it is the same on all ranks. A store
        without the masks of these channels has no answer.
        """
        band = self._bounded_rows(rows)
        if not any(self._has_fill(channel) for channel in self.channels.output_channels):
            return None
        masks = np.ones(
            (self.channels.num_outputs, band.stop - band.start, self.grid[1]), dtype=bool
        )
        for index, channel in enumerate(self.channels.output_channels):
            if self._has_fill(channel):
                masks[index] = self.masks[channel][band]
        return masks

    def rim(self, rows: slice) -> NDArray[np.bool_] | None:
        """Return which points `data.boundary` makes a rim, `(rows, W)`; None without one."""
        if not self.config.boundary:
            return None
        return rim_mask(self.grid, self.config.boundary)[rows]

    def without_rim(self, fields: FieldArray, rows: slice) -> FieldArray:
        """Return `(..., rows, W)` with NaN on the rim; the same without one."""
        rim = self.rim(rows)
        return fields if rim is None else np.where(rim, np.float32(np.nan), fields)

    def given_share(self, rows: slice) -> NDArray[np.float64] | None:
        """Return the share of the given state at each point, `(rows, W)`; None without a rim."""
        if not self.config.boundary:
            return None
        return given_share(self.grid, self.config.boundary, self.config.relaxation)[rows]

    def scored_mask(self, rows: slice) -> NDArray[np.bool_] | None:
        """Return where the output channels count, `(outputs, rows, W)`; None if everywhere.

        That is where they have values, but not on the rim.
        """
        valid, rim = self.valid_mask(rows), self.rim(rows)
        if rim is None:
            return valid
        masks = np.broadcast_to(~rim, (self.channels.num_outputs, *rim.shape))
        return masks.copy() if valid is None else masks & valid

    def blocks(
        self, channels: Sequence[Channel], span: slice, rows: slice, *, checked: bool = True
    ) -> Iterator[tuple[int, FieldArray]]:
        """Read all times of `span` in order, in blocks of bounded size.

        Blocks end at the edges of the store's chunks if they can. Without `checked`, values may be
        missing or out of range.

        Yields:
            The index of the first time of a block and its fields, `(T, C, rows, W)`.
        """
        band = self._bounded_rows(rows)
        time_bytes = 4 * len(channels) * (band.stop - band.start) * self.grid[1]
        num_times = max(1, BLOCK_BYTES // max(1, time_bytes))
        for indices in self._step_reader.blocks(channels, span, num_times):
            read = self._read if checked else self._step_reader.read
            yield int(indices[0]), read(channels, indices, band)

    def units(self, variable: str) -> str:
        """Return the unit of a variable after the config's conversion.

        Without a conversion it is the store's text, empty if there is none. Computed variables are
        dimensionless, "1".
        """
        if variable in COMPUTED_FORCINGS or variable in COMPUTED_STATICS:
            return "1"
        return converted_unit(self.source, variable, self.config)

    def lies_along_grid(self, variable: str) -> bool | None:
        """Whether a variable is a wind along the axes of a projection; see `winds`."""
        return lies_along_grid(self.source.variables[variable].standard_name, self.grid)

    def shown_unit(self, variable: str) -> str:
        """Return the unit for tables and files: a variable without one has its usual unit."""
        return self.units(variable).strip() or usual_unit(variable)

    def description(self, variables: list[str]) -> list[object]:
        """Return what a cached result depends on, for a fingerprint.

        This is the source, the levels and the changes to values: conversion, fill with its masks,
        and sums.
        Normalisation is not one of them.
        """
        stored = [v for v in variables if v not in COMPUTED_FORCINGS and v not in COMPUTED_STATICS]
        described = [*self.source.description(stored), list(self.levels)]
        if not self.calendar.is_standard:
            described.append(self.calendar.name)
        for name in stored:
            config = self.config.variable_config(name)
            changes = (
                config.convert,
                config.fill is not None,
                self._step_reader.summed.get(name, 0),
            )
            if any(changes):
                masks = [mask for channel, mask in self.masks.items() if channel.variable == name]
                described.append([name, *changes, *map(mask_digest, masks)])
        return described

    def _read(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> FieldArray:
        """Read channels that change in time and check their values: `(T, C, rows, W)`."""
        band = self._bounded_rows(rows)
        fields = self._step_reader.read(channels, indices, band)
        # One pass over the values serves both checks: an extreme is NaN if a value is missing.
        in_range = self.limits.in_range(channels, *extremes(fields))
        plausible = set(np.flatnonzero(in_range.all(axis=0)).tolist())
        for channel_index, channel in enumerate(channels):
            mask = self.masks[channel][band] if channel in self.masks else None
            # A field may have values outside its mask, too.
            if channel_index in plausible and (mask is None or mask.all()):
                continue
            field = fields[:, channel_index]
            self._refuse_empty(channel, field, indices)
            first_missing = find_missing(field, mask, self._has_fill(channel))
            if first_missing is not None:
                time = self.times[indices[first_missing]]
                raise self._missing_value_error(channel, field[first_missing], time, mask)
            self._check_limits(channel, fields[:, channel_index], indices, band)
        return fields

    def _refuse_empty(self, channel: Channel, field: FieldArray, indices: NDArray[np.intp]) -> None:
        """Refuse a field `(T, rows, W)` that has no value at some time on the globe."""
        if field.shape[1:] != self.grid:  # other rows may have values
            return
        empty = np.flatnonzero(np.isnan(field).all(axis=(1, 2)))
        if len(empty):
            time = self.calendar.text(self.times[indices[empty[0]]])
            raise no_value_error(self.source.where, channel, self.role_of(channel), time)

    def role_of(self, channel: Channel) -> str:
        """Return the list of the data config that has a channel's variable."""
        return next(role for role in ROLES if channel.variable in getattr(self.config, role))

    def _check_limits(
        self, channel: Channel, field: FieldArray, indices: NDArray[np.intp] | None, band: slice
    ) -> None:
        """Refuse values of `(T, rows, W)` that are out of range.

        Args:
            indices: of its times; None for a static field.
        """

        def date_of(field_index: int) -> tuple[int, str]:
            if indices is None:
                return 0, ""
            index = int(indices[field_index])
            date = self.calendar.text(self.times[index])
            return self._step_reader.source_index(index), f"{date}, "

        self.limits.check(channel, field, date_of, band.start)

    def _read_static(self, band: slice) -> FieldArray:
        fields = self.source.read(self._static, slice(0, 1), band)
        self._step_reader.convert(self._static, fields)
        for index, channel in enumerate(self._static):
            field = fields[:, index]
            # With a fill, NaN in a static field means "no value" and is never missing.
            mask = ~np.isnan(field[0]) if self._has_fill(channel) else None
            if find_missing(field, mask) is not None:
                raise self._missing_value_error(channel, field[0], None, mask)
            self._check_limits(channel, field, None, band)
        static: FieldArray = fields[0]
        return static

    def _missing_value_error(
        self,
        channel: Channel,
        field: FieldArray,
        time: np.datetime64 | None,
        valid: ValidMask | None,
    ) -> UserError:
        role = self.role_of(channel)
        date = None if time is None else self.calendar.text(time)
        return missing_value_error(self.source.where, channel, role, field, date, valid)

    def _has_fill(self, channel: Channel) -> bool:
        return self.config.variable_config(channel.variable).fill is not None

    def _bounded_rows(self, rows: slice) -> slice:
        north, south, _ = rows.indices(self.grid[0])
        return slice(north, south)

    def time_indices(self, times: ArrayLike) -> NDArray[np.intp]:
        """Return the indices of times among `self.times`."""
        requested = np.asarray(times, dtype=self.calendar.dtype)
        # For a time after the last one, searchsorted returns an index beyond the end.
        indices = np.minimum(np.searchsorted(self.times, requested), len(self.times) - 1)
        absent = requested[self.times[indices] != requested]
        if len(absent):
            raise UserError(
                f"{self.source.where}: has no time {self.calendar.text(absent[0])} on step "
                f"{self.config.step}. Choose dates within the store: data.dates.train, .valid "
                "and .test."
            )
        return indices


@final
class StepReader:
    """Reads the fields of a source on the config's step.

    Attributes:
        times: `(T,)`, times of the source that are whole steps from the origin or, if there are
            none, after its first time; without times whose sum is incomplete.
        num_skipped: times left out because their sum is incomplete.
        summed: the variables that are summed over each step, and how many times a sum has at most.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        variables: Iterable[str],
        origin: np.datetime64 = EPOCH,
    ) -> None:
        """Find the times on the step, and the windows of variables that are summed.

        Accumulated variables are summed if their values are sums over less than the step. The
        windows are formed from all times of the source that the variable is read from, whichever
        times the other variables have.

        Args:
            source: gives the fields.
            config: gives step, conversions and the variables that are accumulated.
            variables: names of the variables to read.
            origin: a time from which steps are counted.
        """
        self._source = source
        names = list(variables)
        timed = [name for name in names if source.variables[name].has_time]
        accumulated = [name for name in timed if is_accumulated(name, config)]
        # A sum that ends at a time does not need to be stored under it.
        instants = [name for name in timed if name not in accumulated] or accumulated
        present = np.flatnonzero(source.has_all_times(instants))
        indices = present[data_step_indices(source.times[present], config, source.where, origin)]
        # The same times for all variables, so that a sample has either all of its fields or none.
        complete = np.ones(len(indices), dtype=bool)
        windows: dict[str, NDArray[np.intp]] = {}
        for name in accumulated:
            found = _find_sum_windows(source, config, name, indices)
            windows[name] = found.indices
            complete &= found.complete
        if not complete.any():
            raise UserError(
                f"{source.where}: no time has all of the {config.step} before it, which "
                f"{min(accumulated)} is summed over. Change data.step, or "
                f"set data.variables.{min(accumulated)}.accumulated to false."
            )
        self._indices = indices[complete]
        # Row t has the source's times that are summed for time t; variables may share windows.
        self._windows: list[NDArray[np.intp]] = []
        self._window_numbers: dict[str, int] = {}
        for name, window in windows.items():
            kept = window[complete]
            if np.array_equal(kept, self._indices[:, None]):
                continue
            equal = (n for n, other in enumerate(self._windows) if np.array_equal(other, kept))
            self._window_numbers[name] = next(equal, len(self._windows))
            if self._window_numbers[name] == len(self._windows):
                self._windows.append(kept)
        self.summed = {
            name: self._windows[number].shape[1] for name, number in self._window_numbers.items()
        }
        self.times: Times = source.times[self._indices]
        self.num_skipped = int(np.count_nonzero(~complete))
        conversions = {name: config.variable_config(name).convert for name in names}
        self._conversions = {
            name: parse_conversion(text) for name, text in conversions.items() if text
        }

    def of_source(self, source: Source) -> "StepReader":
        """Return the same reader of a source with the same times, such as another member."""
        reader = copy(self)
        reader._source = source
        return reader

    def read(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> FieldArray:
        """Read channels that change in time, `(T, C, rows, W)`, in the config's units.

        Channels with the same window take one read of the source.
        """
        groups: dict[int | None, list[int]] = {}
        for position, channel in enumerate(channels):
            number = self._window_numbers.get(channel.variable)
            groups.setdefault(number, []).append(position)
        parts = [
            self._read_window(number, [channels[position] for position in positions], indices, rows)
            for number, positions in groups.items()
        ]
        fields = parts[0]
        if len(parts) > 1:
            fields = np.empty((len(indices), len(channels), *fields.shape[2:]), dtype=np.float32)
            for positions, part in zip(groups.values(), parts, strict=True):
                fields[:, positions] = part
        self.convert(channels, fields)
        return fields

    def source_index(self, index: int) -> int:
        """Return the index among the source's times of `times[index]`."""
        return int(self._indices[index])

    def chunk_numbers(self, channel: Channel, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the source's chunk number of each index of `times`; see `Source`.

        For a summed channel it is the chunk of the last time of the sum.
        """
        return self._source.chunk_numbers(channel, self._last_times(channel)[indices])

    def blocks(
        self, channels: Sequence[Channel], span: slice, count: int
    ) -> list[NDArray[np.intp]]:
        """Split the indices of `span` into blocks of about `count`, at chunk edges if possible.

        Blocks of summed channels are shorter, as all the times of their sums are in memory.
        """
        indices = np.arange(span.start, span.stop)
        longest = max((self.summed.get(channel.variable, 1) for channel in channels), default=1)
        count = max(1, count // longest)
        # Divide the variable's times into blocks of whole chunks: then each chunk is decoded once.
        first = channels[0]
        places = np.cumsum(self._source.has_times(first.variable)) - 1
        positions = places[self._last_times(first)]
        stride = int(np.diff(positions).min()) if len(positions) > 1 else 1
        chunk = self._source.times_per_file(first)
        block_length = -(-count * stride // chunk) * chunk
        block_numbers = positions[indices] // block_length
        return np.split(indices, np.flatnonzero(np.diff(block_numbers)) + 1)

    def convert(self, channels: Sequence[Channel], fields: FieldArray) -> None:
        """Convert the units of `(T, C, rows, W)` in place, where the config sets a conversion."""
        if not self._conversions:
            return
        for index, channel in enumerate(channels):
            if channel.variable in self._conversions:
                scale, offset = self._conversions[channel.variable]
                field = fields[:, index]
                field *= np.float32(scale)
                field += np.float32(offset)

    def _last_times(self, channel: Channel) -> NDArray[np.intp]:
        """Return the index among the source's times of the last that is read for each time."""
        number = self._window_numbers.get(channel.variable)
        return self._indices if number is None else self._windows[number][:, -1]

    def _read_window(
        self,
        number: int | None,
        channels: Sequence[Channel],
        indices: NDArray[np.intp],
        rows: slice,
    ) -> FieldArray:
        if number is None:
            return self._source.read(channels, as_slice(self._indices[indices]), rows)
        windows = self._windows[number][indices]
        is_summed = windows >= 0
        # Windows may share times; read each once.
        unique_indices, inverse = np.unique(windows[is_summed], return_inverse=True)
        fields = self._source.read(channels, as_slice(unique_indices), rows)
        positions = np.zeros_like(windows)
        positions[is_summed] = inverse
        sums = np.zeros((len(indices), *fields.shape[1:]), dtype=np.float32)
        for column, present in zip(positions.T, is_summed.T, strict=True):
            np.add(sums, fields[column], out=sums, where=present[:, None, None, None])
        return sums


def _find_sum_windows(
    source: Source, config: DataConfig, name: str, indices: NDArray[np.intp]
) -> SumWindows:
    """Return the windows of a variable over the step that ends at each of some times."""
    step = np.timedelta64(config.step_hours, "h")
    bounds = source.sum_bounds(name)
    if (bounds[:, 0] == bounds[:, 1]).any():
        # There is one time alone, whose value has to be the sum that is needed.
        return SumWindows(indices[:, None], source.has_times(name)[indices])
    windows = sum_windows(bounds, source.times[indices], step)
    stated_by = source.variables[name].sums_stated_by
    # Sums since the start of a forecast grow longer than a step.
    longer = bounds[bounds[:, 1] - bounds[:, 0] > step, 1]
    is_longer = np.isin(source.times[indices], longer).any()
    if not stated_by or (windows.complete.any() and not is_longer):
        return windows
    if config.variable_config(name).accumulated:
        unstated = source.sum_bounds(name, stated=False)
        return sum_windows(unstated, source.times[indices], step)
    apart = hours_of(time_spacing(source.times[source.has_times(name)]))
    raise UserError(
        f"{source.where}: {name} has {describe_sums(bounds)} by its {stated_by}, and its times are "
        f"{counted(apart, 'hour')} apart: these sums do not fill the {config.step} of data.step. "
        f"Change data.store to one with all hours, or set data.variables.{name}.accumulated to "
        "false, to take the values as they are, or to true, if they are sums since the time before."
    )


def mask_digest(mask: ValidMask) -> str:
    """Return a short hash of a mask."""
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()[:16]

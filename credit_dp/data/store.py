"""The fields that a run needs of its store, only the rows that are asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES, SPLITS
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.dates import resolve_dates, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.limits import ValueLimits, ValueRange, check_limit_keys, extremes
from credit_dp.data.selection import StepReader, select_channels
from credit_dp.data.sources.base import Fields, Source, Times
from credit_dp.data.sources.opening import open_source
from credit_dp.data.units import check_units, converted_unit
from credit_dp.errors import UserError

ValidMask = NDArray[np.bool_]  # (rows, W), True where there are values
ReadFirstFields = Callable[[Sequence[Channel], slice], Fields]


@final
class ValidMasks:
    """The masks of the channels whose variables have a fill; each band is read once.

    Any thread may ask.
    """

    def __init__(self, channels: Sequence[Channel], first_fields: ReadFirstFields) -> None:
        """Take what reads `(C, rows, W)` of the first training date, NaN where there is no value.

        What reads raises the errors of reading.
        """
        self.channels = tuple(channels)
        self._first_fields = first_fields
        self._known: dict[tuple[int, int], Mapping[Channel, ValidMask]] = {}
        self._lock = Lock()

    def of(self, band: slice) -> Mapping[Channel, ValidMask]:
        """The mask of each channel on rows `band`, whose ends are given."""
        if not self.channels:
            return {}
        key = (band.start, band.stop)
        with self._lock:
            if key not in self._known:
                fields = self._first_fields(self.channels, band)
                self._known[key] = dict(zip(self.channels, ~np.isnan(fields), strict=True))
            return self._known[key]


def all_finite(fields: Fields) -> bool:
    """Whether no value is NaN or infinite."""
    # One sum is faster than isfinite, and is finite only if all values are, unless it overflows:
    # then the slow check decides.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(fields.sum()) or np.isfinite(fields).all())


def mask_and_find_missing(field: Fields, valid: ValidMask | None) -> int | None:
    """Clear `(T, rows, W)` outside `valid`; the first time with a gap inside it, None if none has.

    Without a mask all points must have values.
    """
    if valid is None:
        if all_finite(field):
            return None
        bad = ~np.isfinite(field)
    else:
        np.copyto(field, np.nan, where=~valid)
        bad = ~np.isfinite(field) & valid
    times = np.flatnonzero(bad.any(axis=(1, 2)))
    return int(times[0]) if len(times) else None


def missing_value_error(
    where: str, channel: Channel, role: str, field: Fields, times: tuple[object, object] | None
) -> UserError:
    """What is said of a gap in `field`.

    Args:
        where: the store.
        role: the list of the data config that has the variable.
        times: of the field, and of the mask, None if it has none; None for a static.
    """
    name = channel.variable
    there = "" if times is None else f" at {_format_minute(times[0])}"
    if channel.level is not None:
        there += f" on level {channel.level}"
    other = f"eave it out of data.{role}" + ("" if times is None else ", or choose other dates")
    if np.isinf(field).any():
        return UserError(f"{where}: {name} has infinite values{there}. L{other}.")
    if times is not None and times[1] is not None:
        return UserError(
            f"{where}: {name} has NaN{there}, where it has values at "
            f"{_format_minute(times[1])}, the "
            f"first of data.dates.train, which data.variables.{name}.fill goes by. L{other}."
        )
    return UserError(
        f"{where}: {name} has NaN{there}. If it has no values there at any time, set "
        f"data.variables.{name}.fill=mean, or to a number; else l{other}."
    )


def _format_minute(time: object) -> str:
    return str(np.datetime64(time, "m"))  # type: ignore[call-overload]


BLOCK_BYTES = 8 * 2**20  # of fields read at once in a pass: more leaves the processor's cache


@final
class Store:
    """An open store: fields as float32, row 0 northernmost, columns as the store has them.

    Values are in the units that the config converts to. Variables with a `fill` are NaN outside
    their mask, and nowhere else; all others have values everywhere.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        times: `(T,)` datetime64[ns], whole steps, rising, perhaps with gaps.
        skipped: times left out because a sum over the step before them lacks a time.
        latitude: `(H,)` degrees, falling.
        longitude: `(W,)` degrees, in the store's order.
        levels: of the variables that have levels, in channel order.
        limits: the range that each channel's values must lie in.
        chosen_dates: a line on the dates that were chosen among `times`; empty if all were given.
    """

    def __init__(
        self, source: Source, config: DataConfig, ranges: Mapping[str, ValueRange] | None = None
    ) -> None:
        """Take what the config names.

        Args:
            ranges: see `sampled_ranges`; None: channels that are not known have no limits.

        Raises:
            UserError: a variable or a level is not as needed.
        """
        self.config = config
        self.dates_note = ""
        self.source = source
        self.channels = select_channels(source, config)
        self.levels = _levels(self.channels)
        self.latitude, self.longitude = source.latitude, source.longitude
        self.grid = source.grid
        self._forcing = [Channel(name) for name in config.forcing if name not in COMPUTED_FORCINGS]
        self._static = [Channel(name) for name in config.static if name not in COMPUTED_STATICS]
        timed = [*self.channels.output_channels, *self._forcing]
        variables = dict.fromkeys(channel.variable for channel in [*timed, *self._static])
        self._step_reader = StepReader(source, config, variables)
        check_limit_keys(config, [*timed, *self._static])
        self.limits = ValueLimits(source, config, ranges)
        self.times: Times = self._step_reader.times
        self.num_skipped = self._step_reader.num_skipped
        self._masks = ValidMasks([c for c in timed if self._has_fill(c)], self._first_fields)

    @classmethod
    def open(cls, config: DataConfig) -> "Store":
        """Open `config.store` and check everything that can be checked without reading fields.

        Raises:
            UserError: store, variable, dims, units, coordinates, levels or dates are not as needed.
        """
        store = cls(open_source(config), config)
        check_units(store.source, config)
        store.resolve_dates()
        for split in SPLITS:
            split_slice(store.config, split, store.times)
        return store

    def with_ranges(self, ranges: Mapping[str, ValueRange]) -> "Store":
        """The same store, with ranges for the channels that are not known; see `sampled_ranges`."""
        store = copy(self)
        store.limits = ValueLimits(self.source, self.config, ranges)
        return store

    @property
    def channels_without_range(self) -> list[Channel]:
        """The channels that change in time whose range of values has to be sampled."""
        return self.limits.channels_without_range([*self.channels.output_channels, *self._forcing])

    def sample(self, channels: Sequence[Channel], most: int) -> Iterator[Fields]:
        """The channels at some training dates, evenly spread, gaps and all: `(C, H, W)` each."""
        span = split_slice(self.config, "train", self.times)
        places = np.linspace(span.start, span.stop - 1, most).round().astype(np.intp)
        for place in np.unique(places):
            yield self._step_reader.read(channels, np.array([place]), slice(0, self.grid[0]))[0]

    def resolve_dates(self) -> None:
        """Choose the dates that the config leaves open; from then on `config` has them all.

        Raises:
            UserError: see `resolve_dates`.
        """
        if self.config.dates.open:
            dates, self.dates_note = resolve_dates(self.config, self.times)
            self.config = replace(self.config, dates=dates)

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read from disk since opening, without metadata and shard indices."""
        return self.source.bytes_read

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read from disk since opening."""
        return self.source.chunk_reads

    @property
    def has_stored_forcing(self) -> bool:
        """Whether any forcing is read, and not computed."""
        return bool(self._forcing)

    def read(self, time: np.datetime64, rows: slice) -> Fields:
        """The prognostic channels at one time: `(C, rows, W)`.

        Raises:
            UserError: the time is not in the store, or a value is missing.
        """
        fields: Fields = self.read_states(np.array([time]), rows)[0]
        return fields

    def read_states(self, times: Times, rows: slice) -> Fields:
        """The prognostic channels at several times: `(T, C, rows, W)`.

        A chunk that holds several of the times is read once.
        """
        return self._read(self.channels.prognostic, self._time_indices(times), rows)

    def read_outputs(self, times: Times, rows: slice) -> Fields:
        """The prognostic channels, then the diagnostic ones: `(T, outputs, rows, W)`."""
        return self._read(self.channels.output_channels, self._time_indices(times), rows)

    def read_channels(self, channels: Sequence[Channel], times: Times, rows: slice) -> Fields:
        """Some of the channels that change in time, at several times: `(T, C, rows, W)`.

        A chunk that holds several of the times is read once.
        """
        return self._read(channels, self._time_indices(times), rows)

    def chunk_numbers(self, channel: Channel, times: Times) -> NDArray[np.intp]:
        """Return for each time the number of its chunk, rising: times of one are decoded at once.

        A sum over a step may also need some of the chunk before.
        """
        return self._step_reader.chunk_numbers(channel, self._time_indices(times))

    def read_inputs(self, times: Times, rows: slice) -> tuple[Fields, Fields]:
        """The prognostic and the forcing channels: `(T, C, rows, W)` and `(T, F, rows, W)`.

        What lies in one chunk is read once.
        """
        return self._with_forcing(self.channels.prognostic, times, rows)

    def read_outputs_and_forcing(self, times: Times, rows: slice) -> tuple[Fields, Fields]:
        """All that comes out and the forcing channels: `(T, outputs or F, rows, W)`.

        What lies in one chunk is read once.
        """
        return self._with_forcing(self.channels.output_channels, times, rows)

    def forcing(self, time: np.datetime64, rows: slice) -> Fields:
        """The forcing channels at one time, computed ones included: `(F, rows, W)`."""
        fields: Fields = self.read_forcing(np.array([time]), rows)[0]
        return fields

    def read_forcing(self, times: Times, rows: slice) -> Fields:
        """The forcing channels at several times: `(T, F, rows, W)`."""
        band = self._bounded_rows(rows)
        stored = np.empty((len(times), 0, band.stop - band.start, self.grid[1]), dtype=np.float32)
        if self._forcing:
            stored = self._read(self._forcing, self._time_indices(times), rows)
        return self._with_computed(stored, times, rows)

    def static(self, rows: slice) -> Fields:
        """The static channels, computed ones included: `(S, rows, W)`."""
        band = self._bounded_rows(rows)
        names = self.channels.static
        fields = np.empty((len(names), band.stop - band.start, self.grid[1]), dtype=np.float32)
        stored = self._read_static(band) if self._static else fields[:0]
        places = {channel.variable: place for place, channel in enumerate(self._static)}
        for channel, name in enumerate(names):
            if name in places:
                fields[channel] = stored[places[name]]
            else:
                fields[channel] = COMPUTED_STATICS[name](self.latitude[band], self.longitude)
        return fields

    def valid_mask(self, rows: slice) -> NDArray[np.bool_] | None:
        """Where the channels that come out have values: `(outputs, rows, W)`; None: everywhere.

        That it is None depends on the config alone: it is so on all ranks or on none. The first
        call for a band reads the first training date, with the forcings that have a mask.
        """
        band = self._bounded_rows(rows)
        known = self._masks.of(band)
        if not any(self._has_fill(channel) for channel in self.channels.output_channels):
            return None
        masks = np.ones((self.channels.outputs, band.stop - band.start, self.grid[1]), dtype=bool)
        for place, channel in enumerate(self.channels.output_channels):
            if channel in known:
                masks[place] = known[channel]
        return masks

    def blocks(
        self, channels: Sequence[Channel], span: slice, rows: slice
    ) -> Iterator[tuple[int, Fields]]:
        """All times of `span` in turn, as `(place of the first time, (T, C, rows, W))`.

        Blocks are of bounded size and end on the store's own chunk edges where they can.
        """
        band = self._bounded_rows(rows)
        time_bytes = 4 * len(channels) * (band.stop - band.start) * self.grid[1]
        size = max(1, BLOCK_BYTES // max(1, time_bytes))
        for places in self._step_reader.blocks(channels, span, size):
            yield int(places[0]), self._read(channels, places, band)

    def units(self, variable: str) -> str:
        """The unit after the config's conversion, else as the store gives it; empty if it does not.

        What is computed has none.
        """
        if variable in COMPUTED_FORCINGS or variable in COMPUTED_STATICS:
            return "1"
        return converted_unit(self.source, variable, self.config)

    def description(self, variables: list[str]) -> list[object]:
        """What a cached result depends on, as JSON: the source, the levels, what is done to values.

        How values are normalised is not part of it.
        """
        stored = [v for v in variables if v not in COMPUTED_FORCINGS and v not in COMPUTED_STATICS]
        described = [*self.source.description(stored), list(self.levels)]
        for name in stored:
            config = self.config.of(name)
            done = (config.convert, config.fill is not None, name in self._step_reader.summed)
            if any(done):
                described.append([name, *done])
        return described

    def _with_forcing(
        self, channels: Sequence[Channel], times: Times, rows: slice
    ) -> tuple[Fields, Fields]:
        """Any channels that change in time, and the forcing ones."""
        fields = self._read([*channels, *self._forcing], self._time_indices(times), rows)
        stored = fields[:, len(channels) :]
        return fields[:, : len(channels)], self._with_computed(stored, times, rows)

    def _read(self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice) -> Fields:
        """Any channels that change in time, their gaps checked: `(T, C, rows, W)`."""
        band = self._bounded_rows(rows)
        fields = self._step_reader.read(channels, places, band)
        filled = any(map(self._has_fill, channels))
        # One pass over the values answers both questions: is one missing, is one out of range?
        good = self.limits.in_range(channels, *extremes(fields))
        # Never read for what the data hold: ranks that share reading must all do it, or none.
        masks = self._masks.of(band) if filled else {}
        for place in np.flatnonzero(~good.all(axis=0)).tolist():
            channel = channels[place]
            mask = masks.get(channel)
            gap = mask_and_find_missing(fields[:, place], mask)
            if gap is not None:
                times = (
                    self.times[places[gap]],
                    None if mask is None else self._first_training_time,
                )
                raise self._missing_value_error(channel, fields[gap, place], times)
            self._check_limits(channel, fields[:, place], places, band)
        return fields

    def _check_limits(
        self, channel: Channel, field: Fields, places: NDArray[np.intp] | None, band: slice
    ) -> None:
        """Refuse values of `(T, rows, W)` that are out of range; `places` None: of a static field.

        Raises:
            UserError: see `ValueLimits.check`.
        """

        def when(time: int) -> tuple[int, str]:
            if places is None:
                return 0, ""
            place = int(places[time])
            return self._step_reader.source_index(place), f"{self.times[place].astype('M8[m]')}, "

        self.limits.check(channel, field, when, band.start)

    @property
    def _first_training_time(self) -> np.datetime64:
        """The first training date."""
        first: np.datetime64 = self.times[split_slice(self.config, "train", self.times).start]
        return first

    def _first_fields(self, channels: Sequence[Channel], band: slice) -> Fields:
        """The first training date, gaps and all: `(C, rows, W)`."""
        fields: Fields = self._step_reader.read(
            channels, self._time_indices([self._first_training_time]), band
        )[0]
        return fields

    def _read_static(self, band: slice) -> Fields:
        fields = self.source.read(self._static, slice(0, 1), band)
        self._step_reader.convert(self._static, fields)
        for place, channel in enumerate(self._static):
            field = fields[:, place]
            mask = ~np.isnan(field[0]) if self._has_fill(channel) else None
            if mask_and_find_missing(field, mask) is not None:
                raise self._missing_value_error(channel, field, None)
            self._check_limits(channel, field, None, band)
        found: Fields = fields[0]
        return found

    def _missing_value_error(
        self, channel: Channel, field: Fields, times: tuple[object, object] | None
    ) -> UserError:
        role = next(role for role in ROLES if channel.variable in getattr(self.config, role))
        return missing_value_error(self.source.where, channel, role, field, times)

    def _with_computed(self, stored: Fields, times: Times, rows: slice) -> Fields:
        """All forcing channels, of which `(T, stored ones, rows, W)` have been read."""
        names = self.channels.forcing
        if len(self._forcing) == len(names):
            return stored
        band = self._bounded_rows(rows)
        fields = np.empty((len(stored), len(names), *stored.shape[2:]), dtype=np.float32)
        places = {channel.variable: place for place, channel in enumerate(self._forcing)}
        when = np.asarray(times, dtype="datetime64[ns]")
        for channel, name in enumerate(names):
            if name in places:
                fields[:, channel] = stored[:, places[name]]
            else:
                fields[:, channel] = COMPUTED_FORCINGS[name](
                    when, self.latitude[band], self.longitude
                )
        return fields

    def _has_fill(self, channel: Channel) -> bool:
        return self.config.of(channel.variable).fill is not None

    def _bounded_rows(self, rows: slice) -> slice:
        """The same rows with both ends given."""
        north, south, _ = rows.indices(self.grid[0])
        return slice(north, south)

    def _time_indices(self, times: ArrayLike) -> NDArray[np.intp]:
        """Where the times lie among `times`."""
        wanted = np.asarray(times, dtype="datetime64[ns]")
        places = np.minimum(np.searchsorted(self.times, wanted), len(self.times) - 1)
        absent = wanted[self.times[places] != wanted]
        if len(absent):
            raise UserError(
                f"{self.source.where}: has no time {absent[0].astype('M8[m]')} on step "
                f"{self.config.step}. Choose dates within the store: data.dates.train, .valid "
                "and .test."
            )
        return places


def _levels(channels: Channels) -> list[int]:
    """The levels in channel order."""
    found = (channel.level for channel in channels.output_channels)
    return list(dict.fromkeys(level for level in found if level is not None))

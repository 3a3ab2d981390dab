"""What is to be prepared: the channels of a config at some dates, perhaps on another grid."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.config import DataConfig
from credit_dp.data.cache import fingerprint
from credit_dp.data.channels import Channel
from credit_dp.data.dates import date_interval
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import FULL_CIRCLE, POLE, parse_grid
from credit_dp.data.limits import ValueLimits, check_limit_keys
from credit_dp.data.selection import StepReader, select_channels
from credit_dp.data.sources.base import Fields, Source, Times
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedMetadata
from credit_dp.data.units import check_units, converted_unit
from credit_dp.errors import UserError

Array = NDArray[np.float64]


@final
class Regridder:
    """Takes fields from one regular grid to another; global means stay.

    NaN: a target cell is the mean over the valid part of its area, and NaN where none is valid.
    Global means then stay only as far as all of a target cell is valid or none.

    Args:
        latitude, longitude: of the source, `(H,)` and `(W,)` degrees; rows reach from midpoint to
            midpoint, the outermost to the poles; columns are equal and close the circle.
        new_latitude, new_longitude: of the target.
    """

    def __init__(
        self, latitude: Array, longitude: Array, new_latitude: Array, new_longitude: Array
    ) -> None:
        self._rows = _normalise_rows(_row_overlap(row_edges(latitude), row_edges(new_latitude)))
        self._columns = _normalise_rows(_column_overlap(longitude, new_longitude))

    def __call__(self, fields: NDArray[np.floating]) -> NDArray[np.floating]:
        """Computed in float64, a field at a time; of the type that came.

        Shapes:
            `(..., H, W)` -> `(..., H_new, W_new)`.
        """
        shape = (*fields.shape[:-2], len(self._rows), len(self._columns))
        result = np.empty(shape, dtype=fields.dtype)
        for place in np.ndindex(shape[:-2]):
            result[place] = self._regrid_field(fields[place].astype(np.float64))
        return result

    def _regrid_field(self, field: Array) -> Array:
        valid = ~np.isnan(field)
        if valid.all():
            return self._means(field)
        covered = self._means(valid.astype(np.float64))
        total = self._means(np.where(valid, field, 0.0))
        # Rounding leaves a speck of area where there is none.
        some = covered > 1e-9
        return np.where(some, total / np.where(some, covered, 1.0), np.nan)

    def _means(self, field: Array) -> Array:
        means: Array = self._rows @ field @ self._columns.T
        return means


def regular_grid(rows: int, columns: int) -> tuple[Array, Array]:
    """Latitudes (falling) and longitudes of the usual grid of this size.

    An odd number of rows has one on each pole and one on the equator, an even number has neither.
    """
    latitude = np.linspace(POLE, -POLE, rows, dtype=np.float64)
    if rows % 2 == 0:
        latitude = POLE - (np.arange(rows, dtype=np.float64) + 0.5) * (2 * POLE / rows)
    return latitude, np.arange(columns) * FULL_CIRCLE / columns


def row_edges(latitude: Array) -> Array:
    """Edges of rows in sin(latitude), falling: `(H,)` degrees, falling -> `(H + 1,)`."""
    middle = (latitude[1:] + latitude[:-1]) / 2
    inner = np.sin(np.deg2rad(middle))
    return np.asarray(np.concatenate([[1.0], inner, [-1.0]]), dtype=np.float64)


def _row_overlap(old: Array, new: Array) -> Array:
    """What each new row has of each old one, in sin(latitude): `(H_new, H)`."""
    upper = np.minimum(new[:-1, None], old[None, :-1])
    lower = np.maximum(new[1:, None], old[None, 1:])
    return np.asarray(np.maximum(upper - lower, 0.0), dtype=np.float64)


def _column_overlap(old: Array, new: Array) -> Array:
    """What each new column has of each old one, in degrees: `(W_new, W)`."""
    width, new_width = FULL_CIRCLE / len(old), FULL_CIRCLE / len(new)
    # Distance between centres, the short way round: from -180 up to 180.
    apart = (new[:, None] - old[None, :] + FULL_CIRCLE / 2) % FULL_CIRCLE - FULL_CIRCLE / 2
    overlap = np.zeros_like(apart)
    for turn in (-FULL_CIRCLE, 0.0, FULL_CIRCLE):  # wide columns may meet on both sides
        east = np.minimum(apart + turn + new_width / 2, width / 2)
        west = np.maximum(apart + turn - new_width / 2, -width / 2)
        overlap += np.maximum(east - west, 0.0)
    return overlap


def _normalise_rows(overlap: Array) -> Array:
    """Each row divided by its sum, so that a constant stays one."""
    return np.asarray(overlap / overlap.sum(axis=1, keepdims=True), dtype=np.float64)


@final
@dataclass(frozen=True)
class FieldSelection:
    """Which fields, as a user asks for them.

    Attributes:
        config: store, variables, levels, step and units.
        dates: `(first, last)`, both inclusive; empty: all of the store's.
        grid: `ROWSxCOLUMNS` of the grid to regrid to, or None.
    """

    config: DataConfig
    dates: tuple[str, ...] = ()
    grid: str | None = None

    def check(self) -> None:
        """Refuse dates and a grid that can't be read.

        Raises:
            UserError: naming the key.
        """
        checks.grid("grid", self.grid)
        if self.dates:
            checks.date_range("dates", self.dates)


@final
class SelectedFields:
    """The fields that a question asks for, gaps (NaN) and all.

    Open it in the process that reads it.

    Attributes:
        times: `(T,)`.
        latitude, longitude: degrees, of the prepared store; latitude falls.
        form: what the prepared store says of itself.
    """

    def __init__(self, source: Source, question: FieldSelection) -> None:
        config = question.config
        channels = select_channels(source, config)
        check_units(source, config)
        stored = [Channel(name) for name in channels.forcing if name not in COMPUTED_FORCINGS]
        self._channels = [*channels.prognostic, *channels.diagnostic, *stored]
        self._static = [Channel(x) for x in channels.static if x not in COMPUTED_STATICS]
        variables = [channel.variable for channel in (*self._channels, *self._static)]
        self._variables = list(dict.fromkeys(variables))
        self._source = source
        self._config = config
        self._step_reader = StepReader(source, config, self._variables)
        check_limit_keys(config, [*self._channels, *self._static])
        self._limits = ValueLimits(source, config)
        self._start, stop = _date_bounds(self._step_reader.times, question.dates, source.where)
        self.times: Times = self._step_reader.times[self._start : stop]
        self.latitude, self.longitude = source.latitude, source.longitude
        self._regridder: Regridder | None = None
        if question.grid is not None:
            old = self.latitude, self.longitude
            self.latitude, self.longitude = regular_grid(*_parse_grid(question.grid))
            self._regridder = Regridder(*old, self.latitude, self.longitude)
        self.form = self._form()

    @classmethod
    def open(cls, question: FieldSelection) -> "SelectedFields":
        """Open the store.

        Raises:
            UserError: it doesn't hold what is asked for.
        """
        return cls(open_source(question.config), question)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Times, channels, rows, columns."""
        return len(self.times), len(self._channels), len(self.latitude), len(self.longitude)

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """The times in parts of at most `size`, as `(first, stop)`.

        Cut where the store's chunks end, so that each is decoded once if `size` allows it.
        """
        span = slice(self._start, self._start + len(self.times))
        parts: list[tuple[int, int]] = []
        for places in self._step_reader.blocks(self._channels, span, 1):
            first, stop = int(places[0]) - self._start, int(places[-1]) + 1 - self._start
            if parts and stop - parts[-1][0] <= size:
                first, _ = parts.pop()
            parts += itertools.pairwise([*range(first, stop, size), stop])
        return parts

    def fields(self, first: int, stop: int, rows: slice = slice(None)) -> Fields:
        """All channels at the times from `first` up to `stop`: `(T, C, rows, W)`."""
        places = np.arange(self._start + first, self._start + stop)
        if self._regridder is None:
            return self._read(places, rows)
        whole_globe = self._read(places, slice(None))
        return np.asarray(self._regridder(whole_globe), dtype=np.float32)[:, :, rows]

    def static(self) -> Fields:
        """The static channels: `(S, H, W)`."""
        if not self._static:
            return np.empty((0, *self.shape[2:]), dtype=np.float32)
        fields = self._source.read(self._static, slice(0, 1), slice(None))
        self._step_reader.convert(self._static, fields)
        for number, channel in enumerate(self._static):
            self._limits.check(channel, fields[:, number], lambda _: (0, ""))
        if self._regridder is None:
            return np.asarray(fields[0])
        return np.asarray(self._regridder(fields[0]), dtype=np.float32)

    def settings(self) -> dict[str, object]:
        """What the fields depend on, as JSON."""
        done = {name: self._config.of(name).convert for name in self._variables}
        return {
            "store": self._source.where,
            "store's fingerprint": fingerprint(*self._source.description(self._variables)),
            "dates": [str(self.times[0]), str(self.times[-1]), len(self.times)],
            "data.step": self._config.step_hours,
            "variables": [channel.name for channel in (*self._channels, *self._static)],
            "summed over the step": sorted(self._step_reader.summed),
            "conversions": {name: text for name, text in done.items() if text},
            "grid": list(self.shape[2:]),
        }

    def _read(self, places: NDArray[np.intp], rows: slice) -> Fields:
        """Group by group, so that no more than one group's chunks are in memory besides."""
        groups = self._source.group_by_chunk(self._channels)
        if len(groups) == 1:
            return self._read_checked(self._channels, places, rows)
        parts = [self._read_checked(group, places, rows) for group in groups]
        return np.concatenate(parts, axis=1)

    def _read_checked(
        self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice
    ) -> Fields:
        """Read fields whose values can be; of a prepared store their source is no longer known."""

        def when(time: int) -> tuple[int, str]:
            place = int(places[time])
            date = self._step_reader.times[place].astype("M8[m]")
            return self._step_reader.source_index(place), f"{date}, "

        fields = self._step_reader.read(channels, places, rows)
        for number, channel in enumerate(channels):
            self._limits.check(channel, fields[:, number], when, rows.start or 0)
        return fields

    def _form(self) -> PreparedMetadata:
        found = {name: self._source.variables[name] for name in self._variables}
        return PreparedMetadata(
            channels=tuple(self._channels),
            static=tuple(channel.variable for channel in self._static),
            units={name: converted_unit(self._source, name, self._config) for name in found},
            standard_names={name: variable.standard_name for name, variable in found.items()},
            origin=self._source.where,
            model_levels=any(variable.model_levels for variable in found.values()),
            title=self._source.title,
        )


def _date_bounds(times: Times, dates: Sequence[str], where: str) -> tuple[int, int]:
    """Places of the first time of `dates` and of the one after the last.

    Raises:
        UserError: there is none.
    """
    if not dates:
        return 0, len(times)
    first, last = (date_interval(date) for date in dates)
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start == stop:
        raise UserError(
            f"{where}: holds {times[0].astype('M8[m]')} to {times[-1].astype('M8[m]')}, but no "
            f"time from {dates[0]} to {dates[1]}. Change dates."
        )
    return start, stop


def _parse_grid(text: str) -> tuple[int, int]:
    rows, columns = parse_grid(text)
    if rows < 2:
        raise UserError(f"grid: needs at least two rows, got {text}. Change grid.")
    return rows, columns

"""Selects the fields that `credit-dp data prepare` copies, and regrids them if needed.

`FieldSelection` is the request, which can be sent to other processes; `SelectedFields` opens the
store and reads. Regridding is first-order conservative on regular grids (`Regridder`); states of
other sources may be regridded bilinearly, too, and from reduced grids (`ReducedRegridder`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.config import DataConfig
from credit_dp.data.cache import fingerprint
from credit_dp.data.calendar import Calendar
from credit_dp.data.channels import Channel
from credit_dp.data.dates import date_interval
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import FULL_CIRCLE, POLE, parse_grid, row_edges
from credit_dp.data.limits import ValueLimits, check_limit_keys
from credit_dp.data.selection import StepReader, select_channels, without_absent_statics
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedMetadata
from credit_dp.data.sources.source import Fields, Source, Times, hours_of
from credit_dp.data.units import check_units, converted_unit, is_accumulated
from credit_dp.errors import UserError

Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class FieldSelection:
    """The request for fields.

    Attributes:
        config: store, variables, levels, step and units.
        dates: `(first, last)`, both inclusive; empty for all dates of the store.
        grid: the target grid as `ROWSxCOLUMNS`; None for the store's grid.
    """

    config: DataConfig
    dates: tuple[str, ...] = ()
    grid: str | None = None

    def check(self) -> None:
        """Refuse dates and grids that can't be parsed."""
        checks.grid("grid", self.grid)
        if self.dates:
            checks.date_range("dates", self.dates)


@final
class SelectedFields:
    """Reads the fields of a selection; missing values (NaN) stay.

    Open it in the process that reads it.

    Attributes:
        times: `(T,)`.
        latitude, longitude: degrees on the target grid; latitude decreases.
        metadata: for the attributes of the prepared store.
    """

    def __init__(self, source: Source, selection: FieldSelection) -> None:
        config = selection.config
        # Computed forcings and static fields are not copied: a run computes them again.
        channels = select_channels(source, config)
        check_units(source, config)
        stored_forcing = [
            Channel(name) for name in channels.forcing if name not in COMPUTED_FORCINGS
        ]
        self._channels = [*channels.prognostic, *channels.diagnostic, *stored_forcing]
        self._static = [Channel(name) for name in channels.static if name not in COMPUTED_STATICS]
        variables = [channel.variable for channel in (*self._channels, *self._static)]
        self._variables = list(dict.fromkeys(variables))
        self._source = source
        self._config = config
        self._step_reader = StepReader(source, config, self._variables)
        check_limit_keys(config, [*self._channels, *self._static])
        self._limits = ValueLimits(source, config)
        self._start, stop = _date_bounds(
            self._step_reader.times, selection.dates, source.where, source.calendar
        )
        self.times: Times = self._step_reader.times[self._start : stop]
        self.calendar = source.calendar
        self.latitude = source.latitude
        self.longitude = source.longitude
        self._regridder: Regridder | None = None
        if selection.grid is not None:
            source_grid = self.latitude, self.longitude
            self.latitude, self.longitude = regular_grid(*_parse_grid(selection.grid))
            self._regridder = Regridder(*source_grid, self.latitude, self.longitude)
        self.metadata = self._metadata()

    @classmethod
    def open(cls, selection: FieldSelection) -> "SelectedFields":
        """Open the store of a selection.

        Raises:
            UserError: it lacks a requested variable, level or date.
        """
        source = open_source(selection.config)
        if selection.grid is not None or source.grid.is_projected:
            source.grid.check_global(source.where, "Leave out grid, or train on the store itself.")
        config = without_absent_statics(source, selection.config)
        return cls(source, replace(selection, config=config))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the numbers of times, channels, rows and columns."""
        return len(self.times), len(self._channels), len(self.latitude), len(self.longitude)

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Split the times into blocks `(first, stop)` of at most `size` times.

        Blocks end where the store's chunks end, so that each chunk is decoded once if `size`
        allows it.
        """
        span = slice(self._start, self._start + len(self.times))
        parts: list[tuple[int, int]] = []
        # Size 1 gives the smallest parts that end at chunk edges; they are joined up to `size`.
        for indices in self._step_reader.blocks(self._channels, span, 1):
            first, stop = int(indices[0]) - self._start, int(indices[-1]) + 1 - self._start
            if parts and stop - parts[-1][0] <= size:  # joins the block before
                first, _ = parts.pop()
            parts += itertools.pairwise([*range(first, stop, size), stop])
        return parts

    def fields(self, first: int, stop: int, rows: slice = slice(None)) -> Fields:
        """Read all channels at the times from `first` up to `stop`: `(T, C, rows, W)`."""
        indices = np.arange(self._start + first, self._start + stop)
        if self._regridder is None:
            return self._read(indices, rows)
        # A target row needs source rows of other latitudes: regrid the globe, then take `rows`.
        globe = self._read(indices, slice(None))
        return np.asarray(self._regridder(globe), dtype=np.float32)[:, :, rows]

    def static(self) -> Fields:
        """Read the static channels: `(S, H, W)`."""
        if not self._static:
            return np.empty((0, *self.shape[2:]), dtype=np.float32)
        fields = self._source.read(self._static, slice(0, 1), slice(None))
        self._step_reader.convert(self._static, fields)
        for index, channel in enumerate(self._static):
            self._limits.check(channel, fields[:, index], lambda _: (0, ""))
        if self._regridder is None:
            return np.asarray(fields[0])
        return np.asarray(self._regridder(fields[0]), dtype=np.float32)

    def settings(self) -> dict[str, object]:
        """Return everything that the fields depend on, as JSON."""
        conversions = {name: self._config.variable_config(name).convert for name in self._variables}
        return {
            "store": self._source.where,
            "store's fingerprint": fingerprint(*self._source.description(self._variables)),
            "dates": [str(self.times[0]), str(self.times[-1]), len(self.times)],
            **({} if self.calendar.is_standard else {"calendar": self.calendar.name}),
            "data.step": self._config.step_hours,
            "variables": [channel.name for channel in (*self._channels, *self._static)],
            "summed over the step": dict(sorted(self._step_reader.summed.items())),
            "conversions": {name: text for name, text in conversions.items() if text},
            "grid": list(self.shape[2:]),
        }

    def _read(self, indices: NDArray[np.intp], rows: slice) -> Fields:
        """Read group by group, so that the chunks of only one group are in memory at a time."""
        groups = self._source.group_by_chunk(self._channels)
        if len(groups) == 1:
            return self._read_checked(self._channels, indices, rows)
        parts = [self._read_checked(group, indices, rows) for group in groups]
        return np.concatenate(parts, axis=1)

    def _read_checked(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> Fields:
        """Read fields and check that their values are plausible.

        This is the last chance: a prepared store no longer knows which file a value came from.
        """

        def describe_time(time: int) -> tuple[int, str]:
            index = int(indices[time])
            date = self.calendar.text(self._step_reader.times[index])
            return self._step_reader.source_index(index), f"{date}, "

        fields = self._step_reader.read(channels, indices, rows)
        for position, channel in enumerate(channels):
            self._limits.check(channel, fields[:, position], describe_time, rows.start or 0)
        return fields

    def _metadata(self) -> PreparedMetadata:
        variables = {name: self._source.variables[name] for name in self._variables}
        return PreparedMetadata(
            channels=tuple(self._channels),
            static=tuple(channel.variable for channel in self._static),
            units={name: converted_unit(self._source, name, self._config) for name in variables},
            standard_names={name: variable.standard_name for name, variable in variables.items()},
            origin=self._source.where,
            model_levels=any(bool(variable.model_levels) for variable in variables.values()),
            title=self._source.title,
            hybrid=_hybrid_as_lists(self._source),
            sum_hours=self._sum_hours(),
            calendar=self.calendar.name,
        )

    def _sum_hours(self) -> dict[str, float]:
        """Return how many hours the written sums cover, of the variables of which that is known."""
        hours: dict[str, float] = {}
        for name in dict.fromkeys(channel.variable for channel in self._channels):
            if is_accumulated(name, self._config):
                hours[name] = self._config.step_hours
            elif self._source.variables[name].sums_stated_by:
                begins, ends = self._source.sum_bounds(name).T
                periods = np.unique((ends - begins)[self._source.has_times(name)])
                if len(periods) == 1:
                    hours[name] = hours_of(periods[0])
        return hours


def _hybrid_as_lists(source: Source) -> dict[str, list[float]]:
    """Return the coefficients of model levels, if the source has them."""
    a, b = source.hybrid or ((), ())
    return {"a": list(map(float, a)), "b": list(map(float, b))} if len(a) else {}


def _date_bounds(
    times: Times, dates: Sequence[str], where: str, calendar: Calendar
) -> tuple[int, int]:
    """Return the index of the first time within `dates`, and the index after the last one.

    Raises:
        UserError: no time is within `dates`.
    """
    if not dates:
        return 0, len(times)
    first, last = (date_interval("dates", date, calendar) for date in dates)
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start >= stop:
        raise UserError(
            f"{where}: holds {calendar.text(times[0])} to {calendar.text(times[-1])}, but no "
            f"time from {dates[0]} to {dates[1]}. Change dates."
        )
    return start, stop


def _parse_grid(text: str) -> tuple[int, int]:
    rows, columns = parse_grid(text)
    if rows < 2:
        raise UserError(f"grid: needs at least two rows, got {text}. Change grid.")
    return rows, columns


CONSERVATIVE, BILINEAR = "conservative", "bilinear"
REGRIDDING = (CONSERVATIVE, BILINEAR)


@final
class Regridder:
    """Regridding between regular grids, by default first-order conservative.

    Conservative: global means are preserved. A target cell is the mean over the source's cells;
    with NaN over the valid part of its area, and NaN if no part is valid. The global mean is then
    preserved only where target cells are valid entirely or not at all.

    Bilinear: a target point is interpolated linearly between the rows and columns around it, around
    the globe in longitude; poleward of the outermost row it has the values of that row. With NaN
    the valid ones of the four points share the weight; NaN if none is valid.

    Args:
        latitude, longitude: of the source, `(H,)` and `(W,)` degrees. Rows extend to the midpoints
            between latitudes, the outermost to the poles; columns are equally wide.
        new_latitude, new_longitude: of the target.
        method: one of `REGRIDDING`.
    """

    def __init__(
        self,
        latitude: Array,
        longitude: Array,
        new_latitude: Array,
        new_longitude: Array,
        method: str = CONSERVATIVE,
    ) -> None:
        # The weights of rows and columns are independent, so two small matrices do the work.
        self._rows = row_weights_between(latitude, new_latitude, method)
        self._columns = column_weights_between(longitude, new_longitude, method)

    def __call__(self, fields: NDArray[np.floating]) -> NDArray[np.floating]:
        """Regrid fields one by one in float64; the result has the input's dtype.

        Shapes:
            `(..., H, W)` -> `(..., H_new, W_new)`.
        """
        shape = (*fields.shape[:-2], len(self._rows), len(self._columns))
        result = np.empty(shape, dtype=fields.dtype)
        for index in np.ndindex(shape[:-2]):
            result[index] = _means_of_valid(self._means, fields[index].astype(np.float64))
        return result

    def _means(self, field: Array) -> Array:
        means: Array = self._rows @ field @ self._columns.T
        return means


@final
class ReducedRegridder:
    """Regridding from a grid whose rows have different numbers of points, as `Regridder` does it.

    Args:
        latitude: of the source, `(H,)` degrees, falling.
        row_lengths: numbers of points of the rows, `(H,)`, from the first longitude eastward.
        first_longitude: of all rows, in degrees.
        new_latitude, new_longitude: of the target.
        method: one of `REGRIDDING`.
    """

    def __init__(
        self,
        latitude: Array,
        row_lengths: Sequence[int],
        first_longitude: float,
        new_latitude: Array,
        new_longitude: Array,
        method: str = CONSERVATIVE,
    ) -> None:
        self._rows = row_weights_between(latitude, new_latitude, method)
        self._lengths = tuple(row_lengths)
        # Rows of the same length, mostly in both hemispheres, share a matrix.
        self._columns: dict[int, Array] = {}
        for length in set(self._lengths):
            columns = np.arange(length, dtype=np.float64) * (FULL_CIRCLE / length)
            self._columns[length] = column_weights_between(
                first_longitude + columns, new_longitude, method
            )

    def __call__(self, values: NDArray[np.floating]) -> NDArray[np.floating]:
        """Regrid one field in float64.

        Shapes:
            `(N,)`, row after row from the north -> `(H_new, W_new)`.
        """
        return _means_of_valid(self._means, values.astype(np.float64))

    def _means(self, values: Array) -> Array:
        rows = np.split(values, np.cumsum(self._lengths)[:-1])
        on_columns = [self._columns[len(row)] @ row for row in rows]
        means: Array = self._rows @ np.stack(on_columns)
        return means


def _means_of_valid(means: Callable[[Array], Array], field: Array) -> Array:
    """Return the weighted means of a field, of its valid points where it has NaN."""
    valid = ~np.isnan(field)
    if valid.all():
        return means(field)
    covered = means(valid.astype(np.float64))
    total = means(np.where(valid, field, 0.0))
    # Rounding leaves a tiny covered area where there is none.
    has_valid = covered > 1e-9
    return np.where(has_valid, total / np.where(has_valid, covered, 1.0), np.nan)


def row_weights_between(old: Array, new: Array, method: str) -> Array:
    """Return the weights of old rows in each new one, which sum to 1: `(H_new, H)`.

    Args:
        old, new: latitudes in degrees, falling.
        method: one of `REGRIDDING`.
    """
    if method == CONSERVATIVE:
        return _normalise_rows(_row_overlap(_sine_edges(old), _sine_edges(new)))
    south = np.clip(np.searchsorted(-old, -new), 1, len(old) - 1)
    share = np.clip((old[south - 1] - new) / (old[south - 1] - old[south]), 0, 1)
    return _pairs(len(old), south - 1, south, share)


def column_weights_between(old: Array, new: Array, method: str) -> Array:
    """Return the weights of old columns in each new one, which sum to 1: `(W_new, W)`.

    Args:
        old, new: longitudes in degrees, of columns that are equally far from each other.
        method: one of `REGRIDDING`.
    """
    if method == CONSERVATIVE:
        return _normalise_rows(_column_overlap(old, new))
    position = (new - old[0]) % FULL_CIRCLE * (len(old) / FULL_CIRCLE)
    west = np.floor(position).astype(np.intp)
    return _pairs(len(old), west % len(old), (west + 1) % len(old), position - west)


def _pairs(count: int, first: NDArray[np.intp], second: NDArray[np.intp], share: Array) -> Array:
    """Return weights of two of `count` points in each new one: `share` is that of the second."""
    weights = np.zeros((len(share), count))
    index = np.arange(len(share))
    np.add.at(weights, (index, first), 1 - share)
    np.add.at(weights, (index, second), share)
    return weights


def regular_grid(rows: int, columns: int) -> tuple[Array, Array]:
    """Return latitudes (decreasing) and longitudes of the usual grid of this size.

    An odd number of rows includes the poles and the equator, an even number includes neither.
    """
    latitude = np.linspace(POLE, -POLE, rows, dtype=np.float64)
    if rows % 2 == 0:
        latitude = POLE - (np.arange(rows, dtype=np.float64) + 0.5) * (2 * POLE / rows)
    return latitude, np.arange(columns) * FULL_CIRCLE / columns


def _sine_edges(latitude: Array) -> Array:
    """Return the edges of rows in sin(latitude), decreasing: `(H,)` degrees -> `(H + 1,)`."""
    # The area between two latitudes is proportional to the difference of their sines.
    return np.asarray(np.sin(np.deg2rad(row_edges(latitude))), dtype=np.float64)


def _row_overlap(old: Array, new: Array) -> Array:
    """Return the overlap of each new row with each old row in sin(latitude): `(H_new, H)`."""
    upper = np.minimum(new[:-1, None], old[None, :-1])
    lower = np.maximum(new[1:, None], old[None, 1:])
    return np.asarray(np.maximum(upper - lower, 0.0), dtype=np.float64)


def _column_overlap(old: Array, new: Array) -> Array:
    """Return the overlap of each new column with each old one in degrees: `(W_new, W)`."""
    width, new_width = FULL_CIRCLE / len(old), FULL_CIRCLE / len(new)
    # The distance between centres the short way round, from -180 up to 180.
    distance = (new[:, None] - old[None, :] + FULL_CIRCLE / 2) % FULL_CIRCLE - FULL_CIRCLE / 2
    overlap = np.zeros_like(distance)
    # A wide column can overlap another one on both of its sides.
    for turn in (-FULL_CIRCLE, 0.0, FULL_CIRCLE):
        east = np.minimum(distance + turn + new_width / 2, width / 2)
        west = np.maximum(distance + turn - new_width / 2, -width / 2)
        overlap += np.maximum(east - west, 0.0)
    return overlap


def _normalise_rows(overlap: Array) -> Array:
    """Divide each row by its sum, so that a constant field stays constant."""
    return np.asarray(overlap / overlap.sum(axis=1, keepdims=True), dtype=np.float64)

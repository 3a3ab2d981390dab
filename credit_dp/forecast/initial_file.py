"""Initial states from files of other sources: GRIB, netCDF or zarr, on any global grid of rows.

`InitialFiles` finds each prognostic field of a run at the times that a forecast needs, under any of
its names, converts its unit and regrids it. Everything else stays the run's: static
fields and stored forcings are read from its data.

Each rank decodes whole fields, one at a time, and keeps its rows: messages of GRIB can't be read in
part, and a state is read once. So ranks need no collective here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.config.data import CONSERVATIVE
from credit_dp.data.calendar import STANDARD, Calendar, Times, calendar_of, decode_dates, is_time
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FULL_CIRCLE, FieldArray, Grid, turns
from credit_dp.data.limits import find_missing
from credit_dp.data.regrid import CellLayout, PointInterpolation, Regridder
from credit_dp.data.sampling import frame_offsets
from credit_dp.data.sources.address import is_remote
from credit_dp.data.sources.coordinates import decode_durations
from credit_dp.data.sources.datasets import (
    DatasetCounter,
    begins_as_netcdf,
    open_netcdf,
    open_zarr_dataset,
)
from credit_dp.data.sources.grib_file import GribFile, Message, is_grib
from credit_dp.data.sources.grib_names import MODEL, OTHER_NAMES, PRESSURE, SINGLE
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.rows import CellRows
from credit_dp.data.sources.source import describe_members
from credit_dp.data.sources.storage import version_stamp
from credit_dp.data.store import Store
from credit_dp.data.units import KNOWN_VARIABLES, canonical_unit, find_conversion, is_accumulated
from credit_dp.data.winds import (
    ALONG_X,
    ALONG_Y,
    Turn,
    describe_winds,
    lies_along_grid,
    other_component,
    turn_of,
    wind_difference,
)
from credit_dp.errors import UserError, counted
from credit_dp.forecast.request import ForecastRequest, parse_list
from credit_dp.variable_names import all_names_of, long_name

KEY = "init_file"
WRF_WINDS = {"U10": "10m_u_component_of_wind", "V10": "10m_v_component_of_wind"}
LEAD_DIMS = ("prediction_timedelta", "step", "lead_time")
SAME_GRID = 0.01  # of a step: coordinates in GRIB are rounded


Regrid = Callable[[NDArray[np.floating]], NDArray[np.floating]]


class FoundField(NamedTuple):
    """A field in a file, with its unit there; `read` reads its values, `(N,)`."""

    unit: str
    along_grid: bool | None  # whether a wind lies along the grid, see `lies_along_grid`
    read: Callable[[], FieldArray]


class StateFile(ABC):
    """An open file with fields on one grid.

    Attributes:
        where: its path.
        times: valid times of its fields, rising.
        calendar: of these times.
        grid: with its rows from the north.
        cells: how cells become rows; None in a file of rows and columns.
    """

    where: str
    times: Times
    grid: Grid
    calendar: Calendar = STANDARD
    cells: CellRows | None = None

    @abstractmethod
    def find(
        self, names: Sequence[str], level: int | None, model_levels: bool, time: np.datetime64
    ) -> FoundField | None:
        """Return a field at a valid time, under the first of its names that the file has.

        Args:
            level: in hPa, or the number of a model level; None without.
            model_levels: whether it is the number of a model level.

        Raises:
            UserError: the file has the field twice, or in a form that can't be read.
        """

    def regridder(self, store: Store, method: str) -> Regrid:
        """Return what brings the values of a field to the grid of a store, `(N,)` -> `(H, W)`.

        Raises:
            UserError: the file does not cover the region of the store, or the method needs the
                globe.
        """
        old, new = self.grid, store.grid
        to_rows: Regrid = partial(np.reshape, shape=old.shape)
        if self.cells is not None:
            to_rows = partial(self.cells.fields, rows=slice(None))
        tolerance = SAME_GRID * abs(turns(new.longitude).flat[0])
        columns = old.columns_east(new, tolerance)
        rolled = Grid(old.latitude, np.roll(old.longitude, -columns)) if columns else old
        if rolled.difference(new, tolerance) is None:
            return lambda values: np.roll(to_rows(values), -columns, axis=-1)
        if new.is_global:
            old.check_global(f"{KEY}: {self.where}", f"Change {KEY}.")
            layout = CellLayout.of(old) if self.cells is None else self.cells.layout
            return Regridder(layout, new, method)
        if method == CONSERVATIVE:
            raise UserError(
                f"regrid: {method} means are those of the globe, but {store.source.where} is a "
                f"region, and {self.where} is on another grid. Set regrid=bilinear."
            )
        try:
            interpolate = PointInterpolation(old, *new.points)
        except UserError as error:
            raise UserError(f"{KEY}: {self.where} {error}. Change {KEY}.") from error
        return lambda values: interpolate(to_rows(values))


@final
class GribStates(StateFile):
    """The fields of a GRIB file at an instant; sums, means and extremes over time are left out."""

    def __init__(self, path: Path) -> None:
        self._file = GribFile.open(path, KEY)
        self.where = str(path)
        latitude, longitude, lengths = self._file.read_grid(reduced=True, projected=True)
        grid = Grid(latitude, longitude)
        self._flipped = grid.rises  # on a projection
        self.grid = grid.flipped() if self._flipped else grid
        if lengths:
            latitudes = np.repeat(latitude, lengths)
            longitudes = [longitude[0] + np.arange(n) * (FULL_CIRCLE / n) for n in lengths]
            self.cells = CellRows(latitudes, np.concatenate(longitudes), self.where)
        messages = self._file.messages("instant")
        self.times = np.unique(np.array([x.valid for x in messages], "M8[ns]"))
        self._messages: dict[tuple[str, str, int, np.datetime64], list[Message]] = {}
        for message in messages:
            about = (message.kind, message.name, message.level, message.valid)
            self._messages.setdefault(about, []).append(message)
        self.grid.check(self.where)

    def find(
        self, names: Sequence[str], level: int | None, model_levels: bool, time: np.datetime64
    ) -> FoundField | None:
        """Find the message of a field."""
        kind = SINGLE if level is None else MODEL if model_levels else PRESSURE
        for name in names:
            messages = self._messages.get((kind, name, level or 0, time), [])
            if len(messages) > 1:
                members = len({message.member for message in messages})
                count = f"of {members} members" if members > 1 else "more than once"
                raise UserError(
                    f"{KEY}: {self.where} has {name} at {time.astype('M8[m]')} {count}. "
                    "Select one, for example with `grib_copy -w`."
                )
            for message in messages:
                along_grid = self.grid.is_projected and self._file.has_winds_along_grid(message)
                return FoundField(message.unit, along_grid, partial(self._read, message))
        return None

    def _read(self, message: Message) -> FieldArray:
        field = self._file.read(message)
        return field.reshape(self.grid.shape)[::-1].ravel() if self._flipped else field.ravel()


@final
class GriddedStates(StateFile):
    """The fields of a netCDF file or zarr store."""

    def __init__(self, path: Path, initial: np.datetime64 | None = None) -> None:
        self.where = str(path)
        dataset: xr.Dataset
        counter: DatasetCounter
        open_dataset = open_zarr_dataset if path.is_dir() else open_netcdf
        dataset, counter = open_dataset(str(path))
        dataset, self.times, self.calendar = _split_time(dataset, path, initial)
        self._source = GriddedSource(dataset, counter, str(path))
        if len(self._source.members) > 1:
            raise UserError(
                f"{KEY}: {self.where} has {describe_members(self._source.members)}. Select one, "
                "for example with xarray's ds.isel(number=0)."
            )
        self.grid, self.cells = self._source.grid, self._source.cells

    def find(
        self, names: Sequence[str], level: int | None, model_levels: bool, time: np.datetime64
    ) -> FoundField | None:
        """Find a variable that has the field."""
        index = int(np.searchsorted(self.times, time))
        if index == len(self.times) or self.times[index] != time:
            return None
        for name in names:
            variable = self._source.variables.get(name)
            # In a file of several times, a field without a time is a static one.
            if variable is None or variable.has_time != bool(len(self._source.times)):
                continue
            on_level = (level,) if level is not None else ()
            if bool(variable.levels) != bool(on_level) or not {*on_level} <= {*variable.levels}:
                continue
            # A file that does not say which levels it has is trusted to have those of the run.
            if variable.levels and variable.model_levels not in (None, model_levels):
                continue
            if variable.problem:
                raise UserError(f"{KEY}: {self.where}: {name} {variable.problem}. Change {KEY}.")
            along_grid = lies_along_grid(variable.standard_name, self.grid)
            read = partial(self._read, Channel(name, level), index)
            return FoundField(variable.units, along_grid, read)
        return None

    def _read(self, channel: Channel, index: int) -> FieldArray:
        times = slice(index, index + 1)
        field: FieldArray = self._source.read_values([channel], times, slice(None))[0, 0]
        return field


@final
class InitialFiles:
    """The files of `init_file`; of several, the first one that has a field gives it."""

    def __init__(self, files: Sequence[StateFile], addresses: Sequence[str]) -> None:
        self._files = files
        self.addresses = tuple(addresses)

    @classmethod
    def open(cls, text: str, initial: np.datetime64 | None = None) -> "InitialFiles":
        """Open `PATH` or `[PATH,...]`; fields are read later.

        Args:
            initial: the initial time to choose from forecasts of several; None: they are refused.

        Raises:
            UserError: names the file that can't be used.
        """
        paths = [checks.expand_home(KEY, entry).absolute() for entry in _check_paths(text)]
        return cls([_open_file(path, initial) for path in paths], [str(path) for path in paths])

    @property
    def times(self) -> Times:
        """Return the valid times of all files, rising."""
        return np.unique(np.concatenate([file.times for file in self._files]))

    @property
    def stamps(self) -> list[str]:
        """Return a text for each file that changes when it is rewritten."""
        return [f"{where} {version_stamp(where)}" for where in self.addresses]

    def initial_time(self, frames: int, step_hours: int) -> str:
        """Return the time to start from, if the files have the input states of one forecast.

        Raises:
            UserError: they have fewer times than the model needs, or more.
        """
        calendar = self._files[0].calendar
        times = self.times
        needed = times[-1] + frame_offsets(frames, step_hours) if len(times) else times
        if not len(times) or len(times) != frames or not np.array_equal(times, np.sort(needed)):
            found = ", ".join(calendar.text(time) for time in times[:4])
            several = f"s {step_hours}h apart" if frames > 1 else ""
            raise UserError(
                f"{KEY}: the model needs {frames} input state{several}, but "
                f"{', '.join(self.addresses)} has those at {found or 'no time'}"
                f"{', ...' if len(times) > 4 else ''}. Say which one to start from with "
                f"init=TIME, or change {KEY}."
            )
        return calendar.short_text(times[-1])

    def reader(self, store: Store, times: Times, regrid: str = CONSERVATIVE) -> "StateReader":
        """Return what reads the prognostic fields of a run at some times; nothing is read yet.

        Raises:
            UserError: names all fields that are missing, or whose unit does not fit.
        """
        accumulated = [x for x in store.channels.variables if is_accumulated(x, store.config)]
        if accumulated:
            raise UserError(
                f"{KEY}: {', '.join(accumulated)} of the input state is a sum over the step, "
                "which files of one time don't have. Start from data.store."
            )
        for file in self._files:
            if file.calendar != store.calendar:
                raise UserError(
                    f"{KEY}: {file.where} has dates of the {file.calendar.name} calendar, but the "
                    f"model's are of the {store.calendar.name} calendar. Change {KEY}."
                )
        fields: dict[tuple[Channel, np.datetime64], _Field] = {}
        missing: dict[tuple[Channel, ...], list[str]] = {}
        for time in np.unique(times):
            lacking = []
            for channel in store.channels.prognostic:
                field = self._find(store, channel, time)
                if field is None:
                    lacking.append(channel)
                else:
                    fields[channel, time] = field
            if lacking:
                missing.setdefault(tuple(lacking), []).append(store.calendar.text(time))
        if missing:
            where = ", ".join(self.addresses)
            lacks = []
            for channels, (first, *later) in missing.items():
                also = f" and {counted(len(later), 'later time')}" if later else ""
                lacks.append(f"at {first}{also} {_describe_channels(channels)}")
            raise UserError(
                f"{KEY}: {where} lacks {'; '.join(lacks)}. Add a file that has it to {KEY}."
            )
        turned: dict[tuple[Channel, np.datetime64], tuple[_Field, Turn]] = {}
        turns: dict[str, Turn] = {}  # fields of a variable share theirs
        for (channel, time), field in fields.items():
            name, to_grid = channel.variable, store.lies_along_grid(channel.variable)
            is_wind = to_grid or other_component(name)
            if is_wind and wind_difference(field.found.along_grid, to_grid):
                other = self._other_component(store, channel, time, field)
                if name not in turns:
                    # A file on a projection is on that of the run: no other is regridded.
                    where = f"{KEY}: {field.file.where}"
                    turns[name] = turn_of(name, store.grid, where, bool(to_grid))
                turned[channel, time] = other, turns[name]
        return StateReader(store, fields, turned, regrid)

    def _other_component(
        self, store: Store, channel: Channel, time: np.datetime64, field: "_Field"
    ) -> "_Field":
        """Return the field that turns one of the same wind.

        Raises:
            UserError: the files lack it.
        """
        name = other_component(channel.variable)
        other = self._find(store, channel, time, name) if name else None
        if other is None or other.found.along_grid != field.found.along_grid:
            lies = field.found.along_grid
            raise UserError(
                f"{KEY}: {field.file.where}: {channel.name} is {describe_winds(lies)}, but "
                f"{describe_winds(not lies)} in {store.source.where}, and can't be turned without "
                f"the other component of this wind. Add a file that has it to {KEY}."
            )
        return other

    def _find(
        self, store: Store, channel: Channel, time: np.datetime64, name: str | None = None
    ) -> "_Field | None":
        """Return the field of a channel, or of another variable on its level.

        Raises:
            UserError: its unit can't be converted.
        """
        name = name or channel.variable
        long, level = long_name(name, channel.level)
        if level is None:
            level = long_name(channel.variable, channel.level)[1]
        if store.source.variables[channel.variable].standard_name in (ALONG_X, ALONG_Y):
            long = WRF_WINDS.get(long, long)
        names = dict.fromkeys([name, *all_names_of(long), *OTHER_NAMES.get(long, ())])
        model_levels = bool(store.source.variables[channel.variable].model_levels)
        for file in self._files:
            found = file.find(list(names), level, model_levels, time)
            if found is not None:
                conversion = _conversion(store, channel, file, found.unit)
                return _Field(file, found, conversion)
        return None


class _Field(NamedTuple):
    """A field with its file, and scale and offset from the file's unit to the run's."""

    file: StateFile
    found: FoundField
    conversion: tuple[float, float]


@final
class StateReader:
    """Reads input states from files: their units and grid become those of the run."""

    def __init__(
        self,
        store: Store,
        fields: Mapping[tuple[Channel, np.datetime64], _Field],
        turned: Mapping[tuple[Channel, np.datetime64], tuple[_Field, Turn]],
        regrid: str,
    ) -> None:
        self._store = store
        self._fields = fields
        self._turned = turned
        used = [*fields.values(), *(field for field, _ in turned.values())]
        files = {field.file.where: field.file for field in used}
        self._regridders = {where: file.regridder(store, regrid) for where, file in files.items()}

    def read_states(self, times: Times, rows: slice) -> FieldArray:
        """Read the prognostic channels at several times, `(T, C, rows, W)`.

        Raises:
            UserError: a field can't be decoded, has missing values or values out of range.
        """
        channels = self._store.channels.prognostic
        north, south, _ = rows.indices(self._store.grid[0])
        shape = (len(times), len(channels), south - north, self._store.grid[1])
        states = np.empty(shape, dtype=np.float32)
        valid = self._store.valid_mask(rows)
        for index, time in enumerate(times):
            for number, channel in enumerate(channels):
                states[index, number] = self._read_field(channel, time)[rows]
                mask = None if valid is None else valid[number]
                self._check(channel, time, states[index, number], mask, north)
        return states

    def _read_field(self, channel: Channel, time: np.datetime64) -> FieldArray:
        """Read one field on the run's grid, `(H, W)`."""
        values = self._read_converted(self._fields[channel, time])
        if (channel, time) in self._turned:
            other, turn = self._turned[channel, time]
            values = turn(values, self._read_converted(other))
        return np.asarray(values, dtype=np.float32)

    def _read_converted(self, field: _Field) -> NDArray[np.floating]:
        """Read a field in the unit of the run and on its grid, `(H, W)`."""
        scale, offset = field.conversion
        values = field.found.read().astype(np.float64) * scale + offset
        return self._regridders[field.file.where](values)

    def _check(
        self,
        channel: Channel,
        time: np.datetime64,
        field: FieldArray,
        mask: NDArray[np.bool_] | None,
        north: int,
    ) -> None:
        """Check values as those of a store are; points outside the mask become NaN.

        Raises:
            UserError: a value is missing or out of range.
        """
        where = f"{KEY}: {self._fields[channel, time].file.where}: {channel.name}"
        date = self._store.calendar.text(time)
        if find_missing(field[None], mask) is not None:
            missing = ~np.isfinite(field) if mask is None else ~np.isfinite(field) & mask
            row, column = np.argwhere(missing)[0]
            raise UserError(
                f"{where} has no value at {date}, row {north + row}, column {column}, "
                f"and {np.count_nonzero(missing)} such points in rows {north} to "
                f"{north + len(field) - 1}. Fill them, or change {KEY}."
            )
        limits = self._store.limits
        outlier = limits.farthest_outlier(channel, field)
        if outlier is not None:
            position = f"{date}, row {north + outlier[0]}, column {outlier[1]}"
            text = limits.out_of_range_message(channel, field, outlier, position)
            raise UserError(f"{KEY}: {self._fields[channel, time].file.where}: {text}")


def open_initial_files(request: ForecastRequest) -> InitialFiles | None:
    """Open the files of `init_file`; None without any."""
    return InitialFiles.open(request.init_file) if request.init_file else None


def _check_paths(text: str) -> list[str]:
    """Return the paths in `PATH` or `[PATH,...]`, which have to be local."""
    paths = parse_list(text)
    remote = next((path for path in paths if is_remote(path)), None)
    if remote is not None or not paths:
        raise UserError(f"{KEY}: needs paths of local files, got {text!r}. Copy them first.")
    checks.no_repeats(KEY, paths)
    return paths


def _open_file(path: Path, initial: np.datetime64 | None = None) -> StateFile:
    if not path.exists():
        raise UserError(f"{KEY}: {path}: no such file. Change {KEY}.")
    grib = path.is_file() and is_grib(path)
    if path.is_file() and not grib and not begins_as_netcdf(path):
        raise UserError(f"{KEY}: {path} is neither GRIB nor netCDF. Change {KEY}.")
    try:
        return GribStates(path) if grib else GriddedStates(path, initial)
    except UserError as error:  # its advice is about the key of a run's data
        text = str(error).removeprefix(f"{KEY}: ").replace("data.store", KEY)
        raise UserError(f"{KEY}: {text}") from error


def _split_time(
    dataset: xr.Dataset, path: Path, initial: np.datetime64 | None
) -> tuple[xr.Dataset, Times, Calendar]:
    """Return a dataset with at most one dim in time, called `time`, its valid times and calendar.

    Files of one forecast have a dim of lead times, those of one field only scalar times.

    Raises:
        UserError: it has forecasts from several initial times, not from `initial`, or no time at
            all.
    """
    lead = next((name for name in LEAD_DIMS if name in dataset.variables), None)
    names = ["valid_time", "time", *([lead] if lead else [])]
    if (
        initial is not None
        and lead is not None
        and dataset.sizes.get("time", 1) > 1
        # Analyses may have a lead time, too, which is 0.
        and (_lead_times(dataset, lead, path) != np.timedelta64(0, "h")).any()
    ):
        dataset = _forecast_from(dataset, initial, path)
    dataset = dataset.squeeze([x for x in names if dataset.sizes.get(x) == 1])
    dims = [name for name in names if name in dataset.dims]
    if len(dims) > 1:
        raise UserError(
            f"{KEY}: {path} has forecasts from {dataset.sizes['time']} initial times. "
            f"Select one, or change {KEY}."
        )
    valid = dataset.get("valid_time")
    dates = dataset.get("time") if valid is None else valid
    if dates is None or not is_time(dates):
        raise UserError(
            f"{KEY}: {path} has no time with dates. Give it the coordinate time, or change {KEY}."
        )
    calendar, times = calendar_of(dates.values), np.atleast_1d(decode_dates(dates.values))
    if valid is None and lead is not None:
        leads = np.atleast_1d(_lead_times(dataset, lead, path))
        # In nanoseconds, times of other calendars would overflow.
        times = times + (leads if calendar.is_standard else leads.astype("m8[s]"))
    dataset = dataset.drop_vars([name for name in names if name in dataset.variables])
    if not dims:
        return dataset, times, calendar
    if dims[0] != "time":
        dataset = dataset.rename({dims[0]: "time"})
    return dataset.assign_coords(time=("time", calendar.dates(times))), times, calendar


def _forecast_from(dataset: xr.Dataset, initial: np.datetime64, path: Path) -> xr.Dataset:
    """Return the forecast from one initial time.

    Raises:
        UserError: there is none.
    """
    values = dataset["time"].values
    starts, text = decode_dates(values), calendar_of(values).text
    if initial not in starts:
        raise UserError(
            f"{KEY}: {path} has forecasts from {text(starts[0])} to {text(starts[-1])}, but none "
            f"from {text(initial)}. Change {KEY} or init."
        )
    return dataset.isel(time=int(np.flatnonzero(starts == initial)[0]))


def _lead_times(dataset: xr.Dataset, name: str, path: Path) -> NDArray[np.timedelta64]:
    return decode_durations(dataset[name].variable, name, str(path), KEY)


def _conversion(store: Store, channel: Channel, file: StateFile, unit: str) -> tuple[float, float]:
    """Return scale and offset from the unit of a file's field to that of the run's.

    Raises:
        UserError: there is no such conversion.
    """
    name = channel.variable
    known = KNOWN_VARIABLES.get(long_name(name, channel.level)[0])
    needed = known.unit if known is not None else store.units(name)
    conversion = find_conversion(unit, needed)
    if conversion is None:
        raise UserError(
            f"{KEY}: {file.where}: {channel.name} is in {canonical_unit(unit)}, which can't be "
            f"converted to {needed}. Change {KEY}."
        )
    return conversion


def _describe_channels(channels: Sequence[Channel]) -> str:
    """Return `geopotential (50, 100 hPa), 2m_temperature`."""
    levels: dict[str, list[str]] = {}
    for channel in channels:
        level = [] if channel.level is None else [str(channel.level)]
        levels.setdefault(channel.variable, []).extend(level)
    return ", ".join(
        f"{name} on {'levels' if len(numbers) > 1 else 'level'} {', '.join(numbers)}"
        if numbers
        else name
        for name, numbers in levels.items()
    )

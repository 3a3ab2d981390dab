"""The climatology that forecasts are compared with: from a store, or fitted to the truth."""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.cache import ProgressCallback, cache_folder, create_once
from credit_dp.data.channels import Channel, suggest_names
from credit_dp.data.climatology import Climatology, ClimatologyFit, climatology_path
from credit_dp.data.dates import date_interval
from credit_dp.data.setup import run_training_pass
from credit_dp.data.sources.address import reason_of, redact_secrets
from credit_dp.data.sources.base import Times, as_slice, standardise_dims
from credit_dp.data.sources.zarr import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import check_same_rows, column_indices, reorder_columns
from credit_dp.variable_names import all_names_of, long_name

HORIZONTAL = ("latitude", "longitude")
DIM_ORDER = ("hour", "dayofyear", "level", *HORIZONTAL)
DAYS_PER_YEAR = 366

Indices = NDArray[np.intp]


class ClimatologySource(Protocol):
    """What a date's fields are on average."""

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Some of the channels at several times, `(T, C, rows, W)`; NaN where there is no value."""

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return a number for each time: times of one number are read at once."""


@final
class StoredClimatology:
    """The expected field on any date, from a store with dims `hour`, `dayofyear` and the grid's.

    Args:
        where: path or address.
        channels: those that are wanted, in order.
        latitude, longitude: the grid that fields are wanted on, row 0 northernmost.

    Raises:
        UserError: there is none, or it has not these variables, levels, days or this grid.

    Source: Rasp et al. 2024, "WeatherBench 2", section 2.4.
    """

    def __init__(
        self,
        where: str,
        channels: Sequence[Channel],
        latitude: NDArray[np.float64],
        longitude: NDArray[np.float64],
    ) -> None:
        self.where = redact_secrets(where)
        dataset = open_netcdf(where)[0] if is_netcdf(where) else open_zarr_dataset(where)[0]
        dataset = standardise_dims(dataset, self.where)
        hour = ["hour"] if "hour" in dataset.dims else []
        for dim in ("dayofyear", *HORIZONTAL, *hour):
            if dim not in dataset.dims or dim not in dataset.coords:
                raise UserError(
                    f"{self.where}: a climatology needs the dims hour, dayofyear, latitude and "
                    f"longitude with coordinates, but it has no {dim} with one among "
                    f"{', '.join(map(str, dataset.dims))}. Change climatology."
                )
        self._dataset = dataset
        self._channels = tuple(channels)
        self._stored = {c: self._stored_channel(c) for c in channels}
        self._level_indices = {c: self._level_index(stored) for c, stored in self._stored.items()}
        stored = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(stored[0] < stored[-1])
        check_same_rows(
            latitude, stored[::-1] if self._flipped else stored, self.where, "climatology"
        )
        self._columns = column_indices(
            longitude, dataset["longitude"].values.astype(np.float64), self.where, "climatology"
        )
        self._days = [int(day) for day in dataset["dayofyear"].values]
        self._hours = [int(hour) for hour in dataset["hour"].values] if "hour" in dataset else []

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Some of the channels at several times: `(T, C, rows, W)`.

        A chunk that several of the times lie in is read once.

        Raises:
            UserError: it has not one of the hours or days, or can't be read.
        """
        days, hours = self._day_and_hour_indices(times)
        of_variables = groupby(
            self._channels[channels], lambda channel: self._stored[channel].variable
        )
        parts = [self._read(name, list(of_name), days, hours) for name, of_name in of_variables]
        values = np.concatenate(parts, axis=1)
        values = values[:, :, ::-1] if self._flipped else values
        return reorder_columns(values[:, :, rows], self._columns)

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return the number of the chunk of days that each time lies in, another one each year."""
        array = self._dataset[self._stored[self._channels[0]].variable]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        length = int(chunks[array.dims.index("dayofyear")]) if chunks else 1
        years = times.astype("M8[Y]").astype(np.intp)
        return years * DAYS_PER_YEAR + self._day_and_hour_indices(times)[0] // length

    def _read(
        self, name: str, channels: Sequence[Channel], days: Indices, hours: Indices
    ) -> NDArray[np.float32]:
        """The levels of one stored variable on days and at hours of the store, `(T, C, H, W)`."""
        array = self._dataset[name].variable
        day, of_day = np.unique(days, return_inverse=True)
        hour, of_hour = np.unique(hours, return_inverse=True)
        levels = np.array([self._level_indices[channel] for channel in channels])
        selection = {"dayofyear": day, "hour": hour, "level": levels}
        # Every hour on every day, which costs no more than a few fields where chunks hold one.
        chosen = {dim: as_slice(x) for dim, x in selection.items() if dim in array.dims}
        try:
            values = array.isel(chosen).values
        except Exception as error:
            raise UserError(
                f"{self.where}: {name} can't be read from day {self._days[day[0]]} to "
                f"{self._days[day[-1]]} ({reason_of(error)}). Change climatology."
            ) from error
        dims = [str(dim) for dim in array.dims]
        absent = [dim for dim in DIM_ORDER if dim not in dims]
        values = values.reshape((1,) * len(absent) + values.shape)
        values = values.transpose([[*absent, *dims].index(dim) for dim in DIM_ORDER])
        return np.asarray(values[of_hour, of_day], dtype=np.float32)

    def _day_and_hour_indices(self, times: Times) -> tuple[Indices, Indices]:
        """Return the indices of the days and of the hours of some times.

        Raises:
            UserError: one of them is not there.
        """
        days = (times.astype("M8[D]") - times.astype("M8[Y]")) // np.timedelta64(1, "D") + 1
        hours = (times - times.astype("M8[D]")) // np.timedelta64(1, "h")
        absent = ~np.isin(days, self._days)
        if self._hours:
            absent |= ~np.isin(hours, self._hours)
        if absent.any():
            first = int(absent.argmax())
            raise UserError(
                f"{self.where}: has no value for {times[first].astype('M8[m]')}, day "
                f"{days[first]} at {hours[first]} h: its days are {self._days[0]} to "
                f"{self._days[-1]}"
                + (f", its hours {', '.join(map(str, self._hours))}" if self._hours else "")
                + ". Change climatology, or leave it out."
            )
        if not self._hours:
            return _find_indices(self._days, days), np.zeros(len(times), np.intp)
        return _find_indices(self._days, days), _find_indices(self._hours, hours)

    def _stored_channel(self, channel: Channel) -> Channel:
        """The channel as the store calls its mean: by its name, or by another of its meaning."""
        dims = {"dayofyear", "hour", "level", *HORIZONTAL}
        variable = channel.variable
        long, level = long_name(variable, channel.level)
        others = [Channel(name, level) for name in all_names_of(long)]
        for wanted in (channel, *others):
            for name in (wanted.variable, f"{wanted.variable}_mean"):
                array: xr.DataArray | None = self._dataset.get(name)
                if array is not None and {"dayofyear", *HORIZONTAL} <= set(array.dims) <= dims:
                    return Channel(name, wanted.level)
        raise UserError(
            f"{self.where}: no climatology of {variable}. "
            f"{suggest_names(variable, map(str, self._dataset.data_vars))}. "
            "Change climatology, or variables."
        )

    def _level_index(self, channel: Channel) -> int:
        """Where the level of a stored channel is; 0 if it is on none."""
        dims = self._dataset[channel.variable].dims
        if ("level" in dims) != (channel.level is not None):
            there = "no level" if channel.level is None else f"the level {channel.level}"
            raise UserError(
                f"{self.where}: {channel.variable} is needed on {there}, but has the dims "
                f"{', '.join(map(str, dims))}. "
                "Change climatology."
            )
        if channel.level is None:
            return 0
        levels = self._dataset["level"].values.tolist()
        if channel.level not in levels:
            raise UserError(
                f"{self.where}: {channel.variable} has no level {channel.level}. There are: "
                f"{', '.join(f'{level:g}' for level in levels)}. Change climatology, or levels."
            )
        return int(levels.index(channel.level))


def _find_indices(there: Sequence[int], wanted: NDArray[np.int64]) -> Indices:
    """Return where the numbers that are wanted are among those that are there."""
    order = np.argsort(there)
    return np.asarray(order[np.searchsorted(there, wanted, sorter=order)])


YEAR = np.timedelta64(365, "D")


@final
class ClimatologyPeriod:
    """The dates of the truth that a climatology is fitted to, and their description.

    Those that were asked for; else those before the first forecast if they are a year or more, so
    that climatology knows no more than a forecast; else all, which flatters it.
    """

    def __init__(self, asked: tuple[str, ...], times: Times, first_init: np.datetime64) -> None:
        earlier = times[times < first_init]
        if asked:
            self.span = list(asked)
        elif len(earlier) and first_init - earlier[0] >= YEAR:
            self.span = [_format_minute(earlier[0]), _format_minute(earlier[-1])]
        else:
            self.span = [_format_minute(times[0]), _format_minute(times[-1])]
        known = date_interval(self.span[1])[1] >= first_init
        self.description = f"fitted to the truth from {self.span[0]} to {self.span[1]}" + (
            ", which the forecasts' own dates are among" if known else ""
        )


def load_or_fit_climatology(store: Store, cache: str, report: ProgressCallback) -> Climatology:
    """The climatology of the store's training dates, from the cache or fitted now.

    Raises:
        UserError: a field can't be read, or no two of the dates are a step apart.
    """
    path = climatology_path(store, cache_folder(cache))
    found = Climatology.load(path, store.channels)
    if found is None:
        with create_once(path, lambda x: Climatology.load(x, store.channels) is not None) as folder:
            if folder is not None:
                dates = TrainingDates.of(store)
                run_training_pass(store, dates, ClimatologyFit(store, dates, folder), False, report)
        found = Climatology.load(path, store.channels)
    if found is None:
        raise OSError(f"{path}: what was just written cannot be read back")
    return found


def _format_minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))

"""The climatology that forecasts are compared with: from a store, or fitted to the truth.

`StoredClimatology` reads a store by hour and day of the year. `ClimatologyPeriod` chooses the dates
that one is fitted to, as for a run (`load_or_fit_climatology` in `credit_dp.data.setup`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, YEAR_LENGTHS, Calendar, Times
from credit_dp.data.channels import Channel, suggest_names
from credit_dp.data.dates import date_interval
from credit_dp.data.grid import Grid
from credit_dp.data.sources.address import reason_of, redact_secrets
from credit_dp.data.sources.coordinates import (
    HORIZONTAL,
    chunk_length,
    grid_of_lines,
    in_dim_order,
    projected_grid,
    standardise_dims,
)
from credit_dp.data.sources.datasets import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.data.sources.source import Source, as_slice
from credit_dp.data.units import UNSPECIFIED_UNITS, canonical_unit
from credit_dp.data.winds import lies_along_grid, stated_name, wind_difference
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import column_order, reorder_columns
from credit_dp.variable_names import all_names_of, long_name

DIM_ORDER = ("hour", "dayofyear", "level", *HORIZONTAL)
DAYS_PER_YEAR = 366

Indices = NDArray[np.intp]


class ClimatologySource(Protocol):
    """Mean fields for any date."""

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Return channels at several times, `(T, C, rows, W)`; NaN where there is no value."""

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return the chunk number of each time; times of one chunk are best read together."""


@final
class StoredClimatology:
    """Reads a climatology store with dims `hour`, `dayofyear`, and latitude and longitude.

    Args:
        calendar: of the truth, in whose years days are counted.

    Raises:
        UserError: the store can't be opened, or lacks a variable, a level, or this grid.

    Source: Rasp et al. 2024, "WeatherBench 2", section 2.4.
    """

    def __init__(
        self,
        where: str,
        channels: Sequence[Channel],
        grid: Grid,
        calendar: Calendar = STANDARD,
    ) -> None:
        self.where = redact_secrets(where)
        dataset = open_netcdf(where)[0] if is_netcdf(where) else open_zarr_dataset(where)[0]
        stored = projected_grid(dataset)
        dataset = standardise_dims(dataset, self.where)
        hour = ["hour"] if "hour" in dataset.dims else []
        for dim in ("dayofyear", *(HORIZONTAL if stored is None else ()), *hour):
            if dim not in dataset.dims or dim not in dataset.coords:
                raise UserError(
                    f"{self.where}: a climatology needs the dims hour, dayofyear, latitude and "
                    f"longitude with coordinates, but the store has no {dim} with coordinates "
                    f"among its dims {', '.join(map(str, dataset.dims))}. Change climatology."
                )
        self._dataset = dataset
        self._calendar = calendar
        self._channels = tuple(channels)
        self._stored = {c: self._stored_channel(c) for c in channels}
        self._level_indices = {c: self._level_index(stored) for c, stored in self._stored.items()}
        stored = stored or grid_of_lines(dataset)
        self._flipped = stored.rises
        stored = stored.flipped() if self._flipped else stored
        self._columns = column_order(grid, stored, self.where, "climatology")
        self._days = [int(day) for day in dataset["dayofyear"].values]
        longest = math.ceil(YEAR_LENGTHS.get(calendar.name, 366))
        if max(self._days) > longest:
            raise UserError(
                f"{self.where}: has a day {max(self._days)} of the year, but years of the "
                f"{calendar.name} calendar, which the truth has, have {longest} days. Change "
                "climatology to one of this calendar, or leave it out."
            )
        # Empty for daily means.
        self._hours = [float(hour) for hour in dataset["hour"].values] if "hour" in dataset else []

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Return channels at several times: `(T, C, rows, W)`.

        A chunk that contains several of the times is read once.

        Raises:
            UserError: the store lacks an hour or day, or can't be read.
        """
        days, hours = self._day_and_hour_indices(times)
        by_variable = groupby(
            self._channels[channels], lambda channel: self._stored[channel].variable
        )
        parts = [self._read(name, list(levels), days, hours) for name, levels in by_variable]
        values = np.concatenate(parts, axis=1)
        values = values[:, :, ::-1] if self._flipped else values
        return reorder_columns(values[:, :, rows], self._columns)

    def check_fields(self, truth: Source, forecast_units: Mapping[str, str]) -> None:
        """Refuse other units than the forecast's, and winds that lie otherwise than the truth's."""
        for channel, stored in self._stored.items():
            attributes = self._dataset[stored.variable].attrs
            needed = forecast_units[channel.variable]
            units = {canonical_unit(x) for x in (needed, str(attributes.get("units", "")))}
            if len(units - {*UNSPECIFIED_UNITS}) > 1:
                raise UserError(
                    f"{self.where}: {stored.variable} is in {attributes['units']}, but in {needed} "
                    "in the forecast. Convert it, or change climatology, or leave it out."
                )
            own = stated_name(channel.variable, attributes, truth.grid)
            names = own, truth.variables[channel.variable].standard_name
            kinds = wind_difference(*[lies_along_grid(name, truth.grid) for name in names])
            if kinds:
                raise UserError(
                    f"{self.where}: {stored.variable} is {kinds[0]}, but {kinds[1]} in the truth "
                    f"{truth.where}. Change climatology, or leave it out."
                )

    def times_of_days(self) -> list[Times]:
        """Return the times that the store has, in the leap year 2000, for each of its days."""
        hours = (np.array(self._hours or [0.0]) * 3600).astype("m8[s]")
        first = self._calendar.parse("climatology", "2000-01-01").astype("M8[s]")
        return [(first + np.timedelta64(24 * (day - 1), "h")) + hours for day in self._days]

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return the number of the chunk of days that contains each time.

        Numbers differ between years, so that a window that slides over the turn of a year reads
        the first days again and does not keep them for a year.
        """
        array = self._dataset[self._stored[self._channels[0]].variable]
        length = chunk_length(array, "dayofyear")
        years = self._calendar.years(times).astype(np.intp)
        return years * DAYS_PER_YEAR + self._day_and_hour_indices(times)[0] // length

    def _read(
        self, name: str, channels: Sequence[Channel], days: Indices, hours: Indices
    ) -> NDArray[np.float32]:
        array = self._dataset[name].variable
        unique_days, day_inverse = np.unique(days, return_inverse=True)
        unique_hours, hour_inverse = np.unique(hours, return_inverse=True)
        levels = np.array([self._level_indices[channel] for channel in channels])
        indices = {"dayofyear": unique_days, "hour": unique_hours, "level": levels}
        # One orthogonal selection reads each chunk once. It contains every hour of every day: with
        # chunks of one field these are a few fields too many.
        selection = {dim: as_slice(x) for dim, x in indices.items() if dim in array.dims}
        try:
            values = array.isel(selection).values
        except Exception as error:
            raise UserError(
                f"{self.where}: {name} can't be read from day {self._days[unique_days[0]]} to "
                f"{self._days[unique_days[-1]]} ({reason_of(error)}). Change climatology."
            ) from error
        values = in_dim_order(values, list(map(str, array.dims)), DIM_ORDER)
        return np.asarray(values[hour_inverse, day_inverse], dtype=np.float32)

    def _day_and_hour_indices(self, times: Times) -> tuple[Indices, Indices]:
        """Return the store's indices of the days and the hours of several times."""
        # Day of the year from 1, as xarray's `dayofyear`: 366 in leap years only.
        days = self._calendar.days_of_year(times)
        hours = (times - times.astype("M8[D]")) / np.timedelta64(1, "h")  # 0.5 is no hour 0
        missing = ~np.isin(days, self._days)
        if self._hours:
            missing |= ~np.isin(hours, self._hours)
        if missing.any():
            first = int(missing.argmax())
            raise UserError(
                f"{self.where}: has no value for {self._calendar.text(times[first])}, day "
                f"{days[first]} at {hours[first]:g} h: its days are {self._days[0]} to "
                f"{self._days[-1]}"
                + (
                    f", its hours {', '.join(f'{hour:g}' for hour in self._hours)}"
                    if self._hours
                    else ""
                )
                + ". Change climatology, or leave it out."
            )
        # Without the dim `hour` the store has daily means: one index for all hours.
        if not self._hours:
            return _find_indices(self._days, days), np.zeros(len(times), np.intp)
        return _find_indices(self._days, days), _find_indices(self._hours, hours)

    def _stored_channel(self, channel: Channel) -> Channel:
        """Return the channel under the name that the store has for its mean."""
        dims = {"dayofyear", "hour", "level", *HORIZONTAL}
        variable = channel.variable
        long, level = long_name(variable, channel.level)
        synonyms = [Channel(name, level) for name in all_names_of(long)]
        for candidate in (channel, *synonyms):
            # Stores with other statistics, too, name the mean with this suffix.
            for name in (candidate.variable, f"{candidate.variable}_mean"):
                array: xr.DataArray | None = self._dataset.get(name)
                if array is not None and {"dayofyear", *HORIZONTAL} <= set(array.dims) <= dims:
                    return Channel(name, candidate.level)
        raise UserError(
            f"{self.where}: no climatology of {variable}. "
            f"{suggest_names(variable, map(str, self._dataset.data_vars))}. "
            "Change climatology, or variables."
        )

    def _level_index(self, channel: Channel) -> int:
        """Return the index of a stored channel's level; 0 for a variable without levels."""
        dims = self._dataset[channel.variable].dims
        if ("level" in dims) != (channel.level is not None):
            needed = "no level" if channel.level is None else f"the level {channel.level}"
            raise UserError(
                f"{self.where}: {channel.variable} is needed on {needed}, but has the dims "
                f"{', '.join(map(str, dims))}. Change climatology."
            )
        if channel.level is None:
            return 0
        levels = self._dataset["level"].values.tolist()
        if channel.level not in levels:
            raise UserError(
                f"{self.where}: {channel.variable} has no level {channel.level}. Available: "
                f"{', '.join(f'{level:g}' for level in levels)}. Change climatology, or levels."
            )
        return int(levels.index(channel.level))


def _find_indices(available: Sequence[float], values: NDArray[Any]) -> Indices:
    # `searchsorted` needs sorted values: search in the sorted ones, return indices as stored.
    order = np.argsort(available)
    return np.asarray(order[np.searchsorted(available, values, sorter=order)])


@final
class ClimatologyPeriod:
    """The dates of the truth that a climatology is fitted to, with a description.

    By default the dates before the first forecast, if these are a year or more, so that the
    climatology knows no more than a forecast does; otherwise all dates, which makes it look better.

    Args:
        dates: first and last date in ISO format, or empty for the default.
    """

    def __init__(
        self,
        dates: tuple[str, ...],
        times: Times,
        first_init: np.datetime64,
        calendar: Calendar = STANDARD,
    ) -> None:
        earlier = times[times < first_init]
        year = np.timedelta64(int(YEAR_LENGTHS.get(calendar.name, 365)), "D")
        if dates:
            self.span = list(dates)
        elif len(earlier) and first_init - earlier[0] >= year:
            self.span = [calendar.text(time) for time in earlier[[0, -1]]]
        else:
            self.span = [calendar.text(time) for time in times[[0, -1]]]
        overlaps = date_interval("climatology_dates", self.span[1], calendar)[1] >= first_init
        self.description = f"fitted to the truth from {self.span[0]} to {self.span[1]}" + (
            ", which includes dates of the forecasts" if overlaps else ""
        )

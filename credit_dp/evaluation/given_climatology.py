"""A climatology that lies in a store of WeatherBench 2's form: by hour and day of the year."""

from collections.abc import Sequence
from typing import Protocol, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.layout import with_standard_names
from credit_dp.data.schema import Channel, suggestions
from credit_dp.data.sources.address import reason_of, without_secrets
from credit_dp.data.sources.netcdf import is_netcdf, open_netcdf
from credit_dp.data.sources.zarr_dataset import open_dataset
from credit_dp.errors import UserError
from credit_dp.evaluation.grid_match import columns_of, same_rows
from credit_dp.variable_names import UPPER, long_name, names_of_meaning

HORIZONTAL = ("latitude", "longitude")
DAYS = 366


class Expected(Protocol):
    """What a date's fields are on average."""

    def field(self, time: np.datetime64, rows: slice) -> NDArray[np.float32]:
        """All channels at a time, `(C, rows, W)`; NaN where there are no values."""


@final
class GivenClimatology:
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
        self.where = without_secrets(where)
        dataset = open_netcdf(where)[0] if is_netcdf(where) else open_dataset(where)[0]
        dataset = with_standard_names(dataset, self.where)
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
        self._levels = {c: self._level(stored) for c, stored in self._stored.items()}
        stored = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(stored[0] < stored[-1])
        same_rows(latitude, stored[::-1] if self._flipped else stored, self.where, "climatology")
        self._columns = columns_of(
            longitude, dataset["longitude"].values.astype(np.float64), self.where, "climatology"
        )
        self._days = [int(day) for day in dataset["dayofyear"].values]
        self._hours = [int(hour) for hour in dataset["hour"].values] if "hour" in dataset else []

    def field(self, time: np.datetime64, rows: slice) -> NDArray[np.float32]:
        """All channels at a time, `(C, rows, W)`.

        Raises:
            UserError: it has not this hour or day, or can't be read.
        """
        day, hour = self._place(time)
        found = []
        for channel in self._channels:
            array = self._dataset[self._stored[channel].variable].variable
            selection = {"dayofyear": day, "hour": hour, "level": self._levels[channel]}
            one = array.isel({dim: x for dim, x in selection.items() if dim in array.dims})
            try:
                values = one.transpose(*HORIZONTAL).values.astype(np.float32)
            except Exception as error:
                raise UserError(
                    f"{self.where}: {channel.name} on day {self._days[day]} can't be read "
                    f"({reason_of(error)}). Change climatology."
                ) from error
            found.append((values[::-1] if self._flipped else values)[rows][:, self._columns])
        return np.stack(found)

    def _place(self, time: np.datetime64) -> tuple[int, int]:
        """Where a time's day and hour are."""
        day = int((time.astype("M8[D]") - time.astype("M8[Y]")) / np.timedelta64(1, "D")) + 1
        hour = int((time - time.astype("M8[D]")) / np.timedelta64(1, "h"))
        if day not in self._days or (self._hours and hour not in self._hours):
            raise UserError(
                f"{self.where}: has no value for {time.astype('M8[m]')}, day {day} at {hour} h: "
                f"its days are {self._days[0]} to {self._days[-1]}"
                + (f", its hours {', '.join(map(str, self._hours))}" if self._hours else "")
                + ". Change climatology, or leave it out."
            )
        return self._days.index(day), self._hours.index(hour) if self._hours else 0

    def _stored_channel(self, channel: Channel) -> Channel:
        """The channel as the store calls its mean: by its name, or by another of its meaning."""
        dims = {"dayofyear", "hour", "level", *HORIZONTAL}
        variable = channel.variable
        long, level = long_name(variable)
        if channel.level is not None:
            long, level = UPPER.get(variable, variable), channel.level
        others = [Channel(name, level) for name in names_of_meaning(long)]
        for wanted in (channel, *others):
            for name in (wanted.variable, f"{wanted.variable}_mean"):
                array: xr.DataArray | None = self._dataset.get(name)
                if array is not None and {"dayofyear", *HORIZONTAL} <= set(array.dims) <= dims:
                    return Channel(name, wanted.level)
        raise UserError(
            f"{self.where}: no climatology of {variable}. "
            f"{suggestions(variable, map(str, self._dataset.data_vars))}. "
            "Change climatology, or variables."
        )

    def _level(self, channel: Channel) -> int:
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

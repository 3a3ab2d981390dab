"""Datasets of anemoi: all variables of a time in one array, the globe's cells in one row.

A zarr group with `data` (time, variable, ensemble, cell), `dates`, and `latitudes` and `longitudes`
of the cells; names and the shape of the grid are in its attributes.

Source: anemoi-datasets documentation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.disk import CountingStore
from credit_dp.data.layout import check_coordinates
from credit_dp.data.schema import Channel
from credit_dp.data.sources.address import without_secrets
from credit_dp.data.sources.anemoi_grid import regular_grid
from credit_dp.data.sources.anemoi_names import AnemoiNames
from credit_dp.data.sources.faults import Watch
from credit_dp.data.sources.source import Fields, Places, Source, Times, Variable, as_slice
from credit_dp.data.sources.stacked import StackedArray
from credit_dp.data.sources.stacked_group import (
    array_of,
    coordinates,
    description_of,
    open_stacked,
    values_of,
)
from credit_dp.errors import UserError


@final
class AnemoiSource(Source):
    """One dataset on a regular grid, of one member. Its missing dates are gaps."""

    def __init__(self, group: zarr.Group, disk: CountingStore, address: str) -> None:
        where = without_secrets(address)
        self.where, self._address = where, address
        attributes = dict(group.attrs)
        data = array_of(group, "data", where)
        names = _names(attributes, data, where)
        dates = _dates(group, data, where)
        missing = np.array(attributes.get("missing_dates") or [], dtype="datetime64[ns]")
        self._kept = np.flatnonzero(~np.isin(dates, missing))
        self.times: Times = dates[self._kept]
        latitude, self.longitude = regular_grid(group, attributes, where)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        check_coordinates(coordinates(self), where)
        self.variables: Mapping[str, Variable] = names.variables
        self._places = names.places
        self._data = StackedArray(data, where, dates, Watch(address, ["data"]))
        self.counters = [disk]
        disk.reset()

    @classmethod
    def open(cls, where: str) -> "AnemoiSource":
        """Open the dataset at a path or address.

        Raises:
            UserError: there is none, or its grid is not regular, or it has several members.
        """
        return cls(*open_stacked(where, ("data",)), where)

    def read(self, channels: Sequence[Channel], places: Places, rows: slice) -> Fields:
        """See `Source`."""
        height, width = self.grid
        north, south, _ = rows.indices(height)
        if self._flipped:
            north, south = height - south, height - north
        wanted = [self._places[channel] for channel in channels]
        cells = slice(north * width, south * width)
        values = self._data.read(as_slice(self._kept[places]), wanted, (0, cells))
        fields = values.reshape(*values.shape[:2], south - north, width)
        return fields[:, :, ::-1] if self._flipped else fields

    def together(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: all of them."""
        return [list(channels)]

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        return self._data.times_together

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`; a chunk of cells that begins or ends within a row reaches into both."""
        times, variables, _, cells = self._data.array.chunks
        height, width = self.grid
        whole = cells // width if cells % width == 0 else cells // width + 2
        return times, variables, min(height, whole), width

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`."""
        height, width = self.grid
        stored = height - 1 - row if self._flipped else row
        cell = stored * width + column
        time = int(self._kept[place])
        return f"{self.where}, {self._data.chunk((time, self._places[channel], 0, cell))}"

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        return description_of(self, self._address, variables)


def _names(attributes: Mapping[str, Any], data: zarr.Array[Any], where: str) -> AnemoiNames:
    """The variables.

    Raises:
        UserError: there is not one name for each, or more than one member.
    """
    if data.ndim != 4:
        raise UserError(
            f"{where}: data needs the dims time, variable, ensemble, cell, but has "
            f"{data.ndim} dims. Change data.store."
        )
    if data.shape[2] != 1:
        raise UserError(
            f"{where}: is an ensemble of {data.shape[2]} members, but one is needed. "
            "Make a dataset of one member, or change data.store."
        )
    names = attributes.get("variables")
    if not isinstance(names, list) or len(names) != data.shape[1]:
        raise UserError(
            f"{where}: needs an attribute variables with {data.shape[1]} names, but has {names!r}. "
            "Change data.store."
        )
    return AnemoiNames.of([str(name) for name in names], attributes)


def _dates(group: zarr.Group, data: zarr.Array[Any], where: str) -> Times:
    """`(T,)` of all of the array, missing ones too.

    Raises:
        UserError: they are no dates, or not one for each time.
    """
    dates = values_of(group, "dates", where)
    if not np.issubdtype(dates.dtype, np.datetime64) or dates.shape != data.shape[:1]:
        raise UserError(
            f"{where}: needs a date for each of {data.shape[0]} times, but its dates are "
            f"{dates.dtype} of shape {dates.shape}. Change data.store."
        )
    return dates.astype("datetime64[ns]")

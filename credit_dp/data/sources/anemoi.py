"""Datasets of anemoi: all variables of a time in one array, the globe's cells in one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.base import (
    AliasedVariables,
    Fields,
    Indexer,
    Source,
    Times,
    VariableInfo,
    as_slice,
    check_coordinates,
)
from credit_dp.data.sources.stacked import (
    StackedArray,
    coordinate_dataset,
    describe_source,
    get_array,
    open_stacked,
    read_array,
)
from credit_dp.data.sources.storage import CountingStore, StoreChangeDetector
from credit_dp.data.sources.stored_names import StoredNames
from credit_dp.errors import UserError
from credit_dp.variable_names import STATIC_NAMES, long_name

Degrees = NDArray[np.float64]
SAME = 1e-3  # degrees by which cells of one row may differ: they are often kept as float32
N320 = 542080  # cells; of ERA5's own grid
COARSEST = 16  # of octahedral grids that anybody uses


def read_regular_grid(
    group: zarr.Group, attributes: Mapping[str, Any], where: str
) -> tuple[Degrees, Degrees]:
    """`(H,)` latitudes and `(W,)` longitudes, in the order of the cells.

    Raises:
        UserError: the cells are not the points of rows and columns, row after row.
    """
    latitudes = read_array(group, "latitudes", where).astype(np.float64)
    longitudes = read_array(group, "longitudes", where).astype(np.float64)
    cells = group["data"].shape[3]  # type: ignore[union-attr]
    if latitudes.shape != (cells,) or longitudes.shape != (cells,):
        raise UserError(
            f"{where}: needs a latitude and a longitude for each of {cells} cells, but has "
            f"{latitudes.shape} and {longitudes.shape}. Change data.store."
        )
    shape = attributes.get("field_shape") or []
    if len(shape) == 2 and int(shape[0]) * int(shape[1]) == cells:
        rows, columns = latitudes.reshape(*shape), longitudes.reshape(*shape)
        if np.ptp(rows, axis=1).max() < SAME and np.ptp(columns, axis=0).max() < SAME:
            return rows[:, 0], columns[0]
    raise UserError(
        f"{where}: is on {_grid_name(cells, attributes)}, but a regular grid is needed: rows "
        "of one "
        "latitude with the same longitudes, and field_shape [rows, columns]. Make the dataset on a "
        "regular grid such as 1.0/1.0 degrees, or change data.store."
    )


def _grid_name(cells: int, attributes: Mapping[str, Any]) -> str:
    """The grid as people call it."""
    said = str(attributes.get("resolution") or _reduced_grid_name(cells))
    reduced = said[:1].lower() in ("n", "o") and said[1:].isdecimal()
    kind = "the reduced Gaussian grid " if reduced else "the grid "
    return (
        f"{kind}{said.upper()} of {cells} cells" if said else f"an irregular grid of {cells} cells"
    )


def _reduced_grid_name(cells: int) -> str:
    """The octahedral reduced Gaussian grid of so many cells, or N320; empty if it is neither.

    Row n from the pole of an octahedral grid has 4 n + 16 cells, so ON has 4 N (N + 9).

    Source: ECMWF, octahedral reduced Gaussian grid.
    """
    if cells == N320:
        return "N320"
    number = round((81 + cells) ** 0.5 / 2 - 4.5)
    return f"O{number}" if 4 * number * (number + 9) == cells and number >= COARSEST else ""


@final
@dataclass(frozen=True)
class AnemoiVariables:
    """What a dataset has.

    Attributes:
        variables: by long names; each is found by the dataset's own name and others too.
        places: of each channel along the variables of the array, under all its names.
    """

    variables: AliasedVariables
    indices: Mapping[Channel, int]

    @classmethod
    def of(cls, names: list[str], attributes: Mapping[str, Any]) -> "AnemoiVariables":
        """From the names in the array's order, and what the attributes say of them.

        Constant in time is what the attributes say is, and what is known to be.
        """
        about = attributes.get("variables_metadata") or {}
        constants = {*STATIC_NAMES, *(attributes.get("constant_fields") or ())}
        constants |= {
            name
            for name in names
            if _variable_metadata(about, name).get("constant_in_time") is True
        }
        long: dict[str, VariableInfo] = {}
        own: dict[str, VariableInfo] = {}
        places: dict[Channel, int] = {}
        for place, name in enumerate(names):
            timed = name not in constants
            unit = str(_variable_metadata(about, name).get("units") or "")
            own[name] = VariableInfo(timed, (), unit)
            places[Channel(name)] = place
            variable, level = long_name(name)
            levels = long[variable].levels if variable in long else ()
            long[variable] = VariableInfo(
                timed, levels if level is None else (*levels, level), unit
            )
            places[Channel(variable, level)] = place
        found = StoredNames.of({**own, **long})
        aliases = {**found.variables.aliases, **own}
        return cls(AliasedVariables(long, aliases), found.under_all_names(places))


def _variable_metadata(about: Any, name: str) -> Mapping[str, Any]:
    found = about.get(name) if isinstance(about, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@final
class AnemoiSource(Source):
    """One dataset on a regular grid, of one member. Its missing dates are gaps."""

    def __init__(self, group: zarr.Group, disk: CountingStore, address: str) -> None:
        where = redact_secrets(address)
        self.where, self._address = where, address
        attributes = dict(group.attrs)
        data = get_array(group, "data", where)
        names = _read_variables(attributes, data, where)
        dates = _read_dates(group, data, where)
        missing = np.array(attributes.get("missing_dates") or [], dtype="datetime64[ns]")
        self._present = np.flatnonzero(~np.isin(dates, missing))
        self.times: Times = dates[self._present]
        latitude, self.longitude = read_regular_grid(group, attributes, where)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        check_coordinates(coordinate_dataset(self), where)
        self.variables: Mapping[str, VariableInfo] = names.variables
        self._channel_indices = names.indices
        self._data = StackedArray(data, where, dates, StoreChangeDetector(address, ["data"]))
        self.counters = [disk]
        disk.reset()

    @classmethod
    def open(cls, where: str) -> "AnemoiSource":
        """Open the dataset at a path or address.

        Raises:
            UserError: there is none, or its grid is not regular, or it has several members.
        """
        return cls(*open_stacked(where, ("data",)), where)

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`."""
        height, width = self.grid
        north, south, _ = rows.indices(height)
        if self._flipped:
            north, south = height - south, height - north
        wanted = [self._channel_indices[channel] for channel in channels]
        cells = slice(north * width, south * width)
        values = self._data.read(as_slice(self._present[places]), wanted, (0, cells))
        fields = values.reshape(*values.shape[:2], south - north, width)
        return fields[:, :, ::-1] if self._flipped else fields

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
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
        time = int(self._present[place])
        return (
            f"{self.where}, "
            f"{self._data.chunk_name((time, self._channel_indices[channel], 0, cell))}"
        )

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        return describe_source(self, self._address, variables)


def _read_variables(
    attributes: Mapping[str, Any], data: zarr.Array[Any], where: str
) -> AnemoiVariables:
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
    return AnemoiVariables.of([str(name) for name in names], attributes)


def _read_dates(group: zarr.Group, data: zarr.Array[Any], where: str) -> Times:
    """`(T,)` of all of the array, missing ones too.

    Raises:
        UserError: they are no dates, or not one for each time.
    """
    dates = read_array(group, "dates", where)
    if not np.issubdtype(dates.dtype, np.datetime64) or dates.shape != data.shape[:1]:
        raise UserError(
            f"{where}: needs a date for each of {data.shape[0]} times, but its dates are "
            f"{dates.dtype} of shape {dates.shape}. Change data.store."
        )
    return dates.astype("datetime64[ns]")

"""Reads datasets of anemoi: all variables of a time in one array, with all grid cells in one dim.

The cells have to be the points of a regular grid, so that rows of latitude can be cut out of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.coordinates import are_consecutive, check_coordinates
from credit_dp.data.sources.names import StoredNames
from credit_dp.data.sources.source import (
    AliasedVariables,
    Fields,
    Indexer,
    Source,
    Times,
    VariableInfo,
    as_slice,
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
from credit_dp.data.sources.sums import StatedSums
from credit_dp.errors import UserError
from credit_dp.variable_names import STATIC_NAMES, long_name

Degrees = NDArray[np.float64]
GRID_TOLERANCE = 1e-3  # degrees within one row or column: coordinates are often stored as float32
N320_CELLS = 542080  # ERA5's native grid
MIN_OCTAHEDRAL = 16  # the coarsest octahedral grid in use


def read_regular_grid(
    group: zarr.Group, attributes: Mapping[str, Any], where: str
) -> tuple[Degrees, Degrees]:
    """Return `(H,)` latitudes and `(W,)` longitudes in the order of the cells.

    Raises:
        UserError: the cells are not the points of a regular grid, row after row.
    """
    latitudes = read_array(group, "latitudes", where).astype(np.float64)
    longitudes = read_array(group, "longitudes", where).astype(np.float64)
    num_cells = group["data"].shape[3]  # type: ignore[union-attr]
    if latitudes.shape != (num_cells,) or longitudes.shape != (num_cells,):
        raise UserError(
            f"{where}: needs a latitude and a longitude for each of {num_cells} cells, but has "
            f"{latitudes.shape} and {longitudes.shape}. Change data.store."
        )
    shape = attributes.get("field_shape") or []
    if len(shape) == 2 and int(shape[0]) * int(shape[1]) == num_cells:
        rows, columns = latitudes.reshape(*shape), longitudes.reshape(*shape)
        if (
            np.ptp(rows, axis=1).max() < GRID_TOLERANCE
            and np.ptp(columns, axis=0).max() < GRID_TOLERANCE
        ):
            return rows[:, 0], columns[0]
    raise UserError(
        f"{where}: is on {_grid_name(num_cells, attributes)}, but a regular grid is needed: rows "
        "of one latitude with the same longitudes, and field_shape [rows, columns]. Make the "
        "dataset on a regular grid such as 1.0/1.0 degrees, or change data.store."
    )


def _grid_name(num_cells: int, attributes: Mapping[str, Any]) -> str:
    """Return the usual name of a grid, for a message."""
    name = str(attributes.get("resolution") or _reduced_grid_name(num_cells))
    reduced = name[:1].lower() in ("n", "o") and name[1:].isdecimal()
    kind = "the reduced Gaussian grid " if reduced else "the grid "
    if not name:
        return f"an irregular grid of {num_cells} cells"
    return f"{kind}{name.upper()} of {num_cells} cells"


def _reduced_grid_name(num_cells: int) -> str:
    """Return the name of the octahedral or N320 grid with this many cells; empty if it is neither.

    Row n from the pole of an octahedral grid has 4 n + 16 cells, so ON has 4 N (N + 9).

    Source: ECMWF, octahedral reduced Gaussian grid.
    """
    if num_cells == N320_CELLS:
        return "N320"
    number = round((81 + num_cells) ** 0.5 / 2 - 4.5)  # solves 4 N (N + 9) = cells for N
    is_octahedral = 4 * number * (number + 9) == num_cells and number >= MIN_OCTAHEDRAL
    return f"O{number}" if is_octahedral else ""


@final
@dataclass(frozen=True)
class AnemoiVariables:
    """The variables of a dataset.

    Attributes:
        variables: by long names; the dataset's own names and others are aliases.
        indices: of each channel along the variable dim of the array, under all its names.
    """

    variables: AliasedVariables
    indices: Mapping[Channel, int]

    @classmethod
    def of(cls, names: list[str], attributes: Mapping[str, Any]) -> "AnemoiVariables":
        """Combine the names, in the array's order, with what the attributes say about them.

        A variable is constant in time if the attributes say so, or if it is known to be.
        """
        metadata = attributes.get("variables_metadata") or {}
        constants = {*STATIC_NAMES, *(attributes.get("constant_fields") or ())}
        constants |= {
            name
            for name in names
            if _variable_metadata(metadata, name).get("constant_in_time") is True
        }
        by_long_name: dict[str, VariableInfo] = {}
        by_stored_name: dict[str, VariableInfo] = {}
        indices: dict[Channel, int] = {}
        for index, name in enumerate(names):
            has_time = name not in constants
            unit = str(_variable_metadata(metadata, name).get("units") or "")
            sums = _stated_sums(_variable_metadata(metadata, name))
            by_stored_name[name] = VariableInfo(
                has_time, (), unit, sums_stated_by=sums.by, sum_hours=sums.hours
            )
            # Under its own name, such as `z_500`, and below as a level of the variable.
            indices[Channel(name)] = index
            variable, level = long_name(name)
            levels = by_long_name[variable].levels if variable in by_long_name else ()
            by_long_name[variable] = VariableInfo(
                has_time,
                levels if level is None else (*levels, level),
                unit,
                sums_stated_by=sums.by,
                sum_hours=sums.hours,
            )
            indices[Channel(variable, level)] = index
        for name, variable_info in by_long_name.items():
            if are_consecutive(sorted(variable_info.levels)):  # model levels: no pressures do so
                by_long_name[name] = replace(variable_info, model_levels=True)
        stored_names = StoredNames.of({**by_stored_name, **by_long_name})
        aliases = {**stored_names.variables.aliases, **by_stored_name}
        return cls(AliasedVariables(by_long_name, aliases), stored_names.under_all_names(indices))


def _variable_metadata(metadata: Any, name: str) -> Mapping[str, Any]:
    entry = metadata.get(name) if isinstance(metadata, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _stated_sums(metadata: Mapping[str, Any]) -> StatedSums:
    """Return what the metadata of an accumulated variable say: its period in hours or as texts."""
    period = metadata.get("period")
    if metadata.get("process") != "accumulation" or not isinstance(period, list):
        return StatedSums()
    try:
        # Hours, as numbers or as texts such as `6h` and `6:00:00`.
        begin, end = (float(str(bound).split(":")[0].removesuffix("h")) for bound in period)
    except ValueError:
        return StatedSums()
    return StatedSums("period in variables_metadata", end - begin) if end > begin else StatedSums()


@final
class AnemoiSource(Source):
    """A source that reads one dataset on a regular grid with one ensemble member.

    The dataset's missing dates are left out of `times`, so that they are gaps.
    """

    def __init__(self, group: zarr.Group, store: CountingStore, address: str) -> None:
        where = redact_secrets(address)
        self.where = where
        self._address = address
        attributes = dict(group.attrs)
        data = get_array(group, "data", where)
        names = _read_variables(attributes, data, where)
        dates = _read_dates(group, data, where)
        missing = np.array(attributes.get("missing_dates") or [], dtype="datetime64[ns]")
        self._present = np.flatnonzero(~np.isin(dates, missing))
        # The array has an entry for each missing date: `_present` are the indices of all others.
        self.times: Times = dates[self._present]
        latitude, self.longitude = read_regular_grid(group, attributes, where)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        check_coordinates(coordinate_dataset(self), where)
        self.variables: Mapping[str, VariableInfo] = names.variables
        self._channel_indices = names.indices
        self._data = StackedArray(data, where, dates, StoreChangeDetector(address, ["data"]))
        self.counters = [store]
        store.reset()

    @classmethod
    def open(cls, where: str) -> "AnemoiSource":
        """Open the dataset at a path or address.

        Raises:
            UserError: there is no dataset, its grid is not regular, or it has several members.
        """
        return cls(*open_stacked(where, ("data",)), where)

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> Fields:
        """See `Source`."""
        height, width = self.grid
        north, south, _ = rows.indices(height)
        if self._flipped:  # rows are stored from the south
            north, south = height - south, height - north
        indices = [self._channel_indices[channel] for channel in channels]
        cells = slice(north * width, south * width)
        values = self._data.read(as_slice(self._present[times]), indices, (0, cells))
        fields = values.reshape(*values.shape[:2], south - north, width)
        return fields[:, :, ::-1] if self._flipped else fields

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`; all channels share their chunks."""
        return [list(channels)]

    def times_per_file(self, channel: Channel) -> int:
        """See `Source`."""
        return self._data.times_per_file

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`; a chunk of cells that starts or ends within a row touches that row."""
        num_times, num_variables, _, num_cells = self._data.array.chunks
        height, width = self.grid
        chunk_rows = num_cells // width if num_cells % width == 0 else num_cells // width + 2
        return num_times, num_variables, min(height, chunk_rows), width

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """See `Source`."""
        height, width = self.grid
        stored_row = height - 1 - row if self._flipped else row
        cell = stored_row * width + column
        time = int(self._present[time])
        return (
            f"{self.where}, "
            f"{self._data.chunk_name((time, self._channel_indices[channel], 0, cell))}"
        )

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        return describe_source(self, self._address, variables, ["data"])


def _read_variables(
    attributes: Mapping[str, Any], data: zarr.Array[Any], where: str
) -> AnemoiVariables:
    """Return the variables of a dataset.

    Raises:
        UserError: the array needs one name for each variable, and exactly one member.
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
    """Return all dates of the array, `(T,)`, including missing ones.

    Raises:
        UserError: the array `dates` does not hold one date for each time.
    """
    dates = read_array(group, "dates", where)
    if not np.issubdtype(dates.dtype, np.datetime64) or dates.shape != data.shape[:1]:
        raise UserError(
            f"{where}: needs a date for each of {data.shape[0]} times, but its dates are "
            f"{dates.dtype} of shape {dates.shape}. Change data.store."
        )
    return dates.astype("datetime64[ns]")

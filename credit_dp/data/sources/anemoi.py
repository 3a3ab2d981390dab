"""Reads datasets of anemoi: all variables of a time in one array, all cells in one dim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import zarr

from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.coordinates import are_consecutive, check_coordinates
from credit_dp.data.sources.names import StoredNames
from credit_dp.data.sources.rows import CellRows
from credit_dp.data.sources.source import AliasedVariables, Indexer, Source, VariableInfo, as_slice
from credit_dp.data.sources.stacked import (
    StackedArray,
    describe_source,
    get_array,
    open_stacked,
    read_array,
    times_dataset,
)
from credit_dp.data.sources.storage import CountingStore, StoreChangeDetector
from credit_dp.data.sources.sums import StatedSums
from credit_dp.errors import UserError
from credit_dp.variable_names import STATIC_NAMES, long_name


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
    def of(
        cls, names: list[str], attributes: Mapping[str, Any], has_members: bool = False
    ) -> "AnemoiVariables":
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
            entry = _variable_metadata(metadata, name)
            sums = _stated_sums(entry)
            info = by_stored_name[name] = VariableInfo(
                has_time=name not in constants,
                units=str(entry.get("units") or ""),
                sums_stated_by=sums.by,
                sum_hours=sums.hours,
                has_members=has_members,
            )
            # Under its own name, such as `z_500`, and below as a level of the variable.
            indices[Channel(name)] = index
            variable, level = long_name(name)
            levels = by_long_name[variable].levels if variable in by_long_name else ()
            levels = levels if level is None else (*levels, level)
            by_long_name[variable] = replace(info, levels=levels)
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
    """A source that reads one dataset; the members of an ensemble are numbered from 0.

    The dataset's missing dates are left out of `times`, so that they are gaps.
    """

    cells: CellRows

    def __init__(self, group: zarr.Group, store: CountingStore, address: str) -> None:
        where = redact_secrets(address)
        self.where = where
        self._address = address
        attributes = dict(group.attrs)
        data = get_array(group, "data", where)
        names = _read_variables(attributes, data, where)
        dates = _read_dates(group, data, where)
        missing = np.array(attributes.get("missing_dates") or [], dtype="datetime64[ns]")
        members = data.shape[2]
        self.members = tuple(range(members)) if members > 1 else ()
        self._present = np.flatnonzero(~np.isin(dates, missing))
        # The array has an entry for each missing date: `_present` are the indices of all others.
        self.times: Times = dates[self._present]
        latitudes, longitudes = (
            read_array(group, x, where).astype(np.float64) for x in ("latitudes", "longitudes")
        )
        if not latitudes.shape == longitudes.shape == data.shape[3:]:
            raise UserError(
                f"{where}: needs a latitude and a longitude for each of {data.shape[3]} cells, but "
                f"has {latitudes.shape} and {longitudes.shape}. Change data.store."
            )
        name = str(attributes.get("resolution") or "")
        self.cells = CellRows(latitudes, longitudes, where, name)
        self.grid = self.cells.grid
        check_coordinates(times_dataset(self), where, grid=self.grid)
        self.variables: Mapping[str, VariableInfo] = names.variables
        self._channel_indices = names.indices
        self._data = StackedArray(data, where, dates, StoreChangeDetector(address, ["data"]))
        self.counters = [store]
        store.reset()

    @classmethod
    def open(cls, where: str) -> "AnemoiSource":
        """Open the dataset at a path or address."""
        return cls(*open_stacked(where, ("data",)), where)

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        return self.cells.fields(self.read_values(channels, times, rows), rows)

    def read_values(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        indices = [self._channel_indices[channel] for channel in channels]
        cells = self.cells.cells(rows)
        values = self._data.read(as_slice(self._present[times]), indices, (self._member, cells))
        return self.cells.in_order(values, rows)

    @property
    def _member(self) -> int:
        return self.members[0] if self.members else 0

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """All channels share their chunks."""
        return [list(channels)]

    def times_per_file(self, channel: Channel) -> int:
        return self._data.times_per_file

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """A chunk of cells that starts or ends within a row touches that row."""
        num_times, num_variables, _, num_cells = self._data.array.chunks
        return num_times, num_variables, self.cells.rows_touched(num_cells), self.grid[1]

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        cell = self.cells.cell(row, column)
        time = int(self._present[time])
        return (
            f"{self.where}, "
            f"{self._data.chunk_name((time, self._channel_indices[channel], self._member, cell))}"
        )

    def description(self, variables: Sequence[str]) -> list[object]:
        description = describe_source(self, self._address, variables, ["data"])
        return [*description, list(self.members)] if self.members else description


def _read_variables(
    attributes: Mapping[str, Any], data: zarr.Array[Any], where: str
) -> AnemoiVariables:
    """Return the variables of a dataset."""
    if data.ndim != 4:
        raise UserError(
            f"{where}: data needs the dims time, variable, ensemble, cell, but has "
            f"{data.ndim} dims. Change data.store."
        )
    names = attributes.get("variables")
    if not isinstance(names, list) or len(names) != data.shape[1]:
        raise UserError(
            f"{where}: needs an attribute variables with {data.shape[1]} names, but has {names!r}. "
            "Change data.store."
        )
    return AnemoiVariables.of([str(name) for name in names], attributes, data.shape[2] > 1)


def _read_dates(group: zarr.Group, data: zarr.Array[Any], where: str) -> Times:
    """Return all dates of the array, `(T,)`, including missing ones."""
    dates = read_array(group, "dates", where)
    if not np.issubdtype(dates.dtype, np.datetime64) or dates.shape != data.shape[:1]:
        raise UserError(
            f"{where}: needs a date for each of {data.shape[0]} times, but its dates are "
            f"{dates.dtype} of shape {dates.shape}. Change data.store."
        )
    return dates.astype("datetime64[ns]")

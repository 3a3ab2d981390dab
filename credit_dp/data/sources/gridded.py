"""Reads stores with one array per variable: zarr groups, netCDF and GRIB files.

The form is that of WeatherBench 2, ARCO-ERA5 or the CDS. `GriddedSource` reads the dataset that
`datasets.py` or `grib_file.py` opens.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray

from credit_dp.data.calendar import Times, calendar_of, decode_dates
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray, Grid
from credit_dp.data.sources.address import local_path, redact_secrets
from credit_dp.data.sources.coordinates import (
    HORIZONTAL,
    MEMBER,
    check_coordinates,
    find_coordinates,
    grid_of_lines,
    has_model_levels,
    in_dim_order,
    number_members,
    projected_grid,
    scalar_level,
    squeeze_other_dims,
    standardise_dims,
    whole_number_levels,
)
from credit_dp.data.sources.datasets import (
    DatasetCounter,
    RequestedBytesCounter,
    is_netcdf,
    open_netcdf,
    open_zarr_dataset,
)
from credit_dp.data.sources.grib_file import open_grib
from credit_dp.data.sources.names import StoredNames
from credit_dp.data.sources.rows import CellRows
from credit_dp.data.sources.source import TIME_BOUNDS, Indexer, Source, VariableInfo, as_slice
from credit_dp.data.sources.storage import (
    CountingStore,
    StoreChangeDetector,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.data.sources.sums import GRIB_STEPS, read_time_bounds, stated_sums
from credit_dp.data.sources.wrf import STAGGERED
from credit_dp.data.units import CONVERSIONS, UNSPECIFIED_UNITS, canonical_unit
from credit_dp.data.winds import stated_name

logger = logging.getLogger(__name__)

ORDER = ("time", "level", "latitude", "longitude")
EXPVER = "expver"  # the dim of ERA5 and ERA5T, of which each time has values of one
STEP_ADVICE = (
    "its fields at the hours of forecasts (step) need a single dim of time. Select one, as in "
    "dataset.isel(step=0), convert the GRIB file with cfgrib's time_dims=['valid_time'], or set "
    "data.store to the GRIB file"
)
STAGGERED_ADVICE = "fields on edges of cells can't be used: average them to the centres first"
NEEDED = "it needs latitude and longitude, and no others but time, level and member"


HYBRID_NAMES = ("hyai", "hybi")
REFERENCE_PRESSURE = 1e5  # Pa


def hybrid_coefficients(
    dataset: xr.Dataset,
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return a, in Pa, and b at the interfaces of model levels, from the top: `hyai` and `hybi`.

    ECMWF's files have a in Pa; those of CAM have it as a multiple of P0. Without a unit, numbers up
    to 1 are multiples. None if there are no coefficients, or none that can be used: a in another
    unit, pressures that don't rise, or levels that are numbered from the ground.

    Call this before `standardise_dims` renames the dims.
    """
    if not all(name in dataset.variables and dataset[name].ndim == 1 for name in HYBRID_NAMES):
        return None
    a, b = (np.asarray(dataset[name].values, np.float64) for name in HYBRID_NAMES)
    if a.shape != b.shape or not np.isfinite([a, b]).all():
        return None
    unit = canonical_unit(str(dataset[HYBRID_NAMES[0]].attrs.get("units", "")))
    if unit in UNSPECIFIED_UNITS:
        unit = "Pa" if np.abs(a).max(initial=0) > 1 else "1"
    if unit == "1":
        a = a * (float(dataset["P0"]) if "P0" in dataset.variables else REFERENCE_PRESSURE)
    elif unit != "Pa":
        if (unit, "Pa") not in CONVERSIONS:
            return None
        a = a * CONVERSIONS[unit, "Pa"][0]
    steps = np.diff(a + REFERENCE_PRESSURE * b)
    level = find_coordinates(dataset).get("level")
    if len(steps) and (steps < 0).all():
        a, b, steps = a[::-1], b[::-1], -steps[::-1]
        # Level 1 is the uppermost, so the numbers fall with the coefficients.
        if level is not None and (np.diff(dataset[level].values) > 0).any():
            return None
    return (a, b) if len(steps) and (steps > 0).all() else None


@final
class GriddedSource(Source):
    """A source that reads one zarr or netCDF dataset with one array per variable.

    A dataset without a time axis has no times; it can only be combined with others.
    """

    def __init__(
        self,
        dataset: xr.Dataset,
        counter: DatasetCounter,
        where: str,
        static: Collection[str] = (),
    ) -> None:
        self.where = redact_secrets(where)
        # Before the dims are renamed: the names say which levels they are.
        model_levels = has_model_levels(dataset)
        only_level = scalar_level(dataset)
        self.hybrid = hybrid_coefficients(dataset)
        self.time_bounds = read_time_bounds(dataset)
        sums_by = GRIB_STEPS if GRIB_STEPS in dataset.coords else TIME_BOUNDS
        stored = dataset
        dataset = squeeze_other_dims(dataset)
        grid = projected_grid(dataset)
        dataset, self._members = number_members(standardise_dims(dataset, self.where), stored)
        self.members = self._members
        timed = "time" in dataset.dims
        if "latitude" in dataset.dims and "longitude" in dataset.coords.keys() - dataset.dims:
            latitudes, longitudes = (dataset[x].values.astype(np.float64) for x in HORIZONTAL)
            self.cells = CellRows(latitudes, longitudes, self.where)
            grid = self.cells.grid
        check_coordinates(dataset, self.where, timed, grid)
        dates = dataset["time"].values if timed else np.empty(0, "M8[ns]")
        self.calendar = calendar_of(dates)
        self.times: Times = decode_dates(dates)
        grid = grid or grid_of_lines(dataset)
        self._flipped = grid.rises
        self.grid = grid.flipped() if self._flipped else grid
        bounds_by = "" if self.time_bounds is None else sums_by
        stored_variables = _variables(dataset, self.where, model_levels, bounds_by, grid)
        for name in _bounds_of_cells(stored) & stored_variables.keys():
            if stored_variables[name].problem:
                del stored_variables[name]
        self._names = StoredNames.of(stored_variables, static, only_level)
        self.variables: Mapping[str, VariableInfo] = self._names.variables
        if EXPVER in dataset.dims:
            if EXPVER in dataset.coords:
                dataset = dataset.sortby(EXPVER)  # 1 is ERA5, 5 is ERA5T
            logger.info(
                "%s: combines the versions along expver: ERA5 where it has values, otherwise ERA5T",
                self.where,
            )
        self._dataset = dataset
        self._counter = counter
        self.counters = [counter]
        self._address = where
        self.title = str(dataset.attrs.get("title", ""))
        self._change_detector = StoreChangeDetector(where, list(self.variables))
        counter.reset()

    @classmethod
    def open(cls, where: str, static: Collection[str] = ()) -> "GriddedSource":
        """Open the zarr store at a path or address, or the netCDF file at a path."""
        dataset: xr.Dataset
        counter: DatasetCounter
        dataset, counter = open_netcdf(where) if is_netcdf(where) else open_zarr_dataset(where)
        return cls(dataset, counter, where, static)

    @classmethod
    def open_grib(cls, where: str, static: Collection[str] = ()) -> "list[GriddedSource]":
        """Open the GRIB file at a path: a source for each variable and kind of level."""
        datasets = open_grib(local_path(where))
        return [cls(dataset, RequestedBytesCounter(), where, static) for dataset in datasets]

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read variable by variable."""
        if self.cells is not None:
            return self.cells.fields(self.read_values(channels, times, rows), rows)
        return self._read(channels, times, rows)

    def read_values(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        fields = self._read(channels, times, rows)
        values = fields.reshape(*fields.shape[:2], -1)
        return values if self.cells is None else self.cells.in_order(values, rows)

    def _read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read rows and columns `(T, C, rows, W)`, or cells `(T, C, n, 1)` as they are stored."""
        parts = []
        # Adjacent channels of one variable are one read, with several levels.
        stored_channels = map(self._names.stored_channel, channels)
        for name, run in groupby(stored_channels, lambda channel: channel.variable):
            levels = [channel.level for channel in run if channel.level is not None]
            parts.append(self._read_variable(name, levels, times, rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """The levels of a variable share chunks."""
        return [list(group) for _, group in groupby(channels, self._stored_variable)]

    def times_per_file(self, channel: Channel) -> int:
        array = self._dataset[self._stored_variable(channel)]
        encoding = array.encoding
        chunks = encoding.get("shards") or encoding.get("chunks") or encoding.get("chunksizes")
        # A netCDF variable that is not chunked can be read at any time without the others.
        return int(chunks[array.dims.index("time")]) if chunks else 1

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        array = self._dataset[self._stored_variable(channel)]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        sizes = dict(zip(map(str, array.dims), map(int, chunks or ()), strict=bool(chunks)))
        time, level, rows, columns = (sizes.get(dim, 1) for dim in ORDER)
        if self.cells is not None:
            rows, columns = self.cells.rows_touched(rows), self.grid[1]
        return time, level, rows, columns

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """A netCDF file without chunks is named alone."""
        stored_channel = self._names.stored_channel(channel)
        name, level = stored_channel.variable, stored_channel.level
        array = self._dataset[name]
        levels = self.variables[name].levels
        indices = {
            "time": time,
            "level": 0 if level is None else levels.index(level),
            "latitude": self.grid[0] - 1 - row if self._flipped else row,
            "longitude": column,
            MEMBER: self._member,
        }
        if self.cells is not None:
            indices["latitude"] = self.cells.cell(row, column)
        encoding = array.encoding
        sizes = encoding.get("shards") or encoding.get("chunks") or encoding.get("chunksizes")
        if not sizes:
            return self.where
        pairs = zip(array.dims, sizes, strict=True)
        chunk = tuple(indices[str(dim)] // int(size) for dim, size in pairs)
        if isinstance(self._counter, CountingStore):
            array_on_disk = zarr.open_array(self._counter, path=name, mode="r")
            remaining = list(zip(array.shape, chunk, strict=True))
            # squeeze_other_dims() dropped dims of length 1: the file's key has them, with a 0.
            full_chunk = [
                remaining.pop(0)[1] if remaining and remaining[0][0] == length else 0
                for length in array_on_disk.shape
            ]
            key = array_on_disk.metadata.encode_chunk_key(tuple(full_chunk))
            return f"{self.where}, chunk {name}/{key}"
        return f"{self.where}, chunk {chunk}"

    def description(self, variables: Sequence[str]) -> list[object]:
        stored = [x for name in variables for x in self._names.stored_variables(name)]
        description: list[object] = [
            resolved_address(self._address),
            version_stamp(self._address, stored),
        ]
        description += self.grid.description()
        if self.members:
            description.append(list(self.members))
        for name in variables:
            for stored_name in self._names.stored_variables(name):
                array = self._dataset[stored_name]
                layout = [list(map(str, array.dims)), list(array.shape), str(array.dtype)]
                description.append(
                    [name, *layout] if stored_name == name else [name, stored_name, *layout]
                )
        return description

    @property
    def _member(self) -> int:
        several = self.members and len(self._members) > 1
        return self._members.index(self.members[0]) if several else 0

    def _stored_variable(self, channel: Channel) -> str:
        return self._names.stored_channel(channel).variable

    def _read_variable(
        self, name: str, levels: list[int], times: Indexer, rows: slice
    ) -> FieldArray:
        height = self.grid[0]
        north, south, _ = rows.indices(height)
        stored_rows = (
            slice(height - south, height - north) if self._flipped else slice(north, south)
        )
        if self.cells is not None:
            stored_rows = self.cells.cells(rows)
        array = self._dataset.variables[name]
        selection: dict[str, Indexer] = {"latitude": stored_rows}
        if "time" in array.dims:
            selection["time"] = times
        if "level" in array.dims:
            levels_in_store = self.variables[name].levels
            selection["level"] = as_slice(
                np.array([levels_in_store.index(level) for level in levels])
            )
        if MEMBER in array.dims:
            selection[MEMBER] = slice(self._member, self._member + 1)
        # The store is read in its own order of dims; they are reordered in memory, after the read.
        values = self._read_selection(array, selection, name)
        dims = list(map(str, array.dims))
        if EXPVER in dims:
            values = _combine_versions(values, dims.index(EXPVER))
            dims.remove(EXPVER)
        if MEMBER in dims:
            values = values.squeeze(dims.index(MEMBER))
            dims.remove(MEMBER)
        values = in_dim_order(values, dims, ORDER)
        fields = np.asarray(values, dtype=np.float32)
        return fields[:, :, ::-1] if self._flipped and self.cells is None else fields

    def _read_selection(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """Read a selection, in the store's order of dims and in its type."""
        absent = self._counter.absent_chunks
        try:
            values = self._read_counted(array, selection)
        except MemoryError:
            raise
        except Exception as error:
            self._change_detector.check()
            if "time" not in array.dims:
                raise unreadable_error(self.where, name, None, error) from error
            return self._read_time_by_time(array, selection, name)
        # Chunks that are suddenly absent are a sign of a store that is being rewritten.
        self._change_detector.after_read(self._counter.absent_chunks > absent)
        return values

    def _read_time_by_time(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """Read each time by itself, to name the one that fails, or to succeed after all."""
        fields = []
        for time in np.arange(len(self.times))[selection["time"]].tolist():
            try:
                selected_time = selection | {"time": slice(time, time + 1)}
                fields.append(self._read_counted(array, selected_time))
            except Exception as error:
                raise unreadable_error(
                    self.where, name, self.calendar.text(self.times[time]), error
                ) from error
        return np.concatenate(fields, axis=array.dims.index("time"))

    def _read_counted(
        self, array: xr.Variable, selection: dict[str, Indexer]
    ) -> NDArray[np.generic]:
        selected = array.isel(selection)
        values: NDArray[np.generic] = selected.values
        dtype = array.encoding.get("dtype") or array.dtype
        self._counter.count_requested(selected.size * np.dtype(dtype).itemsize)
        return values


def _combine_versions(values: NDArray[Any], axis: int) -> NDArray[Any]:
    versions = np.moveaxis(values, axis, 0)
    combined: NDArray[Any] = versions[0]
    for other in versions[1:]:
        combined = np.where(np.isnan(combined), other, combined)
    return combined


def _bounds_of_cells(dataset: xr.Dataset) -> set[str]:
    """Return the names of all that has edges of cells: CF conventions, sections 7.1 and 7.4."""
    attributes = (x for array in dataset.variables.values() for x in (array.attrs, array.encoding))
    named = {str(x[key]) for x in attributes for key in ("bounds", "climatology") if key in x}
    return named | {str(name) for name in dataset if str(name).endswith(("_bnds", "_bounds"))}


def _variables(
    dataset: xr.Dataset, where: str, model_levels: bool | None, bounds_by: str, grid: Grid
) -> dict[str, VariableInfo]:
    """Return the metadata of all variables; if one can't be read, its `problem` says why."""
    levels = whole_number_levels(dataset, where, "data.store")
    horizontal = [name for name in HORIZONTAL if name in dataset.dims]
    variables = {}
    for name, array in dataset.data_vars.items():
        dims = list(map(str, array.dims))
        sums = stated_sums(array, bounds_by)
        variables[str(name)] = VariableInfo(
            has_time="time" in dims,
            levels=levels if "level" in dims else (),
            units=str(array.attrs.get("units", "")).strip(),
            standard_name=stated_name(str(name), array.attrs, grid),
            problem=_problem(array, dims, horizontal),
            model_levels=model_levels if "level" in dims else False,
            sums_stated_by=sums.by,
            sum_hours=sums.hours,
            has_members=MEMBER in dims,
        )
    return variables


def _problem(array: xr.DataArray, dims: list[str], horizontal: Sequence[str]) -> str:
    if not set(horizontal) <= set(dims) <= {*ORDER, EXPVER, MEMBER}:
        if "step" in dims:
            return f"has the dims {', '.join(dims)}: {STEP_ADVICE}"
        if any(dim.endswith(STAGGERED) for dim in dims):
            return f"has the dims {', '.join(dims)}: {STAGGERED_ADVICE}"
        return f"has the dims {', '.join(dims) or 'none'}: {NEEDED}"
    if array.dtype.kind not in "fiub":
        return f"holds values of the type {array.dtype}, not numbers"
    return ""

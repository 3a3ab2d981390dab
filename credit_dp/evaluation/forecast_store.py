"""Read stored forecasts in the layout of WeatherBench 2, from any model.

`ForecastStore` checks dims and coordinates on opening and reads fields on demand; the functions at
the end compare its grid with the truth's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.calendar import Calendar, calendar_of, decode_dates
from credit_dp.data.grid import COORDINATE_TOLERANCE, Degrees, Grid, degrees_east
from credit_dp.data.regrid import PointInterpolation
from credit_dp.data.sources.address import is_remote, local_path, reason_of, redact_secrets
from credit_dp.data.sources.coordinates import (
    check_coordinates,
    chunk_length,
    decode_durations,
    grid_of_lines,
    has_model_levels,
    in_dim_order,
    projected_grid,
    standardise_dims,
    whole_number_levels,
)
from credit_dp.data.sources.datasets import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.data.sources.grib_file import is_grib
from credit_dp.data.sources.grib_forecasts import open_grib_forecasts
from credit_dp.data.sources.source import as_slice
from credit_dp.data.winds import (
    Turn,
    find_other_component,
    lies_along_grid,
    other_component,
    stated_name,
    turn_of,
    wind_difference,
)
from credit_dp.errors import UserError

LEAD_DIM = "prediction_timedelta"
LEAD_ALIASES = ("lead_time", "step", "leadtime", "forecast_period")
# Source: CF conventions, section 7.3: dimensions with colons, then the method.
SUM_PATTERN = re.compile(rf"\b(?:{'|'.join((LEAD_DIM, *LEAD_ALIASES))}):(?: \w+:)* sum\b")


def is_sum(array: xr.DataArray) -> bool:
    """Whether a variable's `cell_methods` say that its values are sums over lead time."""
    return SUM_PATTERN.search(str(array.attrs.get("cell_methods", ""))) is not None


def accumulation_span(dataset: xr.Dataset, where: str) -> np.timedelta64 | None:
    """Return the span of sums, from the bounds of the lead times; None without sums or bounds."""
    if not any(is_sum(array) for array in dataset.data_vars.values()):
        return None
    name = dataset[LEAD_DIM].attrs.get("bounds", dataset[LEAD_DIM].encoding.get("bounds"))
    if name not in dataset.variables:
        return None
    lead = dataset[LEAD_DIM].variable
    encoded_bounds = dataset[name].variable
    if "units" not in encoded_bounds.attrs:
        # CF: bounds without units have those of their coordinate.
        units = lead.attrs.get("units", lead.encoding.get("units"))
        encoded_bounds = encoded_bounds.copy(deep=False)
        encoded_bounds.attrs |= {"units": units}
    bounds = decode_durations(encoded_bounds, str(name), where, "forecast")
    leads = decode_durations(lead, LEAD_DIM, where, "forecast")
    # A sum over another span at each lead time, for instance since the start, can't be compared
    # with the truth's sums over one step.
    spans = np.diff(bounds).ravel()
    pairs = bounds.shape == (len(leads), 2)
    is_empty = not spans[0] > np.timedelta64(0, "ns")
    if not pairs or (bounds[:, 1] != leads).any() or (spans != spans[0]).any() or is_empty:
        raise UserError(
            f"{where}: all sums need one span that ends at the lead time, but the bounds {name} "
            "differ from that. Leave these variables out with variables=[...]."
        )
    span: np.timedelta64 = spans[0].astype("m8[ns]")
    return span


MEMBER_DIM = "member"
DIM_ORDER = ("time", LEAD_DIM, MEMBER_DIM, "level", "latitude", "longitude")
DIM_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time": ("init_time", "initial_time", "forecast_reference_time"),
        LEAD_DIM: LEAD_ALIASES,
        MEMBER_DIM: ("number", "realization", "ensemble", "ensemble_member", "sample"),
    }
)
REQUIRED_DIMS = ("time", LEAD_DIM, "latitude", "longitude")

Indices = NDArray[np.intp]


@final
@dataclass(frozen=True)
class ForecastVariable:
    """Metadata of one variable of a forecast store.

    Attributes:
        levels: its levels; empty for a variable without levels.
        units: as in the store; may be empty.
        summed: values are sums over the store's `span` before the valid time.
        standard_name: may be empty; see `stated_name`.
    """

    levels: tuple[int, ...]
    units: str
    summed: bool = False
    standard_name: str = ""


@final
class ForecastStore:
    """Forecasts by initial and lead time, with or without members; row 0 is northernmost.

    Attributes:
        where: its address, for messages; without secrets.
        initial_times: `(I,)` datetime64, rising.
        lead_times: `(L,)` timedelta64, rising.
        members: number of members; 1 without an ensemble.
        grid: of the fields that are read: rows from the north, columns in the store's order.
        model_levels: see `VariableInfo`.
        span: timedelta64[ns], span of sums; None if the store does not state it.
    """

    def __init__(self, dataset: xr.Dataset, where: str) -> None:
        """Check dims and coordinates, without reading a field.

        Raises:
            UserError: the dataset lacks a dim of forecasts, or a coordinate is invalid.
        """
        self.where = redact_secrets(where)
        dataset = _rename_dims(dataset)
        for dim in ("time", LEAD_DIM):
            if dim not in dataset.dims or dim not in dataset.coords:
                raise UserError(
                    f"{self.where}: forecasts need the dims time (initial time), {LEAD_DIM}, "
                    "latitude and longitude, but the store has "
                    f"{', '.join(map(str, dataset.dims))}. Rename its dims and coordinates, or "
                    "give another store as forecast."
                )
        # Both before `standardise_dims`, which renames vertical dims and drops bounds that are
        # coordinates.
        self.model_levels = has_model_levels(dataset)
        self.span = accumulation_span(dataset, self.where)
        grid = projected_grid(dataset)
        dataset = standardise_dims(dataset, self.where)
        check_coordinates(dataset, self.where, grid=grid)
        self.initial_times: NDArray[np.datetime64] = decode_dates(dataset["time"].values)
        self.lead_times = _read_leads(dataset, self.where)
        self.set_calendar(calendar_of(dataset["time"].values))
        self.members = int(dataset.sizes.get(MEMBER_DIM, 1))
        grid = grid or grid_of_lines(dataset)
        self._flipped = grid.rises
        self.grid = self.stored_grid = grid.flipped() if self._flipped else grid
        self._interpolation: PointInterpolation | None = None
        self._turns: dict[str, tuple[str, Turn]] = {}  # with the other component's name
        levels = whole_number_levels(dataset, self.where, "forecast")
        self.variables = {
            str(name): ForecastVariable(
                levels if "level" in array.dims else (),
                str(array.attrs.get("units", "")).strip(),
                self.span is not None and is_sum(array),
                stated_name(str(name), array.attrs, self.stored_grid),
            )
            # Sorted, because a zarr store may list its variables in the order of a folder.
            for name, array in sorted(dataset.data_vars.items(), key=lambda item: str(item[0]))
            if _is_forecast(array)
        }
        self.attributes: Mapping[Any, Any] = dataset.attrs
        self._dataset = dataset

    @classmethod
    def open(cls, where: str) -> "ForecastStore":
        """Open the zarr store at a path or address, or the netCDF or GRIB file at a path.

        Raises:
            UserError: it can't be opened, or has not the dims of forecasts.
        """
        path = local_path(where)
        if is_netcdf(where):
            dataset: xr.Dataset = open_netcdf(where)[0]
        elif not is_remote(where) and path.is_file() and is_grib(path):
            dataset = open_grib_forecasts(path)
        else:
            dataset = open_zarr_dataset(where)[0]
        return cls(dataset, where)

    def set_calendar(self, calendar: Calendar) -> None:
        """Take initial times for those of a calendar in which they count the same."""
        self.calendar = calendar
        self.initial_times = self.initial_times.astype(calendar.dtype)
        if not calendar.is_standard:
            # Of the same type as the times: sums in nanoseconds would overflow.
            self.lead_times = self.lead_times.astype("m8[s]")

    @property
    def interpolated(self) -> str:
        """What `interpolate_to` does, to follow the name of the store; empty before it."""
        return "" if self._interpolation is None else ", interpolated bilinearly"

    def interpolate_to(self, grid: Grid) -> None:
        """Read fields at the points of a region instead, see `PointInterpolation`.

        Raises:
            UserError: the store does not cover the region, or is on a projection.
        """
        try:
            self._interpolation = PointInterpolation(self.stored_grid, *grid.points)
        except UserError as error:
            raise UserError(
                f"{self.where}: is on another grid than the truth, and can't be interpolated to "
                f"it: it {error}. Change forecast or truth."
            ) from error
        self.grid = grid

    def turn_wind(self, name: str, to_grid: bool | None) -> None:
        """Read a component of wind on a projection along its axes, or eastward or northward.

        A variable that is stored so, or is no wind, stays as it is. Call it after `interpolate_to`.

        Args:
            to_grid: whether along the axes; see `lies_along_grid`.

        Raises:
            UserError: the other component is missing, or see `turn_of`.
        """
        variable = self.variables[name]
        along_grid = lies_along_grid(variable.standard_name, self.stored_grid)
        kinds = wind_difference(along_grid, to_grid)
        if kinds is None:
            return
        alike = [
            x
            for x, other in self.variables.items()
            if lies_along_grid(other.standard_name, self.stored_grid) == along_grid
            and {*variable.levels} <= {*other.levels}
        ]
        other = find_other_component(name, alike)
        if other is None:  # names as ROMS has, Uwind and Vwind
            stated = other_component(variable.standard_name)
            named = [x for x in alike if stated and self.variables[x].standard_name == stated]
            other = named[0] if len(named) == 1 else None
        if other is None:
            raise UserError(
                f"{self.where}: {name} is {kinds[0]}, and can't be turned to be {kinds[1]} without "
                "the other component of this wind. Add that to the forecast, or leave it out with "
                "variables=[...]."
            )
        known = name if other_component(name) else variable.standard_name
        self._turns[name] = other, turn_of(known, self.grid, self.where, bool(to_grid))

    def read(
        self,
        name: str,
        levels: tuple[int, ...],
        inits: Indices,
        leads: Indices,
        member: int | None = None,
    ) -> NDArray[np.float32]:
        """Read a variable at indices of initial and lead times: `(I, L, M, levels, H, W)`.

        Variables without levels have one level here; missing values are NaN. A chunk that contains
        several of the fields is read once.

        Args:
            member: its index; None for all members.

        Raises:
            UserError: a field can't be read; names store, variable, initial and lead time.
        """
        fields = self._read(name, levels, inits, leads, member)
        if name not in self._turns:
            return fields
        other, turn = self._turns[name]
        return np.asarray(turn(fields, self._read(other, levels, inits, leads, member)), np.float32)

    def read_at(
        self, name: str, level: int | None, init: int, latitude: float, longitude: float
    ) -> NDArray[np.float32]:
        """Interpolate a variable bilinearly to a point, for all lead times and members: `(L, M)`.

        Of each field only the rows around the point are kept in memory.

        Raises:
            UserError: a field can't be read, or, without a key, the store does not cover the point.
        """
        point = np.array([latitude]), np.array([longitude])
        interpolation = PointInterpolation(self.stored_grid, *point, projected=True)
        first, leads = np.array([init]), np.arange(len(self.lead_times))
        rows = interpolation.source_rows(slice(None))
        levels = () if level is None else (level,)
        bands = self._read(name, levels, first, leads, rows=rows)
        return np.asarray(interpolation(bands, slice(None))[0, :, :, 0, 0], np.float32)

    def _read(
        self,
        name: str,
        levels: tuple[int, ...],
        inits: Indices,
        leads: Indices,
        member: int | None = None,
        rows: slice | None = None,
    ) -> NDArray[np.float32]:
        array = self._dataset[name].variable
        # Slices where possible: zarr reads them faster than lists of indices.
        selection = {"time": as_slice(inits), LEAD_DIM: as_slice(leads)}
        if member is not None and MEMBER_DIM in array.dims:
            selection[MEMBER_DIM] = slice(member, member + 1)
        if "level" in array.dims:
            present = self.variables[name].levels
            selection["level"] = as_slice(np.array([present.index(level) for level in levels]))
        if rows is not None:
            height = array.sizes["latitude"]
            stored = slice(height - rows.stop, height - rows.start) if self._flipped else rows
            selection["latitude"] = stored
        try:
            values = array.isel(selection).values
        except MemoryError:
            raise
        except Exception as error:  # of zarr, codecs, netCDF, HDF5 or the network
            # Read the fields one by one: finds the damaged one, or succeeds if the error passed.
            if len(inits) * len(leads) > 1:
                fields_of = [
                    [self._read(name, levels, i, x, member, rows) for x in single_indices(leads)]
                    for i in single_indices(inits)
                ]
                return np.concatenate([np.concatenate(fields, axis=1) for fields in fields_of])
            raise UserError(
                f"{self.where}: {name} {self.describe(inits[0], leads[0])} can't be read "
                f"({reason_of(error)}). Complete the forecast, or leave out what it lacks with "
                "variables=, dates= or hours=."
            ) from error
        values = in_dim_order(values, list(map(str, array.dims)), DIM_ORDER)
        fields = np.asarray(values, dtype=np.float32)
        fields = fields[..., ::-1, :] if self._flipped else fields
        if self._interpolation is None or rows is not None:
            return fields
        return self._interpolation(fields)

    def initial_times_per_chunk(self, name: str) -> int:
        """Return the number of initial times in one chunk of a variable."""
        return chunk_length(self._dataset[name], "time")

    def describe(self, init: np.intp, lead: np.intp) -> str:
        """Return initial and lead time as text for messages."""
        hours = self.lead_times[lead] / np.timedelta64(1, "h")
        return f"from {self.calendar.text(self.initial_times[init])} at {hours:g} h"


def single_indices(indices: Indices) -> list[Indices]:
    """Return arrays of one index each."""
    return [indices[x : x + 1] for x in range(len(indices))]


def _rename_dims(dataset: xr.Dataset) -> xr.Dataset:
    # Redundant, and `standardise_dims` would take it for the time of the fields.
    dataset = dataset.drop_vars("valid_time", errors="ignore")
    named = {str(dataset[dim].attrs.get("standard_name")): str(dim) for dim in dataset.indexes}
    for standard, others in DIM_ALIASES.items():
        dims = (named.get(name, name) for name in others)
        other = next((name for name in dims if name in dataset.dims), None)
        if other is not None and standard not in dataset.dims:
            # A coordinate that is not a dim may have the standard name already.
            dataset = dataset.drop_vars(standard, errors="ignore").rename({other: standard})
    return dataset


def _is_forecast(array: xr.DataArray) -> bool:
    dims = set(map(str, array.dims))
    return set(REQUIRED_DIMS) <= dims <= set(DIM_ORDER) and array.dtype.kind in "fiu"


def _read_leads(dataset: xr.Dataset, where: str) -> NDArray[np.timedelta64]:
    decoded = decode_durations(dataset[LEAD_DIM].variable, LEAD_DIM, where, "forecast")
    leads: NDArray[np.timedelta64] = decoded.astype("m8[ns]")
    if not len(leads):
        raise UserError(f"{where}: {LEAD_DIM} is empty. Give a store with lead times as forecast.")
    falls = np.flatnonzero(np.diff(leads) <= np.timedelta64(0, "ns"))
    if len(falls):
        before, after = (lead / np.timedelta64(1, "h") for lead in leads[falls[0] : falls[0] + 2])
        raise UserError(
            f"{where}: {LEAD_DIM} must rise from entry to entry, but {after:g} hours follow "
            f"{before:g}. Sort the store by {LEAD_DIM}, or give another one as forecast."
        )
    return leads


def column_order(expected: Grid, stored: Grid, where: str, key: str) -> NDArray[np.intp]:
    """Return the index of the store's column at each column of the truth, `(W,)`.

    Args:
        stored: that of the store `where`, which was given as `key`.
    """
    if not (expected.is_projected or stored.is_projected):
        check_same_rows(expected.latitude, stored.latitude, where, key)
        return column_indices(expected.longitude, stored.longitude, where, key)
    differing = stored.difference(expected)
    if differing:
        raise UserError(
            f"{where}: is on another grid than the truth: it has {differing[0]}, where the truth "
            f"has {differing[1]}. Change {key}."
        )
    return np.arange(expected[1])


def check_same_rows(expected: Degrees, stored: Degrees, where: str, key: str) -> None:
    """Check that two stores have the same latitudes; both `(H,)`, falling.

    Args:
        stored: latitudes of the store `where`, which was given as `key`.
    """
    # `not <=` instead of `>`: NaN compares as False and has to be refused, too.
    if len(expected) != len(stored) or not np.abs(expected - stored).max() <= COORDINATE_TOLERANCE:
        raise _grid_error("rows", "latitude", expected, stored, where, key)


def column_indices(expected: Degrees, stored: Degrees, where: str, key: str) -> NDArray[np.intp]:
    """Return the index of the store's column at each expected longitude: `(W,)`.

    Longitudes are compared modulo 360 degrees, so that stores may begin at -180 or 0.
    """
    if len(expected) != len(stored):
        raise _grid_error("columns", "longitude", expected, stored, where, key)
    distance = np.abs(degrees_east(stored, expected[:, None]))
    columns: NDArray[np.intp] = distance.argmin(axis=1)
    # `not <=`: also refuses NaN.
    if not distance[np.arange(len(expected)), columns].max() <= COORDINATE_TOLERANCE:
        raise _grid_error("columns", "longitude", expected, stored, where, key)
    return columns


def reorder_columns(fields: NDArray[np.float32], columns: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return `(..., W)` with its columns in this order; copies only if the order changes."""
    return fields if np.array_equal(columns, np.arange(len(columns))) else fields[..., columns]


def _grid_error(
    what: str, name: str, expected: Degrees, stored: Degrees, where: str, key: str
) -> UserError:
    return UserError(
        f"{where}: is on another grid than the truth: {len(stored)} {what} with {name} from "
        f"{stored[0]:g} to {stored[-1]:g}, where the truth has {len(expected)} from "
        f"{expected[0]:g} to {expected[-1]:g}. Change {key}, or regrid the truth with "
        "grid=."
    )

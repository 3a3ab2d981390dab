"""Stored forecasts in the form of WeatherBench 2, whoever made them, read a field at a time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE
from credit_dp.data.sources.address import reason_of, redact_secrets
from credit_dp.data.sources.base import (
    as_slice,
    check_coordinates,
    has_model_levels,
    standardise_dims,
)
from credit_dp.data.sources.zarr import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.errors import UserError

LEAD_DIM = "prediction_timedelta"
LEAD_ALIASES = ("lead_time", "step", "leadtime")  # as others call it
# Source: the CF conventions, section 7.3: dimensions with colons, then the method.
SUM_PATTERN = re.compile(rf"\b(?:{'|'.join((LEAD_DIM, *LEAD_ALIASES))}):(?: \w+:)* sum\b")


def is_sum(array: xr.DataArray) -> bool:
    """Whether a variable says that its values are sums over spans of lead time."""
    return SUM_PATTERN.search(str(array.attrs.get("cell_methods", ""))) is not None


def accumulation_span(dataset: xr.Dataset, where: str) -> np.timedelta64 | None:
    """The span before each lead time, by the bounds of these; None where there are no sums.

    Raises:
        UserError: spans differ, or do not end at the lead time.
    """
    if not any(is_sum(array) for array in dataset.data_vars.values()):
        return None
    name = dataset[LEAD_DIM].attrs.get("bounds", dataset[LEAD_DIM].encoding.get("bounds"))
    if name not in dataset.variables:
        return None
    lead = dataset[LEAD_DIM].variable
    given = dataset[name].variable
    if "units" not in given.attrs:  # they are those of the lead time
        units = lead.attrs.get("units", lead.encoding.get("units"))
        given = given.copy(deep=False)
        given.attrs |= {"units": units}
    bounds, leads = decode_timedelta(given, where).values, decode_timedelta(lead, where).values
    spans = np.diff(bounds).ravel()
    pairs = bounds.shape == (len(leads), 2)
    if not pairs or (bounds[:, 1] != leads).any() or (spans != spans[0]).any() or not spans[0] > 0:
        raise UserError(
            f"{where}: sums need to be over one span that ends at the lead time, but {name} has "
            "others. Leave these variables out with variables=[...]."
        )
    span: np.timedelta64 = spans[0].astype("m8[ns]")
    return span


def decode_timedelta(variable: xr.Variable, where: str) -> xr.Variable:
    """Lead times as time spans, which netCDF and older zarr stores have as numbers with a unit.

    Raises:
        UserError: the unit can't be understood.
    """
    if np.issubdtype(variable.dtype, np.timedelta64):
        return variable
    try:
        return xr.conventions.decode_cf_variable(LEAD_DIM, variable, decode_timedelta=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {LEAD_DIM} can't be read ({reason_of(error)}).") from error


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
    """What a store says of one variable.

    Attributes:
        levels: those it has, empty if it is on none.
        summed: values are sums over the store's `span` before their time.
    """

    levels: tuple[int, ...]
    units: str
    summed: bool = False


@final
class ForecastStore:
    """Forecasts by initial and lead time, with or without members; fields with row 0 northernmost.

    Attributes:
        where: its address, as messages name it.
        initial_times: `(I,)` datetime64[ns], rising.
        leads: `(L,)` timedelta64[ns], rising.
        members: how many; 1 of a store without ensemble.
        latitude, longitude: `(H,)` falling, and `(W,)` in the store's order, in degrees.
        variables: those that are forecast.
        model_levels: levels are those of a model, by number, not of pressure.
        span: timedelta64[ns], of sums; None where the store does not say.
        attributes: of the store as a whole.
    """

    def __init__(self, dataset: xr.Dataset, where: str) -> None:
        """Check what can be checked without reading a field.

        Raises:
            UserError: it has not the dims of forecasts, or its coordinates are not as needed.
        """
        self.where = redact_secrets(where)
        dataset = _rename_dims(dataset)
        for dim in ("time", LEAD_DIM):
            if dim not in dataset.dims or dim not in dataset.coords:
                raise UserError(
                    f"{self.where}: forecasts need the dims time (initial time), {LEAD_DIM}, "
                    "latitude "
                    f"and longitude, but it has {', '.join(map(str, dataset.dims))}. "
                    "Change forecast."
                )
        self.model_levels = has_model_levels(dataset)
        self.span = accumulation_span(dataset, self.where)
        dataset = standardise_dims(dataset, self.where)
        check_coordinates(dataset, self.where)
        self.initial_times: NDArray[np.datetime64] = dataset["time"].values.astype("M8[ns]")
        self.leads = _read_leads(dataset, self.where)
        self.members = int(dataset.sizes.get(MEMBER_DIM, 1))
        latitude = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        self.longitude: NDArray[np.float64] = dataset["longitude"].values.astype(np.float64)
        levels = _read_levels(dataset, self.where)
        self.variables = {
            str(name): ForecastVariable(
                levels if "level" in array.dims else (),
                str(array.attrs.get("units", "")).strip(),
                self.span is not None and is_sum(array),
            )
            # Of zarr stores the order may be that of a folder's listing.
            for name, array in sorted(dataset.data_vars.items(), key=lambda item: str(item[0]))
            if _is_forecast(array)
        }
        self.attributes: Mapping[Any, Any] = dataset.attrs
        self._dataset = dataset

    @classmethod
    def open(cls, where: str) -> "ForecastStore":
        """Open the zarr store at a path or address, or the netCDF file at a path.

        Raises:
            UserError: there is none, or it is not of the form of forecasts.
        """
        dataset = open_netcdf(where)[0] if is_netcdf(where) else open_zarr_dataset(where)[0]
        return cls(dataset, where)

    def read(
        self, name: str, levels: tuple[int, ...], inits: Indices, leads: Indices
    ) -> NDArray[np.float32]:
        """One variable at some `initial_times` and `leads`: `(I, L, M, levels, H, W)`.

        One level where the variable is on none; NaN where there is no value. A chunk that holds
        several of these is read once.

        Raises:
            UserError: what is on disk can't be read; names store, variable, date and lead.
        """
        array = self._dataset[name].variable
        selection = {"time": as_slice(inits), LEAD_DIM: as_slice(leads)}
        if "level" in array.dims:
            present = self.variables[name].levels
            selection["level"] = as_slice(np.array([present.index(level) for level in levels]))
        try:
            values = array.isel(selection).values
        except MemoryError:
            raise
        except Exception as error:
            # One by one, to find the one that can't be read, or to read all at a second attempt.
            if len(inits) * len(leads) > 1:
                rows = [
                    [self.read(name, levels, i, x) for x in single_indices(leads)]
                    for i in single_indices(inits)
                ]
                return np.concatenate([np.concatenate(row, axis=1) for row in rows])
            raise UserError(
                f"{self.where}: {name} {self.describe(inits[0], leads[0])} can't be read "
                f"({reason_of(error)}). Complete the forecast, or leave out what it lacks with "
                "variables=, dates= or hours=."
            ) from error
        dims = [str(dim) for dim in array.dims]
        absent = [dim for dim in DIM_ORDER if dim not in dims]
        values = values.reshape((1,) * len(absent) + values.shape)
        order = [*absent, *dims]
        values = values.transpose([order.index(dim) for dim in DIM_ORDER])
        fields = np.asarray(values, dtype=np.float32)
        return fields[..., ::-1, :] if self._flipped else fields

    def initial_times_per_chunk(self, name: str) -> int:
        """Initial times that lie in one chunk of a variable."""
        array = self._dataset[name]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        return int(chunks[array.dims.index("time")]) if chunks else 1

    def describe(self, init: np.intp, lead: np.intp) -> str:
        """Which forecast it is, for a message."""
        hours = self.leads[lead] / np.timedelta64(1, "h")
        return f"from {self.initial_times[init].astype('M8[m]')} at {hours:g} h"


def single_indices(indices: Indices) -> list[Indices]:
    """Return the indices one by one."""
    return [indices[x : x + 1] for x in range(len(indices))]


def _rename_dims(dataset: xr.Dataset) -> xr.Dataset:
    """The dims that only forecasts have under one name each.

    The time that a forecast is for, which some stores give as well, is initial and lead time added.
    """
    dataset = dataset.drop_vars("valid_time", errors="ignore")
    for standard, others in DIM_ALIASES.items():
        other = next((name for name in others if name in dataset.dims), None)
        if other is not None and standard not in dataset.dims:
            # A coordinate that is no dim may be called so.
            dataset = dataset.drop_vars(standard, errors="ignore").rename({other: standard})
    return dataset


def _is_forecast(array: xr.DataArray) -> bool:
    dims = set(map(str, array.dims))
    return set(REQUIRED_DIMS) <= dims <= set(DIM_ORDER) and array.dtype.kind in "fiu"


def _read_leads(dataset: xr.Dataset, where: str) -> NDArray[np.timedelta64]:
    """The lead times, which netCDF and older zarr stores have as numbers with a unit."""
    variable = decode_timedelta(dataset[LEAD_DIM].variable, where)
    if not np.issubdtype(variable.dtype, np.timedelta64) or np.isnat(variable.values).any():
        raise UserError(
            f"{where}: {LEAD_DIM} needs to be time spans, or numbers with units like hours, but is "
            f"{variable.dtype} with units {variable.attrs.get('units', 'unknown')}. "
            "Change forecast."
        )
    leads: NDArray[np.timedelta64] = variable.values.astype("m8[ns]")
    if np.any(np.diff(leads) <= np.timedelta64(0)) or not len(leads):
        raise UserError(f"{where}: {LEAD_DIM} does not rise throughout. Change forecast.")
    return leads


def _read_levels(dataset: xr.Dataset, where: str) -> tuple[int, ...]:
    if "level" not in dataset.dims:
        return ()
    values = dataset["level"].values if "level" in dataset.coords else np.array([np.nan])
    number = np.issubdtype(values.dtype, np.number)
    if not number or not np.isfinite(values).all() or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change forecast."
        )
    return tuple(int(level) for level in values)


GRID_TOLERANCE = 1e-3  # degrees: stores have them as float32, and rounded

Degrees = NDArray[np.float64]


def check_same_rows(wanted: Degrees, found: Degrees, where: str, key: str) -> None:
    """Refuse rows that are not those wanted; both `(H,)`, falling.

    Raises:
        UserError: naming the store and the key that gave it.
    """
    if len(wanted) != len(found) or not np.abs(wanted - found).max() <= GRID_TOLERANCE:  # or NaN
        raise _grid_error("rows", "latitude", wanted, found, where, key)


def column_indices(wanted: Degrees, found: Degrees, where: str, key: str) -> NDArray[np.intp]:
    """Which column of a store lies at each longitude that is wanted: `(W,)`.

    Raises:
        UserError: the columns are others.
    """
    if len(wanted) != len(found):
        raise _grid_error("columns", "longitude", wanted, found, where, key)
    apart = (found[None, :] - wanted[:, None] + FULL_CIRCLE / 2) % FULL_CIRCLE - FULL_CIRCLE / 2
    places: NDArray[np.intp] = np.abs(apart).argmin(axis=1)
    if not np.abs(apart[np.arange(len(wanted)), places]).max() <= GRID_TOLERANCE:  # or NaN
        raise _grid_error("columns", "longitude", wanted, found, where, key)
    return places


def reorder_columns(fields: NDArray[np.float32], columns: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return `(..., W)` with its columns in this order; not copied where they are in it."""
    return fields if np.array_equal(columns, np.arange(len(columns))) else fields[..., columns]


def _grid_error(
    what: str, name: str, wanted: Degrees, found: Degrees, where: str, key: str
) -> UserError:
    return UserError(
        f"{where}: is on another grid than the truth: {len(found)} {what} with {name} from "
        f"{found[0]:g} to {found[-1]:g}, where the truth has {len(wanted)} from {wanted[0]:g} to "
        f"{wanted[-1]:g}. Change {key}, or regrid the truth with `credit-dp data prepare`."
    )

"""The layout of a forecast: WeatherBench 2's dims with CF attributes, and its settings.

`ForecastFormat` describes dims, coordinates and variables of every form on disk. `settings_of`
returns what a forecast's values depend on; only a forecast with the same settings is resumed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config.model import CORRECTIONS, SAMPLER_KEYS
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import COORDINATES, Grid
from credit_dp.data.store import Store
from credit_dp.data.units import KNOWN_VARIABLES, canonical_unit, is_accumulated
from credit_dp.errors import UserError
from credit_dp.forecast.request import ForecastConfig, ForecastJob, ForecastRequest

CONVENTIONS = "CF-1.11"
SETTINGS_ATTRIBUTE = "credit_dp_forecast"  # global attribute with a forecast's settings, as JSON
BOUNDARY_ATTRIBUTE = "credit_dp_boundary"  # rows and columns at each edge that it was given
LEAD_DIM = "prediction_timedelta"
LEAD_BOUNDS = f"{LEAD_DIM}_bounds"

Attributes = dict[str, Any]

MEMBER: Attributes = {
    "standard_name": "realization",
    "long_name": "member of the ensemble",
    "units": "1",
}
TIME: Attributes = {"standard_name": "forecast_reference_time", "long_name": "initial time"}
LEAD: Attributes = {
    "standard_name": "forecast_period",
    "long_name": "lead time",
    "units": "hours",
    "dtype": "timedelta64[ns]",  # or xarray would not decode hours as timedelta64
}
PRESSURE_LEVEL: Attributes = {
    "standard_name": "air_pressure",
    "long_name": "pressure level",
    "units": "hPa",
    "positive": "down",
    "axis": "Z",
}
MODEL_LEVEL = PRESSURE_LEVEL | {
    "standard_name": "model_level_number",
    "long_name": "model level, from the top",
    "units": "1",
}
DEGREES: Mapping[str, Attributes] = {
    name: {"standard_name": name, "long_name": name, "units": units}
    for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east"))
}


class FixedArray(NamedTuple):
    """An array that is known before the forecast is made, such as a coordinate."""

    name: str
    dims: tuple[str, ...]
    values: NDArray[Any]
    attributes: Attributes


class Points(NamedTuple):
    """Degrees of cells along one dim, `(N,)` each."""

    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]


class OutputVariable(NamedTuple):
    """One variable of a forecast, with the slice of its channels."""

    name: str
    channels: slice
    dims: tuple[str, ...]
    attributes: Attributes

    @property
    def on_levels(self) -> bool:
        """Whether the variable has levels."""
        return "level" in self.dims


@final
@dataclass(frozen=True)
class ForecastFormat:
    """Dims, coordinates and variables of a forecast.

    Attributes:
        times: initial times, in `calendar`.
        hours: lead times.
        members: members of an ensemble; 0: no dimension of members.
        summed: variables whose values are sums over the `span` hours before the valid time.
        span: in hours; 0 without such variables.
        model_levels: whether levels are model levels, not pressure levels.
        cells: cells of the source, on which fields are written instead of `grid`.
        along_grid: winds along the axes of a projection, with their standard names.
    """

    channels: tuple[Channel, ...]
    units: Mapping[str, str]
    times: Times
    hours: tuple[int, ...]
    grid: Grid
    members: int = 0
    summed: tuple[str, ...] = ()
    span: int = 0
    model_levels: bool = False
    calendar: Calendar = STANDARD
    cells: Points | None = None
    along_grid: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        store: Store,
        channels: tuple[Channel, ...],
        units: Mapping[str, str],
        request: ForecastRequest,
    ) -> "ForecastFormat":
        """Return the format of a request for channels, on the grid of a store.

        Raises:
            UserError: the store's source has no cells to write on.
        """
        cells = store.source.original.cells
        if request.grid and cells is None:
            raise UserError(
                f"grid: {request.grid} is for data on cells, but {store.source.where} has rows and "
                "columns. Leave grid out."
            )
        names = dict.fromkeys(channel.variable for channel in store.channels.output_channels)
        summed = tuple(name for name in names if is_accumulated(name, store.config))
        summed += tuple(c.variable for c in channels if c.variable in CORRECTIONS.values())
        return cls(
            channels=channels,
            units=units,
            times=request.initial_times(),
            hours=request.lead_hours(store.config.step_hours),
            grid=store.grid,
            members=request.members,
            summed=summed,
            # A model's sums cover one of its steps, whichever lead times are written.
            span=store.config.step_hours if summed else 0,
            model_levels=not request.pressure_levels
            and any(bool(store.source.variables[name].model_levels) for name in names),
            calendar=store.calendar,
            cells=Points(cells.latitudes, cells.longitudes) if request.grid and cells else None,
            along_grid={
                name: store.source.variables[name].standard_name
                for name in names
                if store.lies_along_grid(name)
            },
        )

    @property
    def height(self) -> int:
        """Return the number of rows of the globe, or of cells."""
        return self.grid[0] if self.cells is None else len(self.cells.latitude)

    @property
    def horizontal_dims(self) -> tuple[str, ...]:
        """Return the names of the dims of rows and columns, or of the one of cells."""
        return self.grid.dims if self.cells is None else ("cell",)

    @cached_property
    def variables(self) -> list[OutputVariable]:
        """Return the variables, in the order of the channels."""
        variables: list[OutputVariable] = []
        for name in dict.fromkeys(channel.variable for channel in self.channels):
            indices = [i for i, channel in enumerate(self.channels) if channel.variable == name]
            level = ("level",) if self.channels[indices[0]].level is not None else ()
            dims = (*self.leading_dims, *level, *self.horizontal_dims)
            channels = slice(indices[0], indices[-1] + 1)  # a variable's levels are adjacent
            attributes = self._variable_attributes(name)
            variables.append(OutputVariable(name, channels, dims, attributes))
        return variables

    @property
    def leading_dims(self) -> tuple[str, ...]:
        """Return the first dims of every variable; each of their indices is one field on disk."""
        return (*(("number",) if self.members else ()), "time", LEAD_DIM)

    @cached_property
    def fixed_arrays(self) -> tuple[FixedArray, ...]:
        """Return the coordinates of all dims, bounds of sums, and what CF needs of projections."""
        times, time_units = self.calendar.encode(self.times)
        hours = np.array(self.hours, np.int64)
        levels = dict.fromkeys(c.level for c in self.channels if c.level is not None)
        of_times = TIME | {"units": time_units, "calendar": self.calendar.cf_name}
        of_leads = LEAD | ({"bounds": LEAD_BOUNDS} if self.summed else {})
        coordinates = [
            _coordinate("number", np.arange(self.members), MEMBER),
            _coordinate("time", times, of_times),
            _coordinate(LEAD_DIM, hours, of_leads),
            _coordinate(
                "level",
                np.array([*levels], np.int64),
                MODEL_LEVEL if self.model_levels else PRESSURE_LEVEL,
            ),
            *self._horizontal_coordinates(),
        ]
        # Without members or levels their coordinates are empty.
        arrays = [array for array in coordinates if len(array.values)]
        if self.summed:  # they cover the span between
            bounds = np.stack([hours - self.span, hours], axis=1)
            # CF takes the attributes of bounds from the dimension.
            arrays.append(FixedArray(LEAD_BOUNDS, (LEAD_DIM, "bounds"), bounds, {}))
        if self.cells is not None or self.grid.is_projected:
            degrees = self.cells or self.grid
            arrays += [
                FixedArray(name, self.horizontal_dims, getattr(degrees, name), attributes)
                for name, attributes in DEGREES.items()
            ]
        if self.grid.projection.name:
            name, attributes, *_ = self.grid.projection
            arrays.append(FixedArray(name, (), np.array(0, np.int32), dict(attributes)))
        return tuple(arrays)

    def _horizontal_coordinates(self) -> list[FixedArray]:
        """Return the coordinates of rows and columns: degrees, or the axes of a projection."""
        if self.cells is not None:
            numbers = np.arange(self.height)
            return [_coordinate("cell", numbers, {"long_name": "number of the cell"})]
        if not self.grid.is_projected:
            return [
                _coordinate(name, getattr(self.grid, name), DEGREES[name] | {"axis": axis})
                for name, axis in (("latitude", "Y"), ("longitude", "X"))
            ]
        _, _, *axes = self.grid.projection
        return [
            _coordinate(axis.name, axis.values, dict(axis.attributes))
            if len(axis.values)
            else _coordinate(axis.name, np.arange(size), {"long_name": f"number of the {name}"})
            for axis, size, name in zip(axes, self.grid, ("row", "column"), strict=True)
        ]

    def shape(self, variable: OutputVariable) -> tuple[int, ...]:
        """Return the sizes of a variable's dims."""
        sizes = {x.name: len(x.values) for x in self.fixed_arrays if x.dims == (x.name,)}
        return tuple(sizes[dim] for dim in variable.dims)

    def leading_index(self, job: ForecastJob, lead: int) -> tuple[int, ...]:
        """Return the index of a field in the `leading_dims`."""
        return (*((job.member,) if self.members else ()), job.time, lead)

    def index(self, job: ForecastJob, lead: int, rows: slice) -> tuple[Any, ...]:
        """Return the index of rows of a field, with all levels and columns."""
        horizontal = (rows, slice(None))[: len(self.horizontal_dims)]
        return (*self.leading_index(job, lead), ..., *horizontal)

    def describe_field(self, job: ForecastJob, lead: int) -> str:
        """Return initial time, lead time and member as text for messages."""
        member = f", member {job.member}" if self.members else ""
        return f"{self.calendar.short_text(self.times[job.time])} +{self.hours[lead]}h{member}"

    def _variable_attributes(self, name: str) -> Attributes:
        unit = canonical_unit(self.units.get(name, ""))
        known = KNOWN_VARIABLES.get(name)
        names = known.standard_names if known is not None else ()
        standard_name = self.along_grid.get(name, names[0] if names else "")
        return {
            **({"standard_name": standard_name} if standard_name else {}),
            "long_name": name.replace("_", " "),
            **({"units": unit} if unit else {}),
            # CF 1.11: tells a temperature from a difference of temperatures, also in kelvin.
            **({"units_metadata": "temperature: on_scale"} if unit == "K" else {}),
            **self._cell_methods(name),
            **(self.grid.field_attributes if self.cells is None else {"coordinates": COORDINATES}),
        }

    def _cell_methods(self, name: str) -> Attributes:
        if not self.summed:
            return {}
        return {"cell_methods": f"{LEAD_DIM}: {'sum' if name in self.summed else 'point'}"}


def _coordinate(name: str, values: NDArray[Any], attributes: Attributes) -> FixedArray:
    return FixedArray(name, (name,), values, attributes)


MAX_VALUE_LENGTH = 60  # characters of a value in a message
SETTING_KEYS = {
    "along_grid": "data.store",
    "boundary": "data.boundary",
    "boundary_from": "boundary",
    "bounds": "model.bounds",
    "cells": "grid",
    "channels": "diagnostics or pressure_levels",
    "dtype": "trainer.dtype",
    "fixers": "model.fixers",
    "hours": "lead or every",
    "scores": "value of a key of credit-dp evaluate",
    "stores": "data.store",
    "times": "init",
    "variables": "data.variables",
    "weights": "the weights in checkpoint",
}

Settings = dict[str, Any]


def settings_of(
    config: ForecastConfig, form: ForecastFormat, weights: str, stores: Sequence[str]
) -> Settings:
    """Return all that a forecast's values depend on, as JSON.

    Without the mesh, which changes only rounding: a forecast can be resumed on another one.

    Args:
        weights: fingerprint of the checkpoint.
        stores: addresses of the initial states.
    """
    request = config.request
    data = config.data
    return {
        "checkpoint": str(Path(request.checkpoint).expanduser().absolute()),
        "weights": weights,
        "stores": list(stores),
        **({"grid": data.grid, "regrid": data.regrid} if data.grid else {}),
        "dtype": config.trainer.dtype,
        "variables": {name: asdict(data.variables[name]) for name in sorted(data.variables)},
        "perturb": request.perturb,
        "perturb_seed": request.perturb_seed,
        # Missing in forecasts without, as in those of earlier versions.
        **({"fixers": [*config.model.fixers]} if config.model.fixers else {}),
        **({"bounds": dict(config.model.bounds)} if config.model.bounds else {}),
        **{
            f"model.{key}": getattr(config.model, key)
            for key in (SAMPLER_KEYS if config.model.denoises else ())
        },
        **format_to_json(form),
    }


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first setting that differs, as text for messages; "" if all are the same."""
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            values = (before.get(key), now.get(key))
            if max(len(str(value)) for value in values) > MAX_VALUE_LENGTH:
                return f"another {SETTING_KEYS.get(key, key)}"
            return f"{SETTING_KEYS.get(key, key)}={values[0]}, not {values[1]}"
    return ""


def format_to_json(form: ForecastFormat) -> Settings:
    """Return a format as JSON."""
    return {
        "channels": [[channel.variable, channel.level] for channel in form.channels],
        "units": dict(form.units),
        "times": [form.calendar.short_text(time) for time in form.times],
        "hours": list(form.hours),
        **form.grid.to_json(),
        "members": form.members,
        "summed": list(form.summed),
        "span": form.span,
        "model_levels": form.model_levels,
        **({} if form.calendar.is_standard else {"calendar": form.calendar.name}),
        **({} if form.cells is None else {"cells": [x.tolist() for x in form.cells]}),
        **({"along_grid": dict(form.along_grid)} if form.along_grid else {}),
    }


def format_from_json(path: Path, settings: Mapping[str, Any]) -> ForecastFormat:
    """Return the format that `format_to_json` wrote.

    Raises:
        UserError: a setting is missing or invalid.
    """
    try:
        calendar = Calendar(settings.get("calendar", STANDARD.name))
        times = [calendar.parse("times", text) for text in settings["times"]]
        return ForecastFormat(
            channels=tuple(Channel(variable, level) for variable, level in settings["channels"]),
            units=dict(settings["units"]),
            times=np.array(times, calendar.dtype),
            hours=tuple(map(int, settings["hours"])),
            grid=Grid.from_json(settings),
            members=int(settings["members"]),
            # Missing in forecasts of earlier versions.
            summed=tuple(settings.get("summed", ())),
            span=int(settings.get("span", 0)),
            model_levels=bool(settings.get("model_levels", False)),
            calendar=calendar,
            cells=Points(*np.array(settings["cells"], float)) if "cells" in settings else None,
            along_grid=dict(settings.get("along_grid", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its settings can't be read ({error!r}).") from error


def global_attributes(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the global attributes, the same in each store and file of a forecast."""
    return {
        "Conventions": CONVENTIONS,
        "title": "forecast of a model that credit_dp trained",
        "history": f"credit-dp forecast checkpoint={settings.get('checkpoint', '')}",
        SETTINGS_ATTRIBUTE: json.dumps(settings),
        # Also alone: the settings are dropped where forecasts from several times are joined.
        **({BOUNDARY_ATTRIBUTE: str(settings["boundary"])} if settings.get("boundary") else {}),
    }


def read_settings_attribute(attributes: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return what `settings_of` returned for a forecast; empty if it does not say so."""
    try:
        return dict(json.loads(attributes[SETTINGS_ATTRIBUTE]))
    except (KeyError, TypeError, ValueError):
        return {}


def given_width(attributes: Mapping[Any, Any]) -> int:
    """Return the rows and columns at each edge of a region that a forecast was given; 0 if none."""
    try:
        return int(attributes[BOUNDARY_ATTRIBUTE])
    except (KeyError, TypeError, ValueError):
        return 0

"""A forecast on disk: WeatherBench 2's form, described as CF wants it, and what it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.store import Store
from credit_dp.data.units import KNOWN_VARIABLES, canonical_unit, is_accumulated
from credit_dp.errors import UserError
from credit_dp.forecast.request import ForecastConfig, ForecastJob, ForecastRequest, Times

CONVENTIONS = "CF-1.11"
EPOCH = np.datetime64("1900-01-01", "h")
CALENDAR = {"units": "hours since 1900-01-01", "calendar": "proleptic_gregorian"}
LEAD_DIM = "prediction_timedelta"
LEAD_BOUNDS = f"{LEAD_DIM}_bounds"
LEAD_ENCODING = {"units": "hours", "dtype": "timedelta64[ns]"}  # by which xarray knows a time span
PRESSURE_LEVEL = ("air_pressure", "pressure level", "hPa")
MODEL_LEVEL = ("model_level_number", "model level, from the top", "1")

Attributes = dict[str, Any]


class Coordinate(NamedTuple):
    """One dimension's values and attributes."""

    values: NDArray[Any]
    attributes: Attributes


class Bounds(NamedTuple):
    """Where the cells of a dimension begin and end, `(N, 2)`; attributes are the dimension's."""

    name: str
    dims: tuple[str, str]
    values: NDArray[Any]


class Variable(NamedTuple):
    """One variable of a forecast, and where it lies among the channels."""

    name: str
    channels: slice
    dims: tuple[str, ...]
    attributes: Attributes

    @property
    def on_levels(self) -> bool:
        """Whether it has levels."""
        return "level" in self.dims


@final
@dataclass(frozen=True)
class ForecastFormat:
    """What a forecast consists of.

    Attributes:
        channels: that come out, in order.
        units: by variable.
        hours: lead times.
        members: of an ensemble; 0: none.
        summed: variables whose values are sums over the `span` hours before their time.
        model_levels: levels are those of a model, by number, not of pressure.
    """

    channels: tuple[Channel, ...]
    units: Mapping[str, str]
    times: Times
    hours: tuple[int, ...]
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    members: int = 0
    summed: tuple[str, ...] = ()
    span: int = 0
    model_levels: bool = False

    @classmethod
    def of(
        cls, store: Store, units: Mapping[str, str], request: ForecastRequest
    ) -> "ForecastFormat":
        """The one of a request, on the grid of a store."""
        names = dict.fromkeys(channel.variable for channel in store.channels.output_channels)
        summed = tuple(name for name in names if is_accumulated(name, store.config))
        return cls(
            channels=store.channels.output_channels,
            units=units,
            times=request.initial_times(),
            hours=request.lead_hours(store.config.step_hours),
            latitude=store.latitude,
            longitude=store.longitude,
            members=request.members,
            summed=summed,
            span=store.config.step_hours if summed else 0,
            model_levels=any(store.source.variables[name].model_levels for name in names),
        )

    @property
    def height(self) -> int:
        """Rows of the globe."""
        return len(self.latitude)

    @property
    def levels(self) -> list[int]:
        """Of the variables that have levels, in order."""
        return list(dict.fromkeys(c.level for c in self.channels if c.level is not None))

    @property
    def variables(self) -> list[Variable]:
        """All of them, in the order of the channels."""
        found: list[Variable] = []
        for name in dict.fromkeys(channel.variable for channel in self.channels):
            places = [i for i, channel in enumerate(self.channels) if channel.variable == name]
            level = ("level",) if self.channels[places[0]].level is not None else ()
            dims = (*self.leading_dims, *level, "latitude", "longitude")
            span = slice(places[0], places[-1] + 1)
            found.append(Variable(name, span, dims, self._variable_attributes(name)))
        return found

    @property
    def leading_dims(self) -> tuple[str, ...]:
        """The dimensions that every variable begins with: a field on disk is one place of them."""
        return (*(("number",) if self.members else ()), "time", LEAD_DIM)

    @property
    def coordinates(self) -> dict[str, Coordinate]:
        """Of all dimensions, by name."""
        known = {
            "number": Coordinate(
                np.arange(self.members),
                _coordinate_attributes("realization", "member of the ensemble", {"units": "1"}),
            ),
            "time": Coordinate(
                (self.times.astype("M8[h]") - EPOCH).astype(np.int64),
                _coordinate_attributes("forecast_reference_time", "initial time", CALENDAR),
            ),
            LEAD_DIM: Coordinate(
                np.array(self.hours, np.int64),
                _coordinate_attributes("forecast_period", "lead time", LEAD_ENCODING)
                | ({"bounds": LEAD_BOUNDS} if self.summed else {}),
            ),
            "level": Coordinate(np.array(self.levels, np.int64), self._level_attributes()),
            "latitude": Coordinate(
                self.latitude,
                _coordinate_attributes(
                    "latitude", "latitude", {"units": "degrees_north", "axis": "Y"}
                ),
            ),
            "longitude": Coordinate(
                self.longitude,
                _coordinate_attributes(
                    "longitude", "longitude", {"units": "degrees_east", "axis": "X"}
                ),
            ),
        }
        return {name: found for name, found in known.items() if len(found.values)}

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """Over which spans values are sums, if any are."""
        if not self.summed:
            return ()
        hours = np.array(self.hours, np.int64)
        values = np.stack([hours - self.span, hours], axis=1)
        return (Bounds(LEAD_BOUNDS, (LEAD_DIM, "bounds"), values),)

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Sizes of all dimensions of a variable."""
        return tuple(len(self.coordinates[dim].values) for dim in variable.dims)

    def place(self, member: int, time: int, lead: int) -> tuple[int, ...]:
        """Where a field lies in the `leading` dimensions."""
        return (*((member,) if self.members else ()), time, lead)

    def describe_field(self, job: ForecastJob, lead: int) -> str:
        """Which forecast and lead time, for people."""
        member = f", member {job.member}" if self.members else ""
        return f"{self.times[job.time].astype('M8[h]')} +{self.hours[lead]}h{member}"

    def _variable_attributes(self, name: str) -> Attributes:
        unit = canonical_unit(self.units.get(name, ""))
        known = KNOWN_VARIABLES.get(name)
        names = known.standard_names if known is not None else ()
        return {
            **({"standard_name": names[0]} if names else {}),
            "long_name": name.replace("_", " "),
            **({"units": unit} if unit else {}),
            # As against a difference of temperatures, which has the same unit.
            **({"units_metadata": "temperature: on_scale"} if unit == "K" else {}),
            **self._cell_methods(name),
        }

    def _cell_methods(self, name: str) -> Attributes:
        if not self.summed:
            return {}
        return {"cell_methods": f"{LEAD_DIM}: {'sum' if name in self.summed else 'point'}"}

    def _level_attributes(self) -> Attributes:
        standard_name, long_name, units = MODEL_LEVEL if self.model_levels else PRESSURE_LEVEL
        return _coordinate_attributes(
            standard_name, long_name, {"units": units, "positive": "down", "axis": "Z"}
        )


def _coordinate_attributes(
    standard_name: str, long_name: str, others: Mapping[str, Any]
) -> Attributes:
    return {"standard_name": standard_name, "long_name": long_name, **others}


MAX_VALUE_LENGTH = 60  # characters of a value in a message
SETTING_KEYS = {
    "dtype": "trainer.dtype",
    "hours": "lead or every",
    "stores": "data.store",
    "times": "init",
    "variables": "data.variables",
    "weights": "the weights in checkpoint",
}

Settings = dict[str, Any]


def settings_of(
    config: ForecastConfig, form: ForecastFormat, weights: str, stores: Sequence[str]
) -> Settings:
    """All that a forecast depends on but for the mesh, which only rounds differently.

    Args:
        weights: the mark of the checkpoint, and `stores` the addresses of the initial states.
    """
    request, variables = config.request, config.data.variables
    return {
        "checkpoint": str(Path(request.checkpoint).expanduser().absolute()),
        "weights": weights,
        "stores": list(stores),
        "dtype": config.trainer.dtype,
        "variables": {name: asdict(variables[name]) for name in sorted(variables)},
        "perturb": request.perturb,
        "perturb_seed": request.perturb_seed,
        **format_to_json(form),
    }


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What was another one, for people; empty if all is the same."""
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            values = (before.get(key), now.get(key))
            if max(len(str(value)) for value in values) > MAX_VALUE_LENGTH:
                return f"another {SETTING_KEYS.get(key, key)}"
            return f"{SETTING_KEYS.get(key, key)}={values[0]}, not {values[1]}"
    return ""


def format_to_json(form: ForecastFormat) -> Settings:
    """A form as JSON."""
    return {
        "channels": [[channel.variable, channel.level] for channel in form.channels],
        "units": dict(form.units),
        "times": [str(time.astype("M8[h]")) for time in form.times],
        "hours": list(form.hours),
        "latitude": form.latitude.tolist(),
        "longitude": form.longitude.tolist(),
        "members": form.members,
        "summed": list(form.summed),
        "span": form.span,
        "model_levels": form.model_levels,
    }


def format_from_json(place: Path, said: Mapping[str, Any]) -> ForecastFormat:
    """What `describe` made.

    Raises:
        UserError: it is damaged.
    """
    try:
        return ForecastFormat(
            tuple(Channel(variable, level) for variable, level in said["channels"]),
            dict(said["units"]),
            np.array(said["times"], "M8[ns]"),
            tuple(map(int, said["hours"])),
            np.array(said["latitude"], float),
            np.array(said["longitude"], float),
            int(said["members"]),
            # Earlier versions did not say these.
            tuple(said.get("summed", ())),
            int(said.get("span", 0)),
            bool(said.get("model_levels", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place}: what it says of itself can't be read ({error!r}).") from error

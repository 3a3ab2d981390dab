"""The form of a forecast on disk: that of WeatherBench 2's forecasts, described as CF wants it.

    VARIABLE   ([number,] time, prediction_timedelta, [level,] latitude, longitude)  float32

`time` is when a forecast starts; `number` is there for ensembles, `level` for variables on levels.

Source: Rasp et al. 2024, "WeatherBench 2", for dimensions and names; the CF conventions 1.11 and
their table of standard names for attributes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.known_units import KNOWN
from credit_dp.data.schema import Channel
from credit_dp.data.store import Store
from credit_dp.data.unit_text import canonical
from credit_dp.forecast.request import Request, Times

CONVENTIONS = "CF-1.11"
EPOCH = np.datetime64("1900-01-01", "h")
CALENDAR = {"units": "hours since 1900-01-01", "calendar": "proleptic_gregorian"}

Attributes = dict[str, Any]


class Coordinate(NamedTuple):
    """One dimension's values and attributes."""

    values: NDArray[Any]
    attributes: Attributes


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
class Form:
    """What a forecast consists of.

    Attributes:
        channels: that come out, in order.
        units: by variable.
        hours: lead times.
        members: of an ensemble; 0: none.
    """

    channels: tuple[Channel, ...]
    units: Mapping[str, str]
    times: Times
    hours: tuple[int, ...]
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    members: int = 0

    @classmethod
    def of(cls, store: Store, units: Mapping[str, str], request: Request) -> "Form":
        """The one of a request, on the grid of a store."""
        return cls(
            channels=store.channels.out,
            units=units,
            times=request.initial_times(),
            hours=request.lead_hours(store.config.step_hours),
            latitude=store.latitude,
            longitude=store.longitude,
            members=request.members,
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
            dims = (*self.leading, *level, "latitude", "longitude")
            span = slice(places[0], places[-1] + 1)
            found.append(Variable(name, span, dims, self._described(name)))
        return found

    @property
    def leading(self) -> tuple[str, ...]:
        """The dimensions that every variable begins with: a field on disk is one place of them."""
        return (*(("number",) if self.members else ()), "time", "prediction_timedelta")

    @property
    def coordinates(self) -> dict[str, Coordinate]:
        """Of all dimensions, by name."""
        lead = {"units": "hours", "dtype": "timedelta64[ns]"}  # by which xarray knows it for one
        known = {
            "number": Coordinate(
                np.arange(self.members),
                {"standard_name": "realization", "long_name": "member of the ensemble"},
            ),
            "time": Coordinate(
                (self.times.astype("M8[h]") - EPOCH).astype(np.int64),
                _named("forecast_reference_time", "initial time", CALENDAR),
            ),
            "prediction_timedelta": Coordinate(
                np.array(self.hours, np.int64), _named("forecast_period", "lead time", lead)
            ),
            "level": Coordinate(
                np.array(self.levels, np.int64),
                _named(
                    "air_pressure",
                    "pressure level",
                    {"units": "hPa", "positive": "down", "axis": "Z"},
                ),
            ),
            "latitude": Coordinate(
                self.latitude,
                _named("latitude", "latitude", {"units": "degrees_north", "axis": "Y"}),
            ),
            "longitude": Coordinate(
                self.longitude,
                _named("longitude", "longitude", {"units": "degrees_east", "axis": "X"}),
            ),
        }
        return {name: found for name, found in known.items() if len(found.values)}

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Sizes of all dimensions of a variable."""
        return tuple(len(self.coordinates[dim].values) for dim in variable.dims)

    def place(self, member: int, time: int, lead: int) -> tuple[int, ...]:
        """Where a field lies in the `leading` dimensions."""
        return (*((member,) if self.members else ()), time, lead)

    def _described(self, name: str) -> Attributes:
        unit = canonical(self.units.get(name, ""))
        known = KNOWN.get(name)
        names = known.standard_names if known is not None else ()
        return {
            **({"standard_name": names[0]} if names else {}),
            "long_name": name.replace("_", " "),
            **({"units": unit} if unit else {}),
        }


def _named(standard_name: str, long_name: str, others: Mapping[str, Any]) -> Attributes:
    return {"standard_name": standard_name, "long_name": long_name, **others}

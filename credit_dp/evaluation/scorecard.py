"""The scores of a forecast store: as numbers for other programs."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.schema import Channel
from credit_dp.errors import UserError
from credit_dp.evaluation.error_maps import ErrorMap
from credit_dp.evaluation.maps import Lines, MapGrid
from credit_dp.evaluation.table import ZERO
from credit_dp.evaluation.variable_scores import SOURCES, SPECTRA_OF

Array = NDArray[np.float64]
COLUMNS = ("variable", "level", "unit", "lead_hours", "score", "of", "value")
# What a reader looks at first. Source: Rasp et al. 2024, "WeatherBench 2", its headline scores.
HEADLINE = (
    Channel("geopotential", 500),
    Channel("temperature", 850),
    Channel("2m_temperature"),
    Channel("mean_sea_level_pressure"),
    Channel("specific_humidity", 700),
    Channel("u_component_of_wind", 850),
    Channel("10m_u_component_of_wind"),
    Channel("total_precipitation_24hr"),
)
SHOWN = 6  # channels with curves and spectra


@final
@dataclass(frozen=True)
class Scorecard:
    """Everything that was found out about a forecast store.

    Attributes:
        forecast, truth, climatology: what they are, in words.
        members: of the ensemble; 1 without.
        initial_times: `(I,)`.
        hours: lead times.
        units: one for each channel, empty where the truth gives none.
        scores: by name, `(sources, leads, C)` each, the sources as in `SOURCES`.
        spectra: `(2, leads, C, K, W // 2 + 1)`, of forecast and truth; in squared units times
            metres.
        bands: the K bands of latitude by name.
        maps: of a few channels.
        coasts: of the planet; see `coasts`.
    """

    forecast: str
    truth: str
    climatology: str
    members: int
    initial_times: NDArray[np.datetime64]
    hours: tuple[int, ...]
    channels: tuple[Channel, ...]
    units: tuple[str, ...]
    latitude: Array
    longitude: Array
    coasts: Lines
    scores: Mapping[str, Array]
    spectra: Array
    bands: tuple[str, ...]
    maps: tuple[ErrorMap, ...]

    @property
    def grid(self) -> MapGrid:
        """The cells of maps."""
        return MapGrid(self.latitude, self.longitude, self.coasts)

    def check(self) -> None:
        """Refuse errors that are not finite; a correlation may be undefined, where nothing varies.

        Raises:
            UserError: names the first variable of which one is NaN or infinite.
        """
        for c, lead, name, of, value in self.rows():
            if not math.isfinite(value) and not (name == "acc" and math.isnan(value)):
                where = {"persistence": self.truth, "truth": self.truth}
                where |= {"forecast": self.forecast, "climatology": self.climatology}
                raise UserError(
                    f"{where[of]}: the {name} of the {of} is {value} for {self.channels[c].name} "
                    f"at {self.hours[lead]} h. Look at this field, or leave it out of variables=."
                )

    def warnings(self) -> list[str]:
        """A line for each channel of which persistence or climatology has no error at all."""
        zero = {
            (c, of): f"{self.channels[c].name}: the RMSE of {of} is exactly 0. {ZERO[of]}"
            for c, lead, name, of, value in self.rows()
            if name == "rmse" and value == 0 and of in ZERO and self.hours[lead] > 0
        }
        return list(zero.values())

    def rows(self) -> Iterator[tuple[int, int, str, str, float]]:
        """Channel, lead, score, source and value of each number."""
        for c in range(len(self.channels)):
            for lead in range(len(self.hours)):
                for name, values in self.scores.items():
                    for source, of in enumerate(SOURCES[name]):
                        yield c, lead, name, of, float(values[source, lead, c])

    def csv(self) -> str:
        """One line for each number; no value where it is not defined."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for c, lead, name, of, value in self.rows():
            channel = self.channels[c]
            level = "" if channel.level is None else channel.level
            number = repr(value) if math.isfinite(value) else ""
            unit = "1" if name == "acc" else self.units[c]
            writer.writerow((channel.variable, level, unit, self.hours[lead], name, of, number))
        return text.getvalue()

    def json(self) -> str:
        """The same, nested by channel, score, lead time and source, with what was scored."""
        nested: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
        for c, lead, name, of, value in self.rows():
            of_channel = nested.setdefault(self.channels[c].name, {})
            of_lead = of_channel.setdefault(name, {}).setdefault(f"{self.hours[lead]}h", {})
            of_lead[of] = value if math.isfinite(value) else None
        content = {**self.facts(), "scores": nested}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def facts(self) -> dict[str, object]:
        """What was scored."""
        names = [channel.name for channel in self.channels]
        return {
            "forecast": self.forecast,
            "truth": self.truth,
            "climatology": self.climatology,
            "members": self.members,
            "initial_times": [str(time.astype("M8[m]")) for time in self.initial_times],
            "lead_hours": list(self.hours),
            "grid": [len(self.latitude), len(self.longitude)],
            "units": dict(zip(names, self.units, strict=True)),
        }

    def spectra_csv(self) -> str:
        """The spectra of the channels that are shown, one line for each wavenumber."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("variable", "level", "lead_hours", "band", "wavenumber", *SPECTRA_OF))
        for c in headline(self.channels):
            channel = self.channels[c]
            level = "" if channel.level is None else channel.level
            for lead, hours in enumerate(self.hours):
                for band, name in enumerate(self.bands):
                    for k, pair in enumerate(self.spectra[:, lead, c, band].T.tolist()):
                        cells = [repr(x) if math.isfinite(x) else "" for x in pair]
                        writer.writerow((channel.variable, level, hours, name, k, *cells))
        return text.getvalue()


def headline(channels: tuple[Channel, ...]) -> list[int]:
    """The places of a few channels to show: those that are known best, then the first others."""
    known = [channels.index(channel) for channel in HEADLINE if channel in channels]
    others = [place for place in range(len(channels)) if place not in known]
    return sorted((known + others)[:SHOWN])

"""Final scores: as numbers for other programs, and as a table for the reader."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from credit_dp.data.channels import Channel
from credit_dp.errors import UserError
from credit_dp.evaluation.maps import Lines, MapGrid
from credit_dp.evaluation.metrics import SCORE_SOURCES, SPECTRA_SOURCES, ErrorMap

SOURCE_HEADINGS = {
    "model": "model\n",
    "persistence": "persis-\ntence",
    "climatology": "clima-\ntology",
}
SOURCES = tuple(SOURCE_HEADINGS)
NOT_FINITE_ADVICE = {
    "model": "Its forecasts grew without bounds: train longer or with trainer.rollout, or lower "
    "trainer.evaluate_hours; the checkpoint is kept",
    "persistence": "Look at the held-out dates of the store, or change data.dates.test",
    "climatology": "Look at the training dates of the store, or change data.dates.train",
}
ZERO_ERROR_QUESTIONS = {
    "persistence": "Does this field change in time?",
    "climatology": "Is this field the same on all its dates?",
}
UNLIMITED = 10_000  # columns: more than any table has


@final
@dataclass(frozen=True)
class HeldOutScores:
    """Errors of the model and of what it has to beat.

    Shapes:
        rmse `(3, leads, C)`: the sources in the order of `SOURCES`, in each channel's own unit.
    """

    channels: tuple[str, ...]
    units: tuple[str, ...]
    hours: tuple[int, ...]
    rmse: np.ndarray
    samples: int

    def check(self) -> None:
        """Refuse scores that are not finite.

        Raises:
            UserError: names the first variable of which one is NaN or infinite.
        """
        for s, h, c in np.argwhere(~np.isfinite(self.rmse)):
            source = SOURCES[s]
            raise UserError(
                f"{self.channels[c]}: the RMSE of the {source} at {self.hours[h]} h is "
                f"{self.rmse[s, h, c]}. {NOT_FINITE_ADVICE[source]}."
            )

    def warnings(self) -> list[str]:
        """A line for each variable of which persistence or climatology has no error at all."""
        return [
            f"{channel}: the RMSE of {source} is exactly 0 at {self.hours[h]} h. "
            f"{ZERO_ERROR_QUESTIONS[source]}"
            for c, channel in enumerate(self.channels)
            for s, source in enumerate(SOURCES)
            for h in np.flatnonzero(self.rmse[s, :, c] == 0)[:1]
            if source in ZERO_ERROR_QUESTIONS
        ]

    def scalars(self) -> dict[str, float]:
        """Flat names for a tracker: `rmse/geopotential_500/24h/model`."""
        return {
            f"rmse/{channel}/{hours}h/{source}": float(self.rmse[s, h, c])
            for c, channel in enumerate(self.channels)
            for h, hours in enumerate(self.hours)
            for s, source in enumerate(SOURCES)
        }

    def to_json(self, step: int) -> str:
        """The same numbers, nested by channel, lead time and source; `step` is the model's."""
        rmse = {
            channel: {
                f"{hours}h": {source: float(self.rmse[s, h, c]) for s, source in enumerate(SOURCES)}
                for h, hours in enumerate(self.hours)
            }
            for c, channel in enumerate(self.channels)
        }
        units = dict(zip(self.channels, self.units, strict=True))
        content = {"step": step, "initial_times": self.samples, "units": units, "rmse": rmse}
        return json.dumps(content, indent=2) + "\n"

    def tables(self, width: int) -> list[Table]:
        """One table if it fits into `width` columns, else one for each lead time."""
        leads = range(len(self.hours))
        whole = self.table(leads)
        if Console(width=UNLIMITED).measure(whole).maximum <= width:
            return [whole]
        return [self.table([lead]) for lead in leads]

    def table(self, leads: Sequence[int]) -> Table:
        """One row per channel; for each of these lead times the model beside what it has to beat.

        A narrow screen breaks the unit, never a number of a single lead time.
        """
        title = f"RMSE on held-out dates ({self.samples} initial times)"
        # Narrow: with two lead times it fits into 80 columns.
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("variable", no_wrap=True)
        table.add_column("unit", overflow="fold")
        for hours in (self.hours[lead] for lead in leads):
            for source, heading in SOURCE_HEADINGS.items():
                style = "bold" if source == "model" else None
                label = f"{hours} h\n{heading}"
                table.add_column(label, justify="right", style=style, no_wrap=True)
        for c, (channel, unit) in enumerate(zip(self.channels, self.units, strict=True)):
            cells = [three_digits(value) for value in self.rmse[:, list(leads), c].T.ravel()]
            table.add_row(channel, unit, *cells)
        return table


def three_digits(value: float) -> str:
    """A number to three significant digits; from a thousand on to whole units, which is shorter."""
    return f"{value:.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


Array = NDArray[np.float64]
CSV_COLUMNS = ("variable", "level", "unit", "lead_hours", "score", "of", "value")
# What a reader looks at first. Source: Rasp et al. 2024, "WeatherBench 2", its headline scores.
HEADLINE_CHANNELS = (
    Channel("geopotential", 500),
    Channel("temperature", 850),
    Channel("2m_temperature"),
    Channel("mean_sea_level_pressure"),
    Channel("specific_humidity", 700),
    Channel("u_component_of_wind", 850),
    Channel("10m_u_component_of_wind"),
    Channel("total_precipitation_24hr"),
)
MAX_HEADLINES = 6  # channels with curves and spectra


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
        for c, lead, name, of, value in self.iter_scores():
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
            (
                c,
                of,
            ): f"{self.channels[c].name}: the RMSE of {of} is exactly 0. {ZERO_ERROR_QUESTIONS[of]}"
            for c, lead, name, of, value in self.iter_scores()
            if name == "rmse" and value == 0 and of in ZERO_ERROR_QUESTIONS and self.hours[lead] > 0
        }
        return list(zero.values())

    def iter_scores(self) -> Iterator[tuple[int, int, str, str, float]]:
        """Channel, lead, score, source and value of each number."""
        for c in range(len(self.channels)):
            for lead in range(len(self.hours)):
                for name, values in self.scores.items():
                    for source, of in enumerate(SCORE_SOURCES[name]):
                        yield c, lead, name, of, float(values[source, lead, c])

    def to_csv(self) -> str:
        """One line for each number; no value where it is not defined."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for c, lead, name, of, value in self.iter_scores():
            channel = self.channels[c]
            level = "" if channel.level is None else channel.level
            number = repr(value) if math.isfinite(value) else ""
            unit = "1" if name == "acc" else self.units[c]
            writer.writerow((channel.variable, level, unit, self.hours[lead], name, of, number))
        return text.getvalue()

    def to_json(self) -> str:
        """The same, nested by channel, score, lead time and source, with what was scored."""
        nested: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
        for c, lead, name, of, value in self.iter_scores():
            of_channel = nested.setdefault(self.channels[c].name, {})
            of_lead = of_channel.setdefault(name, {}).setdefault(f"{self.hours[lead]}h", {})
            of_lead[of] = value if math.isfinite(value) else None
        content = {**self.metadata(), "scores": nested}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def metadata(self) -> dict[str, object]:
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
        writer.writerow(("variable", "level", "lead_hours", "band", "wavenumber", *SPECTRA_SOURCES))
        for c in headline_indices(self.channels):
            channel = self.channels[c]
            level = "" if channel.level is None else channel.level
            for lead, hours in enumerate(self.hours):
                for band, name in enumerate(self.bands):
                    for k, pair in enumerate(self.spectra[:, lead, c, band].T.tolist()):
                        cells = [repr(x) if math.isfinite(x) else "" for x in pair]
                        writer.writerow((channel.variable, level, hours, name, k, *cells))
        return text.getvalue()


def headline_indices(channels: tuple[Channel, ...]) -> list[int]:
    """The places of a few channels to show: those that are known best, then the first others."""
    known = [channels.index(channel) for channel in HEADLINE_CHANNELS if channel in channels]
    others = [place for place in range(len(channels)) if place not in known]
    return sorted((known + others)[:MAX_HEADLINES])

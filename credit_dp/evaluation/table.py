"""The final scores: as numbers for a file and as a table for the reader."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from credit_dp.errors import UserError

HEADINGS = {
    "model": "model\n",
    "persistence": "persis-\ntence",
    "climatology": "clima-\ntology",
}
SOURCES = tuple(HEADINGS)
NOT_FINITE = {
    "model": "Its forecasts grew without bounds: train longer or with trainer.rollout, or lower "
    "trainer.evaluate_hours; the checkpoint is kept",
    "persistence": "Look at the held-out dates of the store, or change data.dates.test",
    "climatology": "Look at the training dates of the store, or change data.dates.train",
}
ZERO = {
    "persistence": "Does this field change in time?",
    "climatology": "Is this field the same on all its dates?",
}
UNLIMITED = 10_000  # columns: more than any table has


@final
@dataclass(frozen=True)
class Scores:
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
                f"{self.rmse[s, h, c]}. {NOT_FINITE[source]}."
            )

    def warnings(self) -> list[str]:
        """A line for each variable of which persistence or climatology has no error at all."""
        return [
            f"{channel}: the RMSE of {source} is exactly 0 at {self.hours[h]} h. {ZERO[source]}"
            for c, channel in enumerate(self.channels)
            for s, source in enumerate(SOURCES)
            for h in np.flatnonzero(self.rmse[s, :, c] == 0)[:1]
            if source in ZERO
        ]

    def numbers(self) -> dict[str, float]:
        """Flat names for a tracker: `rmse/geopotential_500/24h/model`."""
        return {
            f"rmse/{channel}/{hours}h/{source}": float(self.rmse[s, h, c])
            for c, channel in enumerate(self.channels)
            for h, hours in enumerate(self.hours)
            for s, source in enumerate(SOURCES)
        }

    def json(self, step: int) -> str:
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
            for source, heading in HEADINGS.items():
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

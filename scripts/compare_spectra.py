"""Draws the zonal spectra of several scorecards in one picture.

`python scripts/compare_spectra.py scores/bilinear scores/transpose --out spectra.png` takes the
`spectra.csv` that `credit-dp evaluate` has left in each folder, at the longest lead time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit_dp.evaluation.figure_style import (
    SOURCE_LINES,
    escape_mathtext,
    figure_style,
    power_label,
    series_colour,
)

CHANNELS = (("geopotential", 500), ("2m_temperature", None))  # variable, hPa
UNITS = {"geopotential": "m2 s-2", "2m_temperature": "K"}
BAND = "30N to 60N"
DPI = 90  # small enough for a page


@figure_style()
def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for each channel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("spectra.png"))
    chosen = parser.parse_args(arguments)
    cards = {folder.name: pd.read_csv(folder / "spectra.csv") for folder in chosen.folders}
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    axes_of = figure.subplots(1, len(CHANNELS))
    for axes, (variable, level) in zip(axes_of, CHANNELS, strict=True):
        draw(axes, cards, variable, level)
    axes_of[0].legend()
    figure.savefig(chosen.out, dpi=DPI)


def draw(axes: Axes, cards: dict[str, pd.DataFrame], variable: str, level: int | None) -> None:
    """Draw the spectrum of one channel in each scorecard, and that of the truth."""
    for place, (name, card) in enumerate(cards.items()):
        levels = card["level"].isna() if level is None else card["level"] == level
        chosen = card[(card["variable"] == variable) & levels]
        chosen = chosen[(chosen["band"] == BAND) & (chosen["wavenumber"] > 0)]
        hours = chosen["lead_hours"].max()
        chosen = chosen[chosen["lead_hours"] == hours].set_index("wavenumber")
        axes.plot(chosen["forecast"], color=series_colour(place), label=name)
    axes.plot(chosen["truth"], label="truth", **SOURCE_LINES["truth"])
    axes.set_yscale("log")
    axes.set_xlabel("zonal wavenumber")
    axes.set_ylabel(power_label(UNITS[variable]))
    on_level = "" if level is None else f" at {level} hPa"
    axes.set_title(f"{escape_mathtext(variable)}{on_level}, {BAND}, {hours} h")


if __name__ == "__main__":
    main()

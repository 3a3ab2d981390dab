"""Draw a stored forecast at one place: its variables over lead time, members as a plume.

`draw_series` reads the rows around the place only, of all lead times and members at once.
"""

from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from credit_dp.data.regrid import outside_points
from credit_dp.data.units import usual_unit
from credit_dp.errors import UserError
from credit_dp.evaluation.field_display import Display, display_of
from credit_dp.evaluation.figure_style import (
    PALE,
    SERIES,
    figure_style,
    place_label,
    title_text,
    unit_label,
)
from credit_dp.evaluation.forecast_maps import find_init, find_level, find_variable, save_picture
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.map_plots import TITLE_CHARACTERS, field_title
from credit_dp.evaluation.score_plots import LEGEND_LINE_INCHES, NUMBER, lead_axis

WIDTH, PANEL_HEIGHT = 7.9, 2.0  # inches
TOP, BOTTOM = 0.85, 0.5  # inches for title and legend, and for the label of the lead times
BANDS = {"lowest to highest": (0.0, 1.0), "10 to 90 %": (0.1, 0.9), "25 to 75 %": (0.25, 0.75)}
BAND_COLOURS = ("#dbe4f2", "#b3c6e3", "#7f9fcf")
LEAST_IN_BANDS = 10  # members; of fewer, a tenth is none, and each is drawn


@final
class SeriesRequest(NamedTuple):
    """What to draw at a place.

    Attributes:
        place: latitude and longitude in degrees.
        variables: none for the usual one.
        level: of the variables that have levels; None for the usual one.
        init: initial time in ISO format; empty for the first.
    """

    place: tuple[float, float]
    variables: tuple[str, ...] = ()
    level: int | None = None
    init: str = ""


@final
class Series(NamedTuple):
    """A variable at a place; `values` are as `display` shows them, `(L, M)`."""

    title: str
    display: Display
    values: NDArray[np.float64]


@figure_style()
def draw_series(store: ForecastStore, request: SeriesRequest, path: Path) -> None:
    """Write a picture with a panel for each variable, as PNG or SVG by the suffix of the path.

    Raises:
        UserError: the request does not fit the forecast, or the file can't be written.
    """
    check_place(store, request.place)
    init = find_init(store, request.init)
    fields = find_fields(store, request)
    series = [read_series(store, name, level, init, request.place) for name, level in fields]
    height = TOP + PANEL_HEIGHT * len(series) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(
        left=0.8 / WIDTH,
        right=1 - 0.2 / WIDTH,
        bottom=BOTTOM / height,
        top=1 - TOP / height,
        hspace=0.25,
    )
    panels = list(figure.subplots(len(series), 1, sharex=True, squeeze=False).flat)
    leads = lead_axis(panels[-1], (store.lead_times / np.timedelta64(1, "h")).tolist())
    for axes, one in zip(panels, series, strict=True):
        draw_plume(axes, leads, one.values)
        axes.set_title(title_text(one.title, TITLE_CHARACTERS))
        axes.set_ylabel(unit_label(one.display.unit))
        axes.yaxis.set_major_formatter(NUMBER)
    start = store.calendar.text(store.initial_times[init]).replace("T", " ")
    title = f"{place_label(*request.place)} (bilinear), forecast from {start} UTC"
    figure.suptitle(title, x=0.01, y=1 - 0.08 / height, ha="left", va="top")
    if store.members > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        anchor = (0.005, 1 - (0.14 + LEGEND_LINE_INCHES) / height)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=anchor, ncols=len(labels))
    save_picture(figure, path)


def find_fields(store: ForecastStore, request: SeriesRequest) -> list[tuple[str, int | None]]:
    """Return each variable with its level; a level that none of them has is an error."""
    names = [find_variable(store, name) for name in request.variables or ("",)]
    on_levels = [name for name in names if store.variables[name].levels] or names
    return [
        (name, find_level(store, name, request.level if name in on_levels else None))
        for name in names
    ]


def check_place(store: ForecastStore, place: tuple[float, float]) -> None:
    """Check that a forecast covers a place.

    Raises:
        UserError: it does not.
    """
    if min(store.grid) < 2:
        rows, columns = store.grid
        raise UserError(
            f"{store.where}: a series at a place needs at least two rows and two columns, the "
            f"forecast has {rows} x {columns}"
        )
    latitude, longitude = place
    if outside_points(store.grid, np.array([latitude]), np.array([longitude])).any():
        (north, south), (west, east) = store.grid.extent
        raise UserError(
            f"place: {store.where} covers latitude {south:g} to {north:g} and longitude "
            f"{west:g} to {east:g}, got [{latitude:g},{longitude:g}]"
        )


def read_series(
    store: ForecastStore, name: str, level: int | None, init: int, place: tuple[float, float]
) -> Series:
    """Read a variable at a place.

    Raises:
        UserError: it can't be read, or has no value there.
    """
    display = display_of(name, store.variables[name].units or usual_unit(name))
    values = store.read_at(name, level, init, *place)
    if not np.isfinite(values).any():
        raise UserError(
            f"place: {name} of {store.where} has no value at {place_label(*place)}. Change place."
        )
    title = field_title(display, level, bool(store.model_levels))
    return Series(title, display, display.values(values))


def draw_plume(axes: Axes, leads: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    """Draw the median of members `(L, M)` in front of bands of quantiles, or of each member."""
    members = values.shape[1]
    if members >= LEAST_IN_BANDS:
        for (label, shares), colour in zip(BANDS.items(), BAND_COLOURS, strict=True):
            low, high = np.quantile(values, shares, axis=1)
            axes.fill_between(leads, low, high, color=colour, linewidth=0, label=label)
    elif members > 1:
        lines = axes.plot(leads, values, color=PALE, linewidth=0.8)
        lines[0].set_label("members")
    median = np.quantile(values, 0.5, axis=1)
    marker = "o" if len(leads) < 13 else ""
    axes.plot(leads, median, color=SERIES[0], marker=marker, label="median")
    axes.margins(x=0.02)


def usual_series_name(where: str, store: ForecastStore, request: SeriesRequest) -> str:
    """Return the name of a picture: forecast-geopotential-500-46.9,7.4.png."""
    fields = find_fields(store, request)
    named = [name if level is None else f"{name}-{level}" for name, level in fields]
    place = ",".join(f"{degrees:g}" for degrees in request.place)
    parts = [Path(where.rstrip("/")).stem, *named, request.init.replace(":", ""), place]
    return "-".join(filter(None, parts)) + ".png"

"""Draw the fields of a stored forecast: one as a picture, or all lead times as an animated GIF.

`draw_forecast` reads one field at a time. Matplotlib's animation is imported only for a GIF.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from credit_dp import checks
from credit_dp.bands import balanced_bounds
from credit_dp.checks import did_you_mean
from credit_dp.data.grid import GLOBAL, REGIONS, Grid
from credit_dp.data.units import usual_unit
from credit_dp.errors import UserError
from credit_dp.evaluation.field_display import (
    departure_from_rows,
    field_scale,
    line_values,
)
from credit_dp.evaluation.figure_style import figure_style, title_text
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.map_plots import (
    PROJECTIONS,
    TITLE_CHARACTERS,
    add_bar,
    display_in,
    draw_field,
    draw_lines,
    draw_surroundings,
    field_title,
    frame_of,
    shade_label,
)
from credit_dp.evaluation.map_projection import Box, box_of
from credit_dp.evaluation.maps import MapGrid
from credit_dp.files import atomic_path

CHART_INCHES = 7.0  # width of the map
TALLEST_INCHES = 6.0
FRAMES_PER_SECOND = 4
SCALE_FIELDS = 5  # of all lead times, from which the colours of a GIF are found
USUAL = ("geopotential", 500)  # what is drawn if the forecast has it and the user says nothing


@final
@dataclass(frozen=True)
class ChartRequest:
    """What to draw; empty or None: see `credit-dp forecast plot --help`.

    Attributes:
        lead: in hours; None for all lead times.
        init: initial time in ISO format.
        member: from 0.
        box: south, north, west and east in degrees, instead of a region.
        contours: step between lines in the unit of the map, or whether there are lines, at round
            values; None: as usual for the variable.
        edges: number of ranks whose bands are shown; 0: none.
    """

    variable: str = ""
    level: int | None = None
    lead: float | None = None
    init: str = ""
    member: int = 0
    region: str = ""
    box: tuple[float, ...] = ()
    projection: str = ""
    contours: float | bool | None = None
    edges: int = 0


@figure_style()
def draw_forecast(store: ForecastStore, planet: str, request: ChartRequest, path: Path) -> int:
    """Write one lead time as PNG or SVG, or those of the request as GIF; return how many.

    The suffix of the path says which.

    Raises:
        UserError: the request does not fit the forecast, or the file can't be written.
    """
    chart = Chart(store, planet, request)
    if path.suffix != ".gif":
        chart.draw(chart.leads[0])
        save_picture(chart.figure, path)
        return len(chart.leads)
    from matplotlib.animation import PillowWriter  # imports much that one map doesn't need

    # Pillow finds the format from the suffix.
    temporary_name = path.with_name(f".{path.stem}.partial.gif")
    with translate_write_errors(path), atomic_path(path, temporary_name) as temporary:
        writer = PillowWriter(fps=FRAMES_PER_SECOND)
        with writer.saving(chart.figure, str(temporary), None):  # in its own resolution
            for lead in chart.leads:
                chart.draw(lead)
                writer.grab_frame()
    return len(chart.leads)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of the path.

    Raises:
        UserError: the file can't be written.
    """
    image_format = path.suffix[1:]
    # Without a date the same figure gives the same bytes.
    metadata = {"Date": None} if image_format == "svg" else {}
    with translate_write_errors(path), atomic_path(path) as temporary:
        figure.savefig(temporary, format=image_format, metadata=metadata)


@contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the key to change."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: the picture could not be written ({error.strerror or error}). Free space "
            "there or change out."
        ) from error


@final
class Chart:
    """A figure of one map, on which the lead times of a forecast are drawn one after the other.

    Attributes:
        leads: indices of the lead times to draw.
    """

    def __init__(self, store: ForecastStore, planet: str, request: ChartRequest) -> None:
        """Find what is requested, and the colours from some of the fields."""
        self._store = store
        self._request = request
        self._variable = find_variable(store, request.variable)
        self._level = find_level(store, self._variable, request.level)
        self._init = find_init(store, request.init)
        self.leads = find_leads(store, request.lead)
        if not 0 <= request.member < store.members:
            raise UserError(
                f"member: needs 0 to {store.members - 1}, as {store.where} has {store.members}, "
                f"got {request.member}"
            )
        cells = store.grid
        if cells[1] < 2:
            raise UserError(f"{store.where}: maps need at least two columns, the forecast has one")
        if request.edges and not 1 < request.edges <= cells[0]:
            raise UserError(f"edges: needs 2 to {cells[0]} ranks, got {request.edges}")
        self._bounds = balanced_bounds(cells[0], request.edges) if request.edges else ()
        self._grid = MapGrid(cells, planet)
        self._frame = frame_of(cells, request.projection, find_box(cells, request))
        unit = store.variables[self._variable].units or usual_unit(self._variable)
        self._display = display_in(cells, self._variable, unit)
        sampled = np.linspace(0, len(self.leads) - 1, min(len(self.leads), SCALE_FIELDS))
        self._kept = {lead: self._read(lead) for lead in (self.leads[int(i)] for i in sampled)}
        sample, fields = self._frame.sample, self._kept.values()
        shades = [sample(self._shade(values)) for values in fields]
        self._scale = field_scale(self._display, *shades)
        self._lines = self._line_values([sample(values) for values in fields])
        high = CHART_INCHES / self._frame.aspect
        self._map_inches = CHART_INCHES * min(1.0, TALLEST_INCHES / high)
        self.figure = self._new_figure()

    def draw(self, lead: int) -> None:
        """Draw a lead time over what is there."""
        display, frame = self._display, self._frame
        values = self._kept[lead] if lead in self._kept else self._read(lead)
        axes, bar = self.figure.axes
        axes.clear()
        draw_field(axes, frame, frame.sample(self._shade(values)), self._scale)
        legend: list[Artist] = []
        if len(self._lines):
            legend += draw_lines(axes, frame, frame.sample(values), self._lines, display)
        legend += draw_surroundings(axes, frame, self._grid, self._bounds)
        if not bar.has_data() and not bar.collections:
            add_bar(self.figure, bar, self._scale, shade_label(display))
        text = self._store.calendar.text
        start, after = self._store.initial_times[self._init], self._store.lead_times[lead]
        hours = after / np.timedelta64(1, "h")
        valid = (start + after).astype(start.dtype)
        axes.set_title(
            f"{text(start).replace('T', ' ')} + {hours:g} h, "
            f"valid {text(valid).replace('T', ' ')} UTC"
        )
        name = field_title(display, self._level, bool(self._store.model_levels))
        member = f", member {self._request.member}" if self._store.members > 1 else ""
        self.figure.suptitle(
            title_text(name + member, TITLE_CHARACTERS), x=axes.get_position().x0, ha="left"
        )
        for old in self.figure.legends:
            old.remove()
        if legend:
            self.figure.legend(handles=legend, loc="lower center", ncols=len(legend))

    def _read(self, lead: int) -> np.ndarray:
        one = (np.array([self._init]), np.array([lead]))
        levels = () if self._level is None else (self._level,)
        fields = self._store.read(self._variable, levels, *one, member=self._request.member)
        return self._display.values(fields[0, 0, 0, 0])

    def _shade(self, values: np.ndarray) -> np.ndarray:
        return departure_from_rows(values) if self._display.departure else values

    def _line_values(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        step = self._request.contours
        if step is False or (step is None and not self._display.lines):
            return np.empty(0)
        return line_values(np.stack(fields), step if isinstance(step, float) else None)

    def _new_figure(self) -> Figure:
        wide = self._map_inches
        high = wide / self._frame.aspect
        width, height = CHART_INCHES + 0.9, high + 1.55
        figure = Figure(figsize=(width, height))
        left, bottom = (width - wide) / 2, 0.98
        figure.add_axes((left / width, bottom / height, wide / width, high / height))
        figure.add_axes((0.2, (bottom - 0.36) / height, 0.6, 0.13 / height))
        return figure


def find_variable(store: ForecastStore, name: str) -> str:
    """Return the variable of this name, or for an empty one the usual one, or the first."""
    if not store.variables:
        raise UserError(f"{store.where}: has no variable on time, lead time, rows and columns.")
    if name and name not in store.variables:
        raise UserError(
            f"variable: {store.where} has {', '.join(store.variables)}, got {name!r}."
            f"{did_you_mean(name, store.variables)}"
        )
    return name or (USUAL[0] if USUAL[0] in store.variables else next(iter(store.variables)))


def find_level(store: ForecastStore, variable: str, level: int | None) -> int | None:
    """Return a level of a variable; None for a variable without levels."""
    levels = store.variables[variable].levels
    if not levels:
        if level is not None:
            raise UserError(f"level: {variable} has no levels, got {level}. Leave level out.")
        return None
    if level is None:
        return USUAL[1] if USUAL[1] in levels else levels[0]
    if level not in levels:
        raise UserError(f"level: {variable} is on {', '.join(map(str, levels))}, got {level}")
    return level


def find_init(store: ForecastStore, text: str) -> int:
    """Return the index of an initial time; the first for an empty text."""
    times = store.initial_times
    found = np.flatnonzero(times == store.calendar.parse("init", text)) if text else np.array([0])
    if not len(found):
        first, last = (store.calendar.short_text(time) for time in times[[0, -1]])
        span = first if len(times) == 1 else f"{len(times)} times from {first} to {last}"
        raise UserError(f"init: {store.where} has {span}, got {text}")
    return int(found[0])


def find_leads(store: ForecastStore, hours: float | None) -> list[int]:
    """Return the indices of a lead time, or of all."""
    if hours is None:
        return list(range(len(store.lead_times)))
    stored = store.lead_times / np.timedelta64(1, "h")
    found = np.flatnonzero(stored == hours)
    if not len(found):
        shown = ", ".join(f"{x:g}h" for x in stored[:8]) + (" ..." if len(stored) > 8 else "")
        last = f" to {stored[-1]:g}h" if len(stored) > 8 else ""
        raise UserError(f"lead: {store.where} has {shown}{last}, got {hours:g}h")
    return [int(found[0])]


def find_box(cells: Grid, request: ChartRequest) -> Box | None:
    """Return the part of a grid to show, None for all."""
    if request.projection:
        checks.one_of("projection", request.projection, PROJECTIONS)
    if cells.is_projected:
        for key in ("projection", "region", "box"):
            if getattr(request, key):
                name = "region" if key == "box" else key
                raise UserError(
                    f"{name}: the forecast is on a projection and is drawn on it. Leave {name} out."
                )
        return None
    whole = box_of(cells)
    if request.box:
        wanted = _checked_box(request.box)
    elif request.region in ("", GLOBAL):
        wanted = None
    else:
        single = [name for name, x in REGIONS.items() if len(x.latitude) == 1]
        checks.one_of("region", request.region, single)
        region = REGIONS[request.region]
        (south, north), *_ = region.latitude
        west, east = region.longitude[0][0], region.longitude[-1][1]
        if not np.isfinite(west):
            west, east = whole.west, whole.east
        wanted = Box(south, north, west - 360 if west > east else west, east)
    if request.projection == "polar":
        wanted = hemisphere(wanted or whole)
    return None if wanted is None else _common_part(wanted, whole, request)


def hemisphere(box: Box) -> Box:
    """Return the part of a box in the hemisphere of its middle, the northern for the globe."""
    if box.middle[1] >= 0:
        return Box(max(box.south, 0.0), box.north, box.west, box.east)
    return Box(box.south, min(box.north, 0.0), box.west, box.east)


def _checked_box(values: tuple[float, ...]) -> Box:
    if len(values) == 4:
        south, north, west, east = values
        east += 360 if east <= west else 0
        if -90 <= south < north <= 90 and -360 <= west < east <= west + 360:
            return Box(south, north, west, east)
    raise UserError(
        "region: needs a name, or [south,north,west,east] in degrees, like [35,75,-12,42], got "
        f"[{','.join(f'{x:g}' for x in values)}]"
    )


def _common_part(wanted: Box, whole: Box, request: ChartRequest) -> Box:
    south, north = max(wanted.south, whole.south), min(wanted.north, whole.north)
    west, east = wanted.west, wanted.east
    if wanted.goes_round and not whole.goes_round:
        west, east = whole.west, whole.east
    elif not whole.goes_round:
        # Turn the box until it lies at the grid.
        turn = round(((whole.west + whole.east) - (west + east)) / 2 / 360) * 360
        west, east = max(west + turn, whole.west), min(east + turn, whole.east)
    if south >= north or west >= east:
        raise UserError(
            f"region: the forecast covers latitude {whole.south:g} to {whole.north:g} and "
            f"longitude {whole.west:g} to {whole.east:g}, which has no part of "
            f"{request.region or list(request.box) or 'this hemisphere'}"
        )
    return Box(south, north, west, east)


def usual_name(where: str, store: ForecastStore, request: ChartRequest, suffix: str) -> str:
    """Return the name of a picture, with what was requested: forecast-geopotential-500-48h.png."""
    variable = find_variable(store, request.variable)
    level = find_level(store, variable, request.level)
    parts = [
        Path(where.rstrip("/")).stem,
        variable,
        "" if level is None else str(level),
        request.init.replace(":", ""),
        "" if request.lead is None else f"{request.lead:g}h",
        f"member{request.member}" if request.member else "",
        request.region or ",".join(f"{degrees:g}" for degrees in request.box),
        request.projection,
    ]
    return "-".join(filter(None, parts)) + suffix

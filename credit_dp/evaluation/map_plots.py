"""Draw maps: forecast, truth and error of a run, errors on grid points, and single fields.

`draw_map` and `draw_last_lead_errors` write the PNGs of a run, `draw_error_maps` is a part of
scorecards. A map is drawn in three steps: a `MapFrame` is the paper, `draw_field` fills it with
colours, and `draw_surroundings` adds coasts, the graticule, the outline and the bands of ranks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from matplotlib.patheffects import withStroke

from credit_dp.data.grid import POLE, Degrees, Grid
from credit_dp.errors import counted
from credit_dp.evaluation.field_display import (
    ColourScale,
    Display,
    Values,
    departure_from_rows,
    display_of,
    error_scale,
    field_scale,
    line_values,
    size_scale,
)
from credit_dp.evaluation.figure_style import (
    BAND_EDGE,
    COAST,
    LINE_LABEL_SIZE,
    NO_VALUE,
    OUTLINE,
    REFERENCE,
    TEMPERATURE,
    figure_style,
    latitude_label,
    longitude_label,
    title_text,
    unit_label,
    with_unit,
)
from credit_dp.evaluation.held_out import LastLeadDiagnostics
from credit_dp.evaluation.map_projection import (
    LATITUDE_LIMIT,
    Box,
    EqualEarth,
    LatLon,
    MapFrame,
    MapProjection,
    PlaneFrame,
    Polar,
    SphereFrame,
    box_of,
)
from credit_dp.evaluation.maps import COAST_LABELS, FieldMap, MapGrid, coasts_of
from credit_dp.evaluation.score_plots import save_figure
from credit_dp.evaluation.scorecard import HeldOutScores

ROW_INCHES = 9.0  # width of all maps in a row
ROUND_STEPS = (1, 2, 5, 10, 15, 20, 30)  # degrees between lines of a graticule
GRATICULE_LINES = 7  # at most, in one direction
MAX_LINES = 12  # in a map of three; of more every second
LABEL_INCHES = 0.12  # about a number on a line
LINE_INCHES = 0.035  # between lines with numbers
MIN_SLOPE = 1e-30  # of a field between lines
COAST_WIDTH, THIN_COAST_WIDTH = 0.6, 0.45  # points
WIDE_INCHES = 4.0  # of a map; coasts on narrower ones are thin
LINE_POINTS = 181  # of a circle of the graticule
DIGIT_INCHES = 0.085  # of numbers at a colour bar
TITLE_CHARACTERS = 90  # of a title that fits above two maps
WHOLE_DEGREES = 130  # of latitude, beyond which a map is one of the globe
CAP_DEGREES = 100  # of latitude, up to which it is one of what lies around a pole
DOTS_AREA, DOT_SIZES = 12_000.0, (4.0, 36.0)  # square points, of all stations and of one
PROJECTIONS = ("equal-earth", "lat-lon", "polar")


def frame_of(cells: Grid, projection: str = "", box: Box | None = None) -> MapFrame:
    """Return the paper of a map.

    Args:
        projection: one of `PROJECTIONS`; empty for Equal Earth of the globe, a polar one of what
            lies around a pole, and latitude over longitude of any other part. Ignored for grids
            that are on a projection themselves.
        box: what to show, within the grid; None for all of it.
    """
    if cells.is_projected:
        return PlaneFrame(cells)
    box = box or box_of(cells)
    name = projection or _usual_projection(box)
    chosen: MapProjection = EqualEarth()
    if name == "lat-lon":
        chosen = LatLon(0.0 if box.goes_round else box.middle[1])
    elif name == "polar":
        pole = 1 if box.middle[1] >= 0 else -1
        chosen = Polar(pole)
    return SphereFrame(cells, chosen, box)


def _usual_projection(box: Box) -> str:
    high = box.north - box.south
    if box.goes_round and high > WHOLE_DEGREES:
        return "equal-earth"
    has_pole = max(box.north, -box.south) >= POLE
    return "polar" if box.goes_round and has_pole and high <= CAP_DEGREES else "lat-lon"


@figure_style()
def draw_map(field: FieldMap, path: Path) -> None:
    """Write forecast and truth, with one colour bar, and the error beside them as one PNG.

    Raises:
        UserError: the file can't be written.
    """
    display = display_in(field.grid.cells, field.channel.variable, field.unit)
    forecast, truth = display.values(field.forecast), display.values(field.truth)
    error = forecast - truth
    shades = [forecast, truth]
    if display.departure:
        # From the truth's means, so that equal colours are equal values.
        mean = truth - departure_from_rows(truth)
        shades = [forecast - mean, truth - mean]
    frame = frame_of(field.grid.cells)
    colours = [frame.sample(shade) for shade in shades]
    scale = field_scale(display, *colours)
    lines = line_values(np.stack([forecast, truth])) if display.lines else np.empty(0)
    if len(lines) > MAX_LINES:
        lines = line_values(lines, 2 * float(lines[1] - lines[0]))
    row = MapRow(frame, 3, above=0.55)
    legend: list[Artist] = []
    for column, (name, values, raster) in enumerate(
        (("forecast", forecast, colours[0]), ("truth", truth, colours[1]))
    ):
        axes = row.map(column)
        draw_field(axes, frame, raster, scale)
        legend = draw_lines(axes, frame, frame.sample(values), lines, display)
        legend += draw_surroundings(axes, frame, field.grid, field.bounds)
        axes.set_title(name)
    add_bar(row.figure, row.bar(0, columns=2), scale, shade_label(display))
    axes = row.map(2)
    difference = frame.sample(error)
    errors = error_scale(difference)
    draw_field(axes, frame, difference, errors)
    draw_surroundings(axes, frame, field.grid, field.bounds)
    size = root_mean_square(error, field.grid.cells)
    axes.set_title(f"forecast - truth, RMSE {size:.3g} {unit_label(display.difference_unit)}")
    label = with_unit("error", display.difference_unit)
    add_bar(row.figure, row.bar(2), errors, label)
    add_legend(row.legend(), legend)
    name = field_title(display, field.channel.level, field.model_levels)
    row.figure.suptitle(title_text(f"{name}, {field.title}", TITLE_CHARACTERS), x=0.01, ha="left")
    save_figure(row.figure, path)


def display_in(cells: Grid, variable: str, unit: str) -> Display:
    """Return how a variable is shown on a map of these cells."""
    display = display_of(variable, unit)
    if display.departure and not cells.is_periodic:
        # The mean along a row of a region has no meaning.
        display = display._replace(departure=False, colours=TEMPERATURE)
    return display


def field_title(display: Display, level: int | None, model_levels: bool = False) -> str:
    """Return the name of a field for a title: 500 hPa geopotential height."""
    if level is None:
        return display.label
    return (
        f"{display.label} on model level {level}"
        if model_levels
        else f"{level} hPa {display.label}"
    )


def shade_label(display: Display) -> str:
    """Return the label of the colour bar of a field."""
    name = "departure from the zonal mean" if display.departure else display.label
    return with_unit(name, display.unit)


def root_mean_square(values: Values, cells: Grid) -> float:
    """Return the root of the mean square over the area of the cells with a value; NaN without."""
    weights = np.asarray(cells.weights)
    weights = weights[:, None] if weights.ndim == 1 else weights
    weights = np.where(np.isfinite(values), weights, 0.0)
    total = weights.sum()
    square = np.where(np.isfinite(values), values, 0.0) ** 2
    return float(np.sqrt((weights * square).sum() / total)) if total else float("nan")


def draw_field(axes: Axes, frame: MapFrame, raster: Values, scale: ColourScale) -> None:
    """Fill a map with the colours of a field on the frame's raster; grey without a value."""
    axes.set_axis_off()
    axes.grid(visible=False)
    paper = Polygon(frame.outline.T, facecolor=NO_VALUE, edgecolor="none", zorder=0)
    axes.add_patch(paper)
    x, y = (_cell_edges(along) for along in (frame.x, frame.y))
    image = axes.pcolormesh(
        x,
        y,
        np.ma.masked_invalid(raster),
        cmap=scale.colours,
        norm=scale.norm,
        rasterized=True,
        zorder=1,
    )
    image.set_clip_path(paper)
    left, right = frame.outline[0].min(), frame.outline[0].max()
    bottom, top = frame.outline[1].min(), frame.outline[1].max()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")


def _cell_edges(centres: np.ndarray) -> np.ndarray:
    half = (centres[1] - centres[0]) / 2
    return np.append(centres - half, centres[-1] + half)


def draw_lines(
    axes: Axes, frame: MapFrame, raster: Values, levels: np.ndarray, display: Display
) -> list[Artist]:
    """Draw lines of equal values with numbers; return what a legend needs."""
    if not len(levels):
        return []
    drawn = axes.contour(
        frame.x,
        frame.y,
        np.ma.masked_invalid(raster),
        levels=levels,
        colors="black",
        linewidths=0.5,
        zorder=3,
    )
    drawn.set_clip_path(Polygon(frame.outline.T, transform=axes.transData))
    if len(levels) < 2:
        return []
    label_lines(axes, frame, raster, drawn)
    step = f"{levels[1] - levels[0]:g} {unit_label(display.unit)}"
    label = f"{display.label}, every {step}"
    return list(axes.plot([], [], color="black", linewidth=0.5, label=label))


def label_lines(axes: Axes, frame: MapFrame, raster: Values, drawn: ContourSet) -> None:
    """Write the values of lines where there is room between other lines, edge and numbers."""
    levels = np.asarray(drawn.levels)
    step = float(levels[1] - levels[0])
    inches = axes.bbox.width / axes.figure.dpi / float(np.ptp(frame.outline[0]))
    slope = np.hypot(*np.gradient(raster, frame.y * inches, frame.x * inches))
    outline, placed = frame.outline.T * inches, np.empty((0, 2))
    for level, segments in zip(levels, drawn.allsegs, strict=True):
        for line in segments:
            column, row = (
                np.rint((line[:, k] - along[0]) / (along[1] - along[0])).astype(int)
                for k, along in enumerate((frame.x, frame.y))
            )
            spacing = step / np.maximum(slope[row, column], MIN_SLOPE)
            points = line * inches
            room = spacing > LINE_INCHES
            for others, distance in ((outline, LABEL_INCHES), (placed, 3 * LABEL_INCHES)):
                away = np.linalg.norm(points[:, None] - others, axis=-1)
                room &= away.min(axis=1, initial=np.inf) > distance
            if not room.any() or np.ptp(points, axis=0).max() < 2 * LABEL_INCHES:
                continue
            best = int(np.argmax(np.where(room, spacing, 0.0)))
            placed = np.vstack([placed, points[best]])
            x, y = line[best].tolist()
            around = [withStroke(linewidth=2, foreground="white")]
            text = axes.text(
                x, y, f"{level:g}", ha="center", va="center", zorder=7, path_effects=around
            )
            text.set_fontsize(LINE_LABEL_SIZE)


def draw_surroundings(
    axes: Axes, frame: MapFrame, grid: MapGrid, bounds: Sequence[int] = ()
) -> list[Artist]:
    """Draw graticule, coasts, the edges between the bands of ranks, and the outline of the map.

    Returns what a legend needs: the coasts and the edges that are drawn.
    """
    clip = Polygon(frame.outline.T, transform=axes.transData)
    draw_graticule(axes, frame, grid.cells, clip)
    drawn: list[Artist] = []
    coasts = coasts_of(grid.planet)
    if len(coasts):
        x, y = frame.place(*coasts.T)
        # One line with gaps of NaN is drawn faster than hundreds of lines.
        is_wide = axes.bbox.width > WIDE_INCHES * axes.figure.dpi
        (line,) = axes.plot(
            x,
            y,
            color=COAST,
            linewidth=COAST_WIDTH if is_wide else THIN_COAST_WIDTH,
            zorder=2.5,  # below lines of equal values
            label=COAST_LABELS[grid.planet],
        )
        line.set_clip_path(clip)
        drawn += [line] if COAST_LABELS[grid.planet] else []
    drawn += draw_edges(axes, frame, grid.cells, bounds, clip)
    axes.plot(*frame.outline, color=OUTLINE, linewidth=0.8, clip_on=False, zorder=6)
    return drawn


def draw_graticule(axes: Axes, frame: MapFrame, cells: Grid, clip: Polygon) -> None:
    """Draw circles of latitude and meridians; label them where the map's edge is a straight box."""
    box = frame.box if isinstance(frame, SphereFrame) else _box_around(cells)
    step = _round_step(box.north - box.south)
    for latitude in np.arange(np.ceil(box.south / step), np.floor(box.north / step) + 1) * step:
        if abs(latitude) < 90:
            longitude = np.linspace(box.west, box.east, 2 * LINE_POINTS)[1:-1]
            _thin_line(axes, frame, longitude, np.full_like(longitude, latitude), clip)
    across = _round_step(box.east - box.west)
    for longitude in (
        np.arange(np.ceil(box.west / across), np.floor(box.east / across) + 1) * across
    ):
        latitude = np.linspace(max(box.south, -LATITUDE_LIMIT), min(box.north, LATITUDE_LIMIT),
                               LINE_POINTS)  # fmt: skip
        _thin_line(axes, frame, np.full_like(latitude, longitude), latitude, clip)
    label_graticule(axes, frame, box, step, across)


def label_graticule(axes: Axes, frame: MapFrame, box: Box, step: float, across: float) -> None:
    """Write degrees along the left edge, and of latitude over longitude along the lower, too."""
    if not isinstance(frame, SphereFrame) or isinstance(frame.projection, Polar):
        return
    latitudes = np.arange(np.ceil(box.south / step), np.floor(box.north / step) + 1) * step
    if isinstance(frame.projection, EqualEarth):
        half = (box.east - box.west) / 2
        for latitude in latitudes[np.abs(latitudes) % 90 > 0]:
            x, y = frame.projection.forward(np.array([-half]), np.array([latitude]))
            label = latitude_label(float(latitude)) + " "
            text = axes.text(x[0], y[0], label, color=OUTLINE, ha="right", va="center")
            text.set_fontsize(LINE_LABEL_SIZE)
        return
    axes.set_axis_on()
    axes.spines[:].set_visible(False)
    longitudes = np.arange(np.ceil(box.west / across), np.floor(box.east / across) + 1) * across
    middle = box.middle[0]
    x, _ = frame.projection.forward(longitudes - middle, np.zeros_like(longitudes))
    _, y = frame.projection.forward(np.zeros_like(latitudes), latitudes)
    axes.set_xticks(x, [longitude_label(float(value)) for value in longitudes])
    axes.set_yticks(y, [latitude_label(float(value)) for value in latitudes])


def _thin_line(
    axes: Axes, frame: MapFrame, longitude: np.ndarray, latitude: np.ndarray, clip: Polygon
) -> None:
    x, y = frame.place(longitude, latitude)
    (line,) = axes.plot(x, y, color=REFERENCE, linewidth=0.4, alpha=0.6, zorder=2)
    line.set_clip_path(clip)


def _box_around(cells: Grid) -> Box:
    (north, south), (west, east) = cells.extent
    return Box(south, north, west, east)


def _round_step(span: float) -> float:
    return float(next((x for x in ROUND_STEPS if span / x <= GRATICULE_LINES), 60))


def draw_edges(
    axes: Axes, frame: MapFrame, cells: Grid, bounds: Sequence[int], clip: Polygon
) -> list[Artist]:
    """Draw the edges between bands of rows; `bounds` are first rows, then the number of rows."""
    drawn: list[Artist] = []
    ranks = len(bounds) - 1
    for row in bounds[1:-1]:
        if isinstance(frame, SphereFrame):
            box = frame.box
            around = np.linspace(box.west, box.east, 2 * LINE_POINTS)[1:-1]
            x, y = frame.place(around, np.full_like(around, cells.row_edges[row]))
        else:
            x, y = np.array([-0.5, cells[1] - 0.5]), np.full(2, 0.5 - row)
        label = f"edge between the bands of {ranks} ranks" if not drawn else "_"
        (line,) = axes.plot(
            x, y, color=BAND_EDGE, linewidth=1.0, linestyle=(0, (5, 3)), zorder=5, label=label
        )
        line.set_clip_path(clip)
        drawn.append(line)
    return drawn[:1]


def add_bar(figure: Figure, axes: Axes, scale: ColourScale, label: str) -> Colorbar:
    """Fill axes with a horizontal colour bar whose ticks are at edges between colours."""
    bar = figure.colorbar(
        ScalarMappable(scale.norm, scale.colours), cax=axes, orientation="horizontal",
        extend=scale.extend, spacing="uniform",
    )  # fmt: skip
    edges = scale.edges
    longest = 1 + max(len(f"{value:g}") for value in edges)  # with a space
    room = int(axes.get_position().width * figure.get_figwidth() / (DIGIT_INCHES * longest))
    thin = every_edge(edges, 1 + len(edges) // (room + 1))
    bar.set_ticks(thin, labels=[f"{value:g}" for value in thin])
    bar.set_label(label)
    bar.outline.set_linewidth(0.5)
    axes.tick_params(length=2, width=0.5)
    return bar


def every_edge(edges: Sequence[float] | np.ndarray, step: int) -> list[float]:
    """Return every second, third, ... edge between colours, the same on both sides of a centre."""
    middle = len(edges) // 2
    widths = np.diff(edges)
    if len(edges) % 2 == 0 and widths[middle - 1] > 1.5 * widths[0]:  # the centre is no edge
        upper = range(middle + step - 1, len(edges), step)
        return [float(edges[i]) for i in (*(len(edges) - 1 - i for i in reversed(upper)), *upper)]
    return [float(edge) for edge in edges[::step]]


def add_legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """Write a legend of lines into empty axes."""
    axes.set_axis_off()
    if handles:
        axes.legend(handles=list(handles), loc="center left", ncols=len(handles))


@final
class MapRow:
    """Maps of one size in a row, with colour bars below them; all numbers are inches."""

    BAR, TO_BAR, BELOW_BAR, BETWEEN = 0.12, 0.1, 0.42, 0.2

    def __init__(self, frame: MapFrame, columns: int, above: float) -> None:
        projection = frame.projection if isinstance(frame, SphereFrame) else None
        # Left of and below each map; those of Equal Earth are where the map is narrower.
        degrees = (0.35, 0.2) if isinstance(projection, LatLon) else (0.06, 0.0)
        self.wide = ROW_INCHES / columns
        self.high = self.wide / frame.aspect
        self._above, self._left, self._below = above, 0.15 + degrees[0], degrees[1]
        self._step = self.wide + self.BETWEEN + degrees[0]
        self.width = self._left + columns * self._step
        for_legend = 0.2 if columns > 2 else 0.0
        row = self.high + self._below + self.TO_BAR + self.BAR + self.BELOW_BAR
        self.height = above + row + for_legend
        self.figure = Figure(figsize=(self.width, self.height))

    def map(self, column: int) -> Axes:
        """Add axes for a map."""
        return self._axes(self._left + column * self._step, self._above, self.wide, self.high)

    def bar(self, column: int, columns: int = 1) -> Axes:
        """Add axes for a colour bar of one map or several in a row."""
        over = columns * self._step - self.BETWEEN
        left = self._left + column * self._step + 0.1 * over
        top = self._above + self.high + self._below + self.TO_BAR
        return self._axes(left, top, 0.8 * over, self.BAR)

    def legend(self) -> Axes:
        """Add axes along the lower edge."""
        return self._axes(self._left, self.height - 0.24, self.width - 2 * self._left, 0.2)

    def _axes(self, left: float, top: float, wide: float, high: float) -> Axes:
        bottom = self.height - top - high
        width, height = self.width, self.height
        return self.figure.add_axes((left / width, bottom / height, wide / width, high / height))


def draw_error_maps(
    grid: MapGrid,
    rmse: Values,
    bias: Values,
    unit: str,
    title: str = "",
    variable: str = "",
    places: tuple[Degrees, Degrees] | None = None,
) -> Figure:
    """Return a figure with root-mean-square and mean error, side by side.

    Args:
        rmse, bias: on each grid point, `(H, W)`, or of stations, `(S,)`.
        places: latitudes and longitudes of the stations; None for grid points.
    """
    display = display_of(variable, unit)
    frame = frame_of(grid.cells)
    errors = [display.differences(values) for values in (rmse, bias)]
    other = "truth" if places is None else "observation"
    if places is None:
        errors = [frame.sample(values) for values in errors]
    row = MapRow(frame, 2, above=0.55 if title else 0.35)
    if title:
        row.figure.suptitle(title_text(title, TITLE_CHARACTERS), x=0.01, ha="left")
    for column, (name, values, scale) in enumerate(
        (
            ("root-mean-square error", errors[0], size_scale(errors[0])),
            (f"mean error (forecast - {other})", errors[1], error_scale(errors[1])),
        )
    ):
        axes = row.map(column)
        if places is None:
            draw_field(axes, frame, values, scale)
        else:
            draw_stations(axes, frame, places, values, scale)
        draw_surroundings(axes, frame, grid)
        axes.set_title(name)
        label = with_unit("error", display.difference_unit)
        add_bar(row.figure, row.bar(column), scale, label)
    return row.figure


def draw_stations(
    axes: Axes,
    frame: MapFrame,
    places: tuple[Degrees, Degrees],
    values: Values,
    scale: ColourScale,
) -> None:
    """Draw a dot for each station with a value, the largest values on top."""
    draw_field(axes, frame, np.full((len(frame.y), len(frame.x)), np.nan), scale)
    order = np.argsort(np.abs(values))[: np.isfinite(values).sum()]  # NaN come last
    latitude, longitude = (degrees[order] for degrees in places)
    # A gap after each point, so that none counts as a line that crosses the map's edge.
    apart = np.full((2, 2 * len(order)), np.nan)
    apart[:, ::2] = longitude, latitude
    x, y = frame.place(*apart)[:, ::2]
    size = np.clip(DOTS_AREA / max(len(order), 1), *DOT_SIZES)
    style: dict[str, Any] = {"edgecolors": OUTLINE, "linewidths": 0.3, "zorder": 4}
    axes.scatter(x, y, size, values[order], cmap=scale.colours, norm=scale.norm, **style)


@figure_style()
def draw_last_lead_errors(
    scores: HeldOutScores, last: LastLeadDiagnostics, field: FieldMap, path: Path
) -> None:
    """Write a PNG with root-mean-square and mean error on each grid point.

    Raises:
        UserError: the file can't be written.
    """
    variable = field.channel.variable
    name = field_title(display_of(variable, field.unit), field.channel.level, field.model_levels)
    forecasts = f"{last.hours} h forecasts from {counted(scores.samples, 'initial time')}"
    title = f"{name}, {forecasts}"
    figure = draw_error_maps(field.grid, last.rmse, last.bias, field.unit, title, variable)
    save_figure(figure, path)

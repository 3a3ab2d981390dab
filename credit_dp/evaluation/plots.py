"""Maps of one field: forecast, truth and error, with the bands of rows that ranks own."""

import contextlib
import os
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import (
    DIVERGING,
    SEQUENTIAL,
    figure_style,
    label_degrees,
    plain,
    with_unit,
)
from credit_dp.evaluation.maps import FULL_CIRCLE, FieldMap, Lines, MapGrid

Colours = tuple[str, Normalize]


@figure_style()
def draw_map(field: FieldMap, path: Path) -> None:
    """Write forecast, truth and error below each other as one PNG.

    Raises:
        UserError: the file could not be written.
    """
    error = field.forecast - field.truth
    low, high = np.nanpercentile(np.stack([field.truth, field.forecast]), [0.5, 99.5])
    far = max(float(np.nanpercentile(np.abs(error), 99.5)), 1e-30)
    shared = Normalize(float(low), float(high) if high > low else float(low) + 1e-30)
    figure = Figure(figsize=(8.0, 11.0), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    draw_panel(panels[0], field, field.forecast, "forecast", (SEQUENTIAL, shared))
    draw_panel(panels[1], field, field.truth, "truth", (SEQUENTIAL, shared))
    draw_panel(panels[2], field, error, "forecast - truth", (DIVERGING, Normalize(-far, far)))
    bands = len(field.bounds) - 1
    dashed = "" if bands == 1 else f"\n{bands} bands of latitude, one per rank; edges dashed"
    figure.suptitle(plain(field.title) + dashed)
    save(figure, path)


def draw_panel(
    axes: Axes, field: FieldMap, values: np.ndarray, name: str, colours: Colours
) -> None:
    """One map with its colour bar and the edges between bands."""
    draw_cells(axes, field.grid, values, colours)
    bar = axes.figure.colorbar(axes.collections[0], ax=axes, extend="both", pad=0.02)
    bar.set_label(with_unit(name, field.unit))
    draw_edges(axes, row_edges(field.grid.latitude)[list(field.bounds)[1:-1]])
    axes.set_title(name)


def draw_cells(axes: Axes, grid: MapGrid, values: np.ndarray, colours: Colours) -> None:
    """The cells of a map `(H, W)` in colours, with coasts, and with ticks on round degrees."""
    cmap, norm = colours
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    longitudes = cell_edges(grid.longitude)
    axes.pcolormesh(
        longitudes,
        row_edges(grid.latitude),
        values,
        cmap=matplotlib.colormaps[cmap],
        norm=norm,
        rasterized=True,
    )
    label_degrees(axes)
    axes.set_yticks([-90, -60, -30, 0, 30, 60, 90])
    axes.set_ylim(-90, 90)
    west, east = sorted((longitudes[0], longitudes[-1]))
    axes.set_xticks(np.arange(np.ceil(west / 60), np.floor(east / 60) + 1) * 60)
    axes.set_xlim(west, east)
    draw_coasts(axes, grid.coasts)


def draw_coasts(axes: Axes, lines: Lines) -> None:
    """Draw coasts on a map that goes once round the globe, wherever its longitudes begin."""
    if not len(lines):
        return
    west, east = axes.get_xlim()
    # Lines are about one turn wide and may begin anywhere: what lies outside is not shown.
    first = np.floor((west - np.nanmax(lines[:, 0])) / FULL_CIRCLE)
    last = np.ceil((east - np.nanmin(lines[:, 0])) / FULL_CIRCLE)
    turned = [lines + np.array([turn * FULL_CIRCLE, 0.0]) for turn in np.arange(first, last + 1)]
    x, y = np.concatenate([part for line in turned for part in (line, [[np.nan, np.nan]])]).T
    axes.plot(x, y, color="black", linewidth=0.6, alpha=0.7, scalex=False, scaley=False)


def draw_edges(axes: Axes, latitudes: np.ndarray) -> None:
    """The edges between bands, seen on dark and on light colours: white below black."""
    for latitude in latitudes:
        axes.axhline(latitude, color="white", linewidth=2.2, alpha=0.8)
        axes.axhline(latitude, color="black", linewidth=1.0, linestyle=(0, (6, 4)))


def row_edges(latitude: np.ndarray) -> np.ndarray:
    """Edges of rows: halfway between them and at the poles, `(H + 1,)`, north first."""
    return np.concatenate([[90.0], (latitude[:-1] + latitude[1:]) / 2, [-90.0]])


def cell_edges(longitude: np.ndarray) -> np.ndarray:
    """Edges of columns that go once round the globe evenly, `(W + 1,)`, from the first on."""
    turn = (longitude[1] - longitude[0] + 180.0) % 360.0 - 180.0 if len(longitude) > 1 else 1.0
    columns = np.arange(len(longitude) + 1) - 0.5
    return np.asarray(longitude[0] + np.sign(turn) * columns * 360.0 / len(longitude))


@figure_style()
def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all.

    Raises:
        UserError: the file could not be written.
    """
    temporary = path.with_name(f".{path.name}.part")  # one name: a killed run leaves at most one
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"{path}: the plot could not be written ({error.strerror}). "
            "Free space there or change run.dir."
        ) from error

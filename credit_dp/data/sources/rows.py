"""Cells along one dim, of reduced Gaussian grids or HEALPix, as rows and columns.

Every row of such a grid is a circle of latitude, with fewer cells near the poles. `CellRows` finds
the rows in the coordinates, and interpolates each along its circle to the length of the longest.
"""

import logging
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import COORDINATE_TOLERANCE, FULL_CIRCLE, Grid
from credit_dp.data.regrid import RowLayout
from credit_dp.errors import UserError

logger = logging.getLogger(__name__)

Fields = NDArray[np.float32]
Degrees = NDArray[np.float64]
N320_CELLS = 542080  # ERA5's native grid
MIN_OCTAHEDRAL = 16  # the coarsest octahedral grid in use
MIN_CELLS = 3  # of a row that goes round the globe


@final
class CellRows:
    """The rows of cells that are sorted row by row, from either pole, and eastward.

    All rows get the length of the longest, from longitude 0: each column is interpolated linearly
    between the two cells around it in its row. A NaN leaves the weight to the other cell. Where all
    rows have the same longitudes, nothing is interpolated, and columns stay in the stored order.

    Attributes:
        grid: of the fields, from the north.
        layout: of the cells.
        is_regular: whether nothing is interpolated.
    """

    def __init__(self, latitudes: Degrees, longitudes: Degrees, where: str, name: str = "") -> None:
        """Find the rows.

        Args:
            latitudes, longitudes: of the cells, `(N,)` degrees each.
            where: the address of the store, for messages.
            name: of the grid, if the store has one.

        Raises:
            UserError: the cells are not sorted into rows, or a row does not go round the globe.
        """
        self._where = f"{where}: is on {_describe(len(latitudes), name)}"
        breaks = np.flatnonzero(np.abs(np.diff(latitudes)) > COORDINATE_TOLERANCE) + 1
        self._starts = np.array([0, *breaks, len(latitudes)], dtype=np.intp)
        self._lengths = np.diff(self._starts)
        latitude = latitudes[self._starts[:-1]]
        steps = np.diff(latitude)
        drift = np.abs(latitudes - np.repeat(latitude, self._lengths)).max()
        if drift > COORDINATE_TOLERANCE:
            raise self._error(f"they go {drift:g} degrees north or south without a next row")
        disordered = np.flatnonzero(np.sign(steps) != np.sign(steps[:1]))
        if len(disordered):
            row = int(disordered[0])
            raise self._error(
                f"they go back from latitude {latitude[row]:g} to {latitude[row + 1]:g} at cell "
                f"{self._starts[row + 1]}"
            )
        if self._lengths.min() < MIN_CELLS:
            row = int(self._lengths.argmin())
            raise self._error(f"the row at latitude {latitude[row]:g} has {self._lengths[row]}")
        self._flipped = bool(latitude[0] < latitude[-1])
        width = int(self._lengths.max())
        self.is_regular = bool((self._lengths == width).all()) and bool(
            np.ptp(longitudes.reshape(-1, width), axis=0).max() < COORDINATE_TOLERANCE
        )
        # Of the first cell of each row, in cells.
        self._firsts = longitudes[self._starts[:-1]] / FULL_CIRCLE * self._lengths
        longitude = longitudes[:width]
        if not self.is_regular:
            self._check_circles(latitude, longitudes)
            # Stored degrees are rounded, but rows begin at longitude 0 or half a cell east of it.
            halves = np.rint(2 * self._firsts) / 2
            self._firsts = np.where(np.abs(self._firsts - halves) < 1e-2, halves, self._firsts)
            longitude = np.arange(width) * FULL_CIRCLE / width
            logger.info("%s, read as %d rows of %d columns", self._where, len(latitude), width)
        self.grid = Grid(latitude[::-1] if self._flipped else latitude, longitude)
        if not self.is_regular:
            self.grid.check_global(where)
        order = -1 if self._flipped else 1
        in_columns = RowLayout.of(self.grid)
        firsts = self._firsts * FULL_CIRCLE / self._lengths
        self.layout = replace(
            in_columns,
            lengths=tuple(self._lengths[::order].tolist()),
            firsts=in_columns.firsts if self.is_regular else tuple(firsts[::order].tolist()),
            starts=tuple(self._starts[:-1][::order].tolist()),
        )

    def cells(self, rows: slice) -> slice:
        """Return which cells rows consist of; they are counted from the north."""
        first, last = self._stored_rows(rows)
        return slice(int(self._starts[first]), int(self._starts[last]))

    def cell(self, row: int, column: int) -> int:
        """Return a cell from which a value is interpolated."""
        first, _ = self._stored_rows(slice(row, row + 1))
        return int(self._starts[first] + column * self._lengths[first] // self.grid.shape[1])

    def rows_touched(self, cells: int) -> int:
        """Return how many rows a chunk of so many cells touches, about."""
        height, width = self.grid.shape
        if self.is_regular and cells % width == 0:
            return min(height, cells // width)
        return min(height, int(cells * height // self._starts[-1]) + 2)

    def fields(self, values: Fields, rows: slice) -> Fields:
        """Return the rows of the values of `cells(rows)`: `(..., n)` -> `(..., rows, W)`."""
        first, last = self._stored_rows(rows)
        if self.is_regular:
            fields = values.reshape(*values.shape[:-1], last - first, self.grid.shape[1])
        else:
            fields = self._interpolate(values, slice(first, last))
        return fields[..., ::-1, :] if self._flipped else fields

    def _interpolate(self, values: Fields, stored_rows: slice) -> Fields:
        width = self.grid.shape[1]
        lengths = self._lengths[stored_rows, None]
        begin = self._starts[stored_rows, None] - self._starts[stored_rows.start]
        position = np.arange(width) * lengths / width - self._firsts[stored_rows, None]
        # A column on a cell has its value, whatever rounding does to its position.
        whole = np.rint(position)
        position = np.where(np.abs(position - whole) < 1e-9, whole, position)
        west = np.floor(position)
        share = (position - west).astype(np.float32)
        west = west.astype(np.intp)
        east = np.where(share > 0, west + 1, west)
        left: Fields
        right: Fields
        left, right = (
            np.take(values, begin + cell % lengths, axis=-1, mode="clip") for cell in (west, east)
        )
        if np.isnan(values).any():
            left, right = (
                np.where(np.isnan(left), right, left),
                np.where(np.isnan(right), left, right),
            )
        # In this form a constant remains what it is.
        right -= left
        right *= share
        right += left
        np.copyto(right, left, where=share == 0)
        return right

    def _stored_rows(self, rows: slice) -> tuple[int, int]:
        height = self.grid.shape[0]
        north, south, _ = rows.indices(height)
        return (height - south, height - north) if self._flipped else (north, south)

    def _check_circles(self, latitude: Degrees, longitudes: Degrees) -> None:
        lengths = np.repeat(self._lengths, self._lengths)
        starts = np.repeat(self._starts[:-1], self._lengths)
        steps = FULL_CIRCLE / lengths
        expected = longitudes[starts] + (np.arange(len(longitudes)) - starts) * steps
        half = FULL_CIRCLE / 2
        away = np.abs((longitudes - expected + half) % FULL_CIRCLE - half)
        # `not <=` instead of `>`: NaN compares as False and has to be refused, too.
        wrong = np.flatnonzero(~(away <= 1e-2 * steps))
        if len(wrong):
            row = int(np.searchsorted(self._starts, wrong[0], side="right")) - 1
            raise self._error(
                f"the row at latitude {latitude[row]:g} has {self._lengths[row]}, not in equal "
                "steps eastward round the globe"
            )

    def _error(self, problem: str) -> UserError:
        return UserError(
            f"{self._where}, but cells are needed row by row from pole to pole, HEALPix in RING "
            f"order: {problem}. Sort them, regrid the dataset, or change data.store."
        )


def _describe(num_cells: int, name: str) -> str:
    """Return the usual name of a grid, for a message."""
    name = name or _reduced_grid_name(num_cells)
    reduced = name[:1].lower() in ("n", "o") and name[1:].isdecimal()
    kind = "the reduced Gaussian grid " if reduced else "the grid "
    if not name:
        return f"an irregular grid of {num_cells} cells"
    return f"{kind}{name.upper()} of {num_cells} cells"


def _reduced_grid_name(num_cells: int) -> str:
    """Return the name of an octahedral grid or of N320 with this many cells, or "".

    Row n from the pole of an octahedral grid has 4 n + 16 cells, so ON has 4 N (N + 9).

    Source: ECMWF, octahedral reduced Gaussian grid.
    """
    if num_cells == N320_CELLS:
        return "N320"
    number = round((81 + num_cells) ** 0.5 / 2 - 4.5)  # solves 4 N (N + 9) = cells for N
    is_octahedral = 4 * number * (number + 9) == num_cells and number >= MIN_OCTAHEDRAL
    return f"O{number}" if is_octahedral else ""

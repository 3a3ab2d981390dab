"""Cells along one dim, of reduced Gaussian grids or HEALPix, as rows and columns.

Every row of such a grid is a circle of latitude, with fewer cells near the poles. `CellRows` finds
the rows in the coordinates, and interpolates each along its circle to the length of the longest.
HEALPix in NESTED order has no rows of adjacent cells: all of it is read, then put in RING order.
"""

import logging
from dataclasses import replace
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import (
    COORDINATE_TOLERANCE,
    FULL_CIRCLE,
    Degrees,
    FieldArray,
    Grid,
    degrees_east,
    healpix_rows,
)
from credit_dp.data.regrid import CellLayout
from credit_dp.errors import UserError

logger = logging.getLogger(__name__)

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
        layout: of the cells, in their order along rows.
        latitudes, longitudes: of the cells as they are stored, `(N,)` degrees each.
        description: where they are from and what they are, for messages.
        is_regular: whether nothing is interpolated.
    """

    def __init__(self, latitudes: Degrees, longitudes: Degrees, where: str, name: str = "") -> None:
        """Find the rows.

        Args:
            name: of the grid, if the store has one.
        """
        self.description = f"{where}: is on {_describe(len(latitudes), name)}"
        self.latitudes, self.longitudes = latitudes, longitudes
        self._nested = _nested_cells(latitudes)
        if self._nested is not None:
            logger.info("%s in NESTED order, all of which is read and reordered", self.description)
            latitudes, longitudes = latitudes[self._nested], longitudes[self._nested]
        breaks = np.flatnonzero(np.abs(np.diff(latitudes)) > COORDINATE_TOLERANCE) + 1
        self._starts = np.array([0, *breaks, len(latitudes)], dtype=np.intp)
        self._lengths = np.diff(self._starts)
        latitude = latitudes[self._starts[:-1]]
        steps = np.diff(latitude)
        drift = np.abs(latitudes - np.repeat(latitude, self._lengths)).max()
        if not drift <= COORDINATE_TOLERANCE:  # `not <=` instead of `>`: also of NaN
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
        # Where the first cell of each row is, in cells.
        self._firsts = longitudes[self._starts[:-1]] / FULL_CIRCLE * self._lengths
        longitude = longitudes[:width]
        if not self.is_regular:
            self._check_circles(latitude, longitudes)
            # Stored degrees are rounded, but rows begin at longitude 0 or half a cell east of it.
            halves = np.rint(2 * self._firsts) / 2
            self._firsts = np.where(np.abs(self._firsts - halves) < 1e-2, halves, self._firsts)
            longitude = np.arange(width) * FULL_CIRCLE / width
        self.grid = Grid(latitude[::-1] if self._flipped else latitude, longitude)
        if not self.is_regular:
            self.grid.check_global(where)
        # A rank reads the same rows again and again.
        self._cells_around = lru_cache(maxsize=2)(self._find_cells_around)
        order = -1 if self._flipped else 1
        in_columns = CellLayout.of(self.grid)
        firsts = self._firsts * FULL_CIRCLE / self._lengths
        self.layout = replace(
            in_columns,
            lengths=tuple(self._lengths[::order].tolist()),
            firsts=in_columns.firsts if self.is_regular else tuple(firsts[::order].tolist()),
            starts=tuple(self._starts[:-1][::order].tolist()),
        )

    def cells(self, rows: slice) -> slice:
        """Return which stored cells hold those of rows; rows are counted from the north."""
        return self._in_rows(rows) if self._nested is None else slice(0, len(self._nested))

    def in_order(self, values: FieldArray, rows: slice) -> FieldArray:
        """Return the values of `cells(rows)` in the order of the cells along rows."""
        return values if self._nested is None else values[..., self._nested[self._in_rows(rows)]]

    def cell(self, row: int, column: int) -> int:
        """Return a stored cell from which a value is interpolated."""
        first, _ = self._stored_rows(slice(row, row + 1))
        cell = int(self._starts[first] + column * self._lengths[first] // self.grid.shape[1])
        return cell if self._nested is None else int(self._nested[cell])

    def rows_touched(self, cells: int) -> int:
        """Return how many rows a chunk of so many cells touches, about."""
        height, width = self.grid.shape
        if self._nested is not None:
            return height
        if self.is_regular and cells % width == 0:
            return min(height, cells // width)
        return min(height, int(cells * height // self._starts[-1]) + 2)

    def fields(self, values: FieldArray, rows: slice) -> FieldArray:
        """Return rows and columns of the values in order: `(..., n)` -> `(..., rows, W)`."""
        first, last = self._stored_rows(rows)
        if self.is_regular:
            fields = values.reshape(*values.shape[:-1], last - first, self.grid.shape[1])
        else:
            fields = self._interpolate(values, first, last)
        return fields[..., ::-1, :] if self._flipped else fields

    def _interpolate(self, values: FieldArray, first: int, last: int) -> FieldArray:
        west, east, share = self._cells_around(first, last)
        left: FieldArray
        right: FieldArray
        left, right = (np.take(values, cells, axis=-1, mode="clip") for cells in (west, east))
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

    def _find_cells_around(
        self, first: int, last: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], FieldArray]:
        """Return the cells west and east of each column in stored rows, and the latter's share."""
        width = self.grid.shape[1]
        lengths = self._lengths[first:last, None]
        begin = self._starts[first:last, None] - self._starts[first]
        position = np.arange(width) * lengths / width - self._firsts[first:last, None]
        # A column on a cell has its value, whatever rounding does to its position.
        whole = np.rint(position)
        position = np.where(np.abs(position - whole) < 1e-9, whole, position)
        west = np.floor(position)
        share = (position - west).astype(np.float32)
        west = west.astype(np.intp)
        east = np.where(share > 0, west + 1, west)
        return begin + west % lengths, begin + east % lengths, share

    def _in_rows(self, rows: slice) -> slice:
        """Return which cells, in their order along rows, rows consist of."""
        first, last = self._stored_rows(rows)
        return slice(int(self._starts[first]), int(self._starts[last]))

    def _stored_rows(self, rows: slice) -> tuple[int, int]:
        height = self.grid.shape[0]
        north, south, _ = rows.indices(height)
        return (height - south, height - north) if self._flipped else (north, south)

    def _check_circles(self, latitude: Degrees, longitudes: Degrees) -> None:
        lengths = np.repeat(self._lengths, self._lengths)
        starts = np.repeat(self._starts[:-1], self._lengths)
        steps = FULL_CIRCLE / lengths
        expected = longitudes[starts] + (np.arange(len(longitudes)) - starts) * steps
        away = np.abs(degrees_east(longitudes, expected))
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
            f"{self.description}, but cells are needed row by row from pole to pole, or HEALPix in "
            f"NESTED order: {problem}. Sort them, regrid the dataset, or change data.store."
        )


def _nested_cells(latitudes: Degrees) -> NDArray[np.intp] | None:
    """Return where each cell of HEALPix in RING order is in NESTED order; None for other cells.

    Source: Gorski et al. 2005, section 4.1; numbers of rows and of cells in them as in section 4.
    """
    count = len(latitudes)
    nside = round((count / 12) ** 0.5)
    steps = np.sign(np.diff(latitudes))
    in_rows = (steps >= 0).all() or (steps <= 0).all()
    if in_rows or count != 12 * nside**2 or nside & (nside - 1):
        return None
    # A cell is at x and y on one of 12 faces: its number there has their bits in turn.
    face, number = np.divmod(np.arange(count), nside**2)
    x, y = np.zeros((2, count), dtype=np.intp)
    for bit in range(nside.bit_length()):
        x |= (number >> bit) & (1 << bit)
        y |= (number >> (bit + 1)) & (1 << bit)
    row = (2 + face // 4) * nside - x - y - 1  # from 1, the northernmost
    length = 4 * np.minimum(np.minimum(row, 4 * nside - row), nside)
    is_shifted = (length < 4 * nside) | ((row - nside) % 2 == 0)
    # In half cells from longitude 0: faces are 90 degrees wide, those of the equator begin at 0.
    middle = np.where(face // 4 == 1, 2 * (face % 4), 2 * (face % 4) + 1) * length // 4 + x - y
    column = (middle - is_shifted) // 2 % length
    latitude, lengths = healpix_rows(nside)
    nested = np.argsort((np.cumsum(lengths) - lengths)[row - 1] + column)
    away = np.abs(latitudes[nested] - np.repeat(latitude, lengths)).max()
    return nested if away < COORDINATE_TOLERANCE else None


def _describe(num_cells: int, name: str) -> str:
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

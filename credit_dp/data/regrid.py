"""Regrids fields from rows of cells to rows and columns, for any band of target rows.

`CellLayout` says where the cells of a source lie, `Regridder` gives their weights in each target
cell, and `PointInterpolation` those of rows and columns at any points. The weights of rows and of
columns are independent: first every source row is brought to the target's columns, then the rows
are combined. Each target cell is the same sum, in the same order, whichever rows are asked for, so
that bands have the same bits as the globe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config.data import CONSERVATIVE
from credit_dp.data.grid import (
    COORDINATE_TOLERANCE,
    FULL_CIRCLE,
    POLE,
    Grid,
    row_edges,
    unit_vectors,
)
from credit_dp.errors import UserError
from credit_dp.sphere import usual_latitude

Array = NDArray[np.float64]
Points = slice | NDArray[np.intp]
ROUNDING = 1e-11  # of a cell's width: edges and points this near to each other are one
LEAST_OVERLAP = 1e-13  # in sin(latitude)
LEAST_VALID = 1e-9  # of a target cell: below it, rounding leaves weight where there is none
STARTS = 24  # rows and columns of a plane among which the one nearest to a point is sought
MAX_STEPS = 30  # of Newton's method, which needs about 5
POINTS_AT_ONCE = 4096
LAST_STEP = 1e-7  # of Newton's method, in rows and columns
EDGE = 1e-3  # rows and columns: points this near beyond the outermost ones are on them


@final
@dataclass(frozen=True)
class CellLayout:
    """Where the cells of rows are, on the globe and in a flat array; rows may differ in length.

    Attributes:
        latitude: `(H,)` degrees, falling.
        lengths: number of cells of each row, `(H,)`, in equal steps round the globe.
        firsts: longitude of the first cell of each row, `(H,)` degrees.
        starts: index of this cell in the flat array, `(H,)`.
        eastward: whether the cells of a row go east.
    """

    latitude: tuple[float, ...]
    lengths: tuple[int, ...]
    firsts: tuple[float, ...]
    starts: tuple[int, ...]
    eastward: bool = True

    @classmethod
    def of(cls, grid: Grid) -> "CellLayout":
        """Return the layout of a grid's rows and columns, one row after the other."""
        latitude, longitude = grid.latitude, grid.longitude
        height, width = grid
        turn = (longitude[1] - longitude[0]) % FULL_CIRCLE if width > 1 else 0.0
        return cls(
            latitude=tuple(latitude.tolist()),
            lengths=(width,) * height,
            firsts=(float(longitude[0]),) * height,
            starts=tuple(range(0, height * width, width)),
            eastward=bool(turn <= FULL_CIRCLE / 2),
        )

    def cells(self, rows: slice) -> slice:
        """Return which cells of the flat array rows consist of."""
        starts, lengths = np.array(self.starts[rows]), np.array(self.lengths[rows])
        return slice(int(starts.min()), int((starts + lengths).max()))


class Weights(NamedTuple):
    """The values that each target value is a weighted mean of.

    Attributes:
        at: indices of the values, `(..., K)`, with repeats where there are fewer than K.
        weight: `(..., K)`; 0 of repeats.
    """

    at: NDArray[np.intp]
    weight: Array


class _BandWeights(NamedTuple):
    columns: Weights
    rows: Weights

    def means(self, values: Array) -> Array:
        """Return the weighted means of `(n,)`: `(rows, W)`."""
        on_columns = _weighted_sum(values, self.columns.at, self.columns.weight)
        return _weighted_sum(on_columns, self.rows.at, self.rows.weight[:, None])


@final
class Regridder:
    """Regridding to rows and columns, by default first-order conservative.

    Conservative: global means are preserved. A target cell is the mean over the source's cells;
    with NaN over the valid part of its area, and NaN if no part is valid. The global mean is then
    preserved only where target cells are valid entirely or not at all.

    Bilinear: a target point is interpolated linearly between the rows and columns around it, around
    the globe in longitude; poleward of the outermost row it has the values of that row. With NaN
    the valid ones of the four points share the weight; NaN if none is valid.

    Args:
        layout: of the source. Rows extend as `row_edges` says, and the cells of a row are equally
            wide.
        grid: the target; it covers the globe, with its rows from the north.
        method: conservative or bilinear.
    """

    def __init__(self, layout: CellLayout, grid: Grid, method: str = CONSERVATIVE) -> None:
        self.grid = grid
        self._layout = layout
        self._method = method
        between = _overlapping_rows if method == CONSERVATIVE else _rows_around
        self._rows = between(np.array(layout.latitude), grid.latitude)
        # A rank reads the same band again and again.
        self._weights_of = lru_cache(maxsize=8)(self._weights)

    def source_rows(self, rows: slice) -> slice:
        """Return which rows of the source target rows need."""
        index = self._rows.at[rows]
        return slice(int(index.min()), int(index.max()) + 1)

    def __call__(
        self, values: NDArray[np.floating], rows: slice = slice(None)
    ) -> NDArray[np.floating]:
        """Regrid fields one by one in float64; the result has the input's dtype.

        Shapes:
            `(..., n)`, the cells of `source_rows(rows)` -> `(..., rows, W)`.
        """
        north, south, _ = rows.indices(self.grid[0])
        band = self._weights_of(north, south)
        shape = (*values.shape[:-1], south - north, self.grid[1])
        result = np.empty(shape, dtype=values.dtype)
        for index in np.ndindex(values.shape[:-1]):
            result[index] = _means_of_valid(values[index].astype(np.float64), band.means)
        return result

    def _weights(self, north: int, south: int) -> _BandWeights:
        target = slice(north, south)
        source = self.source_rows(target)
        layout = self._layout
        # Rows of the same length that begin at the same longitude share their weights.
        circles = list(zip(layout.lengths[source], layout.firsts[source], strict=True))
        kinds = {circle: number for number, circle in enumerate(dict.fromkeys(circles))}
        lengths, firsts = (np.array(x)[:, None] for x in zip(*kinds, strict=True))
        steps = (1 if layout.eastward else -1) * FULL_CIRCLE / lengths
        between = _overlapping_columns if self._method == CONSERVATIVE else _columns_around
        columns = between(lengths, firsts, steps, self.grid.longitude)
        of_kind = [kinds[circle] for circle in circles]
        starts = np.array(layout.starts[source]) - layout.cells(source).start
        index = columns.at[of_kind] + starts[:, None, None]
        rows = Weights(self._rows.at[target] - source.start, self._rows.weight[target])
        # The weights of equal rows are stored once.
        weight = columns.weight if len(kinds) == 1 else columns.weight[of_kind]
        return _BandWeights(Weights(index, weight), rows)


@final
class PointInterpolation:
    """Interpolation from rows and columns to any points: bilinear, or from the nearest ones.

    It is linear in latitude and in longitude or, on a projection, in rows and columns.

    With NaN the valid ones of the four points share the weight; NaN if none is valid. Poleward of
    the outermost row of a globe a point has the values of that row.

    Args:
        source: rows from the north, and columns, of the globe or a region.
        latitude, longitude: of the points in degrees, of one shape.
        projected: whether the source may be on a projection, with winds that lie along it.
        nearest: whether points have the value of the nearest row and column.

    Raises:
        UserError: without a key, that the source does not cover the points, or is on a projection.
    """

    def __init__(
        self,
        source: Grid,
        latitude: Array,
        longitude: Array,
        projected: bool = False,
        nearest: bool = False,
    ) -> None:
        self._width = source[1]
        if source.is_projected and not projected:
            raise UserError("is on a projection, but interpolation needs rows of latitudes")
        if source.is_projected:
            position = positions_on_plane(source, latitude, longitude)
            _refuse(np.isnan(position[0]), latitude, "latitude", np.array(source.extent[0]))
            self._rows, self._columns = (
                _between(at, size) for at, size in zip(position, source, strict=True)
            )
        else:
            self._rows = _rows_around_points(source, latitude)
            self._columns = _columns_around_points(source, longitude)
        if nearest:
            self._rows, self._columns = map(_largest, (self._rows, self._columns))

    def source_rows(self, points: Points) -> slice:
        """Return which rows points need, selected in the first dim."""
        at = self._rows.at[points]
        return slice(int(at.min()), int(at.max()) + 1) if at.size else slice(0, 0)

    def __call__(
        self, fields: NDArray[np.floating], points: Points | None = None
    ) -> NDArray[np.floating]:
        """Interpolate fields one by one in float64; the result has the input's dtype.

        Args:
            fields: whole, or the rows of `source_rows(points)`.
            points: in the first dim; None: all of them, from whole fields.

        Shapes:
            `(..., rows, W)` -> `(..., *points)`.
        """
        first = 0 if points is None else self.source_rows(points).start
        band = slice(None) if points is None else points
        rows, columns = (Weights(x.at[band], x.weight[band]) for x in (self._rows, self._columns))
        at = (rows.at - first)[..., :, None] * self._width + columns.at[..., None, :]
        weight = rows.weight[..., :, None] * columns.weight[..., None, :]
        shape = at.shape[:-2]
        flat = *shape, at.shape[-2] * at.shape[-1]
        means = partial(_weighted_sum, index=at.reshape(flat), weight=weight.reshape(flat))
        result = np.empty((*fields.shape[:-2], *shape), dtype=fields.dtype)
        for index in np.ndindex(fields.shape[:-2]):
            result[index] = _means_of_valid(fields[index].astype(np.float64).ravel(), means)
        return result


@lru_cache(maxsize=8)
def regridder_to(layout: CellLayout, rows: int, columns: int, method: str) -> Regridder:
    """Return the regridder to the usual grid of a size, which files on one grid share."""
    return Regridder(layout, regular_grid(rows, columns), method)


def regular_grid(rows: int, columns: int) -> Grid:
    """Return the usual grid of this size, from the north and from longitude 0 eastward."""
    return Grid(usual_latitude(rows), np.arange(columns) * FULL_CIRCLE / columns)


def _means_of_valid(values: Array, means: Callable[[Array], Array]) -> Array:
    """Return the weighted means of values, of the valid ones where some are NaN."""
    missing = np.isnan(values)
    if not missing.any():
        return means(values)
    total = means(np.where(missing, 0.0, values))
    covered = 1 - means(missing.astype(np.float64))
    # Where all values are valid, `covered` is 1 exactly: as in a band without any NaN.
    has_valid = covered > LEAST_VALID
    return np.where(has_valid, total / np.where(has_valid, covered, 1.0), np.nan)


def _weighted_sum(values: Array, index: NDArray[np.intp], weight: Array) -> Array:
    """Return the sum of `values[index]` with weights over the last dim of both."""
    # Not a matrix product, in which the order of the sums depends on the number of rows.
    total: Array = values[index[..., 0]] * weight[..., 0]
    for number in range(1, index.shape[-1]):
        total += values[index[..., number]] * weight[..., number]
    return total


def _overlapping_rows(old: Array, new: Array) -> Weights:
    """Return the shares of old rows in the area of each new one; latitudes fall."""
    # The area between two latitudes is proportional to the difference of their sines.
    edges, new_edges = (np.sin(np.deg2rad(row_edges(latitude))) for latitude in (old, new))
    upper = np.minimum(new_edges[:-1, None], edges[:-1])
    overlap = upper - np.maximum(new_edges[1:, None], edges[1:])
    overlap[overlap < LEAST_OVERLAP] = 0
    first = (overlap > 0).argmax(axis=1)
    index = first[:, None] + np.arange((overlap > 0).sum(axis=1).max())
    weight = np.pad(overlap, ((0, 0), (0, index.shape[1])))[np.arange(len(new))[:, None], index]
    last = first + (overlap > 0).sum(axis=1) - 1
    return Weights(np.minimum(index, last[:, None]), weight / weight.sum(axis=1, keepdims=True))


def _rows_around(old: Array, new: Array) -> Weights:
    """Return the shares of the old rows north and south of each new one; latitudes fall."""
    south = np.clip(np.searchsorted(-old, -new), 1, len(old) - 1)
    share = np.clip((old[south - 1] - new) / (old[south - 1] - old[south]), 0, 1)
    return _pairs(south - 1, south, share)


def _overlapping_columns(
    lengths: NDArray[np.intp], firsts: Array, steps: Array, new: Array
) -> Weights:
    """Return the shares of the cells of rows in each new column, `(rows, W, K)`.

    Args:
        lengths: number of cells of each row, `(rows, 1)`.
        firsts, steps: longitude of its first cell, and of the next minus this, `(rows, 1)`.
    """
    # In cells of a row, of which number i reaches from i to i + 1.
    middle = (new - firsts) / steps + 0.5
    low, high = (_rounded(middle + side * lengths / (2 * len(new))) for side in (-1, 1))
    first, last = np.floor(low), np.ceil(high) - 1
    cell = first[..., None] + np.arange((last - first).max() + 1)
    overlap = np.minimum(high[..., None], cell + 1) - np.maximum(low[..., None], cell)
    weight = np.maximum(overlap, 0)
    index = np.minimum(cell, last[..., None]).astype(np.intp) % lengths[..., None]
    return Weights(index, weight / (high - low)[..., None])


def _columns_around(lengths: NDArray[np.intp], firsts: Array, steps: Array, new: Array) -> Weights:
    """Return the shares of the two cells around each new column; see `_overlapping_columns`."""
    position = _rounded((new - firsts) / steps)
    first = np.floor(position)
    west = first.astype(np.intp)
    return _pairs(west % lengths, (west + 1) % lengths, position - first)


def positions_on_plane(source: Grid, latitude: Array, longitude: Array) -> Array:
    """Return rows and columns of points on a projection, with fractions: `(2, *points)`.

    NaN outside of the grid. Each cell is the bilinear image of a square on the plane on which lines
    through the centre of the globe project it. Positions differ from those on the projection by
    about 2e-4 of a cell of 50 km, and less in smaller ones.
    """
    centres = unit_vectors(source.latitude, source.longitude)
    points = unit_vectors(latitude.ravel(), longitude.ravel())
    parts = range(0, points.shape[1], POINTS_AT_ONCE)
    found = [_positions(centres, points[:, part : part + POINTS_AT_ONCE]) for part in parts]
    return np.concatenate(found, axis=1).reshape(2, *latitude.shape)


def _positions(centres: Array, points: Array) -> Array:
    """Return the rows and columns of points by Newton's method: `(3, H, W)`, `(3, N)`, `(2, N)`."""
    sizes = np.array(centres.shape[1:])[:, None]
    rows, columns = (np.linspace(0, x - 1, min(x, STARTS)).astype(np.intp) for x in sizes.flat)
    coarse = centres[:, rows][:, :, columns].reshape(3, -1)
    nearest = np.divmod((points.T @ coarse).argmax(axis=1), len(columns))
    position = np.stack([rows[nearest[0]], columns[nearest[1]]]).astype(np.float64)
    # Two directions at right angles to each point, along which a line through it has no extent.
    axis = np.where(np.abs(points[2]) < np.sqrt(0.5), np.eye(3)[:, [2]], np.eye(3)[:, [0]])
    east = np.cross(axis, points, axis=0)
    directions = np.stack([east, np.cross(points, east, axis=0)]) / np.linalg.norm(east, axis=0)
    for _ in range(MAX_STEPS):
        cell = np.clip(np.floor(position), 0, sizes - 2).astype(np.intp)  # beyond it, they go on
        row, column = position - cell
        (nw, ne), (sw, se) = (
            [(directions * centres[:, cell[0] + i, cell[1] + j]).sum(axis=1) for j in (0, 1)]
            for i in (0, 1)
        )
        north, south = nw + column * (ne - nw), sw + column * (se - sw)
        by_row, by_column = south - north, (1 - row) * (ne - nw) + row * (se - sw)
        value = north + row * by_row
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.stack([_cross(value, by_column), _cross(by_row, value)])
            step /= _cross(by_row, by_column)
        # From far outside, steps may lead anywhere.
        position = np.nan_to_num(position - step).clip(-sizes, 2 * sizes)
        is_found = (np.abs(step) < LAST_STEP).all(axis=0)
        if is_found.all():
            break
    on_grid = position.clip(0, sizes - 1)
    row, column = np.rint(on_grid).astype(np.intp)
    is_near = (centres[:, row, column] * points).sum(axis=0) > 0  # not on the other side
    is_inside = (np.abs(position - on_grid) <= EDGE).all(axis=0)
    return np.where(is_near & is_inside & is_found, on_grid, np.nan)


def _cross(a: Array, b: Array) -> Array:
    return np.asarray(a[0] * b[1] - a[1] * b[0])


def _largest(weights: Weights) -> Weights:
    """Return the values with the largest weight alone; of equal ones the first."""
    largest = weights.weight.argmax(axis=-1)[..., None]
    return Weights(np.take_along_axis(weights.at, largest, -1), np.ones(largest.shape))


def _between(position: Array, size: int) -> Weights:
    """Return the shares of the two rows, or columns, around positions among them."""
    first = np.minimum(_rounded(position).astype(np.intp), size - 2)
    return _pairs(first, first + 1, position - first)


def outside_points(source: Grid, latitude: Array, longitude: Array) -> NDArray[np.bool_]:
    """Return which points lie outside of a grid."""
    if source.is_projected:
        return np.asarray(np.isnan(positions_on_plane(source, latitude, longitude)[0]))
    return outside_rows(source, latitude) | outside_columns(source, longitude)


def outside_rows(source: Grid, latitude: Array) -> NDArray[np.bool_]:
    """Return which points lie north or south of a grid."""
    ends = [POLE, -POLE] if source.is_global else source.latitude[[0, -1]]
    return (latitude > ends[0] + COORDINATE_TOLERANCE) | (latitude < ends[1] - COORDINATE_TOLERANCE)


def outside_columns(source: Grid, longitude: Array) -> NDArray[np.bool_]:
    """Return which points lie west or east of a grid."""
    return _eastward(source.longitude, longitude).outside


class _Eastward(NamedTuple):
    """Columns in their order to the east, and points among them.

    Attributes:
        order: of the columns, from the westernmost; of a globe this one comes last again.
        east: degrees of these columns east of the first.
        position: degrees of the points east of it.
        outside: which points are beyond the last column.
    """

    order: NDArray[np.intp]
    east: Array
    position: Array
    outside: NDArray[np.bool_]


def _eastward(columns: Array, longitude: Array) -> _Eastward:
    # Stores may have columns in the other direction.
    order = np.arange(len(columns))
    if (columns[1] - columns[0]) % FULL_CIRCLE > FULL_CIRCLE / 2:
        order = order[::-1]
    east = (columns[order] - columns[order[0]]) % FULL_CIRCLE
    position = (longitude - columns[order[0]]) % FULL_CIRCLE
    if FULL_CIRCLE - east[-1] < 1.5 * east[1]:  # they go round the globe
        outside = np.zeros(position.shape, bool)
        return _Eastward(
            np.append(order, order[0]), np.append(east, FULL_CIRCLE), position, outside
        )
    # A point may be a rounding error west of the first column.
    position = np.where(position > FULL_CIRCLE - COORDINATE_TOLERANCE, 0.0, position)
    return _Eastward(order, east, position, position > east[-1] + COORDINATE_TOLERANCE)


def _rows_around_points(source: Grid, latitude: Array) -> Weights:
    """Return the shares of the rows north and south of each point."""
    _refuse(outside_rows(source, latitude), latitude, "latitude", source.latitude)
    return _rows_around(source.latitude, latitude)


def _columns_around_points(source: Grid, longitude: Array) -> Weights:
    """Return the shares of the columns west and east of each point."""
    order, east, position, outside = _eastward(source.longitude, longitude)
    _refuse(outside, longitude, "longitude", source.longitude[order])
    after = np.clip(np.searchsorted(east, position, side="right"), 1, len(east) - 1)
    share = (position - east[after - 1]) / (east[after] - east[after - 1])
    return _pairs(order[after - 1], order[after], np.clip(share, 0, 1))


def _refuse(outside: NDArray[np.bool_], points: Array, name: str, covered: Array) -> None:
    if outside.any():
        raise UserError(
            f"covers {name} {covered[0]:g} to {covered[-1]:g}, but the region has points at "
            f"{points[outside].flat[0]:g}"
        )


def _rounded(position: Array) -> Array:
    """Return positions, those that rounding has moved from a whole number back on it."""
    whole = np.rint(position)
    return np.where(np.abs(position - whole) < ROUNDING, whole, position)


def _pairs(first: NDArray[np.intp], second: NDArray[np.intp], share: Array) -> Weights:
    first, second = np.where(share < 1, first, second), np.where(share > 0, second, first)
    return Weights(np.stack([first, second], axis=-1), np.stack([1 - share, share], axis=-1))

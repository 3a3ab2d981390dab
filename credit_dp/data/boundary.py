"""The rim of a region: the rows and columns at its edges that are given, not predicted.

A model gets the rim of each state it starts from: in training that of the truth, in a forecast
perhaps that of a driving model. What it predicts there counts nowhere. `PointInterpolation` brings
fields of a driving model to the points of a region.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import COORDINATE_TOLERANCE, FULL_CIRCLE, POLE, Grid
from credit_dp.errors import UserError

Array = NDArray[np.float64]


def check_boundary(width: int, grid: Grid, where: str) -> None:
    """Refuse a rim on the globe, or one that leaves no point to predict.

    Args:
        width: `data.boundary`.
        grid: of the store.
        where: its address.
    """
    if width and grid.is_global:
        raise UserError(
            f"data.boundary: is for regions, but {where} covers the globe, which has no edges. Set "
            "data.boundary=0."
        )
    if 2 * width >= min(grid):
        raise UserError(
            f"data.boundary: {width} rows and columns at each edge leave none of the "
            f"{grid[0]}x{grid[1]} of {where} to predict. Lower data.boundary."
        )


def rim_mask(grid: Sequence[int], width: int) -> NDArray[np.bool_]:
    """Return which points of a grid are within `width` rows or columns of an edge: `(H, W)`."""
    mask = np.ones(tuple(grid), dtype=bool)
    mask[width : grid[0] - width, width : grid[1] - width] = False
    return mask


@final
class PointInterpolation:
    """Bilinear interpolation in longitude and latitude, from rows and columns to any points.

    With NaN the valid ones of the four points share the weight; NaN if none is valid. Poleward of
    the outermost row of a globe a point has the values of that row.

    Args:
        source: rows of latitudes and columns of longitudes, of the globe or of a region.
        latitude, longitude: of the points in degrees, of one shape.

    Raises:
        UserError: without a key, that the source does not cover the points, or is on a projection.
    """

    def __init__(self, source: Grid, latitude: Array, longitude: Array) -> None:
        if source.is_projected:
            raise UserError("is on a projection, but interpolation needs rows of latitudes")
        rows, share_south = _rows_around(source, latitude)
        columns, share_east = _columns_around(source, longitude)
        self._rows, self._columns = rows[:, None], columns[None]
        south = np.stack([1 - share_south, share_south])[:, None]
        self._weights = south * np.stack([1 - share_east, share_east])[None]

    def __call__(self, fields: NDArray[np.floating]) -> NDArray[np.floating]:
        """Interpolate in float64: `(..., H, W)` -> `(..., *points)` of the input's dtype."""
        around = fields[..., self._rows, self._columns].astype(np.float64)
        axes = (-2 - self._weights[0, 0].ndim, -1 - self._weights[0, 0].ndim)
        valid = ~np.isnan(around)
        total = np.where(valid, around, 0.0) * self._weights
        weight = np.where(valid, self._weights, 0.0).sum(axes)
        # Rounding of the weights leaves no trace where all points are valid.
        divisor = np.where(valid.all(axes), 1.0, np.where(weight > 0, weight, np.nan))
        return np.asarray(total.sum(axes) / divisor, dtype=fields.dtype)


def _rows_around(source: Grid, latitude: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the rows before and after each point, `(2, ...)`, and the share of the second."""
    rows = source.latitude
    if rows[0] < rows[-1]:
        raise ValueError("needs rows from north to south")
    ends = [POLE, -POLE] if source.is_global else rows[[0, -1]]
    outside = (latitude > ends[0] + COORDINATE_TOLERANCE) | (
        latitude < ends[1] - COORDINATE_TOLERANCE
    )
    _refuse(outside, latitude, "latitude", rows)
    after = np.clip(np.searchsorted(-rows, -latitude), 1, len(rows) - 1)
    share = (rows[after - 1] - latitude) / (rows[after - 1] - rows[after])
    return np.stack([after - 1, after]), np.clip(share, 0, 1)


def _columns_around(source: Grid, longitude: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the columns west and east of each point, `(2, ...)`, and the share of the second."""
    columns = source.longitude
    # Eastward from the westernmost column; stores may have them in the other direction.
    order = np.arange(len(columns))
    if (columns[1] - columns[0]) % FULL_CIRCLE > FULL_CIRCLE / 2:
        order = order[::-1]
    east = (columns[order] - columns[order[0]]) % FULL_CIRCLE
    position = (longitude - columns[order[0]]) % FULL_CIRCLE
    if FULL_CIRCLE - east[-1] < 1.5 * east[1]:  # they go round the globe
        east, order = np.append(east, FULL_CIRCLE), np.append(order, order[0])
    # A point may be a rounding error west of the first column.
    position = np.where(position > FULL_CIRCLE - COORDINATE_TOLERANCE, 0.0, position)
    _refuse(position > east[-1] + COORDINATE_TOLERANCE, longitude, "longitude", columns[order])
    after = np.clip(np.searchsorted(east, position, side="right"), 1, len(east) - 1)
    share = (position - east[after - 1]) / (east[after] - east[after - 1])
    return np.stack([order[after - 1], order[after]]), np.clip(share, 0, 1)


def _refuse(outside: NDArray[np.bool_], points: Array, name: str, covered: Array) -> None:
    if outside.any():
        raise UserError(
            f"covers {name} {covered[0]:g} to {covered[-1]:g}, but the region has points at "
            f"{points[outside].flat[0]:g}"
        )

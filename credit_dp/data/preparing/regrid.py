"""First-order conservative regridding between regular latitude-longitude grids.

A cell's value is taken to hold all over the cell; a target cell gets the mean over the area that it
shares with source cells. On such grids the shared area is a product of a part in sin(latitude) and
a part in longitude, so that two matrices do it.

Source: Jones 1999, First- and second-order conservative remapping schemes for grids in spherical
coordinates, Monthly Weather Review 127, eq. 2 to 4, with the gradient terms left out.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE, POLE

Array = NDArray[np.float64]


@final
class Regridder:
    """Takes fields from one regular grid to another; global means stay.

    NaN: a target cell is the mean over the valid part of its area, and NaN where none is valid.
    Global means then stay only as far as all of a target cell is valid or none.

    Args:
        latitude, longitude: of the source, `(H,)` and `(W,)` degrees; rows reach from midpoint to
            midpoint, the outermost to the poles; columns are equal and close the circle.
        new_latitude, new_longitude: of the target.
    """

    def __init__(
        self, latitude: Array, longitude: Array, new_latitude: Array, new_longitude: Array
    ) -> None:
        self._rows = _shares(_row_overlap(row_edges(latitude), row_edges(new_latitude)))
        self._columns = _shares(_column_overlap(longitude, new_longitude))

    def __call__(self, fields: NDArray[np.floating]) -> NDArray[np.floating]:
        """Computed in float64, a field at a time; of the type that came.

        Shapes:
            `(..., H, W)` -> `(..., H_new, W_new)`.
        """
        shape = (*fields.shape[:-2], len(self._rows), len(self._columns))
        result = np.empty(shape, dtype=fields.dtype)
        for place in np.ndindex(shape[:-2]):
            result[place] = self._one(fields[place].astype(np.float64))
        return result

    def _one(self, field: Array) -> Array:
        valid = ~np.isnan(field)
        if valid.all():
            return self._means(field)
        covered = self._means(valid.astype(np.float64))
        total = self._means(np.where(valid, field, 0.0))
        # Rounding leaves a speck of area where there is none.
        some = covered > 1e-9
        return np.where(some, total / np.where(some, covered, 1.0), np.nan)

    def _means(self, field: Array) -> Array:
        means: Array = self._rows @ field @ self._columns.T
        return means


def regular_grid(rows: int, columns: int) -> tuple[Array, Array]:
    """Latitudes (falling) and longitudes of the usual grid of this size.

    An odd number of rows has one on each pole and one on the equator, an even number has neither.
    """
    latitude = np.linspace(POLE, -POLE, rows, dtype=np.float64)
    if rows % 2 == 0:
        latitude = POLE - (np.arange(rows, dtype=np.float64) + 0.5) * (2 * POLE / rows)
    return latitude, np.arange(columns) * FULL_CIRCLE / columns


def row_edges(latitude: Array) -> Array:
    """Edges of rows in sin(latitude), falling: `(H,)` degrees, falling -> `(H + 1,)`."""
    middle = (latitude[1:] + latitude[:-1]) / 2
    inner = np.sin(np.deg2rad(middle))
    return np.asarray(np.concatenate([[1.0], inner, [-1.0]]), dtype=np.float64)


def _row_overlap(old: Array, new: Array) -> Array:
    """What each new row has of each old one, in sin(latitude): `(H_new, H)`."""
    upper = np.minimum(new[:-1, None], old[None, :-1])
    lower = np.maximum(new[1:, None], old[None, 1:])
    return np.asarray(np.maximum(upper - lower, 0.0), dtype=np.float64)


def _column_overlap(old: Array, new: Array) -> Array:
    """What each new column has of each old one, in degrees: `(W_new, W)`."""
    width, new_width = FULL_CIRCLE / len(old), FULL_CIRCLE / len(new)
    # Distance between centres, the short way round: from -180 up to 180.
    apart = (new[:, None] - old[None, :] + FULL_CIRCLE / 2) % FULL_CIRCLE - FULL_CIRCLE / 2
    overlap = np.zeros_like(apart)
    for turn in (-FULL_CIRCLE, 0.0, FULL_CIRCLE):  # wide columns may meet on both sides
        east = np.minimum(apart + turn + new_width / 2, width / 2)
        west = np.maximum(apart + turn - new_width / 2, -width / 2)
        overlap += np.maximum(east - west, 0.0)
    return overlap


def _shares(overlap: Array) -> Array:
    """Each row divided by its sum, so that a constant stays one."""
    return np.asarray(overlap / overlap.sum(axis=1, keepdims=True), dtype=np.float64)

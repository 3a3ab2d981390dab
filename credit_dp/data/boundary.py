"""The rim of a region: the rows and columns at its edges that are given, not predicted.

Columns that go round the globe have no edge.

A model gets the rim of each state it starts from: in training that of the truth, in a forecast
perhaps that of a driving model. What it predicts there counts nowhere.
"""

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import Grid
from credit_dp.errors import UserError


def check_boundary(width: int, relaxation: int, grid: Grid, where: str) -> None:
    """Refuse a rim on the globe, or one that leaves no point to predict alone."""
    if width and grid.is_global:
        raise UserError(
            f"data.boundary: is for regions, but {where} covers the globe, which has no edges. Set "
            "data.boundary=0."
        )
    for key, total in (("boundary", width), ("relaxation", width + relaxation)):
        if 2 * total >= min(grid[: 1 if grid.is_periodic else 2]):
            raise UserError(
                f"data.{key}: {total} rows and columns at each edge leave none of the "
                f"{grid[0]}x{grid[1]} of {where} to predict. Lower data.{key}."
            )


def rim_mask(grid: Grid, width: int) -> NDArray[np.bool_]:
    """Return which points of a grid are within `width` rows or columns of an edge: `(H, W)`."""
    return _distance(grid) < width


def given_share(grid: Grid, width: int, relaxation: int) -> NDArray[np.float64]:
    """Return the share of the given state at each point, 1 on the rim and 0 far inside: `(H, W)`.

    In the relaxation zone beside the rim it is `1 - tanh(j / 2)`, j = 1, 2, ... rows or columns
    from the rim, whichever is nearer.

    Source: Davies 1976, "A lateral boundary formulation for multi-level prediction models", for
    relaxation.
    """
    distance = _distance(grid) - width + 1
    share = 1 - np.tanh(np.maximum(distance, 0) / 2)
    return np.where(distance <= relaxation, share, 0.0)


def _distance(grid: Grid) -> NDArray[np.intp]:
    """Return how many rows or columns lie between each point and the nearest edge: `(H, W)`."""
    rows, columns = (np.minimum(np.arange(n), np.arange(n)[::-1]) for n in grid)
    if grid.is_periodic:
        columns[:] = max(grid)  # farther than any row
    return np.minimum(rows[:, None], columns)

"""The rim of a region: the rows and columns at its edges that are given, not predicted.

A model gets the rim of each state it starts from: in training that of the truth, in a forecast
perhaps that of a driving model. What it predicts there counts nowhere.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import Grid
from credit_dp.errors import UserError


def check_boundary(width: int, relaxation: int, grid: Grid, where: str) -> None:
    """Refuse a rim on the globe, or one that leaves no point to predict alone.

    Args:
        width: `data.boundary`.
        relaxation: `data.relaxation`.
        grid: of the store.
        where: its address.
    """
    if width and grid.is_global:
        raise UserError(
            f"data.boundary: is for regions, but {where} covers the globe, which has no edges. Set "
            "data.boundary=0."
        )
    for key, total in (("boundary", width), ("relaxation", width + relaxation)):
        if 2 * total >= min(grid):
            raise UserError(
                f"data.{key}: {total} rows and columns at each edge leave none of the "
                f"{grid[0]}x{grid[1]} of {where} to predict. Lower data.{key}."
            )


def rim_mask(grid: Sequence[int], width: int) -> NDArray[np.bool_]:
    """Return which points of a grid are within `width` rows or columns of an edge: `(H, W)`."""
    mask = np.ones(tuple(grid), dtype=bool)
    mask[width : grid[0] - width, width : grid[1] - width] = False
    return mask


def given_share(grid: Sequence[int], width: int, relaxation: int) -> NDArray[np.float64]:
    """Return the share of the given state at each point, 1 on the rim and 0 far inside: `(H, W)`.

    In the relaxation zone beside the rim it is `1 - tanh(j / 2)`, j = 1, 2, ... rows or columns
    from the rim, whichever is nearer.

    Source: Davies 1976, "A lateral boundary formulation for multi-level prediction models", for
    relaxation.
    """
    rows, columns = (np.minimum(np.arange(n), np.arange(n)[::-1]) for n in grid)
    distance = np.minimum(rows[:, None], columns) - width + 1
    share = 1 - np.tanh(np.maximum(distance, 0) / 2)
    return np.where(distance <= relaxation, share, 0.0)

"""The rim of a region: the rows and columns at its edges that are given, not predicted.

A model gets the rim of each state it starts from: in training that of the truth, in a forecast
perhaps that of a driving model. What it predicts there counts nowhere.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import Grid
from credit_dp.errors import UserError


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

"""Where a maximum is: positions of a few rows turned into those of the whole globe."""

from __future__ import annotations

from torch import Tensor


def positions_on_globe(indices: Tensor, rows: Tensor, columns: int, height: int) -> Tensor:
    """Return positions in a channel of the globe, in row-major order.

    Args:
        indices: positions in a channel of these rows, in row-major order.
        rows: the global row of each of the rows.
        columns: entries of a row; 1 if rows are the last dimension.
        height: rows of the globe.
    """
    level = indices // (len(rows) * columns)
    row = rows[indices // columns % len(rows)]
    return (level * height + row) * columns + indices % columns

"""The latitude-longitude grid: its text in a config, row weights, chunk rows that bands read."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks

POLE = 90.0  # degrees
FULL_CIRCLE = 360.0  # degrees


def parse_grid(text: str) -> tuple[int, int]:
    """Parse `"121x240"` into `(121, 240)`: latitude rows and longitude columns.

    Raises:
        UserError: the text is not of that form.
    """
    checks.grid("data.grid", text)
    rows, columns = text.split("x")
    return int(rows), int(columns)


def row_weights(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area of each latitude row divided by the mean area.

    A row extends from midpoint to midpoint, and the outermost rows extend to the poles. A row on a
    pole therefore has the area of its half cell, where cos(latitude) would give it zero weight.

    Shapes:
        `(H,)` degrees, strictly falling or strictly rising -> `(H,)` with mean 1.

    Source: WeatherBench 2 (Rasp et al. 2024), section 3.2.
    """
    middle = (latitude[1:] + latitude[:-1]) / 2
    first = POLE if latitude[0] >= latitude[-1] else -POLE
    edges = np.deg2rad(np.concatenate([[first], middle, [-first]]))
    area = np.abs(np.diff(np.sin(edges)))
    return np.asarray(area / area.mean(), dtype=np.float64)


def balanced_bounds(height: int, ranks: int) -> tuple[int, ...]:
    """Return the first row of each balanced band and the end; the first ranks get surplus rows."""
    share, surplus = divmod(height, ranks)
    return tuple(rank * share + min(rank, surplus) for rank in range(ranks + 1))


def rows_touched(height: int, ranks: int, chunk: int, from_south: bool = False) -> list[int]:
    """Return for each rank the rows of the chunks that its band touches, with the padding.

    Args:
        height: rows of the grid.
        ranks: number of balanced bands; bands without rows are left out.
        chunk: rows per chunk.
        from_south: whether chunks are counted from the south pole instead of the north pole.
    """
    bounds = balanced_bounds(height, ranks)
    if from_south:
        bounds = tuple(height - bound for bound in reversed(bounds))
    return [
        (-(-stop // chunk) - first // chunk) * chunk
        for first, stop in pairwise(bounds)
        if stop > first
    ]


def max_rows_touched(height: int, ranks: int, chunk: int) -> int:
    """Return the largest `rows_touched` of all ranks, with chunks from either pole."""
    return max(max(rows_touched(height, ranks, chunk, south)) for south in (False, True))


def row_amplification(height: int, ranks: int, chunk: int) -> float:
    """Return the largest ratio of rows touched to rows owned, over all ranks.

    Stores may begin at either pole; the result is that of the worse order.
    """
    bounds = balanced_bounds(height, ranks)
    owned = [stop - first for first, stop in pairwise(bounds)]
    north = rows_touched(height, ranks, chunk)
    south = reversed(rows_touched(height, ranks, chunk, from_south=True))
    return max(max(a, b) / rows for a, b, rows in zip(north, south, owned, strict=True))

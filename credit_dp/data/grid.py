"""The latitude-longitude grid: how a config writes it, what rows weigh, what bands read."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks

POLE = 90.0  # degrees
FULL_CIRCLE = 360.0  # degrees


def parse_grid(text: str) -> tuple[int, int]:
    """`"121x240"` -> `(121, 240)`: latitude rows and longitude columns.

    Raises:
        UserError: the text is not of that form.
    """
    checks.grid("data.grid", text)
    rows, columns = text.split("x")
    return int(rows), int(columns)


def row_weights(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area of each latitude row divided by the mean area.

    A row reaches from midpoint to midpoint and the outermost rows reach the poles, so a row that
    lies on a pole has the area of its half cell, where cos(latitude) would give it none.

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
    """First rows of balanced bands, and the end: surplus rows go to the first ranks."""
    share, surplus = divmod(height, ranks)
    return tuple(rank * share + min(rank, surplus) for rank in range(ranks + 1))


def rows_touched(height: int, ranks: int, chunk: int, from_south: bool = False) -> list[int]:
    """Rows in the chunks that each rank's band touches, the padding of the last chunk included.

    Args:
        height, ranks: balanced bands of so many rows in all.
        chunk: rows of a chunk.
        from_south: whether the first chunk begins at the southernmost row, not the northernmost.
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
    """Of all ranks; chunks begin at the pole where that is worse."""
    return max(max(rows_touched(height, ranks, chunk, south)) for south in (False, True))


def row_amplification(height: int, ranks: int, chunk: int) -> float:
    """Rows touched over rows owned, of the rank where that is most.

    Chunks begin at the pole where that is worse: stores may hold either pole first.
    """
    bounds = balanced_bounds(height, ranks)
    owned = [stop - first for first, stop in pairwise(bounds)]
    north = rows_touched(height, ranks, chunk)
    south = reversed(rows_touched(height, ranks, chunk, from_south=True))
    return max(max(a, b) / own for a, b, own in zip(north, south, owned, strict=True))

"""The latitude-longitude grid: its text in a config, the edges and weights of its rows."""

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


def row_edges(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of rows in degrees: halfway between them, and at the poles.

    Shapes:
        `(H,)`, strictly falling or strictly rising -> `(H + 1,)` in the same order.
    """
    middle = (latitude[1:] + latitude[:-1]) / 2
    first = POLE if latitude[0] >= latitude[-1] else -POLE
    return np.asarray(np.concatenate([[first], middle, [-first]]), dtype=np.float64)


def row_weights(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area of each latitude row divided by the mean area.

    A row extends from midpoint to midpoint, and the outermost rows extend to the poles. A row on a
    pole therefore has the area of its half cell, where cos(latitude) would give it zero weight.

    Shapes:
        `(H,)` degrees, strictly falling or strictly rising -> `(H,)` with mean 1.

    Source: WeatherBench 2 (Rasp et al. 2024), section 3.2.
    """
    area = np.abs(np.diff(np.sin(np.deg2rad(row_edges(latitude)))))
    return np.asarray(area / area.mean(), dtype=np.float64)

"""The latitude-longitude grid: how it is written in a config and what each row weighs."""

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

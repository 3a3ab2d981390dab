"""The grid of an anemoi dataset, which has to be a regular one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.sources.stacked_group import values_of
from credit_dp.errors import UserError

Degrees = NDArray[np.float64]
SAME = 1e-3  # degrees by which cells of one row may differ: they are often kept as float32
N320 = 542080  # cells; of ERA5's own grid
COARSEST = 16  # of octahedral grids that anybody uses


def regular_grid(
    group: zarr.Group, attributes: Mapping[str, Any], where: str
) -> tuple[Degrees, Degrees]:
    """`(H,)` latitudes and `(W,)` longitudes, in the order of the cells.

    Raises:
        UserError: the cells are not the points of rows and columns, row after row.
    """
    latitudes = values_of(group, "latitudes", where).astype(np.float64)
    longitudes = values_of(group, "longitudes", where).astype(np.float64)
    cells = group["data"].shape[3]  # type: ignore[union-attr]
    if latitudes.shape != (cells,) or longitudes.shape != (cells,):
        raise UserError(
            f"{where}: needs a latitude and a longitude for each of {cells} cells, but has "
            f"{latitudes.shape} and {longitudes.shape}. Change data.store."
        )
    shape = attributes.get("field_shape") or []
    if len(shape) == 2 and int(shape[0]) * int(shape[1]) == cells:
        rows, columns = latitudes.reshape(*shape), longitudes.reshape(*shape)
        if np.ptp(rows, axis=1).max() < SAME and np.ptp(columns, axis=0).max() < SAME:
            return rows[:, 0], columns[0]
    raise UserError(
        f"{where}: is on {_name(cells, attributes)}, but a regular grid is needed: rows of one "
        "latitude with the same longitudes, and field_shape [rows, columns]. Make the dataset on a "
        "regular grid such as 1.0/1.0 degrees, or change data.store."
    )


def _name(cells: int, attributes: Mapping[str, Any]) -> str:
    """The grid as people call it."""
    said = str(attributes.get("resolution") or _reduced(cells))
    reduced = said[:1].lower() in ("n", "o") and said[1:].isdecimal()
    kind = "the reduced Gaussian grid " if reduced else "the grid "
    return (
        f"{kind}{said.upper()} of {cells} cells" if said else f"an irregular grid of {cells} cells"
    )


def _reduced(cells: int) -> str:
    """The octahedral reduced Gaussian grid of so many cells, or N320; empty if it is neither.

    Row n from the pole of an octahedral grid has 4 n + 16 cells, so ON has 4 N (N + 9).

    Source: ECMWF, octahedral reduced Gaussian grid.
    """
    if cells == N320:
        return "N320"
    number = round((81 + cells) ** 0.5 / 2 - 4.5)
    return f"O{number}" if 4 * number * (number + 9) == cells and number >= COARSEST else ""

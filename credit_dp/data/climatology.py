"""The seasonal climatology: mean and annual harmonics per grid point, fitted to the training dates.

Coefficients lie on disk in chunks of a few rows, so that a rank reads its own rows alone.
"""

from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.cache import fingerprint
from credit_dp.data.dates import split_span
from credit_dp.data.schema import Channels
from credit_dp.data.season import year_fraction
from credit_dp.data.sources.source import Fields
from credit_dp.data.store import Store

VERSION = 1  # of the definitions below: a new one makes old files unused
HARMONICS = 2
WORST_VARIANCE = 20.0
ROW_CHUNKS = 64  # at least this many chunks from pole to pole, as far as there are rows

Matrix = NDArray[np.float64]


@final
class Climatology:
    """The expected field on any date, from a fit that lies on disk.

    Holds the coefficients of the rows that were asked for last.
    """

    def __init__(self, arrays: list[zarr.Array[Any]]) -> None:
        self._arrays = arrays
        self.harmonics = (arrays[0].shape[1] - 1) // 2
        self._rows: slice | None = None
        self._coefficients = np.empty(0, dtype=np.float32)

    @classmethod
    def load(cls, path: Path, channels: Channels) -> "Climatology | None":
        """Open what a `ClimatologyFit` wrote; None if it is absent or damaged."""
        try:
            return cls([zarr.open_array(path / name, mode="r") for name in channels.variables])
        except (OSError, ValueError, KeyError):
            return None

    def field(self, time: np.datetime64, rows: slice) -> NDArray[np.float32]:
        """The climatological prognostic channels in the store's units: `(C, rows, W)`."""
        if rows != self._rows:
            read = [np.asarray(array[:, :, rows], dtype=np.float32) for array in self._arrays]
            self._coefficients = np.concatenate(read)
            self._rows = rows
        basis = seasonal_basis(np.array([time]), self.harmonics)[0].astype(np.float32)
        return np.asarray(np.einsum("k,ckhw->chw", basis, self._coefficients))


def seasonal_basis(times: NDArray[np.datetime64], harmonics: int) -> Matrix:
    """`(T,)` -> `(T, 1 + 2 harmonics)`: one, then cosine and sine of each multiple of the year."""
    angle = 2 * np.pi * year_fraction(times)
    columns = [np.ones_like(angle)]
    for multiple in range(1, harmonics + 1):
        columns += [np.cos(multiple * angle), np.sin(multiple * angle)]
    return np.stack(columns, axis=1)


def resolved_harmonics(times: NDArray[np.datetime64]) -> int:
    """How many harmonics the dates determine: fewer than two where they leave out seasons.

    The variance of the fitted field, on the day on which it is greatest, is 5 times the residual
    variance over the number of dates if these cover whole years, 15 with 300 days and 34 with 270:
    the fit swings freely in the seasons that no date covers. Above a limit a harmonic is left out.
    """
    year = np.datetime64("2001-01-01T00", "h") + np.arange(0, 365 * 24, 24)
    for harmonics in range(HARMONICS, 0, -1):
        basis = seasonal_basis(times, harmonics)
        if np.linalg.matrix_rank(basis) < basis.shape[1]:
            continue
        days = seasonal_basis(year, harmonics)
        inverse = np.linalg.inv(basis.T @ basis / len(times))
        if np.einsum("tj,jk,tk->t", days, inverse, days).max() <= WORST_VARIANCE:
            return harmonics
    return 0


def climatology_path(store: Store, folder: Path) -> Path:
    """Where the climatology of this store, these variables and dates lies."""
    times = store.times[split_span(store.config, "train", store.times)]
    description = store.description(list(store.channels.variables))
    name = fingerprint(VERSION, description, [str(time) for time in times])
    return folder / f"climatology-{name}.zarr"


@final
class ClimatologyFit:
    """Least squares for all grid points at once, during a pass over the training dates.

    All points share one small matrix; the right-hand sides of one variable at a time are in memory:
    40 bytes per grid point and level.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self._group = zarr.open_group(path, mode="w")
        self._grid = store.grid
        times = store.times[split_span(store.config, "train", store.times)]
        self._basis = seasonal_basis(times, resolved_harmonics(times))
        self._variable = ""
        self._sums: Matrix = np.empty((0, 0, 0))

    def begin(self, variable: str, levels: int) -> None:
        """Expect blocks of another variable."""
        self._variable = variable
        self._sums = np.zeros((levels, self._basis.shape[1], self._grid[0] * self._grid[1]))

    def add(self, first: int, block: Fields) -> None:
        """Take in `(T, levels, H, W)`."""
        basis = self._basis[first : first + len(block)]
        for level in range(len(self._sums)):
            values = block[:, level].reshape(len(block), -1).astype(np.float64)
            self._sums[level] += basis.T @ values

    def end(self) -> None:
        """Solve for the variable's coefficients and write them: `(levels, K, H, W)`."""
        inverse = np.linalg.inv(self._basis.T @ self._basis)
        levels, count, _ = self._sums.shape
        height, width = self._grid
        array = self._group.create_array(
            self._variable,
            shape=(levels, count, height, width),
            chunks=(levels, count, max(1, height // ROW_CHUNKS), width),
            dtype="float32",
            dimension_names=("level", "coefficient", "latitude", "longitude"),
        )
        for level in range(levels):
            fitted = inverse @ self._sums[level]
            array[level] = fitted.reshape(count, height, width).astype(np.float32)

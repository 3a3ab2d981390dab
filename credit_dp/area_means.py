"""Means of fields over the neighbourhood of each point on the sphere, for scores by scale.

Along a row the points within a distance of another point are a window of columns, whose width
depends on both rows only. So the sum over a neighbourhood is a sum of circular convolutions of
rows, which are products of Fourier coefficients.
"""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.sphere import EARTH_RADIUS, Vector

BLOCK_ROWS = 32  # output rows that share a table of coefficients


def rows_within(latitude: Vector, rows: slice, radius: float) -> slice:
    """Return the rows with points at most `radius` km from some point of `rows`.

    Args:
        latitude: of all rows, in degrees, `(H,)`.
    """
    near = np.flatnonzero(window_widths(latitude, rows, 1, radius).any(axis=0))
    return slice(int(near[0]), int(near[-1]) + 1)


def window_widths(latitude: Vector, rows: slice, columns: int, radius: float) -> NDArray[np.int64]:
    """Return how many points of each row are at most `radius` km from a point of each of `rows`.

    Shapes:
        -> `(rows, H)`.

    Source: the spherical law of cosines.
    """
    sine, cosine = np.sin(np.deg2rad(latitude)), np.cos(np.deg2rad(latitude))
    least = np.cos(radius * 1000 / EARTH_RADIUS)  # cosine of the distance on the sphere
    limit = (least - np.outer(sine[rows], sine)) / np.outer(cosine[rows], cosine)
    half = np.arccos(limit.clip(-1, 1)) * columns / (2 * np.pi)
    # Rounding must not leave out a point at the distance of the radius.
    widths = (2 * np.floor(half + 1e-9) + 1).clip(max=columns)
    return np.where(limit > 1 + 1e-12, 0, widths).astype(np.int64)


@final
class NeighbourhoodSums:
    """Adds up fields, weighted by area, over all points within a distance of each point.

    Its table of coefficients has for each output row about `(32 + 2 radius / distance of rows)
    (W / 2 + 1)` numbers: at 721 x 1440 points in float32 140 MB for 500 km, 220 MB for 1000 km.

    Args:
        latitude: of all rows of the globe, in degrees, `(H,)`, whose columns are evenly spaced.
        areas: weight of each row, `(H,)`.
        rows: of the sums, at least one.
        radius: in km.
        like: has the device and the dtype of fields.

    Attributes:
        own: which of the n rows `rows_within(latitude, rows, radius)` are `rows`.
        area: the sums of a field of ones, `(h, 1)`.

    Shapes:
        `(..., C, n, W)` -> `(..., C, h, W)`.
    """

    def __init__(
        self,
        latitude: Vector,
        areas: Vector,
        rows: slice,
        columns: int,
        radius: float,
        like: Tensor,
    ) -> None:
        needed = rows_within(latitude, rows, radius)
        widths = window_widths(latitude, rows, columns, radius)[:, needed]
        self.own = slice(rows.start - needed.start, rows.stop - needed.start)
        self.area = torch.from_numpy(widths @ areas[needed])[:, None].to(like)
        self._columns = columns
        self._tables = [
            window_table(widths[first : first + BLOCK_ROWS], areas[needed], columns, like)
            for first in range(0, len(widths), BLOCK_ROWS)
        ]

    def __call__(self, fields: Tensor) -> Tensor:
        """Return the sums."""
        waves = torch.view_as_real(torch.fft.rfft(fields.flatten(0, -3)))  # (N, n, K, 2)
        by_wave = waves.permute(2, 1, 0, 3).flatten(2)  # (K, n, 2 N)
        parts = [table @ by_wave[:, span] for span, table in self._tables]
        sums = torch.cat(parts, dim=1)  # (K, h, 2 N)
        waves = sums.view(*sums.shape[:2], len(waves), 2).permute(2, 1, 0, 3)
        rows: Tensor = torch.fft.irfft(torch.view_as_complex(waves.contiguous()), n=self._columns)
        return rows.view(*fields.shape[:-2], *rows.shape[1:])


@final
class AreaMeans:
    """Averages fields, weighted by area, over all points within a distance of each point.

    Points without values are left out.

    Args:
        valid: `(C, n, W)`, true where fields have values on the rows that the sums need; None:
            everywhere.

    Shapes:
        fields `(..., C, n, W)`, 0 where there are no values -> `(..., C, h, W)`, 0 there as well.
    """

    def __init__(self, sums: NeighbourhoodSums, valid: Tensor | None = None) -> None:
        self._sums = sums
        self._missing = None
        self._area = sums.area
        if valid is not None:
            self._missing = ~valid[:, sums.own]
            # Not 0 far from any value: the gradient of a quotient there would be NaN.
            self._area = sums(valid.to(sums.area.dtype)).masked_fill(self._missing, 1)

    def __call__(self, fields: Tensor, channels: slice = slice(None)) -> Tensor:
        """Return the means, given these of the channels that `valid` has."""
        if self._missing is None:
            return self._sums(fields) / self._area
        means = self._sums(fields) / self._area[channels]
        return means.masked_fill(self._missing[channels], 0)


def window_table(
    widths: NDArray[np.int64], areas: Vector, columns: int, like: Tensor
) -> tuple[slice, Tensor]:
    """Return the input rows of some output rows, and the transforms of the windows on them.

    Shapes:
        widths `(h, n)` -> `(K, h, n of the slice)`, K = W // 2 + 1.
    """
    near = np.flatnonzero(widths.any(axis=0))
    span = slice(int(near[0]), int(near[-1]) + 1)
    width = widths[:, span]
    # The sum of the cosines of a window that is symmetric about its point (Dirichlet's kernel).
    angle = np.pi * np.arange(1, columns // 2 + 1)[:, None, None] / columns
    waves = np.sin(angle * width) / np.sin(angle)
    table = np.concatenate([width[None], waves]) * areas[span]
    return span, torch.from_numpy(table).to(like)

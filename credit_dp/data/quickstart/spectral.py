"""Spherical harmonics up to a triangular truncation, as two matrix products per transform.

A real field is `f(lon, mu) = Re sum_m sum_n f[m, n] P[n, m](mu) exp(i m lon)` with `mu` the sine of
latitude, negative `m` folded onto positive ones, and `P` normalised to a mean square of one over
`mu`. Coefficients are real arrays `(F, T + 1, 2, N)`: field, order, real or imaginary part, degree.

Products of small matrices beat an FFT up to about T85, and need nothing beyond numpy.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


def ladder(orders: Array, degree: int) -> Array:
    """`eps` of `mu P[n] = eps[n + 1] P[n + 1] + eps[n] P[n - 1]`, zero where `n <= m`."""
    return np.sqrt(np.maximum(degree**2 - orders**2, 0) / (4.0 * degree**2 - 1))


def legendre(truncation: int, degrees: int, mu: Array) -> Array:
    """Normalised associated Legendre functions.

    Shapes:
        mu `(L,)` -> `(truncation + 1, L, degrees)`, indexed by order, latitude, degree.

    Source: Holmes & Featherstone 2002, eq. 11 (standard forward columns).
    """
    orders = np.arange(truncation + 1, dtype=np.float64)
    table = np.zeros((truncation + 1, len(mu), degrees))
    sectoral = np.ones(len(mu))
    for m in range(min(truncation + 1, degrees)):
        if m > 0:
            sectoral = sectoral * np.sqrt((2 * m + 1) / (2 * m) * (1 - mu**2))
        table[m, :, m] = sectoral
    for n in range(1, degrees):
        lower = orders < n
        below = table[lower, :, n - 2] * ladder(orders[lower], n - 1)[:, None] if n > 1 else 0.0
        table[lower, :, n] = (mu * table[lower, :, n - 1] - below) / ladder(orders[lower], n)[
            :, None
        ]
    return table


def legendre_slope(truncation: int, degrees: int, mu: Array) -> Array:
    """`(1 - mu^2) dP/dmu` of the functions that `legendre` returns, in the same shape."""
    table = legendre(truncation, degrees + 1, mu)
    orders = np.arange(truncation + 1, dtype=np.float64)
    slope = np.zeros((truncation + 1, len(mu), degrees))
    for n in range(degrees):
        slope[:, :, n] = -n * ladder(orders, n + 1)[:, None] * table[:, :, n + 1]
        if n > 0:
            slope[:, :, n] += (n + 1) * ladder(orders, n)[:, None] * table[:, :, n - 1]
    return slope


def fourier(truncation: int, longitudes: Array) -> Array:
    """Rows of cosines and minus sines: coefficients to values at `longitudes` (radians).

    Shapes:
        `(W,)` -> `(W, 2 (truncation + 1))`.
    """
    angle = longitudes[:, None] * np.arange(truncation + 1)
    return np.stack([np.cos(angle), -np.sin(angle)], axis=-1).reshape(len(longitudes), -1)


def degrees_squared(degrees: int) -> Array:
    """`n (n + 1)`: minus the Laplacian's eigenvalues on the unit sphere."""
    n = np.arange(degrees, dtype=np.float64)
    return n * (n + 1)


def along_longitude(coefficients: Array) -> Array:
    """The coefficients of the derivative in longitude: multiplication by `i m`."""
    m = np.arange(coefficients.shape[1], dtype=coefficients.dtype)[:, None]
    result = np.empty_like(coefficients)
    np.multiply(-m, coefficients[:, :, 1], out=result[:, :, 0])
    np.multiply(m, coefficients[:, :, 0], out=result[:, :, 1])
    return result


def to_grid(associated: Array, waves: Array, coefficients: Array) -> Array:
    """Sums a spectral series at the points of a grid.

    Shapes:
        associated `(M, L, N)`, waves `(W, 2 M)`, coefficients `(F, M, 2, N)` -> `(W, F, L)`.
    """
    orders, latitudes, degrees = associated.shape
    fields = len(coefficients)
    folded = coefficients.transpose(1, 3, 2, 0).reshape(orders, degrees, 2 * fields)
    zonal = np.matmul(associated, folded).reshape(orders, latitudes, 2, fields)
    zonal = zonal.transpose(0, 2, 3, 1).reshape(2 * orders, fields * latitudes)
    return np.asarray((waves @ zonal).reshape(len(waves), fields, latitudes))


@final
@dataclass(frozen=True)
class GaussianGrid:
    """The transform grid on which products of two truncated fields have no aliasing error.

    Shapes:
        `inverse` and `inverse_slope` `(T + 1, L, T + 1)`, `direct` and `direct_slope`
        `(T + 1, T + 1, L)` with the quadrature weights divided by `1 - mu^2`, `waves`
        `(W, 2 T + 2)`, `analysis` `(2 T + 2, W)`.

    Source: Orszag 1970 (W >= 3 T + 1, L >= (3 T + 1) / 2).
    """

    mu: Array
    longitudes: Array
    inverse: Array
    inverse_slope: Array
    direct: Array
    direct_slope: Array
    waves: Array
    analysis: Array

    @classmethod
    def of(cls, truncation: int, dtype: type[np.floating[Any]] = np.float32) -> "GaussianGrid":
        """The smallest such grid for `truncation`, with its tables in `dtype`."""
        latitudes = -(-(3 * truncation + 1) // 4) * 2
        mu, weights = np.polynomial.legendre.leggauss(latitudes)
        longitudes = 2 * np.pi * np.arange(2 * latitudes) / (2 * latitudes)
        table = legendre(truncation, truncation + 1, mu)
        slope = legendre_slope(truncation, truncation + 1, mu)
        weight = (weights / (2 * (1 - mu**2)))[:, None]
        waves = fourier(truncation, longitudes)
        # Folding +m and -m into one real part doubles every wave but the zonal mean.
        analysis = (
            waves.T * (np.where(np.arange(2 * truncation + 2) < 2, 1, 2) / len(waves))[:, None]
        )
        tables = (
            table,
            slope,
            (table * weight).transpose(0, 2, 1),
            (slope * weight).transpose(0, 2, 1),
            waves,
            analysis,
        )
        return cls(mu, longitudes, *(np.ascontiguousarray(t, dtype=dtype) for t in tables))

    def transform(self, values: Array, slope: bool = False) -> Array:
        """Projects `values` on the harmonics (or on their slopes), weighted by `1 / (1 - mu^2)`.

        Shapes:
            `(W, F, L)` -> `(F, T + 1, 2, T + 1)`.
        """
        longitudes, fields, latitudes = values.shape
        orders = len(self.direct)
        zonal = self.analysis @ values.reshape(longitudes, -1)
        folded = zonal.reshape(orders, 2 * fields, latitudes).transpose(0, 2, 1)
        table = self.direct_slope if slope else self.direct
        spectrum = np.matmul(table, folded).reshape(orders, orders, 2, fields)
        return np.asarray(spectrum.transpose(3, 0, 2, 1))

    def project(self, values: Array) -> Array:
        """The coefficients of `values`: the inverse of `to_grid` for truncated fields."""
        return self.transform(values * (1 - self.mu**2).astype(values.dtype))

"""Turns streamfunctions into physical fields on any grid.

Winds and geopotential follow from the streamfunction by linear balance, temperature and the fields
at the surface from the geopotential by hydrostatic balance.
"""

from typing import final

import numpy as np

from credit_dp.data.quickstart.dynamics import (
    DRY_AIR,
    LAPSE_RATE,
    LEVELS,
    RADIUS,
    ROTATION,
    STREAM,
    Array,
    along_longitude,
    fourier,
    ladder,
    land_fraction,
    legendre,
    legendre_slope,
    terrain,
    to_grid,
)
from credit_dp.data.regrid import regular_grid
from credit_dp.data.units import GRAVITY

STANDARD_HEIGHT = (11784.0, 5574.0, 1949.0)  # m at LEVELS, US standard atmosphere
SURFACE = 1000.0  # hPa
# Above the middle of the upper layer, anomalies keep the mean slope of that layer: the levels don't
# resolve the tropopause.
MIN_PRESSURE = float(np.sqrt(LEVELS[0] * LEVELS[1]))  # hPa
MAX_LATITUDE = 89.99999  # degrees; pole rows are evaluated here: their cosine divides


def parabola(pressure: float) -> tuple[Array, Array]:
    """Return the weights of the levels in a geopotential, and in its slope in `ln p`.

    They are those of the parabola in `ln p` through the three levels (Lagrange), at `pressure` hPa.
    """
    log_pressure, nodes = np.log(pressure), np.log(LEVELS)
    value, slope = np.zeros(3), np.zeros(3)
    for k in range(3):
        a, b = np.delete(nodes, k)
        scale = (nodes[k] - a) * (nodes[k] - b)
        value[k] = (log_pressure - a) * (log_pressure - b) / scale
        slope[k] = (2 * log_pressure - a - b) / scale
    return value, slope


def balanced_geopotential(psi: Array) -> Array:
    """Return the spectral geopotential of a spectral streamfunction, one degree longer.

    The two are in linear balance: `laplacian(geopotential) = div(f grad(psi))`.

    Shapes:
        `(F, M, 2, N)` -> `(F, M, 2, N + 1)`.

    Units: those of `psi` times Omega.
    """
    orders = np.arange(psi.shape[1], dtype=np.float64)
    size = psi.shape[-1]
    result = np.zeros((*psi.shape[:-1], size + 1), dtype=psi.dtype)
    for n in range(1, size + 1):
        below = 2 * (n - 1) / n * ladder(orders, n)
        result[..., n] = below[:, None] * psi[..., n - 1]
        if n + 1 < size:
            above = 2 * (n + 2) / (n + 1) * ladder(orders, n + 1)
            result[..., n] += above[:, None] * psi[..., n + 1]
    return result


@final
class Synthesis:
    """Computes physical fields on one grid, for several time steps at once."""

    def __init__(self, truncation: int, grid: tuple[int, int]) -> None:
        """Make the tables for a truncation of the streamfunctions, and for rows and columns."""
        rows, columns = grid
        regular = regular_grid(rows, columns)
        self.latitude, self.longitude = regular.latitude, regular.longitude
        # Waves that would alias on this number of columns are left out.
        self.orders = min(truncation, (columns - 1) // 2)
        radians = np.radians(np.clip(self.latitude, -MAX_LATITUDE, MAX_LATITUDE))
        mu, cosine = np.sin(radians), np.cos(radians)[:, None]
        functions = legendre(self.orders, truncation + 2, mu)
        slopes = legendre_slope(self.orders, truncation + 1, mu)
        self.scalar = functions.astype(np.float32)
        self.eastward = (functions[:, :, :-1] / cosine).astype(np.float32)
        self.northward = (slopes / cosine).astype(np.float32)
        self.waves = fourier(self.orders, np.radians(self.longitude)).astype(np.float32)
        self.ground = terrain(self.longitude, self.latitude).T

    def statics(self) -> dict[str, Array]:
        """Return the static fields, `(H, W)`."""
        land = land_fraction(self.longitude, self.latitude).T
        return {
            "geopotential_at_surface": (GRAVITY * self.ground).astype(np.float32),
            "land_sea_mask": land.astype(np.float32),
        }

    def fields(self, psi: Array) -> dict[str, Array]:
        """Return the fields at the times of `psi` as float32.

        Shapes:
            psi `(times, 3, M, 2, N)` -> `(times, 3, H, W)`, or `(times, H, W)` at the surface.
        """
        psi = psi[:, :, : self.orders + 1].astype(np.float32)
        flat = psi.reshape(-1, *psi.shape[2:])
        # u = -dpsi/dlat / a and v = dpsi/dlon / (a cos(lat)).
        speed = np.float32(STREAM / RADIUS)
        scale = np.float32(STREAM * ROTATION)
        east = self._values(self.northward, flat) * -speed
        north = self._values(self.eastward, along_longitude(flat)) * speed
        geopotential = self._values(self.scalar, balanced_geopotential(flat)) * scale
        level_shape = (len(psi), 3, len(self.latitude), len(self.longitude))
        geopotential = geopotential.reshape(level_shape)
        geopotential += GRAVITY * np.array(STANDARD_HEIGHT, np.float32)[:, None, None]
        return {
            "geopotential": geopotential,
            "temperature": hydrostatic_temperature(geopotential, LEVELS),
            "u_component_of_wind": east.reshape(level_shape),
            "v_component_of_wind": north.reshape(level_shape),
            **self._surface(geopotential),
        }

    def _values(self, table: Array, coefficients: Array) -> Array:
        values = to_grid(table, self.waves, coefficients)
        return np.ascontiguousarray(values.transpose(1, 2, 0))

    def _surface(self, geopotential: Array) -> dict[str, Array]:
        surface_temperature = hydrostatic_temperature(geopotential, (SURFACE,))[:, 0]
        weights = parabola(SURFACE)[0].astype(np.float32)
        height = np.einsum("k,tkhw->thw", weights, geopotential)
        pressure = 100 * SURFACE * np.exp(height / (DRY_AIR * surface_temperature))
        return {
            "mean_sea_level_pressure": pressure.astype(np.float32),
            "2m_temperature": (surface_temperature - LAPSE_RATE * self.ground).astype(np.float32),
        }


def hydrostatic_temperature(geopotential: Array, pressures: tuple[float, ...]) -> Array:
    """Return the hydrostatic temperature in K.

    Shapes:
        `(times, 3, H, W)` -> `(times, pressures, H, W)`.
    """
    slopes = [parabola(max(pressure, MIN_PRESSURE))[1] for pressure in pressures]
    # T = -dPhi/dln(p) / R. Above MIN_PRESSURE, only anomalies keep the slope there: the standard
    # atmosphere has its own slope everywhere, which `shift` restores.
    standard = GRAVITY * np.array(STANDARD_HEIGHT)
    shift = [
        standard @ (parabola(pressure)[1] - slope)
        for pressure, slope in zip(pressures, slopes, strict=True)
    ]
    gradient = np.einsum("pk,tkhw->tphw", np.stack(slopes).astype(np.float32), geopotential)
    return np.asarray((gradient + np.array(shift, np.float32)[:, None, None]) / -DRY_AIR)

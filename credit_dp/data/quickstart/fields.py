"""Physical fields on any grid from the model's streamfunction, and how lifelike they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import row_weights
from credit_dp.data.quickstart.dynamics import (
    DRY_AIR,
    GRAVITY,
    LAPSE_RATE,
    LEVELS,
    RADIUS,
    ROTATION,
    STREAM,
    YEAR_DAYS,
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

STANDARD_HEIGHT = (11784.0, 5574.0, 1949.0)  # m, US standard atmosphere at LEVELS
SURFACE = 1000.0  # hPa
# The slope at the middle of the upper layer is that layer's mean; a line through two layers says
# nothing about the tropopause above, where anomalies are held at that mean.
HIGHEST = float(np.sqrt(LEVELS[0] * LEVELS[1]))  # hPa
CLOSEST = 89.99999  # degrees: where a pole row is evaluated; the limit, to rounding


def latitudes(rows: int) -> Array:
    """Equally spaced, north first: with both poles if `rows` is odd, without them if even."""
    if rows % 2:
        return np.linspace(90.0, -90.0, rows) if rows > 1 else np.zeros(1)
    return np.asarray(90.0 - 180.0 * (np.arange(rows) + 0.5) / rows)


def longitudes(columns: int) -> Array:
    """Equally spaced eastward from zero, in degrees."""
    return np.asarray(360.0 * np.arange(columns) / columns)


def parabola(pressure: float) -> tuple[Array, Array]:
    """Weights over the levels of a geopotential, and of its slope in `ln p`, at `pressure` hPa."""
    x, nodes = np.log(pressure), np.log(LEVELS)
    value, slope = np.zeros(3), np.zeros(3)
    for k in range(3):
        a, b = np.delete(nodes, k)
        scale = (nodes[k] - a) * (nodes[k] - b)
        value[k] = (x - a) * (x - b) / scale
        slope[k] = (2 * x - a - b) / scale
    return value, slope


def balanced_geopotential(psi: Array) -> Array:
    """Spectral geopotential from the spectral streamfunction, one degree longer.

    Units: that of `psi` times Omega. Shapes: `(F, M, 2, N)` -> `(F, M, 2, N + 1)`.
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
    """Makes the fields of one grid, some time steps at once.

    Args:
        truncation: that of the streamfunctions.
        grid: rows and columns.
    """

    def __init__(self, truncation: int, grid: tuple[int, int]) -> None:
        rows, columns = grid
        self.latitude, self.longitude = latitudes(rows), longitudes(columns)
        # Waves that the columns cannot tell from longer ones are left out.
        self.orders = min(truncation, (columns - 1) // 2)
        radians = np.radians(np.clip(self.latitude, -CLOSEST, CLOSEST))
        mu, cosine = np.sin(radians), np.cos(radians)[:, None]
        table = legendre(self.orders, truncation + 2, mu)
        slope = legendre_slope(self.orders, truncation + 1, mu)
        self.scalar = table.astype(np.float32)
        self.eastward = (table[:, :, :-1] / cosine).astype(np.float32)
        self.northward = (slope / cosine).astype(np.float32)
        self.waves = fourier(self.orders, np.radians(self.longitude)).astype(np.float32)
        self.ground = terrain(self.longitude, self.latitude).T

    def statics(self) -> dict[str, Array]:
        """Fields without time. Shapes: `(H, W)`."""
        land = land_fraction(self.longitude, self.latitude).T
        return {
            "geopotential_at_surface": (GRAVITY * self.ground).astype(np.float32),
            "land_sea_mask": land.astype(np.float32),
        }

    def fields(self, psi: Array) -> dict[str, Array]:
        """Fields at the times of `psi`, float32.

        Shapes:
            psi `(times, 3, M, 2, N)` -> `(times, 3, H, W)`, or `(times, H, W)` at the surface.
        """
        psi = psi[:, :, : self.orders + 1].astype(np.float32)
        flat = psi.reshape(-1, *psi.shape[2:])
        speed = np.float32(STREAM / RADIUS)
        scale = np.float32(STREAM * ROTATION)
        east = self._values(self.northward, flat) * -speed
        north = self._values(self.eastward, along_longitude(flat)) * speed
        geopotential = self._values(self.scalar, balanced_geopotential(flat)) * scale
        on_levels = (len(psi), 3, len(self.latitude), len(self.longitude))
        geopotential = geopotential.reshape(on_levels)
        geopotential += GRAVITY * np.array(STANDARD_HEIGHT, np.float32)[:, None, None]
        return {
            "geopotential": geopotential,
            "temperature": hydrostatic_temperature(geopotential, LEVELS),
            "u_component_of_wind": east.reshape(on_levels),
            "v_component_of_wind": north.reshape(on_levels),
            **self._surface(geopotential),
        }

    def _values(self, table: Array, coefficients: Array) -> Array:
        values = to_grid(table, self.waves, coefficients)
        return np.ascontiguousarray(values.transpose(1, 2, 0))

    def _surface(self, geopotential: Array) -> dict[str, Array]:
        lowest = hydrostatic_temperature(geopotential, (SURFACE,))[:, 0]
        weights = parabola(SURFACE)[0].astype(np.float32)
        height = np.einsum("k,tkhw->thw", weights, geopotential)
        pressure = 100 * SURFACE * np.exp(height / (DRY_AIR * lowest))
        return {
            "mean_sea_level_pressure": pressure.astype(np.float32),
            "2m_temperature": (lowest - LAPSE_RATE * self.ground).astype(np.float32),
        }


def hydrostatic_temperature(geopotential: Array, pressures: tuple[float, ...]) -> Array:
    """Hydrostatic temperature in K. Shapes: `(times, 3, H, W)` -> `(times, pressures, H, W)`."""
    lapse = [parabola(max(p, HIGHEST))[1] for p in pressures]
    standard = GRAVITY * np.array(STANDARD_HEIGHT)
    shift = [standard @ (parabola(p)[1] - slope) for p, slope in zip(pressures, lapse, strict=True)]
    gradient = np.einsum("pk,tkhw->tphw", np.stack(lapse).astype(np.float32), geopotential)
    return np.asarray((gradient + np.array(shift, np.float32)[:, None, None]) / -DRY_AIR)


Values = NDArray[np.floating[Any]]
Span = tuple[str, str]
LEVEL = 500
PERSISTENCE_DAYS = (1, 3, 5)


@final
@dataclass(frozen=True)
class Realism:
    """Numbers of one span of dates; the climatology is that of another.

    Units: winds m s-1; `deviation` m, of Z500 about the climatology poleward of 30 degrees; errors
    of Z500 m2 s-2, persistence by lead time in days.
    """

    jet_north: float
    jet_south: float
    deviation: float
    climatology: float
    persistence: dict[int, float]


def measure_realism(path: Path, fit: Span, span: Span) -> Realism:
    """Measures `span` against the climatology of `fit`, both ISO dates, first and last."""
    with xr.open_zarr(path, chunks=None) as store:
        wind = store["u_component_of_wind"].sel(level=200, time=slice(*span))
        jets = wind.mean(("time", "longitude"))
        training = store["geopotential"].sel(level=LEVEL, time=slice(*fit)).load()
        held_out = store["geopotential"].sel(level=LEVEL, time=slice(*span)).load()
        latitude = store["latitude"].to_numpy()
    weights = row_weights(latitude)[:, None]
    anomaly = anomalies(training, held_out)
    extratropics = (np.abs(latitude) >= 30)[:, None] * weights
    return Realism(
        jet_north=float(jets.where(jets.latitude > 0).max()),
        jet_south=float(jets.where(jets.latitude < 0).max()),
        deviation=_rms(anomaly, extratropics) / GRAVITY,
        climatology=_rms(anomaly, weights),
        persistence={days: persistence(held_out, days, weights) for days in PERSISTENCE_DAYS},
    )


def anomalies(training: xr.DataArray, held_out: xr.DataArray) -> Values:
    """`held_out` less the mean and two annual harmonics fitted to `training`."""
    shape = training.shape
    flat = training.to_numpy().astype(np.float64).reshape(shape[0], -1)
    fitted = np.linalg.lstsq(_harmonics(training), flat, rcond=None)[0]
    climate = (_harmonics(held_out) @ fitted).reshape(held_out.shape)
    return np.asarray(held_out.to_numpy() - climate)


def persistence(field: xr.DataArray, days: int, weights: Values) -> float:
    """The error of forecasting that nothing changes; pairs that span a gap are left out."""
    late = field.assign_coords(time=field["time"] - np.timedelta64(days, "D"))
    early, late = xr.align(field, late, join="inner")
    return _rms(late.to_numpy() - early.to_numpy(), weights)


def _harmonics(field: xr.DataArray) -> Values:
    days = (field["time"].to_numpy() - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
    angle = 2 * np.pi * days / YEAR_DAYS
    waves = [np.ones_like(angle)]
    for k in (1, 2):
        waves += [np.cos(k * angle), np.sin(k * angle)]
    return np.stack(waves, axis=1)


def _rms(values: Values, weights: Values) -> float:
    spread = np.broadcast_to(weights, values.shape[1:])
    return float(np.sqrt((np.square(values, dtype=np.float64) * spread).mean() / spread.mean()))

"""How lifelike a quickstart store is: its jets, its variability, and how fast it forgets.

Errors are as WeatherBench 2 has them: squares are averaged over area and time, then rooted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import row_weights
from credit_dp.data.quickstart.planet import GRAVITY, YEAR_DAYS

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


def measure(path: Path, fit: Span, span: Span) -> Realism:
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

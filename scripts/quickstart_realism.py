"""Builds the quickstart climate and prints how realistic it is, as the docs show it.

`python scripts/quickstart_realism.py data.quickstart.truncation=42` measures the finer one; any key
under `data` may be given.
"""

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from omegaconf import OmegaConf

from credit_dp.config import DataConfig
from credit_dp.data.grid import parse_grid, row_weights
from credit_dp.data.quickstart import build
from credit_dp.data.quickstart.dynamics import YEAR_DAYS
from credit_dp.data.units import GRAVITY

ERA5 = {"climatology": 816.0, 3: 936.0, 5: 1033.0}  # m2 s-2, WeatherBench
SETTINGS = Path(__file__).parents[1] / "conf" / "data" / "quickstart.yaml"


Values = NDArray[np.floating[Any]]
Span = tuple[str, str]
LEVEL = 500
PERSISTENCE_DAYS = (1, 3, 5)


@final
@dataclass(frozen=True)
class Realism:
    """Statistics of one period, with the climatology of another.

    Units: winds m s-1; `deviation` m, of Z500 from the climatology poleward of 30 degrees; errors
    of Z500 m2 s-2, `persistence` by lead time in days.
    """

    jet_north: float
    jet_south: float
    deviation: float
    climatology: float
    persistence: dict[int, float]


def measure_realism(path: Path, fit: Span, span: Span) -> Realism:
    """Measure `span` against the climatology of `fit`, both `(first, last)` as ISO dates."""
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
        persistence={days: persistence_error(held_out, days, weights) for days in PERSISTENCE_DAYS},
    )


def anomalies(training: xr.DataArray, held_out: xr.DataArray) -> Values:
    """Return `held_out` minus the mean and two annual harmonics fitted to `training`."""
    shape = training.shape
    flat = training.to_numpy().astype(np.float64).reshape(shape[0], -1)
    coefficients = np.linalg.lstsq(_harmonics(training), flat, rcond=None)[0]
    climate = (_harmonics(held_out) @ coefficients).reshape(held_out.shape)
    return np.asarray(held_out.to_numpy() - climate)


def persistence_error(field: xr.DataArray, days: int, weights: Values) -> float:
    """Return the error of a persistence forecast; pairs across a gap in time are left out."""
    later = field.assign_coords(time=field["time"] - np.timedelta64(days, "D"))
    earlier, later = xr.align(field, later, join="inner")
    return _rms(later.to_numpy() - earlier.to_numpy(), weights)


def _harmonics(field: xr.DataArray) -> Values:
    days = (field["time"].to_numpy() - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
    angle = 2 * np.pi * days / YEAR_DAYS
    waves = [np.ones_like(angle)]
    for k in (1, 2):
        waves += [np.cos(k * angle), np.sin(k * angle)]
    return np.stack(waves, axis=1)


def _rms(values: Values, weights: Values) -> float:
    expanded = np.broadcast_to(weights, values.shape[1:])
    squares = np.square(values, dtype=np.float64)
    return float(np.sqrt((squares * expanded).mean() / expanded.mean()))


def main() -> None:
    """Build into a temporary folder, as in a first use, and measure the time."""
    config = read_config(sys.argv[1:])
    grid = parse_grid(config.grid) if config.grid else None
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        began = time.perf_counter()
        build(config.quickstart, grid, store)
        wall = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        dates = config.dates
        held_out = (dates.valid[0], dates.test[1])
        show(measure_realism(store, (dates.train[0], dates.train[1]), held_out))
    print(f"| time to make it | {wall:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU | |")


def read_config(overrides: list[str]) -> DataConfig:
    """The shipped settings with `overrides` such as `data.grid=64x128` applied."""
    known = OmegaConf.structured(DataConfig)
    shipped = OmegaConf.create(SETTINGS.read_text(encoding="utf-8"))
    shipped.pop("defaults")
    given = OmegaConf.from_dotlist(overrides).get("data", {})
    config = OmegaConf.to_object(OmegaConf.merge(known, shipped, given))
    if not isinstance(config, DataConfig):
        raise TypeError(f"the settings make a {type(config).__name__}")
    return config


def show(found: Realism) -> None:
    """Print a Markdown table."""
    rows = [
        ("jet at 200 hPa, north / south", f"{found.jet_north:.0f} / {found.jet_south:.0f} m/s", ""),
        ("Z500 standard deviation beyond 30 degrees", f"{found.deviation:.0f} m", ""),
        ("Z500 error of climatology", *_beside(found.climatology, ERA5["climatology"])),
    ]
    for days, error in found.persistence.items():
        rows.append((f"Z500 error of persistence, day {days}", *_beside(error, ERA5.get(days))))
        rows.append((f"its ratio to climatology's, day {days}", *_ratio(found, days)))
    print("| | quickstart | ERA5 |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _beside(ours: float, theirs: float | None) -> tuple[str, str]:
    return f"{ours:.0f} m2/s2", f"{theirs:.0f} m2/s2" if theirs else ""


def _ratio(found: Realism, days: int) -> tuple[str, str]:
    era5 = f"{ERA5[days] / ERA5['climatology']:.2f}" if days in ERA5 else ""
    return f"{found.persistence[days] / found.climatology:.2f}", era5


if __name__ == "__main__":
    main()

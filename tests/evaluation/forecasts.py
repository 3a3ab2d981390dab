"""Small stores of forecasts, truth and climatology in WeatherBench 2's form."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import ScoreRequest
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score import score
from credit_dp.evaluation.scorecard import Scorecard
from tests.data import stores

LEADS = np.array([0, 6, 24]) * np.timedelta64(1, "h").astype("m8[ns]")
INITS = 2  # every 12 hours from the second day on
NAMES = ("geopotential", "temperature", "2m_temperature")


def truth(rows: int = 9, columns: int = 8, steps: int = 16) -> xr.Dataset:
    """Six-hourly from 2000-01-01 on: 4 days."""
    return stores.dataset(rows=rows, columns=columns, steps=steps)[list(NAMES)]


def forecast(observed: xr.Dataset, members: int = 0) -> xr.Dataset:
    """The truth with noise that grows with lead time."""
    random = np.random.default_rng(5)
    inits = observed["time"].values[4 : 4 + 2 * INITS : 2]
    leads = xr.DataArray(LEADS, dims="prediction_timedelta")
    valid = xr.DataArray(inits, dims="time") + leads
    made = observed.sel(time=valid).drop_vars("time")
    made = made.assign_coords(time=inits, prediction_timedelta=LEADS)
    growth = (leads / np.timedelta64(24, "h")).astype("f4")
    growth = growth.assign_coords(prediction_timedelta=LEADS)
    for name in made.data_vars:
        scale = np.float32(observed[name].std(["time", "latitude", "longitude"]).max())
        dims = ("number", *made[name].dims) if members else made[name].dims
        sizes = [members or 1] if members else []
        noise = random.normal(size=(*sizes, *made[name].shape)).astype("f4")
        made[name] = made[name] + xr.DataArray(noise, dims=dims) * growth * scale
        made[name] = made[name].transpose(*dims).astype("f4")
    return made.transpose(*(["number"] if members else []), "time", "prediction_timedelta", ...)


def climatology(observed: xr.Dataset) -> xr.Dataset:
    """Random means for each hour and day of the year that the truth has."""
    random = np.random.default_rng(6)
    made = {}
    for name, array in observed.data_vars.items():
        dims = [dim for dim in array.dims if dim != "time"]
        shape = (4, 10, *(observed.sizes[dim] for dim in dims))
        mean = array.mean(["time", "latitude", "longitude"]).values[..., None, None]
        values = (mean + mean / 200 * random.normal(size=shape)).astype("f4")
        made[name] = (("hour", "dayofyear", *dims), values)
    coords = {dim: observed[dim] for dim in ("level", "latitude", "longitude")}
    return xr.Dataset(made, {"hour": np.arange(0, 24, 6), "dayofyear": np.arange(1, 11), **coords})


def write(data: xr.Dataset, path: Path) -> Path:
    """Write zarr or netCDF, by the suffix of the path."""
    if path.suffix == ".nc":
        data.to_netcdf(path)
    else:
        data.to_zarr(path, consolidated=False)
    return path


def request(folder: Path, forecast: Path, **changes: object) -> ScoreRequest:
    settings: dict[str, object] = {
        "forecast": str(forecast),
        "truth": (str(folder / "truth.zarr"),),
        "cache": str(folder / "cache"),
        "climatology": str(folder / "climatology.zarr"),
    }
    return ScoreRequest(**(settings | changes))  # type: ignore[arg-type]


def scored(folder: Path, forecast: Path, **changes: object) -> Scorecard:
    store = ForecastStore.open(str(forecast))
    return score(request(folder, forecast, **changes), store, lambda title, part: None)


def refusal(folder: Path, forecast: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        scored(folder, forecast, **changes)
    assert "\n" not in str(caught.value)
    assert "data." not in str(caught.value)
    return str(caught.value)


def without_members(made: xr.Dataset) -> xr.Dataset:
    return made.isel(number=0)

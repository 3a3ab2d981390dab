"""SEEPS of stores against an implementation in xarray, with WeatherBench 2's contingency table."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.calendar import Calendar
from credit_dp.evaluation.seeps import month_of
from tests.evaluation import forecasts
from tests.evaluation.forecasts import scored

GRID = ["latitude", "longitude"]
NAME = "total_precipitation_24hr"
DRY = 0.25e-3  # m
LEADS = np.array([24, 48]) * np.timedelta64(1, "h").astype("m8[ns]")


def rain(days: int = 150, unit: float = 1.0) -> xr.Dataset:
    """Daily sums: dry on most days in the north, on few in the south."""
    random = np.random.default_rng(1)
    times = np.datetime64("2001-01-01", "ns") + np.arange(days) * np.timedelta64(1, "D")
    latitude, longitude = np.linspace(80, -80, 9), np.arange(0, 360, 45.0)
    dry_share = np.linspace(0.95, 0.02, 9)[:, None]
    amounts = random.gamma(0.8, 0.01, (days, 9, 8)) + DRY
    amounts = np.where(random.random((days, 9, 8)) < dry_share, DRY * 0.4, amounts) * unit
    coords = {"time": times, "latitude": latitude, "longitude": longitude}
    array = xr.DataArray(amounts.astype("f4"), coords, dims=("time", *GRID))
    array.attrs["units"] = {1.0: "m", 1000.0: "mm"}[unit]
    return xr.Dataset({NAME: array})


def rain_forecast(observed: xr.Dataset) -> xr.Dataset:
    """The sums of the day before or after, from 5 days on."""
    inits = observed["time"].values[-8:-3]
    valid = xr.DataArray(inits, dims="time") + xr.DataArray(LEADS, dims="prediction_timedelta")
    made = observed.shift(time=1).sel(time=valid).drop_vars("time")
    made[NAME].attrs["units"] = observed[NAME].attrs["units"]
    return made.assign_coords(time=inits, prediction_timedelta=LEADS)


def by_definition(
    made: xr.DataArray, truth: xr.DataArray, heavy: xr.DataArray, p1: xr.DataArray, dry: float
) -> xr.DataArray:
    """The mean over area and time of the scoring matrix, weighted by a contingency table."""
    classes = []
    for field in (made, truth):
        parts = [field < dry, (field >= dry) & (field < heavy), (field >= dry) & (field >= heavy)]
        classes.append([part.astype("f8") for part in parts])
    p3 = (1 - p1) / 3  # Rodwell et al. 2010: wet days are light twice as often as heavy
    zero = xr.zeros_like(p1)
    # Rodwell et al. 2010, eq. 15.
    matrix = [
        [zero, 1 / (1 - p1), 1 / p3 + 1 / (1 - p1)],
        [1 / p1, zero, 1 / p3],
        [1 / p1 + 1 / (1 - p3), 1 / (1 - p3), zero],
    ]
    score = sum(
        classes[0][i] * classes[1][j] * matrix[i][j] / 2 for i in range(3) for j in range(3)
    )
    score = score.where((p1 > 0.1) & (p1 < 0.85))
    edges = np.concatenate([[90], (p1.latitude[1:].values + p1.latitude[:-1].values) / 2, [-90]])
    area = xr.DataArray(-np.diff(np.sin(np.deg2rad(edges))), coords=[p1.latitude])
    return score.weighted(area).mean(GRID).mean("time")


def found(folder: Path, **changes: object) -> tuple[np.ndarray, np.ndarray]:
    """SEEPS of forecast and persistence by lead time, over the globe and the extra-tropics."""
    changes = {"climatology": "", "regions": ("extra-tropics",)} | changes
    card = scored(folder, folder / "f.zarr", **changes)
    return card.scores["seeps"][:2, :, 0], card.regions["extra-tropics"]["seeps"][:2, :, 0]


@pytest.mark.parametrize("unit", [pytest.param(1.0, marks=pytest.mark.exhaustive), 1000.0])
def test_seeps_with_the_climate_of_the_truth(tmp_path: Path, unit: float) -> None:
    """Thresholds by month, from the dates of the truth."""
    observed = rain(unit=unit)
    made = rain_forecast(observed)
    forecasts.write(observed, tmp_path / "truth.zarr")
    forecasts.write(made, tmp_path / "f.zarr")
    dry = DRY * unit
    wet = observed[NAME].where(observed[NAME] >= np.float32(dry))
    months = wet.groupby("time.month")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a month without a wet day
        heavy = months.quantile(2 / 3, dim="time", skipna=True).drop_vars("quantile").fillna(0)
    p1 = (observed[NAME] < dry).groupby("time.month").mean("time").mean("month")
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed[NAME].sel(time=valid).assign_coords(time=made["time"])
    start = observed[NAME].sel(time=made["time"])
    at = heavy.sel(month=valid.dt.month).astype("f4")
    whole, _ = found(tmp_path)
    for index, field in enumerate((made[NAME], start)):
        wanted = by_definition(field, truth, at, p1, dry)
        assert whole[index] == pytest.approx(wanted.values, rel=1e-6)
    assert np.array_equal(found(tmp_path)[0], whole)  # from the cache


def test_seeps_with_the_climate_of_a_store(tmp_path: Path) -> None:
    """In WeatherBench 2's form: by hour and day of the year, in metres."""
    observed = rain()
    made = rain_forecast(observed)
    forecasts.write(observed, tmp_path / "truth.zarr")
    forecasts.write(made, tmp_path / "f.zarr")
    random = np.random.default_rng(2)
    sizes = (1, 150, 9, 8)
    fields = {
        NAME: random.gamma(0.8, 0.01, sizes),
        f"{NAME}_seeps_threshold": random.gamma(5, 0.002, sizes) + DRY,
        f"{NAME}_seeps_dry_fraction": random.random(sizes) * np.linspace(1, 0.5, 9)[:, None],
    }
    dims = ("hour", "dayofyear", *GRID)
    coords = {"hour": [0], "dayofyear": np.arange(1, 151), **{d: observed[d] for d in GRID}}
    climate = xr.Dataset({n: (dims, x.astype("f4")) for n, x in fields.items()}, coords)
    forecasts.write(climate, tmp_path / "climate.zarr")
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed[NAME].sel(time=valid).assign_coords(time=made["time"])
    heavy = climate[f"{NAME}_seeps_threshold"].sel(hour=0, dayofyear=valid.dt.dayofyear, drop=True)
    p1 = climate[f"{NAME}_seeps_dry_fraction"].astype("f8").mean(("hour", "dayofyear"))
    wanted = by_definition(made[NAME], truth, heavy, p1, DRY)
    whole, outside = found(tmp_path, climatology=str(tmp_path / "climate.zarr"))
    assert whole[0] == pytest.approx(wanted.values, rel=1e-6)
    beyond = abs(p1["latitude"]) >= 20
    wanted = by_definition(made[NAME], truth, heavy, p1.where(beyond), DRY)
    assert outside[0] == pytest.approx(wanted.values, rel=1e-6)


def test_months_are_those_of_the_calendar() -> None:
    calendar = Calendar("360_day")
    texts = ["0003-02-30T18", "0003-03-01", "0003-12-30", "0004-01-01"]
    times = np.array([calendar.parse("init", text) for text in texts])
    assert month_of(times, calendar).tolist() == [1, 2, 11, 0]


def test_sums_over_other_spans_have_no_seeps(tmp_path: Path) -> None:
    """What is dry is defined for 6 and 24 hours only."""
    other = {NAME: "total_precipitation_12hr"}
    forecasts.write(rain().rename(other), tmp_path / "truth.zarr")
    forecasts.write(rain_forecast(rain()).rename(other), tmp_path / "f.zarr")
    assert "seeps" not in scored(tmp_path, tmp_path / "f.zarr", climatology="").scores

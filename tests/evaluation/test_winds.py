"""Scores of winds that forecast and truth have along the grid of a projection, or not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from tests.data import wind_stores
from tests.data.wind_stores import NAMES
from tests.evaluation import forecasts
from tests.evaluation.forecasts import LEADS, refusal, scored
from tests.forecast.grib_files import write_lambert
from tests.tier_cases import tiers


def perfect(data: xr.Dataset) -> xr.Dataset:
    """The forecast that becomes true."""
    starts = data["time"].values[4:8:2]
    valid = xr.DataArray(starts, dims="time") + xr.DataArray(LEADS, dims="prediction_timedelta")
    made = data.sel(time=valid).drop_vars("time")
    return made.assign_coords(time=starts, prediction_timedelta=LEADS)


def grib(data: xr.Dataset, path: Path, along: bool) -> Path:
    """Write forecasts in GRIB, where the flag of winds says how they lie."""
    for index in np.ndindex(len(data["time"]), len(LEADS)):
        state = data.isel(time=index[0], prediction_timedelta=index[1])
        hours = int(LEADS[index[1]] / np.timedelta64(1, "h"))
        write_lambert(path, state, along, stepUnits="h", step=hours)
    return path


@pytest.mark.parametrize(
    ("kind", "along"),
    tiers(
        fast=[("box", True), ("along in GRIB", False)],
        slow=[("eastward in GRIB", True)],
        exhaustive=[
            *(("along", True), ("along", False), ("eastward", True), ("eastward", False)),
            *(("box", False), ("along in GRIB", True), ("eastward in GRIB", False)),
        ],
    ),
)
def test_a_perfect_forecast_has_no_error(tmp_path: Path, kind: str, along: bool) -> None:
    truth: Any = wind_stores.lambert(along)
    forecasts.write(truth, tmp_path / "truth.zarr")
    is_along = kind.startswith("along")
    data = wind_stores.box() if kind == "box" else wind_stores.lambert(is_along)
    if kind.endswith("GRIB"):
        path = grib(perfect(data), tmp_path / "forecast.grib", is_along)
    else:
        path = forecasts.write(perfect(data), tmp_path / "forecast.zarr")
    card = scored(tmp_path, path, climatology="", variables=NAMES)
    assert np.abs(card.scores["rmse"][0]).max() < 1e-3
    if kind == "box":  # one component alone needs the other one, too
        card = scored(tmp_path, path, climatology="", variables=NAMES[1:])
        assert np.abs(card.scores["rmse"][0]).max() < 1e-3


@pytest.mark.parametrize(
    ("names", "stated"),
    [
        (("ewss", "nsss"), "surface_downward_{}_stress"),
        pytest.param(("Uwind", "Vwind"), "{}_wind", marks=pytest.mark.exhaustive),
    ],
)
def test_other_vectors_are_turned(tmp_path: Path, names: tuple[str, str], stated: str) -> None:
    stores = {}
    for along in (True, False):
        data = wind_stores.lambert(along, names)
        for name, axes in zip(names, (("eastward", "x"), ("northward", "y")), strict=True):
            data[name].attrs["standard_name"] = stated.format(axes[along])
        stores[along] = data
    forecasts.write(stores[True], tmp_path / "truth.zarr")
    path = forecasts.write(perfect(stores[False]), tmp_path / "forecast.zarr")
    card = scored(
        tmp_path,
        path,
        climatology="",
        variables=names,
        limits=dict.fromkeys(names),
    )
    assert np.abs(card.scores["rmse"][0]).max() < 1e-3


def test_winds_that_can_not_be_compared_are_refused(tmp_path: Path) -> None:
    truth = wind_stores.lambert(True)
    forecasts.write(truth, tmp_path / "truth.zarr")
    made = perfect(wind_stores.box())
    path = forecasts.write(made.drop_vars(NAMES[0]), tmp_path / "forecast.zarr")
    said = refusal(tmp_path, path, climatology="", variables=NAMES[1:])
    assert "10m_v_component_of_wind is eastward or northward, and can't be turned to be" in said
    days = {"hour": np.arange(0, 24, 6), "dayofyear": np.arange(1, 11)}
    mean = wind_stores.lambert(False).isel(time=0, drop=True).expand_dims(days)
    forecasts.write(mean[[*NAMES]], tmp_path / "climatology.zarr")
    path = forecasts.write(perfect(truth), tmp_path / "same.zarr")
    said = refusal(tmp_path, path, variables=NAMES)
    assert "is eastward or northward, but along the grid in the truth" in said
    assert said.endswith("Change climatology, or leave it out.")

"""Accumulated variables are scored against the truth's sums over the forecast's interval."""

import numpy as np
import pytest
import xarray as xr

from tests.data import stores
from tests.evaluation import forecasts

RAIN = "total_precipitation"
LEADS = np.array([24, 48]) * np.timedelta64(1, "h").astype("m8[ns]")


def truth() -> xr.Dataset:
    """Hourly rain of 5 days."""
    data = stores.dataset(rows=9, columns=8, steps=20)[["2m_temperature"]]
    times = np.arange("2000-01-01", "2000-01-06", dtype="M8[h]").astype("M8[ns]")
    rain = np.random.default_rng(3).exponential(1 / 64, size=(len(times), 9, 8)).astype("f4")
    coords = {"time": times, "latitude": data.latitude, "longitude": data.longitude}
    return xr.Dataset({RAIN: (("time", "latitude", "longitude"), rain, {"units": "m"})}, coords)


def forecast(observed: xr.Dataset, hours: int, said: bool = True) -> xr.Dataset:
    """A perfect forecast: sums over `hours`, every 24 hours from two initial days."""
    inits = np.array(["2000-01-02", "2000-01-03"], "M8[ns]")
    sums = observed[RAIN].rolling(time=hours).sum()
    valid = xr.DataArray(inits, dims="time") + xr.DataArray(LEADS, dims="prediction_timedelta")
    made = sums.sel(time=valid).drop_vars("time").to_dataset(name=RAIN)
    made = made.assign_coords(time=inits, prediction_timedelta=LEADS).astype("f4")
    made[RAIN].attrs = {"units": "m"}
    if said:
        made[RAIN].attrs["cell_methods"] = "prediction_timedelta: sum"
        made["prediction_timedelta"].attrs["bounds"] = "spans"
        bounds = np.stack([LEADS - np.timedelta64(hours, "h"), LEADS], axis=1)
        made["spans"] = (("prediction_timedelta", "bounds"), bounds)
    return made


def error(folder, observed, made, name) -> float:
    """Return the forecast's largest error."""
    forecasts.write(made, folder / f"{name}.zarr")
    changes = {"truth": (str(folder / "hourly.zarr"),), "climatology": ""}
    card = forecasts.scored(folder, folder / f"{name}.zarr", **changes)
    return float(card.scores["rmse"][0].max())


@pytest.fixture(scope="module")
def observed(folder):
    data = truth()
    forecasts.write(data, folder / "hourly.zarr")
    return data


@pytest.mark.slow
def test_the_span_is_that_of_the_forecast_or_between_lead_times(folder, observed):
    for hours in (6, 24):
        assert error(folder, observed, forecast(observed, hours), f"said{hours}") < 1e-6, hours
    renamed = forecast(observed, 6).rename(prediction_timedelta="step")
    renamed[RAIN].attrs["cell_methods"] = "step: sum"
    assert error(folder, observed, renamed, "step") < 1e-6
    assert error(folder, observed, forecast(observed, 24, said=False), "unsaid") < 1e-6
    assert error(folder, observed, forecast(observed, 6, said=False), "wrong") > 1 / 64


def test_events_are_of_the_sums_over_the_forecasts_span(folder, observed):
    made = forecast(observed, 6)
    forecasts.write(made, folder / "rain.zarr")
    card = forecasts.scored(
        folder,
        folder / "rain.zarr",
        truth=(str(folder / "hourly.zarr"),),
        climatology="",
        events={RAIN: [">100 mm"]},
    )
    (result,) = card.events
    # The forecast is perfect: all weight is of hits and correct negatives.
    counts = result.counts["global"][0]
    hits, none = counts[:, 1, 1], counts[:, 0, 0]
    assert np.abs(counts[:, [0, 1], [1, 0]]).max() == 0
    heavy = made[RAIN].values > 0.1
    weights = np.abs(np.diff(np.sin(np.deg2rad([90, *np.arange(78.75, -90, -22.5), -90]))))
    share = (heavy * weights[:, None]).sum(axis=(0, 2, 3)) / (2 * 8 * weights.sum())
    np.testing.assert_allclose(hits / (hits + none), share, rtol=1e-10)
    assert 0.05 < share.min() < 0.9


@pytest.mark.parametrize("order", [pytest.param([0, 1], marks=pytest.mark.exhaustive), [1, 0]])
def test_hours_of_a_truth_that_is_joined_with_six_hourly_fields(folder, observed, order, tmp_path):
    """The truth's sums and those of persistence are over the six hours that the forecast states."""
    surface = stores.dataset(rows=9, columns=8, steps=20)[["2m_temperature"]]
    paths = [tmp_path / "surface.zarr", folder / "hourly.zarr"]
    forecasts.write(surface, paths[0])
    made = forecast(observed, 6)
    valid = xr.DataArray(made["time"].values, dims="time") + xr.DataArray(
        LEADS, dims="prediction_timedelta"
    )
    made["2m_temperature"] = surface["2m_temperature"].sel(time=valid).drop_vars("time")
    forecasts.write(made, tmp_path / "both.zarr")
    truth_stores = tuple(str(paths[place]) for place in order)
    changes = {"truth": truth_stores, "climatology": "", "variables": ("2m_temperature", RAIN)}
    card = forecasts.scored(folder, tmp_path / "both.zarr", **changes)
    forecast_error, persistence_error = card.scores["rmse"][:2]
    assert float(forecast_error.max()) < 1e-6
    sums = observed[RAIN].rolling(time=6).sum().astype("f8")
    weights = np.abs(np.diff(np.sin(np.deg2rad([90, *np.arange(78.75, -90, -22.5), -90]))))
    for lead, found in zip(LEADS, persistence_error[:, 1], strict=True):
        inits = made["time"].values
        errors = sums.sel(time=inits).values - sums.sel(time=inits + lead).values
        expected = np.sqrt(np.average((errors**2).mean(axis=(0, 2)), weights=weights))
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_sums_and_levels_that_do_not_fit_are_refused(folder, observed):
    made = forecast(observed, 6)
    for name, change, line in (
        ("uneven", [1, 2], "all sums need one span"),
        ("later", [1, 1], "all sums need one span"),
        ("ends", [0, 0], "all sums need one span"),
    ):
        odd = made.copy(deep=True)
        odd["spans"].values[:, 1 if name == "later" else 0] -= np.array(change, "m8[h]")
        if name == "ends":
            odd["spans"] = odd["spans"].isel(bounds=1)
        forecasts.write(odd, folder / f"{name}.zarr")
        line_said = forecasts.refusal(
            folder, folder / f"{name}.zarr", truth=(str(folder / "hourly.zarr"),)
        )
        assert line in line_said
    made = forecast(observed, 24)
    made = made.assign_coords(time=made["time"].values + np.array([0, 12], "m8[h]"))
    forecasts.write(made, folder / "half.zarr")
    line = forecasts.refusal(folder, folder / "half.zarr", truth=(str(folder / "hourly.zarr"),))
    assert f"{RAIN} is a sum over 24 hours, but times are 12 hours apart" in line
    # A truth that keeps sums over one hour every six hours.
    truth = observed.isel(time=slice(None, None, 6))
    truth[RAIN].attrs["cell_methods"] = "time: sum (interval: 1 hour)"
    forecasts.write(truth, folder / "kept.zarr")
    forecasts.write(forecast(observed, 6), folder / "six.zarr")
    line = forecasts.refusal(folder, folder / "six.zarr", truth=(str(folder / "kept.zarr"),))
    assert f"{RAIN} has sums over 1 hour by its cell_methods" in line
    assert line.endswith("Change truth to one with all hours, or leave it out of variables.")
    made = forecasts.forecast(forecasts.truth())
    made["level"].attrs = {"standard_name": "model_level_number"}
    forecasts.write(made, folder / "model_levels.zarr")
    line = forecasts.refusal(folder, folder / "model_levels.zarr")
    assert "is on model levels, but on pressure levels in the truth" in line

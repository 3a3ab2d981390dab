"""Dates that are not at midnight, and steps that do not divide a day."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.evaluation import forecasts

HOUR = np.timedelta64(1, "h").astype("m8[ns]")
TEMPERATURE, RAIN = "2m_temperature", "total_precipitation"
DIMS = ("time", "latitude", "longitude")
LAST = 20  # initial times, the last of the truth but two


def truth(first: str, step: int, count: int) -> xr.Dataset:
    """Fields without gradients: a season, a daily cycle and noise; and sums over each step."""
    random = np.random.default_rng(3)
    times = np.datetime64(first, "ns") + step * HOUR * np.arange(count)
    days = (times - times[0]) / (24 * HOUR)
    season = np.cos(2 * np.pi * days / 365.25) + 3 * np.cos(2 * np.pi * days)
    values = {
        TEMPERATURE: 280 + 9 * season + random.normal(size=count),
        RAIN: random.exponential(1 / 200, size=count),
    }
    coords = {"time": times, "latitude": np.linspace(75, -75, 6), "longitude": np.arange(4) * 90}
    fields = {
        name: (DIMS, np.tile(series.astype("f4")[:, None, None], (1, 6, 4)))
        for name, series in values.items()
    }
    data = xr.Dataset(fields, coords)
    data[TEMPERATURE].attrs["units"], data[RAIN].attrs["units"] = "K", "m"
    return data


def perfect(observed: xr.Dataset, step: int) -> xr.Dataset:
    """Perfect forecasts of one step and two, whose sums are over a step."""
    leads = step * HOUR * np.arange(1, 3)
    inits = observed["time"].values[-LAST - 2 : -2]
    valid = xr.DataArray(inits, dims="time") + xr.DataArray(leads, dims="prediction_timedelta")
    made = observed.sel(time=valid).drop_vars("time")
    made = made.assign_coords(time=inits, prediction_timedelta=leads)
    made[RAIN].attrs["cell_methods"] = "prediction_timedelta: sum"
    made["prediction_timedelta"].attrs["bounds"] = "spans"
    bounds = np.stack([leads - step * HOUR, leads], axis=1)
    made["spans"] = (("prediction_timedelta", "bounds"), bounds)
    return made


def seasons(times: np.ndarray) -> np.ndarray:
    """One, and two harmonics of the year."""
    years = times.astype("M8[Y]")
    begins, ends = years.astype("M8[ns]"), (years + 1).astype("M8[ns]")
    angle = 2 * np.pi * ((times - begins) / (ends - begins))
    return np.stack(
        [np.ones(len(times)), *(f(k * angle) for k in (1, 2) for f in (np.cos, np.sin))]
    )


def fitted(times: np.ndarray, values: np.ndarray, dates: np.ndarray) -> np.ndarray:
    """Return the least squares of seasons to values at some dates, at all times."""
    fit, *_ = np.linalg.lstsq(seasons(times[dates]).T, values[dates], rcond=None)
    return np.asarray(fit @ seasons(times))


@pytest.mark.parametrize(
    ("first", "step", "count", "apart"),
    [
        ("2000-01-01T12", 24, 800, 24),  # as CMIP6 dates daily means
        ("2000-01-01T00", 1461, 90, 1461),  # a sixth of a year
        ("2000-01-01T00:30", 6, 3000, 24),  # means over an hour, dated in its middle
    ],
)
def test_scores_are_those_of_the_values(
    tmp_path: Path, first: str, step: int, count: int, apart: int
) -> None:
    observed = truth(first, step, count)
    forecasts.write(observed, tmp_path / "truth.zarr")
    made = perfect(observed, step).isel(time=slice(None, None, max(1, apart // step)))
    forecasts.write(made, tmp_path / "made.zarr")
    inits = made["time"].values
    card = forecasts.scored(tmp_path, tmp_path / "made.zarr", climatology="")
    names = [channel.name for channel in card.channels]
    scores = {name: card.scores["rmse"][..., names.index(name)] for name in names}
    times, before = observed["time"].values, observed["time"].values < inits[0]
    # Steps of more than a day have no daily cycle.
    hour_of_day = (times - times.astype("M8[D]")) / HOUR if step <= 24 else np.zeros(count)
    for name, found in scores.items():
        series = observed[name].values[:, 0, 0].astype("f8")
        climate = np.empty(count)
        for hour in np.unique(hour_of_day):
            chosen = hour_of_day == hour
            climate[chosen] = fitted(times, series, chosen & before)[chosen]
        starts = np.searchsorted(times, inits)
        for lead in (0, 1):
            valid = starts + lead + 1
            errors = 0 * valid, series[valid] - series[starts], series[valid] - climate[valid]
            expected = [np.sqrt(np.mean(error**2)) for error in errors]
            assert found[:3, lead] == pytest.approx(expected, rel=1e-3, abs=1e-6), (name, lead)


@pytest.mark.slow
def test_a_climatology_is_fitted_to_months(tmp_path: Path) -> None:
    """No step of the forecast, from 1 January to 1 February, leads from month to month."""
    observed = truth("2000-01-01", 24, 1900)[[TEMPERATURE]]
    observed = observed.isel(time=(observed["time"].dt.day == 1).values)
    forecasts.write(observed, tmp_path / "truth.zarr")
    times, series = observed["time"].values, observed[TEMPERATURE].values[:, 0, 0].astype("f8")
    init = int(np.searchsorted(times, np.datetime64("2005-01-01")))
    made = observed.isel(time=[init + 1]).expand_dims(
        prediction_timedelta=times[[init + 1]] - times[init], axis=1
    )
    forecasts.write(made.assign_coords(time=times[[init]]), tmp_path / "made.zarr")
    card = forecasts.scored(tmp_path, tmp_path / "made.zarr", climatology="")
    expected = fitted(times, series, np.arange(init))[init + 1] - series[init + 1]
    assert card.scores["rmse"][2, 0, 0] == pytest.approx(abs(expected), rel=1e-3)

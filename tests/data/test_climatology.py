import numpy as np
import pytest
import xarray as xr

from credit_dp.config.data import VariableConfig
from credit_dp.data.climatology import (
    bracketing_hours,
    choose_harmonics,
    fitted_hours,
    hour_of_day,
    seasonal_basis,
)
from credit_dp.data.setup import prepare_training_data
from tests.data import stores
from tests.tables import each

DAY = np.timedelta64(1, "D")
START = np.datetime64("2001-01-01", "ns")


def seasonal(days, noise=0.0, rows=6, columns=4):
    """A store whose every grid point has its own mean and two harmonics, and the coefficients."""
    random = np.random.default_rng(1)
    times = START + np.arange(days) * DAY
    coefficients = random.normal(size=(5, 2, rows, columns))
    coefficients[0] += 280
    fields = np.einsum("tk,klhw->tlhw", seasonal_basis(times, 2), coefficients)
    fields += noise * random.normal(size=fields.shape)
    coords = {
        "time": times,
        "level": [500, 850],
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.arange(columns) * 360 / columns,
    }
    variables = {"temperature": (stores.DIMS, fields.astype("f4"))}
    variables["mean_sea_level_pressure"] = (
        ("time", "latitude", "longitude"),
        (1e5 + fields[:, 0]).astype("f4"),
    )
    return xr.Dataset(variables, coords), coefficients


def opened(data, path, last, **options):
    spans = {split: ["2001-01-01", str(last)] for split in ("train", "valid", "test")}
    names = ["mean_sea_level_pressure", "temperature"]
    config = stores.config(
        stores.write(data, path, **options),
        prognostic=names,
        forcing=[],
        static=[],
        step="24h",
        **spans,
    )
    return prepare_training_data(config)


@pytest.mark.slow
@each("name, year", [("noleap", 365), ("360_day", 360)])
def test_seasons_are_those_of_the_calendar_s_year(tmp_path, name, year):
    data, coefficients = seasonal(400)
    dates = xr.date_range("0001-01-01", periods=400, calendar=name, use_cftime=True)
    angles = 2 * np.pi * np.array([date.dayofyr - 1 for date in dates]) / year
    basis = np.stack([np.ones(400), *(f(k * angles) for k in (1, 2) for f in (np.cos, np.sin))])
    fields = np.einsum("kt,klhw->tlhw", basis, coefficients).astype("f4")
    data = data.assign(temperature=(stores.DIMS, fields)).assign_coords(time=dates)
    store = stores.write(data, tmp_path / "store.zarr")
    spans = {split: ["0001-01-01", "0002-01-30"] for split in ("train", "valid", "test")}
    names = {"prognostic": ["temperature"], "forcing": [], "static": []}
    ready = prepare_training_data(stores.config(store, step="24h", **names, **spans))
    assert ready.climatology.harmonics == 2
    calendar = ready.store.calendar
    for day in (58, 59, year - 1):  # over the end of February, and the last of a later year
        time = calendar.parse("init", "0403-01-01") + day * DAY
        found = ready.climatology.field(time, slice(0, 6))
        assert np.allclose(found, fields[day], atol=1e-3)


@each("rising, block_bytes", [(False, 1), (True, 10**8)])
def test_fit_finds_the_seasons_it_was_given(tmp_path, monkeypatch, rising, block_bytes):
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    data, coefficients = seasonal(400)
    chunks = {"time": 50, "latitude": 2}
    ready = opened(
        data.sortby("latitude", ascending=rising),
        tmp_path / "store.zarr",
        "2002-02-01",
        chunks=chunks,
    )
    found = ready.climatology
    assert found.harmonics == 2
    for time in (START + 40 * DAY, START + 1000 * DAY):
        truth = np.einsum("k,klhw->lhw", seasonal_basis(np.array([time]), 2)[0], coefficients)
        whole = found.field(time, slice(0, 6))
        assert np.allclose(whole[1:], truth, atol=1e-3)
        assert np.allclose(whole[0], 1e5 + truth[0], atol=0.05)
        bands = [found.field(time, rows) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
        assert np.array_equal(np.concatenate(bands, axis=1), whole)
        for channels in (slice(0, 1), slice(1, 2), slice(1, 3)):
            part = found.fields(np.array([time, START]), channels, slice(1, 4))
            assert np.array_equal(part[0], whole[channels, 1:4])


@pytest.mark.slow
def test_fit_equals_least_squares_of_noisy_fields(tmp_path):
    data, _ = seasonal(400, noise=3.0)
    ready = opened(data, tmp_path / "store.zarr", "2002-01-30", chunks={"time": 100})
    found = ready.climatology
    basis = seasonal_basis(ready.store.times[:395], 2)
    values = data["temperature"].values[:395].reshape(395, -1).astype(np.float64)
    best, *_ = np.linalg.lstsq(basis, values, rcond=None)
    direct = (basis[100] @ best).reshape(2, 6, 4)
    assert np.allclose(found.field(ready.store.times[100], slice(None))[1:], direct, atol=1e-3)


@each("days, harmonics", [(730, 2), (365, 2), (300, 2), (270, 1), (180, 0), (20, 0), (1, 0)])
def test_seasons_that_no_date_covers_are_not_extrapolated(days, harmonics):
    assert choose_harmonics(START + np.arange(days) * DAY) == harmonics


def test_short_training_span_gives_its_mean(tmp_path):
    data, _ = seasonal(30)
    ready = opened(data, tmp_path / "store.zarr", "2001-01-30")
    found = ready.climatology
    mean = data["temperature"].values.astype(np.float64).mean(axis=0)
    later = found.field(START + 200 * DAY, slice(None))
    assert np.allclose(later[1:], mean, atol=1e-3)


def daily(days, rows=6, columns=4):
    """Return a store whose daily cycle changes with the season, and its fields at any time."""
    random = np.random.default_rng(2)
    coefficients = random.normal(size=(4, 5, rows, columns)) * 5

    def fields(times):
        slots = hour_of_day(times).astype(int) // 6
        return np.einsum("tk,tkhw->thw", seasonal_basis(times, 2), coefficients[slots]) + 280

    times = START + np.arange(4 * days) * np.timedelta64(6, "h")
    dims = ("time", "latitude", "longitude")
    coords = {
        "time": times,
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.arange(columns) * 360 / columns,
    }
    values = fields(times).astype("f4")
    variables = {"2m_temperature": (dims, values), "mean_sea_level_pressure": (dims, values + 1e5)}
    return xr.Dataset(variables, coords), fields


def opened_daily(data, path, **changes):
    spans = {split: ["2001-01-01", "2002-02-04"] for split in ("train", "valid", "test")}
    settings = {"prognostic": ["mean_sea_level_pressure"], "diagnostic": ["2m_temperature"]}
    settings |= {"forcing": [], "static": []} | spans | changes
    return prepare_training_data(
        stores.config(stores.write(data, path, chunks={"time": 50}), **settings)
    )


def test_each_hour_of_the_day_has_its_own_seasons(tmp_path):
    data, fields = daily(400)
    found = opened_daily(data, tmp_path / "store.zarr").climatology
    assert found.hours == [0, 6, 12, 18]
    times = START + 700 * DAY + np.arange(4) * np.timedelta64(6, "h")
    truth = fields(times)
    for time, field in zip(times, truth, strict=True):
        assert np.allclose(found.field(time, slice(None))[1], field, atol=2e-3)
    # Halfway between two fitted hours; the first hour follows the last.
    for time, before, after in ((times[1], 0, 1), (times[3] + np.timedelta64(6, "h"), 3, 0)):
        middle = found.field(time - np.timedelta64(3, "h"), slice(2, 4))[1]
        expected = (truth[before] + truth[after]) / 2
        assert np.allclose(middle, expected[2:4], atol=0.5)
        assert not np.allclose(truth[before], truth[after], atol=3)


@pytest.mark.slow
def test_bands_and_pieces_do_not_change_it(tmp_path, monkeypatch):
    data, _ = daily(400)
    whole = opened_daily(data, tmp_path / "one.zarr").climatology
    monkeypatch.setattr("credit_dp.data.climatology.SUM_BYTES", 8 * 4 * 5 * 4 * 2)
    monkeypatch.setattr("credit_dp.data.climatology.CACHE_BYTES", 1)
    monkeypatch.setattr("credit_dp.data.streaming.split_dates", stores.split_by_day)
    cut = opened_daily(data, tmp_path / "two.zarr").climatology
    for hours in (0, 6, 3, 12, 0):
        time = START + 100 * DAY + np.timedelta64(hours, "h")
        assert np.allclose(cut.field(time, slice(None)), whole.field(time, slice(None)), rtol=1e-5)


def test_points_without_values_stay_without(tmp_path):
    data, _ = daily(400)
    data["2m_temperature"].values[:, 1:3, 2] = np.nan
    variables = {"2m_temperature": VariableConfig(fill=0)}
    found = opened_daily(data, tmp_path / "store.zarr", variables=variables).climatology
    field = found.field(START + 30 * DAY, slice(None))
    assert np.isnan(field[1, 1:3, 2]).all()
    assert np.isfinite(field).sum() == field.size - 2
    assert np.isfinite(field[0]).all()


@each(
    "hours, hour, expected",
    [
        ([0], 7.0, (0, 0, 0.0)),
        ([0, 12], 6.0, (0, 1, 0.5)),
        ([0, 12], 12.0, (1, 0, 0.0)),
        ([3, 15], 0.0, (1, 0, 0.75)),
        ([0, 6, 12, 18], 23.0, (3, 0, 5 / 6)),
    ],
)
def test_the_day_goes_round(hours, hour, expected):
    assert bracketing_hours(hours, hour) == pytest.approx(expected)


def test_of_many_hours_each_third_gets_a_fit():
    hourly = START + np.arange(100) * np.timedelta64(1, "h")
    assert fitted_hours(hourly) == list(range(0, 24, 3))
    assert fitted_hours(hourly[::6]) == [0, 6, 12, 18]
    assert fitted_hours(hourly[5::24]) == [5]

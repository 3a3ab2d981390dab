"""Sums over a step, where stores of different frequency are joined.

The right values are sums of the hourly data, added up here in float64.
"""

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.setup import prepare_training_data
from credit_dp.data.store import Store
from tests.data import stores
from tests.tables import each

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2000-01-01", "ns")
DAYS = 8
ROWS, COLUMNS = 4, 6
DIMS = ("time", "latitude", "longitude")
RAIN, RADIATION = "total_precipitation", "surface_solar_radiation_downwards"


def hourly():
    """Rain, radiation and a temperature for every hour after the start."""
    random = np.random.default_rng(0)
    times = START + HOUR * np.arange(24 * DAYS)
    fields = random.gamma(1, size=(3, len(times), ROWS, COLUMNS))
    return xr.Dataset(
        {
            RAIN: (DIMS, (1e-3 * fields[0]).astype("f4"), {"units": "m"}),
            RADIATION: (DIMS, (3e5 * fields[1]).astype("f4"), {"units": "J m-2"}),
            "2m_temperature": (DIMS, (280 + fields[2]).astype("f4"), {"units": "K"}),
        },
        {
            "time": times,
            "latitude": np.linspace(90, -90, ROWS),
            "longitude": np.arange(COLUMNS) * 360 / COLUMNS,
        },
    )


DATA = hourly()
UPPER = DATA[["2m_temperature"]].isel(time=slice(None, None, 6))
SUMS = DATA[[RAIN, RADIATION]]


def sums(name, times, hours=6):
    """Return the sums over the hours before each of some times."""
    values = DATA[name].values.astype("f8")
    ends = ((np.asarray(times) - START) / HOUR).astype(int)
    return np.stack([values[end - hours + 1 : end + 1].sum(axis=0) for end in ends])


def write(data, path):
    if path.suffix == ".nc":
        data.to_netcdf(path)
    else:
        stores.write(data, path, chunks={"time": 5})
    return str(path)


def config(folder, *parts, suffix=".zarr", **changes):
    paths = [write(part, folder / f"{number}{suffix}") for number, part in enumerate(parts)]
    spans = {"train": ["2000-01-01", "2000-01-06"], "valid": ["2000-01-07", "2000-01-07"]}
    settings = {
        "store": paths,
        "prognostic": ["2m_temperature"],
        "diagnostic": [RAIN],
        "forcing": [RADIATION],
        "static": [],
        "cache": str(folder / "cache"),
        "test": ["2000-01-08", "2000-01-08"],
        **spans,
    }
    return stores.config(folder, **(settings | changes))


def check_sums(store, hours=6):
    times = store.times
    expected = START + hours * HOUR * np.arange(1, 24 * DAYS // hours)
    assert np.array_equal(times, expected)
    assert store.num_skipped == 1  # the start has no hours before it
    rows = slice(1, 4)
    outputs = store.read_outputs(times, rows)
    steps = ((times - START) / HOUR).astype(int)
    assert np.array_equal(outputs[:, 0], DATA["2m_temperature"].values[steps, 1:4])
    assert np.allclose(outputs[:, 1], sums(RAIN, times, hours)[:, 1:4], rtol=1e-6)
    forcing = store.read_forcing(times, rows)[:, 0]
    assert np.allclose(forcing, sums(RADIATION, times, hours)[:, 1:4], rtol=1e-6)


@each("order, suffix", [([0, 1], ".zarr"), ([1, 0], ".nc")])
def test_six_hourly_with_hourly(tmp_path, order, suffix):
    parts = [UPPER, SUMS]
    store = Store.open(config(tmp_path, *(parts[place] for place in order), suffix=suffix))
    check_sums(store)


@each("order", [(1, 2, 0), (2, 0, 1)])
def test_three_stores_in_any_order(tmp_path, order):
    parts = [UPPER, SUMS[[RAIN]], SUMS[[RADIATION]]]
    check_sums(Store.open(config(tmp_path, *(parts[place] for place in order))))


def test_three_hourly_with_hourly(tmp_path):
    upper = DATA[["2m_temperature"]].isel(time=slice(None, None, 3))
    check_sums(Store.open(config(tmp_path, upper, SUMS)))
    check_sums(Store.open(config(tmp_path, upper, SUMS, step="12h")), 12)


def test_sums_of_different_periods(tmp_path):
    """Rain is stored as sums over three hours, radiation over one."""
    ends = DATA["time"].values[3::3]
    rain = xr.Dataset(
        {RAIN: (DIMS, sums(RAIN, ends, 3).astype("f4"))}, DATA.isel(time=slice(3, None, 3)).coords
    )
    check_sums(Store.open(config(tmp_path, UPPER, rain, SUMS[[RADIATION]])))


@pytest.mark.slow
def test_a_series_that_becomes_hourly(tmp_path):
    """Sums over six hours in the first store are followed by hourly ones in the second."""
    ends = UPPER["time"].values[1:16]
    late = DATA.isel(time=slice(6 * 15 + 1, None))
    early = xr.Dataset(
        {name: (DIMS, sums(name, ends).astype("f4"), DATA[name].attrs) for name in SUMS},
        {"time": ends, "latitude": DATA["latitude"], "longitude": DATA["longitude"]},
    ).merge(UPPER.isel(time=slice(1, 16)))
    store = Store.open(config(tmp_path, early, late))
    times = store.times
    assert np.array_equal(times, UPPER["time"].values[1:])
    assert np.allclose(store.read_outputs(times, slice(0, 4))[:, 1], sums(RAIN, times), rtol=1e-6)


def test_statistics_and_climatology(tmp_path):
    data = prepare_training_data(config(tmp_path, UPPER, SUMS))
    times = data.store.times
    train = times[times < np.datetime64("2000-01-07")]
    rain, radiation = sums(RAIN, train), sums(RADIATION, train)
    # Rows from pole to pole, of which the outermost reach half a row less far.
    weights = np.sin(np.deg2rad([90, 60, 0, -60])) - np.sin(np.deg2rad([60, 0, -60, -90]))

    def mean(fields):
        return np.average(fields.mean(axis=(0, 2)), weights=weights)

    statistics = data.statistics
    assert statistics.mean[1] == pytest.approx(mean(rain), rel=1e-6)
    assert statistics.forcing_mean[0] == pytest.approx(mean(radiation), rel=1e-6)
    changes = np.diff(rain, axis=0)
    change_std = np.sqrt(mean(changes**2) - mean(changes) ** 2)
    assert statistics.tendency_std[1] == pytest.approx(change_std, rel=1e-5)
    assert statistics.maximum[1] == pytest.approx(rain.max(), rel=1e-6)
    assert statistics.minimum[1] == pytest.approx(rain.min(), rel=1e-6)
    # In six days nothing but a mean of each hour of the day can be fitted.
    noon = train[(train - train.astype("M8[D]")) == 12 * HOUR]
    found = data.climatology.fields(noon[:1], slice(1, 2), slice(0, 4))[0, 0]
    assert np.allclose(found, sums(RAIN, noon).mean(axis=0), rtol=1e-5)


def test_only_sums(tmp_path):
    """Without fields of an instant, the times are those of the sums."""
    store = Store.open(config(tmp_path, UPPER, SUMS, prognostic=[RAIN], diagnostic=[], forcing=[]))
    times = store.times
    assert len(times) == 4 * DAYS - 1
    assert np.allclose(store.read_states(times, slice(0, 4))[:, 0], sums(RAIN, times), rtol=1e-6)

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.climatology import resolved_harmonics, seasonal_basis
from credit_dp.data.prepare import prepare
from tests.data import stores

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
    return prepare(config)


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 10**8])
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


def test_fit_equals_least_squares_of_noisy_fields(tmp_path):
    data, _ = seasonal(400, noise=3.0)
    ready = opened(data, tmp_path / "store.zarr", "2002-01-30", chunks={"time": 100})
    found = ready.climatology
    basis = seasonal_basis(ready.store.times[:395], 2)
    values = data["temperature"].values[:395].reshape(395, -1).astype(np.float64)
    best, *_ = np.linalg.lstsq(basis, values, rcond=None)
    direct = (basis[100] @ best).reshape(2, 6, 4)
    assert np.allclose(found.field(ready.store.times[100], slice(None))[1:], direct, atol=1e-3)


@pytest.mark.parametrize(
    ("days", "harmonics"), [(730, 2), (365, 2), (300, 2), (270, 1), (180, 0), (20, 0), (1, 0)]
)
def test_seasons_that_no_date_covers_are_not_made_up(days, harmonics):
    assert resolved_harmonics(START + np.arange(days) * DAY) == harmonics


def test_short_training_span_gives_its_mean(tmp_path):
    data, _ = seasonal(30)
    ready = opened(data, tmp_path / "store.zarr", "2001-01-30")
    found = ready.climatology
    mean = data["temperature"].values.astype(np.float64).mean(axis=0)
    later = found.field(START + 200 * DAY, slice(None))
    assert np.allclose(later[1:], mean, atol=1e-3)

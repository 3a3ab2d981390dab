"""The rim of a forecast: from the truth or a driver, interpolated in space and time."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pandas
import pytest
import xarray as xr

from credit_dp.cli.evaluate import evaluate, open_forecast
from credit_dp.config import DatesConfig
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.forecast.format import SETTINGS_ATTRIBUTE, given_width
from credit_dp.forecast.initial_file import InitialFiles
from tests.data import region_stores, stores
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.tier_cases import tiers
from tests.training.runs import make_config

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, COLUMNS, WIDTH = 11, 10, 2
HOUR, DIMS = np.timedelta64(1, "h"), ("time", "latitude", "longitude")
LATITUDE, LONGITUDE = np.linspace(60, 40, ROWS), (350 + np.arange(COLUMNS) * 2.0) % 360
POINTS = np.meshgrid(LATITUDE, LONGITUDE, indexing="ij")
INTERIOR = (..., slice(WIDTH, ROWS - WIDTH), slice(WIDTH, COLUMNS - WIDTH))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("region")


@pytest.fixture(scope="module")
def config(folder):
    """A run on a box with a rim of two rows and columns, which has its checkpoint."""
    data = stores.dataset(ROWS, COLUMNS, 20)
    data = data.assign_coords(latitude=LATITUDE, longitude=LONGITUDE)
    path = stores.write(data, folder / "box.zarr")
    config = make_config(path, folder / "run", steps=2)
    config = replace(config, data=replace(config.data, boundary=WIDTH))
    leave_checkpoint(config)
    return config


@pytest.fixture(scope="module")
def truth(config):
    with xr.open_zarr(config.data.store, consolidated=False) as data:
        return data.load().drop_encoding()


def globe(steps: int) -> xr.Dataset:
    """Fields on the globe every 6 hours."""
    return stores.dataset(37, 36, steps, seed=9)


def opened(path) -> xr.Dataset:
    with xr.open_zarr(path, decode_timedelta=True) as data:
        return data.load()


def rim_of(fields: xr.DataArray) -> np.ndarray:
    """Return all values but those of the interior."""
    values = fields.values.astype(float)
    values[INTERIOR] = np.nan
    return values[~np.isnan(values)]


@pytest.fixture(scope="module")
def by_truth(config, folder):
    """A forecast whose rim is that of the truth."""
    return forecast(forecast_config(config, folder / "truth.zarr", boundary="truth"))


@pytest.mark.slow
def test_the_truth_is_taken_if_the_user_says_so(by_truth, truth):
    found = opened(by_truth)
    settings = json.loads(found.attrs[SETTINGS_ATTRIBUTE])
    assert (settings["boundary"], settings["boundary_from"]) == (WIDTH, "truth")
    for name in ("geopotential", "temperature", "2m_temperature"):
        for start in found.time.values:
            for lead in found.prediction_timedelta.values:
                field = found[name].sel(time=start, prediction_timedelta=lead)
                wanted = truth[name].sel(time=start + lead)
                assert rim_of(field) == pytest.approx(rim_of(wanted), rel=1e-6)
                assert np.abs(field.values - wanted.values)[INTERIOR].max() > 1e-3


def between(field: np.ndarray, latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Interpolate a field of 5 degrees in latitude and 10 in longitude to points `(H, W)`."""
    result = np.empty(latitude.shape)
    for point in np.ndindex(latitude.shape):
        y, x = (90 - latitude[point]) / 5, longitude[point] % 360 / 10
        n, w = int(y), int(x)
        corners = field[np.ix_([n, n + 1], [w % 36, (w + 1) % 36])].astype(float)
        result[point] = [1 - y + n, y - n] @ corners @ [1 - x + w, x - w]
    return result


def test_the_rim_is_the_interpolated_driver(config, tmp_path):
    """A global analysis every 18 hours, with step 0 as cfgrib writes it; steps are 6 hours."""
    driver = globe(20).isel(time=slice(0, None, 3)).assign_coords(step=np.timedelta64(0, "h"))
    path = stores.write(driver, tmp_path / "driver.zarr")
    keys = {"init": "2000-01-04", "lead": "18h"}
    request = forecast_config(config, tmp_path / "a.zarr", boundary=str(path), **keys)
    found = opened(forecast(request, ranks=3))
    settings = json.loads(found.attrs[SETTINGS_ATTRIBUTE])
    assert settings["boundary_interpolation"] == (
        "bilinear in longitude and latitude, linear between times up to 18h apart"
    )
    assert settings["boundary_from"][0].startswith(f"{path} ")
    field = found.temperature.sel(level=850)
    analysis = driver.temperature.sel(level=850)
    for start in found.time.values:
        for lead in found.prediction_timedelta.values:
            valid = start + lead
            around = [t for t in analysis.time.values if abs(t - valid) < 18 * HOUR]
            wanted = sum(
                (1 - abs(t - valid) / (18 * HOUR)) * between(analysis.sel(time=t).values, *POINTS)
                for t in around
            )
            got = field.sel(time=start, prediction_timedelta=lead).values
            assert rim_error(got, wanted) < 1e-6


def rim_error(found: np.ndarray, wanted: np.ndarray) -> float:
    error = np.abs(found / wanted - 1)
    error[INTERIOR] = 0
    return float(error.max())


def test_each_forecast_takes_the_driver_from_its_own_time(config, truth, tmp_path):
    """Forecasts of a larger region every 6 hours, whose first time follows the initial state."""
    starts = np.array(["2000-01-03T12", "2000-01-04", "2000-01-04T12"], "M8[ns]")
    leads = np.arange(12, 37, 12)
    shape = (len(starts), len(leads))
    data = stores.dataset(37, 36, 1, seed=4).isel(time=0, drop=True)
    data = data.isel(latitude=slice(4, 14), longitude=[*range(33, 36), *range(5)])
    numbers = xr.DataArray(np.arange(9.0).reshape(shape), dims=("time", "lead"))
    driver = (data * (1 + numbers / 100)).astype("f4").rename(lead="prediction_timedelta")
    driver = driver.assign_coords(time=starts, prediction_timedelta=("prediction_timedelta", leads))
    driver.prediction_timedelta.attrs["units"] = "hours"
    path = stores.write(driver.drop_encoding(), tmp_path / "driver.zarr")
    request = forecast_config(config, tmp_path / "a.zarr", boundary=str(path))
    found = opened(forecast(request))
    base = np.zeros((37, 36))
    base[4:14][:, [*range(33, 36), *range(5)]] = data["2m_temperature"].values
    field = between(base, *POINTS)
    for index, start in enumerate(found.time.values, start=1):
        initial = truth["2m_temperature"].sel(time=start).values
        knots = {0: initial} | {
            int(lead): field * (1 + (3 * index + k) / 100) for k, lead in enumerate(leads)
        }
        for hours in (6, 12, 18, 24):
            wanted = (knots[-(-hours // 12) * 12] + knots[hours // 12 * 12]) / 2
            got = found["2m_temperature"].sel(time=start, prediction_timedelta=hours * HOUR).values
            assert rim_error(got, wanted) < 1e-6


def box(first: int, columns: int, **selection) -> xr.Dataset:
    """A part of the globe of 5 by 10 degrees, from a row on and with some columns from 330 E."""
    data = globe(20).isel(latitude=slice(first, 14), longitude=[*range(33, 36), *range(columns)])
    return data.isel(selection)


def bad_drivers() -> list[tuple[str, xr.Dataset, str]]:
    """Return what a driver lacks, such a driver, and what the one line says."""
    missing = "needs the rim from 2000-01-04T06:00 to 2000-01-05T00"
    whole = box(4, 5)
    metres = whole.temperature.assign_attrs(units="m")
    leads = [np.timedelta64(6 * k, "h") for k in range(20)]
    one = whole.rename(time="prediction_timedelta").assign_coords(prediction_timedelta=leads)
    starts = np.array(["2000-01-04", "2000-01-04T06"], "M8[ns]")
    return [
        ("rows", box(7, 5), "covers latitude 55 to 25, but the region has points at 60"),
        ("columns", box(4, 1), "covers longitude 330 to 0, but the region has points at 2"),
        ("dates", box(4, 5, time=slice(0, 15)), missing),
        ("start", box(4, 5, time=slice(15, None)), missing),
        (
            "gap",
            box(4, 5, time=[12, 19]),
            "has no time between 2000-01-04T00:00 and 2000-01-05T18:00",
        ),
        (
            "variable",
            whole.drop_vars("temperature"),
            r"lacks at \S+ and 3 later times temperature on levels [0-9, ]+\. Add a file",
        ),
        (
            "levels",
            box(4, 5, level=[0, 1]),
            "lacks at .* geopotential on level 1000, temperature on",
        ),
        (
            "unit",
            whole.assign(temperature=metres),
            r"temperature_500 is in m, which can't be converted to K\. Change boundary",
        ),
        (
            "initial time",
            xr.concat([one, one], "time").assign_coords(time=starts),
            "has forecasts from .*, but none from 2000-01-04T12:00. Change boundary",
        ),
    ]


@pytest.mark.slow
def test_a_driver_that_does_not_fit_is_one_line(config, tmp_path):
    for lacking, driver, said in bad_drivers():
        path = stores.write(driver.drop_encoding(), tmp_path / f"{lacking}.zarr")
        request = forecast_config(config, tmp_path / "a.zarr", boundary=str(path))
        with pytest.raises(UserError, match=rf"^boundary: .*{said}") as error:
            forecast(request)
        assert "\n" not in str(error.value), lacking
        assert "init_file" not in str(error.value), lacking
        assert not any(tmp_path.glob("a.zarr*")), lacking


def test_a_forecast_has_to_say_what_gives_the_rim_of_all_steps(config, tmp_path):
    trained = r"was trained with data\.boundary=2, "
    for width, keys, said in (
        (2, {}, r"^boundary: the model was trained with data.boundary=2"),
        (3, {"boundary": "truth"}, f"^checkpoint: .* {trained}the config has 3. Leave data.bound"),
        (0, {"boundary": "truth"}, f"{trained}the config has 0"),
        (2, {"boundary": "truth", "lead": "48h"}, "^init: needs the rim at 2000-01-06T00:00, but"),
    ):
        other = replace(config, data=replace(config.data, boundary=width))
        with pytest.raises(UserError, match=said):
            forecast(forecast_config(other, tmp_path / "a.zarr", **keys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "width"),
    tiers(fast=[([], WIDTH)], slow=[(["boundary=3"], 3)], exhaustive=[(["boundary=0"], 0)]),
)
def test_evaluate_leaves_out_the_rim(by_truth, truth, tmp_path, monkeypatch, capsys, keys, width):
    """By default as wide as the forecast's own; persistence has the same points."""
    monkeypatch.setenv("CREDIT_DP_CACHE", str(tmp_path / "cache"))
    known = ["climatology_dates=[2000-01-01,2000-01-03]", f"out={tmp_path / 'scores'}"]
    known += ["variables=[temperature]", "levels=[850]"]
    assert evaluate([f"forecast={by_truth}", *known, *keys], "evaluate") == 0
    scores = json.loads((tmp_path / "scores/scores.json").read_text())
    page = (tmp_path / "scores/scorecard.html").read_text()
    assert scores.get("boundary", 0) == width
    said = f"2 initial times, without {width} rows and columns at each edge"
    assert (said in capsys.readouterr().out) == bool(width)
    assert (f"11 x 10, without {width} at each edge" in page) == bool(width)
    inside = (..., slice(width, ROWS - width), slice(width, COLUMNS - width))
    field = (
        opened(by_truth).temperature.sel(level=850).transpose("time", "prediction_timedelta", ...)
    )
    now = truth.temperature.sel(level=850)
    valid = now.sel(time=field.time + field.prediction_timedelta).values.astype(float)
    persistence = now.sel(time=field.time).values[:, None]
    area = np.cos(np.deg2rad(LATITUDE))[:, None] * np.ones(COLUMNS)
    for source, values in (("forecast", field.values), ("persistence", persistence)):
        squares = ((values - valid) ** 2)[inside]
        wanted = np.sqrt(np.average(squares, axis=(-2, -1), weights=area[inside]).mean(0))
        rmse = scores["scores"]["temperature_850"]["rmse"]
        found = [rmse[f"{hours}h"][source] for hours in (6, 12, 18, 24)]
        assert found == pytest.approx(wanted, rel=1e-6)


def test_evaluate_refuses_a_rim_that_is_none(by_truth, tmp_path, monkeypatch):
    monkeypatch.setenv("CREDIT_DP_CACHE", str(tmp_path / "cache"))
    keys = [f"forecast={by_truth}", f"out={tmp_path / 'scores'}"]
    with pytest.raises(UserError, match=r"^boundary: 5 rows and columns at each edge leave none"):
        evaluate([*keys, "boundary=5"], "evaluate")
    with pytest.raises(UserError, match=r"^boundary: needs a"):
        evaluate([*keys, "boundary=wide"], "evaluate")
    with pytest.raises(UserError, match=r"^boundary: needs an integer of at least 0, got -1"):
        evaluate([*keys, "boundary=-1"], "evaluate")


@pytest.mark.slow
def test_joined_forecasts_still_say_what_they_were_given(config, tmp_path):
    """Files from two initial times, whose settings differ."""
    (tmp_path / "joined").mkdir()
    for start in ("2000-01-04", "2000-01-04T12"):
        keys = {"format": "netcdf", "init": start, "boundary": "truth"}
        path = forecast(forecast_config(config, tmp_path / start, **keys))
        for file in path.glob("*.nc"):
            file.rename(tmp_path / "joined" / f"{start}-{file.name}")
    joined = open_forecast(str(tmp_path / "joined"))
    assert len(joined.initial_times) == 2
    assert given_width(joined.attributes) == WIDTH


@pytest.mark.slow
def test_a_projection_is_driven_point_by_point(tmp_path, monkeypatch):
    """A Lambert grid, on two ranks; its scores are those of the interior's cells."""
    monkeypatch.setenv("CREDIT_DP_CACHE", str(tmp_path / "cache"))
    path, names = (
        region_stores.write("lambert", tmp_path),
        ["mean_sea_level_pressure", "2m_temperature"],
    )
    config = make_config(path, tmp_path / "run", steps=2)
    dates = {"train": ["2019-12-28", "2019-12-30"], "valid": ["2019-12-31", "2020-01-01T06"]}
    dates["test"] = ["2020-01-01T12", "2020-01-02T18"]
    keys = {"prognostic": names, "forcing": [], "static": [], "dates": DatesConfig(**dates)}
    config = replace(config, data=replace(config.data, **keys, boundary=3))
    leave_checkpoint(config)
    times = region_stores.START + region_stores.STEP * np.arange(24)
    random = np.random.default_rng(2)
    shape = (24, 37, 36)
    driver = xr.Dataset(
        {
            "mean_sea_level_pressure": (DIMS, (1e5 + random.normal(0, 900, shape)).astype("f4")),
            "2m_temperature": (DIMS, (280 + random.normal(0, 9, shape)).astype("f4")),
        },
        {"time": times, "latitude": 90 - 5.0 * np.arange(37), "longitude": 10.0 * np.arange(36)},
    )
    where = stores.write(driver, tmp_path / "driver.zarr")
    request = {"boundary": str(where), "init": "2019-12-31", "lead": "12h"}
    found = opened(forecast(forecast_config(config, tmp_path / "a.zarr", **request), 2))
    points = found.latitude.values, found.longitude.values
    inside = (..., slice(3, -3), slice(3, -3))
    truth = region_stores.dataset("lambert").isel(projection_y_coordinate=slice(None, None, -1))
    area = region_stores.areas("lambert")[inside]
    keys = [f"forecast={tmp_path / 'a.zarr'}", f"out={tmp_path / 'scores'}"]
    assert evaluate([*keys, "climatology_dates=[2019-12-28,2019-12-30]"], "evaluate") == 0
    scores = json.loads((tmp_path / "scores/scores.json").read_text())["scores"]
    for name, hours in itertools.product(names, (6, 12)):
        valid = np.datetime64("2019-12-31", "ns") + hours * HOUR
        got = found[name].isel(time=0).sel(prediction_timedelta=hours * HOUR).values
        wanted = between(driver[name].sel(time=valid).values, *points)
        error = np.abs(got / wanted - 1)
        error[inside] = 0
        assert error.max() < 1e-6
        square = (got.astype(float) - truth[name].sel(time=valid).values)[inside] ** 2
        rmse = np.sqrt(np.average(square, weights=area))
        assert scores[name]["rmse"][f"{hours}h"]["forecast"] == pytest.approx(rmse, rel=2e-4)


def test_a_region_starts_from_a_global_analysis_bilinearly_only(config, tmp_path):
    driver = globe(20)
    path = stores.write(driver, tmp_path / "driver.zarr")
    store, time = Store.open(config.data), driver.time.values[:1]
    files = InitialFiles.open(str(path))
    with pytest.raises(UserError, match=r"^regrid: conservative means .* Set regrid=bilinear.$"):
        files.reader(store, time)
    states = files.reader(store, time, "bilinear").read_states(time, slice(2, 7))[0]
    names = [channel.name for channel in store.channels.prognostic]
    found = states[names.index("2m_temperature")]
    wanted = between(driver["2m_temperature"].values[0], *POINTS)[2:7]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_region_is_scored_while_it_is_forecast(config, by_truth, tmp_path):
    cache = f"data.cache={tmp_path / 'cache'}"
    live = [f"checkpoint={config.run.dir}", f"out={tmp_path / 'live'}", cache, "device=cpu"]
    dates = ["dates=[2000-01-04,2000-01-04]", "hours=[6,24]", "regions=[europe]"]
    assert evaluate([*live, *dates, 'events={2m_temperature: [">280"]}', "fss=[500]"], "x") == 0
    stored = [f"forecast={by_truth}", f"out={tmp_path / 'stored'}", *dates]
    assert evaluate([*stored, 'events={2m_temperature: [">280"]}', "fss=[500]"], "x") == 0
    for name in ("scores.csv", "events.csv", "spectra.csv"):
        tables = [pandas.read_csv(tmp_path / folder / name) for folder in ("live", "stored")]
        pandas.testing.assert_frame_equal(*tables, rtol=1e-6, atol=1e-9)
    card = json.loads((tmp_path / "live/scores.json").read_text())
    assert card["boundary"] == WIDTH

"""Runs on every form of store, from inspection to scores, and what is special to some of them."""

import json
import runpy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import credit_dp
import credit_dp.forecast
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import locate_checkpoint
from credit_dp.training.checkpoint_shards import Checkpoint
from credit_dp.training.state import MODEL_PREFIX
from tests.data import cell_stores, region_stores, stores
from tests.training.command_runs import CommandRuns
from tests.training.forms import FORMS, Form

DAY = timedelta(hours=24)
REGIONS = ("box", "Lambert zarr", "rotated netCDF")  # beside Lambert netCDF, in the long tier
FAST = ("O16 anemoi", "O16 on 17x16", "Lambert netCDF", "noleap zarr", "icechunk")


@dataclass(frozen=True)
class FormRuns(CommandRuns):
    """Runs on a store of a form."""

    form: Form

    @property
    def selection(self) -> list[str]:
        """The keys that say what of the store is read."""
        return [
            x for x in self.keys if x.startswith("data") and "batch" not in x and "dates" not in x
        ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in FORMS],
)
def trained(request, tmp_path_factory) -> FormRuns:
    """Runs of six steps on one rank and of four on two, and a forecast of the second."""
    form = FORMS[request.param]
    folder = tmp_path_factory.mktemp("form")
    made = FormRuns(folder, form.write(folder), form.keys, form)
    made.train("run1", "trainer.steps=6")
    made.train("run2", "trainer.steps=4", "parallel.domain=2")
    made.forecast("forecast", form.init, "parallel.domain=2")
    return made


def only(*fast: str, slow: tuple[str, ...] = ()):
    """Run a test on some forms, and on others in the long tier."""
    others = [name for name in slow if name not in fast]
    cases = [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]
    return pytest.mark.parametrize("trained", cases, indirect=True)


def test_inspection_and_check_show_the_store(trained):
    words = (f"store='{trained.store}'", *trained.form.on_grid)
    text = trained.command("credit-dp", "data", "inspect", *words)
    assert all(shown in text for shown in (str(trained.store), *trained.form.shown))
    text = trained.command(*trained.training, "--check")
    height, width = trained.form.rows(trained.form.names[0]).shape[1:]
    assert f"{height} x {width} points" in text
    assert f"samples {trained.form.train_times - 1} for training" in text
    assert trained.form.checked in text


def test_two_ranks_have_the_log_of_one(trained):
    one, two = trained.log("run1"), trained.log("run2")
    assert (len(one), len(two)) == (6, 4)
    assert two == pytest.approx(one[:4], rel=1e-10)


def test_statistics_are_those_of_numpy(trained):
    form = trained.form
    [state] = sorted(trained.folder.glob("run1/**/state.json"))[-1:]
    found = json.loads(state.read_text())["data"]["statistics"]
    for index, name in enumerate(form.names):
        fields = form.rows(name)[: form.train_times]
        mean = form.mean(fields)
        std = np.sqrt(form.mean((fields - mean) ** 2))
        assert found["mean"][index] == pytest.approx(mean, rel=1e-6, abs=form.tolerance * std)
        assert found["std"][index] == pytest.approx(std, rel=form.tolerance)


def test_a_run_resumes_on_three_ranks_as_on_one(trained):
    trained.train("resumed", "resume=run2", "trainer.steps=6", "parallel.domain=3")
    assert trained.log("resumed") == pytest.approx(trained.log("run1")[4:], rel=1e-10)


def test_scores_are_those_of_numpy(trained):
    form = trained.form
    truths = [(f"truth='{trained.store}'", *form.on_grid)]
    truths += [()] if form.on_grid else []  # that of the run, on its grid
    scores = []
    for number, keys in enumerate(truths):
        words = ("forecast=forecast.zarr", f"out=scores{number}")
        trained.command("credit-dp", "evaluate", *words, *keys)
        found = trained.folder / f"scores{number}/scores.json"
        scores.append(json.loads(found.read_text())["scores"])
    assert scores[-1] == scores[0]
    forecast = trained.opened("forecast")
    times = form.data["time"].to_index()
    start, valid = (times.get_indexer(forecast["time"].to_index() + x) for x in (0 * DAY, DAY))
    assert min(*start, *valid) >= 0
    for name in form.names:
        actual = form.rows(name)
        day = forecast[name].sel(prediction_timedelta=np.timedelta64(24, "h"))
        assert day.shape == actual[valid].shape
        for of, fields in (("forecast", day.values.astype(float)), ("persistence", actual[start])):
            rmse = np.sqrt(form.mean((fields - actual[valid]) ** 2))
            found = scores[0][name]["rmse"]["24h"][of]
            assert found == pytest.approx(rmse, rel=form.tolerance)


@only("O16 anemoi", "O16 on 17x16", "Lambert netCDF", "noleap zarr", slow=tuple(FORMS))
def test_a_forecast_starts_from_a_file_of_the_form(trained):
    form = trained.form
    state = form.data.sel(time=slice(form.last, form.last)).drop_encoding()
    state.to_netcdf(trained.folder / "state.nc")
    of_file = trained.forecast("from_file", "init_file=state.nc")
    of_store = trained.opened("forecast").isel(time=[-1])
    assert of_file["time"].values == of_store["time"].values
    for name in form.names:
        # Of the many cells of O96 and N320 some differ by a rounding at first, which grows.
        rounding = 1e-3 * float(of_store[name].std()) if len(form.areas) > 100 else 0.0
        np.testing.assert_allclose(of_file[name], of_store[name], rtol=1e-6, atol=rounding)


# Cells


@only("O16 anemoi", "O16 on 17x16", slow=("O16 netCDF", "HEALPix zarr", "N32 GRIB"))
def test_forecasts_go_back_to_the_cells(trained):
    """By numpy: first along the rows around a cell, then between them."""
    form, on_grid = trained.form, trained.opened("forecast")
    one, three = (
        trained.forecast(f"cells{ranks}", form.init, "grid=source", f"parallel.domain={ranks}")
        for ranks in (1, 3)
    )
    latitudes, longitudes = form.cells.latitudes, form.cells.longitudes
    for found in (one, three):
        np.testing.assert_allclose(found["latitude"], latitudes, atol=1e-5)
        np.testing.assert_allclose(found["longitude"], longitudes, atol=1e-5)
    np.testing.assert_allclose(on_grid["latitude"], form.latitude, rtol=1e-15)
    height, width = form.shape
    south = np.clip(np.searchsorted(-form.latitude, -latitudes), 1, height - 1)
    pair = form.latitude[[south - 1, south]]
    share = np.clip((pair[0] - latitudes) / (pair[0] - pair[1]), 0, 1)
    columns = np.arange(width) * 360 / width
    for name in form.names:
        assert one[name].dims == ("time", "prediction_timedelta", "cell")
        np.testing.assert_allclose(three[name], one[name], rtol=1e-6)
        for time, lead in ((0, 0), (2, 3)):
            rows = on_grid[name].isel(time=time, prediction_timedelta=lead).values.astype(float)
            along = np.array([np.interp(longitudes, columns, row, period=360) for row in rows])
            at = np.arange(len(latitudes))
            wanted = (1 - share) * along[south - 1, at] + share * along[south, at]
            found = one[name].isel(time=time, prediction_timedelta=lead)
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert "complete" in trained.command("credit-dp", "forecast", "check", "cells3.zarr")


@only(slow=("HEALPix zarr",))
def test_healpix_is_not_written_as_grib(trained):
    words = ("checkpoint=run2", trained.form.init, "lead=12h", "grid=source", "format=grib")
    line = trained.refusal("credit-dp", "forecast", *words, "out=cells.grib")
    assert "format: GRIB is written on reduced Gaussian grids from longitude 0" in line


@only("O16 anemoi")
def test_forecasts_on_cells_are_grib_of_their_grid(trained):
    words = ("checkpoint=run2", "init=2000-01-09", "lead=12h", "grid=source")
    trained.command("credit-dp", "forecast", *words, "format=grib", "out=cells.grib")
    trained.command("credit-dp", "forecast", *words, "out=same.zarr")
    assert "complete" in trained.command("credit-dp", "forecast", "check", "cells.grib")
    same = trained.opened("same")
    for short, name in (("t2m", "2m_temperature"), ("msl", "mean_sea_level_pressure")):
        found = xr.open_dataset(
            trained.folder / "cells.grib",
            engine="cfgrib",
            decode_timedelta=True,
            backend_kwargs={"filter_by_keys": {"cfVarName": short}, "indexpath": ""},
        )
        assert found[short].attrs["GRIB_gridType"] == "reduced_gg"
        np.testing.assert_allclose(found["latitude"], trained.form.cells.latitudes, atol=1e-3)
        np.testing.assert_allclose(found["longitude"], trained.form.cells.longitudes, atol=1e-3)
        fields = same[name].isel(time=0).values
        np.testing.assert_allclose(found[short], fields, atol=np.ptp(fields) / 2**15)


@only("O16 anemoi", "O16 on 17x16", slow=("HEALPix zarr",))
def test_other_cells_are_one_line(trained, tmp_path):
    store = cell_stores.anemoi(tmp_path, cell_stores.octahedral(17))
    words = (*trained.training, f"data.store={store}", "run.dir=other", "resume=run1")
    expected = "trained with another mean of the fields"
    if trained.form.grid is None:
        expected = f"trained with data.grid={'x'.join(map(str, trained.form.shape))}"
    assert f"resume: the checkpoint was {expected}" in trained.refusal(*words)


@only("O16 on 17x16", slow=("regular on 12x24",))
def test_another_grid_or_way_is_one_line(trained):
    height, width = trained.form.grid
    cases = {
        f"data.grid={height + 1}x{width}": f"was trained with data.grid={height}x{width}",
        "data.regrid=bilinear": "was trained with another mean of the fields",
        "data.grid=null": f"was trained with data.grid={height}x{width}",
    }
    for key, expected in cases.items():
        assert expected in trained.refusal(*trained.training, key, "run.dir=other", "resume=run1")


@only("O16 on 17x16", slow=("regular on 12x24",))
def test_a_prepared_copy_trains_as_the_store_does(trained):
    words = (f"store={trained.store}", "out=copy.zarr", *trained.selection)
    trained.command("credit-dp", "data", "prepare", *words)
    keys = ("data.name=prepared", "data.store=copy.zarr", "data.grid=null", "trainer.steps=6")
    trained.train("copied", *keys)
    assert trained.log("copied") == trained.log("run1")


# Regions


@only("Lambert netCDF", slow=REGIONS)
def test_static_fields_have_statistics_of_the_cells(trained):
    [state] = sorted(trained.folder.glob("run1/**/state.json"))[-1:]
    found = json.loads(state.read_text())["data"]["statistics"]["static_mean"][0]
    land = trained.form.mean(trained.form.rows("land_sea_mask"))
    assert found == pytest.approx(land, abs=1e-4)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint of a run."""
    checkpoint = Checkpoint.open("run", locate_checkpoint("run", str(folder)))
    found = {
        name: torch.empty(shape, dtype=checkpoint.dtype(name))
        for name, shape in checkpoint.shapes.items()
        if name.startswith(MODEL_PREFIX)
    }
    checkpoint.read(found)
    return found


@only("Lambert netCDF", slow=REGIONS)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_on_a_prepared_copy_is_the_same_in_every_bit(trained, ranks):
    copy, steps = trained.folder / "copy.zarr", {1: 6, 2: 4}[ranks]
    if not copy.exists():
        words = (f"store={trained.store}", f"out={copy}", *trained.selection)
        trained.command("credit-dp", "data", "prepare", *words)
    keys = (f"data.store={copy}", f"parallel.domain={ranks}", f"trainer.steps={steps}")
    trained.train(f"copy{ranks}", *keys)
    assert trained.log(f"copy{ranks}") == trained.log(f"run{ranks}")
    found, wanted = (tensors(trained.folder / f"{name}{ranks}") for name in ("copy", "run"))
    assert found
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@only("Lambert netCDF", slow=REGIONS)
def test_an_exported_model_makes_the_first_step_of_forecasts(trained):
    form, forecast = trained.form, trained.opened("forecast")
    trained.command("credit-dp", "checkpoint", "export", "run2", "--output", "model.safetensors")
    model = credit_dp.load(str(trained.folder / "model.safetensors"))
    names = ("latitude", "longitude") if form.kind != "rotated" else ("lat", "lon")
    for name, degrees in zip(names, (model.latitude, model.longitude), strict=True):
        assert np.array_equal(degrees, form.northern[name].values)
    start = form.northern.sel(time=forecast["time"].values)
    fields = torch.from_numpy(np.stack([start[name].values for name in form.names], axis=1))
    with torch.no_grad():
        found = model(fields, forecast["time"].values)
    for index, name in enumerate(form.names):
        wanted = forecast[name].sel(prediction_timedelta=np.timedelta64(6, "h")).values
        np.testing.assert_allclose(found[:, index], wanted, rtol=1e-6)


@only("Lambert netCDF", slow=REGIONS)
@pytest.mark.parametrize("form", ["zarr", "netcdf", "netcdf_file"])
def test_forecasts_have_the_coordinates_of_the_store(trained, form):
    out = "forecast.zarr"
    if form != "zarr":
        out = f"{form}.nc" if form == "netcdf_file" else form
        words = ("checkpoint=run2", "init=2020-01-05", "lead=24h", f"format={form}", f"out={out}")
        trained.command("credit-dp", "forecast", *words, "parallel.domain=2")
    assert "complete" in trained.command("credit-dp", "forecast", "check", out)
    path = trained.folder / out
    if form == "netcdf":
        found = credit_dp.forecast.open_sharded(path)
    else:
        found = xr.open_zarr(path) if form == "zarr" else xr.open_dataset(path)
    expected = trained.form.northern
    if trained.form.kind == "rotated":
        expected = expected.rename(lat="latitude", lon="longitude")
    array = found["mean_sea_level_pressure"]
    for name in ("latitude", "longitude"):
        np.testing.assert_array_equal(array[name].values, expected[name].values)
        assert array[name].dims == expected[name].dims
        assert array[name].attrs["standard_name"] == name
    assert array.dims[-2:] == expected["mean_sea_level_pressure"].dims[-2:]
    if trained.form.kind != "box":
        attributes = {x: np.asarray(y).tolist() for x, y in found["crs"].attrs.items()}
        assert attributes == expected["crs"].attrs
        mapping = array.attrs.get("grid_mapping") or array.encoding["grid_mapping"]
        assert mapping == "crs"
        for dim in array.dims[-2:]:
            np.testing.assert_array_equal(found[dim].values, expected[dim].values)
            assert found[dim].attrs["standard_name"] == expected[dim].attrs["standard_name"]


@only("Lambert netCDF", slow=REGIONS)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_grib_has_the_fields_and_points_of_a_forecast(trained, ranks):
    """By cfgrib, whose points ecCodes computes."""
    keys = ("checkpoint=run2", f"init={trained.form.first}", "lead=24h", "format=grib")
    trained.command("credit-dp", "forecast", *keys, f"parallel.domain={ranks}", f"out={ranks}.grib")
    assert "complete" in trained.command("credit-dp", "forecast", "check", f"{ranks}.grib")
    path, kind = trained.folder / f"{ranks}.grib", trained.form.kind
    options = {"filter_by_keys": {"shortName": "2t"}, "indexpath": ""}
    data = xr.open_dataset(path, engine="cfgrib", backend_kwargs=options, decode_timedelta=True)
    # On a cone from the south, as ecCodes needs it.
    order = slice(None, None, -1 if kind == "lambert" else 1)
    names = ("lat", "lon") if kind == "rotated" else ("latitude", "longitude")
    for name, axis in zip(names, ("latitude", "longitude"), strict=True):
        apart = (data[axis].values[order] - trained.form.northern[name].values + 180) % 360 - 180
        np.testing.assert_allclose(apart, 0, atol=3e-6)
    wanted = trained.opened("forecast")["2m_temperature"].sel(time=data["time"].values).values
    step = np.ptp(wanted, axis=(1, 2), keepdims=True) / 65535
    assert (np.abs(data["t2m"].values[:, order] - wanted) < step + 1e-4).all()
    text = trained.command("credit-dp", "data", "inspect", f"store={ranks}.grib")
    spacing = ", 1.5 x 1.5 degrees" if kind == "box" else ""
    assert f"{region_stores.ROWS} x {region_stores.COLUMNS} region{spacing}" in text


REFUSED = {
    "loss.spectrum=1": "loss.spectrum: a global grid is needed here, but this is a region of",
    "loss.sphere_spectrum=1": "Set loss.sphere_spectrum=0.",
    "trainer.shift_longitude=true": "Leave trainer.shift_longitude out.",
    "trainer.mirror=0.5": "trainer.mirror: a global grid is needed here",
}


@only("Lambert netCDF", slow=REGIONS)
@pytest.mark.parametrize("check", [[], ["--check"]], ids=["run", "check"])
@pytest.mark.parametrize("key", REFUSED)
def test_what_needs_the_globe_is_one_line(trained, key, check):
    assert REFUSED[key] in trained.refusal(*trained.training, "run.dir=other", key, *check)


@only("Lambert netCDF")
@pytest.mark.parametrize("check", [[], ["--check"]], ids=["run", "check"])
def test_more_ranks_than_rows_of_the_coarsest_level_are_one_line(trained, check):
    """The rows of a store are known when it is open."""
    words = ("run.dir=other", "model.channels=[8,8,8,8]", "parallel.domain=3", *check)
    said = "parallel.domain: the model's coarsest level has 2 of the grid's 13 rows, too few for 3"
    assert said in trained.refusal(*trained.training, *words)


# Calendars


@only("noleap zarr", slow=("360_day netCDF",))
def test_forecasts_have_the_calendar_of_the_store(trained):
    form, forecast = trained.form, trained.opened("forecast")
    options = {"freq": "12h", "calendar": form.calendar, "use_cftime": True}
    expected = xr.date_range(form.first, form.last, **options)
    words = ("checkpoint=run2", form.init, "lead=24h", "parallel.domain=2")
    for out, kind in {"file.nc": "netcdf_file", "bands": "netcdf"}.items():
        trained.command("credit-dp", "forecast", *words, f"out={out}", f"format={kind}")
    file = xr.open_dataset(trained.folder / "file.nc", decode_timedelta=True)
    for data in (forecast, file, credit_dp.forecast.open_sharded(trained.folder / "bands")):
        assert data["time"].to_index().equals(expected)
        np.testing.assert_allclose(data["PSL"], forecast["PSL"], rtol=1e-6)
    for data in (forecast, file):
        assert data["time"].encoding["units"] == "hours since 1900-01-01"


@only("noleap zarr", slow=("360_day netCDF",))
def test_an_exported_model_forecasts_in_the_calendar(trained, monkeypatch):
    words = ("export", "run2", "--output", "model.safetensors")
    trained.command("credit-dp", "checkpoint", *words)
    file = trained.folder / "model.safetensors"
    model = credit_dp.load(file)
    made = trained.opened("forecast")
    truth = trained.form.data.sortby("lat", ascending=False).sel(time=made["time"])
    fields = torch.from_numpy(np.stack([truth[name] for name in model.variables], axis=1))
    times = made["time"].values
    with torch.no_grad():
        for step, found in enumerate(model.rollout(fields, times, 4)):
            wanted = made.isel(prediction_timedelta=step)
            wanted = np.stack([wanted[name] for name in model.variables], axis=1)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for others in (np.array(["2001-01-01"], "M8[D]"), [cftime.datetime(2001, 1, 1)]):
        with pytest.raises(UserError, match=f'calendar="{trained.form.calendar}"'):
            model(fields[:1], others)
    block = file.with_suffix(".md").read_text().split("```python\n")[1].split("```")[0]
    script = trained.folder / "block.py"
    script.write_text(block)
    monkeypatch.chdir(trained.folder)
    assert runpy.run_path(str(script))["later"].isfinite().all()


@only("noleap zarr", slow=("360_day netCDF",))
def test_a_prepared_store_has_the_calendar(trained):
    form = trained.form
    dates = f"dates=[{form.first},{form.last}]"
    words = (f"store={trained.store}", "out=prepared.zarr", dates, *trained.selection)
    trained.command("credit-dp", "data", "prepare", *words)
    expected = form.data.sel(time=slice(form.first, form.last))
    prepared = xr.open_zarr(trained.folder / "prepared.zarr", consolidated=False)
    assert prepared["time"].to_index().equals(expected["time"].to_index())
    text = trained.command("credit-dp", "data", "inspect", "store=prepared.zarr")
    assert f"{form.calendar} calendar" in text


@only("noleap zarr", slow=("360_day netCDF",))
def test_the_climatology_is_by_day_of_the_calendars_year(trained):
    """As xarray groups it."""
    form = trained.form
    truth = form.data.rename(lat="latitude", lon="longitude").sortby("latitude", ascending=False)
    by_day = truth.groupby("time.dayofyear").mean()
    by_day.drop_encoding().to_zarr(trained.folder / "days.zarr", zarr_format=2)
    first, last = form.last_of_february, f"{form.year}-03-09"
    keys = (f"truth={trained.store}", "climatology=days.zarr", f"dates=[{first},{last}]")
    trained.command("credit-dp", "evaluate", "forecast=forecast.zarr", *keys, "out=by_day")
    scores = json.loads((trained.folder / "by_day/scores.json").read_text())["scores"]
    forecast = trained.opened("forecast").sel(time=slice(first, last))
    assert 1 < forecast.sizes["time"] < 7
    valid = [time + DAY for time in forecast["time"].values]
    for name in form.names:
        fields = forecast[name].sel(prediction_timedelta=np.timedelta64(24, "h")).values
        days = by_day[name].sel(dayofyear=[time.dayofyr for time in valid]).values.astype(float)
        pairs = zip(fields - days, truth[name].sel(time=valid).values - days, strict=True)
        correlation = [
            form.mean(a * b) / np.sqrt(form.mean(a * a) * form.mean(b * b)) for a, b in pairs
        ]
        found = scores[name]["acc"]["24h"]["forecast"]
        assert found == pytest.approx(np.mean(correlation), rel=1e-4)


@only("noleap zarr", slow=("360_day netCDF",))
def test_other_calendars_are_one_line(trained, tmp_path):
    form = trained.form
    other = FORMS["360_day netCDF" if form.calendar == "noleap" else "noleap zarr"]
    store = other.write(tmp_path)
    here, there = f"{form.calendar} calendar", f"{other.calendar} calendar"
    kept = CommandRuns(trained.folder, store, other.keys)
    line = kept.refusal(*kept.training, "run.dir=other", "resume=run1")
    assert line.startswith("error: resume: the checkpoint was trained with dates of the ")
    assert f"{here}, but {store} has those of the {there}" in line
    forecast = ("credit-dp", "forecast", "checkpoint=run1", form.init, "lead=6h")
    line = trained.refusal(*forecast, f"data.store={store}", "out=bad.zarr")
    assert f"was trained with dates of the {here}, but {store} has those of the {there}" in line
    words = ("forecast=forecast.zarr", f"truth={store}", "out=x")
    line = trained.refusal("credit-dp", "evaluate", *words)
    assert f"forecast.zarr: has dates of the {here}, but the truth {store} of the {there}" in line
    line = trained.refusal("credit-dp", "data", "inspect", f"store=[{trained.store},{store}]")
    assert f"{store}: has dates of the {there}, but {trained.store} of the {here}" in line
    line = trained.refusal(*forecast, "format=grib", "out=bad.grib")
    assert f"format: GRIB has no dates of the {here}" in line
    line = trained.refusal(*forecast[:3], "init=2001-01-31T06:30", "lead=6h", "out=bad.zarr")
    assert line.startswith("error: init: needs ")


# Icechunk and kerchunk


@only("icechunk", slow=("kerchunk", "icechunk, virtual", "kerchunk, parquet"))
def test_runs_and_scores_are_those_of_a_zarr_store(trained):
    plain = stores.write(trained.form.data, trained.folder / "plain.zarr")
    trained.train("plain", f"data.store={plain}", "trainer.steps=6")
    assert trained.log("plain") == trained.log("run1")
    for out, truth in (("of_store", trained.store), ("of_plain", plain)):
        words = ("forecast=forecast.zarr", f"truth='{truth}'", f"out={out}")
        trained.command("credit-dp", "evaluate", *words)
    found, expected = (trained.folder / x / "scores.csv" for x in ("of_store", "of_plain"))
    assert found.read_text() == expected.read_text()

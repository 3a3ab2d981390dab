"""Runs on every form of store, from inspection to scores, and what is special to some of them.

Commands run in this process, but those that start ranks.
"""

import json
import runpy
from dataclasses import dataclass
from datetime import timedelta
from subprocess import CompletedProcess
from typing import Any

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import credit_dp
import credit_dp.forecast
from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import Config
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from credit_dp.training.data_description import check_data, describe_data
from tests.cli.invocation import answer
from tests.data import cell_stores, stores
from tests.tier_cases import tiers
from tests.training.command_runs import TRAIN, CommandRuns
from tests.training.forms import FORMS, Form, InRegion, OnCells
from tests.training.meshes import (
    ONE,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    run_on_mesh,
    train_from_start,
)

DAY = timedelta(hours=24)
FAST = ("Lambert netCDF", "noleap zarr")
SLOW = (
    "O16 on 17x16", "O16 anemoi", "HEALPix GRIB", "box", "rotated netCDF", "WRF", "360_day netCDF",
    "icechunk", "kerchunk",
)  # fmt: skip
REGIONS = ("box", "Lambert zarr", "rotated netCDF")


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

    def run(self, *words: str) -> CompletedProcess[str]:
        """Run a command in this process, unless it starts ranks."""
        if "--check" not in words and any(word.startswith("parallel.domain=") for word in words):
            return super().run(*words)
        program, *arguments = words
        if program == "python":
            program, arguments = "train", arguments[1:]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("CREDIT_DP_CACHE", str(self.folder / "cache"))
            code, out, err = answer(patch, *arguments, program=program)
        return CompletedProcess(words, code, out, err)

    def forecast(self, name: str, *keys: str) -> xr.Dataset:
        """Forecast one day from the run."""
        words = ("checkpoint=run1", "lead=24h", f"out={name}.zarr", *keys)
        self.command("credit-dp", "forecast", *words)
        return self.opened(name)

    def config(self, *keys: str) -> Config:
        """Return the config of a training of three steps."""
        words = (*self.training[2:], f"data.cache={self.folder / 'cache'}", "trainer.steps=3")
        parsed = parse_overrides([*words, *keys])
        return Composer("train").compose_config([str(word.input_line) for word in parsed])

    def description(self, *keys: str) -> dict[str, Any]:
        """Return what a checkpoint of a run knows of its data."""
        config = self.config(*keys)
        return describe_data(prepare_training_data(config.data), config.model)


@pytest.fixture(scope="module")
def stored(request, tmp_path_factory) -> FormRuns:
    """Return a form's store."""
    form = FORMS[request.param]
    folder = tmp_path_factory.mktemp("form")
    return FormRuns(folder, form.write(folder), form.keys, form)


@pytest.fixture(scope="module")
def on_bands(stored) -> Trajectory:
    """Return the trajectory of a run on three bands."""
    return run_on_mesh(Mesh(1, 1, 3), train_from_start, stored.config(), None)


@pytest.fixture(scope="module")
def trained(stored) -> FormRuns:
    """Return a run of two steps, and its forecast."""
    stored.train("run1", "trainer.steps=2")
    stored.forecast("forecast", stored.form.init)
    return stored


def only(*fast: str, slow: tuple[str, ...] = (), exhaustive: tuple[str, ...] = ()):
    """Run a test on some forms, and on others in the longer tiers."""
    met: list[str] = []
    lists = []
    for names in (fast, slow, exhaustive):
        lists.append([(name,) for name in names if name not in met])
        met += names
    return pytest.mark.parametrize("stored", tiers(*lists), indirect=True)


every_form = only(*FAST, slow=SLOW, exhaustive=tuple(FORMS))


@every_form
def test_inspection_check_and_statistics_are_those_of_numpy(stored):
    form = stored.form
    text = stored.command("credit-dp", "data", "inspect", f"store='{stored.store}'", *form.on_grid)
    assert all(shown in text for shown in (str(stored.store), *form.shown))
    text = stored.command(*stored.training, "--check")
    height, width = form.rows(form.names[0]).shape[1:]
    assert f"{height} x {width} points" in text
    assert f"samples {form.train_times - 1} for training" in text
    assert form.checked in text
    found = stored.description()["statistics"]
    for index, name in enumerate(form.names):
        fields = form.rows(name)[: form.train_times]
        mean = form.mean(fields)
        std = np.sqrt(form.mean((fields - mean) ** 2))
        assert found["mean"][index] == pytest.approx(mean, rel=1e-6, abs=form.tolerance * std)
        assert found["std"][index] == pytest.approx(std, rel=form.tolerance)
    if isinstance(form, InRegion):
        land = form.mean(form.rows("land_sea_mask"))
        assert found["static_mean"][0] == pytest.approx(land, abs=1e-4)


@every_form
def test_bands_train_as_one_process(stored, on_bands):
    assert_same_trajectory(on_bands, run_on_mesh(ONE, train_from_start, stored.config(), None))


@only(
    slow=("O16 on 17x16", "noleap zarr"),
    exhaustive=("Lambert netCDF", *REGIONS, "360_day netCDF", "regular on 12x24"),
)
def test_training_on_a_prepared_copy_is_the_same_in_every_bit(stored, on_bands):
    words = (f"store={stored.store}", "out=copy.zarr", *stored.selection)
    stored.command("credit-dp", "data", "prepare", *words)
    keys = ("data.name=prepared", f"data.store={stored.folder / 'copy.zarr'}", "data.grid=null")
    copied = run_on_mesh(Mesh(1, 1, 3), train_from_start, stored.config(*keys), None)
    assert copied[0] == on_bands[0]
    assert all(np.array_equal(copied[1][name], weight) for name, weight in on_bands[1].items())
    times = xr.open_zarr(stored.folder / "copy.zarr", consolidated=False)["time"].to_index()
    assert times.equals(stored.form.data["time"].to_index())  # in its calendar


@only(slow=("O16 on 17x16",), exhaustive=tuple(FORMS))
def test_ranks_of_commands_do_as_one_process(trained):
    """They train, resume on another number of ranks, and forecast."""
    trained.train("longer", "trainer.steps=4")
    trained.train("run2", "trainer.steps=2", "parallel.domain=2")
    trained.train("run3", "resume=run2", "trainer.steps=4", "parallel.domain=3")
    ranks = trained.log("run2") + trained.log("run3")
    assert ranks == pytest.approx(trained.log("longer"), rel=1e-10)
    form = trained.form
    has_cells = isinstance(form, OnCells) and len({*form.cells.lengths}) > 1
    keys = ("grid=source",) if has_cells else ()
    one, three = (
        trained.forecast(f"by{number}", form.init, *keys, *on_ranks)
        for number, on_ranks in ((1, ()), (3, ("parallel.domain=3",)))
    )
    for name in form.names:
        np.testing.assert_allclose(three[name], one[name], rtol=1e-6)
    assert "complete" in trained.command("credit-dp", "forecast", "check", "by3.zarr")


@only(slow=("O16 on 17x16", "Lambert netCDF", "noleap zarr", "icechunk"), exhaustive=tuple(FORMS))
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


@only(slow=("O16 on 17x16", "noleap zarr"), exhaustive=tuple(FORMS))
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


@only(slow=("O16 on 17x16", "O16 anemoi"), exhaustive=("O16 netCDF", "HEALPix zarr", "N32 GRIB"))
def test_forecasts_go_back_to_the_cells(trained):
    """By numpy: first along the rows around a cell, then between them."""
    form, on_grid = trained.form, trained.opened("forecast")
    one = trained.forecast("on-cells", form.init, "grid=source")
    latitudes, longitudes = form.cells.latitudes, form.cells.longitudes
    np.testing.assert_allclose(one["latitude"], latitudes, atol=1e-5)
    np.testing.assert_allclose(one["longitude"], longitudes, atol=1e-5)
    np.testing.assert_allclose(on_grid["latitude"], form.latitude, rtol=1e-15)
    height, width = form.shape
    south = np.clip(np.searchsorted(-form.latitude, -latitudes), 1, height - 1)
    pair = form.latitude[[south - 1, south]]
    share = np.clip((pair[0] - latitudes) / (pair[0] - pair[1]), 0, 1)
    columns = np.arange(width) * 360 / width
    for name in form.names:
        assert one[name].dims == ("time", "prediction_timedelta", "cell")
        for time, lead in ((0, 0), (2, 3)):
            rows = on_grid[name].isel(time=time, prediction_timedelta=lead).values.astype(float)
            along = np.array([np.interp(longitudes, columns, row, period=360) for row in rows])
            at = np.arange(len(latitudes))
            wanted = (1 - share) * along[south - 1, at] + share * along[south, at]
            found = one[name].isel(time=time, prediction_timedelta=lead)
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


@only(exhaustive=("HEALPix zarr",))
def test_healpix_is_not_written_as_grib(trained):
    words = ("checkpoint=run1", trained.form.init, "lead=12h", "grid=source", "format=grib")
    line = trained.refusal("credit-dp", "forecast", *words, "out=cells.grib")
    assert "format: GRIB is written on reduced Gaussian grids from longitude 0" in line


@only(slow=("O16 anemoi",))
def test_forecasts_on_cells_are_grib_of_their_grid(trained):
    words = ("checkpoint=run1", "init=2000-01-09", "lead=12h", "grid=source")
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


@only(slow=("O16 on 17x16", "O16 anemoi"), exhaustive=("HEALPix zarr", "regular on 12x24"))
def test_other_cells_another_grid_or_way_are_refused(stored, tmp_path):
    form, cells = stored.form, cell_stores.anemoi(tmp_path, cell_stores.octahedral(17))
    height, width = form.shape
    trained_with = f"resume: the checkpoint was trained with data.grid={height}x{width}"
    cases = {f"data.store={cells}": trained_with}
    if form.grid is not None:
        another_mean = "was trained with another mean of the fields"
        cases = {
            f"data.store={cells}": another_mean,
            f"data.grid={height + 1}x{width}": trained_with,
            "data.regrid=bilinear": another_mean,
            "data.grid=null": trained_with,
        }
    own = stored.description()
    check_data(own, own)
    for key, said in cases.items():
        with pytest.raises(UserError) as error:
            check_data(own, stored.description(key))
        assert said in str(error.value), key


# Regions


@only(slow=("Lambert netCDF",), exhaustive=REGIONS)
def test_an_exported_model_makes_the_first_step_of_forecasts(trained):
    form, forecast = trained.form, trained.opened("forecast")
    trained.command("credit-dp", "checkpoint", "export", "run1", "--output", "model.safetensors")
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


@only(slow=("Lambert netCDF",), exhaustive=REGIONS)
@pytest.mark.parametrize("form", ["zarr", "netcdf", "netcdf_file"])
def test_forecasts_have_the_coordinates_of_the_store(trained, form):
    out = {"zarr": "forecast.zarr", "netcdf": "netcdf", "netcdf_file": "file.nc"}[form]
    if form != "zarr":
        words = ("checkpoint=run1", "init=2020-01-05", "lead=24h", f"format={form}", f"out={out}")
        trained.command("credit-dp", "forecast", *words)
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


@pytest.mark.slow
@only("Lambert netCDF", exhaustive=REGIONS)
def test_what_needs_the_globe_or_more_rows_is_one_line(stored):
    """A run and its check say it before anything else; the rows are known from the store."""
    rows = "the model's coarsest level has 2 of the grid's 13 rows, too few for 3"
    cases = {
        ("loss.spectrum=1",): "loss.spectrum: a global grid is needed here, but this is a region",
        ("loss.sphere_spectrum=1",): "Set loss.sphere_spectrum=0.",
        ("trainer.shift_longitude=true", "--check"): "Leave trainer.shift_longitude out.",
        ("trainer.mirror=0.5", "--check"): "trainer.mirror: a global grid is needed here",
        ("model.channels=[8,8,8,8]", "parallel.domain=3", "--check"): f"parallel.domain: {rows}",
    }
    for keys, said in cases.items():
        assert said in stored.refusal(*stored.training, "run.dir=other", *keys), keys


# Calendars


@only(slow=("noleap zarr",), exhaustive=("360_day netCDF",))
def test_forecasts_have_the_calendar_of_the_store(trained):
    form, forecast = trained.form, trained.opened("forecast")
    options = {"freq": "12h", "calendar": form.calendar, "use_cftime": True}
    expected = xr.date_range(form.first, form.last, **options)
    words = ("checkpoint=run1", form.init, "lead=24h")
    for out, kind in {"file.nc": "netcdf_file", "bands": "netcdf"}.items():
        trained.command("credit-dp", "forecast", *words, f"out={out}", f"format={kind}")
    file = xr.open_dataset(trained.folder / "file.nc", decode_timedelta=True)
    for data in (forecast, file, credit_dp.forecast.open_sharded(trained.folder / "bands")):
        assert data["time"].to_index().equals(expected)
        np.testing.assert_allclose(data["PSL"], forecast["PSL"], rtol=1e-6)
    for data in (forecast, file):
        assert data["time"].encoding["units"] == "hours since 1900-01-01"


@only(slow=("noleap zarr",), exhaustive=("360_day netCDF",))
def test_an_exported_model_forecasts_in_the_calendar(trained, monkeypatch):
    words = ("export", "run1", "--output", "model.safetensors")
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


@only(slow=("noleap zarr",), exhaustive=("360_day netCDF",))
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


@only(slow=("noleap zarr",), exhaustive=("360_day netCDF",))
def test_other_calendars_are_one_line(trained, tmp_path):
    form = trained.form
    other = FORMS["360_day netCDF" if form.calendar == "noleap" else "noleap zarr"]
    store = other.write(tmp_path)
    here, there = f"{form.calendar} calendar", f"{other.calendar} calendar"
    words = ("python", str(TRAIN), f"data.store='{store}'", *other.keys)
    line = trained.refusal(*words, "run.dir=other", "resume=run1")
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


@only(slow=("icechunk", "kerchunk"), exhaustive=("icechunk, virtual", "kerchunk, parquet"))
def test_a_run_is_that_of_a_zarr_store(stored, on_bands):
    plain = stores.write(stored.form.data, stored.folder / "plain.zarr")
    config = stored.config(f"data.store={plain}")
    found = run_on_mesh(Mesh(1, 1, 3), train_from_start, config, None)
    assert found[0] == on_bands[0]
    assert all(np.array_equal(found[1][name], weight) for name, weight in on_bands[1].items())

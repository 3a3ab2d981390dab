"""Runs on the output of climate models in their own calendars, from inspection to scores."""

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import credit_dp
from credit_dp.data.grid import row_weights
from credit_dp.errors import UserError
from credit_dp.forecast import open_sharded
from tests.data import stores
from tests.training.command_runs import CommandRuns

KEYS = (
    "data=zarr", "data.prognostic=[TREFHT,PSL]", "data.static=[]", "data.levels=null",
    "data.forcing=[day_of_year_sin,insolation]", "data.batch_size=4", "model.channels=[8,16]",
    "model.groups=4", "trainer.evaluate_hours=[6,24]", "trainer.dtype=float64", "device=cpu",
)  # fmt: skip

ROWS, COLUMNS, STEPS = 13, 16, 240  # sixty days, six-hourly


def model_output(calendar: str, start: str, units: str, steps: int = STEPS) -> xr.Dataset:
    """Six-hourly waves on an annual cycle of the calendar; times have no bounds."""
    times = xr.date_range(start, periods=steps, freq="6h", calendar=calendar, use_cftime=True)
    latitude = np.linspace(-90, 90, ROWS)
    longitude = np.arange(COLUMNS) * 360 / COLUMNS
    days = np.array([time.dayofyr + time.hour / 24 for time in times])[:, None, None]
    phi, wave = np.deg2rad(latitude)[:, None], np.deg2rad(longitude) - 0.3 * days
    noise = np.random.default_rng(0).normal(size=(steps, ROWS, COLUMNS))
    season = np.sin(2 * np.pi * days / 365) * np.sin(phi)
    fields = {
        "TREFHT": 285 + 20 * np.cos(phi) + 5 * np.cos(phi) * np.sin(2 * wave) + 8 * season,
        "PSL": 101000 + 900 * np.cos(phi) ** 2 * np.cos(3 * wave) - 200 * season,
    }
    sizes, about = {"TREFHT": 0.3, "PSL": 30}, {"TREFHT": "K", "PSL": "Pa"}
    dims = ("time", "lat", "lon")
    data = xr.Dataset(
        {
            name: (dims, (field + sizes[name] * noise).astype("f4"), {"units": about[name]})
            for name, field in fields.items()
        },
        {"time": times, "lat": latitude, "lon": longitude},
    )
    data["lat"].attrs |= {"units": "degrees_north", "long_name": "latitude"}
    data["lon"].attrs |= {"units": "degrees_east", "long_name": "longitude"}
    data["time"].encoding |= {"units": units, "dtype": "float64"}
    return data


def cesm(folder: Path, start: str = "0001-01-20") -> Path:
    """Write a zarr store in years of 365 days, numbered from the start of the run."""
    data = model_output("noleap", start, "days since 0001-01-01 00:00:00")
    return stores.write(data, folder / "cesm.zarr")


def hadgem(folder: Path, start: str = "2000-01-20") -> Path:
    """Write a netCDF file in years of twelve months of 30 days."""
    path = folder / "hadgem.nc"
    model_output("360_day", start, "days since 1859-12-01").to_netcdf(path)
    return path


class Case(NamedTuple):
    """A store, the dates of its splits, and initial times over the end of February."""

    write: Callable[[Path], Path]
    calendar: str
    dates: dict[str, tuple[str, str]]
    init: str
    first: str
    last_of_february: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (*(f"data.dates.{k}=[{','.join(v)}]" for k, v in self.dates.items()), *KEYS)


def splits(year: str, last_of_february: str, last: str) -> dict[str, tuple[str, str]]:
    return {
        "train": (f"{year}-01-20", last_of_february),
        "valid": (f"{year}-03-01", f"{year}-03-09"),
        "test": (f"{year}-03-10", last),
    }


CASES = {
    "noleap zarr": Case(
        cesm,
        "noleap",
        splits("0001", "0001-02-28", "0001-03-20"),
        "0001-02-27/0001-03-02/12h",
        "0001-01-20T00:00",
        "0001-02-28",
    ),
    "360_day netCDF": Case(
        hadgem,
        "360_day",
        splits("2000", "2000-02-30", "2000-03-19"),
        "2000-02-29/2000-03-02/12h",
        "2000-01-20T00:00",
        "2000-02-30",
    ),
}


@dataclass(frozen=True)
class Run(CommandRuns):
    """A folder with the store, runs on one and two ranks, and a forecast."""

    case: Case


def opened(path: Path, **options: Any) -> xr.Dataset:
    if path.suffix == ".zarr":
        options |= {"engine": "zarr", "consolidated": False}
    return xr.open_dataset(path, **options)


@pytest.fixture(scope="module", params=CASES)
def trained(request, tmp_path_factory) -> Run:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("calendar")
    made = Run(folder, case.write(folder), case.keys, case)
    made.train_on_one_and_two_ranks()
    words = ("checkpoint=run2", f"init={case.init}", "lead=24h", "parallel.domain=2")
    made.command("credit-dp", "forecast", *words, "out=forecast.zarr")
    return made


def test_dates_are_shown_and_checked_in_the_calendar(trained):
    case = trained.case
    text = trained.command("credit-dp", "data", "inspect", f"store={trained.store}")
    assert f"dates   240, from {case.first} to " in text
    assert f"every 6 hours, no gaps, {case.calendar} calendar" in text
    text = trained.command(*trained.training, "--check")
    train = opened(trained.store).sel(time=slice(*case.dates["train"]))
    assert f"samples {train.sizes['time'] - 1} for training" in text
    assert f"{case.last_of_february}T18:00" in text


def test_one_and_two_ranks_have_equal_logs(trained):
    trained.check_log_on(ranks=2)


def test_a_run_resumes_on_another_mesh(trained):
    trained.check_resuming()


def test_forecasts_have_the_calendar_of_the_store(trained):
    words = ("checkpoint=run1", f"init={trained.case.init}", "lead=24h")
    forms = {"file.nc": "netcdf_file", "folder": "netcdf"}
    for out, form in forms.items():
        trained.command("credit-dp", "forecast", *words, f"out={out}", f"format={form}")
    zarr = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    start, last, _ = trained.case.init.split("/")
    expected = xr.date_range(
        start, last, freq="12h", calendar=trained.case.calendar, use_cftime=True
    )
    for data in (zarr, xr.open_dataset(trained.folder / "file.nc", decode_timedelta=True)):
        assert data["time"].to_index().equals(expected)
        assert data["time"].encoding["units"] == "hours since 1900-01-01"
        np.testing.assert_allclose(data["PSL"], zarr["PSL"], rtol=1e-6)
    assert len(list((trained.folder / "folder").glob("*.nc"))) == len(expected)


def test_a_forecast_starts_from_a_file_of_the_calendar(trained):
    midnight = f"{trained.case.init.split('/')[1]}T00"
    state = opened(trained.store).sel(time=slice(midnight, midnight)).load()
    state.drop_encoding().to_netcdf(trained.folder / "state.nc")
    words = ("checkpoint=run2", "init_file=state.nc", "lead=24h", "out=from_file.zarr")
    trained.command("credit-dp", "forecast", *words)
    of_store, of_file = (
        xr.open_zarr(trained.folder / name, decode_timedelta=True)
        for name in ("forecast.zarr", "from_file.zarr")
    )
    assert of_file["time"].values == of_store["time"].values[-1:]
    np.testing.assert_allclose(of_file["PSL"], of_store["PSL"].isel(time=[-1]), rtol=1e-6)


def test_files_of_bands_are_joined_in_the_calendar(trained):
    words = ("checkpoint=run2", f"init={trained.case.init}", "lead=24h", "parallel.domain=2")
    trained.command("credit-dp", "forecast", *words, "out=bands", "format=netcdf")
    joined = open_sharded(trained.folder / "bands")
    zarr = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    assert joined["time"].to_index().equals(zarr["time"].to_index())
    np.testing.assert_allclose(joined["PSL"], zarr["PSL"], rtol=1e-6)


def test_an_exported_model_forecasts_in_the_calendar(trained, monkeypatch):
    words = ("export", "run2", "--output", "model.safetensors")
    trained.command("credit-dp", "checkpoint", *words)
    file = trained.folder / "model.safetensors"
    model = credit_dp.load(file)
    made = opened(trained.folder / "forecast.zarr", decode_timedelta=True)
    truth = opened(trained.store).sortby("lat", ascending=False).sel(time=made["time"])
    fields = torch.from_numpy(np.stack([truth[name] for name in model.variables], axis=1))
    times = made["time"].values
    with torch.no_grad():
        for step, found in enumerate(model.rollout(fields, times, 4)):
            wanted = made.isel(prediction_timedelta=step)
            wanted = np.stack([wanted[name] for name in model.variables], axis=1)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for others in (np.array(["2001-01-01"], "M8[D]"), [cftime.datetime(2001, 1, 1)]):
        with pytest.raises(UserError, match=f'calendar="{trained.case.calendar}"'):
            model(fields[:1], others)
    block = file.with_suffix(".md").read_text().split("```python\n")[1].split("```")[0]
    script = trained.folder / "block.py"
    script.write_text(block)
    monkeypatch.chdir(trained.folder)
    assert runpy.run_path(str(script))["later"].isfinite().all()


def test_a_prepared_store_has_the_calendar(trained):
    start, last, _ = trained.case.init.split("/")
    keys = [key for key in KEYS if key.startswith("data.") and "batch" not in key]
    words = (f"store={trained.store}", "out=prepared.zarr", f"dates=[{start},{last}]", *keys)
    trained.command("credit-dp", "data", "prepare", *words)
    prepared = xr.open_zarr(trained.folder / "prepared.zarr", consolidated=False)
    expected = opened(trained.store).sel(time=slice(start, last))
    assert prepared["time"].to_index().equals(expected["time"].to_index())
    text = trained.command("credit-dp", "data", "inspect", "store=prepared.zarr")
    assert f"{trained.case.calendar} calendar" in text


def test_scores_are_those_of_xarray_and_cftime(trained):
    """The climatology is by day of the calendar's year, as xarray groups it."""
    truth = opened(trained.store)
    truth = truth.rename(lat="latitude", lon="longitude").sortby("latitude", ascending=False)
    by_day = truth.groupby("time.dayofyear").mean()
    by_day.drop_encoding().to_zarr(trained.folder / "days.zarr", zarr_format=2)
    first, last = trained.case.last_of_february, trained.case.dates["valid"][1]
    keys = (f"truth={trained.store}", "climatology=days.zarr", f"dates=[{first},{last}]")
    trained.command("credit-dp", "evaluate", "forecast=forecast.zarr", *keys, "out=scores")
    scores = json.loads((trained.folder / "scores/scores.json").read_text())["scores"]
    forecast = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    forecast = forecast.sel(time=slice(first, last))
    assert 1 < forecast.sizes["time"] < 7
    area = xr.DataArray(row_weights(truth["latitude"].values), dims="latitude")
    where = ("latitude", "longitude")
    for name in ("TREFHT", "PSL"):
        square, correlation = [], []
        for start in forecast["time"].values:
            valid = start + timedelta(hours=24)
            day = by_day[name].sel(dayofyear=valid.dayofyr).values
            field = forecast[name].sel(time=start, prediction_timedelta=np.timedelta64(24, "h"))
            field = field.astype(float)
            actual = truth[name].sel(time=valid).astype(float)
            square.append(float(((field - actual.values) ** 2 * area).mean(where)))
            a, b = field - day, actual.drop_vars("time") - day
            b = b.assign_coords(latitude=a["latitude"], longitude=a["longitude"])
            parts = (float((x * area).mean(where)) for x in (a * b, a * a, b * b))
            product, first, second = parts
            correlation.append(product / np.sqrt(first * second))
        found = {key: scores[name][key]["24h"]["forecast"] for key in ("rmse", "acc")}
        assert found["rmse"] == pytest.approx(np.sqrt(np.mean(square)), rel=1e-5)
        assert found["acc"] == pytest.approx(np.mean(correlation), rel=1e-4)


def test_other_calendars_are_one_line(trained, tmp_path):
    case = trained.case
    other = next(of for of in CASES.values() if of.calendar != case.calendar)
    store = other.write(tmp_path)
    kept = replace(trained, store=store, keys=other.keys)
    here, there = f"{case.calendar} calendar", f"{other.calendar} calendar"
    line = trained.refusal(*kept.training, "run.dir=other", "resume=run1")
    assert line.startswith("error: resume: the checkpoint was trained with dates of the ")
    assert f"{here}, but data.store has those of the {there}" in line
    forecast = ("credit-dp", "forecast", "checkpoint=run1", f"init={case.init}", "lead=6h")
    line = trained.refusal(*forecast, f"data.store={store}", "out=bad.zarr")
    assert f"was trained with dates of the {here}, but {store} has those of the {there}" in line
    line = trained.refusal(
        "credit-dp", "evaluate", "forecast=forecast.zarr", f"truth={store}", "out=x"
    )
    assert f"forecast.zarr: has dates of the {here}, but the truth {store} of the {there}" in line
    line = trained.refusal("credit-dp", "data", "inspect", f"store=[{trained.store},{store}]")
    assert f"{store}: has dates of the {there}, but {trained.store} of the {here}" in line
    line = trained.refusal(*forecast, "format=grib", "out=bad.grib")
    assert f"format: GRIB has no dates of the {here}" in line
    line = trained.refusal(*forecast[:3], "init=2001-01-31T06:30", "lead=6h", "out=bad.zarr")
    assert line.startswith("error: init: needs ")

"""Runs on boxes and projections, from inspection to scores."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import credit_dp
import credit_dp.forecast
from credit_dp.training.checkpoint_files import locate_checkpoint
from credit_dp.training.checkpoint_shards import Checkpoint
from credit_dp.training.state import MODEL_PREFIX
from tests.data import region_stores
from tests.data.region_stores import COLUMNS, KINDS, ROWS
from tests.training.command_runs import CommandRuns

NAMES = ("mean_sea_level_pressure", "2m_temperature")
DAY = np.timedelta64(24, "h")
KEYS = (
    "data=zarr", f"data.prognostic=[{','.join(NAMES)}]", "data.levels=null",
    "data.static=[land_sea_mask,latitude_sin]", "data.forcing=[insolation,hour_of_day_sin]",
    "data.batch_size=4", "model.channels=[8,16]", "model.groups=4", "loss.gradient=0.5",
    "trainer.evaluate_hours=[6]", "trainer.dtype=float64", "device=cpu",
    "data.dates.train=[2019-12-28,2020-01-03]", "data.dates.valid=[2020-01-04,2020-01-04]",
    "data.dates.test=[2020-01-05,2020-01-06]",
)  # fmt: skip


@dataclass(frozen=True)
class Run(CommandRuns):
    """A folder with the store, runs on one and two ranks, and a forecast."""

    kind: str

    @property
    def data(self) -> xr.Dataset:
        """The store's fields with its rows from the north."""
        data = region_stores.dataset(self.kind)
        if self.kind == "lambert":
            data = data.isel(projection_y_coordinate=slice(None, None, -1))
        return data

    def mean(self, fields: np.ndarray) -> float:
        """The mean over the region of `(..., H, W)`."""
        return float((fields * region_stores.areas(self.kind)).mean())

    def state(self) -> dict:
        [state] = sorted(self.folder.glob("run1/**/state.json"))[-1:]
        return json.loads(state.read_text())["data"]


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=() if x == "lambert" else pytest.mark.slow) for x in KINDS],
)
def trained(request, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("region")
    made = Run(folder, region_stores.write(request.param, folder), KEYS, request.param)
    made.train_on_one_and_two_ranks()
    words = (
        "checkpoint=run2",
        "init=2020-01-05/2020-01-05T12/12h",
        "lead=24h",
        "parallel.domain=2",
    )
    made.command("credit-dp", "forecast", *words, "out=forecast.zarr")
    return made


def test_the_check_has_the_grid(trained):
    text = trained.command(*trained.training, "--check")
    assert f"{ROWS} x {COLUMNS} points" in text


def test_two_ranks_have_the_log_of_one(trained):
    trained.check_log_on(ranks=2)


@pytest.mark.slow
def test_three_ranks_have_the_log_of_one(trained):
    trained.check_log_on(ranks=3)


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


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_on_a_prepared_copy_is_the_same_in_every_bit(trained, ranks):
    copy = trained.folder / "copy.zarr"
    if not copy.exists():
        words = (f"store={trained.store}", f"out={copy}", *KEYS[:5])
        trained.command("credit-dp", "data", "prepare", *words)
    on_copy = replace(trained, store=copy)
    on_copy.train(f"copy{ranks}", f"parallel.domain={ranks}", "trainer.steps=4")
    one, other = f"copy{ranks}", f"run{ranks}"
    assert trained.log(one) == trained.log(other)
    found, wanted = (tensors(trained.folder / name) for name in (one, other))
    assert found
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_statistics_are_those_of_the_cells(trained):
    found = trained.state()["statistics"]
    # Areas from the map factor differ from those of cells by the square of their width, 4e-4.
    for index, name in enumerate(NAMES):
        fields = trained.data[name].values[:28].astype(float)  # seven days of training
        mean = trained.mean(fields)
        std = np.sqrt(trained.mean((fields - mean) ** 2))
        assert found["mean"][index] == pytest.approx(mean, abs=2e-4 * std)
        assert found["std"][index] == pytest.approx(std, rel=2e-4)
    land = trained.mean(trained.data["land_sea_mask"].values)
    assert found["static_mean"][0] == pytest.approx(land, abs=1e-4)


def test_a_run_resumes_on_another_mesh(trained):
    trained.check_resuming()


def test_scores_are_those_of_numpy(trained):
    keys = (f"truth={trained.store}", "out=scores")
    trained.command("credit-dp", "evaluate", "forecast=forecast.zarr", *keys)
    scores = json.loads((trained.folder / "scores/scores.json").read_text())["scores"]
    forecast = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    valid = np.searchsorted(trained.data["time"].values, forecast["time"].values + DAY)
    for name in NAMES:
        fields = forecast[name].sel(prediction_timedelta=DAY).values.astype(float)
        rmse = np.sqrt(trained.mean((fields - trained.data[name].values[valid]) ** 2))
        assert scores[name]["rmse"]["24h"]["forecast"] == pytest.approx(rmse, rel=2e-4)


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
    names = ("latitude", "longitude")
    if trained.kind == "rotated":
        expected = trained.data.rename(lat="latitude", lon="longitude")
    else:
        expected = trained.data
    array = found["mean_sea_level_pressure"]
    for name in names:
        np.testing.assert_array_equal(array[name].values, expected[name].values)
        assert array[name].dims == expected[name].dims
        assert array[name].attrs["standard_name"] == name
    assert array.dims[-2:] == expected["mean_sea_level_pressure"].dims[-2:]
    if trained.kind != "box":
        attributes = {x: np.asarray(y).tolist() for x, y in found["crs"].attrs.items()}
        assert attributes == expected["crs"].attrs
        mapping = array.attrs.get("grid_mapping") or array.encoding["grid_mapping"]
        assert mapping == "crs"
        for dim in array.dims[-2:]:
            np.testing.assert_array_equal(found[dim].values, expected[dim].values)
            assert found[dim].attrs["standard_name"] == expected[dim].attrs["standard_name"]


def test_an_exported_model_makes_the_first_step_of_forecasts(trained):
    trained.command("credit-dp", "checkpoint", "export", "run2", "--output", "model.safetensors")
    model = credit_dp.load(str(trained.folder / "model.safetensors"))
    names = ("latitude", "longitude") if trained.kind != "rotated" else ("lat", "lon")
    for name, degrees in zip(names, (model.latitude, model.longitude), strict=True):
        assert np.array_equal(degrees, trained.data[name].values)
    forecast = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    start = trained.data.sel(time=forecast["time"].values)
    fields = torch.from_numpy(np.stack([start[name].values for name in NAMES], axis=1))
    with torch.no_grad():
        found = model(fields, forecast["time"].values)
    for index, name in enumerate(NAMES):
        wanted = forecast[name].sel(prediction_timedelta=np.timedelta64(6, "h")).values
        np.testing.assert_allclose(found[:, index], wanted, rtol=1e-6)


def test_grib_is_written_for_boxes_alone(trained):
    keys = ("checkpoint=run2", "init=2020-01-05", "lead=24h", "format=grib", "out=f.grib")
    if trained.kind != "box":
        line = trained.refusal("credit-dp", "forecast", *keys)
        assert "format: GRIB is written on grids of latitudes and longitudes" in line
        return
    trained.command("credit-dp", "forecast", *keys)
    options = {"filter_by_keys": {"shortName": "2t"}, "indexpath": ""}
    path = trained.folder / "f.grib"
    data = xr.open_dataset(path, engine="cfgrib", backend_kwargs=options, decode_timedelta=True)
    np.testing.assert_allclose(data["latitude"], trained.data["latitude"], atol=1e-6)
    found = (data["longitude"] + 180) % 360 - 180
    np.testing.assert_allclose(found, trained.data["longitude"], atol=1e-6)
    text = trained.command("credit-dp", "data", "inspect", "store=f.grib")
    assert f"{ROWS} x {COLUMNS} region, 1.5 x 1.5 degrees" in text


def test_a_forecast_starts_from_a_file_of_the_region(trained):
    region_stores.dataset(trained.kind).isel(time=[34]).to_netcdf(trained.folder / "state.nc")
    words = ("checkpoint=run2", "init_file=state.nc", "lead=24h", "out=from_file.zarr")
    trained.command("credit-dp", "forecast", *words)
    of_store, of_file = (
        xr.open_zarr(trained.folder / name, decode_timedelta=True)
        for name in ("forecast.zarr", "from_file.zarr")
    )
    for name in NAMES:
        np.testing.assert_allclose(of_file[name], of_store[name].isel(time=[-1]), rtol=1e-6)


REFUSED = {
    "loss.spectrum=1": "loss.spectrum: a global grid is needed here, but this is a region of",
    "loss.sphere_spectrum=1": "Set loss.sphere_spectrum=0.",
    "trainer.shift_longitude=true": "Leave trainer.shift_longitude out.",
    "trainer.mirror=0.5": "trainer.mirror: a global grid is needed here",
}


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["run", "check"])
@pytest.mark.parametrize("key", REFUSED)
def test_what_needs_the_globe_is_one_line(trained, key, check):
    line = trained.refusal(*trained.training, "run.dir=other", key, *check)
    assert REFUSED[key] in line

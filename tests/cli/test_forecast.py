"""`credit-dp forecast`: keys, meshes, and one line for each mistake."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from omegaconf import OmegaConf

from credit_dp.cli.forecast import TrainedRun, forecast_config, split_arguments
from credit_dp.training.checkpoint_files import metadata_checksum
from tests.cli.invocation import answer, assert_refused
from tests.data import stores
from tests.forecast.runs import ROWS, train, train_ensemble

TIMES = ("init=2000-01-04/2000-01-04T12/12h", "lead=12h", "device=cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    return Path(train(tmp_path_factory.mktemp("trained")).run.dir)


def forecast_command(monkeypatch, *words: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `credit-dp forecast`."""
    return answer(monkeypatch, "forecast", *map(str, words), program="credit-dp")


def refused(monkeypatch, *words: object) -> str:
    """The one line that refuses a forecast."""
    code, _, line = forecast_command(monkeypatch, *words)
    assert code == 2
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line.removeprefix("error: ").rstrip()


def config_of(*words: str):
    """The config of the forecasts that words ask for."""
    keys, overrides = split_arguments(words, "credit-dp forecast")
    return forecast_config(TrainedRun(keys["checkpoint"], overrides, "credit-dp"), keys)


def test_a_forecast_is_in_the_folder_of_the_run(run, monkeypatch):
    code, out, err = forecast_command(monkeypatch, f"checkpoint={run}", *TIMES)
    assert (code, err) == (0, "")
    found = run / "forecast.zarr"
    assert str(found) in out
    with xr.open_zarr(found) as data:
        assert dict(data.sizes)["time"] == 2
    code, out, _ = forecast_command(monkeypatch, "check", found)
    assert code == 0
    assert out == f"{found}: complete (2 initial times, 2 lead times)\n"
    assert f"{found}: exists already. Change out." in refused(
        monkeypatch, f"checkpoint={run}", *TIMES
    )
    (found / "geopotential/c.0.0.0.0.0").unlink()
    code, out, _ = forecast_command(monkeypatch, "check", found)
    assert code == 1
    assert "missing: 2000-01-04T00 +6h, rows 0 to 16" in out
    shutil.rmtree(found)


def test_a_forecast_starts_from_a_file(run, monkeypatch, tmp_path):
    words = [f"checkpoint={run}", "lead=6h", "device=cpu", f"out={tmp_path}/g.grib"]
    with xr.open_zarr(run.parent / f"{ROWS}x16.zarr", consolidated=False) as data:
        state = data.sel(time="2000-01-04T12").drop_encoding()
        state.to_netcdf(tmp_path / "state.nc")
        state.drop_vars("temperature").to_netcdf(tmp_path / "less.nc")
    less = refused(monkeypatch, *words, f"init_file={tmp_path}/less.nc")
    assert "lacks at 2000-01-04T12:00 temperature on levels 500, 850, 1000. Add" in less
    assert refused(monkeypatch, *words, "init_file=nowhere").startswith("init_file: ")
    assert "state at" not in refused(monkeypatch, *words, "init=2000-01-04", "init_file=nowhere")
    code, out, err = forecast_command(
        monkeypatch, *words, f"init_file={tmp_path}/state.nc", "format=grib"
    )
    assert (code, err) == (0, "")
    assert f"{tmp_path}/g.grib" in out
    code, out, _ = forecast_command(monkeypatch, "check", tmp_path / "g.grib")
    assert (code, out) == (0, f"{tmp_path}/g.grib: complete (1 initial time, 1 lead time)\n")


def test_checks_of_what_is_no_forecast(run, tmp_path, monkeypatch):
    assert "there is no forecast" in refused(monkeypatch, "check", tmp_path / "f.zarr")
    assert "was not written by credit-dp forecast" in refused(monkeypatch, "check", run)
    assert "needs the path of one forecast, got 0" in refused(monkeypatch, "check")
    for path in ("/", "~nobody-has-this/f.zarr"):
        assert f"{path}: can't be a forecast" in refused(monkeypatch, "check", path)


def changed_store(run: Path, folder: Path, change: str) -> Path:
    """Write the run's store with one change."""
    data = stores.dataset(ROWS, 16, 20)
    if change == "variable":
        data = data.drop_vars("2m_temperature")
    elif change == "level":
        data = data.sel(level=[500, 1000])
    elif change == "grid":
        data = stores.dataset(12, 16, 20)
    elif change == "latitudes":
        data["latitude"] = np.linspace(85, -85, ROWS)
    elif change == "longitudes":
        data["longitude"] = data["longitude"] + 0.5
    elif change == "gap":
        data["temperature"][14] = np.nan
    elif change == "short":
        data = data.isel(time=slice(0, 14))
    return stores.write(data, folder / f"{change}.zarr")


NOTHING_WRITTEN = {
    "init=2010-01-01": "init: needs a state at 2010-01-01T00:00, but",
    "init=2000-01-04T03": "init: needs a state at 2000-01-04T03:00, but",
    "init=never": "init: needs a date",
    "lead=30d": "init: needs the forcing at 2000-01-06T00:00, but",
    "lead=7h": "lead: needs a multiple of the model's step of 6h",
    "lede=12h": "needs keys like checkpoint",
    "data.stroe=x": "data.stroe",
    "members=x": "members: needs a whole number, got 'x'",
    "members=1:30": "members: needs a whole number, got '1:30'",
    "checkpoint=nowhere": ("checkpoint: needs the path of a checkpoint or of a run, but nowhere"),
    "model.channels=[8,32]": "trained with model.channels=[8,16], the config has [8,32]",
    "model.groups=2": "trained with model.groups=4, the config has 2. Leave",
    "model.frames=2": "trained with model.frames=1, the config has 2",
    "data.variables={temperature:{normalise:minmax}}": (
        "trained with data.variables.temperature.normalise=standard, the config has minmax"
    ),
    "data.prognostic=[temperature]": "which the store does not have",
    "data.diagnostic=[solar]": "solar",
    "parallel.domain=40": "parallel.domain: the model's coarsest level has 9 of the",
    "data.store=variable.zarr": "2m_temperature",
    "data.store=level.zarr": "and needs geopotential_850, which the store does not have",
    "data.store=grid.zarr": "was trained with a grid of 17x16, but",
    "data.store=latitudes.zarr": "was trained with latitude 90 at index 0, but",
    "data.store=longitudes.zarr": "was trained with longitude 0 at index 0",
    "data.store=short.zarr": "init: needs a state at 2000-01-04T12:00, but",
    "data.store=nowhere.zarr": "nowhere.zarr: no such zarr store",
    "out=gs://b/f.zarr": "out: needs a local path",
    "out=~nobody-has-this/f.zarr": "out: there is no home folder as in ~nobody",
}


@pytest.mark.slow
def test_a_mistake_is_one_line_and_nothing_is_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for change in ("variable", "level", "grid", "latitudes", "longitudes", "short"):
        changed_store(run, tmp_path, change)
    (tmp_path / "there").mkdir()
    keys = (*TIMES, f"checkpoint={run}", f"out={tmp_path}/there/f.zarr")
    assert_refused(NOTHING_WRITTEN, "forecast", *keys)
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_a_gap_in_the_initial_state_is_one_line(run, tmp_path, monkeypatch):
    store = changed_store(run, tmp_path, "gap")
    words = [f"checkpoint={run}", *TIMES, f"data.store={store}", f"out={tmp_path}/f.zarr"]
    line = refused(monkeypatch, *words)
    assert "2000-01-04T12" in line
    assert not (tmp_path / "f.zarr").exists()
    assert forecast_command(monkeypatch, "check", tmp_path / "f.zarr")[0] == 1


def test_what_is_needed(run, monkeypatch):
    table = {
        "init=2000-01-04 lead=6h": "^checkpoint: needs ",
        f"checkpoint={run} lead=6h": "^init: needs ",
        f"checkpoint={run} init=2000-01-04": "^lead: needs ",
        "--nothing": "--nothing",
    }
    assert_refused(table, "forecast")
    assert "lead=240h" in forecast_command(monkeypatch, "--help")[1]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line(run, tmp_path, monkeypatch):
    there = shutil.copytree(run / "checkpoint", tmp_path / "checkpoint")
    step = there / "step-00000002"
    words = [f"checkpoint={step}", *TIMES, f"out={tmp_path}/f.zarr"]
    text = (step / "state.json").read_text()
    (step / "state.json").write_text(text.replace('"config"', '"confib"'))
    assert "state.json is not as it was written" in refused(monkeypatch, *words)
    (step / "state.json").write_text(text)
    shard = next(step.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:200])
    assert f"is damaged: {shard.name} has 200 bytes, not the " in refused(monkeypatch, *words)
    assert not list(tmp_path.glob("f.zarr*.partial"))


def test_a_checkpoint_whose_config_is_of_a_far_larger_model_is_refused(run, tmp_path, monkeypatch):
    there = shutil.copytree(run / "checkpoint/step-00000002", tmp_path / "step-00000002")
    state = json.loads((there / "state.json").read_text())
    del state["checksum"]
    state["data"]["model"]["keys"]["blocks"] = 10**9
    config = OmegaConf.create(state["config"])
    config.model.blocks = 10**9
    state["config"] = OmegaConf.to_yaml(config)
    state["checksum"] = metadata_checksum(state)
    (there / "state.json").write_text(json.dumps(state))
    line = refused(monkeypatch, f"checkpoint={there}", *TIMES, f"out={tmp_path}/f.zarr")
    assert line.startswith(
        f"checkpoint: {there} has far fewer weights than the model of its config"
    )


def test_the_mesh_is_given_and_the_rest_is_the_runs(run):
    words = [f"checkpoint={run}", "init=2000-01-04", "lead=12h", "parallel.domain=2"]
    config = config_of(*words, "parallel.data=3", "device=cpu")
    assert (config.parallel.domain, config.parallel.data, config.data.batch_size) == (2, 3, 3)
    assert config.model.channels == [8, 16]
    assert config.trainer.dtype == "float64"
    assert config.request.out == str(run / "forecast.zarr")
    assert config.request.checkpoint == str(run / "checkpoint/step-00000002")


@pytest.mark.slow
def test_members_of_an_ensemble_need_no_perturbation(run, tmp_path, monkeypatch):
    ensemble = train_ensemble(tmp_path).run.dir
    words = ["init=2000-01-04", "lead=12h", "members=4"]
    config = config_of(f"checkpoint={ensemble}", *words)
    # The loss of other runs is left out; members are refused without theirs.
    assert (config.request.members, config.loss.name, config.trainer.members) == (4, "crps", 3)
    assert "Set perturb, too" in refused(monkeypatch, f"checkpoint={run}", *words)
    # They are spread like forecasts of several times, so that the members of a mesh would repeat.
    words = [f"checkpoint={ensemble}", *words, "parallel.ensemble=3"]
    assert "Use parallel.data instead" in refused(monkeypatch, *words)


def test_numbers_are_decimal() -> None:
    """In YAML 010 is 8."""
    keys, _ = split_arguments(["members=010", "perturb=1e-2", "perturb_seed=07"], "forecast")
    assert (keys["members"], keys["perturb"], keys["perturb_seed"]) == (10, 0.01, 7)

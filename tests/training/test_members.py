"""Runs on all members of an ensemble, from inspection to a forecast of one member.

`test_meshes.RUNS` compares one on a mesh with one process.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.data import ensemble_stores, stores
from tests.data.ensemble_stores import MEMBERS
from tests.tier_cases import every
from tests.training.command_runs import CommandRuns
from tests.training.runs import alone, built, make_config, train_on

DATA = ensemble_stores.dataset()
STEPS = 8  # 21 samples are five steps an epoch
KEYS = (
    "data=zarr", "data.prognostic=[2m_temperature,geopotential]", "data.static=[land_sea_mask]",
    "data.forcing=[day_of_year_sin]", "data.levels=[500]", "data.batch_size=4",
    "model.channels=[8,16]", "model.groups=4", "trainer.evaluate_hours=[6]",
    "trainer.evaluate_stride_hours=6", "trainer.dtype=float64", "device=cpu",
    "trainer.validate_every=4", "trainer.log_every=1",
    "data.dates.train=[2000-01-01,2000-01-02]", "data.dates.valid=[2000-01-03T00,2000-01-03T06]",
    "data.dates.test=[2000-01-03T06,2000-01-03T18]", f"trainer.steps={STEPS}",
)  # fmt: skip
CASES: dict[str, Callable[[Path], Path]] = {
    "zarr": lambda path: stores.write(DATA, path),  # all rows in a chunk: ranks share the reading
    "anemoi": lambda path: ensemble_stores.anemoi(DATA, path),
    "bands": lambda path: stores.write(
        DATA, path, chunks={"time": 1, "number": 1, "latitude": 1}
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=every(len(CASES), CASES, pytest.mark.exhaustive))
def trained(request, tmp_path_factory) -> CommandRuns:
    folder = tmp_path_factory.mktemp("members")
    made = CommandRuns(folder, CASES[request.param](folder / "store.zarr"), KEYS)
    made.train("run1")
    made.train("run2", "parallel.domain=2")
    return made


@pytest.mark.slow
def test_two_ranks_have_the_log_of_one(trained):
    assert len(trained.log("run1")) == STEPS
    for column in ("loss", "validation_rmse"):
        one = trained.log("run1", column)
        assert trained.log("run2", column) == pytest.approx(one, rel=1e-10)


@pytest.mark.slow
def test_scores_are_over_all_members(trained):
    scores = json.loads((trained.folder / "run1/metrics.json").read_text())
    # Two initial times of the test dates have a time six hours later.
    assert scores["initial_times"] == MEMBERS * 2
    fields = DATA["2m_temperature"].isel(time=slice(9, 12)).astype(float)
    square = (fields.isel(time=slice(1, 3)).values - fields.isel(time=slice(0, 2)).values) ** 2
    latitude = DATA["latitude"].values
    edges = np.array([90, *(latitude[1:] + latitude[:-1]) / 2, -90])
    weights = -np.diff(np.sin(np.deg2rad(edges)))
    wanted = np.sqrt(np.average(square.mean(axis=(0, 1, 3)), weights=weights))
    found = scores["rmse"]["2m_temperature"]["6h"]["persistence"]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_members_are_shown(trained):
    text = trained.command("credit-dp", "data", "inspect", f"store={trained.store}")
    assert "\n        3 members, 0 to 2\n" in text
    text = trained.command(*trained.training, "--check")
    assert "samples 21 for training, 5 steps of 4 in an epoch; 6 forecasts to 6 h" in text


@pytest.mark.slow
def test_one_member_is_a_store_of_one(tmp_path):
    data = ensemble_stores.dataset(steps=20)
    path = stores.write(data, tmp_path / "store.zarr")
    member = stores.write(ensemble_stores.member(data, 1), tmp_path / "member.zarr")
    config = make_config(path, tmp_path, steps=3)
    chosen = replace(config, data=replace(config.data, member=1))
    only = replace(config, data=replace(config.data, store=str(member)))
    found = [train_on(built(each, alone())) for each in (chosen, only, config)]
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_other_members_are_not_resumed(trained):
    words = ("resume=run1", "run.dir=fewer", "data.member=[0,1]")
    line = trained.refusal(*trained.training, *words)
    assert "was trained with data.member=[0,1,2], the config has [0,1]" in line


def forecast(trained: CommandRuns, name: str, *keys: str) -> xr.Dataset:
    words = ("checkpoint=run2", "init=2000-01-03T06", "lead=6h", f"out={name}.zarr", *keys)
    text = trained.command("credit-dp", "forecast", *words)
    said = "starts from member 0 of 3 members, 0 to 2; data.member=1 chooses another"
    assert (said in " ".join(text.split())) == (not keys)
    return trained.opened(name)


@pytest.mark.slow
def test_forecasts_start_from_a_member(trained):
    first = forecast(trained, "first")
    second = forecast(trained, "second", "data.member=1")
    alone = stores.write(ensemble_stores.member(DATA, 1), trained.folder / "second_alone.zarr")
    other = forecast(trained, "other", f"data.store={alone}")
    for name in ("2m_temperature", "geopotential"):
        np.testing.assert_array_equal(second[name], other[name])
        assert abs(first[name] - second[name]).max() > 0.01


@pytest.mark.slow
def test_a_state_of_members_is_refused(trained):
    DATA.isel(time=slice(9, 10)).to_netcdf(trained.folder / "state.nc")
    words = ("checkpoint=run2", "init_file=state.nc", "lead=6h", "out=state.zarr")
    line = trained.refusal("credit-dp", "forecast", *words)
    assert "init_file: " in line
    assert "state.nc has 3 members, 0 to 2. Select one" in line


@pytest.mark.slow
def test_a_truth_of_members_is_refused_and_one_is_prepared(trained):
    if not (trained.folder / "first.zarr").exists():
        forecast(trained, "first")
    words = ("forecast=first.zarr", f"truth={trained.store}", "out=scores")
    line = trained.refusal("credit-dp", "evaluate", *words)
    assert "has 3 members, 0 to 2, but the truth needs to be one. Write it, with" in line
    assert "`credit-dp data prepare` and data.member=0, or as with xarray's" in line
    prepare = (
        "credit-dp", "data", "prepare", f"store={trained.store}", "out=copy.zarr", *KEYS[:5],
    )  # fmt: skip
    expected = "has 3 members, 0 to 2, but a prepared store has one. Choose it with"
    assert expected in trained.refusal(*prepare)
    trained.command(*prepare, "data.member=2", "domains=[1]")
    trained.train("prepared", "data.name=prepared", "data.store=copy.zarr", "trainer.steps=2")
    trained.train("direct", "data.member=2", "trainer.steps=2")
    assert trained.log("prepared") == trained.log("direct")

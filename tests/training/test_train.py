"""A whole run: its files and output, and resuming it."""

import contextlib
import csv
import io
import json
import logging
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from omegaconf import OmegaConf

from credit_dp.config import Config, DatesConfig, VariableConfig
from credit_dp.data.dates import times_needed
from credit_dp.data.store import Store
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation import held_out
from credit_dp.evaluation.maps import FieldMap
from credit_dp.training import run as training_run
from credit_dp.training.checkpoint import find_checkpoint
from credit_dp.training.run import dates_of_checkpoint, resolve_dates, run
from credit_dp.training.run_folder import RunFolder
from tests.data import stores
from tests.plots import DRAW_PLOTS, failing_plots
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.runs import alone, built, make_config, make_store

FILES = {"checkpoint", "config.yaml", "metrics.csv", "metrics.json", "scores.csv"}
PLOTS = {"errors.png", "forecast.png", "loss.png", "rmse.png", "spectra.png"}
ASIDE = {"code.diff", "logs", "run.html", *PLOTS}


@pytest.fixture
def config(tmp_path):
    store = make_store(tmp_path, 12)
    return make_config(store, tmp_path / "run", steps=4, checkpoint_every=3, log_every=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train a run to its end once, and return its config and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    store = make_store(folder, 12)
    config = make_config(store, folder / "run", steps=4, checkpoint_every=3, log_every=2)
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setenv(DRAW_PLOTS, "1")
        assert run(config, RankInfo()) == 0
    return config, out.getvalue()


@pytest.fixture
def resumed(finished, tmp_path):
    """Return the config of a copy of the finished run that a test may resume and change."""
    config, _ = finished
    shutil.copytree(config.run.dir, tmp_path / "copy")
    return replace(config, run=replace(config.run, dir=str(tmp_path / "copy")), resume="auto")


def log_of(config: Config) -> list[dict[str, str]]:
    with (Path(config.run.dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_all_its_files_and_says_where(finished):
    config, said = finished
    folder = Path(config.run.dir)
    assert {path.name for path in folder.iterdir()} == FILES | ASIDE
    listed = said.partition(f"\nwritten to   {folder}\n")[2]
    names = re.findall(r"[\w-]+(?:\.\w+|/(?=,|$))", listed.partition("once more")[0], re.MULTILINE)
    files = {*FILES, *PLOTS, "code.diff", "checkpoint/", "run.html"} - {"checkpoint"}
    assert sorted(names) == sorted(files)
    assert said.endswith(f"once more    credit-dp train --again {folder}\n")
    assert said.count(str(folder)) == 4  # also where it begins, with its page
    assert "geopotential_500" in said
    assert "persis-" in said


def test_numbers_and_config_can_be_read_back(finished):
    config, _ = finished
    folder = Path(config.run.dir)
    scores = json.loads((folder / "metrics.json").read_text())
    assert set(scores["rmse"]["geopotential_500"]["12h"]) == {
        "model",
        "persistence",
        "climatology",
    }
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.trainer.steps == 4
    assert [row["step"] for row in log_of(config)] == ["1", "2", "3", "4"]
    checkpoint = json.loads((folder / "checkpoint/step-00000004/state.json").read_text())
    assert checkpoint["step"] == 4
    assert OmegaConf.create(checkpoint["config"]) == saved


@pytest.mark.slow
def test_auto_resumes_where_the_run_stopped(resumed, capsys):
    first = log_of(resumed)
    run(replace(resumed, trainer=replace(resumed.trainer, steps=6)), RankInfo())
    assert "resumed after step 4 from" in capsys.readouterr().out
    assert log_of(resumed)[:4] == first
    assert [row["step"] for row in log_of(resumed)] == ["1", "2", "3", "4", "6"]


def with_open_dates(config: Config, **dates: object) -> Config:
    return replace(config, data=replace(config.data, dates=DatesConfig(**dates)))


@pytest.mark.slow
def test_dates_that_are_chosen_stay_when_the_store_grows(config, caplog):
    data, path = stores.dataset(12, 16, 40), Path(config.data.store)
    shutil.rmtree(path)
    stores.write(data.isel(time=slice(0, 30)), path)
    config = with_open_dates(config, limit=20)
    caplog.set_level(logging.INFO)
    run(config, RankInfo())
    line = "data.dates: auto: train 2000-01-01T00 to 2000-01-05T18 (20 times), valid 2000-01-07"
    assert line in caplog.text
    folder = Path(config.run.dir)
    before = OmegaConf.load(folder / "config.yaml").data.dates
    assert before.test == ["2000-01-07T18", "2000-01-08T06"]
    shutil.rmtree(path)
    stores.write(data, path)
    longer = replace(config, resume="auto", trainer=replace(config.trainer, steps=5))
    caplog.clear()
    run(longer, RankInfo())
    assert "data.dates: auto" not in caplog.text
    assert OmegaConf.load(folder / "config.yaml").data.dates == before
    elsewhere = ["2000-01-09", "2000-01-09"]
    dates = replace(longer.data.dates, limit=None, test=elsewhere)
    changed = replace(longer, data=replace(longer.data, dates=dates))
    settled = resolve_dates(changed, RunFolder(folder), lambda title, share: None)
    assert settled == DatesConfig([*before.train], [*before.valid], elsewhere)


@pytest.mark.slow
def test_dates_that_are_given_with_a_limit_have_those_of_the_checkpoint(config):
    shutil.rmtree(config.data.store)
    stores.write(stores.dataset(12, 16, 40), Path(config.data.store))
    run(with_open_dates(config, limit=8), RankInfo())
    path = find_checkpoint("auto", RunFolder(Path(config.run.dir)).checkpoints)
    saved = dates_of_checkpoint(path, DatesConfig(limit=8)).train
    assert (
        dates_of_checkpoint(path, DatesConfig(["2000-01-01", "2000-01-05"], limit=8)).train == saved
    )
    for given in (["2000-01-02", "2000-01-05"], ["2000-01-01", "2000-01-01"]):
        with pytest.raises(UserError, match=r"^data\.dates\.train: the checkpoint has 2000-01-01"):
            dates_of_checkpoint(path, DatesConfig(given, limit=8))


def test_no_validation_on_the_dates_of_the_test(config, monkeypatch):
    """A run without validation may have dates for it that are those of the test."""
    last = ["2000-01-09", "2000-01-10"]
    saved = DatesConfig(["2000-01-01", "2000-01-08"], last, last)
    monkeypatch.setattr(training_run, "find_checkpoint", lambda *_: Path("checkpoint"))
    monkeypatch.setattr(training_run, "dates_of_checkpoint", lambda *_: saved)
    folder = RunFolder(Path(config.run.dir))
    without = replace(config, trainer=replace(config.trainer, validate_every=0))
    assert resolve_dates(without, folder, lambda title, share: None) == saved
    validating = replace(config, trainer=replace(config.trainer, validate_every=2))
    with pytest.raises(UserError, match=r"^trainer\.validate_every: .* valid are those of test"):
        resolve_dates(validating, folder, lambda title, share: None)


def dates_of_rank(manager: DomainParallelManager, configs: list[Config]) -> DatesConfig:
    config = configs[manager.rank]
    return resolve_dates(config, RunFolder(Path(config.run.dir)), lambda title, share: None)


@pytest.mark.slow
def test_ranks_have_the_dates_of_rank_0_while_the_store_grows(config, tmp_path):
    config = with_open_dates(config)
    configs = [config]
    for steps in (24, 30):
        store = str(make_store(tmp_path / str(steps), 12, steps=steps))
        configs.append(replace(config, data=replace(config.data, store=store)))
    first = Store.open(config.data, times_needed(config)).config.dates
    assert on_processes(3, dates_of_rank, configs) == [first] * 3


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files but the logs, which grow, and the page, which says when it was written."""
    files = (path for path in folder.rglob("*.*") if path.is_file() and path.name != "run.html")
    return {path: path.read_bytes() for path in files if path.parent.name != "logs"}


@pytest.mark.parametrize("steps", tiers([], [(4,)], [(2,)]))
def test_a_finished_run_is_only_evaluated_again(resumed, capsys, steps):
    before = contents(Path(resumed.run.dir))
    run(replace(resumed, trainer=replace(resumed.trainer, steps=steps)), RankInfo())
    assert contents(Path(resumed.run.dir)) == before
    said = capsys.readouterr().out
    assert f"nothing to train: the checkpoint is of step 4 and trainer.steps is {steps};" in said
    assert "persis-" in said


@pytest.mark.slow
def test_scores_that_are_not_finite_end_a_run(config, monkeypatch):
    """The checkpoint exists, and no file of scores."""
    scores = held_out.evaluate

    def diverged(*arguments):
        found = scores(*arguments)
        found.rmse[0] = np.nan
        return found

    monkeypatch.setattr(training_run, "evaluate", diverged)
    with pytest.raises(UserError, match="geopotential_500: the RMSE of the model at 6 h is nan"):
        run(config, RankInfo())
    left = {path.name for path in Path(config.run.dir).iterdir()}
    assert "checkpoint" in left
    assert "metrics.json" not in left


@pytest.mark.slow
def test_a_field_that_never_changes_is_warned_of(config, capsys):
    """Its climatology is exact, which is more likely a mistake than a fact."""
    data = xr.open_zarr(config.data.store, consolidated=False).load()
    data["rain"] = data["solar"] * 0
    data.to_zarr(f"{config.data.store}-rain.zarr", consolidated=False)
    normalise = {"rain": VariableConfig(normalise="none")}
    changed = {"store": f"{config.data.store}-rain.zarr", "diagnostic": ["rain"]}
    run(replace(config, data=replace(config.data, variables=normalise, **changed)), RankInfo())
    assert "warning      rain: the RMSE of persistence is exactly 0 at" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plot_that_fails_costs_nothing_else(config, capsys, caplog, monkeypatch):
    def fail(field: FieldMap, path: Path) -> None:
        raise ValueError("no plot\nwith a second line")

    monkeypatch.setenv(DRAW_PLOTS, "1")
    monkeypatch.setattr("credit_dp.evaluation.map_plots.draw_map", fail)
    folder = Path(config.run.dir)
    with failing_plots(), caplog.at_level(logging.INFO):
        assert run(config, RankInfo()) == 0
    assert json.loads((folder / "metrics.json").read_text())["rmse"]
    assert {path.name for path in folder.glob("*.png")} == PLOTS - {"forecast.png"}
    message = "forecast.png: not drawn, all else is written (no plot)"
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == [message]
    shown = capsys.readouterr().out
    assert "persis-" in shown
    assert "forecast.png" not in shown
    assert "ValueError: no plot" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.exhaustive
def test_plots_that_can_not_be_imported_end_no_run(config, caplog, monkeypatch):
    monkeypatch.setenv(DRAW_PLOTS, "1")
    monkeypatch.setitem(sys.modules, "credit_dp.evaluation.score_plots", None)
    with failing_plots(), caplog.at_level(logging.WARNING):
        assert run(config, RankInfo()) == 0
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["plots"]


@pytest.mark.parametrize(
    ("variable", "time"),
    tiers(
        fast=[("solar", "2000-01-05T06")],
        slow=(),
        exhaustive=[
            ("temperature", "2000-01-04T00"),
            ("temperature", "2000-01-05T06"),
            ("solar", "2000-01-04T00"),
        ],
    ),
)
def test_a_gap_in_the_held_out_dates_is_refused_before_training(config, variable, time):
    path = str(config.data.store)
    data = xr.open_zarr(path, chunks=None, consolidated=False).load()
    data[variable].loc[{"time": time}] = np.nan
    data[[variable]].to_zarr(path, mode="r+", consolidated=False)
    with pytest.raises(UserError, match=rf"{variable}.* has no value at all at {time}"):
        run(config, RankInfo())
    assert not Path(config.run.dir).exists()


def whole_run(manager: DomainParallelManager, config: Config) -> int:
    parallel = replace(config.parallel, domain=manager.domain_world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DRAW_PLOTS, "1")
        return run(
            replace(config, parallel=parallel),
            RankInfo(manager.rank, manager.world_size, manager.rank, manager.world_size),
        )


@pytest.mark.slow
def test_any_mesh_leaves_the_same_numbers(finished):
    config, _ = finished
    scores = json.loads((Path(config.run.dir) / "metrics.json").read_text())
    shared = replace(config, run=replace(config.run, dir=config.run.dir + "-shared"))
    assert on_processes(4, whole_run, shared, domain=2) == [0] * 4
    assert {path.name for path in Path(shared.run.dir).iterdir()} == FILES | ASIDE
    found = json.loads((Path(shared.run.dir) / "metrics.json").read_text())
    for channel, leads in scores["rmse"].items():
        for lead, sources in leads.items():
            assert found["rmse"][channel][lead] == pytest.approx(sources, rel=1e-9)


def test_gradients_are_clipped_by_their_global_norm(config):
    clipped = replace(config, trainer=replace(config.trainer, gradient_clip=1e-3))
    trainer = built(clipped, alone()).trainer
    batch = next(iter(built(config, alone()).loader))
    norm = trainer.train_step(batch).grad_norm
    grads = [p.grad.norm() for p in trainer.state.parameters.values() if p.grad is not None]
    assert norm > 1e-2
    assert torch.stack(grads).norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.slow
def test_a_long_run_validates_by_itself_and_trains_as_without(config):
    """The number of steps between validations is in its config, those of a shorter run are none."""
    found = []
    for name, every in (("itself", None), ("never", 0)):
        trainer = replace(config.trainer, steps=20, log_every=10, validate_every=every)
        folder = f"{config.run.dir}-{name}"
        changed = replace(config, trainer=trainer, run=replace(config.run, dir=folder))
        assert run(changed, RankInfo()) == 0
        rows = log_of(changed)
        saved = OmegaConf.load(Path(folder) / "config.yaml")
        validated = [row["step"] for row in rows if row.get("validation_rmse")]
        found.append((saved.trainer.validate_every, validated))
        found.append([(row["step"], row["loss"], row["grad_norm"]) for row in rows])
    assert found[0] == (20, ["20"])
    assert found[2] == (0, [])
    assert found[1] == found[3]

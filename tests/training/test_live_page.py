"""The page of a run: what it shows while the run trains, how it ends, and what it may cost."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.config import Config, StandardLossConfig
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import prepare_training_data
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.maps import FieldMap, MapGrid
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.training import live_page
from credit_dp.training.live_page import (
    LivePage,
    PageWriter,
    code_text,
    draw_chart,
    linear_ticks,
    persistence_loss,
    ticks_of_decades,
)
from credit_dp.training.loggers import Tracker
from credit_dp.training.loss import build_loss
from credit_dp.training.monitoring import Validation
from credit_dp.training.run import run
from credit_dp.training.run_folder import RunFolder
from credit_dp.training.trainer import Trainer
from tests.evaluation.links import assert_whole
from tests.ranks import on_processes
from tests.training.log_messages import captured_warnings
from tests.training.runs import alone, built, make_config, make_store

PNG = b"\x89PNG"
REFRESH = '<meta http-equiv="refresh"'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "store", tmp_path / "run", steps=40)


@pytest.fixture
def writer(config: Config, monkeypatch: pytest.MonkeyPatch) -> PageWriter:
    """A writer that writes at every step, and draws nothing but a name for a map."""
    monkeypatch.setattr(live_page, "WRITE_SECONDS", 0.0)

    def draw(field: FieldMap, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)

    monkeypatch.setattr(PageWriter, "draw_map", staticmethod(draw))
    return PageWriter(RunFolder(Path(config.run.dir)), config, 0)


def field() -> FieldMap:
    globe = np.zeros((2, 4))
    grid = MapGrid(Grid(np.array([45.0, -45.0]), np.arange(4) * 90.0), "")
    return FieldMap("24 h", "K", globe, globe, grid, (0, 2), Channel("x"))


def page_of(config: Config) -> str:
    return (Path(config.run.dir) / "run.html").read_text()


def state_of(config: Config) -> str:
    found = re.search(r'class="state">(\w+)<', page_of(config))
    assert found is not None
    return found[1]


def test_the_page_shows_the_last_numbers_and_reloads_until_the_end(
    writer: PageWriter, config: Config
) -> None:
    writer.start()
    assert "No step has been logged yet" in page_of(config)
    for step in (1, 10, 20):
        writer.log(step, {"loss": 2.0 / step, "lr": 1e-3})
    writer.log(30, {"loss": 0.05, "validation_rmse": 0.25})
    page = page_of(config)
    assert "30 of 40" in page
    assert "0.05 (step 30)" in page
    assert "0.25 (step 30)" in page
    assert "training loss: 2 at step 1, 0.05 at step 30" in page
    assert page.count("<svg") == 2
    assert (state_of(config), REFRESH in page) == ("running", True)
    writer.show_scoring()
    assert (state_of(config), REFRESH in page_of(config)) == ("scoring", True)
    writer.summarise({})
    writer.close(failed=False)
    assert (state_of(config), REFRESH in page_of(config)) == ("finished", False)
    assert_whole(page_of(config) + '<a href="#training"></a>')


def test_the_page_says_how_a_run_has_ended(writer: PageWriter, config: Config) -> None:
    for scored, failed, state in (
        (False, False, "stopped"),
        (False, True, "failed"),
        (True, True, "failed"),
    ):
        writer.scored = scored
        writer.close(failed)
        assert (state_of(config), REFRESH in page_of(config)) == (state, False)


def test_the_report_has_scores_and_the_plots_that_there_are(
    writer: PageWriter, config: Config
) -> None:
    writer.start()
    folder = Path(config.run.dir)
    (folder / "rmse.png").write_bytes(PNG)
    rmse = np.array([2.0, 4.0, 1.0])[:, None, None].repeat(2, axis=1)
    writer.report(HeldOutScores(("z_500",), ("m",), (6, 12), {"rmse": rmse}, 3))
    page = page_of(config)
    assert page.count("\N{MINUS SIGN}50</td>") == 2  # of persistence, at two lead times
    assert page.count("+100</td>") == 2  # of climatology
    assert page.count("<img") == 1
    assert "Errors by lead time" in page
    assert state_of(config) == "finished"


def test_a_resumed_run_shows_what_was_before_its_checkpoint(
    writer: PageWriter, config: Config
) -> None:
    writer.folder.path.mkdir()
    writer.folder.maps.mkdir()
    writer.folder.log.write_text("step,loss,validation_rmse\n1,4.0,\n10,2.0,0.5\n20,1.0,0.4\n")
    for step in (10, 20):
        (writer.folder.maps / f"step-{step:08d}.png").write_bytes(PNG)
    resumed = PageWriter(writer.folder, config, 10)
    resumed.start()
    assert resumed.curves["loss"] == [(1, 4.0), (10, 2.0)]
    assert resumed.curves["validation_rmse"] == [(10, 0.5)]
    assert [step for step, _ in resumed.maps] == [10]
    assert "10 of 40" in page_of(config)
    writer.start()  # a new run in the same folder
    assert (writer.maps, writer.curves["loss"]) == ([], [])


def test_maps_are_drawn_for_a_small_share_of_the_time_and_the_newest_is_shown(
    writer: PageWriter, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(live_page.time, "monotonic", lambda: now[0])
    draw = writer.draw_map

    def slowly(field: FieldMap, path: Path) -> None:
        now[0] += 2.0
        draw(field, path)

    monkeypatch.setattr(writer, "draw_map", slowly)
    drawn = []
    for step in range(1, 400):
        before = now[0]
        writer.show_map(step, field())
        drawn += [step] if now[0] > before else []
        now[0] += 1.0
    assert 0.045 < 2.0 * len(drawn) / (now[0] - 100.0) < 0.06
    assert [step for step, _ in writer.maps] == drawn
    files = sorted(path.name for path in (Path(config.run.dir) / "maps").iterdir())
    assert files == [f"step-{step:08d}.png" for step in drawn]
    page = page_of(config)
    assert page.count("<img") == 1
    assert re.findall(r'href="maps/step-0*(\d+).png"', page) == [str(s) for s in drawn[-2::-1]]


def test_the_map_of_the_last_validation_is_drawn_at_the_end(
    writer: PageWriter, config: Config
) -> None:
    """Three validations follow each other faster than maps may be drawn."""
    for step in (10, 20, 30):
        writer.show_map(step, field())
    assert "after 10 of 40 steps" in page_of(config)
    for _ in range(2):  # the second time nothing is left to draw
        writer.show_scoring()
        assert [step for step, _ in writer.maps] == [10, 30]
    assert "after 30 of 40 steps" in page_of(config)
    assert state_of(config) == "scoring"


def test_the_page_says_from_which_code_a_run_is() -> None:
    versions = {"torch": "2.13", "commit": "549127bb" * 5, "changed": "no"}
    assert code_text(versions) == "torch 2.13, commit 549127bb"
    changed = code_text({**versions, "changed": "yes"})
    assert changed == "torch 2.13, commit 549127bb, with uncommitted changes"
    assert code_text({"torch": "2.13"}) == "torch 2.13"


def test_the_page_is_written_after_some_seconds_not_at_every_step(
    writer: PageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [0.0], []
    monkeypatch.setattr(live_page, "WRITE_SECONDS", 5.0)
    monkeypatch.setattr(live_page.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live_page, "write_text_atomic", lambda *_: written.append(now[0]))
    for step in range(100):
        now[0] = step / 2
        writer.log(step, {"loss": 1.0})
    assert np.diff(written).tolist() == [5.0] * (len(written) - 1)
    assert len(written) == 10


def test_a_page_that_can_not_be_written_costs_one_warning(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live_page, "write_text_atomic", full)
    with captured_warnings() as warnings, Tracker([]) as tracker:
        page = LivePage(RunFolder(Path(config.run.dir)), config, 0)
        tracker.sinks.append(page.sink)
        for step in range(5):
            tracker.log(step, {"loss": 1.0})
            page.show_map(step, field())
    assert [line.split(":")[0] for line in warnings] == ["run.html"]


def test_a_page_that_hangs_holds_the_end_of_a_run_for_seconds_only(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    monkeypatch.setattr(live_page, "write_text_atomic", lambda *_: free.wait())
    monkeypatch.setattr(live_page, "CLOSE_SECONDS", 0.1)
    with captured_warnings() as warnings:
        with Tracker([LivePage(RunFolder(Path(config.run.dir)), config, 0).sink]):
            pass
    assert warnings == ["run.html: given up, as it is not done after 0.1 s."]
    free.set()


def test_charts_are_logarithmic_and_have_a_line_at_the_loss_of_persistence() -> None:
    chart = draw_chart("loss", [(0, 1.0), (50, 0.1), (100, 0.01), (150, float("nan"))], 1.0)
    assert chart is not None
    (x0, y0), (x1, y1), (x2, y2) = chart.marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert chart.reference == y0
    assert [label for _, label in chart.across] == ["0", "20", "40", "60", "80", "100"]
    assert {"1", "0.1", "0.01"} <= {label for _, label in chart.up}
    assert draw_chart("loss", [(1, float("nan")), (2, 0.0)]) is None
    start = draw_chart("loss", [(1, 1.0), (2, 0.9)])
    assert start is not None
    assert [label for _, label in start.across] == ["1", "2"]  # there is no step between
    many = draw_chart("loss", [(step, 1.0 + step) for step in range(10_000)])
    assert many is not None
    assert len(many.points.split()) <= 501
    assert many.summary.endswith("1e+04 at step 9999")


def test_ticks_are_round_and_within_the_axis() -> None:
    for first, last in ((0, 1), (1, 450), (0, 7), (99_000, 100_000)):
        ticks = linear_ticks(first, last)
        assert 3 <= len(ticks) <= 7, (first, last)
        assert first <= ticks[0] <= ticks[-1] <= last
    for low, high in ((0.04, 1.1), (1e-6, 1e3), (0.31, 0.35), (0.9, 1.1)):
        ticks = ticks_of_decades(low, high)
        assert 2 <= len(ticks) <= 7, (low, high)
        assert low <= ticks[0] <= ticks[-1] <= high


def test_the_loss_of_persistence_is_drawn_only_where_it_is_one(tmp_path: Path) -> None:
    known = make_config(tmp_path, tmp_path)
    assert persistence_loss(known) == 1.0
    for part, changes in (
        ("loss", {"name": "mae"}),
        ("loss", {"tendency": False}),
        ("loss", {"latitude_weight": False}),
        ("loss", {"spectrum": 0.1}),
        ("loss", {"variable_error": {"temperature": "mae"}}),
        ("trainer", {"rollout": {0: 1, 5: 2}}),
        ("trainer", {"one_batch": True}),
        ("data", {"diagnostic": ["rain"]}),
        ("data", {"statistics": ["other.nc"]}),
    ):
        changed = replace(getattr(known, part), **changes)
        assert persistence_loss(replace(known, **{part: changed})) is None, changes


def test_persistence_has_a_loss_of_one_on_the_training_dates(tmp_path: Path) -> None:
    config = make_config(make_store(tmp_path, 12), tmp_path / "run")
    config = replace(config, loss=StandardLossConfig())
    assert persistence_loss(config) == 1.0
    prepared = prepare_training_data(config.data)
    store = prepared.store
    normaliser = Normaliser.of(prepared, torch.float64, torch.device("cpu"))
    loss = build_loss(
        config.loss, store.channels, store.grid, slice(None), normaliser.tendency_scale
    )
    times = np.arange(np.datetime64("2000-01-01T00"), np.datetime64("2000-01-03T19"), 6)
    states = normaliser.normalise_outputs(store.read_outputs(times, slice(None)))
    assert len(states) > 10
    assert float(loss(states[:-1], states[1:])) == pytest.approx(1.0, abs=0.02)


def validated_map(manager: DomainParallelManager, config: Config) -> FieldMap:
    """Return the map of a validation of untrained weights."""
    parallel = replace(config.parallel, domain=manager.domain_world_size)
    config = replace(config, parallel=parallel)
    training = built(config, manager)
    training.loader.close()
    validation = Validation(config, prepare_training_data(config.data), training, manager)
    validation()
    assert validation.map is not None
    return validation.map


@pytest.mark.slow
def test_the_map_of_a_validation_is_that_of_its_first_forecast_on_any_mesh(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path, 12)
    config = make_config(store, tmp_path / "run", validate_every=1)
    alone_map = validated_map(alone(), config)
    training = built(config, alone())
    training.loader.close()
    validation = Validation(config, prepare_training_data(config.data), training, alone())
    (dates,) = validation.dates.values()
    index = [c.name for c in dates.prepared.store.channels.output_channels].index(
        "geopotential_500"
    )
    truth = dates.prepared.store.read_outputs(
        dates.initial_times[:1] + np.timedelta64(6, "h"), slice(None)
    )
    assert alone_map.truth == pytest.approx(truth[0, index], rel=1e-5)
    assert "6 h forecast" in alone_map.title
    for found in on_processes(2, validated_map, config):
        assert found.forecast == pytest.approx(alone_map.forecast, rel=1e-9)
        assert found.truth == pytest.approx(alone_map.truth, rel=1e-9)


@pytest.mark.slow
def test_a_run_writes_its_page_and_one_that_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", steps=3, validate_every=2)
    assert run(config, RankInfo()) == 0
    assert state_of(config) == "finished"
    page = page_of(config)
    assert "3 of 3" in page
    assert "model against persistence" in page
    assert page.count("<svg") == 2

    def fail(*_: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(Trainer, "train_step", fail)
    failing = replace(config, run=replace(config.run, dir=str(tmp_path / "failing")))
    with pytest.raises(RuntimeError, match="no step"):
        run(failing, RankInfo())
    assert state_of(failing) == "failed"

"""A tracker that fails, whenever and however, is one warning: training goes on."""

import contextlib
import sys
import threading
from itertools import product
from types import SimpleNamespace

import pytest

from credit_dp.config import LoggerConfig
from credit_dp.errors import UserError
from credit_dp.training import loggers
from credit_dp.training.loggers import BackgroundSink, Tracker, open_tracker
from tests.full_disk import full_disk
from tests.training.log_messages import captured_warnings

MOMENTS = ("init", "log", "summary", "finish")


class FailingWandb:
    """Stands for the part of wandb that is used, and fails at one moment."""

    class Settings:
        init_timeout: float

        def __init__(self, **_):
            pass

    def __init__(self, moment):
        self.moment, self.calls = moment, []

    def do(self, moment):
        self.calls.append(moment)
        if moment == self.moment:
            raise ConnectionError("no network\nand much more")

    def login(self, **_):
        self.do("login")
        return True

    def init(self, **_):
        self.do("init")
        summary = SimpleNamespace(update=lambda _: self.do("summary"))
        return SimpleNamespace(
            log=lambda *_, **__: self.do("log"), summary=summary, finish=self.finish
        )

    def finish(self, exit_code):
        self.exit_code = exit_code
        self.do("finish")


def three_steps(config, folder):
    """Return the warnings of a run of three steps, and the rows of its log."""
    with captured_warnings() as warnings:
        with open_tracker(config, folder / "metrics.csv", 0, {}, rank=0) as tracker:
            for step in (1, 2, 3):
                tracker.log(step, {"loss": 1.0})
            tracker.summarise({"rmse": 1.0})
    return warnings, (folder / "metrics.csv").read_text().splitlines()[1:]


def test_wandb_that_raises_is_left_out_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode, moment in product(("offline", "online"), MOMENTS):
        wandb = FailingWandb(moment)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        (tmp_path / mode / moment).mkdir(parents=True)
        warnings, rows = three_steps(LoggerConfig(wandb=mode), tmp_path / mode / moment)
        assert len(rows) == 3, (mode, moment)
        assert warnings == [
            "Weights & Biases: disabled for the rest of the run (ConnectionError: no network). "
            "Training continues."
        ], (mode, moment)
        if moment == "log":
            assert wandb.calls.count("log") == 1
        assert moment == "init" or wandb.calls[-1] == "finish"


def test_a_login_that_raises_leaves_it_to_the_start(tmp_path, monkeypatch):
    wandb = FailingWandb("login")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert three_steps(LoggerConfig(wandb="online"), tmp_path)[0] == []
    assert wandb.calls.count("log") == 3


def test_tensorboard_that_raises_is_left_out_with_one_warning(tmp_path, monkeypatch):
    from torch.utils import tensorboard

    real = tensorboard.SummaryWriter

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    def close(writer):
        real.close(writer)
        fail()

    for moment in ("__init__", "add_scalar", "close"):
        failing = type("Failing", (real,), {moment: close if moment == "close" else fail})
        monkeypatch.setattr(tensorboard, "SummaryWriter", failing)
        (tmp_path / moment).mkdir()
        warnings, rows = three_steps(LoggerConfig(trackers=["tensorboard"]), tmp_path / moment)
        assert len(rows) == 3, moment
        [line] = warnings
        said = "TensorBoard: disabled for the rest of the run (OSError: [Errno 28]"
        assert line.startswith(said), moment


def test_one_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", FailingWandb("log"))
    config = LoggerConfig(trackers=["wandb", "tensorboard"])
    warnings, rows = three_steps(config, tmp_path)
    assert len(rows) == 3
    assert len(warnings) == 1
    assert list((tmp_path / "tensorboard").iterdir())


class Hanging:
    """A tracker that blocks until it is released."""

    def __init__(self):
        self.go, self.steps = threading.Event(), []

    def log(self, step, metrics):
        self.go.wait()
        self.steps.append(step)
        raise TimeoutError("too late")

    def summarise(self, metrics):
        pass

    def close(self, failed):
        pass


def test_one_that_hangs_is_not_waited_for():
    sink = Hanging()
    with captured_warnings() as warnings:
        background = BackgroundSink("Slow", lambda: sink, timeout=0.01)
        for step in range(100):
            background.log(step, {})
        background.close(failed=False)
        assert sink.steps == []
        assert warnings == ["Slow: given up, as it is not done after 0.01 s."]
        sink.go.set()
        background.thread.join()
    assert sink.steps == [0]
    assert len(warnings) == 1  # although it raises as well


def test_an_interrupt_waits_for_a_shorter_while_for_all_together(monkeypatch):
    monkeypatch.setattr("credit_dp.training.loggers.INTERRUPT_TIMEOUT", 0.01)
    slow = [Hanging(), Hanging()]
    sinks = [BackgroundSink("Slow", lambda sink=sink: sink) for sink in slow]
    for sink in sinks:
        sink.log(1, {})
    with captured_warnings() as warnings:
        Tracker(sinks).__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sinks[0].timeout <= 0.01 >= sinks[1].timeout
    assert [line[:15] for line in warnings] == ["Slow: given up,"] * 2
    for sink in slow:
        sink.go.set()


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, UserError("full"), KeyboardInterrupt()])
def test_trackers_learn_that_a_run_has_failed(tmp_path, monkeypatch, error):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = FailingWandb("never")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = LoggerConfig(wandb="offline", trackers=["wandb", "mlflow"])
    raised = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with raised, open_tracker(config, tmp_path / "metrics.csv", 0, {}, rank=0) as tracker:
        tracker.log(1, {"loss": 1.0})
        if error is not None:
            raise error
    for sink in tracker.sinks[1:]:
        sink.thread.join()
    client = loggers.import_mlflow()[0](tracking_uri=(tmp_path / "mlflow").as_uri())
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.status == ("FINISHED" if error is None else "FAILED")
    assert wandb.exit_code == (error is not None)


def test_a_full_disk_loses_rows_and_nothing_else(tmp_path):
    log = tmp_path / "metrics.csv"
    off = LoggerConfig(trackers=[])
    with captured_warnings() as warnings, open_tracker(off, log, 0, {}, rank=0) as tracker:
        with full_disk(100):
            for step in range(100, 200):
                tracker.log(step, {"loss": 1.0})
        tracker.log(200, {"loss": 2.0})
        tracker.log(201, {"loss": 2.0, "new": 3.0})
    header, *rows = [line.split(",") for line in log.read_text().splitlines()]
    steps = [int(row[0]) for row in rows]
    assert {len(row) for row in rows} == {len(header)}
    assert steps == [*range(100, 100 + len(steps) - 2), 200, 201]
    first, last = warnings
    assert "could not be written (File too large)" in first
    assert first.endswith(f"Training continues; step {100 + len(steps) - 2} is not in the log.")
    assert last == f"{log}: {100 - (len(steps) - 2)} rows could not be written."


def test_a_folder_that_cannot_be_created_is_tried_again(tmp_path):
    blocked = tmp_path / "run"
    blocked.write_text("")
    log = blocked / "metrics.csv"
    off = LoggerConfig(trackers=[])
    with captured_warnings() as warnings, open_tracker(off, log, 0, {}, rank=0) as tracker:
        tracker.log(1, {"loss": 1.0})
        blocked.unlink()
        tracker.log(2, {"loss": 2.0})
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["step", "2"]
    assert len(warnings) == 3
    assert all("\n" not in line for line in warnings)


@pytest.mark.slow
def test_real_trackers_without_a_place_to_write(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("wandb", "tensorboard"):
        (tmp_path / name).write_text("")  # where a folder has to be
    config = LoggerConfig(trackers=["wandb", "tensorboard"])
    warnings, rows = three_steps(config, tmp_path)
    assert len(rows) == 3
    assert sorted(line.split(":")[0] for line in warnings) == ["TensorBoard", "Weights & Biases"]

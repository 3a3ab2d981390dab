"""The log has one row per logged step, however often a run is resumed."""

import os
import sys

import pytest

from credit_dp.config import LoggerConfig
from credit_dp.errors import UserError
from credit_dp.training import loggers
from credit_dp.training.loggers import load_or_create_run_id, open_tracker
from tests.training.log_messages import captured_warnings
from tests.training.refusals import refusal

OFF = LoggerConfig(wandb="disabled")


def rows(path):
    return [line.split(",") for line in path.read_text().splitlines()]


def test_rows_are_on_disk_at_once_and_a_fresh_run_begins_a_new_log(tmp_path):
    log = tmp_path / "run" / "metrics.csv"
    for _ in range(2):
        with open_tracker(OFF, log, 0, {}, rank=0) as tracker:
            tracker.log(10, {"loss": 0.1 + 0.2, "lr": 1e-3, "grad_norm": 1.0, "seconds": 0.5})
            assert rows(log) == [
                ["step", "loss", "lr", "grad_norm", "seconds"],
                ["10", "0.30000000000000004", "0.001", "1.0", "0.5"],
            ]


def test_a_resumed_run_drops_the_rows_that_it_takes_again(tmp_path):
    log = tmp_path / "metrics.csv"
    with open_tracker(OFF, log, 0, {}, rank=0) as tracker:
        for step in (5, 10, 15):
            tracker.log(step, {"loss": float(step)})
    log.write_text(log.read_text() + "20,0.")  # cut off by a crash
    with open_tracker(OFF, log, 10, {}, rank=0) as tracker:
        tracker.log(15, {"loss": -15.0})
    assert [row[:2] for row in rows(log)[1:]] == [["5", "5.0"], ["10", "10.0"], ["15", "-15.0"]]


def test_numbers_with_new_names_become_columns(tmp_path):
    log = tmp_path / "metrics.csv"
    with open_tracker(OFF, log, 0, {}, rank=0) as tracker:
        tracker.log(1, {"loss": 1.0, "loss/+6h": 1.5})
        tracker.log(2, {"loss": 2.0, "loss/+6h": 2.5, "loss/+12h": 3.5})
        tracker.log(3, {"loss/+12h": 4.5})
    assert rows(log) == [
        ["step", "loss", "lr", "grad_norm", "seconds", "loss/+6h", "loss/+12h"],
        ["1", "1.0", "", "", "", "1.5", ""],
        ["2", "2.0", "", "", "", "2.5", "3.5"],
        ["3", "", "", "", "", "", "4.5"],
    ]


def test_a_resumed_run_keeps_the_columns_that_it_does_not_know(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,loss,lr,grad_norm,seconds,old\n1,1.0,,,,5.0\n2,2.0,,,,6.0\n3,3.0,,,,7.")
    with open_tracker(OFF, log, 1, {}, rank=0) as tracker:
        tracker.log(2, {"loss": -2.0, "new": 8.0})
    assert rows(log) == [
        ["step", "loss", "lr", "grad_norm", "seconds", "old", "new"],
        ["1", "1.0", "", "", "", "5.0", ""],
        ["2", "-2.0", "", "", "", "", "8.0"],
    ]


def test_a_file_that_is_no_log_is_replaced(tmp_path):
    log = tmp_path / "metrics.csv"
    for text in ("", "\n", "nothing,like,it\n1,2,3\n", "step\x00\xff"):
        log.write_bytes(text.encode("latin1"))
        with open_tracker(OFF, log, 5, {}, rank=0) as tracker:
            tracker.log(6, {"loss": 1.0})
        assert [row[0] for row in rows(log)] == ["step", "6"], text


def test_other_ranks_write_nothing(tmp_path):
    with open_tracker(LoggerConfig(), tmp_path / "metrics.csv", 0, {}, rank=1) as tracker:
        tracker.log(1, {"loss": 1.0})
        tracker.summarise({"rmse": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_wandb_settings(tmp_path, monkeypatch):
    """The environment of somebody who has never used wandb."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.slow
def test_offline_needs_no_account_and_resumes_under_its_id(
    tmp_path, monkeypatch, no_wandb_settings
):
    monkeypatch.setenv("WANDB_SILENT", "")  # crashes wandb as it is
    monkeypatch.setattr(loggers, "CLOSE_TIMEOUT", 100.0)  # of a busy machine
    log = tmp_path / "run" / "metrics.csv"
    with captured_warnings() as warnings:
        for step in (0, 1):
            with open_tracker(LoggerConfig(), log, step, {"seed": 1}, rank=0) as tracker:
                tracker.log(step + 1, {"loss": 1.0})
                tracker.summarise({"rmse": 2.0})
    assert warnings == []
    own = (log.parent / "wandb" / "id").read_text().strip()
    assert own
    files = list((log.parent / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{own}.wandb"] * 2


def test_a_fresh_run_has_an_id_of_its_own(tmp_path):
    path = tmp_path / "wandb" / "id"
    first = load_or_create_run_id(path, 0)
    assert load_or_create_run_id(path, 3) == first
    assert load_or_create_run_id(path, 0) != first


@pytest.mark.slow
def test_online_without_a_key_is_one_line_and_no_question(tmp_path, no_wandb_settings):
    with pytest.raises(UserError, match=r"logger\.wandb: online needs an API key"):
        open_tracker(LoggerConfig(wandb="online"), tmp_path / "metrics.csv", 0, {}, rank=0)


def test_files_for_tensorboard_leave_out_the_steps_that_are_taken_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = tmp_path / "metrics.csv"
    config = LoggerConfig(trackers=["tensorboard"])
    with captured_warnings() as warnings:
        for resumed in (0, 2):
            with open_tracker(config, log, resumed, {}, rank=0) as tracker:
                for step in range(resumed + 1, resumed + 4):
                    tracker.log(step, {"loss": step + resumed / 10})
                tracker.summarise({"rmse": 0.5})
    assert warnings == []
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(event.step, round(event.value, 6)) for event in found.Scalars("loss")]
    assert values == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2)]
    assert [(event.step, event.value) for event in found.Scalars("rmse")] == [(5, 0.5)]


@pytest.mark.slow
def test_mlflow_writes_files_and_a_resumed_run_continues_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "CLOSE_TIMEOUT", 100.0)  # of a busy machine
    log = tmp_path / "run" / "metrics.csv"
    config = LoggerConfig(trackers=["mlflow"], project="climate")
    keys = {"model": {"name": "unet", "channels": [8, 16]}, "seed": 1, "loss": {}}
    with captured_warnings() as warnings:
        for resumed in (0, 2):
            with open_tracker(config, log, resumed, keys, rank=0) as tracker:
                for step in range(resumed + 1, resumed + 3):
                    tracker.log(step, {"loss": step + resumed / 10, "loss/+6h": 0.25})
                tracker.summarise({f"rmse/{number}": 0.5 for number in range(1200)})
    assert warnings == []
    client = loggers.import_mlflow()[0](tracking_uri=(log.parent / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("climate").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {
        "model.name": "unet", "model.channels": "[8, 16]", "seed": "1", "loss": "{}"
    }  # fmt: skip
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)]
    assert run.data.metrics["loss.6h"] == 0.25
    assert loggers.mlflow_name("\u03b2") == "_"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "rmse.1199")] == [2, 4]


@pytest.mark.slow
def test_an_experiment_that_another_run_has_just_made_is_used(tmp_path, monkeypatch):
    """Runs of a sweep start together: both find none, and one of them makes it."""
    client_type = loggers.import_mlflow()[0]
    address = str(tmp_path / "shared")
    loggers.MlflowLog(address, "climate", tmp_path, 0, {})
    find, found = client_type.get_experiment_by_name, []

    def find_late(client: object, name: str) -> object:
        found.append(name)
        return None if len(found) == 1 else find(client, name)

    monkeypatch.setattr(client_type, "get_experiment_by_name", find_late)
    log = loggers.MlflowLog(address, "climate", tmp_path, 0, {})
    assert found == ["climate"] * 2
    experiments = log.client.search_experiments(filter_string="name = 'climate'")
    assert len(experiments) == 1


@pytest.mark.slow
def test_jobs_of_a_sweep_are_nested_in_mlflow(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "CLOSE_TIMEOUT", 100.0)
    shared, sweep = tmp_path / "shared files", tmp_path / "lr-sweep"
    config = LoggerConfig(trackers=["mlflow"], mlflow=str(shared))
    for name, step in (("a", 0), ("b", 0), ("b", 1)):  # the last one resumes
        folder = sweep / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text("{}")
        (folder / "config.yaml").write_text(f"name: {name}\n")
        with open_tracker(config, folder / "metrics.csv", step, {}, rank=0) as tracker:
            tracker.log(step + 1, {"loss": 1.0})
    client = loggers.import_mlflow()[0](tracking_uri=shared.as_uri())
    experiment = client.get_experiment_by_name("credit_dp").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert sorted(runs) == ["a", "b", "lr-sweep"]
    parent = runs["lr-sweep"]
    assert parent.info.status == "FINISHED"
    for name in "ab":
        assert runs[name].data.tags["mlflow.parentRunId"] == parent.info.run_id
        files = [file.path for file in client.list_artifacts(runs[name].info.run_id)]
        assert files == ["config.yaml", "metrics.csv"]
    assert [path.name for path in sweep.iterdir() if path.is_file()] == ["mlflow-id"]

    # Two jobs start together, and both find no run of the sweep.
    (sweep / "mlflow-id").unlink()
    log = loggers.MlflowLog(str(shared), "credit_dp", tmp_path, 0, {})
    create = log.client.create_run

    def create_late(*args: object, **options: object) -> object:
        (sweep / "mlflow-id").write_text("faster\n")
        return create(*args, **options)

    monkeypatch.setattr(log.client, "create_run", create_late)
    assert log._run_of_sweep(experiment, sweep) == "faster"
    assert len(client.search_runs([experiment])) == 4  # and no third one of a sweep


def test_a_failing_mlflow_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    config = LoggerConfig(trackers=["mlflow"], mlflow=str(tmp_path / "file" / "store"))
    log = tmp_path / "metrics.csv"
    with captured_warnings() as warnings:
        with open_tracker(config, log, 0, {}, rank=0) as tracker:
            tracker.log(1, {"loss": 1.0})
    assert len(warnings) == 1
    assert warnings[0].startswith("MLflow: disabled for the rest of the run (")
    assert [row[0] for row in rows(log)] == ["step", "1"]


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    for package in ("tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
        config = LoggerConfig(trackers=[package])
        line = refusal(open_tracker, config, tmp_path / "metrics.csv", 0, {}, rank=0)
        assert f"Run pip install '.[{package}]' in" in line

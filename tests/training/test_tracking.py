"""The log: one row per logged step, however often a run is resumed."""

import os

import pytest

from credit_dp.config import LoggerConfig
from credit_dp.errors import UserError
from credit_dp.training.tracking import open_tracker
from tests.training.disk import full_disk

OFF = LoggerConfig(wandb="disabled")


def rows(path):
    return [line.split(",") for line in path.read_text().splitlines()]


def test_rows_are_on_disk_at_once(tmp_path):
    log = tmp_path / "run" / "metrics.csv"
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


def test_a_fresh_run_begins_a_new_log(tmp_path):
    log = tmp_path / "metrics.csv"
    for _ in range(2):
        with open_tracker(OFF, log, 0, {}, rank=0) as tracker:
            tracker.log(1, {"loss": 1.0})
    assert len(rows(log)) == 2


def test_a_full_disk_is_one_line(tmp_path):
    log = tmp_path / "metrics.csv"
    with pytest.raises(UserError, match=r"metrics\.csv: could not be written \(.+\)\.") as error:
        log_on_a_full_disk(log)
    assert "\n" not in str(error.value)
    assert 0 < len(log.read_text()) <= 100


def log_on_a_full_disk(log):
    with full_disk(100), open_tracker(OFF, log, 0, {}, rank=0) as tracker:
        for step in range(1000):
            tracker.log(step, {"loss": 1.0})


@pytest.mark.parametrize("config", [OFF, LoggerConfig(wandb="offline")])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, config):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written") as error:
        open_tracker(config, tmp_path / "file" / "run" / "metrics.csv", 0, {}, rank=0)
    assert "\n" not in str(error.value)


def test_other_ranks_write_nothing(tmp_path):
    with open_tracker(LoggerConfig(), tmp_path / "metrics.csv", 0, {}, rank=1) as tracker:
        tracker.log(1, {"loss": 1.0})
        tracker.summarise({"rmse": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_offline_needs_no_account_and_stays_in_the_run_folder(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "")  # crashes wandb as it is
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    log = tmp_path / "run" / "metrics.csv"
    with open_tracker(LoggerConfig(), log, 0, {"seed": 1}, rank=0) as tracker:
        tracker.log(1, {"loss": 1.0})
        tracker.summarise({"rmse": 2.0})
    assert list((log.parent / "wandb").glob("offline-run-*/*.wandb"))


def test_online_without_a_key_is_one_line_and_no_question(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"logger\.wandb: online needs an API key"):
        open_tracker(LoggerConfig(wandb="online"), tmp_path / "metrics.csv", 0, {}, rank=0)

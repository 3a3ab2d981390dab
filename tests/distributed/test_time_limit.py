"""The time that a job has left; a run stops before it is over."""

import time

import pytest

from credit_dp.distributed import slurm
from credit_dp.distributed.slurm import TimeLimit, parse_duration, seconds_left, slurm_job_id


def test_durations() -> None:
    for text, seconds in {
        "0:59": 59,
        "12:34": 754,
        "2:03:04": 7384,
        "1-02:03:04": 93784,
        **dict.fromkeys(("UNLIMITED", "INVALID", "")),
    }.items():
        assert parse_duration(text) == seconds, text


def test_the_end_comes_from_the_environment() -> None:
    assert seconds_left({}) is None
    left = seconds_left({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left == pytest.approx(100, abs=2)


def test_without_slurms_commands_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert seconds_left({"SLURM_JOB_ID": "1"}) is None


def test_a_run_stops_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now)
    limits = [TimeLimit(None), TimeLimit(60.0), TimeLimit(6000.0)]
    for now, reached in [  # noqa: B007 - the clock
        (1044.0, [False, False, False]),
        (1046.0, [False, True, False]),
        (6879.0, [False, True, False]),
        (6881.0, [False, True, True]),
    ]:
        assert [limit.reached() for limit in limits] == reached


def test_numbers_of_jobs() -> None:
    assert slurm_job_id({}) is None
    assert slurm_job_id({"SLURM_JOB_ID": "7"}) == "7"
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm_job_id({"SLURM_JOB_ID": "5", **array}) == "5_2"

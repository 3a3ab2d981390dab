"""The record of a job of a sweep: written when it begins and when it ends, however it ends."""

import json
from pathlib import Path

import pytest

from credit_dp.cli.sweep_jobs import failure_cause, read_overrides, record_job
from credit_dp.distributed.signals import EXIT_PREEMPTED, Terminated

KEYS = ["overrides", "state", "started", "exit_code", "cause", "ended", "slurm_job"]


def read(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "job.json").read_text()))


@pytest.mark.parametrize(
    ("code", "state", "cause"),
    [(0, "done", None), (EXIT_PREEMPTED, "preempted", None), (2, "failed", "data.store: none")],
)
def test_a_job_is_recorded(tmp_path: Path, code: int, state: str, cause: str | None) -> None:
    with record_job(tmp_path, ["seed=1"]) as ending:
        begun = read(tmp_path)
        ending.code, ending.cause = code, "data.store: none"
    ended = read(tmp_path)
    assert list(begun) == list(ended) == KEYS
    assert (begun["state"], begun["exit_code"], begun["ended"]) == ("running", None, None)
    assert (ended["state"], ended["exit_code"], ended["cause"]) == (state, code, cause)
    assert ended["overrides"] == read_overrides(tmp_path / "job.json") == ["seed=1"]
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (KeyboardInterrupt(), "failed", 130),
        (Terminated(), "failed", 143),
        (KeyError(), "failed", 1),
    ],
)
def test_a_job_that_is_ended_is_recorded(
    tmp_path: Path, error: BaseException, state: str, code: int
) -> None:
    with pytest.raises(type(error)):
        with record_job(tmp_path, []):
            raise error
    assert (read(tmp_path)["state"], read(tmp_path)["exit_code"]) == (state, code)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Traceback:\n  File\nValueError: wrong\n", "ValueError: wrong"),
        ("started\nerror: data.store: none\nother: text\n", "data.store: none"),
        ("KeyError: 3\nsrun: error: node1: task 0: Exited with exit code 1\n", "KeyError: 3"),
        ("srun: error: Unable to create step\n", "srun: error: Unable to create step"),
        ("\n", None),
    ],
)
def test_the_cause_is_the_line_that_names_it(text: str, cause: str | None) -> None:
    assert failure_cause(text) == cause

"""Reading a sweep's folder, whatever state its runs are in."""

import json
from pathlib import Path

import pytest

from credit_dp.errors import UserError
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.tables import choose_metric
from tests.sweeps.folders import (
    CRASHED,
    ENDED,
    write_config,
    write_done,
    write_given,
    write_log,
    write_rank_log,
    write_submission,
    write_sweep,
)


def test_each_run_is_in_the_state_that_its_files_show(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ["optimizer.lr=1e-4,1e-3", "seed=0,1,2,3"])
    write_done(folder / "0", "optimizer.lr=1e-4", "seed=0", model=5)
    failed, stopped, running = (
        write_given(folder / str(n), "optimizer.lr=1e-4", f"seed={n}") for n in (1, 2, 3)
    )
    for run, end in ((failed, CRASHED), (stopped, ENDED), (running, "")):
        write_config(run)
        write_log(run, [1.0] * 4)
        write_rank_log(run, end)
    write_given(folder / "5", "optimizer.lr=1e-3", "seed=1")
    (folder / "notes").mkdir()
    (folder / "notes" / "config.yaml").write_text("mine: 1\n")
    (folder / "plot.png").write_bytes(b"no picture")

    sweep = read_sweep(folder)
    assert sweep.keys == ("optimizer.lr", "seed")
    assert [job.name for job in sweep.jobs] == [str(n) for n in range(8)]
    assert [(job.state, job.cause) for job in sweep.jobs] == [
        ("done", ""),
        ("failed", "trainer: the loss has to stay finite"),
        ("preempted", ""),
        ("running", ""),
        *[("not started", "")] * 4,
    ]
    assert [(job.steps, job.all_steps) for job in sweep.jobs[:2]] == [(30, 30), (4, 30)]
    assert [job.value("seed") for job in sweep.jobs[4:]] == ["0", "1", "2", "3"]


def test_a_run_that_ended_early_is_done_once_its_scores_are_of_its_last_step(
    tmp_path: Path,
) -> None:
    early = {"steps": 100, "patience": 2}
    run = write_done(
        write_sweep(tmp_path / "sweep", ["seed=0"]) / "0", "seed=0", model=5, trainer=early
    )
    (run / "logs/rank-0.log").unlink()
    assert [job.state for job in read_sweep(run.parent).jobs] == ["done"]
    write_log(run, [1.0] * 31)  # resumed with more patience
    assert [job.state for job in read_sweep(run.parent).jobs] == ["running"]


def test_the_record_of_a_run_counts_more_than_its_files(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ["seed=0,1"])
    records = {
        "0": {"state": "failed", "cause": "killed by\n SIGKILL"},
        "1": {"state": "running", "cause": None},
    }
    for name, record in records.items():
        (folder / name / "job.json").write_text(json.dumps(record))
    write_rank_log(folder / "1", CRASHED)  # of an earlier start
    jobs = read_sweep(folder).jobs
    assert [(job.state, job.cause) for job in jobs] == [
        ("failed", "killed by SIGKILL"),
        ("running", ""),
    ]
    assert [dict(job.overrides) for job in jobs] == [{"seed": "0"}, {"seed": "1"}]


def test_a_waiting_run_is_recognised_by_its_overrides(tmp_path: Path) -> None:
    """A job's folder need not be the one that Hydra would choose."""
    folder = write_sweep(tmp_path / "sweep", ["seed=2,1"])
    write_done(folder / "0", "seed=1", "resume=auto", model=5)
    for name, text in (("0", "seed=1"), ("1", "seed=2")):
        record = {"overrides": [text], "slurm_job": f"7_{name}"}
        (folder / name / "submitted.json").write_text(json.dumps(record))
    sweep = read_sweep(folder)
    assert sweep.keys == ("seed",)
    told_of = [(job.name, job.value("seed"), job.state) for job in sweep.jobs]
    assert told_of == [("0", "1", "done"), ("1", "2", "not started")]


def test_unreadable_files_count_as_missing(tmp_path: Path) -> None:
    run = write_given(write_sweep(tmp_path / "sweep", ["seed=0"]) / "0", "seed=0")
    for text in ("", "{", "[]", "null", "\x00\xff", "step\n1,", "a: [b", "3"):
        for name in ("config.yaml", "metrics.csv", "metrics.json", "job.json", "submitted.json"):
            (run / name).write_text(text)
        (job,) = read_sweep(run.parent).jobs
        found = (job.steps, job.mesh, job.metrics, job.rows(), job.state)
        assert found == (0, None, {}, [], "not started"), text


DAMAGED = [
    None, {"t": {}}, {"t": None}, {"t": {"24h": None}}, {"t": {"24h": {"model": "5"}}},
    {"t": {"x": {"model": 1.0, "persistence": 2.0}}},
]  # fmt: skip


def test_damaged_scores_count_as_missing(tmp_path: Path) -> None:
    run = write_done(write_sweep(tmp_path / "sweep", ["seed=0"]) / "0", "seed=0", model=5)
    for damaged in DAMAGED:
        (run / "metrics.json").write_text(json.dumps({"step": 30, "rmse": damaged}))
        (job,) = read_sweep(run.parent).jobs
        scores = [name for name in job.metrics if "rmse" in name and "validation" not in name]
        assert (job.state, scores) == ("done", []), damaged


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_done(write_sweep(tmp_path / "sweep", ["seed=0"]) / "0", "seed=0", model=5)
    with (run / "metrics.csv").open("a") as file:
        file.write("31,0.1,0.")
    (job,) = read_sweep(run.parent).jobs
    assert job.steps == 30
    assert job.numbers["seconds"] == 0.5  # the first steps took 9 s


def test_what_an_interpolation_came_to_is_the_value(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_submission(folder / "0", "experiment=scaling", "data.grid=48x48")
    given = ("experiment=scaling", "data.grid=$\\{rows_per_rank\\:24x48\\}")
    write_done(folder / "1", *given, model=5, data={"grid": "96x48"})
    sweep = read_sweep(folder)
    assert sweep.keys == ("data.grid",)
    assert [job.value("data.grid") for job in sweep.jobs] == ["48x48", "96x48"]


def test_runs_are_compared_with_persistence_at_the_longest_lead(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ["seed=0,1,2"])
    for seed, model in enumerate((6.0, 4.0)):
        write_done(folder / str(seed), f"seed={seed}", model=model)
    sweep = read_sweep(folder)
    assert choose_metric(sweep.jobs, "") == "relative_rmse"
    assert [job.metrics.get("relative_rmse") for job in sweep.jobs] == [0.6, 0.4, None]
    assert sweep.jobs[0].metrics["rmse/2m_temperature/24h"] == 12.0
    with pytest.raises(UserError, match=r"^metric: no run .* 'los' yet.* Did you mean loss\?$"):
        choose_metric(sweep.jobs, "los")


def test_while_nothing_is_scored_the_lowest_validation_counts(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ["seed=0"])
    run = write_given(folder / "0", "seed=0")
    write_config(run)
    write_log(run, [1.0] * 4)
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    values = ("", 0.7, 0.5, 0.9)
    lines = [f"{row},{value}" for row, value in zip(rows, values, strict=True)]
    (run / "metrics.csv").write_text("\n".join([f"{header},validation_rmse", *lines, ""]))
    jobs = read_sweep(folder).jobs
    assert choose_metric(jobs, "") == "validation_rmse"
    assert jobs[0].metrics["validation_rmse"] == 0.5
    assert "step" not in jobs[0].metrics


def test_a_folder_that_is_no_sweep_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a sweep"):
        read_sweep(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read_sweep(tmp_path / "nowhere")

"""The jobs of a sweep: found again by what they compute, and recorded however they end."""

import contextlib
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from credit_dp.cli import start_run
from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.sweep_jobs import (
    Job,
    JobProcess,
    failure_cause,
    override_choices,
    plan_jobs,
    write_record,
    write_submission,
)
from credit_dp.config import Config, DatesConfig, ParallelConfig
from credit_dp.distributed.signals import EXIT_PREEMPTED, Terminated
from credit_dp.errors import UserError
from credit_dp.training.run_folder import resolved_yaml
from tests.cli.invocation import (
    answer,
    assert_refused,
    record_launches,
    refusal,
    write_empty_checkpoint,
)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer("train")


def plan(composer: Composer, sweep: Path, *texts: str) -> list[Job]:
    return plan_jobs(composer, override_choices(parse_overrides(texts), composer), sweep)


def finish(job: Job, scores: bool = True) -> None:
    """Write the files of a finished run, with its resolved config."""
    job.folder.mkdir(parents=True)
    definite = replace(job.config, device="cpu", parallel=ParallelConfig(data=1))
    (job.folder / "config.yaml").write_text(f"# again\n{resolved_yaml(definite)}")
    write_submission(job)
    if scores:
        (job.folder / "metrics.json").write_text("{}")


@pytest.mark.slow
def test_jobs_are_found_again_in_any_order(composer: Composer, tmp_path: Path) -> None:
    first = plan(composer, tmp_path, "seed=1,2", "model=unet,unet_small", "run.name=a")
    assert [job.folder.name for job in first] == ["0", "1", "2", "3"]
    assert [job.overrides for job in first[:2]] == [
        ("seed=1", "model=unet"),
        ("seed=1", "model=unet_small"),
    ]
    finish(first[1])
    finish(first[2], scores=False)
    again = plan(composer, tmp_path, "model=unet_small,unet", "seed=2,1,3", "run.name=b")
    states = {job.overrides: (int(job.folder.name), job.is_finished) for job in again}
    assert states["model=unet_small", "seed=1"] == (1, True)
    assert states["model=unet", "seed=2"] == (2, False)
    assert sorted(states.values())[2:] == [(number, False) for number in (3, 4, 5, 6)]


def test_the_same_overrides_with_another_config_are_refused(
    composer: Composer, tmp_path: Path
) -> None:
    [job] = plan(composer, tmp_path)  # without any
    finish(job)
    [again] = plan(composer, tmp_path)
    assert (again.folder.name, again.is_finished) == ("0", True)
    text = (tmp_path / "0/config.yaml").read_text()
    steps = job.config.trainer.steps
    (tmp_path / "0/config.yaml").write_text(text.replace(f"  steps: {steps}\n", "  steps: 7\n"))
    with pytest.raises(UserError, match=f"another config .trainer.steps: 7, now {steps}"):
        plan(composer, tmp_path)


@pytest.mark.slow
def test_dates_that_a_run_has_chosen_are_no_other_config(
    composer: Composer, tmp_path: Path
) -> None:
    texts = ("data=weatherbench2", "data.store=s.zarr", "data.dates.valid=auto", "seed=1")
    [job] = plan(composer, tmp_path, *texts)
    span = ["2001-01-01T00", "2001-02-01T00"]
    chosen = replace(job.config.data, dates=DatesConfig(span, span, span))
    finish(replace(job, config=replace(job.config, data=chosen)))
    assert plan(composer, tmp_path, *texts)[0].is_finished


@pytest.mark.slow
def test_without_a_launcher_finished_jobs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run with scores is skipped; the other one resumes."""
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "-m", "seed=1,2", "run.name=two")[0] == 0
        for number, config in enumerate(configs):
            folder = tmp_path / "outputs/two" / str(number)
            (folder / "config.yaml").write_text(resolved_yaml(config))
        (tmp_path / "outputs/two/0/metrics.json").write_text("{}")
        del configs[:]
        code, out, _ = answer(monkeypatch, "-m", "seed=1,2", "run.name=two")
    assert code == 0
    said = out.splitlines()
    assert said[0] == "done already: 1 of 2 jobs"
    assert [line.partition(":")[0] for line in said[2:]] == ["#1 seed=2"]
    assert [(config.seed, config.resume) for config in configs] == [(2, "auto")]


@pytest.mark.slow
def test_jobs_begin_at_a_given_checkpoint_and_continue_at_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = write_empty_checkpoint(tmp_path / "base")
    sweep = ("-m", "seed=1,2", "run.name=two", f"resume={checkpoint}")
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, *sweep)[0] == 0
        for job in (0, 1):  # both have started, and one has saved
            text = resolved_yaml(configs[job])
            (tmp_path / f"outputs/two/{job}/config.yaml").write_text(text)
        write_empty_checkpoint(tmp_path / "outputs/two/0")
        assert answer(monkeypatch, *sweep)[0] == 0
        line = refusal(monkeypatch, *sweep, "hydra/launcher=local")
    assert [config.resume for config in configs] == [
        *[str(checkpoint)] * 2,
        "auto",
        str(checkpoint),
    ]
    assert line.startswith("resume: each job resumes from its own checkpoint.")


def test_a_sweep_in_the_folder_of_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_empty_checkpoint(tmp_path / "outputs/base")
    line = "outputs/base holds the checkpoint of a single run"
    options = ("--check", "hydra/launcher=local")
    with record_launches(monkeypatch, tmp_path) as configs:
        assert_refused(dict.fromkeys(options, line), "train", "-m", "seed=1,2", "run.name=base")
    assert configs == []


def read(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "job.json").read_text()))


def test_a_job_is_recorded(tmp_path: Path) -> None:
    write_record(tmp_path)
    assert read(tmp_path) == {"state": "running", "exit_code": None, "cause": None}
    for code, state, cause in (
        (0, "done", None),
        (EXIT_PREEMPTED, "preempted", None),
        (2, "failed", "data.store: none"),
    ):
        write_record(tmp_path, code, "data.store: none")
        assert read(tmp_path) == {"state": state, "exit_code": code, "cause": cause}
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_a_job_that_is_ended_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = ((KeyboardInterrupt(), 130), (Terminated(), 143), (KeyError(), 1))
    for number, (error, code) in enumerate(errors):

        def launch(config: Config, error: BaseException = error, **_: object) -> int:
            raise error

        with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.setattr(start_run, "launch", launch)
            with contextlib.suppress(KeyError):
                assert answer(monkeypatch, "-m", "seed=1,2", f"run.name=n{number}")[0] == code
        sweep = tmp_path / f"outputs/n{number}"
        record = read(sweep / "0")
        assert (record["state"], record["exit_code"]) == ("failed", code)
        assert not (sweep / "1/job.json").exists()


def test_the_cause_is_the_line_that_names_it() -> None:
    for text, cause in {
        "Traceback:\n  File\nValueError: wrong\n": "ValueError: wrong",
        "Traceback (most recent call last):\n  File\n\nKeyError: 3\n\nDuring handling of\n\n"
        "Traceback (most recent call last):\n  File\nRuntimeError: one\nand another line\n": (
            "RuntimeError: one"
        ),
        "started\nerror: data.store: none\nother: text\n": "data.store: none",
        "KeyError: 3\nsrun: error: node1: task 0: Exited with exit code 1\n": "KeyError: 3",
        "srun: error: Unable to create step\n": "srun: error: Unable to create step",
        "\n": None,
    }.items():
        assert failure_cause(text) == cause


def test_a_killed_job_names_the_signal(tmp_path: Path) -> None:
    for printed, sent, cause in (
        ("writes to  here", signal.SIGKILL, "killed by SIGKILL (out of memory?)"),
        ("writes to  here", 40, "killed by signal 40"),
        ("error: rank 1 was killed", signal.SIGKILL, "rank 1 was killed"),
    ):
        code = f"import os; print({printed!r}, flush=True); os.kill(os.getpid(), {sent:d})"
        job = JobProcess(tmp_path, [sys.executable, "-I", "-S", "-c", code], {})
        assert job.wait() == 128 + sent
        assert (read(tmp_path)["state"], read(tmp_path)["cause"]) == ("failed", cause)

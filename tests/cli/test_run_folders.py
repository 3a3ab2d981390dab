"""Folders of runs: what is refused, and runs that start at the same time."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from credit_dp.checks import expand_home
from credit_dp.cli import start_run
from credit_dp.cli.folders import lock_folder, unique_name
from credit_dp.config import Config
from credit_dp.distributed.signals import EXIT_PREEMPTED
from credit_dp.errors import UserError
from tests.cli.invocation import (
    answer,
    assert_refused,
    record_launches,
    refusal,
    write_empty_checkpoint,
)

ROOT = Path(__file__).parents[2]


def test_a_name_fixes_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "run.name=first")[0] == 0
        assert answer(monkeypatch, "run.name=first", "resume=auto")[0] == 0
    assert [config.run.dir for config in configs] == [str(tmp_path / "outputs/first")] * 2
    assert (tmp_path / "outputs/first/.hydra/overrides.yaml").exists()


@pytest.mark.slow
def test_runs_without_a_name_never_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        for _ in range(3):
            assert answer(monkeypatch)[0] == 0
    folders = {config.run.dir for config in configs}
    assert len(folders) == 3
    assert all(Path(folder).parent == tmp_path / "outputs" for folder in folders)
    assert len({unique_name() for _ in range(100)}) == 100


def test_a_checkpoint_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "first"
    (folder / "checkpoint" / ".step-00000003.part").mkdir(parents=True)  # never completed
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "run.name=first")[0] == 0
        step = write_empty_checkpoint(folder)
        assert_refused({"run.name=first": "resume=auto"})
        assert_refused({f"run.dir={folder}": "^run.dir: .*give another run.dir."})
        assert answer(monkeypatch, "run.name=first", f"resume={step}")[0] == 0
    assert len(configs) == 2


def test_a_run_in_the_folder_of_a_sweep_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "-m", "seed=1,2", "run.name=many")[0] == 0
        line = "^run.dir: .*outputs/many is the folder of a sweep, but a single run needs"
        options = ("--check", "resume=auto")
        assert_refused(dict.fromkeys(options, line), "train", f"run.dir={tmp_path}/outputs/many")
    assert len(configs) == 2


def test_a_refused_run_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(config: Config, **_: object) -> int:
        assert Path(config.run.dir).is_dir()
        raise UserError("data.store: there is none")

    (tmp_path / "a").mkdir()  # by the user
    with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_run, "launch", refuse)
        keys = ("seed=1", "run.dir=a/b/c")
        assert_refused(dict.fromkeys(keys, "^data.store: there is none$"))
        assert [path.name for path in tmp_path.rglob("*")] == ["a"]
        (tmp_path / "a/b/c").mkdir(parents=True)
        assert_refused({"run.dir=a/b/c": "^data.store: there is none$"})
    assert (tmp_path / "a/b/c").is_dir()


def test_a_run_that_fails_later_keeps_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(config: Config, **_: object) -> int:
        Path(config.run.dir, "metrics.csv").touch()
        return 1

    with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_run, "launch", fail)
        assert answer(monkeypatch, "run.name=first")[0] == 1
    names = {path.name for path in (tmp_path / "outputs/first").iterdir()}
    assert names >= {".hydra", "metrics.csv"}


def test_ctrl_c_names_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def save_two(config: Config, **_: object) -> int:
        for step in ("step-00000002", "step-00000003"):
            write_empty_checkpoint(Path(config.run.dir)).rename(
                Path(config.run.dir, "checkpoint", step)
            )
        raise KeyboardInterrupt

    for key, path, keys in (
        ("run.name=first", "outputs/first", ""),
        ("run.dir=first", "first", f"run.dir={tmp_path / 'first'} "),
    ):
        with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.setattr(start_run, "launch", save_two)
            code, _, err = answer(monkeypatch, key)
        assert (code, err) == (
            130,
            f"\ninterrupted\nthe last checkpoint is {tmp_path / path}/checkpoint/step-00000003; "
            f"the same command with {keys}resume=auto continues from there\n",
        )


@pytest.mark.slow
def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        assert answer(monkeypatch, "run.dir='~/here'")[0] == 0
    assert [config.run.dir for config in configs] == [str(tmp_path / "home/here")]


@pytest.mark.slow
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with record_launches(monkeypatch, tmp_path) as configs, pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra.core.utils._save_config", full)
        line = refusal(monkeypatch, "run.name=first")
    assert line.startswith("run.dir: cannot write to outputs/first (No space left on device)")
    assert configs == []


@pytest.mark.slow
def test_a_sweep_runs_every_combination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = ("-m", "model=unet,unet_small", "model.channels=[8],[8,16]", "seed=3")
    checked = "The configs of all 4 runs are valid.\n"
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, *keys, "--check") == (0, checked, "")
        assert (configs, list(tmp_path.iterdir())) == ([], [])
        assert answer(monkeypatch, *keys)[::2] == (0, "")
    assert [config.model.channels for config in configs] == [[8], [8, 16], [8], [8, 16]]
    assert {config.seed for config in configs} == {3}
    folders = [Path(config.run.dir) for config in configs]
    assert [folder.name for folder in folders] == ["0", "1", "2", "3"]
    assert {folder.parent.parent for folder in folders} == {tmp_path / "multirun"}


@pytest.mark.slow
def test_a_failed_run_fails_the_sweep_after_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_launches(monkeypatch, tmp_path, codes=(3, 0)) as configs:
        code, _, err = answer(monkeypatch, "-m", "seed=0,1", "run.name=many", "resume=auto")
    folder = tmp_path / "outputs" / "many"
    assert (code, [config.run.dir for config in configs]) == (3, [f"{folder}/0", f"{folder}/1"])
    assert err == (
        f"error: --multirun: 1 of 2 runs failed: 0. See `credit-dp sweep show {folder}`.\n"
    )


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_launches(monkeypatch, tmp_path, codes=(3, EXIT_PREEMPTED, 0)) as configs:
        assert answer(monkeypatch, "-m", "seed=0,1,2")[0] == EXIT_PREEMPTED
    assert len(configs) == 2


@pytest.mark.slow
def test_an_experiment_brings_what_it_varies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        code, _, err = answer(monkeypatch, "-m", "experiment=scaling", "parallel.domain=3")
    meshes = [(config.parallel.domain, config.data.grid) for config in configs]
    assert (code, meshes) == (0, [(3, "48x48"), (3, "72x48")])
    assert err.count("\n") == 1  # the table at the end has nothing to show: nothing was trained
    assert "0 of 2 runs could be timed" in err
    with record_launches(monkeypatch, tmp_path) as configs:
        answer(monkeypatch, "-m", "experiment=scaling", "data=zarr", "data.store=s.zarr")
    grids = [(config.parallel.domain, config.data.grid) for config in configs]
    assert grids == [(1, None), (2, None)]  # a store has one
    line = refusal(monkeypatch, "-m", "experiment=scaling", "data.grid=${rows_per_rank:24},48x48")
    assert line.startswith("data.grid: ")
    assert "needs ROWSxCOLUMNS" in line


HOLD = """
import sys, time
from pathlib import Path
from credit_dp.cli.folders import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the folder's lock in another process, as a run does; it is killed at the end."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_second_start_is_refused_until_the_first_one_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, sweep = tmp_path / "run", tmp_path / "outputs/many"
    write_empty_checkpoint(run)
    (sweep / "0").mkdir(parents=True)
    (sweep / "0/submitted.json").write_text('{"overrides": ["seed=1"]}')
    with record_launches(monkeypatch, tmp_path) as configs:
        with held(run):
            before = sorted(tmp_path.rglob("*"))
            line = f"^run.dir: another run is writing to {run}."
            assert_refused({f"run.dir={run} resume=auto": line})
            assert sorted(tmp_path.rglob("*")) == before
        with held(sweep / "0"):
            line = "^run.name: another run is writing to "
            assert_refused({"-m seed=1,2 run.name=many resume=auto": line})
        assert configs == []
        assert answer(monkeypatch, f"run.dir={run}", "resume=auto")[0] == 0
    with lock_folder(run):
        with pytest.raises(UserError, match="another run is writing"), lock_folder(run):
            pass


def test_a_pipe_is_no_path(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError) as refused:
        expand_home("data.store", str(pipe))
    assert str(refused.value) == (
        f"data.store: needs a file or a folder, but {pipe} is a pipe, a socket or a device. "
        "Change data.store."
    )

"""Folders of runs: what is refused, and runs that start at the same time."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from credit_dp.checks import expand_home
from credit_dp.cli import start_run
from credit_dp.cli.folders import lock_folder, unique_name
from credit_dp.config import Config
from credit_dp.distributed.signals import EXIT_PREEMPTED
from credit_dp.errors import UserError
from tests.cli.invocation import answer, record_launches, refusal, write_empty_checkpoint
from tests.ranks import warm_context


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


@pytest.mark.slow
def test_a_checkpoint_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "first"
    (folder / "checkpoint" / ".step-00000003.part").mkdir(parents=True)  # never completed
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "run.name=first")[0] == 0
    step = write_empty_checkpoint(folder)
    with record_launches(monkeypatch, tmp_path) as configs:
        assert "resume=auto" in refusal(monkeypatch, "run.name=first")
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "run.name=first", "resume=auto")[0] == 0
        for own in (folder, folder / "checkpoint", step):
            assert answer(monkeypatch, "run.name=first", f"resume={own}")[0] == 0
    assert len(configs) == 4


@pytest.mark.slow
def test_the_key_that_chose_the_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_empty_checkpoint(tmp_path)
    line = refusal(monkeypatch, f"run.dir={tmp_path}")
    assert line.startswith("run.dir: ")
    assert "give another run.dir." in line
    with lock_folder(tmp_path, "run.dir"):
        line = refusal(monkeypatch, f"run.dir={tmp_path}", "resume=auto")
    assert line.startswith("run.dir: another run is writing")


@pytest.mark.parametrize("option", ["--check", "resume=auto", "seed=1"])
def test_a_run_in_the_folder_of_a_sweep_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        assert answer(monkeypatch, "-m", "seed=1,2", "run.name=many")[0] == 0
        line = refusal(monkeypatch, f"run.dir={tmp_path / 'outputs/many'}", option)
        assert line.startswith("run.dir: ")
        assert "outputs/many is the folder of a sweep, but a single run needs" in line
        # Twice, as its runs may be in folders that exist, and the sweep's own stays what it is.
        assert answer(monkeypatch, "-m", "seed=1,2", "run.name=many")[0] == 0
    assert len(configs) == 4


@pytest.mark.parametrize("key", ["seed=1", "run.name=first", "run.dir=a/b/c"])
def test_a_refused_run_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    def refuse(config: Config, **_: object) -> int:
        assert Path(config.run.dir).is_dir()
        raise UserError("data.store: there is none")

    (tmp_path / "a").mkdir()  # by the user
    with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_run, "launch", refuse)
        assert refusal(monkeypatch, key) == "data.store: there is none"
        assert [path.name for path in tmp_path.rglob("*")] == ["a"]
        (tmp_path / "a/b/c").mkdir(parents=True)
        assert refusal(monkeypatch, "run.dir=a/b/c") == "data.store: there is none"
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


@pytest.mark.parametrize(
    ("key", "keys"), [("run.name=first", ""), ("run.dir=first", "run.dir={folder} ")]
)
def test_ctrl_c_names_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, keys: str
) -> None:
    def save_two(config: Config, **_: object) -> int:
        for step in ("step-00000002", "step-00000003"):
            write_empty_checkpoint(Path(config.run.dir)).rename(
                Path(config.run.dir, "checkpoint", step)
            )
        raise KeyboardInterrupt

    with record_launches(monkeypatch, tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_run, "launch", save_two)
        code, _, err = answer(monkeypatch, key)
    folder = tmp_path / ("outputs/first" if key == "run.name=first" else "first")
    assert (code, err) == (
        130,
        f"\ninterrupted\nthe last checkpoint is {folder}/checkpoint/step-00000003; the same "
        f"command with {keys.format(folder=folder)}resume=auto continues from there\n",
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
def test_a_checked_sweep_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        code, out, err = answer(
            monkeypatch, "-m", "parallel.domain=1,2", "seed=range(3)", "--check"
        )
    assert (code, out, err) == (0, "The configs of all 6 runs are valid.\n", "")
    assert (configs, list(tmp_path.iterdir())) == ([], [])


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        with pytest.raises(UserError, match="another run is writing"):
            with lock_folder(tmp_path):
                pass
    with lock_folder(tmp_path):
        pass


@pytest.mark.slow
def test_a_sweep_runs_every_combination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        code, _, err = answer(
            monkeypatch, "-m", "model=unet,unet_small", "model.channels=[8],[8,16]", "seed=3"
        )
    assert (code, err) == (0, "")
    assert [config.model.channels for config in configs] == [[8], [8, 16], [8], [8, 16]]
    assert {config.seed for config in configs} == {3}
    folders = [Path(config.run.dir) for config in configs]
    assert [folder.name for folder in folders] == ["0", "1", "2", "3"]
    assert {folder.parent.parent for folder in folders} == {tmp_path / "multirun"}


@pytest.mark.slow
def test_a_named_sweep_can_be_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with record_launches(monkeypatch, tmp_path) as configs:
        answer(monkeypatch, "-m", "seed=range(2)", "run.name=many", "resume=auto")
    names = [str(tmp_path / "outputs/many" / number) for number in "01"]
    assert [config.run.dir for config in configs] == names


@pytest.mark.slow
def test_a_failed_run_fails_the_sweep_after_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with record_launches(monkeypatch, tmp_path, codes=(3, 0, 1)) as configs:
        code, _, err = answer(monkeypatch, "-m", "seed=0,1,2", "run.name=many")
    assert (code, len(configs)) == (3, 3)
    folder = tmp_path / "outputs" / "many"
    assert err == (
        f"error: --multirun: 2 of 3 runs failed: 0, 2. See `credit-dp sweep show {folder}`.\n"
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


LONGEST = 600.0  # seconds to wait for a process that does not answer


def hold(folder: Path, ready: Event) -> None:
    """Lock a folder as a run does, until killed."""
    with lock_folder(folder):
        ready.set()
        time.sleep(LONGEST)


@contextmanager
def held(folder: Path) -> Iterator[ForkServerProcess]:
    """Hold the folder's lock in another process, which is killed at the end."""
    context = warm_context()
    ready = context.Event()
    process = context.Process(target=hold, args=(folder, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(LONGEST)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_second_start_refuses_in_one_line_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_empty_checkpoint(tmp_path)
    with held(tmp_path), record_launches(monkeypatch, tmp_path.parent) as configs:
        before = sorted(tmp_path.rglob("*"))
        line = refusal(monkeypatch, f"run.dir={tmp_path}", "resume=auto")
        assert sorted(tmp_path.rglob("*")) == before
    assert line.startswith(f"run.dir: another run is writing to {tmp_path}.")
    assert configs == []


@pytest.mark.slow
def test_a_sweep_refuses_the_folder_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "many" / "0"
    folder.mkdir(parents=True)
    (folder / "submitted.json").write_text('{"overrides": ["seed=1"]}')
    with (
        held(folder),
        record_launches(monkeypatch, tmp_path) as configs,
    ):
        code, _, err = answer(monkeypatch, "-m", "seed=1,2", "run.name=many", "resume=auto")
    assert code == 2
    assert err.startswith("error: run.name: another run is writing to ")
    assert err.count("\n") == 1
    assert configs == []


def test_a_folder_is_free_once_its_run_was_killed(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(UserError, match="another run is writing"), lock_folder(tmp_path):
            pass
        process.kill()
        process.join()
        with lock_folder(tmp_path):
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

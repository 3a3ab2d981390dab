"""Two runs can't write to one folder; a killed run does not keep it locked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from credit_dp.cli.compose import lock_folder
from credit_dp.errors import UserError
from tests.cli.invocation import answer, record_launches, refusal, write_empty_checkpoint
from tests.ranks import warm_context

LONGEST = 120.0  # seconds until a process that does not answer is given up


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
def test_a_run_of_a_sweep_refuses_the_folder_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        held(tmp_path / "outputs" / "many" / "0"),
        record_launches(monkeypatch, tmp_path) as configs,
    ):
        code, _, err = answer(monkeypatch, "-m", "seed=1,2", "run.name=many", "resume=auto")
    assert code == 2
    assert err.startswith("error: run.name: another run is writing to ")
    assert "Traceback" not in err
    assert [Path(config.run.dir).name for config in configs] == ["1"]


def test_a_folder_is_free_once_its_run_was_killed(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(UserError, match="another run is writing"), lock_folder(tmp_path):
            pass
        process.kill()
        process.join()
        with lock_folder(tmp_path):
            pass

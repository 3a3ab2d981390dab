"""Files of the working folder that are named like packages: no process imports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.distributed.forkserver import interpreter
from tests.data import stores
from tests.distributed.processes import ROOT

PACKAGES = (
    "torch",
    "yaml",
    "numpy",
    "zarr",
    "pathlib",
    "pickle",
    "signal",
    "socket",
    "selectors",
    "struct",
)
# Starts what multiprocessing starts: its resource tracker, a fork server, and a spawned process.
PROGRAM = """
import os, sys
from multiprocessing import get_context
from credit_dp.distributed.forkserver import forget_import_variables, import_from_same_folders

def write_path(name):
    forget_import_variables()
    with open(name, "w") as file:
        file.write(str(sys.path))

if __name__ == "__main__":
    with import_from_same_folders():
        for method in ("spawn", "forkserver"):
            process = get_context(method).Process(target=write_path, args=(method,))
            process.start()
            process.join()
            assert process.exitcode == 0
    assert os.environ["PYTHONPATH"] == "plug-ins"
    assert "PYTHONSAFEPATH" not in os.environ
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files that say so when they are imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in PACKAGES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\nraise SystemExit(3)\n"
        )
    return folder


def run(words: list[str], folder: Path, **environment: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    imported = folder.parent / "imported"
    assert not imported.exists(), imported.read_text()
    assert process.returncode == 0, process.stderr


def test_processes_of_multiprocessing_import_nothing_from_there(folder: Path) -> None:
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    program.with_name("credit_dp").symlink_to(ROOT / "credit_dp")  # a clone, not installed
    run([str(program)], folder, PYTHONPATH="plug-ins")
    for method in ("spawn", "forkserver"):
        path = (folder / method).read_text()
        assert str(program.parent) in path
        assert str(folder / "plug-ins") in path
        assert repr(str(folder)) not in path


def test_the_module_imports_nothing_from_there(folder: Path) -> None:
    run(["-m", "credit_dp", "--version"], folder, PYTHONPATH=str(ROOT))


def test_jobs_import_the_package_from_a_clone_that_is_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert interpreter() == [sys.executable]
    monkeypatch.chdir(tmp_path)
    assert interpreter() == [sys.executable, "-P"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [["-m", "credit_dp", "train", "--multirun"], ["ROOT/train.py"]])
def test_ranks_and_jobs_import_nothing_from_there(folder: Path, words: list[str]) -> None:
    keys = ["experiment=fast", "trainer.steps=1", "parallel.domain=2", "run.dir=run"]
    path = {"PYTHONPATH": str(ROOT), "CREDIT_DP_CACHE": str(folder.parent / "cache")}
    run([word.replace("ROOT", str(ROOT)) for word in words] + keys, folder, **path)


@pytest.mark.exhaustive
def test_workers_of_data_prepare_import_nothing_from_there(folder: Path) -> None:
    store = stores.write(stores.dataset(rows=9, columns=4, steps=5), folder.parent / "in.zarr")
    keys = [f"store={store}", "out=out.zarr", "data.prognostic=[geopotential]", "workers=2"]
    unused = ["data.forcing=[]", "data.static=[]"]
    words = ["-m", "credit_dp", "data", "prepare", *keys, *unused]
    run(words, folder, PYTHONPATH=str(ROOT))

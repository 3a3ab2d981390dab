"""Whole training runs: on two machines, and with a rank killed in the middle of its steps."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import commands
from tests.distributed.processes import (
    ROOT,
    SOON,
    TORCHRUN,
    VICTIMS,
    children,
    ends,
    free_port,
    gone,
    until,
)

KEYS = ["experiment=fast", "device=cpu", "trainer.dtype=float64", "trainer.evaluate_hours=[6]"]
TRAIN = [str(ROOT / "train.py"), *KEYS]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def begin(
    arguments: list[str], keys: list[str], folder: Path, cache: Path
) -> subprocess.Popen[str]:
    """A training program in a folder, begun under whatever `arguments` start."""
    return subprocess.Popen(
        [sys.executable, *arguments, *TRAIN, f"run.dir={folder / 'run'}", *keys],
        cwd=folder,
        env={**os.environ, "CREDIT_DP_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(folder: Path) -> list[float]:
    """Of each step that the log has whole."""
    log = folder / "run" / "metrics.csv"
    if not log.exists():
        return []
    with log.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["seconds"]]


def on_two_machines(folder: Path, cache: Path, *keys: str) -> tuple[list[float], str]:
    """Losses of ranks under two torchrun agents, each of which starts two; their stderr."""
    folder.mkdir()
    sizes = ["--nnodes", "2", "--nproc-per-node", "2"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [
        begin([*TORCHRUN, *sizes, *meeting, "--node-rank", str(node)], list(keys), folder, cache)
        for node in (0, 1)
    ]
    results = ends(agents, 200)
    said = "\n".join(text for _, text in results)
    assert [code for code, _ in results] == [0, 0], said
    return losses(folder), said


@pytest.mark.exhaustive
def test_two_machines_train_as_one_process_does(tmp_path: Path, cache: Path) -> None:
    """Two globes of two bands, each on one machine; `tests/slurm` has bands on two of them."""
    (tmp_path / "alone").mkdir()
    environment = {**os.environ, "CREDIT_DP_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    words = ["python", *TRAIN, f"run.dir={tmp_path / 'alone/run'}", "parallel.domain=1"]
    assert commands.run(words, tmp_path / "alone", environment).returncode == 0
    keys = ("parallel.domain=2", "parallel.data=2")
    found, said = on_two_machines(tmp_path / "within", cache, *keys)
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    assert "network" not in said


def rank_processes(program: subprocess.Popen[str]) -> list[int]:
    """Ids of the ranks that a program started, in rank order."""
    [fork_server] = children(program.pid, "forkserver")
    return children(fork_server)


# A rank of each axis is killed in `test_failures`; here ranks train.
@pytest.mark.slow
def test_a_rank_killed_while_training_ends_all(tmp_path: Path, cache: Path) -> None:
    victim, name = VICTIMS[0]
    mesh = ["parallel.pipeline=2", "parallel.data=2", "parallel.domain=2"]
    program = begin([], [*mesh, "trainer.steps=100000"], tmp_path, cache)
    until(lambda: len(losses(tmp_path)) > 1 or program.poll() is not None, 150)
    ranks = rank_processes(program)
    assert len(ranks) == 8
    os.kill(ranks[victim], signal.SIGKILL)
    died = time.monotonic()
    [(code, said)] = ends([program])
    assert time.monotonic() - died < SOON
    assert code == 1
    line = f"error: {name} was killed by SIGKILL (out of memory?); the other ranks were stopped"
    assert said.splitlines()[-1] == line
    assert "Traceback" not in said
    assert all(gone(pid) for pid in ranks)

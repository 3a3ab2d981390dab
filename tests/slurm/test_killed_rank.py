"""A rank of a real srun on two nodes is killed: all end, whether srun ends them or not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, SOON, ends, gone, until, voices
from tests.tier_cases import tiers


@pytest.mark.parametrize(("flag", "victim"), tiers([], [(0, 0)], [(1, 1)]))
def test_a_killed_rank_ends_the_step(
    slurm: dict[str, str], tmp_path: Path, flag: int, victim: int
) -> None:
    """Rank 0 serves the store: where it is killed, each node may say so."""
    options = ["srun", "-N2", "-n4", "--ntasks-per-node=2", f"--kill-on-bad-exit={flag}"]
    program = ["-m", "tests.distributed.launch_program", "communicate", "2", "0", "1"]
    step = subprocess.Popen(
        [*options, sys.executable, *program, str(tmp_path)],
        cwd=ROOT,
        env={
            **os.environ,
            **slurm,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SEEN": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / f"pid{rank}" for rank in range(4)]
    until(lambda: all(file.exists() for file in files) or step.poll() is not None)
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    [(code, text)] = ends([step])
    assert time.monotonic() - began < SOON
    assert code != 0
    said = voices(text)
    assert 1 <= len(said) <= (1 if victim else 2), text
    assert all(line.startswith(f"error: rank {victim} (pipeline 0, ") for line in said), text
    assert all(gone(pid) for pid in pids)

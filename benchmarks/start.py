"""Measure the time from the command to the first step: `python benchmarks/start.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pinned import RANKS
from side_by_side import Row
from table import show

from credit_dp.cli.compose import Composer
from credit_dp.data.setup import prepare_training_data

ROUNDS = 3
POLL = 0.02


def seconds(folder: Path) -> float:
    """Return the seconds until the quickstart has logged its first step; its data exist already."""
    command = [
        sys.executable, "-m", "credit_dp", "train", f"parallel.domain={RANKS}", "trainer.steps=1",
        f"run.dir={folder}", "trainer.evaluate_stride_hours=100000",
    ]  # fmt: skip
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    environment.pop("OMP_NUM_THREADS", None)
    log = folder / "metrics.csv"
    began = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (log.exists() and log.read_text().count("\n") > 1):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(POLL)
        spent = time.monotonic() - began
        process.wait()
    return spent


def rows() -> list[Row]:
    """Return the fastest and the median of several starts."""
    prepare_training_data(Composer("train").compose_config([]).data)
    with tempfile.TemporaryDirectory() as folder:
        found = sorted(seconds(Path(folder) / str(number)) for number in range(ROUNDS))
    what = f"start of the quickstart, {RANKS} ranks: command to first optimiser step"
    return [Row(what, "", found[0], 10.0, found[len(found) // 2], unit="s")]


if __name__ == "__main__":
    show(rows())

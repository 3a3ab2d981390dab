"""Measure a start: imports, and command to first step. `python benchmarks/start.py`"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

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


def processor_seconds(code: str) -> float:
    """Return what a fresh interpreter computes for these imports; their bytecode exists already."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_row() -> Row:
    """Return what importing all that training needs costs, compared with torch alone."""
    ours, torch = "import credit_dp.training.run", "import torch"
    for code in (ours, torch):
        processor_seconds(code)
    found = sorted(processor_seconds(ours) / processor_seconds(torch) for _ in range(ROUNDS))
    return Row("imports of training", torch, found[0], 1.7, median(found), by_median=True)


def rows() -> list[Row]:
    """Return imports, then the fastest and the median of several starts."""
    prepare_training_data(Composer("train").compose_config([]).data)
    with tempfile.TemporaryDirectory() as folder:
        found = sorted(seconds(Path(folder) / str(number)) for number in range(ROUNDS))
    what = f"start of the quickstart, {RANKS} ranks: command to first optimiser step"
    return [import_row(), Row(what, "", found[0], 10.0, found[len(found) // 2], unit="s")]


if __name__ == "__main__":
    show(rows())

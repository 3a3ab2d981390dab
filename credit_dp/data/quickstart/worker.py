"""One run of the climate in a process of its own: `python -m credit_dp.data.quickstart.worker`.

The first line of standard input is the job as JSON; a line is written per finished block of time
steps. The process ends when its input closes, so that it never outlives the one that started it.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from credit_dp.config import QuickstartConfig
from credit_dp.data.quickstart import dataset
from credit_dp.data.quickstart.dataset import (
    STEPS_PER_DAY,
    Run,
    day_of_year,
    plan_runs,
    shard_steps,
)
from credit_dp.data.quickstart.dynamics import (
    Array,
    QuasiGeostrophic,
    initial_state,
    integrate_six_hourly,
)
from credit_dp.data.quickstart.fields import Synthesis


def streamfunctions(config: QuickstartConfig, run: Run) -> Iterator[Array]:
    """The run's six-hourly streamfunctions, `(3, T + 1, 2, T + 1)` each, spin-up left out."""
    model = QuasiGeostrophic(config.truncation)
    noise = np.random.default_rng([config.seed, run.index])
    begin = run.start - np.timedelta64(config.spinup_days, "D")
    states = integrate_six_hourly(model, initial_state(model, noise), day_of_year(begin))
    for state in islice(states, config.spinup_days * STEPS_PER_DAY, None):
        if not np.isfinite(state[0, 0, 0, 1]):
            raise FloatingPointError(f"run {run.index} became unstable")
        yield model.streamfunction(state)


def blocks(config: QuickstartConfig, grid: tuple[int, int], run: Run) -> Iterator[dict[str, Array]]:
    """The run's fields, one shard of time steps after the other."""
    synthesis = Synthesis(config.truncation, grid)
    together = shard_steps(run.steps, grid)
    states = streamfunctions(config, run)
    for _ in range(run.steps // together):
        yield synthesis.fields(np.stack(list(islice(states, together))))


def main() -> None:
    """Reads the job, writes the run's blocks into the store, tells of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = QuickstartConfig(**job["config"])
    grid = (int(job["grid"][0]), int(job["grid"][1]))
    run = plan_runs(config)[job["run"]]
    first = run.first
    for fields in blocks(config, grid, run):
        dataset.write(Path(job["path"]), first, fields)
        count = len(fields["geopotential"])
        first += count
        sys.stdout.write(f"{count}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()

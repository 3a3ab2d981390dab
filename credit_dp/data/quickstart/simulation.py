"""Integrates one run of the climate, as `python -m credit_dp.data.quickstart.simulation`.

The first line of stdin is the job as JSON. For each finished block, the number of its time steps
is written to stdout. The process ends when stdin closes, so that it never outlives its parent.
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
from credit_dp.data.quickstart.physical_fields import Synthesis
from credit_dp.random_streams import random_stream


def streamfunctions(config: QuickstartConfig, run: Run) -> Iterator[Array]:
    """Yield the run's six-hourly streamfunctions, `(3, T + 1, 2, T + 1)` each, after the spin-up.

    Raises:
        FloatingPointError: the model became unstable.
    """
    model = QuasiGeostrophic(config.truncation)
    rng = random_stream(config.seed, run.index)
    start = run.start - np.timedelta64(config.spinup_days, "D")
    states = integrate_six_hourly(model, initial_state(model, rng), day_of_year(start))
    for state in islice(states, config.spinup_days * STEPS_PER_DAY, None):
        if not np.isfinite(state[0, 0, 0, 1]):
            raise FloatingPointError(f"run {run.index} became unstable")
        yield model.streamfunction(state)


def blocks(config: QuickstartConfig, grid: tuple[int, int], run: Run) -> Iterator[dict[str, Array]]:
    """Yield the run's fields, one shard of time steps at a time."""
    synthesis = Synthesis(config.truncation, grid)
    shard_length = shard_steps(run.steps, grid)
    states = streamfunctions(config, run)
    for _ in range(run.steps // shard_length):
        yield synthesis.fields(np.stack(list(islice(states, shard_length))))


def main() -> None:
    """Read the job, write the run's blocks into the store, and report each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = QuickstartConfig(**job["config"])
    grid = (int(job["grid"][0]), int(job["grid"][1]))
    run = plan_runs(config)[job["run"]]
    step = run.first
    for fields in blocks(config, grid, run):
        dataset.write(Path(job["path"]), step, fields)
        count = len(fields["geopotential"])
        step += count
        sys.stdout.write(f"{count}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    # read() returns when the pipe closes, also if the parent was killed. sys.exit() would end only
    # this thread.
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()

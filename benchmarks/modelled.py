"""Compare the predictions of `credit-dp plan --machine` for this machine with measured steps.

`python benchmarks/modelled.py [FILE]` measures the machine's figures, and writes them to FILE if
one is given. From these it predicts training steps on one, two and four ranks, and then measures
the steps. Nothing is fitted to the steps. Four ranks share two cores, so they are predicted with
half the rates and twice the overhead. Of operations, messages and steps the fastest of several runs
counts.

If other programs use the cores, the time of a step says nothing. What a step computes is therefore
compared by itself, too: its prediction with the seconds that the processor worked for the slowest
rank, for which single operations are measured as well.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from calibrate import machine_figures
from pinned import RANKS, on_pinned_ranks

from credit_dp.cli.compose import Composer
from credit_dp.config import Config
from credit_dp.costs.machine import Machine, read_machine
from credit_dp.costs.prediction import Predictor
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build import build_training

MODELS = ("unet_small", "crossformer_small")
GRID = "64x128"
MESHES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2))  # data x domain
KEYS = (
    "experiment=fast",
    f"data.grid={GRID}",
    "trainer.steps=100",
    "trainer.log_every=1000",
    "trainer.checkpoint_every=1000",
)
WARM_UP, STEPS = 2, 7
MEMORY_GIB = 8.0  # of a rank; not measured


def modelled_rows() -> list[dict[str, Any]]:
    """Return a row for each model and mesh; seconds of a step, and the relative error."""
    return list(_rows(None))


def _rows(kept: Path | None) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder) / "machine.yaml"
        path.write_text(yaml.safe_dump(machine_figures(MEMORY_GIB), sort_keys=False))
        machine = read_machine(str(path))
    for model in MODELS:
        for data, domain in MESHES:
            yield _row(model, data, domain, machine)


def _row(model: str, data: int, domain: int, machine: Machine) -> dict[str, Any]:
    config = _config(model, data, domain)
    predicted = Predictor(config, _shared(machine, data * domain)).predict(data, domain).time
    prepare_training_data(config.data)
    each = on_pinned_ranks(_measure, config, ranks=data * domain, domain=domain)
    measured, busy = (max(of_ranks) for of_ranks in zip(*each, strict=True))
    # Ranks that share a core compute in turn, which is no work of the processor for a rank.
    computed = Predictor(config, machine).predict(data, domain).time.compute
    return {
        "model": model,
        "data": data,
        "domain": domain,
        **vars(predicted),
        "predicted": predicted.step,
        "measured": measured,
        "error": predicted.step / measured - 1,
        "busy": busy,
        "error_of_compute": computed / busy - 1,
    }


def _config(model: str, data: int, domain: int) -> Config:
    mesh = (f"parallel.data={data}", f"parallel.domain={domain}", f"data.batch_size={data}")
    return Composer("train").compose_config([f"model={model}", *KEYS, *mesh])


def _shared(machine: Machine, ranks: int) -> Machine:
    """Return the figures of a machine whose cores are shared by this many ranks."""
    share = max(1.0, ranks / RANKS)
    return replace(
        machine,
        ranks_per_node=max(RANKS, ranks),
        tflops={dtype: rate / share for dtype, rate in machine.tflops.items()},
        memory_gb_per_s=machine.memory_gb_per_s / share,
        overhead_us=machine.overhead_us * share,
    )


def _measure(manager: DomainParallelManager, config: Config) -> tuple[float, float]:
    """Return the seconds of the fastest of several training steps, and the processor's."""
    training = build_training(
        config, prepare_training_data(config.data), manager, torch.device("cpu")
    )
    seconds, busy = [], []
    with training.loader:
        trainer = training.trainer
        trainer.start()
        for _ in range(WARM_UP):
            trainer.train_step(next(training.loader))
        for _ in range(STEPS):
            batch = next(training.loader)
            began, worked = time.perf_counter(), time.thread_time()
            trainer.train_step(batch)
            seconds.append(time.perf_counter() - began)
            busy.append(time.thread_time() - worked)
    return min(seconds), min(busy)


def main() -> None:
    """Print a table."""
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    names = ("compute", "exchange", "reduction", "predicted", "measured", "busy")
    print(f"ms per step on {GRID}, one sample for each data rank; four ranks share two cores")
    print(
        "model              data  domain", *(f"{name:>10}" for name in names), " error  of compute"
    )
    for row in _rows(kept):
        times = (f"{1e3 * row[name]:10.1f}" for name in names)
        print(f"{row['model']:<18} {row['data']:4d} {row['domain']:7d}", *times, end="")
        print(f" {row['error']:+6.0%} {row['error_of_compute']:+11.0%}", flush=True)


if __name__ == "__main__":
    main()

"""Compare training steps of the models for a quarter degree on one GPU with their predictions.

`python benchmarks/gpu.py [--domain 1 8] [--models NAME ...] [--keys KEY=VALUE ...]` needs a GPU. In
a domain of several ranks it measures the rank in the middle, with its band, while nobody sends
messages: what the rank computes, and what its host starts.

Columns:

- step: milliseconds of the fastest training step, and of the median one;
- busy: milliseconds in which kernels ran, by torch's profiler, and how many kernels;
- predicted: milliseconds of the step without messages, of its kernels, and of the host that starts
  them, by `credit-dp plan --machine h100`;
- GiB: the most that was allocated, and what the plan expects.
"""

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from loader import write_store
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from credit_dp.cli.compose import Composer
from credit_dp.config import Config, DataConfig
from credit_dp.costs.machine import read_machine
from credit_dp.costs.prediction import Predictor
from credit_dp.data.channels import Channel
from credit_dp.data.climatology import Climatology
from credit_dp.data.setup import TrainingData
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.distributed.worker import set_precision
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training import build, non_finite

MODELS = ("unet_base", "pangu_base", "crossformer_base")
GRID = (721, 1440)
UPPER_AIR, SURFACE = 5, 4  # variables
LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
CHANNELS = (
    *(Channel(f"upper{n}", level) for n in range(UPPER_AIR) for level in LEVELS),
    *(Channel(f"surface{n}") for n in range(SURFACE)),
)
TIMES = 3
KEYS = (
    "trainer.steps=1000000",
    "trainer.log_every=1000000",
    "trainer.checkpoint_every=1000000",
    "trainer.check_finite=late",
    # What nobody has sent may be anything.
    "trainer.on_nonfinite=skip",
)
WARM_UP, STEPS = 3, 6


def configured(model: str, domain: int, keys: tuple[str, ...], data: DataConfig) -> Config:
    """Return the config of a run with one data rank."""
    config = Composer("train").compose_config([f"model={model}", *KEYS, *keys])
    return replace(config, data=data, parallel=replace(config.parallel, data=1, domain=domain))


@contextmanager
def one_of(domain: int) -> Iterator[DomainParallelManager]:
    """Be the rank in the middle of a domain in which nobody sends messages."""
    if domain == 1:
        yield DomainParallelManager(1, 1)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=domain // 2, world_size=domain)
    try:
        with (
            patch.object(build, "build_chunk_exchange", return_value=None),
            patch.object(non_finite, "MAX_CONSECUTIVE_SKIPS", 1000),
        ):
            yield DomainParallelManager(domain, domain)
    finally:
        dist.destroy_process_group()


def unnormalised(store: Store) -> TrainingData:
    """Return a store with statistics that change nothing: computing them would take minutes."""
    channels = store.channels

    def pair(count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(count), np.ones(count)

    states = pair(channels.num_outputs)
    statistics = Statistics(
        *states, states[1], *pair(len(channels.forcing)), *pair(len(channels.static))
    )
    return TrainingData(store, statistics, cast(Climatology, None))  # only scores need it


def measured(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the figures of a rank's steps; the key `kernels` has the seconds by kernel."""
    if device.type == "cuda":
        gc.collect()  # what an earlier model has left
        torch.cuda.empty_cache()
    set_precision(config.trainer)
    prepared = unnormalised(Store.open(config.data))
    with one_of(config.parallel.domain) as manager:
        training = build.build_training(config, prepared, manager, device)
        trainer = training.trainer
        wrapped = getattr(trainer.forward_backward, "model", None)
        if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, _keep_gradients)
        with training.loader:
            batch = next(training.loader)
        trainer.start()
        began = time.perf_counter()
        for _ in range(WARM_UP):
            trainer.train_step(batch)
        _wait(device)
        warm_up = time.perf_counter() - began
        seconds = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            began = time.perf_counter()
            trainer.train_step(batch)
            _wait(device)
            seconds.append(time.perf_counter() - began)
        held = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        began = time.perf_counter()
        for _ in range(STEPS):
            trainer.train_step(batch)
        _wait(device)
        in_a_row = (time.perf_counter() - began) / STEPS
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            trainer.train_step(batch)
            _wait(device)
    kernels: Counter[str] = Counter()
    started = 0
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name] += event.device_time_total
            started += 1
    return {
        "step": min(seconds),
        "median": statistics.median(seconds),
        "in a row": in_a_row,
        "busy": sum(kernels.values()) / 1e6,
        "kernels": started,
        "GiB": held / 2**30,
        "warm up": warm_up,
        "slowest kernels": [(name, us / 1e3) for name, us in kernels.most_common(25)],
        "host": sorted(
            (
                (event.self_cpu_time_total / 1e3, event.count, event.key)
                for event in profiler.key_averages()
            ),
            reverse=True,
        )[:40],
    }


def predicted(config: Config) -> dict[str, float]:
    """Return the prediction for this rank, without messages."""
    config.compile = False  # is not modelled
    predictor = Predictor(config, read_machine("h100"))
    found = predictor.predict(1, config.parallel.domain)
    return {
        "predicted step": found.time.compute,
        "predicted start": found.time.starting,
        "predicted GiB": found.held_bytes / 2**30,
    }


def _keep_gradients(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce nothing: torch's fake process group can't."""
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print a line for each model and domain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--domain", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--keys", nargs="*", default=[])
    parser.add_argument("--grid", nargs=2, type=int, default=GRID)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-prediction", action="store_true", help="measure only")
    parser.add_argument("--json", type=Path, help="a file to append all figures to")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        data = write_store(Path(folder) / "fields.zarr", tuple(given.grid), TIMES, "none", CHANNELS)
        data = replace(data, levels=list(LEVELS))
        for model in given.models:
            for domain in given.domain:
                config = configured(model, domain, tuple(given.keys), data)
                try:
                    row = measured(config, torch.device(given.device))
                except torch.OutOfMemoryError:
                    print(model, domain, *given.keys, "does not fit", flush=True)
                    continue
                row |= {} if given.no_prediction else predicted(config)
                if given.json is not None:
                    with given.json.open("a") as file:
                        entry = {"model": model, "domain": domain, "keys": given.keys, **row}
                        file.write(json.dumps(entry) + "\n")
                print(as_text(model, domain, given.keys, row), flush=True)


def as_text(model: str, domain: int, keys: list[str], row: dict[str, Any]) -> str:
    """Return the line of a model and domain."""
    return (
        f"{model:<17} domain {domain} {' '.join(keys):<24}"
        f" step {1e3 * row['step']:7.1f} median {1e3 * row['median']:7.1f}"
        f" in a row {1e3 * row['in a row']:7.1f}"
        f" busy {1e3 * row['busy']:7.1f} kernels {row['kernels']:5d}"
        f" predicted {1e3 * row.get('predicted step', 0):7.1f}"
        f" start {1e3 * row.get('predicted start', 0):6.1f}"
        f" GiB {row['GiB']:5.2f} predicted {row.get('predicted GiB', 0):5.2f}"
        f" warm-up {row['warm up']:5.1f} s"
    )


if __name__ == "__main__":
    main()

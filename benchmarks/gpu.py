"""Measure training steps of the models for a quarter degree on one GPU.

`python benchmarks/gpu.py [--domain 1 8] [--models NAME ...] [--keys KEY=VALUE ...]` needs a GPU. In
a domain of several ranks it measures the rank in the middle, with its band, while nobody sends
messages: what the rank computes, and what its host starts.

- step: milliseconds of the fastest training step; in a row: of several of which none is waited for;
- busy: milliseconds in which kernels ran, by torch's profiler, and the number of kernels;
- launches: kernels in forward and backward that `credit-dp plan` counts;
- GiB: the most that was allocated, without the memory of a CUDA graph, and what the plan expects.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from loader import write_store
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from credit_dp.cli.compose import Composer
from credit_dp.config import Config, DataConfig
from credit_dp.costs.budget import plan_step
from credit_dp.data.channels import Channel
from credit_dp.data.climatology import Climatology
from credit_dp.data.setup import TrainingData
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.distributed.worker import set_precision
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training import build_training, cuda_graph, trainer

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
STEPS = 6


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
            patch.object(build_training, "build_chunk_exchange", return_value=None),
            patch.object(trainer, "MAX_CONSECUTIVE_SKIPS", 1000),
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
    """Return the figures of a rank's steps."""
    if device.type == "cuda":
        gc.collect()  # what an earlier model has left
        torch.cuda.empty_cache()
    set_precision(config.trainer)
    prepared = unnormalised(Store.open(config.data))
    with one_of(config.parallel.domain) as manager:
        training = build_training.build_training(config, prepared, manager, device)
        model = getattr(training.trainer.forward_backward, "model", None)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, _keep_gradients)
        with training.loader:
            batch = next(training.loader)
        training.trainer.start()

        def steps(count: int) -> float:
            """Return the seconds of a step."""
            began = time.perf_counter()
            for _ in range(count):
                training.trainer.train_step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        steps(3 + config.trainer.cuda_graph * cuda_graph.WARM_UP)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [steps(1) for _ in range(STEPS)]
        held = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        in_a_row = steps(STEPS)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            steps(1)
    kernels = [
        event
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    by_name: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name] += event.device_time_total / 1e3
    return {
        "step": 1e3 * min(seconds),
        "in a row": 1e3 * in_a_row,
        "busy": by_name.total(),
        "kernels": len(kernels),
        "GiB": held / 2**30,
        "slowest kernels": by_name.most_common(25),
    }


def planned(config: Config) -> dict[str, float]:
    """Return what the plan counts for a rank, with ddp."""
    plan = plan_step(config)
    return {
        "launches": plan.report.launches,
        "planned GiB": plan.budgets[0].total_held / 2**30,
    }


def _keep_gradients(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce nothing: torch's fake process group can't."""
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    """Print a line for each model and domain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--domain", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--keys", nargs="*", default=[])
    parser.add_argument("--grid", nargs=2, type=int, default=GRID)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="a file to append all figures to")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        data = write_store(Path(folder) / "fields.zarr", tuple(given.grid), TIMES, "none", CHANNELS)
        data = replace(data, levels=list(LEVELS))
        for model, domain in product(given.models, given.domain):
            row: dict[str, Any] = {"model": model, "domain": domain, "keys": " ".join(given.keys)}
            config = configured(model, domain, tuple(given.keys), data)
            try:
                row |= measured(config, torch.device(given.device))
            except torch.OutOfMemoryError:
                row["step"] = "does not fit"
            row |= planned(config)
            if given.json is not None:
                with given.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            cells = {name: value for name, value in row.items() if name != "slowest kernels"}
            print(
                ", ".join(
                    f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in cells.items()
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()

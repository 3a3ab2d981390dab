"""Compare a training step on several meshes of four ranks: `python benchmarks/meshes.py`.

All have the same model, global batch and micro-batches, on the quickstart climate. Four ranks of
one thread share two cores, so times show how much a mesh works and waits, not how it scales.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

# Freed tensors go back to the system at once, so that resident memory is the memory in use. The C
# library reads these variables when a process starts, so they act on the ranks.
os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"

import torch
from peak import forget_peak, peak, resident
from pinned import on_pinned_ranks
from sent import Sent

from credit_dp.cli.compose import Composer
from credit_dp.config import Config
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build_training import build_training

KEYS = (
    "experiment=fast",
    "model=unet_small",
    "data.grid=32x64",
    "data.batch_size=4",
    "trainer.steps=100",
    "trainer.log_every=1000",
    "trainer.checkpoint_every=1000",
)
MESHES = (
    "",
    "parallel.domain=4",
    "parallel.data=4",
    "parallel.data=4 parallel.data_mode=fsdp2",
    "parallel.domain=2 parallel.data=2",
    "parallel.pipeline=2 parallel.domain=2",
    "parallel.pipeline=2 parallel.data=2",
)
WARM_UP, STEPS = 1, 3


class Found(NamedTuple):
    """The figures of a rank: seconds of a step, growth of its memory, bytes that it sends."""

    seconds: float
    growth: int
    sent: float


def measure(manager: DomainParallelManager, config: Config) -> Found:
    """Return the figures of this rank for a few training steps."""
    prepared = prepare_training_data(config.data)
    before = resident()
    forget_peak()
    training = build_training(config, prepared, manager, torch.device("cpu"))
    seconds = []
    with training.loader:
        trainer = training.trainer
        trainer.start()
        for _ in range(WARM_UP):
            trainer.train_step(next(training.loader))
        for _ in range(STEPS):
            began = time.perf_counter()
            trainer.train_step(next(training.loader))
            seconds.append(time.perf_counter() - began)
        growth = peak() - before
        with Sent() as sent:
            trainer.train_step(next(training.loader))
    return Found(statistics.median(seconds), growth, sent.bytes)


def main() -> None:
    """Print a line for each mesh, with its figures relative to one process."""
    alone: Found | None = None
    print("mesh                                       ms/step   / one   growth   / one      sent")
    for mesh in MESHES:
        config = Composer("train").compose_config([*KEYS, *mesh.split()])
        parallel = replace(config.parallel, data=config.parallel.data or 1)
        config = replace(config, parallel=parallel)
        domain, pipeline = parallel.domain, parallel.pipeline
        ranks = pipeline * (parallel.data or 1) * domain
        prepare_training_data(config.data)
        each = on_pinned_ranks(measure, config, ranks=ranks, domain=domain, pipeline=pipeline)
        found = Found(*(max(of_rank) for of_rank in zip(*each, strict=True)))
        alone = alone or found
        print(
            f"{mesh.replace('parallel.', '') or 'one process':<40} {1e3 * found.seconds:9.0f} "
            f"{found.seconds / alone.seconds:7.2f} {found.growth / 1e6:6.0f} MB "
            f"{found.growth / alone.growth:7.2f} {found.sent / 1e6:6.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Small training runs on small stores, for tests of everything that happens in a run."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from credit_dp.config import (
    AdamWConfig,
    Config,
    CrossFormerConfig,
    LoggerConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StandardLossConfig,
    TrainerConfig,
    UNetConfig,
)
from credit_dp.data.loader import Batch
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build import Training, build_training
from credit_dp.training.trainer import StepRecord
from tests.data import stores


def make_store(folder: Path, rows: int, columns: int = 16, steps: int = 20) -> Path:
    """A store of random fields, whole latitude rows in chunks of a few."""
    data = stores.dataset(rows, columns, steps)
    return stores.write(data, folder / f"{rows}x{columns}.zarr", chunks={"time": 1, "latitude": 8})


def tiny_unet(**options: Any) -> UNetConfig:
    """Two levels of one block each."""
    return UNetConfig(channels=[8, 16], blocks=1, groups=4, **options)


def tiny_crossformer(**options: Any) -> CrossFormerConfig:
    """Two levels of one block each, unless `depths` says otherwise."""
    return CrossFormerConfig(
        **{
            "channels": [8, 8],
            "depths": [1, 1],
            "head_channels": 4,
            "kernels": [[2, 4], [2, 4]],
            "strides": [2, 2],
            "local_windows": [2, 2],
            "global_windows": [2, 1],
            "mlp_ratio": 4,
            "groups": 4,
            **options,
        }
    )


def make_config(store: Path, run: Path, model: ModelConfig | None = None, **changes: Any) -> Config:
    """Ten steps of a tiny model in float64; `changes` are those of the trainer group."""
    trainer: dict[str, Any] = {
        "steps": 10,
        "dtype": "float64",
        "log_every": 1,
        "checkpoint_every": 5,
        "evaluate_hours": [6, 12],
        "evaluate_stride_hours": 6,
    }
    return Config(
        model=model or tiny_unet(),
        data=stores.config(
            store,
            train=["2000-01-01", "2000-01-03"],
            valid=["2000-01-04T00", "2000-01-04T06"],
            test=["2000-01-04", "2000-01-05"],
            batch_size=4,
        ),
        parallel=ParallelConfig(),
        trainer=TrainerConfig(**(trainer | changes)),
        loss=StandardLossConfig(level_weight=True),
        optimizer=AdamWConfig(lr=1e-2, warmup_steps=3),
        logger=LoggerConfig(wandb="disabled"),
        run=RunConfig(dir=str(run)),
        seed=3,
        device="cpu",
    )


def alone() -> DomainParallelManager:
    """The manager of a run on one process."""
    return DomainParallelManager(1, 1)


def built(config: Config, manager: DomainParallelManager) -> Training:
    """A run ready to start on the CPU."""
    return build_training(config, prepare_training_data(config.data), manager, torch.device("cpu"))


def step_records(
    training: Training, batches: Iterable[Batch] | None = None
) -> Iterator[StepRecord]:
    """Train to the last step, and yield the record of each."""
    trainer = training.trainer
    trainer.start()
    source = iter(training.loader if batches is None else batches)
    while trainer.state.step < trainer.config.steps:
        yield trainer.train_step(trainer.throughput.next_batch(source))


def train_on(training: Training) -> list[tuple[float, float]]:
    """Train to the end: loss and gradient norm of every step."""
    with training.loader:
        records = list(step_records(training))
    return [
        (record.loss, record.grad_norm)
        for record in records
        if record.loss is not None and record.grad_norm is not None
    ]


def weights(training: Training) -> torch.Tensor:
    """All parameters as one vector, in the order of their names."""
    named = training.trainer.state.parameters
    return torch.cat([parameter.detach().flatten() for parameter in named.values()])

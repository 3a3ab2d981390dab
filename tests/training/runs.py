"""Small training runs on small stores, for tests of everything that happens in a run."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from credit_dp.config import (
    AdamWConfig,
    Config,
    CrossFormerConfig,
    LoggerConfig,
    ModelConfig,
    PanguConfig,
    ParallelConfig,
    RunConfig,
    SFNOConfig,
    StandardLossConfig,
    SwinConfig,
    TrainerConfig,
    UNetConfig,
)
from credit_dp.data.loader import Batch
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build_training import Training, build_training
from credit_dp.training.trainer import StepRecord
from tests.data import stores


def make_store(folder: Path, rows: int, columns: int = 16, steps: int = 20) -> Path:
    """Write a store of random fields, whole latitude rows in chunks of a few."""
    data = stores.dataset(rows, columns, steps)
    return stores.write(data, folder / f"{rows}x{columns}.zarr", chunks={"time": 1, "latitude": 8})


def tiny_unet(**options: Any) -> UNetConfig:
    """Return a U-Net config with two levels of one block each."""
    return UNetConfig(channels=[8, 16], blocks=1, groups=4, **options)


def tiny_crossformer(**options: Any) -> CrossFormerConfig:
    """Return a CrossFormer config with two levels of one block each, unless `depths` differs."""
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


def tiny_pangu(**options: Any) -> PanguConfig:
    """Return a Pangu config of few channels, with one block a level, unless `depths` differs."""
    return PanguConfig(
        **{
            "width": 8,
            "depths": [1, 1, 1, 1],
            "heads": [1, 2, 2, 1],
            "patch": [2, 4, 4],
            "window": [2, 2, 2],
            "mlp_ratio": 4,
            **options,
        }
    )


def tiny_swin(**options: Any) -> SwinConfig:
    """Return a Swin config of few channels, with blocks of shifted windows at the coarser level."""
    return SwinConfig(
        **{
            "width": 8,
            "depths": [1, 2, 1],
            "heads": [1, 2, 2],
            "patch": [4, 4],
            "window": [2, 2],
            **options,
        }
    )


def tiny_sfno(**options: Any) -> SFNOConfig:
    """Return a config of the Spherical Fourier Neural Operator with two blocks of few channels."""
    return SFNOConfig(**{"channels": 8, "blocks": 2, **options})


# Of 32, 33, 61 and 121 rows all but the first divide into no whole patches or windows.
TINY_MODELS: dict[str, ModelConfig] = {
    "unet": tiny_unet(),
    "several frames": tiny_unet(
        frames=2, squeeze_excite=True, global_conditioning=True, activation_checkpointing=True
    ),
    "next state": tiny_unet(residual=False),
    "stochastic depth": tiny_unet(stochastic_depth=0.3),
    "pangu": tiny_pangu(depths=[1, 2, 1, 1], stochastic_depth=0.3),
    "crossformer": tiny_crossformer(stochastic_depth=0.3),
    "swin": tiny_swin(stochastic_depth=0.3),
    "sfno": tiny_sfno(stochastic_depth=0.3),
}


def make_config(store: Path, run: Path, model: ModelConfig | None = None, **changes: Any) -> Config:
    """Return ten steps of a tiny model in float64; `changes` are keys of the trainer group."""
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
    """Return the manager of a run on one process."""
    return DomainParallelManager(1, 1)


def built(config: Config, manager: DomainParallelManager) -> Training:
    """Return a run that is ready to start on the CPU."""
    return build_training(config, prepare_training_data(config.data), manager, torch.device("cpu"))


def step_records(
    training: Training,
    batches: Iterable[Batch] | None = None,
    newest_checkpoint: Callable[[], Path | None] = lambda: None,
    pending_signal: Callable[[], int] = lambda: 0,
) -> Iterator[StepRecord]:
    """Train to the last step, and yield the record of each."""
    trainer = training.trainer
    trainer.start(newest_checkpoint)
    source = iter(training.loader if batches is None else batches)
    while trainer.state.step < trainer.config.steps:
        yield trainer.train_step(trainer.throughput.next_batch(source), pending_signal)


def train_on(training: Training) -> list[tuple[float, float]]:
    """Train to the end, and return loss and gradient norm of every step."""
    with training.loader:
        records = list(step_records(training))
    return [
        (record.loss, record.grad_norm)
        for record in records
        if record.loss is not None and record.grad_norm is not None
    ]


def weights(training: Training) -> torch.Tensor:
    """Return all parameters as one vector, in the order of their names."""
    named = training.trainer.state.parameters
    return torch.cat([parameter.detach().flatten() for parameter in named.values()])

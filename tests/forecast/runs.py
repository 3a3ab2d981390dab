"""Trained runs, and forecasts with them on ranks that are threads of this process."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from credit_dp.config import AdamWConfig, Config, DiffusionConfig, ModelConfig, StandardLossConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.forecast.make_forecasts import make_forecasts
from credit_dp.forecast.request import ForecastConfig, ForecastRequest
from credit_dp.training.build_training import Training
from credit_dp.training.console import Screen
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.ranks import on_threads
from tests.training.runs import alone, built, make_config, make_store, tiny_unet, train_on

ROWS = 17
INIT = "2000-01-04/2000-01-04T12/12h"  # two times
AVERAGED = AdamWConfig(lr=1e-2, warmup_steps=1, ema=0.9)


def train(folder: Path, model: ModelConfig | None = None, rows: int = ROWS) -> Config:
    """Train two steps with weight averages, save a checkpoint, and return the config."""
    config = make_config(make_store(folder, rows), folder / "run", model, steps=2)
    config = replace(config, optimizer=AVERAGED)
    leave_checkpoint(config)
    return config


def train_ensemble(folder: Path) -> Config:
    """Train two steps of three members, save a checkpoint, and return the config."""
    config = make_config(make_store(folder, ROWS), folder / "run", steps=2)
    trainer = replace(config.trainer, members=3)
    loss = StandardLossConfig(name="crps")
    config = replace(config, model=tiny_unet(noise=4), trainer=trainer, loss=loss)
    leave_checkpoint(config)
    return config


def train_diffusion(folder: Path) -> Config:
    """Train two steps of a diffusion model, whose scores are of three members."""
    keys: dict[str, Any] = {"noise": 4, "sampling_steps": 2, "s_churn": 0.5}
    model = DiffusionConfig(channels=[8, 16], blocks=1, groups=4, **keys)
    store = make_store(folder, ROWS)
    config = make_config(store, folder / "run", model, steps=2, evaluate_members=3)
    leave_checkpoint(config)
    return config


def leave_checkpoint(config: Config) -> Training:
    """Train a run to its end, and save a checkpoint."""
    training = built(config, alone())
    train_on(training)
    folder = RunFolder(Path(config.run.dir)).checkpoints
    save_checkpoint(folder, training.trainer.state, resolved_yaml(config))
    return training


def forecast_config(config: Config, out: Path, **changes: Any) -> ForecastConfig:
    """Return a request of forecasts from two times to 24 hours, with `changes`."""
    checkpoint = Path(config.run.dir) / "checkpoint/step-00000002"
    keys = {"checkpoint": str(checkpoint), "init": INIT, "lead": "24h", "out": str(out)}
    values = {field.name: getattr(config, field.name) for field in fields(Config)}
    return ForecastConfig(**values, request=ForecastRequest(**(keys | changes)))


def on_rank(manager: DomainParallelManager, config: ForecastConfig) -> None:
    """Compute this rank's part of the forecasts."""
    make_forecasts(config, manager, torch.device("cpu"), Screen(None))


def forecast(config: ForecastConfig, ranks: int = 1) -> Path:
    """Compute forecasts, one thread for each band of rows, and return their path."""
    if ranks == 1:
        on_rank(alone(), config)
    else:
        on_threads(ranks, on_rank, config)
    return Path(config.request.out)


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder by name."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}

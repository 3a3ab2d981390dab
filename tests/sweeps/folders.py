"""Writes folders of sweeps as their runs leave them."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

COLUMNS = "step,loss,lr,grad_norm,seconds,samples_per_second,sent_bytes,peak_memory_bytes"
STARTED = (
    "2026-11-22 03:07:45,554 [rank 0] INFO credit_dp.training.run_folder: started as process 5 on "
    "somewhere\n"
)
ENDED = "2026-11-22 03:07:51,639 [rank 0] INFO credit_dp.training.run_folder: ended\n"
CRASHED = (
    "2026-11-22 03:07:51,639 [rank 0] ERROR credit_dp.training.run_folder: ended by an error\n"
    "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n'
    "credit_dp.errors.UserError: trainer: the loss has to stay finite\n"
    "another line of that message\n"
)


def write_sweep(folder: Path, typed: Sequence[str]) -> Path:
    """Write what a launcher writes before the first run starts: the overrides of each run."""
    keys = [text.partition("=")[0] for text in typed]
    for number, values in enumerate(
        product(*(text.partition("=")[2].split(",") for text in typed))
    ):
        overrides = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        write_submission(folder / str(number), *overrides)
    return folder


def write_submission(run: Path, *overrides: str) -> None:
    """Write the overrides of a run that has not started."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "submitted.json").write_text(json.dumps({"overrides": overrides, "slurm_job": None}))


def write_given(run: Path, *overrides: str) -> Path:
    """Write the overrides that Hydra saves in a run's folder."""
    if (run / "submitted.json").exists():
        write_submission(run, *overrides)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    return run


def write_config(run: Path, **groups: Mapping[str, Any]) -> None:
    """Write a config with these keys, and the others that are read."""
    config: dict[str, dict[str, Any]] = {
        "model": {"name": "unet"},
        "data": {"name": "quickstart", "grid": "24x48", "batch_size": 4},
        "parallel": {"pipeline": 1, "data": 1, "domain": 1, "threads": 1},
        "trainer": {"steps": 30, "log_every": 1},
    }
    for name, values in groups.items():
        config[name] |= values
    text = yaml.safe_dump({**config, "device": "cpu", "seed": 0})
    (run / "config.yaml").write_text(f"# credit-dp train --again {run}\n{text}")


def write_log(run: Path, seconds: Sequence[float], **columns: float) -> None:
    """Write `metrics.csv` with a row for each step and its seconds."""
    names = COLUMNS.split(",") + [name for name in columns if name not in COLUMNS]
    lines = [",".join(names)]
    for step, pace in enumerate(seconds, start=1):
        row = {"step": step, "loss": 1 / step, "lr": 0.1, "grad_norm": 1.0, "seconds": pace}
        row |= {"samples_per_second": 4 / pace, "sent_bytes": 1e6, "peak_memory_bytes": 5e8}
        lines.append(",".join(str({**row, **columns}[name]) for name in names))
    (run / "metrics.csv").write_text("\n".join([*lines, ""]))


def write_scores(run: Path, model: float) -> None:
    """Write `metrics.json` of two fields and two leads; persistence has an error of 10 and 20."""
    leads = {
        "6h": {"model": model, "persistence": 10.0, "climatology": 50.0},
        "24h": {"model": 2 * model, "persistence": 20.0, "climatology": 50.0},
    }
    scores = {"step": 30, "rmse": {"geopotential_500": leads, "2m_temperature": leads}}
    (run / "metrics.json").write_text(json.dumps(scores))


def write_rank_log(run: Path, *lines: str) -> None:
    """Write `logs/rank-0.log`."""
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("".join((STARTED, *lines)))


def write_done(
    run: Path, *overrides: str, model: float, seconds: float = 0.5, **groups: Mapping[str, Any]
) -> Path:
    """Write a finished run of thirty steps, the first of which are slow."""
    write_given(run, *overrides)
    write_config(run, **groups)
    write_log(run, [9.0] * 5 + [seconds] * 25)
    write_scores(run, model)
    write_rank_log(run, ENDED)
    return run

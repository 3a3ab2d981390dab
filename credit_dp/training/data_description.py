"""What a model was trained on and for, in plain words: resuming for anything else is refused."""

from dataclasses import asdict
from typing import Any

import numpy as np

from credit_dp.data.prepare import Prepared
from credit_dp.errors import UserError
from credit_dp.model_config import ModelConfig

Description = dict[str, Any]  # text, numbers and lists only: it lies in the checkpoint

# Sums over the same fields differ in their last digits between machines.
TOLERANCE = 1e-6

# What checkpoints that do not say it were made with.
UNSAID: Description = {"model.frames": 1, "model.residual": True}


def describe_data(prepared: Prepared, model: ModelConfig) -> Description:
    """Channels in order, step, grid and sample by their config keys, and the normalisation."""
    store = prepared.store
    rows, columns = store.grid
    statistics = asdict(prepared.statistics)
    return {
        "data.prognostic": list(store.channels.variables),
        "data.levels": list(store.levels),
        "data.forcing": list(store.channels.forcing),
        "data.static": list(store.channels.static),
        "data.step_hours": store.config.step_hours,
        "data.grid": f"{rows}x{columns}",
        "model.frames": model.frames,
        "model.residual": model.residual,
        "statistics": {name: values.tolist() for name, values in statistics.items()},
    }


def check_data(saved: Description, own: Description) -> None:
    """Refuse to go on with other data, naming the first key that differs.

    Raises:
        UserError: the weights would meet other channels, another step, grid or normalisation, or
            stand for something else.
    """
    saved = {**UNSAID, **saved}
    for key, value in own.items():
        if key != "statistics" and saved[key] != value:
            raise UserError(
                f"resume: the checkpoint was trained with {key}={shown(saved[key])}, the config "
                f"has {shown(value)}. Set {key} to that of the checkpoint, or start a new run."
            )
    statistics = own.get("statistics", {})
    for name, values in statistics.items():
        # Means are compared in units of the spread: one of a wind may well be near zero.
        scale = statistics[name.replace("mean", "std")]
        change = np.abs(np.subtract(values, saved["statistics"][name])) / np.asarray(scale)
        if np.any(change > TOLERANCE):
            raise UserError(
                f"resume: the checkpoint was trained with another {name} of the fields: "
                "data.store or data.train differs. Set them to those of the checkpoint, or start "
                "a new run."
            )


def shown(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

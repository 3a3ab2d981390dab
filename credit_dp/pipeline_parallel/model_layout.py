"""Places a model as `parallel.layout` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from credit_dp.errors import UserError
from credit_dp.pipeline_parallel.moving import get_device
from credit_dp.pipeline_parallel.placement import parallelize_pipeline

ROOT = "root"  # in the config; a key cannot be empty there


def place_model(model: nn.Module, layout: Mapping[str, Any], first_gpu: int = 0) -> nn.Module:
    """Place the modules that `parallel.layout` names, and return the model.

    Without an entry `root` the model itself computes where it is, and its output comes back there.

    Args:
        model: built, and converted if its rows are sharded.
        layout: names of modules -> a device, or [processing, output].
        first_gpu: the GPU that `cuda:0` stands for on this rank.

    Raises:
        UserError: a module or a device does not exist, or a module needs two devices.
    """
    if not layout:
        return model
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    places: dict[str, Any] = {"": (home, home)}
    for name, value in layout.items():
        places["" if name == ROOT else name] = _on_rank(value, first_gpu)
    try:
        return parallelize_pipeline(model, places)
    except UserError as error:
        raise UserError(f"parallel.layout: {error}") from None


def home_device(
    layout: Mapping[str, Any], device: torch.device, first_gpu: int = 0
) -> torch.device:
    """Return where the output of a placed model is, so that targets and loss can be there too.

    Args:
        layout: as in `parallel.layout`.
        device: of the run, where the model is built.
        first_gpu: the GPU that `cuda:0` stands for on this rank.

    Raises:
        UserError: there is no such device.
    """
    if ROOT not in layout:
        return device
    value = _on_rank(layout[ROOT], first_gpu)
    try:
        return get_device(value if isinstance(value, str) else value[-1])
    except UserError as error:
        raise UserError(f"parallel.layout: {ROOT}: {error}") from None


def _on_rank(value: Any, first_gpu: int) -> Any:
    """Return devices with GPUs counted from the rank's first one."""
    if isinstance(value, (list, tuple)):
        return [_on_rank(device, first_gpu) for device in value]
    found = re.fullmatch(r"cuda(?::(\d+))?", str(value))
    return f"cuda:{first_gpu + int(found[1] or 0)}" if found else value

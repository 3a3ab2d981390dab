"""Checks that the modules which are to be placed exist, and that each has one place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from credit_dp.errors import UserError


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names of modules that are not there, and two names of one module.

    Raises:
        UserError: with the nearest names that are there.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kind = type(model).__name__
    unknown = [name for name in names if name not in modules]
    if unknown:
        listed = "; ".join(f"{name!r} ({_nearest(str(name), list(modules))})" for name in unknown)
        raise UserError(f"{kind}: needs names of its modules, but has no {listed}")
    seen: dict[nn.Module, str] = {}
    for name in names:
        other = seen.setdefault(modules[name], name)
        if other != name:
            raise UserError(f"{kind}: {other} and {name} are one module, name it once")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known[1:], n=3, cutoff=0.5)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"it has {', '.join(other for other in known[1:] if '.' not in other) or 'none'}"


def check_tied(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Refuse a parameter that two modules share which compute on different devices.

    Raises:
        UserError: with both names of the parameter.
    """
    places: dict[nn.Parameter, tuple[str, torch.device]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        device = device_of(name, devices) or parameter.device
        other, elsewhere = places.setdefault(parameter, (name, device))
        if device != elsewhere:
            raise UserError(
                f"{type(model).__name__}: {other} and {name} are one parameter and need one "
                f"device, but got {elsewhere} and {device}. Place both modules on the same device."
            )


def device_of(name: str, devices: Mapping[str, torch.device]) -> torch.device | None:
    """Return the device of the innermost entry that a tensor is in, by the tensor's name."""
    while name:
        name = name.rpartition(".")[0]
        if name in devices:
            return devices[name]
    return None

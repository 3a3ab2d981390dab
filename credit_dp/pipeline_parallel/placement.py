"""Places the modules of a model on several devices of one process, and takes it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from credit_dp.errors import UserError
from credit_dp.pipeline_parallel.moving import Device, get_device, move_to_device
from credit_dp.pipeline_parallel.names import check_names, check_tied, device_of
from credit_dp.pipeline_parallel.placed import (
    called_modules,
    is_placed,
    restore_methods,
    set_devices,
)

Module = TypeVar("Module", bound=nn.Module)
Devices = tuple[torch.device, torch.device | None]


def parallelize_module(
    module: Module, processing_device: Device, output_device: Device | None = None
) -> Module:
    """Let a module compute on one device and hand its output to another; return the module.

    Its parameters are moved in place, so that an optimiser made before still has them. What it is
    called with is moved too, keyword arguments included. Without `output_device` the output stays
    where it was computed.

    Raises:
        UserError: there is no such device, or the module or one in it has been parallelized.
    """
    _refuse_placed(module)
    processing = get_device(processing_device)
    output = None if output_device is None else get_device(output_device)
    move_to_device(module, processing)
    for called in called_modules(module):
        set_devices(called, processing, output)
    return module


def unparallelize_module(module: Module, common_device: Device | None = None) -> Module:
    """Take back `parallelize_module`, move the module to `common_device`, and return it.

    A module that was not parallelized is only moved.

    Raises:
        UserError: there is no such device, or a module inside has to stay where it is.
    """
    device = None if common_device is None else get_device(common_device)
    if device is not None:
        _refuse_placed(module, but=set(called_modules(module)))
    for called in called_modules(module):
        restore_methods(called)
    if device is not None:
        move_to_device(module, device)
    return module


def parallelize_pipeline(
    model: Module, module_to_device: Mapping[str, Device | Sequence[Device]]
) -> Module:
    """Place modules of a model on devices, and return the model.

    Entries count level by level, from the model inwards, so that a deeper one has the last word.
    An entry `""` for the model itself takes inputs, outputs and all that has no entry of its own
    to a known place. A list of modules, which is never called itself, stands for those in it.

    Each tensor goes straight to its last device, so that no other needs room for it; and none goes
    unless all entries are right.

    Args:
        model: not parallelized yet.
        module_to_device: names with dots -> a device, or a pair (processing, output).

    Raises:
        UserError: a module or device does not exist, is named twice, or needs two places; or the
            model has been parallelized.
    """
    _refuse_placed(model)
    check_names(model, list(module_to_device))
    devices = {name: _pair(name, value) for name, value in module_to_device.items()}
    processing = {name: device for name, (device, _) in devices.items()}
    check_tied(model, processing)
    _move(model, processing)
    places: dict[nn.Module, Devices] = {}
    for name in sorted(devices, key=_level):
        places |= dict.fromkeys(called_modules(model.get_submodule(name)), devices[name])
    for module, place in places.items():
        set_devices(module, *place)
    return model


def unparallelize_pipeline(model: Module, common_device: Device | None = None) -> Module:
    """Take back `parallelize_pipeline`, move the model to `common_device`, and return it.

    Without `common_device` parameters stay on the devices where they are.

    Raises:
        UserError: there is no such device.
    """
    device = None if common_device is None else get_device(common_device)
    for module in model.modules():
        restore_methods(module)
    if device is not None:
        move_to_device(model, device)
    return model


def _refuse_placed(module: nn.Module, but: Set[nn.Module] = frozenset()) -> None:
    """Refuse a module that has been placed, or holds one that has."""
    for name, inner in module.named_modules():
        if is_placed(inner) and inner not in but:
            where = f"{type(module).__name__}{f'.{name}' if name else ''}"
            raise UserError(
                f"{where}: needs to be without devices of its own, but has been parallelized. "
                "Call unparallelize_pipeline on it first; outer modules come before inner ones."
            )


def _move(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Move each module's own tensors to the device of the innermost entry that they are in."""
    for name, module in model.named_modules():
        device = device_of(f"{name}.own" if name else "own", devices)
        if device is not None:
            module._apply(partial(move_to_device, device=device), recurse=False)


def _level(name: str) -> int:
    return len(name.split(".")) if name else 0


def _pair(name: str, value: Device | Sequence[Device]) -> Devices:
    """Return (processing, output) of one entry."""
    try:
        if isinstance(value, (str, torch.device)) or not isinstance(value, Sequence):
            return get_device(value), None
        if len(value) == 2:
            return get_device(value[0]), get_device(value[1])
    except UserError as error:
        raise UserError(f"{name or 'root'}: {error}") from None
    raise UserError(
        f"{name or 'root'}: needs a device, or two of them (processing, output), got {len(value)}"
    )

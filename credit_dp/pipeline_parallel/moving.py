"""Moves tensors to a device, with everything that holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from credit_dp.errors import UserError

Device = torch.device | str
WITHOUT_NUMBER = ("meta",)  # back ends of torch that no machine lacks and no module describes


def get_device(device: Device) -> torch.device:
    """Return the `torch.device` that is meant.

    Raises:
        UserError: it is no name of a device, or this machine has no such device.
    """
    if not isinstance(device, (str, torch.device)):
        raise UserError(f"{device!r} is no device, it needs a name like cpu or cuda:0")
    try:
        meant = torch.device(device)
    except RuntimeError:
        raise UserError(f"{device!r} is no device, it needs a name like cpu or cuda:0") from None
    there = devices_there(meant.type)
    if there is not None and (meant.index or 0) >= there:
        raise UserError(
            f"{meant} needs a machine that has it, but torch finds {there or 'no'} "
            f"{'device' if there == 1 else 'devices'} of type {meant.type} here. "
            "Name another device."
        )
    return meant


def devices_there(kind: str) -> int | None:
    """Return how many devices of a type this machine has; None: it needs none to exist."""
    if kind in WITHOUT_NUMBER:
        return None
    try:
        return int(torch.get_device_module(kind).device_count())
    except (RuntimeError, AttributeError):  # this torch was built without it
        return 0


def move_to_device(data: Any, device: Device) -> Any:
    """Return `data` with every tensor in it on `device`.

    Goes into lists, tuples, named tuples, dataclasses and mappings, and keeps their types. What
    holds nothing to move is returned itself; what occurs twice is moved once and still occurs
    twice. Modules are moved in place. Of an object that contains itself the outer one is moved.

    Raises:
        UserError: there is no such device.
    """
    return _Move(get_device(device)).of(data)


def send(thing: Any, device: torch.device) -> Any:
    """Move one tensor, module or packed sequence: all moves of this package go through here."""
    return thing.to(device)


class _Move:
    """One call of `move_to_device`, which remembers what it has met."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.met: dict[int, Any] = {}
        self.kept: list[Any] = []  # an id is an object's own only as long as it lives

    def of(self, data: Any) -> Any:
        """Return the object on the device."""
        if id(data) not in self.met:
            self.kept.append(data)
            self.met[id(data)] = data  # ends the way through an object that contains itself
            self.met[id(data)] = self.moved(data)
        return self.met[id(data)]

    def moved(self, data: Any) -> Any:
        """Return an object, met for the first time, on the device."""
        if isinstance(data, (Tensor, nn.Module, PackedSequence)):
            return send(data, self.device)
        if isinstance(data, Mapping):
            changed = self.changed(data.items())
            return with_entries(data, changed) if changed else data
        if isinstance(data, (list, tuple)):
            changed = self.changed(enumerate(data))
            return with_items(data, changed) if changed else data
        if is_dataclass(data) and not isinstance(data, type):
            names = [field.name for field in fields(data) if hasattr(data, field.name)]
            changed = self.changed((name, getattr(data, name)) for name in names)
            return with_fields(data, changed) if changed else data
        return data

    def changed(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return those of the entries that are other objects on the device."""
        on_device = [(key, value, self.of(value)) for key, value in entries]
        return {key: new for key, old, new in on_device if new is not old}


def with_entries(data: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type and order with some values replaced."""
    if isinstance(data, MutableMapping):
        mapping = copy.copy(data)
        for key, value in changed.items():
            mapping[key] = value
        return mapping
    kind = cast(type[MappingProxyType[Any, Any]], type(data))
    return kind({**data, **changed})


def with_items(data: Any, changed: dict[int, Any]) -> Any:
    """Return a list or tuple of the same type with some items replaced."""
    items = [changed.get(index, item) for index, item in enumerate(data)]
    if isinstance(data, list):
        new = copy.copy(data)
        new[:] = items
        return new
    return type(data)._make(items) if hasattr(data, "_make") else type(data)(items)


def with_fields(data: Any, changed: dict[str, Any]) -> Any:
    """Return a dataclass instance with some fields replaced, frozen or not."""
    new = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(new, name, value)
    return new

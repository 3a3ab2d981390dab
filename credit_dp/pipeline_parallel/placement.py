"""Places the modules of a model on several devices of one process, and takes it back."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from credit_dp.errors import UserError

Device = torch.device | str
UNCOUNTED_TYPES = ("meta",)  # back ends of torch that no machine lacks and no module describes


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
    there = count_devices(meant.type)
    if there is not None and (meant.index or 0) >= there:
        raise UserError(
            f"{meant} needs a machine that has it, but torch finds {there or 'no'} "
            f"{'device' if there == 1 else 'devices'} of type {meant.type} here. "
            "Name another device."
        )
    return meant


def count_devices(kind: str) -> int | None:
    """Return how many devices of a type this machine has; None: it needs none to exist."""
    if kind in UNCOUNTED_TYPES:
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
    return _Mover(get_device(device)).move(data)


def move_object(thing: Any, device: torch.device) -> Any:
    """Move one tensor, module or packed sequence: all moves of this package go through here."""
    return thing.to(device)


class _Mover:
    """One call of `move_to_device`, which remembers what it has met."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved_by_id: dict[int, Any] = {}
        self.references: list[Any] = []  # an id is an object's own only as long as it lives

    def move(self, data: Any) -> Any:
        """Return the object on the device."""
        if id(data) not in self.moved_by_id:
            self.references.append(data)
            self.moved_by_id[id(data)] = data  # ends the way through an object that contains itself
            self.moved_by_id[id(data)] = self.move_unseen(data)
        return self.moved_by_id[id(data)]

    def move_unseen(self, data: Any) -> Any:
        """Return an object, met for the first time, on the device."""
        if isinstance(data, (Tensor, nn.Module, PackedSequence)):
            return move_object(data, self.device)
        if isinstance(data, Mapping):
            changed = self.changed_entries(data.items())
            return with_entries(data, changed) if changed else data
        if isinstance(data, (list, tuple)):
            changed = self.changed_entries(enumerate(data))
            return with_items(data, changed) if changed else data
        if is_dataclass(data) and not isinstance(data, type):
            names = [field.name for field in fields(data) if hasattr(data, field.name)]
            changed = self.changed_entries((name, getattr(data, name)) for name in names)
            return with_fields(data, changed) if changed else data
        return data

    def changed_entries(self, entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return those of the entries that are other objects on the device."""
        on_device = [(key, value, self.move(value)) for key, value in entries]
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


@final
class OriginalMethod:
    """A method as a module has it: from its class, or as an attribute of its own.

    Refers to the module and not to a bound method, so that copies of the module call their own.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.attribute = vars(module).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if self.attribute is not None:
            return self.attribute(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def restore(self) -> None:
        """Let the module have it again, where it was."""
        if self.attribute is None:
            del vars(self.module)[self.name]
        else:
            vars(self.module)[self.name] = self.attribute


@final
class PlacedForward:
    """The forward of a placed module: input to its device, output to where it is needed."""

    def __init__(
        self, original: OriginalMethod, processing: torch.device, output: torch.device | None
    ) -> None:
        self.original = original
        self.processing = processing
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module makes of its input."""
        args, kwargs = move_to_device((args, kwargs), self.processing)
        made = self.original(*args, **kwargs)
        return made if self.output is None else move_to_device(made, self.output)


@final
class PlacedRepr:
    """The description of a placed module: its own, and its devices."""

    def __init__(
        self, original: OriginalMethod, processing: torch.device, output: torch.device | None
    ) -> None:
        self.original = original
        devices = {"processing_device": processing, "output_device": output}
        self.devices = ", ".join(f"{key}={value}" for key, value in devices.items() if value)

    def __call__(self) -> str:
        """Return the description."""
        return ", ".join(text for text in (self.original(), self.devices) if text)


def is_placed(module: nn.Module) -> bool:
    """Return whether the module has devices of its own."""
    return isinstance(vars(module).get("forward"), PlacedForward)


def called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module; of a list or table of modules, which is never called, those in it."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield module
        return
    for child in module.children():
        yield from called_modules(child)


def set_devices(module: nn.Module, processing: torch.device, output: torch.device | None) -> None:
    """Let a module, which is there already, compute on one device and hand its output on."""
    forward = PlacedForward(OriginalMethod(module, "forward"), processing, output)
    description = PlacedRepr(OriginalMethod(module, "extra_repr"), processing, output)
    vars(module).update(forward=forward, extra_repr=description)


def restore_methods(module: nn.Module) -> None:
    """Give the module back the methods it had, if it has been placed; its tensors stay."""
    for name in ("forward", "extra_repr"):
        method = vars(module).get(name)
        if isinstance(method, (PlacedForward, PlacedRepr)):
            method.original.restore()


def check_module_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names of modules that are not there, and two names of one module.

    Raises:
        UserError: with the nearest names that are there.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kind = type(model).__name__
    unknown = [name for name in names if name not in modules]
    if unknown:
        listed = "; ".join(
            f"{name!r} ({_nearest_names(str(name), list(modules))})" for name in unknown
        )
        raise UserError(f"{kind}: needs names of its modules, but has no {listed}")
    seen: dict[nn.Module, str] = {}
    for name in names:
        other = seen.setdefault(modules[name], name)
        if other != name:
            raise UserError(f"{kind}: {other} and {name} are one module, name it once")


def _nearest_names(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known[1:], n=3, cutoff=0.5)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"it has {', '.join(other for other in known[1:] if '.' not in other) or 'none'}"


def check_tied_parameters(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Refuse a parameter that two modules share which compute on different devices.

    Raises:
        UserError: with both names of the parameter.
    """
    places: dict[nn.Parameter, tuple[str, torch.device]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        device = innermost_device(name, devices) or parameter.device
        other, elsewhere = places.setdefault(parameter, (name, device))
        if device != elsewhere:
            raise UserError(
                f"{type(model).__name__}: {other} and {name} are one parameter and need one "
                f"device, but got {elsewhere} and {device}. Place both modules on the same device."
            )


def innermost_device(name: str, devices: Mapping[str, torch.device]) -> torch.device | None:
    """Return the device of the innermost entry that a tensor is in, by the tensor's name."""
    while name:
        name = name.rpartition(".")[0]
        if name in devices:
            return devices[name]
    return None


Module = TypeVar("Module", bound=nn.Module)
DevicePair = tuple[torch.device, torch.device | None]


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
    check_module_names(model, list(module_to_device))
    devices = {name: _device_pair(name, value) for name, value in module_to_device.items()}
    processing = {name: device for name, (device, _) in devices.items()}
    check_tied_parameters(model, processing)
    _move_modules(model, processing)
    places: dict[nn.Module, DevicePair] = {}
    for name in sorted(devices, key=_nesting_depth):
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


def _move_modules(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Move each module's own tensors to the device of the innermost entry that they are in."""
    for name, module in model.named_modules():
        device = innermost_device(f"{name}.own" if name else "own", devices)
        if device is not None:
            module._apply(partial(move_to_device, device=device), recurse=False)


def _nesting_depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _device_pair(name: str, value: Device | Sequence[Device]) -> DevicePair:
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


def model_output_device(
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

"""Place the modules of a model on several devices of one process, and undo it.

A placed module computes on one device: its parameters are moved there, and its `forward` is
replaced by one that moves the input there and the output on. In this order: moving data between
devices, the replaced methods, checks of names, the public functions, and `parallel.layout`.
"""

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
from credit_dp.torch_private import apply_to_tensors

Device = torch.device | str
UNCOUNTED_TYPES = ("meta",)  # device types that need no hardware and have no `torch.TYPE` module


def get_device(device: Device) -> torch.device:
    """Return a `torch.device` that this machine has."""
    if not isinstance(device, (str, torch.device)):
        raise UserError(f"{device!r} is not a device, it needs a name like cpu or cuda:0")
    try:
        named = torch.device(device)
    except RuntimeError:
        raise UserError(f"{device!r} is not a device, it needs a name like cpu or cuda:0") from None
    count = count_devices(named.type)
    if count is not None and (named.index or 0) >= count:
        raise UserError(
            f"{named} needs a machine that has it, but torch finds {count or 'no'} "
            f"{'device' if count == 1 else 'devices'} of type {named.type} here. "
            "Name another device."
        )
    return named


def count_devices(device_type: str) -> int | None:
    """Return the number of devices of a type; None for a type that needs no hardware."""
    if device_type in UNCOUNTED_TYPES:
        return None
    try:
        return int(torch.get_device_module(device_type).device_count())
    except (RuntimeError, AttributeError):  # torch was built without this type
        return 0


def move_to_device(data: Any, device: Device) -> Any:
    """Return `data` with every tensor in it on `device`.

    Descends into lists, tuples, named tuples, dataclasses and mappings, and keeps their types. An
    object without anything to move is returned itself. An object that occurs twice is moved once
    and still occurs twice. Modules are moved in place. If an object contains itself, its copy on
    the device contains the original.
    """
    return _Mover(get_device(device)).move(data)


def move_object(data: Any, device: torch.device) -> Any:
    """Return one tensor, module or packed sequence on a device; every move is a call of this."""
    return data.to(device)


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved_by_id: dict[int, Any] = {}
        self.references: list[Any] = []  # keeps the objects alive, as ids of freed ones are reused

    def move(self, data: Any) -> Any:
        if id(data) not in self.moved_by_id:
            self.references.append(data)
            self.moved_by_id[id(data)] = data  # ends the recursion if the object contains itself
            self.moved_by_id[id(data)] = self.move_unseen(data)
        return self.moved_by_id[id(data)]

    def move_unseen(self, data: Any) -> Any:
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
        on_device = [(key, value, self.move(value)) for key, value in entries]
        return {key: new for key, old, new in on_device if new is not old}


def with_entries(data: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type and order with some values replaced."""
    if isinstance(data, MutableMapping):
        mapping = copy.copy(data)  # keeps attributes such as the default factory of a defaultdict
        for key, value in changed.items():
            mapping[key] = value
        return mapping
    mapping_type = cast(type[MappingProxyType[Any, Any]], type(data))
    return mapping_type({**data, **changed})


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
    new = copy.copy(data)  # not `dataclasses.replace`, which runs `__init__` again
    for name, value in changed.items():
        object.__setattr__(new, name, value)
    return new


@final
class OriginalMethod:
    """A module's method before it is replaced: that of its class, or an attribute of the module.

    It holds the module, not a bound method: `deepcopy` copies both, and the copy of the module
    calls its own method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.attribute = vars(module).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if self.attribute is not None:
            return self.attribute(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def restore(self) -> None:
        """Undo the replacement."""
        if self.attribute is None:
            del vars(self.module)[self.name]
        else:
            vars(self.module)[self.name] = self.attribute


@final
class PlacedForward:
    """The forward of a placed module: moves the input to its device and the output on."""

    def __init__(
        self, original: OriginalMethod, processing: torch.device, output: torch.device | None
    ) -> None:
        self.original = original
        self.processing = processing
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the original forward, on the output device if there is one."""
        args, kwargs = move_to_device((args, kwargs), self.processing)
        output = self.original(*args, **kwargs)
        return output if self.output is None else move_to_device(output, self.output)


@final
class PlacedRepr:
    """The `extra_repr` of a placed module: the original one, and its devices."""

    def __init__(
        self, original: OriginalMethod, processing: torch.device, output: torch.device | None
    ) -> None:
        self.original = original
        devices = {"processing_device": processing, "output_device": output}
        self.devices = ", ".join(f"{key}={value}" for key, value in devices.items() if value)

    def __call__(self) -> str:
        """Return the description."""
        return ", ".join(text for text in (self.original(), self.devices) if text)


def called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module; for a `ModuleList` or `ModuleDict`, which is never called, its children."""
    # These two inherit the `forward` of `nn.Module`, which only raises an error.
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield module
        return
    for child in module.children():
        yield from called_modules(child)


def set_devices(module: nn.Module, processing: torch.device, output: torch.device | None) -> None:
    """Replace the methods of a module, whose parameters are already on the processing device."""
    forward = PlacedForward(OriginalMethod(module, "forward"), processing, output)
    description = PlacedRepr(OriginalMethod(module, "extra_repr"), processing, output)
    # Attributes of the instance hide the methods of its class, also from `nn.Module.__call__`.
    vars(module).update(forward=forward, extra_repr=description)


def restore_methods(module: nn.Module) -> None:
    """Restore the original methods of a module, if it has been placed; its tensors stay."""
    for name in ("forward", "extra_repr"):
        method = vars(module).get(name)
        if isinstance(method, (PlacedForward, PlacedRepr)):
            method.original.restore()


def check_module_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names of modules that do not exist, and two names of one module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    model_name = type(model).__name__
    unknown = [name for name in names if name not in modules]
    if unknown:
        listed = "; ".join(
            f"{name!r} ({_nearest_names(str(name), list(modules))})" for name in unknown
        )
        raise UserError(f"{model_name}: needs names of its modules, but has no {listed}")
    module_names: dict[nn.Module, str] = {}
    for name in names:
        other = module_names.setdefault(modules[name], name)
        if other != name:
            raise UserError(f"{model_name}: {other} and {name} are one module, name it once")


def _nearest_names(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known[1:], n=3, cutoff=0.5)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"it has {', '.join(other for other in known[1:] if '.' not in other) or 'none'}"


def check_tied_parameters(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Refuse a parameter that is shared by modules on different devices."""
    first_uses: dict[nn.Parameter, tuple[str, torch.device]] = {}
    # A shared parameter comes once under each of its names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        device = innermost_device(name, devices) or parameter.device
        other, other_device = first_uses.setdefault(parameter, (name, device))
        if device != other_device:
            raise UserError(
                f"{type(model).__name__}: {other} and {name} are one parameter and need one "
                f"device, but got {other_device} and {device}. Place both modules on the same "
                "device."
            )


def innermost_device(name: str, devices: Mapping[str, torch.device]) -> torch.device | None:
    """Return the device of the innermost placed module that holds a tensor, or None."""
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
    """Return the module, placed so that it computes on one device and its output goes to another.

    Its parameters are moved in place, so an optimizer built before still has them. At each call the
    positional and keyword arguments are moved as well. Without `output_device` the output stays on
    the processing device.

    Raises:
        UserError: there is no such device, or the module or one inside it has been parallelized.
    """
    _refuse_placed(module)
    processing = get_device(processing_device)
    output = None if output_device is None else get_device(output_device)
    move_to_device(module, processing)
    for called in called_modules(module):
        set_devices(called, processing, output)
    return module


def unparallelize_module(module: Module, common_device: Device | None = None) -> Module:
    """Undo `parallelize_module`, move the module to `common_device`, and return it.

    A module that was not parallelized is only moved.

    Raises:
        UserError: there is no such device, or a module inside it has been parallelized.
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

    The entry of an inner module overrides that of an outer one. The entry `""`, for the model
    itself, places its inputs, its outputs and all modules without an entry. The entry of a
    `ModuleList` or `ModuleDict`, which is never called, places its children.

    Each tensor is moved once, directly to its final device, and only after all entries have been
    checked.

    Args:
        model: not parallelized yet.
        module_to_device: names with dots -> a device, or a pair (processing, output).

    Raises:
        UserError: a module or device does not exist; a module is named twice; a shared parameter
            would need two devices; or the model has been parallelized.
    """
    _refuse_placed(model)
    check_module_names(model, list(module_to_device))
    devices = {name: _device_pair(name, value) for name, value in module_to_device.items()}
    processing = {name: device for name, (device, _) in devices.items()}
    check_tied_parameters(model, processing)
    _move_modules(model, processing)
    # From the outermost entry inwards: later entries override earlier ones of the same module.
    pairs: dict[nn.Module, DevicePair] = {}
    for name in sorted(devices, key=lambda name: len(name.split(".")) if name else 0):
        pairs |= dict.fromkeys(called_modules(model.get_submodule(name)), devices[name])
    for module, pair in pairs.items():
        set_devices(module, *pair)
    return model


def unparallelize_pipeline(model: Module, common_device: Device | None = None) -> Module:
    """Undo `parallelize_pipeline`, move the model to `common_device`, and return it.

    Without `common_device` its parameters stay on their devices.
    """
    device = None if common_device is None else get_device(common_device)
    for module in model.modules():
        restore_methods(module)
    if device is not None:
        move_to_device(model, device)
    return model


def _refuse_placed(module: nn.Module, but: Set[nn.Module] = frozenset()) -> None:
    for name, inner in module.named_modules():
        if isinstance(vars(inner).get("forward"), PlacedForward) and inner not in but:
            where = f"{type(module).__name__}{f'.{name}' if name else ''}"
            raise UserError(
                f"{where}: has been parallelized. Call unparallelize_pipeline on it first; "
                "parallelize outer modules before inner ones."
            )


def _move_modules(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    for name, module in model.named_modules():
        # `innermost_device` drops the last part of a tensor's name.
        device = innermost_device(f"{name}.tensor" if name else "tensor", devices)
        if device is not None:
            # `_apply`, not `to`, which would move the children as well.
            apply_to_tensors(module, partial(move_to_device, device=device), recurse=False)


def _device_pair(name: str, value: Device | Sequence[Device]) -> DevicePair:
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


ROOT = "root"  # the model itself in `parallel.layout`, where a key can't be empty


def place_model(model: nn.Module, layout: Mapping[str, Any], first_gpu: int = 0) -> nn.Module:
    """Place the modules that `parallel.layout` names, and return the model.

    Without an entry `root` the model computes on its current device, and returns its output there.

    Args:
        model: with `parallel.domain` above 1, the converted one.
        layout: names of modules -> a device, or [processing, output].
        first_gpu: index of the GPU that is `cuda:0` in the layout of this rank.

    Raises:
        UserError: a module or a device does not exist, or a module needs two devices.
    """
    if not layout:
        return model
    current = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    devices: dict[str, Any] = {"": (current, current)}
    for name, value in layout.items():
        devices["" if name == ROOT else name] = _on_rank(value, first_gpu)
    try:
        return parallelize_pipeline(model, devices)
    except UserError as error:
        raise UserError(f"parallel.layout: {error}") from None


def model_output_device(
    layout: Mapping[str, Any], device: torch.device, first_gpu: int = 0
) -> torch.device:
    """Return the device of a placed model's output, on which targets and loss have to be, too."""
    if ROOT not in layout:
        return device
    value = _on_rank(layout[ROOT], first_gpu)
    try:
        return get_device(value if isinstance(value, str) else value[-1])
    except UserError as error:
        raise UserError(f"parallel.layout: {ROOT}: {error}") from None


def _on_rank(value: Any, first_gpu: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_rank(device, first_gpu) for device in value]
    match = re.fullmatch(r"cuda(?::(\d+))?", str(value))
    return f"cuda:{first_gpu + int(match[1] or 0)}" if match else value

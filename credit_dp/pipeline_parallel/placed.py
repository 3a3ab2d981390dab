"""What a module on a device of its own does and says, until that is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn

from credit_dp.pipeline_parallel.moving import move_to_device


@final
class Method:
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
        self, original: Method, processing: torch.device, output: torch.device | None
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
        self, original: Method, processing: torch.device, output: torch.device | None
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
    forward = PlacedForward(Method(module, "forward"), processing, output)
    description = PlacedRepr(Method(module, "extra_repr"), processing, output)
    vars(module).update(forward=forward, extra_repr=description)


def restore_methods(module: nn.Module) -> None:
    """Give the module back the methods it had, if it has been placed; its tensors stay."""
    for name in ("forward", "extra_repr"):
        method = vars(module).get(name)
        if isinstance(method, (PlacedForward, PlacedRepr)):
            method.original.restore()

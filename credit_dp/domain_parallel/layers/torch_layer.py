"""Which layer of torch a module is, when it is of a subclass, and whether it acts as that one."""

from __future__ import annotations

from torch import nn

# Modules of one's own are made from these; what they do is their own.
BLANK = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What a subclass may say anew without acting otherwise, and the special methods that do act.
HARMLESS = ("extra_repr", "reset_parameters")
ACTING = ("__call__", "__getattr__", "__getattribute__", "__setattr__")


def torch_layer(kind: type) -> type[nn.Module] | None:
    """Return the nearest layer of torch that a type is or is made from."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules.") and base.__name__[0] != "_":
            return None if base in BLANK else base
    return None


def overridden(module: nn.Module) -> str | None:
    """Return what of the nearest layer of torch a module replaces, as `forward`, if anything."""
    kind = type(module)
    layer = torch_layer(kind)
    if "forward" in module.__dict__:
        return "forward"
    if layer is None or layer is kind:
        return None
    known = {*dir(layer), *module.__dict__, *module._parameters, *module._buffers}
    before = kind.__mro__[: kind.__mro__.index(layer)]
    own = [name for base in before for name in vars(base) if name in known and _acts(name)]
    return min(own, key="forward".__ne__, default=None)


def _acts(name: str) -> bool:
    special = name.startswith("__") and name.endswith("__")
    return name in ACTING if special else name not in HARMLESS

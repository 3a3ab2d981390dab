"""The walk of a conversion over a model, and how to undo what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.layers.torch_layer import overridden, torch_layer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.row_tensors import cut_only
from credit_dp.domain_parallel.rules import CONTAINERS, RULES
from credit_dp.domain_parallel.running import Running, announce, withdraw
from credit_dp.errors import UserError

Converter = Callable[[Any], nn.Module]
# Under this name a converted model holds its conversion.
RECORD = "_domain_parallel_conversion"


class Conversion:
    """One walk over a module tree.

    Args:
        manager: this rank's place in the mesh.
        custom: module type (exact) -> function from the module to its replacement.
    """

    def __init__(
        self, manager: DomainParallelManager, custom: Mapping[type[nn.Module], Converter]
    ) -> None:
        self.manager = manager
        self.custom = custom
        self.running = Running(manager)
        self.trusted: list[nn.Module] = []
        self.counts: Counter[str] = Counter()
        self.own_leaves: Counter[str] = Counter()
        self._done: dict[nn.Module, nn.Module] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._root: nn.Module | None = None
        self._before: Conversion | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert a model; a refused one is left as it was."""
        self._root = model
        try:
            converted = self.convert(model, "")
        except UserError:
            self.undo(model)
            raise
        announce(converted, self.running)
        self._before = converted.__dict__.get(RECORD)
        converted.__dict__[RECORD] = self
        self._done, self.custom = {}, {}  # which may not be possible to copy or to pickle
        return converted

    def convert(self, module: nn.Module, path: str) -> nn.Module:
        """Return what stands for `module`; the same for every place where it is used."""
        if module not in self._done:
            self._done[module] = self._convert(module, path)
        return self._done[module]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, RowLayer):
            return module
        kind = type_before_parametrizations(module)  # spectral_norm makes a type of its own
        if kind in self.custom:
            new = self._adopt(self.custom[kind](module))
            if not isinstance(new, RowLayer):
                self.trusted.append(new)
            return new
        layer = _acts_as(module, kind)
        if layer in RULES:
            try:
                new = self._adopt(RULES[layer](module))
            except UserError as error:
                refused = str(error).rstrip(".")
                raise UserError(f"{path or 'model'}: {refused}. {_HOW_TO_REGISTER}") from None
            if new is module and layer is not kind:
                self.own_leaves[kind.__name__] += 1
            return new
        if isinstance(module, CONTAINERS):
            return self._convert_children(module, path)
        if kind.__module__.startswith("torch."):
            raise UserError(
                f"{path or 'model'}: {kind.__name__} has no rule for bands of rows. "
                f"{_HOW_TO_REGISTER}"
            )
        if not module._modules:
            self.own_leaves[kind.__name__] += 1
        return self._convert_children(module, path)

    def _convert_children(self, module: nn.Module, path: str) -> nn.Module:
        for name, child in module._modules.items():
            makes_weights = name == "parametrizations" and is_parametrized(module)
            if child is not None and not makes_weights:
                new = self.convert(child, f"{path}.{name}" if path else name)
                self._replaced.append((module, name, child))
                _replace_module(module, name, child, new)
        return module

    def undo(self, converted: nn.Module) -> nn.Module:
        """Put the layers back that were there before, and return the model that was converted."""
        withdraw(converted, self.running)
        for parent, name, old in self._replaced:
            hand_back(parent._modules[name], old)
            parent._modules[name] = old
        self._replaced = []
        if converted.__dict__.pop(RECORD, None) and self._before:
            converted.__dict__[RECORD] = self._before
        plain = converted if self._root is None else self._root
        hand_back(converted, plain)
        return plain

    def undo_all(self, converted: nn.Module) -> nn.Module:
        """Undo this conversion and those of the same model before it."""
        cut_only(converted, [])
        plain = self.undo(converted)
        return self._before.undo_all(plain) if self._before else plain

    def _adopt(self, new: nn.Module) -> nn.Module:
        for layer in new.modules():
            if isinstance(layer, HaloExchange):
                layer.adopt_manager(self.manager)
            if isinstance(layer, RowLayer):
                layer.adopt_manager(self.manager)
                self.counts[type(layer).__name__] += 1
        return new


def _acts_as(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the layer of torch that a subclass leaves as it is, else the type itself."""
    layer = torch_layer(kind)
    return kind if layer is None or overridden(module) else layer


_HOW_TO_REGISTER = (
    "Pass custom_converters={TYPE: function(module) -> replacement}; what it returns, as "
    "`lambda module: module` does, is trusted and not checked, so it has to act on every row apart"
)


def _replace_module(
    parent: nn.Module, name: str, old_module: nn.Module, new_module: nn.Module
) -> None:
    """Put `new_module` where `old_module` is in `parent`."""
    if new_module is not old_module:
        parent._modules[name] = new_module


def hand_back(new: nn.Module | None, old: nn.Module) -> None:
    """Give a replaced module the parameters, buffers and mode that its replacement has by now.

    A layer of this package shares them; another one may have been moved or loaded on its own.
    """
    if new is None or new is old:
        return
    if isinstance(new, RowLayer):
        old._is_full_backward_hook = new._is_full_backward_hook
        return
    holders = {name: module for name, module in new.named_modules()}
    for name, module in old.named_modules():
        if name in holders:
            module.training = holders[name].training
            _copy_held(holders[name]._parameters, module._parameters)
            _copy_held(holders[name]._buffers, module._buffers)


def _copy_held(new: dict[str, Any], old: dict[str, Any]) -> None:
    for name in old:
        old[name] = new.get(name, old[name])

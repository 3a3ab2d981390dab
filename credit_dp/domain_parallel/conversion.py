"""The replacement of a model's layers by domain-parallel ones, which can be undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.layers.base import RowLayer, overridden_method, torch_layer_type
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planning.trace import user_line_of
from credit_dp.domain_parallel.rules import REGISTERED, RULES
from credit_dp.domain_parallel.shared_exchange import detach_shared_exchanges
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    buffers_of,
    children_of,
    parameters_of,
    share_kind_of_backward_hooks,
)

Converter = Callable[[Any], nn.Module]
# A converted model holds its `Conversion` in this attribute.
CONVERSION_ATTRIBUTE = "_domain_parallel_conversion"
_HOW_TO_REGISTER = (
    "Write @register(TYPE) above a function(module) -> replacement in a plug-in, or in Python pass "
    "custom_converters={TYPE: function}. The replacement, which may be the module itself, is "
    "trusted and not checked: it has to act on each row separately, or fetch rows by a HaloExchange"
)


class WrongRuleError(UserError):
    """A rule of the user's fails, which is no reason to do without it."""


def _apply_rule(rule: Converter, module: nn.Module, path: str) -> nn.Module:
    """Return the replacement of a module by a rule of the user's."""
    title = f"{path or 'model'}: the rule of {type(module).__name__}"
    try:
        replacement: Any = rule(module)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = next(iter(str(error).splitlines()), "")
        raise WrongRuleError(
            f"{title} fails at {user_line_of(error)} ({type(error).__name__}: {reason}). It is "
            "called with the module, and has to return the one that replaces it."
        ) from error
    if not isinstance(replacement, nn.Module):
        raise WrongRuleError(
            f"{title} needs to return the module that replaces it, got {replacement!r}."
        )
    return replacement


class Conversion:
    """One walk over a module tree, with what is needed to undo it.

    Args:
        custom_converters: module type (exact) -> function from the module to its replacement.

    Attributes:
        problems: why layers can't be converted; they stay.
        trusted: replacements from `custom_converters`, whose code is not compared.
        converted_counts: the number of domain-parallel layers, by type.
        user_leaf_counts: the number of kept layers without children that are not torch's, by type.
    """

    def __init__(
        self, manager: DomainParallelManager, custom_converters: Mapping[type[nn.Module], Converter]
    ) -> None:
        self.manager = manager
        self.custom_converters = custom_converters
        self.problems: list[str] = []
        self.is_applied = False
        self.trusted: list[nn.Module] = []
        self.converted_counts: Counter[str] = Counter()
        self.user_leaf_counts: Counter[str] = Counter()
        self._replacements: dict[nn.Module, nn.Module] = {}
        self._replaced_children: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self._exact_layers: list[tuple[nn.Module, str, nn.Module, RowLayer]] = []
        self._original: nn.Module | None = None
        self._previous: Conversion | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert the layers of a model that have rules, in place; `problems` has the others.

        Raises:
            WrongRuleError: a rule fails; the model is as it was.
        """
        self._original = model
        try:
            converted = self.convert(model, "")
        except WrongRuleError:
            self.undo(model)
            raise
        self._previous = converted.__dict__.get(CONVERSION_ATTRIBUTE)
        converted.__dict__[CONVERSION_ATTRIBUTE] = self
        self.is_applied = True
        # The model is copied and pickled with its conversion: functions of the user's, which may
        # not be picklable, must not stay in it.
        self._replacements = {}
        self.custom_converters = {}
        self._put_exact_layers_back()
        return converted

    @contextmanager
    def all_layers(self) -> Iterator[None]:
        """Plan in this context: the model has all its domain-parallel layers.

        Afterwards it has the original layer again wherever that acts alone with the planned bands.
        A module that the user has put in its place stays.
        """
        own = [
            entry for entry in self._exact_layers if children_of(entry[0]).get(entry[1]) is entry[2]
        ]
        for parent, name, original, layer in own:
            layer.train(original.training)
            share_kind_of_backward_hooks(layer, original)
            children_of(parent)[name] = layer
        self.converted_counts += _type_counts(own)
        self._exact_layers = []
        try:
            yield
        finally:
            self._put_exact_layers_back()

    def _put_exact_layers_back(self) -> None:
        for parent, name, original, layer in self._replaced_children:
            replaced = children_of(parent).get(name) is layer
            if replaced and isinstance(layer, RowLayer) and layer.wrapped_is_exact:
                self._exact_layers.append((parent, name, original, layer))
                update_original(layer, original)
                children_of(parent)[name] = original
        self.converted_counts -= _type_counts(self._exact_layers)

    def convert(self, module: nn.Module, path: str) -> nn.Module:
        """Return the replacement of a module; a module that is used several times has one."""
        if module not in self._replacements:
            try:
                self._replacements[module] = self._convert(module, path)
            except WrongRuleError:
                raise
            except UserError as error:
                self.problems.append(str(error))
                self._replacements[module] = module
        return self._replacements[module]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, RowLayer):
            return module
        # A parametrization, as spectral_norm, gives its module a type of its own.
        kind = type_before_parametrizations(module)
        layer_type = kind if kind in RULES else _effective_type(module, kind)
        registered = RULES[layer_type] if layer_type in REGISTERED else None
        rule = self.custom_converters.get(kind, registered)
        if rule is not None:
            replacement = self._assign_manager(_apply_rule(rule, module, path))
            if not isinstance(replacement, RowLayer):
                self.trusted.append(replacement)
            return replacement
        if layer_type in RULES:
            try:
                replacement = self._assign_manager(RULES[layer_type](module))
            except UserError as error:
                reason = str(error).rstrip(".")
                raise UserError(f"{path or 'model'}: {reason}. {_HOW_TO_REGISTER}") from None
            if replacement is module and layer_type is not kind:
                self.user_leaf_counts[kind.__name__] += 1
            return replacement
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(f"{path or 'model'}: code of torch.jit can't be followed.")
        # Other code stays: the plan proves that it keeps rows apart.
        if not (children_of(module) or kind.__module__.startswith("torch.")):
            self.user_leaf_counts[kind.__name__] += 1
        return self._convert_children(module, path)

    def _convert_children(self, module: nn.Module, path: str) -> nn.Module:
        for name, child in children_of(module).items():
            # Parametrizations compute weights, which have no rows of fields.
            computes_weights = name == "parametrizations" and is_parametrized(module)
            if child is not None and not computes_weights:
                replacement = self.convert(child, f"{path}.{name}" if path else name)
                self._replaced_children.append((module, name, child, replacement))
                _replace_module(module, name, child, replacement)
        return module

    def undo(self, converted: nn.Module) -> nn.Module:
        """Put the original layers back, and return the model that was converted.

        A module that the user has put in the place of a layer, or around it, stays.
        """
        self.is_applied = False
        detach_shared_exchanges(converted)
        replaced = self._replaced_children
        originals = {layer: original for _, _, original, layer in replaced if layer is not original}
        for parent in {*converted.modules(), *(parent for parent, *_ in replaced)}:
            for name, child in children_of(parent).items():
                if child in originals:
                    update_original(child, originals[child])
                    children_of(parent)[name] = originals[child]
        self._replaced_children = []
        if converted.__dict__.pop(CONVERSION_ATTRIBUTE, None) and self._previous:
            converted.__dict__[CONVERSION_ATTRIBUTE] = self._previous
        original_model = converted if self._original is None else self._original
        update_original(converted, original_model)
        return original_model

    def undo_all(self, converted: nn.Module) -> nn.Module:
        """Undo this conversion and the earlier ones of the same model."""
        original = self.undo(converted)
        return self._previous.undo_all(original) if self._previous else original

    def _assign_manager(self, replacement: nn.Module) -> nn.Module:
        for layer in replacement.modules():
            if isinstance(layer, HaloExchange):
                layer.adopt_manager(self.manager)
            if isinstance(layer, RowLayer):
                layer.adopt_manager(self.manager)
                self.converted_counts[type(layer).__name__] += 1
        return replacement


def _type_counts(children: list[tuple[nn.Module, str, nn.Module, RowLayer]]) -> Counter[str]:
    return Counter(type(layer).__name__ for layer in {child[-1] for child in children})


def _effective_type(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the torch layer whose behaviour a subclass keeps; the type itself if there is none."""
    layer_type = torch_layer_type(kind)
    return kind if layer_type is None or overridden_method(module) else layer_type


def _replace_module(
    parent: nn.Module, name: str, old_module: nn.Module, new_module: nn.Module
) -> None:
    if new_module is not old_module:
        children_of(parent)[name] = new_module


def update_original(replacement: nn.Module, original: nn.Module) -> None:
    """Give a replaced module the current parameters, buffers and mode of its replacement.

    A `RowLayer` shares them with the layer that it wraps. Any other replacement may have been moved
    to a device or loaded since.
    """
    if replacement is original:
        return
    if isinstance(replacement, RowLayer):
        # All dictionaries of hooks are shared, but this flag is a plain value.
        share_kind_of_backward_hooks(original, replacement)
        return
    replacements = dict(replacement.named_modules())
    for name, module in original.named_modules():
        if name in replacements:
            module.training = replacements[name].training
            _update_tensors(parameters_of(replacements[name]), parameters_of(module))
            _update_tensors(buffers_of(replacements[name]), buffers_of(module))


def _update_tensors(replacement: dict[str, Any], original: dict[str, Any]) -> None:
    for name in original:
        original[name] = replacement.get(name, original[name])


def unwrap(layer: RowLayer) -> nn.Module:
    """Return the module that a layer wraps, with its current mode."""
    original: nn.Module = layer.__dict__["wrapped"]
    update_original(layer, original)
    return original

"""Swapping the layers that mix rows for domain-parallel ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.constraints import validate_sharding_constraints
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.plan import Shape, plan_calls, plan_model
from credit_dp.domain_parallel.planner import active_planner
from credit_dp.domain_parallel.rules import (
    CONTAINERS,
    RULES,
    _needs_halo_conv2d,
    _needs_halo_conv_transpose2d,
)
from credit_dp.errors import UserError

# Users know these by this module's name.
__all__ = [
    "_needs_halo_conv2d",
    "_needs_halo_conv_transpose2d",
    "_replace_module",
    "convert_to_domain_parallel",
    "validate_sharding_constraints",
]

logger = logging.getLogger(__name__)

Converter = Callable[[Any], nn.Module]


def convert_to_domain_parallel(
    model: nn.Module,
    manager: DomainParallelManager,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    input_shape: Shape | Sequence[Shape] | None = None,
) -> nn.Module:
    """Replace the layers that mix rows, in place; names of parameters and buffers stay.

    Layers that act on rows apart (1x1 convolutions, activations, `Linear`, channel norms) are kept.
    One domain rank leaves the model as it is.

    Args:
        model: any module made of layers with a rule.
        manager: this rank's place in the mesh.
        shard_dim: the input's row dimension: -2, or 2 of four, or 3 of five dimensions.
        custom_converters: module type (exact) -> function from the module to its replacement.
            Looked up before the built-in rules. Such a module is trusted: its children are left
            alone, and the code inside is not audited.
        input_shape: the whole globe's input, batch included, `(B, C, H, W)`, or a tuple of such for
            several inputs. Any batch size runs later. Without it the first forward plans, which
            gathers every rank's row count once.

    Returns:
        The model; another object only if `model` itself is replaced.

    Raises:
        UserError: a layer has no rule, a level has fewer rows than ranks, or code between the
            layers mixes rows.
    """
    _check_shard_dim(shard_dim, input_shape)
    if manager.domain_parallel_size == 1:
        return model
    conversion = _Conversion(manager, custom_converters or {})
    try:
        converted = conversion.convert(model, "")
    except UserError:
        conversion.undo()
        raise
    logger.info("domain parallel: %s", conversion.summary())
    if input_shape is None:
        hook = _PlanAtFirstForward(manager, conversion.trusted)
        converted.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        try:
            plan_model(converted, manager, input_shape, conversion.trusted)
        except UserError:
            conversion.undo()
            raise
    return converted


def _check_shard_dim(shard_dim: int, input_shape: Shape | Sequence[Shape] | None) -> None:
    ndim = len(input_shape) if input_shape and isinstance(input_shape[0], int) else None
    row_dim = shard_dim if shard_dim < 0 or ndim is None else shard_dim - ndim
    if row_dim not in (ROW_DIM, 2, 3):
        raise UserError(
            f"shard_dim: only latitude rows, the last dimension but one, can be sharded, got "
            f"{shard_dim}. Use shard_dim=-2."
        )


class _Conversion:
    """One walk over a module tree."""

    def __init__(
        self, manager: DomainParallelManager, custom: Mapping[type[nn.Module], Converter]
    ) -> None:
        self.manager = manager
        self.custom = custom
        self._done: dict[nn.Module, nn.Module] = {}
        self._counts: Counter[str] = Counter()
        self.trusted: list[nn.Module] = []
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def convert(self, module: nn.Module, path: str) -> nn.Module:
        """Return what stands for `module`; the same for every place where it is used."""
        if module not in self._done:
            self._done[module] = self._convert(module, path)
        return self._done[module]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, RowLayer):
            return module
        if type(module) in self.custom:
            new = self._adopt(self.custom[type(module)](module))
            if not isinstance(new, RowLayer):
                self.trusted.append(new)
            return new
        if type(module) in RULES:
            try:
                return self._adopt(RULES[type(module)](module, ROW_DIM, self.manager))
            except UserError as error:
                raise UserError(f"{path or 'model'}: {error}. {_HOW_TO_REGISTER}") from None
        foreign = type(module).__module__.startswith("torch.") and not isinstance(
            module, CONTAINERS
        )
        if foreign:
            raise UserError(
                f"{path or 'model'}: {type(module).__name__} has no rule for bands of rows. "
                f"{_HOW_TO_REGISTER}"
            )
        for name, child in module._modules.items():
            if child is not None:
                new = self.convert(child, f"{path}.{name}" if path else name)
                self._replaced.append((module, name, child))
                _replace_module(module, name, child, new)
        return module

    def undo(self) -> None:
        """Put the layers back that were there before: a refused model is the plain one."""
        for parent, name, old in self._replaced:
            parent._modules[name] = old

    def _adopt(self, new: nn.Module) -> nn.Module:
        for layer in new.modules():
            if isinstance(layer, HaloExchange):
                layer.adopt_manager(self.manager)
            if isinstance(layer, RowLayer):
                layer.adopt_manager(self.manager)
                self._counts[type(layer).__name__] += 1
        return new

    def summary(self) -> str:
        """Return how many layers of which type were put in."""
        counts = [f"{count} {name}" for name, count in sorted(self._counts.items())]
        trusted = [f"trusted: {type(module).__name__}" for module in self.trusted]
        return ", ".join(counts + trusted) or "no layer mixes rows"


_HOW_TO_REGISTER = (
    "Pass custom_converters={TYPE: function(module) -> replacement}; "
    "`lambda module: module` keeps a layer that acts on every row apart"
)


def _replace_module(
    parent: nn.Module, name: str, old_module: nn.Module, new_module: nn.Module
) -> None:
    """Put `new_module` where `old_module` is in `parent`."""
    if new_module is not old_module:
        parent._modules[name] = new_module


class _PlanAtFirstForward:
    """A forward pre-hook that plans with what the model is called with, and then takes itself away.

    It stays after a refusal, and a copy of the model plans for itself.
    """

    def __init__(self, manager: DomainParallelManager, trusted: list[nn.Module]) -> None:
        self.manager = manager
        self.trusted = trusted

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if active_planner() is not None:
            return
        fields = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        whole = {id(x): self._whole_shape(x) for x in fields}

        def inputs(wanted: Callable[[Shape], Shape]) -> tuple[list[Any], dict[str, Any]]:
            def like(x: Tensor) -> Tensor:
                return torch.empty(wanted(whole[id(x)]), dtype=x.dtype, device=x.device)

            new_args, new_kwargs = tree_map_only(Tensor, like, (args, kwargs))
            return list(new_args), new_kwargs

        plan_calls(model, self.manager, list(whole.values()), inputs, self.trusted)
        for key, hook in list(model._forward_pre_hooks.items()):
            if hook is self:
                del model._forward_pre_hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)

    def _whole_shape(self, x: Tensor) -> Shape:
        """Gather the globe's shape; a tensor with one row on every rank is taken for replicated."""
        if x.ndim < FIELD_DIMS:
            return tuple(x.shape)
        partition = self.manager.gathered_partition(x.shape[ROW_DIM])
        if set(partition.sizes) == {1}:
            return tuple(x.shape)
        self.manager.bands.adopt(partition)
        return (*x.shape[:ROW_DIM], partition.height, *x.shape[ROW_DIM + 1 :])

"""Swapping the layers that mix rows for domain-parallel ones, and back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.functional import (
    ShardingContext,
    attach_context,
    attached_contexts,
    detach_context,
)
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.layers.base import (
    Bands,
    RowLayer,
    overridden_method,
    torch_layer_type,
)
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, validate_sharding_constraints
from credit_dp.domain_parallel.planning.plan import (
    InputFactory,
    Shape,
    as_shapes,
    plan_calls,
    plan_model,
)
from credit_dp.domain_parallel.planning.planner import Planner, active_planner
from credit_dp.domain_parallel.row_tensors import cuts, set_row_shardings
from credit_dp.domain_parallel.rules import (
    CONTAINERS,
    RULES,
    _needs_halo_conv2d,
    _needs_halo_conv3d,
    _needs_halo_conv_transpose2d,
    _needs_halo_conv_transpose3d,
)
from credit_dp.domain_parallel.shared_exchange import detach_shared_exchanges
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.planning.planner import LayerCall, Planner

__all__ = [
    "Converter",
    "_needs_halo_conv2d",
    "_needs_halo_conv3d",
    "_needs_halo_conv_transpose2d",
    "_needs_halo_conv_transpose3d",
    "_replace_module",
    "convert_from_domain_parallel",
    "convert_to_domain_parallel",
    "replan",
    "validate_sharding_constraints",
]


Converter = Callable[[Any], nn.Module]
# Under this name a converted model holds its conversion.
CONVERSION_ATTRIBUTE = "_domain_parallel_conversion"


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
        self.custom_converters = custom
        self.context = ShardingContext(manager)
        self.trusted: list[nn.Module] = []
        self.converted_counts: Counter[str] = Counter()
        self.user_leaf_counts: Counter[str] = Counter()
        self._replacements: dict[nn.Module, nn.Module] = {}
        self._replaced_children: list[tuple[nn.Module, str, nn.Module]] = []
        self._original: nn.Module | None = None
        self._previous: Conversion | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert a model; a refused one is left as it was."""
        self._original = model
        try:
            converted = self.convert(model, "")
        except UserError:
            self.undo(model)
            raise
        attach_context(converted, self.context)
        self._previous = converted.__dict__.get(CONVERSION_ATTRIBUTE)
        converted.__dict__[CONVERSION_ATTRIBUTE] = self
        self._replacements, self.custom_converters = (
            {},
            {},
        )  # which may not be possible to copy or to pickle
        return converted

    def convert(self, module: nn.Module, path: str) -> nn.Module:
        """Return what stands for `module`; the same for every place where it is used."""
        if module not in self._replacements:
            self._replacements[module] = self._convert(module, path)
        return self._replacements[module]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, RowLayer):
            return module
        kind = type_before_parametrizations(module)  # spectral_norm makes a type of its own
        if kind in self.custom_converters:
            new = self._assign_manager(self.custom_converters[kind](module))
            if not isinstance(new, RowLayer):
                self.trusted.append(new)
            return new
        layer = _effective_type(module, kind)
        if layer in RULES:
            try:
                new = self._assign_manager(RULES[layer](module))
            except UserError as error:
                refused = str(error).rstrip(".")
                raise UserError(f"{path or 'model'}: {refused}. {_HOW_TO_REGISTER}") from None
            if new is module and layer is not kind:
                self.user_leaf_counts[kind.__name__] += 1
            return new
        if isinstance(module, CONTAINERS):
            return self._convert_children(module, path)
        if kind.__module__.startswith("torch."):
            raise UserError(
                f"{path or 'model'}: {kind.__name__} has no rule for bands of rows. "
                f"{_HOW_TO_REGISTER}"
            )
        if not module._modules:
            self.user_leaf_counts[kind.__name__] += 1
        return self._convert_children(module, path)

    def _convert_children(self, module: nn.Module, path: str) -> nn.Module:
        for name, child in module._modules.items():
            makes_weights = name == "parametrizations" and is_parametrized(module)
            if child is not None and not makes_weights:
                new = self.convert(child, f"{path}.{name}" if path else name)
                self._replaced_children.append((module, name, child))
                _replace_module(module, name, child, new)
        return module

    def undo(self, converted: nn.Module) -> nn.Module:
        """Put the layers back that were there before, and return the model that was converted."""
        detach_context(converted, self.context)
        for parent, name, old in self._replaced_children:
            update_original(parent._modules[name], old)
            parent._modules[name] = old
        self._replaced_children = []
        if converted.__dict__.pop(CONVERSION_ATTRIBUTE, None) and self._previous:
            converted.__dict__[CONVERSION_ATTRIBUTE] = self._previous
        plain = converted if self._original is None else self._original
        update_original(converted, plain)
        return plain

    def undo_all(self, converted: nn.Module) -> nn.Module:
        """Undo this conversion and those of the same model before it."""
        set_row_shardings(converted, [])
        plain = self.undo(converted)
        return self._previous.undo_all(plain) if self._previous else plain

    def _assign_manager(self, new: nn.Module) -> nn.Module:
        for layer in new.modules():
            if isinstance(layer, HaloExchange):
                layer.adopt_manager(self.manager)
            if isinstance(layer, RowLayer):
                layer.adopt_manager(self.manager)
                self.converted_counts[type(layer).__name__] += 1
        return new


def _effective_type(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the layer of torch that a subclass leaves as it is, else the type itself."""
    layer = torch_layer_type(kind)
    return kind if layer is None or overridden_method(module) else layer


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


def update_original(new: nn.Module | None, old: nn.Module) -> None:
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
            _update_tensors(holders[name]._parameters, module._parameters)
            _update_tensors(holders[name]._buffers, module._buffers)


def _update_tensors(new: dict[str, Any], old: dict[str, Any]) -> None:
    for name in old:
        old[name] = new.get(name, old[name])


# Where rows may be, counted from the start; both are the last dimension but one of some input.
ROW_DIMS_FROM_START = (2, 3)


@final
class PlanAtFirstForward:
    """A forward pre-hook that plans with what the model is called with, and then takes itself away.

    It stays after a refusal, and a copy of the model plans for itself.

    Args:
        manager: this rank's place in the mesh.
        shard_dim: the row dimension of what the model is called with.
        plan: called with the model, the whole-globe shapes and what makes its inputs.
    """

    def __init__(
        self,
        manager: DomainParallelManager,
        shard_dim: int,
        plan: Callable[[nn.Module, list[Shape], InputFactory], None],
    ) -> None:
        self.manager = manager
        self.shard_dim = shard_dim
        self.plan = plan

    @_disable_dynamo  # it plans: there is nothing to compile
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan, unless this is a call of another plan."""
        if active_planner() is not None:
            return
        fields = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in fields[:1]:
            check_shard_dim(self.shard_dim, x.ndim)
        whole = {id(x): self._global_shape(x) for x in fields}
        _check_rows_unambiguous([x for x in fields if x.ndim >= FIELD_DIMS], whole)

        def inputs(wanted: Callable[[Shape], Shape]) -> tuple[list[Any], dict[str, Any]]:
            def like(x: Tensor) -> Tensor:
                return torch.empty(wanted(whole[id(x)]), dtype=x.dtype, device=x.device)

            new_args, new_kwargs = tree_map_only(Tensor, like, (args, kwargs))
            return list(new_args), new_kwargs

        self.plan(model, list(whole.values()), inputs)
        remove_planning_hook(model)

    def _global_shape(self, x: Tensor) -> Shape:
        """Gather the globe's shape; a tensor with one row on every rank is taken for replicated."""
        if x.ndim < FIELD_DIMS:
            return tuple(x.shape)
        partition = self.manager.gather_partition(x.shape[ROW_DIM])
        if set(partition.sizes) == {1}:
            return tuple(x.shape)
        self.manager.bands.register(partition)
        return (*x.shape[:ROW_DIM], partition.height, *x.shape[ROW_DIM + 1 :])


def _check_rows_unambiguous(fields: list[Tensor], whole: dict[int, Shape]) -> None:
    """Refuse a first field with one row on every rank: it may be the same one, or a band each."""
    banded = [x for x in fields if whole[id(x)] != tuple(x.shape)]
    if not fields or any(x is fields[0] for x in banded):
        return
    if not banded or fields[0].shape[-1] > 1:
        raise UserError(
            f"first forward: every rank was given one row, {tuple(fields[0].shape)}: it can't be "
            "known whether that is the same row or one band of a globe on each. Convert with "
            "input_shape, the whole globe's."
        )


def remove_planning_hook(model: nn.Module) -> None:
    """Take away what plans at the first forward, if it is there."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PlanAtFirstForward):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def check_shard_dim(shard_dim: int, ndim: int | None) -> None:
    """Refuse any dimension but the rows' of an input with `ndim` dimensions, None if unknown."""
    row_dim = shard_dim if shard_dim < 0 or ndim is None else shard_dim - ndim
    if row_dim == -1:
        raise UserError(
            f"shard_dim: {shard_dim} is longitude, which can't be sharded: only latitude rows can, "
            "the last dimension but one. Use shard_dim=-2."
        )
    if row_dim not in (ROW_DIM, *([] if ndim else ROW_DIMS_FROM_START)):
        raise UserError(
            f"shard_dim: only latitude rows, the last dimension but one, can be sharded, got "
            f"{shard_dim}. Use shard_dim=-2."
        )


def conversion_summary(conversion: Conversion, planner: Planner | None = None) -> str:
    """Say what was put in, what was kept, what is trusted, and what this rank sends.

    Without a plan: as far as it is known before.
    """
    parts = [_format_counts(conversion.converted_counts) or "no layer mixes rows"]
    if conversion.user_leaf_counts:
        parts.append(
            f"layers of your own, kept and audited: {_format_counts(conversion.user_leaf_counts)}"
        )
    trusted = Counter(type(module).__name__ for module in conversion.trusted)
    if trusted:
        parts.append(f"trusted: {_format_counts(trusted)}")
    if planner is None:
        parts.append("planned and audited at the first forward")
    else:
        cut = [what.path for _, of_owner in cuts(planner.model) for what in of_owner.values()]
        parts += [f"cut into bands: {', '.join(cut)}"] if cut else []
        traded = [name for layer, name in planner.names.items() if _uses_transpose(layer)]
        parts += [f"rows traded for channels: {', '.join(traded)}"] if traded else []
        parts.append(f"this rank sends at most {_bytes_sent(planner):,} bytes of rows per forward")
    return "; ".join([*parts, "not verified numerically: credit-dp verify does"])


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _bytes_sent(planner: Planner) -> int:
    """Return what this rank sends forward; less where a layer shrinks its rows before they go."""
    visits = (visit for visit in planner.layer_calls if visit.dim is not None)
    return sum(_bytes_sent_by_visit(planner, visit) for visit in visits)


def _bytes_sent_by_visit(planner: Planner, visit: LayerCall) -> int:
    """Return what this rank sends for one call of a layer."""
    made = next(
        call.out_height
        for call in planner.layer_rows[visit.layer]
        if call.in_height == visit.in_height
    )
    bands = Bands(planner.bands[visit.in_height], planner.bands[made])
    if isinstance(visit.layer, DepthwiseLayer) and visit.layer.transposes(visit.in_height):
        return _bytes_sent_by_transpose(planner, visit, visit.layer, bands)
    rows = sum(route.length for route in visit.layer.exchange(bands).sends)
    return rows * _global_bytes(planner, visit, visit.shapes[0]) // visit.in_height


def _bytes_sent_by_transpose(
    planner: Planner, visit: LayerCall, layer: DepthwiseLayer, bands: Bands
) -> int:
    """Return what this rank sends to trade rows for channels, and channels for rows."""
    sent, shapes = 0, (visit.shapes[0], tuple(visit.outputs.shape))
    for to_channels, shape, plan in zip(
        (True, False), shapes, layer.transpose_pair(bands), strict=True
    ):
        rows = sum(plan.rows_sent(to_channels)[layer.manager.domain_rank])
        sent += rows * _global_bytes(planner, visit, shape) // (sum(plan.rows) * sum(plan.channels))
    return sent


def _uses_transpose(layer: RowLayer) -> bool:
    """Return whether a layer trades rows for channels, at any height."""
    return isinstance(layer, DepthwiseLayer) and any(map(layer.transposes, layer.planned_heights))


def _global_bytes(planner: Planner, visit: LayerCall, shape: tuple[int, ...]) -> int:
    """Return the bytes of a whole tensor; a plan's batch has a size of its own."""
    made = next(leaf for leaf in tree_leaves(visit.outputs) if isinstance(leaf, Tensor))
    size = prod(shape) * made.element_size()
    planned, given = planner.batch_sizes
    return size // planned * given if shape[0] == planned else size


# Users know these by this module's name.

logger = logging.getLogger(__name__)


def convert_to_domain_parallel(
    model: nn.Module,
    manager: DomainParallelManager,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    input_shape: Shape | Sequence[Shape] | None = None,
) -> nn.Module:
    """Replace the layers that mix rows, in place; names of parameters and buffers stay.

    Layers that act on rows apart (1x1 convolutions, activations, `Linear`, channel norms) are kept.
    Parameters and buffers with a row for each of the globe's stay whole in `state_dict()`, and the
    model's code sees this rank's rows. One domain rank leaves the model as it is.

    Args:
        model: any module made of layers with a rule; its parameters may be on the meta device.
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
    check_shard_dim(shard_dim, len(as_shapes(input_shape)[0]) if input_shape else None)
    if manager.domain_parallel_size == 1:
        return model
    before = cuts(model)
    conversion = Conversion(manager, custom_converters or {})
    converted = conversion.apply(model)
    if input_shape is None:
        hook = PlanAtFirstForward(manager, shard_dim, _plan_for_call)
        converted.register_forward_pre_hook(hook, with_kwargs=True)
        logger.info("domain parallel: %s", conversion_summary(conversion))
        return converted
    try:
        _plan_for_shape(converted, input_shape)
    except UserError:
        set_row_shardings(converted, before)
        conversion.undo(converted)
        raise
    return converted


def convert_from_domain_parallel(model: nn.Module) -> nn.Module:
    """Put the plain layers back, in place: the model is as if it had never been converted.

    Parameters and buffers keep the values that they have by now.

    Returns:
        The model that was converted; another object only if a layer stands for the whole of it.
    """
    remove_planning_hook(model)
    detach_shared_exchanges(model)
    for module in [m for m in model.modules() if m is not model]:
        if CONVERSION_ATTRIBUTE in module.__dict__:
            module.__dict__[CONVERSION_ATTRIBUTE].undo_all(module)
    conversion: Conversion | None = model.__dict__.get(CONVERSION_ATTRIBUTE)
    if conversion is not None:
        model = conversion.undo_all(model)
    for module in model.modules():  # layers that were put there by hand
        for name, child in list(module._modules.items()):
            if isinstance(child, RowLayer):
                _replace_module(module, name, child, _unwrapped(child))
    return _unwrapped(model) if isinstance(model, RowLayer) else model


def replan(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    """Plan a converted model for another input; it runs with the old one no more.

    Args:
        model: what `convert_to_domain_parallel` returned.
        input_shape: as there.

    Raises:
        UserError: the model was not converted, or as at conversion; the old plan then stays.
    """
    if CONVERSION_ATTRIBUTE not in model.__dict__:
        raise UserError(
            "replan: this model was not converted, or to one rank. Call it with what "
            "convert_to_domain_parallel returned."
        )
    before = cuts(model)
    layers = [(current, current.layers) for current in attached_contexts(model)]
    set_row_shardings(model, [])
    for current, _ in layers:
        current.layers = {}
    try:
        _plan_for_shape(model, input_shape)
    except UserError:
        set_row_shardings(model, before)
        for current, old in layers:
            current.layers = old
        raise
    remove_planning_hook(model)


def _plan_for_shape(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
    _log_summary(conversion, plan_model(model, conversion.manager, input_shape, conversion.trusted))


def _plan_for_call(model: nn.Module, shapes: list[Shape], inputs: InputFactory) -> None:
    conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
    _log_summary(
        conversion, plan_calls(model, conversion.manager, shapes, inputs, conversion.trusted)
    )


def _log_summary(conversion: Conversion, planner: Planner) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("domain parallel: %s", conversion_summary(conversion, planner))


def _unwrapped(layer: RowLayer) -> nn.Module:
    plain: nn.Module = layer.__dict__["wrapped"]
    update_original(layer, plain)
    return plain

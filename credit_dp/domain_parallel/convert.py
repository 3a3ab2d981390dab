"""Conversion of a model to bands of rows, and back.

Conversion happens in this order:

1. `Conversion` walks over the modules and replaces each layer that couples rows by its
   domain-parallel layer, which shares the parameters of the layer that it wraps.
2. The plan runs the converted model on tensors without data, on global inputs and on bands. It
   finds the heights of all levels, chooses their bands and audits the code between the layers. With
   an `input_shape` this happens at once, without one in the first forward (`PlanAtFirstForward`).
3. A summary is logged.

A conversion is kept on the model, so that `convert_from_domain_parallel` can undo it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, final

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
    leave_context,
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
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.planning.audit import NAME_RULE
from credit_dp.domain_parallel.planning.model_plan import (
    GlobalForwardError,
    InputFactory,
    Shape,
    as_shapes,
    plan_calls,
    plan_model,
)
from credit_dp.domain_parallel.planning.planner import LayerCall, Planner
from credit_dp.domain_parallel.row_tensors import row_shardings, set_row_shardings
from credit_dp.domain_parallel.rules import (
    CONTAINERS,
    RULES,
    _needs_halo_conv2d,
    _needs_halo_conv3d,
    _needs_halo_conv_transpose2d,
    _needs_halo_conv_transpose3d,
)
from credit_dp.domain_parallel.shared_exchange import detach_shared_exchanges
from credit_dp.domain_parallel.view.attach import attached_view, detach_view
from credit_dp.domain_parallel.view.view_plan import DEFAULT_LIMIT, replan_view, view_model
from credit_dp.errors import UserError

# The underscored names and `validate_sharding_constraints` are imported from here by code that is
# written against this module: compatibility.
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

logger = logging.getLogger(__name__)

Converter = Callable[[Any], nn.Module]
# A converted model holds its `Conversion` in this attribute.
CONVERSION_ATTRIBUTE = "_domain_parallel_conversion"
# Positive row dimensions that are accepted before the input's number of dimensions is known: of
# (B, C, H, W) and of (B, C, D, H, W).
ROW_DIMS_FROM_START = (2, 3)
_HOW_TO_REGISTER = (
    f"{NAME_RULE}. The replacement, which may be the module itself, is trusted and not checked: it "
    "has to act on each row separately, unless it is a RowLayer"
)


def convert_to_domain_parallel(
    model: nn.Module,
    manager: DomainParallelManager,
    shard_dim: int = -2,
    custom_converters: Mapping[type[nn.Module], Converter] | None = None,
    input_shape: Shape | Sequence[Shape] | None = None,
    *,
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
) -> nn.Module:
    """Replace the layers that couple rows, in place; parameters and buffers keep their names.

    Layers that act on each row separately (1x1 convolutions, activations, `Linear`, channel norms)
    stay. A parameter or buffer with one row per latitude stays complete in `state_dict()`, but the
    model's code sees this rank's rows of it. With one domain rank nothing is changed.

    Another model may share the layers themselves, as a default `activation=nn.GELU()`. If it shares
    modules that contain layers, they are changed for it, too: convert a `copy.deepcopy` then.

    A model with layers or code that the rules refuse computes through the global view instead: its
    layers and code stay as they are, and a function without a rule for bands gathers the rows and
    runs whole on every rank.

    Args:
        model: any module; its parameters may be on the meta device.
        manager: this rank's position in the mesh.
        shard_dim: the input's row dimension: -2, or 2 of four, or 3 of five dimensions.
        custom_converters: module type (exact) -> function from the module to its replacement.
            Looked up before the built-in rules. The children of the replacement are not converted.
            Its code is trusted, not audited. If it is a `RowLayer`, its calls are planned.
        input_shape: the shape of the global input with its batch, `(B, C, H, W)`, or a tuple of
            shapes for several inputs. The model then accepts any batch size. Without it the first
            forward plans, which gathers every rank's number of rows once.
        whole_ops: `allow`, or `refuse` to accept only models whose layers and code have rules.
        whole_ops_limit: refuse a model if what runs whole makes a rank hold more than this many
            times the activations that it would hold if everything had a rule, and at least 256 MiB
            more; None for no limit.

    Returns:
        The model; another object only if `model` itself is replaced.

    Raises:
        UserError: the model can't be computed on bands exactly, or a rank would hold too much. With
            `refuse`: a layer has no rule, a level has fewer rows than ranks, or code between the
            layers couples rows.
    """
    check_shard_dim(shard_dim, len(as_shapes(input_shape)[0]) if input_shape else None)
    if whole_ops not in ("allow", "refuse"):
        raise UserError(f"whole_ops: needs allow or refuse, got {whole_ops!r}.")
    if manager.domain_parallel_size == 1:
        return model
    remove_planning_hook(model)
    detach_view(model)
    limit = _ViewLimit(whole_ops_limit) if whole_ops == "allow" else None
    try:
        return _convert(model, manager, shard_dim, custom_converters, input_shape, limit)
    except UserError as refusal:
        if limit is None:
            raise
        if input_shape is None:
            refusal.with_traceback(None)  # its frames would keep what they hold
            hook = PlanAtFirstForward(manager, shard_dim, _PlanOrView(manager, limit, refusal))
            # First, as the view shows fields to all other hooks.
            model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            view_model(model, manager, as_shapes(input_shape), refusal, limit.value)
        return model


class _ViewLimit(NamedTuple):
    """The limit of activations for a model that may compute through the global view."""

    value: float | None


def _convert(
    model: nn.Module,
    manager: DomainParallelManager,
    shard_dim: int,
    custom_converters: Mapping[type[nn.Module], Converter] | None,
    input_shape: Shape | Sequence[Shape] | None,
    limit: _ViewLimit | None,
) -> nn.Module:
    """Convert the layers of a model; `limit` is None if it may not use the view instead."""
    previous_shardings = row_shardings(model)
    conversion = Conversion(manager, custom_converters or {})
    converted = conversion.apply(model)
    if input_shape is None:
        # A root that was replaced is a layer, which the view can't replace while it runs.
        plan: Any = _plan_for_call
        if limit is not None and converted is model:
            plan = _PlanOrView(manager, limit)
        hook = PlanAtFirstForward(manager, shard_dim, plan)
        converted.register_forward_pre_hook(hook, with_kwargs=True)
        logger.info("domain parallel: %s", conversion_summary(conversion))
        return converted
    try:
        _plan_for_shape(converted, input_shape)
    except UserError:
        set_row_shardings(converted, previous_shardings)
        conversion.undo(converted)
        raise
    return converted


def convert_from_domain_parallel(model: nn.Module) -> nn.Module:
    """Put the original layers back, in place: the model is as if it had never been converted.

    Parameters and buffers keep their current values.

    Returns:
        The model that was converted; another object only if a layer replaced the model itself.
    """
    remove_planning_hook(model)
    detach_view(model)
    detach_shared_exchanges(model)
    for module in [m for m in model.modules() if m is not model]:
        if CONVERSION_ATTRIBUTE in module.__dict__:
            module.__dict__[CONVERSION_ATTRIBUTE].undo_all(module)
    conversion: Conversion | None = model.__dict__.get(CONVERSION_ATTRIBUTE)
    if conversion is not None:
        model = conversion.undo_all(model)
    # Layers that were put into the model by hand, without a conversion.
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if isinstance(child, RowLayer):
                _replace_module(module, name, child, _unwrap(child))
    return _unwrap(model) if isinstance(model, RowLayer) else model


def replan(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    """Plan a converted model for another input shape, which replaces the previous one.

    Args:
        model: the result of `convert_to_domain_parallel`.
        input_shape: the shape of the global input, as for `convert_to_domain_parallel`.

    Raises:
        UserError: the model is not converted, or does not suit the shape; the old plan then stays.
    """
    if attached_view(model) is not None:
        replan_view(model, as_shapes(input_shape))
        return
    if CONVERSION_ATTRIBUTE not in model.__dict__:
        raise UserError(
            "replan: this model was not converted, or to one rank. Call it with the result of "
            "convert_to_domain_parallel."
        )
    previous_shardings = row_shardings(model)
    previous_layers = [(context, context.layers) for context in attached_contexts(model)]
    set_row_shardings(model, [])
    for context, _ in previous_layers:
        context.layers = {}
    try:
        _plan_for_shape(model, input_shape)
    except UserError:
        set_row_shardings(model, previous_shardings)
        for context, layers in previous_layers:
            context.layers = layers
        raise
    remove_planning_hook(model)


def _plan_for_shape(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
    with conversion.all_layers():
        planner = plan_model(model, conversion.manager, input_shape, conversion.trusted)
    _log_summary(conversion, planner)


def _plan_for_call(model: nn.Module, shapes: list[Shape], inputs: InputFactory) -> None:
    conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
    with conversion.all_layers():
        planner = plan_calls(model, conversion.manager, shapes, inputs, conversion.trusted)
    _log_summary(conversion, planner)


@final
class _PlanOrView:
    """Plans a model in its first forward, or attaches the global view to it if it is refused.

    Args:
        manager: this rank's position in the mesh.
        limit: of activations through the view.
        refusal: why the layers can't be converted; None if they are, but not planned yet.
    """

    def __init__(
        self, manager: DomainParallelManager, limit: _ViewLimit, refusal: UserError | None = None
    ) -> None:
        self.manager = manager
        self.limit = limit
        self.refusal = refusal

    def __call__(self, model: nn.Module, shapes: list[Shape], inputs: InputFactory) -> None:
        """Plan the call that runs now."""
        if self.refusal is None:
            try:
                _plan_for_call(model, shapes, inputs)
                return
            except GlobalForwardError as refusal:
                self.refusal = refusal
            except UserError as refusal:
                # Without what an `AuditError` has beside its message, which can't be copied.
                self.refusal = UserError(str(refusal))
            conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
            conversion.undo_all(model)
            # The model's forward is about to run: its context was entered.
            leave_context(conversion.context)
        view_model(model, self.manager, shapes, self.refusal, self.limit.value, inputs)


def _log_summary(conversion: Conversion, planner: Planner) -> None:
    # The summary counts bytes layer by layer: not worth it if nobody reads it.
    if logger.isEnabledFor(logging.INFO):
        logger.info("domain parallel: %s", conversion_summary(conversion, planner))


def _unwrap(layer: RowLayer) -> nn.Module:
    original: nn.Module = layer.__dict__["wrapped"]
    update_original(layer, original)
    return original


class Conversion:
    """One walk over a module tree, with what is needed to undo it.

    Args:
        manager: this rank's position in the mesh.
        custom_converters: module type (exact) -> function from the module to its replacement.

    Attributes:
        context: the sharding context of the converted model's code.
        trusted: replacements from `custom_converters`, whose code is not audited.
        converted_counts: the number of domain-parallel layers, by type.
        user_leaf_counts: the number of kept layers without children that are not torch's, by type.
    """

    def __init__(
        self, manager: DomainParallelManager, custom_converters: Mapping[type[nn.Module], Converter]
    ) -> None:
        self.manager = manager
        self.custom_converters = custom_converters
        self.context = ShardingContext(manager)
        self.trusted: list[nn.Module] = []
        self.converted_counts: Counter[str] = Counter()
        self.user_leaf_counts: Counter[str] = Counter()
        self._replacements: dict[nn.Module, nn.Module] = {}
        self._replaced_children: list[tuple[nn.Module, str, nn.Module]] = []
        self._left_alone: list[tuple[nn.Module, str, RowLayer]] = []
        self._original: nn.Module | None = None
        self._previous: Conversion | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert a model; if it is refused, leave it as it was."""
        self._original = model
        try:
            converted = self.convert(model, "")
        except UserError:
            self.undo(model)
            raise
        attach_context(converted, self.context)
        self._previous = converted.__dict__.get(CONVERSION_ATTRIBUTE)
        converted.__dict__[CONVERSION_ATTRIBUTE] = self
        # The model is copied and pickled with its conversion: functions of the user's, which may
        # not be picklable, must not stay in it.
        self._replacements = {}
        self.custom_converters = {}
        self._leave_alone()
        return converted

    @contextmanager
    def all_layers(self) -> Iterator[None]:
        """Plan in this context: the model has all its domain-parallel layers.

        Afterwards it has the original layer again wherever that acts alone with the planned bands.
        """
        for parent, name, layer in self._left_alone:
            layer.train(parent._modules[name].training)  # type: ignore[union-attr]
            parent._modules[name] = layer
        self.converted_counts += _type_counts(self._left_alone)
        self._left_alone = []
        try:
            yield
        finally:
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Put those original layers back that act alone."""
        for parent, name, original in self._replaced_children:
            layer = parent._modules[name]
            if isinstance(layer, RowLayer) and layer.acts_alone:
                self._left_alone.append((parent, name, layer))
                parent._modules[name] = original
        self.converted_counts -= _type_counts(self._left_alone)

    def convert(self, module: nn.Module, path: str) -> nn.Module:
        """Return the replacement of a module; a module that is used several times has one."""
        if module not in self._replacements:
            self._replacements[module] = self._convert(module, path)
        return self._replacements[module]

    def _convert(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, RowLayer):
            return module
        # A parametrization, as spectral_norm, gives its module a type of its own.
        kind = type_before_parametrizations(module)
        if kind in self.custom_converters:
            replacement = self._assign_manager(self.custom_converters[kind](module))
            if not isinstance(replacement, RowLayer):
                self.trusted.append(replacement)
            return replacement
        layer_type = _effective_type(module, kind)
        if layer_type in RULES:
            try:
                replacement = self._assign_manager(RULES[layer_type](module))
            except UserError as error:
                reason = str(error).rstrip(".")
                raise UserError(f"{path or 'model'}: {reason}. {_HOW_TO_REGISTER}") from None
            if replacement is module and layer_type is not kind:
                self.user_leaf_counts[kind.__name__] += 1
            return replacement
        if isinstance(module, CONTAINERS):
            return self._convert_children(module, path)
        if kind.__module__.startswith("torch."):
            raise UserError(
                f"{path or 'model'}: {kind.__name__} has no rule for bands of rows. "
                f"{_HOW_TO_REGISTER}"
            )
        # Code of the user's stays: the audit proves that it keeps rows apart.
        if not module._modules:
            self.user_leaf_counts[kind.__name__] += 1
        return self._convert_children(module, path)

    def _convert_children(self, module: nn.Module, path: str) -> nn.Module:
        for name, child in module._modules.items():
            # Parametrizations compute weights, which have no rows of fields.
            computes_weights = name == "parametrizations" and is_parametrized(module)
            if child is not None and not computes_weights:
                replacement = self.convert(child, f"{path}.{name}" if path else name)
                self._replaced_children.append((module, name, child))
                _replace_module(module, name, child, replacement)
        return module

    def undo(self, converted: nn.Module) -> nn.Module:
        """Put the original layers back, and return the model that was converted."""
        detach_context(converted, self.context)
        for parent, name, original in self._replaced_children:
            update_original(parent._modules[name], original)
            parent._modules[name] = original
        self._replaced_children = []
        if converted.__dict__.pop(CONVERSION_ATTRIBUTE, None) and self._previous:
            converted.__dict__[CONVERSION_ATTRIBUTE] = self._previous
        original_model = converted if self._original is None else self._original
        update_original(converted, original_model)
        return original_model

    def undo_all(self, converted: nn.Module) -> nn.Module:
        """Undo this conversion and the earlier ones of the same model."""
        set_row_shardings(converted, [])
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


def _type_counts(children: list[tuple[nn.Module, str, RowLayer]]) -> Counter[str]:
    """Return the number of layers of each type; a layer that is used several times is one."""
    return Counter(type(layer).__name__ for layer in {layer for _, _, layer in children})


def _effective_type(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the torch layer whose behaviour a subclass keeps; the type itself if there is none."""
    layer_type = torch_layer_type(kind)
    return kind if layer_type is None or overridden_method(module) else layer_type


def _replace_module(
    parent: nn.Module, name: str, old_module: nn.Module, new_module: nn.Module
) -> None:
    """Replace the child `name` of `parent` by `new_module`."""
    if new_module is not old_module:
        parent._modules[name] = new_module


def update_original(replacement: nn.Module | None, original: nn.Module) -> None:
    """Give a replaced module the current parameters, buffers and mode of its replacement.

    A `RowLayer` shares them with the layer that it wraps. Any other replacement may have been moved
    to a device or loaded since.
    """
    if replacement is None or replacement is original:
        return
    if isinstance(replacement, RowLayer):
        # All dictionaries of hooks are shared, but this flag is a plain value.
        original._is_full_backward_hook = replacement._is_full_backward_hook
        return
    replacements = dict(replacement.named_modules())
    for name, module in original.named_modules():
        if name in replacements:
            module.training = replacements[name].training
            _update_tensors(replacements[name]._parameters, module._parameters)
            _update_tensors(replacements[name]._buffers, module._buffers)


def _update_tensors(replacement: dict[str, Any], original: dict[str, Any]) -> None:
    for name in original:
        original[name] = replacement.get(name, original[name])


@final
class PlanAtFirstForward:
    """A forward pre-hook that plans for the inputs of the first call and then removes itself.

    It stays if the model is refused. A copy of the model plans for itself.

    Args:
        manager: this rank's position in the mesh.
        shard_dim: the row dimension of the model's inputs.
        plan: called with the model, the global shapes of its inputs and a function that makes
            inputs of other shapes.
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
        self.is_planning = False

    @_disable_dynamo  # torch.compile would trace into the plan, which runs the model many times
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan, unless this call is itself part of a plan; return new arguments if there are."""
        if self.is_planning or active_planner() is not None:
            return None
        fields = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in fields[:1]:
            check_shard_dim(self.shard_dim, x.ndim)
        # One gather per field, in the order of the arguments, which is the same on all ranks.
        global_shapes = {id(x): self._global_shape(x) for x in fields}
        _check_rows_unambiguous([x for x in fields if x.ndim >= FIELD_DIMS], global_shapes)

        def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Any], dict[str, Any]]:
            def empty_input(x: Tensor) -> Tensor:
                shape = shape_of(global_shapes[id(x)])
                return torch.empty(shape, dtype=x.dtype, device=x.device)

            new_args, new_kwargs = tree_map_only(Tensor, empty_input, (args, kwargs))
            return list(new_args), new_kwargs

        hooks = set(model._forward_pre_hooks)
        self.is_planning = True
        try:
            self.plan(model, list(global_shapes.values()), inputs)
        finally:
            self.is_planning = False
        remove_planning_hook(model)
        return _run_new_hooks(model, hooks, args, kwargs)

    def _global_shape(self, x: Tensor) -> Shape:
        """Gather the global shape; a tensor with one row on every rank counts as replicated."""
        if x.ndim < FIELD_DIMS:
            return tuple(x.shape)
        partition = self.manager.gather_partition(x.shape[ROW_DIM])
        if set(partition.sizes) == {1}:
            return tuple(x.shape)
        self.manager.bands.register(partition)
        return (*x.shape[:ROW_DIM], partition.height, *x.shape[ROW_DIM + 1 :])


def _check_rows_unambiguous(fields: list[Tensor], global_shapes: dict[int, Shape]) -> None:
    """Refuse a first field with one row on every rank: it may be replicated or banded.

    With a single column it counts as replicated if another field has bands.
    """
    banded = [x for x in fields if global_shapes[id(x)] != tuple(x.shape)]
    if not fields or any(x is fields[0] for x in banded):
        return
    if not banded or fields[0].shape[-1] > 1:
        raise UserError(
            f"first forward: every rank was given one row, {tuple(fields[0].shape)}. This may be "
            "the same row on all ranks, or each rank's band of a globe. Convert with input_shape, "
            "the shape of the global input."
        )


def _run_new_hooks(model: nn.Module, hooks: set[int], args: Any, kwargs: Any) -> Any:
    """Run forward pre-hooks that were registered since, and return the arguments that they make.

    torch has listed the hooks of the call that runs now before: it would not call them.
    """
    for key, hook in list(model._forward_pre_hooks.items()):
        if key not in hooks:
            if key in model._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(model, args, kwargs) or (args, kwargs)
            else:
                hook(model, args)
    return args, kwargs


def remove_planning_hook(model: nn.Module) -> None:
    """Remove the hook that plans at the first forward, if the model has it."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PlanAtFirstForward):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def check_shard_dim(shard_dim: int, ndim: int | None) -> None:
    """Refuse dimensions other than the rows'; `ndim` is the input's, None if it is unknown."""
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
    """Return a line about the replaced, kept and trusted layers and the bytes that this rank sends.

    Without a planner, the line has only what is known before the plan.
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
        sharded_tensors = [
            sharding.path
            for _, shardings in row_shardings(planner.model)
            for sharding in shardings.values()
        ]
        if sharded_tensors:
            parts.append(f"cut into bands: {', '.join(sharded_tensors)}")
        transposing = [name for layer, name in planner.names.items() if _uses_transpose(layer)]
        if transposing:
            parts.append(f"rows transposed to channels: {', '.join(transposing)}")
        parts.append(f"this rank sends at most {_bytes_sent(planner):,} bytes of rows per forward")
    return "; ".join([*parts, "not verified numerically: credit-dp verify does"])


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _bytes_sent(planner: Planner) -> int:
    """Return an upper bound of the bytes that this rank sends in a forward pass.

    Layers that share an exchange send less, and so does one that shrinks its rows before it sends.
    """
    visits = (visit for visit in planner.layer_calls if visit.dim is not None)
    return sum(_bytes_sent_by_visit(planner, visit) for visit in visits)


def _bytes_sent_by_visit(planner: Planner, visit: LayerCall) -> int:
    """Return the bytes that this rank sends in one call of a layer."""
    out_height = next(
        rows.out_height
        for rows in planner.layer_rows[visit.layer]
        if rows.in_height == visit.in_height
    )
    bands = Bands(planner.bands[visit.in_height], planner.bands[out_height])
    if isinstance(visit.layer, DepthwiseLayer) and visit.layer.transposes(visit.in_height):
        return _bytes_sent_by_transpose(planner, visit, visit.layer, bands)
    rows_sent = sum(message.length for message in visit.layer.exchange(bands).sends)
    return rows_sent * _global_bytes(planner, visit, visit.shapes[0]) // visit.in_height


def _bytes_sent_by_transpose(
    planner: Planner, visit: LayerCall, layer: DepthwiseLayer, bands: Bands
) -> int:
    """Return the bytes that this rank sends to transpose rows to channels and back."""
    bytes_sent = 0
    shapes = (visit.shapes[0], tuple(visit.outputs.shape))
    transposes = zip((True, False), shapes, layer.transpose_pair(bands), strict=True)
    for to_channels, shape, plan in transposes:
        rows_sent = sum(plan.rows_sent(to_channels)[layer.manager.domain_rank])
        global_rows = sum(plan.rows) * sum(plan.channels)  # rows of one channel, as `rows_sent`
        bytes_sent += rows_sent * _global_bytes(planner, visit, shape) // global_rows
    return bytes_sent


def _uses_transpose(layer: RowLayer) -> bool:
    """Return whether a layer transposes rows to channels, at any height."""
    return isinstance(layer, DepthwiseLayer) and any(map(layer.transposes, layer.planned_heights))


def _global_bytes(planner: Planner, visit: LayerCall, shape: tuple[int, ...]) -> int:
    """Return the bytes of a global tensor of a call, at the batch size that the user gave."""
    output = next(leaf for leaf in tree_leaves(visit.outputs) if isinstance(leaf, Tensor))
    size = prod(shape) * output.element_size()
    # A plan runs with a placeholder batch size, which stands for any.
    planned_size, given_size = planner.batch_sizes
    return size // planned_size * given_size if shape[0] == planned_size else size

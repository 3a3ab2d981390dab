"""Conversion of a model to bands of rows, and back.

Conversion happens in this order:

1. `Conversion` walks over the modules and replaces each layer that couples rows by its
   domain-parallel layer, which shares the parameters of the layer that it wraps.
2. The plan runs the converted model without data, on tensors of the globe and on bands. It finds
   the heights of all levels, chooses their bands and compares what both runs compute. With an
   `input_shape` this happens at once, without one in the first forward (`PlanAtFirstForward`).
3. A summary is logged.

A conversion is kept on the model, so that `convert_from_domain_parallel` can undo it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.boundary import (
    attach_domain,
    attached_domain,
    detach_domain,
    run_rest_of_call,
)
from credit_dp.domain_parallel.conversion import (
    CONVERSION_ATTRIBUTE,
    Conversion,
    Converter,
    _replace_module,
    unwrap,
)
from credit_dp.domain_parallel.decide import (
    DEFAULT_LIMIT,
    Decision,
    Wanted,
    decide,
    decide_on_globe,
    decision_lines,
    plan_layers,
    whole_call_line,
)
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.parameter_check import (
    add_parameter_check,
    remove_parameter_check,
)
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, validate_sharding_constraints
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.planning.model_plan import InputFactory, Shape, as_shapes
from credit_dp.domain_parallel.rules import (
    _needs_halo_conv2d,
    _needs_halo_conv3d,
    _needs_halo_conv_transpose2d,
    _needs_halo_conv_transpose3d,
)
from credit_dp.domain_parallel.shared_exchange import detach_shared_exchanges
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    children_of,
    remove_hooks,
    run_uncompiled,
    tree_leaves,
    tree_map_only,
)

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

# Positive row dimensions that are accepted before the input's number of dimensions is known: of
# (B, C, H, W) and of (B, C, D, H, W).
ROW_DIMS_FROM_START = (2, 3)


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
    stay. With one domain rank nothing is changed.

    Another model may share the layers themselves, as a default `activation=nn.GELU()`. If it shares
    modules that contain layers, they are changed for it, too: convert a `copy.deepcopy` then.

    A model whose code needs rows of other ranks between these layers computes on tensors of the
    globe instead: its layers and code stay as they are, and a function without a rule for bands
    gathers the rows and runs whole on every rank.

    Args:
        model: any module; its parameters may be on the meta device. Move it to a GPU afterwards.
        shard_dim: the input's row dimension: -2, or 2 of four, or 3 of five dimensions.
        custom_converters: module type (exact) -> function from the module to its replacement.
            Looked up before the built-in rules. The children of the replacement are not converted.
            Its code is trusted, not compared. If it is a `RowLayer`, its calls are planned.
        input_shape: the shape of the global input with its batch, `(B, C, H, W)`, or a tuple of
            shapes for several inputs. The model then accepts any batch size. Without it the first
            forward plans, which gathers every rank's number of rows once.
        whole_ops: `allow`, or `refuse` to accept only models of which no function runs whole.
        whole_ops_limit: refuse a model if what runs whole makes a rank hold more than this many
            times the activations that it would hold if everything had a rule, and at least 256 MiB
            more; None for no limit.

    Returns:
        The model; another object only if `model` itself is replaced.

    Raises:
        UserError: the model can't be computed on bands exactly, or a rank would hold too much. With
            `refuse`: a function has no rule for bands.
    """
    check_shard_dim(shard_dim, len(as_shapes(input_shape)[0]) if input_shape else None)
    if whole_ops not in ("allow", "refuse"):
        raise UserError(f"whole_ops: needs allow or refuse, got {whole_ops!r}.")
    if manager.domain_parallel_size == 1:
        return model
    remove_planning_hook(model)
    detach_domain(model)
    wanted = Wanted(whole=whole_ops == "allow", limit=whole_ops_limit)
    conversion = Conversion(manager, custom_converters or {})
    converted = conversion.apply(model)
    if input_shape is not None:
        decision = decide(converted, conversion, as_shapes(input_shape), wanted)
        sharded = converted if conversion.is_applied else model
        carry_out(decision, sharded, conversion)
        add_parameter_check(sharded, manager)
        return sharded
    if conversion.problems:
        conversion.undo(converted)
        hook = PlanAtFirstForward(conversion, shard_dim, wanted)
        # First, as all other hooks shall see fields of the globe.
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        add_parameter_check(model, manager)
        return model
    # A root that was replaced is a layer, which can't be replaced while it runs.
    wanted = wanted._replace(globe=converted is model)
    hook = PlanAtFirstForward(conversion, shard_dim, wanted)
    converted.register_forward_pre_hook(hook, with_kwargs=True)
    add_parameter_check(converted, manager)
    logger.info("domain parallel: %s", conversion_summary(conversion, converted))
    return converted


def shard_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Sequence[int],
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
) -> nn.Module:
    """Convert a model, without the check of parameters in its first forward.

    Raises:
        UserError: as `convert_to_domain_parallel`.
    """
    converted = convert_to_domain_parallel(
        model,
        manager,
        input_shape=tuple(input_shape),
        whole_ops=whole_ops,
        whole_ops_limit=whole_ops_limit,
    )
    remove_parameter_check(converted)
    return converted


def carry_out(
    decision: Decision,
    model: nn.Module,
    conversion: Conversion,
) -> None:
    """Make a model compute as decided, in place, and log the decision."""
    manager, shapes = conversion.manager, decision.input_shapes
    if decision.problems:
        raise UserError(decision.error) from decision.cause
    if decision.on_globe:
        attach_domain(model, manager, shapes).decision = decision
    if decision.unplanned and manager.rank == 0:
        logger.warning(
            "domain parallel: costs are not known before training: %s", decision.unplanned
        )
    if logger.isEnabledFor(logging.INFO):
        in_layers = not decision.on_globe
        summary = [conversion_summary(conversion, model, decision)] if in_layers else []
        for line in summary or filter(None, decision_lines(decision)):
            logger.info("domain parallel: %s", line)
    calls = decision.whole_calls
    if calls and manager.rank == 0:
        logger.warning(
            "domain parallel: functions that run whole on every rank: %d; the largest: %s",
            len(calls),
            whole_call_line(calls[0]),
        )


def convert_from_domain_parallel(model: nn.Module) -> nn.Module:
    """Put the original layers back, in place: the model is as if it had never been converted.

    Parameters and buffers keep their current values.

    Returns:
        The model that was converted; another object only if a layer replaced the model itself.
    """
    remove_planning_hook(model)
    remove_parameter_check(model)
    detach_domain(model)
    detach_shared_exchanges(model)
    for module in [m for m in model.modules() if m is not model]:
        if CONVERSION_ATTRIBUTE in module.__dict__:
            module.__dict__[CONVERSION_ATTRIBUTE].undo_all(module)
    conversion: Conversion | None = model.__dict__.get(CONVERSION_ATTRIBUTE)
    if conversion is not None:
        model = conversion.undo_all(model)
    # Layers that were put into the model by hand, without a conversion.
    for module in model.modules():
        for name, child in list(children_of(module).items()):
            if isinstance(child, RowLayer):
                _replace_module(module, name, child, unwrap(child))
    return unwrap(model) if isinstance(model, RowLayer) else model


def replan(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    """Plan a converted model for another input shape, which replaces the previous one.

    Raises:
        UserError: the model is not converted, or does not suit the shape; the old plan then stays.
    """
    shapes = as_shapes(input_shape)
    domain = attached_domain(model)
    if domain is not None:
        before: Decision = domain.decision
        wanted = Wanted(limit=before.whole_ops_limit)
        decision = decide_on_globe(model, domain.manager, shapes, wanted, [before.refusal])
        if decision.problems:
            raise UserError(decision.error) from decision.cause
        detach_domain(model)
        carry_out(decision, model, Conversion(domain.manager, {}))
        new = attached_domain(model)
        assert new is not None
        new.loss_factor = domain.loss_factor
        return
    if CONVERSION_ATTRIBUTE not in model.__dict__:
        raise UserError(
            "replan: this model was not converted, or to one rank. Call it with the result of "
            "convert_to_domain_parallel."
        )
    conversion: Conversion = model.__dict__[CONVERSION_ATTRIBUTE]
    carry_out(plan_layers(model, conversion, shapes, Wanted(globe=False)), model, conversion)
    remove_planning_hook(model)


@final
class PlanAtFirstForward:
    """A forward pre-hook that plans for the inputs of the first call and then removes itself.

    It stays if the model is refused. A copy of the model plans for itself.

    Args:
        conversion: of the model; undone if not all layers have rules.
    """

    def __init__(self, conversion: Conversion, shard_dim: int, wanted: Wanted) -> None:
        self.conversion = conversion
        self.manager = conversion.manager
        self.shard_dim = shard_dim
        self.wanted = wanted
        self.refusals = conversion.problems
        self.is_planning = False

    @run_uncompiled  # torch.compile would trace into the plan, which runs the model many times
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

        self.is_planning = True
        try:
            self._plan(model, list(global_shapes.values()), inputs)
        finally:
            self.is_planning = False
        remove_planning_hook(model)
        if attached_domain(model) is None:
            return None
        return run_rest_of_call(model, args, kwargs)

    def _plan(self, model: nn.Module, shapes: list[Shape], inputs: InputFactory) -> None:
        conversion, wanted = self.conversion, self.wanted
        if self.refusals:
            decision = decide_on_globe(model, self.manager, shapes, wanted, self.refusals, inputs)
        elif not wanted.globe:
            decision = plan_layers(model, conversion, shapes, wanted, inputs)
        else:
            decision = decide(model, conversion, shapes, wanted, inputs)
            if decision.refusal:
                self.refusals = [decision.refusal]
        carry_out(decision, model, conversion)

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


def remove_planning_hook(model: nn.Module) -> None:
    """Remove the hook that plans at the first forward, if the model has it."""
    remove_hooks(model, lambda hook: isinstance(hook, PlanAtFirstForward))


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


def conversion_summary(
    conversion: Conversion, model: nn.Module, decision: Decision | None = None
) -> str:
    """Return a line about the replaced, kept and trusted layers.

    Without a decision, the line has only what is known before the plan.
    """
    parts = [_format_counts(conversion.converted_counts) or "no layer mixes rows"]
    if conversion.user_leaf_counts:
        parts.append(
            f"layers of your own, kept and compared: {_format_counts(conversion.user_leaf_counts)}"
        )
    trusted = Counter(type(module).__name__ for module in conversion.trusted)
    if trusted:
        parts.append(f"trusted: {_format_counts(trusted)}")
    if decision is None:
        parts.append("planned and compared at the first forward")
    else:
        transposing = [
            path
            for path, layer in row_layers(model).items()
            if isinstance(layer, DepthwiseLayer)
            and any(map(layer.transposes, layer.planned_heights))
        ]
        if transposing:
            parts.append(f"rows transposed to channels: {', '.join(transposing)}")
    return "; ".join([*parts, "not verified numerically: credit-dp verify does"])


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

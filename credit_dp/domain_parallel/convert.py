"""Swapping the layers that mix rows for domain-parallel ones, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from credit_dp.domain_parallel.constraints import validate_sharding_constraints
from credit_dp.domain_parallel.conversion import (
    RECORD,
    Conversion,
    Converter,
    _replace_module,
    hand_back,
)
from credit_dp.domain_parallel.first_forward import (
    PlanAtFirstForward,
    check_shard_dim,
    remove_first_forward,
)
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.plan import Inputs, Shape, as_shapes, plan_calls, plan_model
from credit_dp.domain_parallel.planner import Planner
from credit_dp.domain_parallel.row_tensors import cut_only, cuts
from credit_dp.domain_parallel.rules import (
    _needs_halo_conv2d,
    _needs_halo_conv3d,
    _needs_halo_conv_transpose2d,
    _needs_halo_conv_transpose3d,
)
from credit_dp.domain_parallel.running import announced
from credit_dp.domain_parallel.shared_exchange import unshare
from credit_dp.domain_parallel.summary import summary
from credit_dp.errors import UserError

# Users know these by this module's name.
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
        hook = PlanAtFirstForward(manager, shard_dim, _plan_calls)
        converted.register_forward_pre_hook(hook, with_kwargs=True)
        logger.info("domain parallel: %s", summary(conversion))
        return converted
    try:
        _plan(converted, input_shape)
    except UserError:
        cut_only(converted, before)
        conversion.undo(converted)
        raise
    return converted


def convert_from_domain_parallel(model: nn.Module) -> nn.Module:
    """Put the plain layers back, in place: the model is as if it had never been converted.

    Parameters and buffers keep the values that they have by now.

    Returns:
        The model that was converted; another object only if a layer stands for the whole of it.
    """
    remove_first_forward(model)
    unshare(model)
    for module in [m for m in model.modules() if m is not model]:
        if RECORD in module.__dict__:
            module.__dict__[RECORD].undo_all(module)
    conversion: Conversion | None = model.__dict__.get(RECORD)
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
    if RECORD not in model.__dict__:
        raise UserError(
            "replan: this model was not converted, or to one rank. Call it with what "
            "convert_to_domain_parallel returned."
        )
    before = cuts(model)
    layers = [(current, current.layers) for current in announced(model)]
    cut_only(model, [])
    for current, _ in layers:
        current.layers = {}
    try:
        _plan(model, input_shape)
    except UserError:
        cut_only(model, before)
        for current, old in layers:
            current.layers = old
        raise
    remove_first_forward(model)


def _plan(model: nn.Module, input_shape: Shape | Sequence[Shape]) -> None:
    conversion: Conversion = model.__dict__[RECORD]
    _log(conversion, plan_model(model, conversion.manager, input_shape, conversion.trusted))


def _plan_calls(model: nn.Module, shapes: list[Shape], inputs: Inputs) -> None:
    conversion: Conversion = model.__dict__[RECORD]
    _log(conversion, plan_calls(model, conversion.manager, shapes, inputs, conversion.trusted))


def _log(conversion: Conversion, planner: Planner) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("domain parallel: %s", summary(conversion, planner))


def _unwrapped(layer: RowLayer) -> nn.Module:
    plain: nn.Module = layer.__dict__["wrapped"]
    hand_back(layer, plain)
    return plain

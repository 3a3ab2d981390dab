"""Gradients of which each rank has a part stay parts through operators that are linear in them.

Each rank's part of a parameter's gradient is what training sums up. What belongs to parameters
alone, as a network of a time, then sends nothing in backward; and of other gradients one sum is
sent, where a field reads it.

Imported after the rules that it extends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Their rules are extended.
from credit_dp.domain_parallel.band_tensor import (  # noqa: F401
    fetched,
    indexing,
    joins,
    norms,
    reductions,
    views,
)
from credit_dp.domain_parallel.band_tensor.moving import whole
from credit_dp.domain_parallel.band_tensor.pointwise import (
    UNTAGGED,
    is_unsummed,
    on_first_rank,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    RULES,
    WHOLE,
    BandTensor,
    Part,
    Rule,
    domain_of,
    is_band,
    tensors_in,
)
from credit_dp.torch_private import tree_map

aten = torch.ops.aten
Extension = Callable[[Rule, Any, tuple[Any, ...], dict[str, Any]], Any]


def extend(*names: str) -> Callable[[Extension], Extension]:
    """Register what is called instead of the rules of aten operators, and gets them, too."""

    def register(extension: Extension) -> Extension:
        def extended(rule: Rule) -> Rule:
            return lambda func, args, kwargs: extension(rule, func, args, kwargs)

        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet), overload)
            RULES[func] = extended(RULES.get(func) or BandTensor.find_rule(func))
        return extension

    return register


# ---------------------------------------------------------------- parts stay parts


# Operators of backward that are linear in the gradient, their first argument.
LINEAR = (
    "native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward",
    "native_batch_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data",
    "glu_backward", "gelu_backward", "logit_backward", "native_dropout_backward",
    "sigmoid_backward", "silu_backward", "tanh_backward", "threshold_backward",
    *(name for name in UNTAGGED if name.endswith("_backward")),
)  # fmt: skip


@extend(*(f"{name}.default" for name in LINEAR))
def linear_in_gradient(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a rank's part of a gradient makes, which is a part of what the gradient makes."""
    grad, *others = args
    if not is_unsummed(grad) or not _are_whole((others, kwargs)):
        return rule(func, args, kwargs)
    results = func(grad.local, *tree_map(whole, others), **tree_map(whole, kwargs))
    if isinstance(results, Tensor):
        return Part(results, PARTIAL)
    return tuple([None if x is None else Part(x, PARTIAL) for x in results])


def _are_whole(values: Any) -> bool:
    return all(type(x) is not BandTensor or x.rows is WHOLE for x in tensors_in(values))


def _sum_parts(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], terms: tuple[int, ...]
) -> Part | None:
    """Return the parts of an operator that is linear in all of its terms together.

    The first rank has the terms that all ranks have. None if none of the terms is a part, or
    another tensor is not whole.
    """
    others = [x for i, x in enumerate(args) if i not in terms]
    tensors = [args[i] for i in terms]
    if not any(map(is_unsummed, tensors)) or not _are_whole((others, kwargs)):
        return None
    if any(map(is_band, tensors)):
        return None
    domain = domain_of(tensors)
    local = [on_first_rank(x, domain) if i in terms else tree_map(whole, x)
             for i, x in enumerate(args)]  # fmt: skip
    return Part(func(*local, **tree_map(whole, kwargs)), PARTIAL)


@extend("where.self")
def where(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return entries of two tensors, of which one may be a gradient in parts."""
    return _sum_parts(func, args, kwargs, (1, 2)) or rule(func, args, kwargs)


@extend("index_add.default")
def index_add(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add entries at indices, as the gradient of a selection does."""
    return _sum_parts(func, args, kwargs, (0, 3)) or rule(func, args, kwargs)


@extend("index_put.default")
def index_put(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add entries at indices, as the gradient of an indexed tensor does."""
    is_added = len(args) > 3 and args[3]
    found = _sum_parts(func, args, kwargs, (0, 2)) if is_added else None
    return found or rule(func, args, kwargs)


@extend("cat.default", "stack.default")
def join(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join gradients, as the backward of a split does."""
    tensors, *others = args
    are_parts = any(map(is_unsummed, tensors))
    if are_parts and not any(map(is_band, tensors)):
        domain = domain_of(tensors)
        return Part(func([on_first_rank(x, domain) for x in tensors], *others, **kwargs), PARTIAL)
    return rule(func, args, kwargs)

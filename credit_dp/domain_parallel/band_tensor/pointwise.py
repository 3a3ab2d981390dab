"""Operators that compute each entry from the entries at the same place, and what is like them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    broadcasts,
    put,
    refresh,
    whole,
    with_rows,
    write_back,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    domain_of,
    rule_for,
    tensors_in,
)

aten = torch.ops.aten
META = torch.device("meta")
# Of sums of ranks' parts these are the sums of what they are of the parts.
PRODUCTS = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
SUMS = {aten.add.Tensor, aten.sub.Tensor}


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute each band by itself."""
    rows = rows_of_all(args) if not kwargs else None
    if rows is None:  # operands are held in several ways
        tensors = list(tensors_in((args, kwargs)))
        for x in tensors:
            if type(x) is BandTensor:
                refresh(x)
        rows = PARTIAL if _is_partial(func, tensors) else common_rows(tensors)
    domain = domain_of((args, kwargs))
    local = [_local(x, rows, domain) for x in args]
    result = func(*local, **{name: _local(x, rows, domain) for name, x in kwargs.items()})
    if isinstance(result, tuple):  # some have a buffer beside the result, which may be empty
        return tuple([Part(x, rows if x.ndim == result[0].ndim else WHOLE) for x in result])
    return Part(result, rows)


def rows_of_all(args: tuple[Any, ...]) -> Rows | None:
    """Return how all fields among operands are held; None if in several ways, or as parts of sums.

    What is no field has to have one entry for all rows.
    """
    rows: Rows | None = None
    for x in args:
        if type(x) is BandTensor:
            if x.origin is not None or x.unsent:
                refresh(x)
            if rows is None:
                rows = x.rows
            elif x.rows is not rows:
                return None
        elif isinstance(x, list | tuple):
            return None
    if rows is PARTIAL or rows is None:
        return None
    for x in args:
        if isinstance(x, Tensor) and type(x) is not BandTensor and rows is not WHOLE:
            assert isinstance(rows, Band)
            if not broadcasts(x, rows):
                return None
    return rows


def _local(x: Any, rows: Rows, domain: Domain) -> Any:
    if type(x) is BandTensor and x.rows is rows:
        return x.local
    if isinstance(x, Tensor):
        if rows is PARTIAL:
            return x.local if type(x) is BandTensor and x.rows is PARTIAL else whole(x)
        return with_rows(x, rows, domain)
    return [_local(each, rows, domain) for each in x] if isinstance(x, list | tuple) else x


def _is_partial(func: Any, tensors: list[Tensor]) -> bool:
    """Return whether each rank may compute its part of a sum by itself."""
    partial = [type(x) is BandTensor and x.rows is PARTIAL for x in tensors]
    if func is aten.neg.default:
        return partial[0]
    if func in SUMS:
        return all(partial) and len(tensors) == 2
    if func in PRODUCTS:  # with what every rank has: no sum is divided by another or by rows
        has_bands = any(type(x) is BandTensor and type(x.rows) is Band for x in tensors)
        return sum(partial) == 1 and not has_bands and (partial[0] or func is aten.mul.Tensor)
    return False


def common_rows(tensors: list[Tensor]) -> Rows:
    """Return in which bands tensors are combined that broadcast with each other."""
    found: Band | None = None
    size = -1
    for x in tensors:
        if type(x) is not BandTensor or not isinstance(x.rows, Band):
            continue
        # A single row broadcasts along those of others, so that all ranks need it.
        if x.rows.size == 1 and any(
            y.ndim >= -x.rows.dim and y.shape[x.rows.dim] > 1 for y in tensors
        ):
            continue
        # That of the largest one, which would cost most to move; of equal ones the first.
        if x.numel() > size:
            found, size = x.rows, x.numel()
    return WHOLE if found is None else found


def pointwise_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to each band by itself."""
    from credit_dp.domain_parallel.band_tensor.rules import run_whole

    x = kwargs["out"] if "out" in kwargs else args[0]
    if type(x) is not BandTensor or "out" in kwargs:
        return run_whole(func, args, kwargs)
    refresh(x)
    is_partial = x.rows is PARTIAL
    rows = WHOLE if is_partial else x.rows
    local = whole(x) if is_partial else x.local
    func(
        local,
        *[_local(each, rows, x.domain) for each in args[1:]],
        **{name: _local(each, rows, x.domain) for name, each in kwargs.items()},
    )
    if is_partial:
        put(x, local)
    else:
        write_back(x)
    return x


# What is pointwise, too, though torch does not say so.
rule_for(
    *("elu_backward.default", "hardsigmoid_backward.default", "hardswish.default"),
    *("hardswish_backward.default", "hardtanh_backward.default", "leaky_relu_backward.default"),
    *("log_sigmoid_forward.default", "log_sigmoid_backward.default", "masked_fill.Tensor"),
    *("hardshrink_backward.default", "softshrink_backward.default"),
    *("mish_backward.default", "softplus_backward.default"),
    *("_prelu_kernel.default", "_prelu_kernel_backward.default"),
)(pointwise)
rule_for("copy_", "fill_", "zero_", "masked_fill_", "gelu_", "hardswish_", "mish_", "threshold_")(
    pointwise_in_place
)


@rule_for("clone", "_to_copy", "alias", "detach", "lift_fresh_copy")
def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy what a rank holds, or view it."""
    x = args[0]
    refresh(x)
    if kwargs.get("device") == META:  # for its shape alone, as torch does with zeros of autograd
        return torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=META)
    dtype = kwargs.get("dtype")
    # Integers of parts add up to others, and so do parts that are rounded.
    if x.rows is PARTIAL and dtype and torch.promote_types(x.dtype, dtype) != dtype:
        return Part(func(whole(x), **kwargs), WHOLE)
    return Part(func(x.local, **kwargs), x.rows)


@rule_for("zeros_like", "ones_like", "full_like", "empty_like")
def fill_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a new tensor in the same bands."""
    x = args[0]
    refresh(x)
    return Part(func(x.local, *args[1:], **kwargs), WHOLE if x.rows is PARTIAL else x.rows)


@rule_for("_conj", "_neg_view")
def conjugate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy: torch would only note it, above the level of these tensors."""
    x = args[0]
    refresh(x)
    return Part(func(x.local).resolve_conj().resolve_neg(), x.rows, is_copy=True)

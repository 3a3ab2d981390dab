"""Operators that compute each entry from the entries at the same place, and what is like them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    broadcasts,
    other_layouts,
    put,
    refresh,
    refresh_all,
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
    is_band,
    is_partial,
    rule_for,
    tensors_in,
)
from credit_dp.domain_parallel.bands.indices import is_balanced
from credit_dp.domain_parallel.transport import keeps_messages
from credit_dp.torch_private import backward_pass

aten = torch.ops.aten
META = torch.device("meta")
# Of sums of ranks' parts these are the sums of what they are of the parts.
PRODUCTS = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
PRODUCTS_IN_PLACE = {aten.mul_.Tensor, aten.div_.Tensor, aten.mul_.Scalar, aten.div_.Scalar}
SUMS = {aten.add.Tensor, aten.sub.Tensor}
# They have not torch's tag of such operators.
UNTAGGED = (
    "_conj_physical", "_prelu_kernel", "_prelu_kernel_backward", "complex", "elu_backward",
    "hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward",
    "hardtanh_backward", "leaky_relu", "leaky_relu_backward", "log_sigmoid_backward",
    "log_sigmoid_forward", "mish_backward", "polar", "rrelu_with_noise_backward",
    "softplus_backward", "softshrink_backward",
)  # fmt: skip
# Backward finds entries by these: sums of parts have to have the same bits each time.
EQUALITIES = {aten.eq.Tensor, aten.ne.Tensor}


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute each band by itself."""
    rows = shared_rows(args) if not kwargs else None
    is_read_again = False
    domain = domain_of((args, kwargs))
    if rows is None:  # operands are held in several ways
        tensors = list(tensors_in((args, kwargs)))
        refresh_all(*tensors)
        if func in EQUALITIES:
            args = tuple([whole(x) if is_partial(x) else x for x in args])
        rows = PARTIAL if _is_partial(func, tensors) else common_rows(tensors)
        is_read_again = func not in SUMS and any(x.requires_grad for x in tensors)
    if rows is PARTIAL and func in SUMS:
        local = [on_first_rank(x, domain) for x in args[:2]]
        return Part(func(*local, **kwargs), PARTIAL)
    local = [_local(x, rows, domain, is_read_again) for x in args]
    named = {name: _local(x, rows, domain, is_read_again) for name, x in kwargs.items()}
    result = func(*local, **named)
    if isinstance(result, tuple):  # some have a buffer beside the result, which may be empty
        return tuple([Part(x, rows if x.ndim == result[0].ndim else WHOLE) for x in result])
    return Part(result, rows)


def shared_rows(args: tuple[Any, ...]) -> Rows | None:
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
            elif x.rows is not rows and x.rows != rows:
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


def _local(x: Any, rows: Rows, domain: Domain, is_read_again: bool = False) -> Any:
    if type(x) is BandTensor and (x.rows is rows or x.rows == rows):
        return x.local
    if isinstance(x, Tensor):
        if rows is PARTIAL:
            return x.local if is_partial(x) else whole(x)
        return with_rows(x, rows, domain, is_read_again)
    if isinstance(x, list | tuple):
        return [_local(each, rows, domain, is_read_again) for each in x]
    return x


def on_first_rank(x: Tensor, domain: Domain) -> Tensor:
    """Return a rank's part of a tensor: of one that all ranks have all is on the first rank."""
    if is_partial(x):
        return x.local
    everything: Tensor = whole(x)
    return everything if domain.rank == 0 else torch.zeros_like(everything)


def has_unknown_sum(x: Any) -> bool:
    """Return whether a value is a tensor in parts that nothing has summed up."""
    if not is_partial(x):
        return False
    known = other_layouts(x)
    return known is None or WHOLE not in known.parts


def is_unsummed(x: Any) -> bool:
    """Return whether a value is a gradient in parts that nothing has summed up.

    It may be a parameter's, which is never summed up here. Where backward computes a forward again
    with the messages that were kept, it makes the forward's calls.
    """
    return has_unknown_sum(x) and backward_pass() >= 0 and not keeps_messages()


def _is_partial(func: Any, tensors: list[Tensor]) -> bool:
    partial = [is_partial(x) for x in tensors]
    if func is aten.neg.default:
        return partial[0]
    if func in SUMS:
        if len(tensors) != 2 or any(map(is_band, tensors)):
            return False
        return all(partial) or any(map(is_unsummed, tensors))
    if func in PRODUCTS:  # with what every rank has: no sum is divided by another or by rows
        has_bands = any(map(is_band, tensors))
        is_product = partial[0] or func is aten.mul.Tensor
        return sum(partial) == 1 and not has_bands and is_product and not _grows(tensors, partial)
    return False


def _grows(tensors: list[Tensor], partial: list[bool]) -> bool:
    """Return whether the parts of a product take more to sum up than those of its factor.

    A gradient may never be summed up, see `is_unsummed`.
    """
    (x,) = [x for x, is_part in zip(tensors, partial, strict=True) if is_part]
    if is_unsummed(x):
        return False
    shape = torch.broadcast_shapes(*[y.shape for y in tensors])  # type: ignore[no-untyped-call]
    return bool(prod(shape) > x.numel())


def common_rows(tensors: list[Tensor]) -> Rows:
    """Return in which bands to combine tensors that broadcast with each other.

    These are the bands of the largest tensor, which would cost most to move. If several are as
    large, bands in the dimension in which the first has its rows, to which a residual adds, and
    bands that end at windows come first: the others move once, instead of back and forth around
    each attention.
    """
    found: list[BandTensor] = []
    for x in tensors:
        if type(x) is not BandTensor or not isinstance(x.rows, Band):
            continue
        # A single row broadcasts along those of others, so that all ranks need it.
        if x.rows.size == 1 and any(
            y.ndim >= -x.rows.dim and y.shape[x.rows.dim] > 1 for y in tensors
        ):
            continue
        if found and x.numel() > found[0].numel():
            found.clear()
        if not found or x.numel() == found[0].numel():
            found.append(x)
    if not found:
        return WHOLE
    first = found[0].band
    if all(x.rows == first for x in found[1:]):
        return first
    is_backward = backward_pass() >= 0

    def order(x: BandTensor) -> tuple[bool | int, ...]:
        preference, is_usual = _preference(x.band, first.dim), has_usual_bands(x)
        # Gradients come back to the bands of what windows are made of.
        return (is_usual, *preference) if is_backward else (*preference, is_usual)

    return max(found, key=order).rows


@lru_cache(4096)
def _preference(rows: Band, dim: int) -> tuple[bool, bool, int]:
    """Return whether bands are balanced, in a dimension, and of which number they are multiples."""
    return is_balanced(rows.bounds), rows.dim == dim, gcd(*rows.bounds[:-1])


def has_usual_bands(x: BandTensor) -> bool:
    """Return whether a field has the bands of its height."""
    return x.band.bounds == x.domain.bounds(x.band.height)


# What is written to needs no values before.
OVERWRITES = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}


def pointwise_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to each band by itself."""
    from credit_dp.domain_parallel.band_tensor.rules import run_whole

    x = kwargs["out"] if "out" in kwargs else args[0]
    if type(x) is not BandTensor or "out" in kwargs:
        return run_whole(func, args, kwargs)
    if not (x.is_late and func in OVERWRITES):
        refresh(x)
    refresh_all(*tensors_in((args[1:], kwargs)))
    if _remain_parts(func, x, args[1:], kwargs):
        x.others = None
        func(x.local, *map(whole, args[1:]), **kwargs)
        write_back(x)
        return x
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


def _remain_parts(func: Any, x: BandTensor, others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether parts that are written to remain parts of the sum, as those of gradients."""
    if x.rows is not PARTIAL or kwargs:
        return False
    if any(type(y) is BandTensor and y.rows is not WHOLE for y in others):
        return False
    is_zeroed = func is aten.masked_fill_.Scalar and others[1] == 0
    return is_zeroed or func in PRODUCTS_IN_PLACE


rule_for(*(f"{name}.default" for name in UNTAGGED), "masked_fill.Tensor")(pointwise)
rule_for("floor_divide.default", "floor_divide.Scalar")(pointwise)
rule_for("floor_divide_.Tensor", "floor_divide_.Scalar")(pointwise_in_place)
rule_for(
    "copy_", "fill_", "zero_", "masked_fill_", "celu_", "elu_", "gelu_", "hardsigmoid_",
    "hardswish_", "hardtanh_", "leaky_relu_", "mish_", "selu_", "threshold_",
)(pointwise_in_place)  # fmt: skip


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

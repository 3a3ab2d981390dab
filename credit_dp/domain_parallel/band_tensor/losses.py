"""Losses that are operators of their own.

A loss that is summed up or averaged sums each band; `mean` divides by the entries of the globe.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import whole, with_rows
from credit_dp.domain_parallel.band_tensor.reductions import fields_rows, total
from credit_dp.domain_parallel.band_tensor.rules import (
    named_arguments,
    run_whole,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Part,
    Rows,
    domain_of,
    rule_for,
)
from credit_dp.domain_parallel.bands.reductions import accumulation_dtype

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of reductions
Given = dict[str, Any]


def _local(given: Given, rows: Rows, domain: Domain) -> Given:
    return {
        name: with_rows(x, rows, domain) if isinstance(x, Tensor) else x
        for name, x in given.items()
    }


# ---------------------------------------------------------------- losses of single entries


@rule_for(
    "mse_loss.default", "smooth_l1_loss.default", "huber_loss.default",
    "soft_margin_loss.default", "binary_cross_entropy.default",
    "binary_cross_entropy_with_logits.default",
)  # fmt: skip
def loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the loss of each entry, or of all."""
    given = named_arguments(func, args, kwargs)
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    domain, rows = domain_of(tensors), fields_rows(tensors)
    local, how = _local(given, rows, domain), given["reduction"]
    if how == NONE or not isinstance(rows, Band):
        return Part(func(**local), rows)
    losses = func(**local | {"reduction": NONE})
    part = losses.sum(dtype=accumulation_dtype(losses))
    if how == MEAN:
        part = part / _count(tensors)
    return total(part, domain, losses.dtype)


def _count(tensors: list[Tensor]) -> int:
    shape: Any = torch.broadcast_shapes(*[x.shape for x in tensors])  # type: ignore[no-untyped-call]
    return prod(shape)


@rule_for(
    "mse_loss_backward.default", "smooth_l1_loss_backward.default", "huber_loss_backward.default",
    "soft_margin_loss_backward.default", "binary_cross_entropy_backward.default",
)  # fmt: skip
def loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of a prediction."""
    given = named_arguments(func, args, kwargs)
    how, grad = given["reduction"], given.pop("grad_output")
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    domain = domain_of([grad, *tensors])
    rows = fields_rows([*tensors, grad] if how == NONE else tensors)
    grad = with_rows(grad, rows, domain) if how == NONE else whole(grad)
    if how == MEAN:
        grad = grad / _count(tensors)
        given["reduction"] = SUM
    return Part(func(grad_output=grad, **_local(given, rows, domain)), rows)


# ---------------------------------------------------------------- classes


def _rows_of_targets(x: Any) -> tuple[Band, Band] | None:
    """Return bands of scores and of targets, which have no dimension of classes.

    None: there are none, or classes are rows.
    """
    if type(x) is not BandTensor or not isinstance(x.rows, Band):
        return None
    dim = x.ndim + x.rows.dim
    if dim == 1 or x.ndim == 1:
        return None
    return x.rows, x.rows if dim > 1 else x.rows._replace(dim=1 - x.ndim)


@rule_for("nll_loss_forward.default", "nll_loss2d_forward.default")
def class_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return minus the scores of the targets' classes, and the sum of their weights."""
    x, target, weight, how, ignored = args
    fields_rows([x])
    rows = _rows_of_targets(x)
    if rows is None:
        return run_whole(func, args, kwargs)
    domain, weight = x.domain, whole(weight)
    target = with_rows(target, rows[1], domain)
    if how == NONE:
        losses, weight_sum = func(x.local, target, weight, how, ignored)
        return Part(losses, rows[1]), Part(weight_sum, WHOLE)
    wide = accumulation_dtype(x.local)
    weight = None if weight is None else weight.to(wide)
    sums = torch.stack(func(x.local.to(wide), target, weight, SUM, ignored))
    loss, weight_sum = domain.transport.all_reduce(sums).to(x.dtype).unbind()
    return Part(loss / weight_sum if how == MEAN else loss, WHOLE), Part(weight_sum, WHOLE)


@rule_for("nll_loss_backward.default", "nll_loss2d_backward.default")
def class_loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of scores."""
    grad, x, target, weight, how, ignored, weight_sum = args
    fields_rows([x])
    rows = _rows_of_targets(x)
    if rows is None:
        return run_whole(func, args, kwargs)
    domain = x.domain
    grad = with_rows(grad, rows[1], domain) if how == NONE else whole(grad)
    target = with_rows(target, rows[1], domain)
    local = func(grad, x.local, target, whole(weight), how, ignored, whole(weight_sum))
    return Part(local, rows[0])

"""Rules of attention: queries stay where they are, keys and values travel.

No rank holds the scores of all queries.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.view.rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    require,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.shapes import move_rows
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    is_band,
    whole,
    with_layout,
    wrap,
)

ATTENTION = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


@rule_for("scaled_dot_product_attention")
def attention(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Attention with rows among the queries, the keys and values, or in both as samples or heads.

    Rows in the dimension of features are moved to another one.
    """
    options: dict[str, Any] = {"attn_mask": None, "is_causal": False}
    options |= bind(ATTENTION, args, kwargs)
    require(options, "query", "key", "value")
    query, key, value, mask = (options.pop(name) for name in ATTENTION[:4])
    if not is_band(query):
        if not is_band(key) or layout_of(key).dim >= key.ndim - 2:
            require_whole(mask)
            return _attend_to_bands(query, key, value, mask, options)
        query = _cut_alike(query, key)
    layout = layout_of(query)
    if layout.dim == query.ndim - 1:
        query = move_rows(query, [layout.dim])
        layout = layout_of(query)
    view = query.view_
    if mask is not None:
        mask = _mask(mask, query.ndim, layout, view)
    if layout.dim == query.ndim - 2:
        if options["is_causal"]:
            if mask is not None:
                raise NoRuleError
            options["is_causal"] = False
            mask = _causal_mask(layout, view, key)
        key, value = whole(key), whole(value)
    else:
        from_end = layout.dim - query.ndim
        key, value = (_of_same_samples(x, layout, from_end, view) for x in (key, value))
    result = func(query.local, key, value, attn_mask=mask, **options)
    if mask is not None and mask.requires_grad and not result.numel():
        # Of no queries torch forgets the mask: its gradient would be missing on this rank alone.
        result = result + mask.sum().to(result.dtype)
    return wrap(result, layout, view)


def _cut_alike(query: Any, key: GlobalTensor) -> GlobalTensor:
    """Return whole queries as bands of the samples, heads or windows in which the keys have rows.

    Raises:
        NoRuleError: they have none of these.
    """
    layout = layout_of(key)
    if query.ndim != key.ndim or query.shape[layout.dim] != layout.size:
        raise NoRuleError
    return GlobalTensor(with_layout(query, layout, key.view_), layout, key.view_)


def _of_same_samples(x: Any, layout: Layout, from_end: int, view: GlobalView) -> Tensor:
    """Return the part of keys or values for samples, heads or windows that are sharded.

    Raises:
        NoRuleError: there is another number of them.
    """
    if x.ndim < -from_end or x.shape[from_end] == 1:
        gathered: Tensor = whole(x)
        return gathered
    if x.shape[from_end] != layout.size:
        raise NoRuleError
    return with_layout(x, layout.at(x.ndim + from_end), view)


def _causal_mask(layout: Layout, view: GlobalView, key: Tensor) -> Tensor:
    """Return which keys this rank's queries may see: those up to their own position."""
    entries = layout.partition.height
    rows = layout.partition.rows(view.rank)
    positions = torch.arange(rows.start, rows.stop, device=key.device)
    outer = torch.arange(layout.outer, device=key.device) * entries
    queries = (outer[:, None] + positions).flatten()
    return queries[:, None] >= torch.arange(key.shape[-2], device=key.device)


def _mask(mask: Tensor, ndim: int, layout: Layout, view: GlobalView) -> Tensor:
    """Return the part of a mask that belongs to the rows of the queries."""
    dim = mask.ndim - ndim + layout.dim
    if dim < 0 or mask.shape[dim] == 1:
        result: Tensor = whole(mask)
        return result
    if mask.shape[dim] != layout.size:
        raise NoRuleError
    return with_layout(mask, layout.at(dim), view)


def _attend_to_bands(query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> Any:
    """Attend from queries that every rank has, as class tokens, to keys and values with rows.

    Scores are sharded along the keys, so that softmax and the sum of values are over the ranks.

    Raises:
        NoRuleError: rows are not among the keys and values, or options need all scores.
    """
    if not (is_band(key) and is_band(value)) or mask is not None or options["is_causal"]:
        raise NoRuleError
    if any(layout_of(x).dim != x.ndim - 2 for x in (key, value)):
        raise NoRuleError
    if options.get("dropout_p") or options.get("enable_gqa"):
        raise NoRuleError
    scale = options.get("scale")
    if scale is None:
        scale = 1 / sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    return torch.matmul(scores.softmax(-1), value)

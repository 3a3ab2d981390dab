"""Rules of attention over rows: each rank computes some heads, or the queries of its rows.

A rank that computes some heads gets their queries, keys and values of all rows, and sends their
results back: it holds and sends a share of each that falls with the number of ranks. If there are
fewer heads than ranks, ranks share the queries of each head. Queries stay where they are, and keys
and values travel, where that sends less: as for few keys, or with one head.

No rank holds the scores of all queries and heads.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.attention import Shares, best_shares
from credit_dp.domain_parallel.bands.moves import Blocks
from credit_dp.domain_parallel.view.function_rules import (
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
from credit_dp.domain_parallel.view.moves import fetch_blocks, return_blocks
from credit_dp.domain_parallel.view.shapes import move_rows
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    is_band,
    local_of,
    note_order,
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
    shares = _best_shares(query, key, value, mask, options)
    if shares is not None:
        return _attend_in_blocks(func, (query, key, value), mask, options, shares)
    if mask is not None:
        mask = _mask(mask, query.ndim, layout, view)
    if layout.dim == query.ndim - 2:
        if options["is_causal"]:
            if mask is not None:
                raise NoRuleError
            options["is_causal"] = False
            rows = layout.partition.rows(view.rank)
            mask = _causal_mask(rows, layout, key)
        key, value = whole(key), whole(value)
    else:
        from_end = layout.dim - query.ndim
        key, value = (_of_same_samples(x, layout, from_end, view) for x in (key, value))
    result = _call(func, query.local, key, value, mask, options)
    # Keys and values may have more samples or heads before the queries' dimensions.
    return wrap(result, layout.at(layout.dim + result.ndim - query.ndim), view)


def _call(
    func: Function, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Kwargs
) -> Tensor:
    """Return the attention of this rank's queries."""
    result: Tensor = func(query, key, value, attn_mask=mask, **options)
    if mask is not None and mask.requires_grad and not result.numel():
        # Of no queries torch forgets the mask: its gradient would be missing on this rank alone.
        result = result + mask.sum().to(result.dtype)
    return result


def _cut_alike(query: Any, key: GlobalTensor) -> GlobalTensor:
    """Return queries that all ranks hold, cut into bands along the dimension of the keys' bands.

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


def _causal_mask(rows: slice, layout: Layout, key: Tensor) -> Tensor:
    """Return which keys the queries of some rows may see: those up to their own position."""
    entries = layout.partition.height
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


# ---------------------------------------------------------------- blocks of heads


def _best_shares(
    query: GlobalTensor, key: Any, value: Any, mask: Any, options: Kwargs
) -> Shares | None:
    """Return the shares with the fewest bytes, and of equal ones the shares that hold least.

    None if it is best that queries stay, or if rows are not among queries, keys and values.
    """
    tensors = (query, key, value)
    if not (is_band(key) and is_band(value)) or is_band(mask) or options.get("enable_gqa"):
        return None
    if any(layout_of(x).dim != x.ndim - 2 or layout_of(x).outer != 1 for x in tensors):
        return None
    if any((x.ndim, x.dtype) != (query.ndim, query.dtype) for x in tensors):
        return None
    if options["is_causal"] and mask is not None:
        return None
    return best_shares(query.shape, key.shape, value.shape, query.view_.ranks)


def _attend_in_blocks(
    func: Function,
    tensors: tuple[GlobalTensor, GlobalTensor, GlobalTensor],
    mask: Any,
    options: Kwargs,
    shares: Shares,
) -> GlobalTensor:
    """Return attention of which each rank computes a block of heads and queries; a collective."""
    query, view = tensors[0], tensors[0].view_
    layout, transport = layout_of(query), view.manager.transport
    heads = shares.heads(query.shape[shares.dim], view.ranks)
    rows = shares.rows(layout.partition)
    blocks = [Blocks(layout.partition, shares.dim, rows, heads)]
    for x in tensors[1:]:
        bands = layout_of(x).partition
        blocks.append(Blocks(bands, shares.dim, ((0, bands.height),) * view.ranks, heads))
    for x in tensors:
        note_order(x)
    own_query, own_key, own_value = fetch_blocks([x.local for x in tensors], blocks, transport)
    own_rows, own_heads = slice(*rows[view.rank]), slice(*heads[view.rank])
    if mask is not None:
        mask = local_of(mask)
        for dim, own in ((shares.dim, own_heads), (-2, own_rows)):
            if mask.ndim >= -dim and mask.shape[dim] != 1:
                mask = mask.narrow(dim, own.start, own.stop - own.start)
    elif options["is_causal"] and shares.groups < view.ranks:
        options["is_causal"] = False
        mask = _causal_mask(own_rows, layout, own_key)
    result = _call(func, own_query, own_key, own_value, mask, options)
    (local,) = return_blocks([result], blocks[:1], transport)
    return GlobalTensor(local, layout, view)

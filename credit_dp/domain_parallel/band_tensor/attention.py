"""Rules of attention that torch computes in one piece, for each of its backends.

Rows may be samples, windows or heads: then queries, keys and values are cut alike. Rows among the
queries stay where they are, and keys and values travel; or each rank computes some heads of all
rows, if that sends less, see `bands.attention`. Queries that every rank has, as class tokens,
attend on each rank to the keys of its rows, and results are weighted by their sums of exponentials.

What backward needs again of other ranks is kept with the sums, which nothing else reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    Required,
    all_rows,
    broadcasts,
    fetch,
    give_back,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.rules import run_whole
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
    rule_for,
)
from credit_dp.domain_parallel.bands.attention import Split, best_split
from credit_dp.domain_parallel.bands.moves import Blocks, exchange_to_bands, exchange_to_blocks
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import RowPartition, falls_into_equal_parts
from credit_dp.torch_private import schema_of

Values = dict[str, Any]
Locals = dict[str, Any]


class Way(NamedTuple):
    """How attention is computed on bands.

    Attributes:
        kind: `alike`: samples or heads are cut; `queries`: each rank has the queries of its rows;
            `keys`: each rank has the keys of its rows; `blocks`: each rank has some heads, or some
            of their queries.
        dim: the dimension that is cut, negative.
        like: which of queries, keys and values has these bands already; None if none has.
        split: of blocks.
    """

    kind: str
    dim: int
    like: int | None = None
    split: Split | None = None


@lru_cache(4096)
def best_way(
    shapes: tuple[tuple[int, ...], ...],
    rows: tuple[Band | None, ...],
    mask: Rows | None,
    is_causal: bool,
    has_dropout: bool,
    ranks: int,
) -> Way | None:
    """Return how attention is computed so that little is sent.

    Args:
        rows: their bands; None of whole tensors.
        mask: what a mask is; None without one.

    Returns:
        None if it runs whole.
    """
    if is_causal and (mask is not None or has_dropout):
        return None

    def is_common(dim: int) -> bool:
        return len({shape[dim] for shape in shapes}) == 1

    for i, band in enumerate(rows):
        if band is not None and band.dim < -2 and is_common(band.dim):
            return Way("alike", band.dim, i)
    query, key, value = rows
    keys_have_rows = key is not None and value is not None and key.dim == value.dim == -2
    if query is not None and query.dim == -2:
        if keys_have_rows and not isinstance(mask, Band) and is_common(-3):
            assert key is not None
            assert value is not None
            if query.outer == key.outer == value.outer == 1:
                split = best_split(shapes[0], shapes[1], shapes[2], ranks)
                if split is not None:
                    return Way("blocks", split.dim, None, split)
        # Rows that are folded below samples have no order among keys.
        return Way("queries", -2, 0 if query.outer == 1 or not is_causal else None)
    if query is None and keys_have_rows and not is_causal:
        return Way("keys", -2, 1)
    even = [d for d in (-3, -4) if is_common(d) and falls_into_equal_parts(shapes[0][d], ranks)]
    if even:
        return Way("alike", max(even, key=lambda d: shapes[0][d]))
    return Way("queries", -2) if shapes[0][-2] >= ranks else None


class Call(NamedTuple):
    """A call of attention, forward or backward.

    Attributes:
        mask_name: which of them is the mask.
        band: the bands of what is cut.
    """

    func: Any
    values: Values
    mask_name: str
    domain: Domain
    way: Way
    band: Band

    @property
    def mask(self) -> Any:
        """Return the mask, if there is one."""
        return self.values.get(self.mask_name)

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """Return queries, keys and values."""
        return self.values["query"], self.values["key"], self.values["value"]


@lru_cache(256)
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(func).arguments)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return a call, which has to be the same in forward and in backward; None if it runs whole."""
    names = _names(func)
    values = dict(zip(names, args, strict=False)) | kwargs
    mask_name = "attn_mask" if "attn_mask" in names else "attn_bias"
    domain = domain_of(values)
    tensors = (values["query"], values["key"], values["value"])
    mask = values.get(mask_name)
    refresh_all(*tensors, mask)
    rows = tuple([x.rows if is_band(x) else None for x in tensors])
    if rows == (None, None, None):
        return None
    mask_layout = None if mask is None else mask.rows if type(mask) is BandTensor else WHOLE
    way = best_way(
        tuple([tuple(x.shape) for x in tensors]),
        rows,
        mask_layout,
        bool(values.get("is_causal")),
        bool(values.get("dropout_p")),
        domain.ranks,
    )
    if way is None:
        return None
    band = None if way.like is None else rows[way.like]
    if band is None:
        band = Band(way.dim, 1, domain.bounds(tensors[0].shape[way.dim]))
    return Call(func, values, mask_name, domain, way, band)


@rule_for(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
)
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attend from queries to keys, and return the weighted sums of values."""
    call = _call(func, args, kwargs)
    if call is None:
        return run_whole(func, args, kwargs)
    return FORWARD[call.way.kind](call)


@rule_for(
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_cudnn_attention_backward.default",
    "_scaled_dot_product_fused_attention_overrideable_backward.default",
)
def attention_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of queries, keys, values and, if the operator has it, of the mask."""
    call = _call(func, args, kwargs)
    if call is None:
        return run_whole(func, args, kwargs)
    # Random numbers are this rank's own.
    for name in ("philox_seed", "philox_offset"):
        if name in call.values:
            call.values[name] = whole(call.values[name])
    return BACKWARD[call.way.kind](call)


# ---------------------------------------------------------------- on one rank


def _run(func: Any, values: Locals) -> tuple[Any, ...]:
    query, key, value = values["query"], values["key"], values["value"]
    if query.numel() and key.numel():
        return func(**values)  # type: ignore[no-any-return]
    filled = {
        name: x.new_zeros([max(n, 1) for n in x.shape]) if isinstance(x, Tensor) else x
        for name, x in values.items()
    }
    out, sums, *rest = func(**filled)
    shape = (*query.shape[:-1], value.shape[-1])
    return out.new_zeros(shape), sums.new_full(_sum_shape(func, query), -inf), *rest


def _sum_shape(func: Any, query: Tensor) -> list[int]:
    shape = list(query.shape[:-1])
    return [*shape, 1] if "cudnn" in schema_of(func).name else shape


def _sums(func: Any, query: Tensor, sums: Tensor) -> Tensor:
    shape = _sum_shape(func, query)
    return sums.narrow(2, 0, shape[2]) if sums.shape[2] > shape[2] else sums


SUMS_ALIGNMENT = 32  # of the queries' sums of torch's memory efficient attention


def _run_backward(call: Call, values: Locals) -> list[Tensor | None]:
    tensors = [values["query"], values["key"], values["value"], values.get(call.mask_name)]
    wanted = values.get("grad_input_mask", [True, True, True, False])
    if not (tensors[0].numel() and tensors[1].numel()):
        return [
            torch.zeros_like(x) if want and x is not None else None
            for x, want in zip(tensors, wanted, strict=True)
        ]
    sums = values["logsumexp"]
    if "efficient" in schema_of(call.func).name and sums.shape[2] % SUMS_ALIGNMENT:
        missing = SUMS_ALIGNMENT - sums.shape[2] % SUMS_ALIGNMENT
        values = values | {"logsumexp": F.pad(sums, (0, missing), value=inf)}
    if "max_q" in values:
        values = values | {"max_q": tensors[0].shape[-2], "max_k": tensors[1].shape[-2]}
    grads = list(call.func(**values))
    return grads + [None] * (4 - len(grads))


def _run_rows(func: Any, values: Locals, first: int) -> tuple[Any, ...]:
    if not values.get("is_causal") or first == 0:
        return _run(func, values)
    # All of them see the keys before the first; of the others they see as queries from 0 on.
    before, after = _before_and_after(values, first)
    results = [_run(func, part) for part in (before, after) if part is not None]
    if len(results) == 1:
        return results[0]
    query = values["query"]
    out, sums = _merged([(y, _sums(func, query, s)) for y, s, *_ in results])
    return out, sums, *results[0][2:]


def _before_and_after(values: Locals, first: int) -> tuple[Locals, Locals | None]:
    keys = values["key"].shape[-2]
    split = min(first, keys)
    if "compute_log_sumexp" in values:  # both parts are weighted by these sums
        values = values | {"compute_log_sumexp": True}
    before, after = (
        values | {name: values[name].narrow(-2, start, count) for name in ("key", "value")}
        for start, count in ((0, split), (split, keys - split))
    )
    return before | {"is_causal": False}, after if split < keys else None


def _run_rows_backward(call: Call, values: Locals, first: int) -> list[Tensor | None]:
    if not values.get("is_causal") or first == 0:
        return _run_backward(call, values)
    before, after = _before_and_after(values, first)
    grads = _run_backward(call, before)
    if after is not None:
        pairs = list(zip(grads, _run_backward(call, after), strict=True))
        query_pair, *key_pairs = [None if a is None or b is None else (a, b) for a, b in pairs]
        grads = [None if query_pair is None else query_pair[0] + query_pair[1]]
        grads += [None if pair is None else torch.cat(pair, -2) for pair in key_pairs]
    return grads


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return attention to all keys, from that to some of them, and the logarithms of sums."""
    outs, sums = (torch.stack([part[i].to(parts[0][1].dtype) for part in parts]) for i in (0, 1))
    total = sums.logsumexp(0)
    total = total.masked_fill(total == -inf, 0)  # all keys are masked: then all are zero
    weights = (sums - total).exp()
    weights = weights if weights.ndim == outs.ndim else weights[..., None]
    # Attention to no keys may be NaN.
    out = torch.where(weights > 0, outs * weights, 0).sum(0)
    return out.to(parts[0][0].dtype), total


# ---------------------------------------------------------------- cut alike


def _results(
    results: tuple[Any, ...], rows: Rows, sums_rows: Rows, kept: tuple[Tensor, ...] | None = None
) -> tuple[Any, ...]:
    out, sums, *rest = results
    others = [Part(x, WHOLE) if isinstance(x, Tensor) else x for x in rest]
    return Part(out, rows), Part(sums, sums_rows, kept=kept), *others


def _sums_band(band: Band, ndim: int) -> Band:
    return band._replace(dim=4 + band.dim - ndim)


def _attend_alike(call: Call) -> Any:
    band, domain = call.band, call.domain
    local = {name: with_rows(x, band, domain) if isinstance(x, Tensor) else x
             for name, x in call.values.items()}  # fmt: skip
    results = _run(call.func, local)
    return _results(results, band, _sums_band(band, results[1].ndim))


def _attend_alike_backward(call: Call) -> Any:
    band, domain, values = call.band, call.domain, call.values
    names = [*_names(call.func)[:1], "query", "key", "value", "out", call.mask_name]
    local = {name: with_rows(values[name], band, domain)
             for name in names if isinstance(values.get(name), Tensor)}  # fmt: skip
    sums = values["logsumexp"]
    local["logsumexp"] = with_rows(sums, _sums_band(band, sums.ndim), domain)
    grads = _run_backward(call, values | local)
    return _gradients(call, grads, [band] * 3, band)


def _gradients(
    call: Call, grads: list[Tensor | None], rows: list[Rows], mask_band: Band | None
) -> tuple[Part | None, ...]:
    mask = call.mask
    mask_rows: Rows = PARTIAL
    if mask is not None and mask_band is not None and not broadcasts(mask, mask_band):
        mask_rows = mask_band
    parts = zip(grads, [*rows, mask_rows], strict=True)
    results = tuple(None if x is None else Part(x, each) for x, each in parts)
    return results[: len(schema_of(call.func).returns)]


# ---------------------------------------------------------------- queries stay


@lru_cache(4096)
def _keys_of_queries(bounds: tuple[int, ...], keys: int, is_causal: bool) -> Required:
    """Return for each rank the rows of keys that its queries see."""
    if not is_causal:
        return all_rows(keys, len(bounds) - 1)
    return tuple((RowRange(0, min(stop, keys)),) for stop in bounds[1:])


def _fetched_keys(call: Call) -> tuple[Tensor, ...]:
    """Return the keys and values that this rank's queries see; a collective."""
    _, key, value = call.tensors
    found = []
    for x in (key,) if key is value else (key, value):
        required = _required(call, x)
        found.append(
            whole(x) if required is None else fetch(x.local, x.rows, required, call.domain)
        )
    return found[0], found[-1]


def _required(call: Call, x: Any) -> Required | None:
    if not is_band(x) or x.rows.dim != -2:
        return None
    is_causal = bool(call.values.get("is_causal")) and x.rows.outer == 1
    return _keys_of_queries(call.band.bounds, x.rows.height, is_causal)


def _local_queries(call: Call, kept: tuple[Tensor, ...]) -> Locals:
    domain, mask = call.domain, call.mask
    local = {"query": with_rows(call.values["query"], call.band, domain)}
    local |= {"key": kept[0], "value": kept[1]}
    return local if mask is None else local | {call.mask_name: with_rows(mask, call.band, domain)}


def _attend_from_rows(call: Call) -> Any:
    kept = _fetched_keys(call)
    first = call.band.bounds[call.domain.rank]
    results = _run_rows(call.func, call.values | _local_queries(call, kept), first)
    out, sums, *rest = results
    sums = _sums(call.func, out, sums)
    has_bands = any(is_band(x) for x in call.tensors[1:])
    sums_rows = _sums_band(call.band, sums.ndim)
    return _results((out, sums, *rest), call.band, sums_rows, kept if has_bands else None)


def _attend_from_rows_backward(call: Call) -> Any:
    band, domain, values = call.band, call.domain, call.values
    sums, grad_name = values["logsumexp"], _names(call.func)[0]
    local = _local_queries(call, _kept(sums) or _fetched_keys(call))
    local |= {name: with_rows(values[name], band, domain) for name in (grad_name, "out")}
    local["logsumexp"] = with_rows(sums, _sums_band(band, sums.ndim), domain)
    grads = _run_rows_backward(call, values | local, band.bounds[domain.rank])
    rows: list[Rows] = [band]
    for i, x in enumerate(call.tensors[1:], 1):
        grad, required = grads[i], _required(call, x)
        if grad is not None and required is not None:
            grads[i] = give_back(grad, x.rows, required, domain)
        rows.append(PARTIAL if required is None else x.rows)
    return _gradients(call, grads, rows, band)


def _kept(sums: Any) -> tuple[Tensor, ...] | None:
    return sums.kept if type(sums) is BandTensor else None


# ---------------------------------------------------------------- keys stay


def _local_keys(call: Call) -> Locals:
    domain, mask = call.domain, call.mask
    local = {name: with_rows(call.values[name], call.band, domain) for name in ("key", "value")}
    local["query"] = whole(call.values["query"])
    if mask is not None:
        local[call.mask_name] = with_rows(mask, call.band._replace(dim=-1), domain)
    return local


def _attend_to_rows(call: Call) -> Any:
    local = _local_keys(call)
    values = call.values | local
    if "compute_log_sumexp" in values:
        values["compute_log_sumexp"] = True
    out, sums, *rest = _run(call.func, values)
    sums = _sums(call.func, out, sums)
    if call.mask is not None:  # torch says 0 of queries that see none of the keys
        is_masked = (local[call.mask_name] == -inf).all(-1)
        sums = sums.masked_fill(is_masked.view(*is_masked.shape, *[1] * (sums.ndim - 3)), -inf)
    both = torch.cat([out.to(sums.dtype), sums.view(*out.shape[:-1], 1)], -1)
    parts = [(y[..., :-1], y[..., -1]) for y in call.domain.transport.all_gather(both)]
    total, all_sums = _merged(parts)
    return _results((total.to(out.dtype), all_sums.view(sums.shape), *rest), WHOLE, WHOLE)


def _attend_to_rows_backward(call: Call) -> Any:
    values, grad_name = call.values, _names(call.func)[0]
    local = _local_keys(call)
    local |= {name: whole(values[name]) for name in (grad_name, "out", "logsumexp")}
    grads = _run_backward(call, values | local)
    return _gradients(call, grads, [PARTIAL, call.band, call.band], call.band._replace(dim=-1))


# ---------------------------------------------------------------- heads of all rows


def _blocks(call: Call) -> list[Blocks]:
    split, ranks = call.way.split, call.domain.ranks
    assert split is not None
    query, *others = call.tensors
    bands = RowPartition(query.rows.bounds)
    heads = split.heads(query.shape[split.dim], ranks)
    blocks = [Blocks(bands, split.dim, split.rows(bands), heads)]
    for x in others:
        all_rows_each = ((0, x.shape[-2]),) * ranks
        blocks.append(Blocks(RowPartition(x.rows.bounds), split.dim, all_rows_each, heads))
    return blocks


def _mask_block(mask: Tensor, query_blocks: Blocks, rank: int) -> Tensor:
    for dim, (start, stop) in (
        (query_blocks.dim, query_blocks.heads[rank]),
        (-2, query_blocks.rows[rank]),
    ):
        if mask.ndim >= -dim and mask.shape[dim] != 1:
            mask = mask.narrow(dim, start, stop - start)
    return mask


def _local_block(call: Call, tensors: Sequence[Tensor], query_blocks: Blocks) -> Locals:
    local = dict(zip(("query", "key", "value", "out"), tensors, strict=False))
    if call.mask is not None:
        local[call.mask_name] = _mask_block(whole(call.mask), query_blocks, call.domain.rank)
    return local


def _attend_in_blocks(call: Call) -> Any:
    blocks, domain = _blocks(call), call.domain
    tensors = exchange_to_blocks([x.local for x in call.tensors], blocks, domain.transport)
    values = call.values | _local_block(call, tensors, blocks[0])
    out, sums, *rest = _run_rows(call.func, values, blocks[0].rows[domain.rank][0])
    (own,) = exchange_to_bands([out], blocks[:1], domain.transport)
    # Of the sums each rank has its block: these are no bands if ranks share heads.
    rows = call.tensors[0].rows
    return _results((own, sums, *rest), rows, WHOLE, (*tensors, out))


def _attend_in_blocks_backward(call: Call) -> Any:
    blocks, domain, values = _blocks(call), call.domain, call.values
    grad_name, rows = _names(call.func)[0], call.tensors[0].rows
    kept = _kept(values["logsumexp"])
    if kept is None:
        fields = [*(x.local for x in call.tensors), with_rows(values["out"], rows, domain)]
        kept = exchange_to_blocks(fields, [*blocks, blocks[0]], domain.transport)
    grad = with_rows(values[grad_name], rows, domain)
    (grad,) = exchange_to_blocks([grad], blocks[:1], domain.transport)
    local = _local_block(call, kept, blocks[0])
    local |= {grad_name: grad, "logsumexp": whole(values["logsumexp"])}
    first = blocks[0].rows[domain.rank][0]
    *grads, mask_grad = _run_rows_backward(call, values | local, first)
    wanted = [(i, x) for i, x in enumerate(grads) if x is not None]
    own = exchange_to_bands(
        [x for _, x in wanted], [blocks[i] for i, _ in wanted], domain.transport
    )
    for (i, _), x in zip(wanted, own, strict=True):
        grads[i] = x
    if mask_grad is not None:
        total = mask_grad.new_zeros(call.mask.shape)
        _mask_block(total, blocks[0], domain.rank).copy_(mask_grad)
        mask_grad = total
    return _gradients(call, [*grads, mask_grad], [x.rows for x in call.tensors], None)


FORWARD = {
    "alike": _attend_alike,
    "queries": _attend_from_rows,
    "keys": _attend_to_rows,
    "blocks": _attend_in_blocks,
}
BACKWARD = {
    "alike": _attend_alike_backward,
    "queries": _attend_from_rows_backward,
    "keys": _attend_to_rows_backward,
    "blocks": _attend_in_blocks_backward,
}


# ---------------------------------------------------------------- layers in one operator


@rule_for("_native_multi_head_attention.default")
def multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attend with several heads, without gradients: torch has one operator for all of it."""
    values = dict(zip(_names(func), args, strict=False)) | kwargs
    found, weights = _multi_head(
        [values[name] for name in ("query", "key", "value")],
        values["num_head"],
        [values[f"{part}_{name}"] for part in ("qkv", "proj") for name in ("weight", "bias")],
        values.get("mask"),
        values.get("need_weights", True),
        values.get("average_attn_weights", True),
        values.get("mask_type"),
    )
    return _as_part(found), None if weights is None else _as_part(weights)


MASK_OF_KEYS = 1  # torch's number of a mask (samples, keys); others broadcast to the scores


def _as_part(x: Any) -> Part:
    return Part(x.local, x.rows) if type(x) is BandTensor else Part(x, WHOLE)


def _multi_head(
    tensors: Sequence[Tensor],
    heads: int,
    weights: Sequence[Tensor],
    mask: Tensor | None = None,
    need_weights: bool = False,
    average: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    weight, bias, out_weight, out_bias = weights
    projections = [
        F.linear(x, w, b).view(*x.shape[:2], heads, -1).transpose(1, 2)
        for x, w, b in zip(tensors, weight.chunk(3), bias.chunk(3), strict=True)
    ]
    query, key, value = projections
    scores = None
    if mask is None and not need_weights:
        found = F.scaled_dot_product_attention(query, key, value)
    else:
        scores = (query / sqrt(query.shape[-1])) @ key.mT
        if mask is not None:
            masked = mask.to(torch.bool)
            masked = masked[:, None, None] if mask_type == MASK_OF_KEYS else masked
            scores = scores.masked_fill(masked, -inf)
        scores = scores.softmax(-1)
        found = scores @ value
    found = F.linear(found.transpose(1, 2).flatten(2), out_weight, out_bias)
    if scores is None or not need_weights:
        return found, None
    return found, scores.mean(1) if average else scores


@rule_for("_transformer_encoder_layer_fwd.default")
def encoder_layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a layer of an encoder, without gradients: torch has one operator for all of it."""
    values = dict(zip(_names(func), args, strict=False)) | kwargs
    x, eps = values["src"], values["eps"]
    weights = [values[f"{part}_{name}"] for part in ("qkv", "proj") for name in ("weight", "bias")]
    activation = F.gelu if values["use_gelu"] else F.relu

    def norm(x: Tensor, which: int) -> Tensor:
        weight, bias = values[f"norm_weight_{which}"], values[f"norm_bias_{which}"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def attend(x: Tensor) -> Tensor:
        mask, mask_type = values.get("mask"), values.get("mask_type")
        return _multi_head([x, x, x], values["num_heads"], weights, mask, mask_type=mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = activation(F.linear(x, values["ffn_weight_1"], values["ffn_bias_1"]))
        return F.linear(hidden, values["ffn_weight_2"], values["ffn_bias_2"])

    if values["norm_first"]:
        x = x + attend(norm(x, 1))
        return _as_part(x + feed_forward(norm(x, 2)))
    x = norm(x + attend(x), 1)
    return _as_part(norm(x + feed_forward(x), 2))


@rule_for("_scaled_dot_product_attention_math_for_mps.default")
def attention_by_products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attend by products and softmax, as torch does where it has an operator of its own for it."""
    math = torch.ops.aten._scaled_dot_product_attention_math.default
    return tuple(map(_as_part, math.decompose(*args, **kwargs)))

"""Reductions, and operators along one dimension: softmax, sums of what is before, sorts.

Where rows stay, each rank computes those of its band. A reduction over rows reduces each band, and
then what all ranks have; the result is the same on every rank. What has no such rule runs whole if
it is along the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor import views
from credit_dp.domain_parallel.band_tensor.moving import (
    refresh,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.pointwise import common_rows, is_unsummed
from credit_dp.domain_parallel.band_tensor.rules import (
    named_arguments,
    run_whole,
    short_name,
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
)
from credit_dp.domain_parallel.bands.norms import combine_moments, local_moments
from credit_dp.domain_parallel.bands.reductions import (
    accumulation_dtype,
    softmax_backward,
    softmax_forward,
)
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import keeps_messages
from credit_dp.torch_private import backward_pass

aten = torch.ops.aten
Given = dict[str, Any]
Combine = Callable[[Any, BandTensor, Given, tuple[int, ...]], Any]


def parts(results: Any, rows: Rows) -> Any:
    """Return the results of an operator on local tensors, all in the same layout."""
    if isinstance(results, Tensor):
        return Part(results, rows)
    return tuple([Part(x, rows) for x in results])


def total(part: Tensor, domain: Domain, dtype: torch.dtype | None = None) -> Part:
    """Return the sum of all ranks' parts in a type; a collective, but for gradients.

    A gradient may be a parameter's, which the trainer sums up with all others. What a forward sums
    is often read more than once, and each reader of a partial tensor sums it again. Where backward
    computes a forward again with the messages that were kept, it makes the forward's calls.
    """
    if backward_pass() >= 0 and not keeps_messages():
        return Part(part if dtype is None else part.to(dtype), PARTIAL)
    summed = domain.transport.all_reduce(part.contiguous())
    return Part(summed if dtype is None else summed.to(dtype), WHOLE)


def with_a_row(x: BandTensor) -> Tensor:
    """Return the local tensor; one row of zeros if it is empty, which kernels refuse."""
    rows = x.band
    if rows.sizes(x.domain.rank):
        return x.local
    shape = list(x.local.shape)
    shape[rows.dim] = 1
    return x.local.new_zeros(shape)


def gather_parts(part: Tensor, band: Band, domain: Domain) -> Tensor:
    """Return the parts of all ranks that have rows, along a new dimension 0; a collective."""
    is_bool = part.dtype == torch.bool  # which is no type of messages
    gathered = domain.transport.all_gather(part.to(torch.uint8) if is_bool else part.contiguous())
    ranks = [rank for rank in range(domain.ranks) if band.sizes(rank)]
    if len(ranks) < domain.ranks:
        gathered = torch.stack([gathered[rank] for rank in ranks])
    return gathered.bool() if is_bool else gathered


# ---------------------------------------------------------------- reductions


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return the dimensions over which an operator reduces, from 0: all if none are given."""
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    return tuple(sorted({d % ndim for d in ([dim] if isinstance(dim, int) else dim)}))


@lru_cache(4096)
def rows_after(band: Band, ndim: int, dims: tuple[int, ...], keepdim: bool) -> Band | None:
    """Return the bands of a reduction's result; None if it is over the rows."""
    dim = ndim + band.dim
    if dim in dims:
        return None
    return band if keepdim else band._replace(dim=band.dim + sum(d > dim for d in dims))


# Of parts of a sum they are parts of what they are of the sum.
LINEAR = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}


def reduction(*names: str) -> Callable[[Combine], Combine]:
    """Register what combines the bands of operators that reduce over rows, or need all of them."""

    def register(combine: Combine) -> Combine:
        rule_for(*names)(_reduction_rule(combine))
        return combine

    return register


def _reduction_rule(combine: Combine | None, keeps_dim: bool = False) -> Any:
    """Return the rule of an operator that reduces dimensions, or keeps the one that it is along."""

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if type(x) is not BandTensor:
            return run_whole(func, args, kwargs)
        refresh(x)
        band = x.rows
        if band is PARTIAL and func in LINEAR:
            return Part(func(x.local, *args[1:], **kwargs), PARTIAL)
        if not isinstance(band, Band):
            return parts(func(whole(x), *args[1:], **kwargs), WHOLE)
        given = named_arguments(func, args, kwargs)
        dims = dims_of(given.get("dim"), x.ndim)
        keepdim = keeps_dim or bool(given.get("keepdim"))
        rows = rows_after(band, x.ndim, dims, keepdim)
        if rows is None:
            x.domain.reduced[tuple(x.shape)] = band
            if combine is None:
                return run_whole(func, args, kwargs)
            return combine(func, x, given, dims)
        if band.sizes(x.domain.rank):
            return parts(func(x.local, *args[1:], **kwargs), rows)
        results = func(with_a_row(x), *args[1:], **kwargs)
        is_one = isinstance(results, Tensor)
        empty = [y.narrow(rows.dim, 0, 0) for y in ([results] if is_one else results)]
        return parts(empty[0] if is_one else empty, rows)

    return rule


@reduction(
    "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "nansum.default", "count_nonzero"
)
def sum_over_rows(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return a sum or a mean; halves are summed in float32 and would overflow before a division."""
    name, local = short_name(func), x.local
    if name == "count_nonzero":
        return total(torch.count_nonzero(local, dims), x.domain)
    dtype = given["dtype"]
    kind = dtype or local.dtype
    wide = accumulation_dtype(local if dtype is None else local.new_empty(0, dtype=dtype))
    is_narrow = kind.is_floating_point and kind != wide
    function = torch.nansum if name == "nansum" else torch.sum
    part = function(local, dims, given.get("keepdim", False), dtype=wide if is_narrow else dtype)
    if name == "mean":
        part = part / prod([x.shape[d] for d in dims])
    return total(part, x.domain, kind if is_narrow else None)


def _in_wide_type(x: BandTensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Any]:
    """Return rows of a band in the type in which to reduce, and that of the result: None: as is."""
    local = with_a_row(x)
    local = local if dtype is None else local.to(dtype)
    if not local.is_floating_point():
        return local, None
    wide = accumulation_dtype(local)
    return local.to(wide), None if wide == local.dtype else local.dtype


def _combined(
    function: Callable[..., Tensor], x: BandTensor, given: Given, dims: Any, **options: Any
) -> Part:
    local, kind = _in_wide_type(x, given.get("dtype"))
    part = function(local, dims, given.get("keepdim", False), **options)
    result = function(gather_parts(part, x.band, x.domain), 0, **options)
    return Part(result if kind is None else result.to(kind), WHOLE)


@reduction("prod.default", "prod.dim_int")
def product(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return the product of the bands' products."""
    if func is aten.prod.dim_int:
        return _combined(torch.prod, x, given, dims[0])
    given = given | {"dim": 0, "keepdim": False}
    return _combined(lambda y, *_: y.prod(), x, given, None)


@reduction("logsumexp.default")
def logsumexp(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return the logarithm of the sum of the bands' sums."""
    return _combined(torch.logsumexp, x, given, dims)


@reduction("all", "any")
def all_or_any(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return whether all or any entries are true."""
    return _combined(torch.all if short_name(func) == "all" else torch.any, x, given, dims)


@reduction("amax.default", "amin.default", "max.default", "min.default")
def extremum(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return the extremum of the bands' extrema."""
    function = torch.amax if short_name(func).endswith("max") else torch.amin
    return _combined(function, x, given, dims)


@reduction("aminmax.default")
def extrema(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return both extrema; one collective."""
    local, keepdim = with_a_row(x), given.get("keepdim", False)
    part = torch.stack([local.amin(dims, keepdim), local.amax(dims, keepdim)])
    minima, maxima = gather_parts(part, x.band, x.domain).unbind(1)
    return Part(minima.amin(0), WHOLE), Part(maxima.amax(0), WHOLE)


@reduction("max.dim", "min.dim", "argmax.default", "argmin.default")
def extremum_with_place(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return an extremum along a dimension and the first place that has it, or the place alone."""
    band, domain, local = x.band, x.domain, with_a_row(x)
    name = short_name(func)
    is_max = name.endswith("max")
    after, shape = 1, [1 if d in dims else n for d, n in enumerate(x.shape)]
    dim = dims[0]
    if len(dims) > 1:  # all of them, as one
        after, dim = prod(x.shape[x.ndim + band.dim + 1 :]), 0
        local = local.reshape(-1)
    values, places = (torch.max if is_max else torch.min)(local, dim, True)
    # The place among this rank's rows, of which there may be several blocks, among all rows.
    block = max(1, band.sizes(domain.rank)) * after
    start = band.bounds[domain.rank] * after
    places = places // block * (band.height * after) + places % block + start
    all_values = gather_parts(values, band, domain)
    all_places = gather_parts(places, band, domain)
    value = all_values.amax(0) if is_max else all_values.amin(0)
    has_it = all_values == value
    if value.is_floating_point():
        has_it = has_it.logical_or_(all_values.isnan())  # then the first NaN is the extremum
    place = torch.where(has_it, all_places, torch.iinfo(places.dtype).max).amin(0)
    results = [y.view(shape) for y in (value, place)]
    if not given.get("keepdim"):
        results = [y.squeeze(dims) for y in results]
    return Part(results[1], WHOLE) if name.startswith("arg") else parts(results, WHOLE)


@reduction("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def variance(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return a variance or its root, with the mean if the name says so; one collective."""
    name = short_name(func)
    local, kind = _in_wide_type(x)
    if not local.is_floating_point():
        return run_whole(func, (x,), {key: y for key, y in given.items() if key != "self"})
    band = x.band
    # Less one of its entries a constant field is exactly zero, and so is its variance.
    entry = local[tuple([slice(0, 1 if d in dims else None) for d in range(x.ndim)])]
    moments = local_moments(local - entry, dims)
    moments[0] += entry
    counts = tuple([band.sizes(rank) for rank in range(x.domain.ranks)])
    mean, result = combine_moments(x.domain.transport.all_gather(moments), counts)
    correction = 1 if given["correction"] is None else given["correction"]
    count = prod([x.shape[d] for d in dims])
    result = result * count / max(count - correction, 0)
    results = [result.sqrt() if name.startswith("std") else result, mean]
    if not given.get("keepdim"):
        results = [y.squeeze(dims) for y in results]
    if kind is not None:
        results = [y.to(kind) for y in results]
    return parts(results, WHOLE) if name.endswith("mean") else Part(results[0], WHOLE)


def norm_over_rows(x: BandTensor, order: Any, given: Given, dims: tuple[int, ...]) -> Part:
    """Return a vector norm: the norm of the bands' norms; a collective."""
    order = 2 if order is None else order
    local, kind = _in_wide_type(x, given.get("dtype"))
    part = torch.linalg.vector_norm(local, order, dims, given.get("keepdim", False))
    band = x.band
    if order == 0 and not band.sizes(x.domain.rank):
        part.zero_()
    norms = gather_parts(part, band, x.domain)
    # The norm of order 0 counts entries.
    result = norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)
    return Part(result if kind is None else result.to(kind), WHOLE)


@reduction(
    "linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype",
    "norm.ScalarOpt_dtype",
)  # fmt: skip
def vector_norm(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return a vector norm over rows."""
    return norm_over_rows(x, given.get("ord", given.get("p")), given, dims)


@rule_for("dist.default")
def distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the norm of the difference of two tensors."""
    given = named_arguments(func, args, kwargs)
    x, y = given["self"], given["other"]
    domain = domain_of((x, y))
    rows = fields_rows([x, y])
    local = with_rows(x, rows, domain) - with_rows(y, rows, domain)
    difference = BandTensor(local, rows, domain)
    if not isinstance(rows, Band):
        return Part(torch.linalg.vector_norm(local, given["p"]), WHOLE)
    return norm_over_rows(difference, given["p"], {}, tuple(range(difference.ndim)))


def fields_rows(tensors: Sequence[Any]) -> Rows:
    """Return in which bands tensors are combined, up to date."""
    refresh_all(*tensors)
    return common_rows([x for x in tensors if isinstance(x, Tensor)])


@rule_for("expand.default")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat dimensions of one entry: the gradient of a reduction over rows gets its bands.

    What a reduction has left is whole or a rank's part, and repeated it would be as large as the
    globe.
    """
    x, sizes = args[0], args[1]
    if type(x) is not BandTensor:
        return run_whole(func, args, kwargs)
    refresh(x)
    missing = len(sizes) - x.ndim
    shape = [x.shape[d - missing] if n == -1 else n for d, n in enumerate(sizes)]
    # Not where a part of a model is computed again and has to make the same calls as before.
    band = None if keeps_messages() else x.domain.reduced.get(tuple(shape))
    if band is not None and (x.ndim < -band.dim or x.shape[band.dim] == 1 != shape[band.dim]):
        shape[band.dim] = band.outer * band.sizes(x.domain.rank)
        return Part(whole(x).expand(shape), band, is_copy=x.rows is not WHOLE)
    if x.rows is PARTIAL and prod(shape) > x.numel() and not is_unsummed(x):
        return Part(whole(x).expand(shape), WHOLE, is_copy=True)
    return views.expand(func, args, kwargs)


# ---------------------------------------------------------------- along one dimension


def with_all_rows(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Compute what needs all rows at once: bands move to another dimension, the largest one."""
    domain = x.domain
    others = {key: value for key, value in given.items() if key != "self"}
    sizes = [(n, -d) for d, n in enumerate(x.shape) if d not in dims and n >= domain.ranks]
    if not sizes:
        return run_whole(func, (x,), others)
    size, dim = max(sizes)
    band = Band(-dim - x.ndim, 1, RowPartition.balanced(size, domain.ranks).bounds)
    results = func(with_rows(x, band, domain), **others)
    first = results if isinstance(results, Tensor) else results[0]
    rows = rows_after(band, x.ndim, dims, keepdim=first.ndim == x.ndim)
    assert rows is not None
    return parts(results, rows)


for _name in ("kthvalue.default", "mode.default", "median", "nanmedian"):
    rule_for(_name)(_reduction_rule(with_all_rows))
for _name in ("sort", "topk.default", "cummax.default", "cummin.default", "glu.default"):
    rule_for(_name)(_reduction_rule(with_all_rows, keeps_dim=True))


def scan(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Sum or multiply all entries before, with the sums of the ranks before; a collective."""
    band, domain, name, (dim,) = x.band, x.domain, short_name(func), dims
    if band.outer > 1 or x.is_complex():
        return with_all_rows(func, x, given, dims)
    local = x.local if given.get("dtype") is None else x.local.to(given["dtype"])
    kind, is_real = local.dtype, local.is_floating_point()
    local = local.to(accumulation_dtype(local)) if is_real else local
    options = {} if is_real or given.get("dtype") is None else {"dtype": given["dtype"]}
    function, fold, join = SCANS[name]
    result = function(local, dim, **options)
    band_total = fold(local, dim, True, **options)
    before = domain.transport.all_gather(band_total)[: domain.rank]
    if domain.rank:
        result = join(result, fold(before, 0, **options))
    return Part(result.to(kind) if is_real else result, band)


# What scans a band, what it comes to, and how what is before a band is joined to it.
SCANS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "cumsum": (torch.cumsum, torch.sum, torch.add),
    "cumprod": (torch.cumprod, torch.prod, torch.mul),
    "logcumsumexp": (torch.logcumsumexp, torch.logsumexp, torch.logaddexp),
}
for _name in SCANS:
    rule_for(f"{_name}.default")(_reduction_rule(scan, keeps_dim=True))


def softmax_over_rows(func: Any, x: BandTensor, given: Given, dims: tuple[int, ...]) -> Any:
    """Return the softmax over rows, or its logarithm; a collective."""
    kind = torch.float32 if given["half_to_float"] else x.dtype
    local = x.local.to(accumulation_dtype(x.local))
    is_logarithm = short_name(func) == "_log_softmax"
    result = softmax_forward(local, dims[0], is_logarithm, x.domain.transport)
    return Part(result.to(kind), x.rows)


rule_for("_softmax.default", "_log_softmax.default")(
    _reduction_rule(softmax_over_rows, keeps_dim=True)
)


@rule_for("_safe_softmax.default")
def safe_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a softmax that is zero where all entries are minus infinity."""
    given = named_arguments(func, args, kwargs)
    x, dim, dtype = given["self"], given["dim"], given.get("dtype")
    dispatch = BandTensor.__torch_dispatch__
    if dtype is not None:
        x = dispatch(torch.ops.aten._to_copy.default, (), (x,), {"dtype": dtype})
    is_masked = dispatch(aten.eq.Scalar, (), (x, -torch.inf))
    has_none = dispatch(aten.all.dim, (), (is_masked, dim, True))
    result = dispatch(torch.ops.aten._softmax.default, (), (x, dim, False))
    return dispatch(aten.masked_fill.Scalar, (), (result, has_none, 0.0))


@rule_for(
    "_softmax_backward_data.default", "_log_softmax_backward_data.default", "glu_backward.default"
)
def backward_along_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of a softmax, or of a gated linear unit; over rows a collective."""
    grad, y, dim, *others = args
    domain = domain_of((grad, y))
    rows = fields_rows([y, grad])
    if not isinstance(rows, Band):
        return Part(func(whole(grad), whole(y), dim, *others), WHOLE)
    is_over_rows = dim % y.ndim == y.ndim + rows.dim
    if is_over_rows and func is aten.glu_backward.default:
        return run_whole(func, args, kwargs)
    local_grad, local = with_rows(grad, rows, domain), with_rows(y, rows, domain)
    if not is_over_rows:
        return Part(func(local_grad, local, dim, *others), rows)
    wide = accumulation_dtype(local)
    is_logarithm = short_name(func).startswith("_log")
    result = softmax_backward(
        local_grad.to(wide), local.to(wide), dim, is_logarithm, domain.transport
    )
    return Part(result.to(others[0]), rows)

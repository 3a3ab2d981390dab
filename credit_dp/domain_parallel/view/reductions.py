"""Rules of reductions, and of functions along one dimension such as softmax, `cumsum` and `sort`.

Where rows stay, each rank computes those of its band. A reduction over rows reduces each band, and
then what all ranks have; the result is the same on every rank. Functions that need all rows of a
column in one piece, as `sort`, get them by a move of the bands to another dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.reductions import accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.norm import cast_for_autocast
from credit_dp.domain_parallel.layers.reduce import (
    max_over_bands,
    softmax_over_bands,
    sum_of_entries,
)
from credit_dp.domain_parallel.transport import Transport
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    function_name,
    layout_of,
    rule_for,
)
from credit_dp.domain_parallel.view.pointwise import pointwise
from credit_dp.domain_parallel.view.shapes import move_rows, unfolded, with_rows_everywhere
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    bands_of,
    exchange_entries,
    local_of,
    whole,
    wrap,
)
from credit_dp.torch_private import tree_map

# ---------------------------------------------------------------- parts of all ranks


def gather_parts(part: Tensor, transport: Transport) -> Tensor:
    """Return all ranks' parts, stacked along a new dimension 0; a differentiable collective."""
    result: Tensor = _GatherParts.apply(part, transport)  # type: ignore[no-untyped-call]
    return result


@final
class _GatherParts(torch.autograd.Function):
    """Every rank holds all parts: the gradient of a part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        if part.dtype == torch.bool:  # which is no type of messages
            return transport.all_gather(part.to(torch.uint8)).bool()
        return transport.all_gather(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = sum_over_bands(grad, ctx.transport)
        return total[ctx.transport.rank], None


def _in_type(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `x` in the type in which a function was called to compute."""
    return x if dtype is None else x.to(dtype)


def _in_type_or_autocast(x: GlobalTensor, dtype: torch.dtype | None) -> GlobalTensor:
    """Return `x` in the type of a call, or without one in that in which autocast runs it."""
    local = cast_for_autocast(x.local) if dtype is None else x.local.to(dtype)
    return GlobalTensor(local, x.rows, x.view_)


# ---------------------------------------------------------------- reductions

REDUCED = ("input", "dim", "keepdim", "dtype")
NORM = ("input", "order", "dim", "keepdim", "dtype")
VARIANCE = ("input", "dim", "unbiased", "keepdim", "correction")
# Parameters of reductions that are not (input, dim, keepdim, dtype).
REDUCTION_PARAMETERS = {
    "norm": NORM,
    "linalg_norm": NORM,
    "linalg_vector_norm": NORM,
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), VARIANCE),
}
# Reductions over no dimensions, which are those over all.
ALL_IF_EMPTY = frozenset(["sum", "nansum", "mean", "nanmean", "amax", "amin"])


@rule_for(
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "logsumexp", "argmax",
    "argmin", "prod", "all", "any", "var_mean", "std_mean", "nansum", "nanmean", "vector_norm",
    "count_nonzero",
)  # fmt: skip
def reduce(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Reductions: local if rows stay."""
    name = function_name(func).removeprefix("special_")
    options = {("order" if key in ("p", "ord") else key): x for key, x in kwargs.items()}
    if name in ("max", "min") and (
        "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor))
    ):
        return pointwise(func, args, kwargs)
    arguments = bind(REDUCTION_PARAMETERS.get(name, REDUCED), args, options)
    x = arguments["input"]
    layout = layout_of(x)
    dims = _reduced_dims(name, x, arguments)
    keepdim = _keepdim(arguments)
    if layout.dim not in dims:
        removed = 0 if keepdim else sum(d < layout.dim for d in dims)
        return wrap(func(x.local, *args[1:], **kwargs), layout.at(layout.dim - removed), x.view_)
    combine = OVER_BANDS.get(name)
    if combine is None:
        raise NoRuleError
    return combine(name, x, dims, arguments)


def _reduced_dims(name: str, x: GlobalTensor, arguments: Kwargs) -> list[int]:
    """Return the dimensions over which a function reduces, from 0 and sorted."""
    dims = arguments.get("dim")
    # `x.std(False)` is the function without dimensions, but not unbiased.
    if dims is None or isinstance(dims, bool):
        return list(range(x.ndim))
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        if name not in ALL_IF_EMPTY:
            raise NoRuleError
        return list(range(x.ndim))
    return sorted({d % x.ndim for d in dims})


def _keepdim(arguments: Kwargs) -> bool:
    """Return whether reduced dimensions stay, with size 1."""
    return bool(arguments.get("keepdim", False))


def _sum(name: str, x: GlobalTensor, dims: list[int], arguments: Kwargs) -> Any:
    """Return a sum or mean over rows."""
    dtype = arguments.get("dtype")
    if name.startswith("nan"):
        source = _in_type(x, dtype)
        numbers = torch.where(source.isnan(), 0, source)
        # With a type, as autocast leaves these functions alone, unlike `sum`.
        kept = source.dtype if source.is_floating_point() else None
        total = numbers.sum(dims, _keepdim(arguments), dtype=kept)
        return total if name == "nansum" else total / _count_numbers(source, dims, arguments)
    if name == "count_nonzero":
        return (x != 0).sum(dims)
    source = _in_type_or_autocast(x, dtype) if name == "sum" else _in_type(x, dtype)
    assert isinstance(source, GlobalTensor)
    if name == "mean" and not (source.dtype.is_floating_point or source.dtype.is_complex):
        raise NoRuleError
    count = prod(x.shape[d] for d in dims) if name == "mean" else 1
    transport = x.view_.manager.transport
    total = sum_of_entries(source.local, dims, _keepdim(arguments), transport, count)
    return GlobalTensor(total, None, x.view_)


def _count_numbers(x: Tensor, dims: list[int], arguments: Kwargs) -> Tensor:
    """Return how many entries are no NaN."""
    return x.isnan().logical_not().sum(dims, _keepdim(arguments))


def _extremum(name: str, x: GlobalTensor, dims: list[int], arguments: Kwargs) -> Any:
    """Return a maximum or minimum over rows, with its position if it is over one dimension."""
    x = with_rows_everywhere(x)
    transport, keepdim = x.view_.manager.transport, _keepdim(arguments)
    if name in ("max", "min", "argmax", "argmin") and arguments.get("dim") is not None:
        return _extremum_with_index(name, x, dims[0], keepdim)
    if name in ("argmax", "argmin"):
        raise NoRuleError
    is_max = name.endswith("max")
    if not x.dtype.is_floating_point:
        function = torch.amax if is_max else torch.amin
        parts = gather_parts(function(x.local, dims, keepdim), transport)
        return GlobalTensor(function(parts, 0), None, x.view_)
    sign = 1 if is_max else -1
    extremum = sign * max_over_bands(sign * x.local, tuple(dims), keepdim, transport)
    return GlobalTensor(extremum, None, x.view_)


def _extremum_with_index(name: str, x: GlobalTensor, dim: int, keepdim: bool) -> Any:
    """Return an extremum over rows and its index, or the index alone."""
    layout, view = layout_of(x), x.view_
    if layout.outer != 1:
        raise NoRuleError
    function = torch.max if name.endswith("max") else torch.min
    values, indices = function(x.local, dim, True)
    indices = indices + layout.partition.bounds[view.rank]
    all_values = gather_parts(values, view.manager.transport)
    all_indices = gather_parts(indices, view.manager.transport)
    # Of equal extrema the first rank's is taken, as it has the smallest index.
    choice = function(all_values.detach(), 0, True)[1]
    value, index = (parts.gather(0, choice)[0] for parts in (all_values, all_indices))
    if not keepdim:
        value, index = value.squeeze(dim), index.squeeze(dim)
    results = [GlobalTensor(part, None, view) for part in (value, index)]
    if name.startswith("arg"):
        return results[1]
    return getattr(torch.return_types, name)(results)


def _combined_parts(name: str, x: GlobalTensor, dims: list[int], arguments: Kwargs) -> Any:
    """Return what a function makes of the results that it has for each band."""
    x = with_rows_everywhere(x)
    source = local_of(_in_type(x, arguments.get("dtype")))
    if name in ("all", "any") and x.dtype == torch.uint8:
        raise NoRuleError  # the result is no truth value
    function = getattr(torch, name)
    keepdim = _keepdim(arguments)
    if arguments.get("dim") is None:
        part = function(source)
    else:
        part = function(source, dims if name == "logsumexp" else dims[0], keepdim=keepdim)
        if name != "logsumexp" and len(dims) != 1:
            raise NoRuleError
    return GlobalTensor(function(gather_parts(part, x.view_.manager.transport), 0), None, x.view_)


def _norm(name: str, x: GlobalTensor, dims: list[int], arguments: Kwargs) -> Any:
    """Return a vector norm over rows: the norm of the bands' norms."""
    order = arguments.get("order", 2)
    is_given = arguments.get("order") is not None
    is_matrix = name == "linalg_norm" and is_given and len(dims) == 2
    if name == "linalg_norm" and is_given and arguments.get("dim") is None and x.ndim > 1:
        raise NoRuleError
    order = 2 if order is None or order == "fro" else order
    if is_matrix or isinstance(order, (str, Tensor)):
        raise NoRuleError
    if order < 0 or order == float("inf"):
        x = with_rows_everywhere(x)
    source = _in_type_or_autocast(x, arguments.get("dtype")).local
    if abs(order) == float("inf") and (source.is_floating_point() or source.is_complex()):
        # An extremum shares the gradient among equal entries of all bands.
        extremum = torch.amax if order > 0 else torch.amin
        values: Any = GlobalTensor(source, x.rows, x.view_)
        return extremum(values.abs(), dims, _keepdim(arguments))
    wide = accumulation_dtype(source)
    part = torch.linalg.vector_norm(source.to(wide), order, dims, _keepdim(arguments))
    parts = gather_parts(part, x.view_.manager.transport)
    # The norm of order 0 counts entries.
    total = parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, 0)
    if source.dtype.is_floating_point:
        total = total.to(source.dtype)
    return GlobalTensor(total, None, x.view_)


def _variance(name: str, x: GlobalTensor, dims: list[int], arguments: Kwargs) -> Any:
    """Return a variance over rows or its root, with the mean if its name says so."""
    if not x.dtype.is_floating_point:
        raise NoRuleError
    correction = arguments.get("correction")
    if correction is None:
        unbiased = arguments.get("unbiased", True)
        if isinstance(arguments.get("dim"), bool):
            unbiased = arguments["dim"]
        correction = int(unbiased)
    keepdim = _keepdim(arguments)
    # In at least float32, as torch does: halves have few digits beside a large mean.
    dtype = x.dtype
    x = GlobalTensor(x.local.to(accumulation_dtype(x.local)), x.rows, x.view_)
    mean = x.mean(dims, keepdim=keepdim) if name.endswith("_mean") else None
    # Less one of its entries a constant field is exactly zero, and so is its variance.
    shifted: Tensor = x - _an_entry(x, dims)
    deviation: Tensor = shifted - shifted.mean(dims, keepdim=True)
    count = max(prod(x.shape[d] for d in dims) - correction, 0)
    # The root by a norm, whose gradient is zero where all entries are equal, as that of `std` is.
    root = torch.linalg.vector_norm(deviation, 2, dims, keepdim)
    if name.startswith("std"):
        result = root / torch.tensor(float(count), dtype=x.dtype, device=x.device).sqrt()
    else:
        result = deviation.square().sum(dims, keepdim) / count
    return result.to(dtype) if mean is None else (result.to(dtype), mean.to(dtype))


def _an_entry(x: GlobalTensor, dims: list[int]) -> GlobalTensor:
    """Return an entry along dimensions that are reduced, as a constant; a collective."""
    sizes = layout_of(x).partition.sizes
    first = x.local.detach()[tuple(slice(0, 1 if d in dims else None) for d in range(x.ndim))]
    if sizes[x.view_.rank] == 0:
        first = first.new_zeros([1 if d in dims else n for d, n in enumerate(first.shape)])
    parts = x.view_.manager.transport.all_gather(first)
    return GlobalTensor(parts[sizes.index(max(sizes))], None, x.view_)


OverBands = Callable[[str, GlobalTensor, list[int], Kwargs], Any]
OVER_BANDS: dict[str, OverBands] = {
    **dict.fromkeys(("sum", "mean", "nansum", "nanmean", "count_nonzero"), _sum),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), _extremum),
    **dict.fromkeys(("all", "any", "prod", "logsumexp"), _combined_parts),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _variance),
}

# ---------------------------------------------------------------- functions along one dimension


@rule_for("softmax", "log_softmax", "softmin")
def softmax(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Softmax, over rows with the maximum and the sum of all ranks."""
    name = function_name(func).removeprefix("special_")
    arguments = bind(("input", "dim", "_stacklevel", "dtype"), args, kwargs)
    x, dim, dtype = arguments["input"], arguments.get("dim"), arguments.get("dtype")
    if isinstance(arguments.get("_stacklevel"), torch.dtype):
        dtype = arguments["_stacklevel"]
    layout = layout_of(x)
    if dim is None:
        raise NoRuleError
    dim %= x.ndim
    if dim != layout.dim:
        return wrap(func(x.local, *args[1:], **kwargs), layout, x.view_)
    x = with_rows_everywhere(x)
    source = local_of(_in_type(x, dtype))
    sign = -1 if name == "softmin" else 1
    transport = x.view_.manager.transport
    result = softmax_over_bands(sign * source, dim, name == "log_softmax", transport)
    return wrap(result, layout_of(x), x.view_)


@rule_for("cumsum", "cumprod")
def scan(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Sums and products of all entries before, over rows with those of the ranks before."""
    arguments = bind(("input", "dim", "dtype"), args, kwargs)
    layout = layout_of(arguments["input"])
    x = _in_type(arguments["input"], arguments.get("dtype"))
    assert isinstance(x, GlobalTensor)
    dim = arguments["dim"] % x.ndim
    is_sum = function_name(func) == "cumsum"
    if dim == layout.dim and layout.outer != 1:
        x = move_rows(x, [dim])
        layout = layout_of(x)
    result = x.local.cumsum(dim) if is_sum else x.local.cumprod(dim)
    if dim != layout.dim:
        return wrap(result, layout, x.view_)
    total = x.local.sum(dim, True) if is_sum else x.local.prod(dim, True)
    before = gather_parts(total, x.view_.manager.transport)[: x.view_.rank]
    # The first rank too joins the empty sum to its result, as all have to reach its backward.
    result = result + before.sum(0) if is_sum else result * before.prod(0)
    return wrap(result, layout, x.view_)


# Parameters of functions that need all entries along one dimension, and the default of `dim`.
ALONG_ONE_DIM: dict[str, tuple[tuple[str, ...], int | None]] = {
    "glu": (("input", "dim"), -1),
    "sort": (("input", "dim", "descending", "stable"), -1),
    "argsort": (("input", "dim", "descending", "stable"), -1),
    "topk": (("input", "k", "dim", "largest", "sorted"), -1),
    **dict.fromkeys(("logcumsumexp", "cummax", "cummin"), (("input", "dim"), None)),
    # These remove the dimension, unless `keepdim` says that it stays.
    "kthvalue": (("input", "k", "dim", "keepdim"), -1),
    "mode": (("input", "dim", "keepdim"), -1),
    **dict.fromkeys(("median", "nanmedian"), (("input", "dim", "keepdim"), None)),
}
REMOVE_DIM = frozenset(["kthvalue", "mode", "median", "nanmedian"])


@rule_for(*ALONG_ONE_DIM)
def along_one_dim(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Functions along one dimension; rows are moved to another one."""
    name = function_name(func)
    names, default = ALONG_ONE_DIM[name]
    arguments = {"dim": default} | bind(names, args, kwargs)
    x, dim = arguments["input"], arguments["dim"]
    layout = layout_of(x)
    if not isinstance(dim, int) or isinstance(dim, bool) or bands_of((args[1:], kwargs)):
        raise NoRuleError
    dim %= x.ndim
    if dim == layout.dim:
        x = move_rows(x, [dim])
        layout = layout_of(x)
    if name in REMOVE_DIM and not arguments.get("keepdim", False):
        layout = layout.at(layout.dim - (dim < layout.dim))
    local_args, local_kwargs = tree_map(local_of, (args[1:], kwargs))
    return wrap(func(x.local, *local_args, **local_kwargs), layout, x.view_)


@rule_for("diff")
def diff(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Differences between neighbours."""
    defaults = {"n": 1, "dim": -1, "prepend": None, "append": None}
    arguments = defaults | bind(("input", "n", "dim", "prepend", "append"), args, kwargs)
    x, dim = arguments["input"], arguments["dim"] % arguments["input"].ndim
    ends = [arguments["prepend"], x, arguments["append"]]
    joined = [end for end in ends if end is not None]
    result = torch.cat(joined, dim) if len(joined) > 1 else x
    if result.dtype == torch.bool or result.shape[dim] <= arguments["n"]:
        raise NoRuleError
    if arguments["n"] == 0:
        return result.clone()  # as torch does: either may be changed in place
    for _ in range(arguments["n"]):
        size = result.shape[dim]
        result = result.narrow(dim, 1, size - 1) - result.narrow(dim, 0, size - 1)
    return result


@rule_for("gradient")
def gradient(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Central differences; along rows each rank needs two more rows on each side."""
    x, *others = args
    arguments: dict[str, Any] = {"spacing": 1, "dim": None, "edge_order": 1, **kwargs}
    if others or len(arguments) > 3:
        raise NoRuleError
    dim, spacing = arguments["dim"], arguments["spacing"]
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = [d % x.ndim for d in dims]
    is_one = not isinstance(spacing, (list, tuple))
    spacings = [spacing] * len(dims) if is_one else list(spacing)
    order = arguments["edge_order"]
    if len(spacings) != len(dims) or any(x.shape[d] <= order for d in dims):
        raise NoRuleError
    x = with_rows_everywhere(unfolded(x, dims))
    layout = layout_of(x)
    results = []
    for d, each in zip(dims, spacings, strict=True):
        if d == layout.dim:
            result = _gradient_of_rows(func, x, whole(each), order)
        else:
            (result,) = func(x.local, spacing=[whole(each)], dim=[d], edge_order=order)
        results.append(GlobalTensor(result, layout, x.view_))
    return tuple(results)


def _gradient_of_rows(func: Function, x: GlobalTensor, spacing: Any, order: int) -> Tensor:
    """Return this rank's rows of differences along rows; a collective.

    Args:
        func: that of torch.
        x: the field.
        spacing: the distance of rows, or the coordinates of all of them.
        order: that of the differences at the first and the last row.
    """
    layout, rank = layout_of(x), x.view_.rank
    bands = [layout.partition.rows(r) for r in range(x.view_.ranks)]
    wider = [(max(rows.start - 2, 0), min(rows.stop + 2, layout.size)) for rows in bands]
    local = exchange_entries(x, [(RowRange(*ends),) for ends in wider], None).local
    start, stop = wider[rank]
    if isinstance(spacing, Tensor) and spacing.ndim:
        if len(spacing) != layout.size:
            raise NoRuleError
        spacing = spacing[start:stop]
    (result,) = func(local, spacing=[spacing], dim=[layout.dim], edge_order=order)
    own = bands[rank]
    part: Tensor = result.narrow(layout.dim, own.start - start, own.stop - own.start)
    return part

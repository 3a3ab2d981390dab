"""Entries that an index names for each entry of other dimensions, and rows of tables.

`gather` and `scatter` name entries of one dimension: each rank has all of these if bands are in
another one, to which rows move if they are not. Gradients of tables are sums of ranks' parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.filling import BANDS_WRITTEN
from credit_dp.domain_parallel.band_tensor.indexing import (
    in_place_on_copy,
    index_rows,
    index_values,
    places,
    put_whole,
    returned,
)
from credit_dp.domain_parallel.band_tensor.moving import (
    refresh_all,
    whole,
    with_rows,
    write_back,
)
from credit_dp.domain_parallel.band_tensor.pointwise import common_rows
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Part,
    domain_of,
    is_band,
    is_partial,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.views import copy_to_write, dim_of

aten = torch.ops.aten


# ---------------------------------------------------------------- one index for each entry


def band_along_others(dim: int, *tensors: Any) -> Band | None:
    """Return bands in which all of some tensors of as many dimensions can be cut, but not in `dim`.

    Those of a band among them come first, then those of the largest dimension. They are the first
    tensor's; others may have fewer rows, which are those with the same numbers.
    """
    first, domain = tensors[0], domain_of(tensors)
    if any(x.ndim != first.ndim for x in tensors):
        return None

    def fits(d: int, outer: int = 1) -> bool:
        sizes = [x.shape[d] for x in tensors]
        return d != dim - first.ndim and (outer == 1 or len(set(sizes)) == 1)

    for x in tensors:
        if is_band(x) and fits(x.rows.dim, x.rows.outer):
            return with_as_many(x.rows, first.shape[x.rows.dim])
    sizes = [
        (first.shape[d], d)
        for d in range(-first.ndim, 0)
        if fits(d) and min(x.shape[d] for x in tensors) >= domain.ranks
    ]
    if not sizes:
        return None
    size, d = max(sizes)
    return Band(d, 1, domain.bounds(size))


def with_as_many(band: Band, size: int) -> Band:
    """Return bands of a dimension of another size that begin with the same rows, if there are."""
    if size == band.size:
        return band
    return Band(band.dim, 1, (*(min(bound, size) for bound in band.bounds[:-1]), size))


@rule_for("gather.default")
def gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the entries that an index names for each entry of other dimensions."""
    x, dim, index = args[:3]
    refresh_all(x, index)
    domain = domain_of(args)
    if not is_band(x) and not is_band(index):
        local, rows = (x.local, x.rows) if type(x) is BandTensor else (x, WHOLE)
        return Part(func(local, dim, whole(index), **kwargs), rows)
    dim %= max(x.ndim, 1)
    if is_band(x) and dim == dim_of(x) and is_vector(index, dim):
        part = x
        for d, size in enumerate(index.shape):
            if d != dim and size < x.shape[d]:
                part = BandTensor.__torch_dispatch__(aten.slice.Tensor, (), (part, d, 0, size))
        numbers = index_values(index, domain, x.shape[dim])
        vector = numbers[tuple(slice(None) if d == dim else 0 for d in range(x.ndim))]
        return index_rows(part, vector, places([*[None] * dim, vector], x.ndim))
    band = band_along_others(dim, index, x)
    if band is not None:
        x_band = with_as_many(band, x.shape[band.dim])
        if is_band(x):
            domain.note_read(("gather", tuple(x.shape), dim), x.rows)
        local_index = with_rows(index, band, domain)
        return Part(func(with_rows(x, x_band, domain), dim, local_index, **kwargs), band)
    if is_band(index):
        return Part(func(whole(x), dim, index.local, **kwargs), index.rows)
    return Part(func(whole(x), dim, whole(index), **kwargs), WHOLE)


def is_vector(index: Any, dim: int) -> bool:
    """Return whether an index that all ranks have is the same for all entries of other dims."""
    if is_band(index) or not index.ndim or 0 in index.shape:
        return False
    sizes_and_strides = zip(index.shape, index.stride(), strict=True)
    return all(
        d == dim or size == 1 or stride == 0 for d, (size, stride) in enumerate(sizes_and_strides)
    )


@rule_for("scatter_.src", "scatter_.value", "scatter_.reduce", "scatter_.value_reduce")
@rule_for("scatter_add_.default", "scatter_reduce_.two")
def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to the entries that an index names for each entry of other dimensions."""
    x, dim, index, source, *others = args
    if type(x) is not BandTensor or not x.ndim:
        return run_whole(func, args, kwargs)
    refresh_all(x, index, source)
    if not is_band(x):
        return put_whole(func, args, kwargs)
    dim %= x.ndim
    rows = band_to_scatter(args, kwargs)
    if rows is None:
        return run_whole(func, args, kwargs)
    domain = x.domain
    local = with_rows(x, rows, domain)
    is_moved = rows != x.rows
    local = local.clone() if is_moved else local

    def part(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        if is_partial(y):  # backward compares it with what is written
            y = whole(y)
        return with_rows(y, with_as_many(rows, y.shape[rows.dim]), domain)

    func(local, dim, part(index), part(source), *others, **kwargs)
    if is_moved:
        x.local.copy_(with_rows(BandTensor(local, rows, domain), x.rows, domain))
    write_back(x)
    return x


def band_to_scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Band | None:
    """Return in which bands a tensor is written to by an index for each entry; None if in none."""
    x, dim, index, source = args[:4]
    refresh_all(index, source)
    tensors = [y for y in (x, source, index) if isinstance(y, Tensor)]
    rows = band_along_others(dim % x.ndim, *tensors)
    # Each rank reads only those rows of the source that are its own.
    has_more = isinstance(source, Tensor) and rows and source.shape[rows.dim] > x.shape[rows.dim]
    return None if has_more else rows


def scatter_on_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a copy, which has its rows where all entries are that are named."""
    x, dim, index, source = args[:4]
    domain = domain_of((args, kwargs))
    refresh_all(x)
    y: Any = None
    key = "gather", tuple(x.shape), dim % max(x.ndim, 1)
    back = domain.rows_read(key)
    if is_band(x) and not x.is_open:
        domain.note_read(key, x.rows)
        rows = band_to_scatter((x, dim, index, source), kwargs)
        if rows is not None:
            y = BandTensor(with_rows(x, rows, domain).clone(), rows, domain, x.stride())
    y = copy_to_write(x, domain) if y is None else y
    BandTensor.__torch_dispatch__(IN_PLACE[func], (), (y, *args[1:]), kwargs)
    return returned(Part(y.local, y.rows), back, domain)


IN_PLACE = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
}
BANDS_WRITTEN.update(dict.fromkeys(IN_PLACE.values(), band_to_scatter))
rule_for("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")(scatter_on_copy)
rule_for("scatter_add.default", "scatter_reduce.two")(scatter_on_copy)


# ---------------------------------------------------------------- entries by their number


@rule_for("take.default")
def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read entries by their number among all of them."""
    x, index = args
    refresh_all(index)
    if is_band(index):
        return Part(func(whole(x), index.local), index.rows)
    return Part(func(whole(x), whole(index)), WHOLE)


@rule_for("put_.default")
def put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to entries by their number among all of them, or add to them."""
    x, index, source = args[:3]
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if type(x) is not BandTensor or not x.ndim:
        return run_whole(func, args, kwargs)
    source = source if source.shape == index.shape else source.reshape(index.shape)
    indices, unit = [], x.numel()
    for size in x.shape:
        unit //= max(size, 1)
        indices.append(index.remainder(max(x.numel(), 1)).floor_divide(unit).remainder(size))
    in_place = aten.index_put_.default
    return BandTensor.__torch_dispatch__(in_place, (), (x, indices, source, adds))


rule_for("put.default")(in_place_on_copy(aten.put_.default))


# ---------------------------------------------------------------- tables


@rule_for("embedding.default")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read rows of a table."""
    table, indices, *others = args
    refresh_all(indices)
    local_indices = indices.local if is_band(indices) else whole(indices)
    local = func(whole(table), local_indices, *others, **kwargs)
    if not is_band(indices):
        return Part(local, WHOLE)
    return Part(local, indices.rows._replace(dim=indices.rows.dim - 1))


@rule_for("embedding_dense_backward.default")
def embedding_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of a table, of which each rank has what its rows add."""
    grad, indices, count, padding, scales = args
    refresh_all(grad, indices)
    domain = domain_of(args)
    if is_band(grad) and grad.rows.dim == -1:
        return Part(func(grad.local, whole(indices), count, padding, scales), grad.rows)
    rows = None
    if is_band(grad):
        rows = grad.rows._replace(dim=grad.rows.dim + 1)
    elif is_band(indices):
        rows = indices.rows
    if rows is None or scales:  # by how often an index occurs on all ranks
        layout = grad.rows if type(grad) is BandTensor and not scales and rows is None else WHOLE
        local = grad.local if layout is PARTIAL else whole(grad)
        return Part(func(local, whole(indices), count, padding, scales), layout)
    local = with_rows(grad, rows._replace(dim=rows.dim - 1), domain)
    return Part(func(local, with_rows(indices, rows, domain), count, padding, scales), PARTIAL)


@rule_for("bucketize.Tensor")
def bucketize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find between which of some boundaries entries are."""
    x, boundaries = args
    refresh_all(x)
    local, rows = (x.local, x.rows) if is_band(x) else (whole(x), WHOLE)
    return Part(func(local, whole(boundaries), **kwargs), rows)


@rule_for("searchsorted.Tensor")
def search_sorted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find where entries are among sorted ones."""
    sequence, x = args
    sorter = kwargs.get("sorter")
    refresh_all(sequence, x, sorter)
    domain = domain_of((args, kwargs))
    rows = common_rows([x]) if is_band(x) or sequence.ndim == 1 else common_rows([sequence])
    if not isinstance(rows, Band) or (rows.dim == -1 and not is_band(x)):
        sorter = {} if sorter is None else {"sorter": whole(sorter)}
        return Part(func(whole(sequence), whole(x), **kwargs | sorter), WHOLE)

    def part(y: Any) -> Any:
        is_alike = sequence.ndim > 1 and rows.dim != -1
        return with_rows(y, rows, domain) if is_alike else whole(y)

    if sorter is not None:
        kwargs = kwargs | {"sorter": part(sorter)}
    return Part(func(part(sequence), with_rows(x, rows, domain), **kwargs), rows)


@rule_for("histc.default")
def count_in_bins(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count entries in bins: the sum of what the ranks count, if the bins don't depend on data."""
    x = args[0]
    refresh_all(x)
    given = dict(zip(("bins", "min", "max"), args[1:], strict=False)) | kwargs
    if not is_band(x) or given.get("min", 0) == given.get("max", 0):
        return run_whole(func, args, kwargs)
    return Part(func(x.local, *args[1:], **kwargs), PARTIAL)

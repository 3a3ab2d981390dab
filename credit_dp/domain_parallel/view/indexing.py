"""Rules of slices and indices: rows stay where they are if that is balanced, or move once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.indices import ranges_of
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.partition import LARGEST_BAND, RowPartition
from credit_dp.domain_parallel.view.filling import layout_with_rows_of
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_before,
    layout_of,
    of_first_rank,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.memory import BASIC_INDICES
from credit_dp.domain_parallel.view.shapes import as_view, move_rows, unfolded
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    exchange_entries,
    is_band,
    is_same_memory,
    local_of,
    shares_storage,
    whole,
    with_layout,
    wrap,
)
from credit_dp.torch_private import FakeTensor

# Slices of tokens `(B, N, C)` that functions of all kinds read, as a class token, are not kept.
IMAGE_DIMS = 4


def keep_range(x: GlobalTensor, rows: range) -> GlobalTensor | None:
    """Return rows where they are; None if they'd lie unevenly.

    A few rows of an image, such as those at a pole, stay with the rank that has them: see
    `OF_FEW_ROWS`.
    """
    layout, view = layout_of(x), x.view_
    partition = _counts_before(rows, layout.partition)
    is_few = len(rows) < view.ranks and x.ndim >= IMAGE_DIMS
    largest = max(partition.sizes) * view.ranks
    is_even = min(partition.sizes) > 0 and largest <= LARGEST_BAND * len(rows)
    if layout.outer != 1 or not (is_few or is_even):
        return None
    index = (slice(None),) * layout.dim + (_own_part(rows, layout.partition, view.rank),)
    return GlobalTensor(x.local[index], layout._replace(partition=partition), view)


def take_rows(x: GlobalTensor, indices: Sequence[int]) -> GlobalTensor:
    """Return the rows `indices` of the globe along the row dimension; a collective.

    As many rows as before, or a few less, get the bands that these had: shifted or dilated windows
    lie where other windows do, to which they are added. A result with fewer rows than ranks is
    whole. An index of -1 stands for zeros. The result is a copy, as that of an index is on one
    process.
    """
    layout, ranks = layout_of(x), x.view_.ranks
    kept = _counts_before(range(len(indices)), layout.partition)
    is_kept = kept.height == len(indices) and kept.is_well_balanced
    partition = kept if is_kept else x.view_.partition(len(indices))
    if partition is None:
        return exchange_entries(x, (ranges_of(indices),) * ranks, None)
    result = rearrange_rows(x, indices, layout._replace(partition=partition))
    if not shares_storage(result, x):
        return result
    # All rows in their order: an exchange of nothing returns its argument.
    return GlobalTensor(result.local.clone(), result.rows, x.view_)


def rearrange_rows(x: GlobalTensor, indices: Sequence[int], result: Layout) -> GlobalTensor:
    """Return the rows `indices` of the globe as bands of the given layout; a collective."""
    bands = map(result.partition.rows, range(x.view_.ranks))
    return exchange_entries(x, [ranges_of(indices[rows]) for rows in bands], result)


def _slice_rows(x: GlobalTensor, rows: range) -> Any:
    """Return a slice of the rows, which shares memory with `x` on one process."""
    if not rows:
        raise NoRuleError
    result = keep_range(x, rows) if rows.step > 0 else None
    return take_rows(x, rows) if result is None else result


@rule_for("narrow")
def narrow(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A range of entries of one dimension."""
    arguments = bind(("input", "dim", "start", "length"), args, kwargs)
    x, start, length = arguments["input"], arguments["start"], arguments["length"]
    layout, dim = layout_of(x), arguments["dim"] % x.ndim
    if isinstance(start, Tensor):
        raise NoRuleError
    if dim != layout.dim:
        return wrap(x.local.narrow(dim, start, length), layout, x.view_)
    if start < 0:
        start += x.shape[dim]
    if length == x.shape[dim]:
        return as_view(x.local, layout, x)
    if layout.outer != 1:
        return unfolded(x, [dim]).narrow(dim, start, length)
    return _slice_rows(x, range(start, start + length))


@rule_for("select")
def select(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """One entry of a dimension."""
    arguments = bind(("input", "dim", "index"), args, kwargs)
    x, dim, index = arguments["input"], arguments["dim"], arguments["index"]
    layout_of(x)
    if isinstance(index, Tensor):
        raise NoRuleError
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


@rule_for("unbind")
def unbind(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """All entries of a dimension, one by one."""
    arguments = {"dim": 0} | bind(("input", "dim"), args, kwargs)
    x = arguments["input"]
    layout, dim = layout_of(x), arguments["dim"] % x.ndim
    if dim == layout.dim and layout.outer != 1:
        return unfolded(x, [dim]).unbind(dim)
    if dim == layout.dim:
        return tuple(x.select(dim, i) for i in range(x.shape[dim]))
    layout = layout.at(layout.dim - (dim < layout.dim))
    return tuple(GlobalTensor(part, layout, x.view_) for part in x.local.unbind(dim))


@rule_for("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes")
def split(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Splits along a dimension."""
    x, *others = args
    layout = layout_of(x)
    if len(args) > 3:
        raise NoRuleError
    dim = (args[2] if len(args) == 3 else kwargs.get("dim", kwargs.get("axis", 0))) % x.ndim
    if dim != layout.dim:
        parts = func(x.local, *others, **kwargs)
        return type(parts)(GlobalTensor(part, layout, x.view_) for part in parts)
    if layout.outer != 1:
        return func(unfolded(x, [dim]), *others, **kwargs)
    parts = func(torch.empty(x.shape, device="meta"), *others, **kwargs)
    results, start = [], 0
    for part in parts:
        results.append(x.narrow(dim, start, part.shape[dim]))
        start += part.shape[dim]
    return type(parts)(results)


@rule_for("__getitem__")
def getitem(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Index by integers, slices, `None`, `...` and tensors that every rank has."""
    x, index = args
    if not is_band(x):
        return _look_up(x, index)
    layout = layout_of(x)
    items = _index_of_each_dim(index, x.ndim)
    position = _position_of_dim(items, layout.dim)
    item = items[position]
    if layout.outer != 1 and not _is_all(item, layout.size):
        return unfolded(x, _cut_dims(items, x))[index]
    source = x
    if isinstance(item, slice):
        rows = range(layout.size)[item]
        if len(rows) != layout.size:
            source = _slice_rows(x, rows)
        items[position] = slice(None)
    elif isinstance(item, int):
        row = range(layout.size)[item]
        # Every rank gets the row: what each contributes to its gradient is summed by its owner.
        source = exchange_entries(x, ((RowRange(row, row + 1),),) * x.view_.ranks, None)
        items[position] = 0
    elif _is_only_index(item, items):
        source = take_rows(x, indices_of(item, layout.size, x.view_))
        items[position] = slice(None)
    else:
        # Points by tables of indices: each rank looks up those of its channels.
        return move_rows(x, _cut_dims(items, x))[index]
    local_items = tuple(map(local_of, items))
    local = source.local[local_items]
    if source.rows is None:
        result = GlobalTensor(local, None, x.view_)
    else:
        dim, _ = _indexed_dim(local_items, source.rows.dim, source.ndim)
        result = GlobalTensor(local, source.rows.at(dim), x.view_)
    result.has_order = source.has_order
    return result


def _is_all(item: Any, size: int) -> bool:
    """Return whether an index keeps all entries of a dimension."""
    return isinstance(item, slice) and range(size)[item] == range(size)


def _cut_dims(items: Sequence[Any], x: Tensor) -> list[int]:
    """Return the dimensions of which an index does not keep all entries."""
    of_dims = zip((item for item in items if item is not None), x.shape, strict=True)
    return [d for d, (item, size) in enumerate(of_dims) if not _is_all(item, size)]


def _is_only_index(item: Any, items: Sequence[Any]) -> bool:
    """Return whether an index is a vector, and no other one would be paired with it."""
    others = [other for other in items if isinstance(other, Tensor)]
    return isinstance(item, Tensor) and item.ndim == 1 and len(others) == 1


def indices_of(index: Tensor, size: int, view: GlobalView) -> list[int]:
    """Return a vector of indices, of the first rank if computed from a field, as numbers from 0.

    A dry run may not know the values: it counts the messages for rows in their order then.

    Raises:
        NoRuleError: a row is not in the field, or there are none.
    """
    local: Tensor = local_of(of_first_rank(index))
    if local.ndim != 1 or len(local) == 0:
        raise NoRuleError
    if isinstance(local, FakeTensor) or local.is_meta:
        known = None if view.recorder is None else view.recorder.value_of(local)
        if known is None:
            return [i % size for i in range(len(local))]
        local = known
    indices = [i + size if i < 0 else i for i in local.tolist()]
    if min(indices) < 0 or max(indices) >= size:
        raise NoRuleError
    return indices


def _look_up(x: Tensor, index: Any) -> GlobalTensor:
    """Return entries of a tensor that every rank has, by indices with rows.

    Raises:
        NoRuleError: there are other indices, or masks.
    """
    if not is_band(index) or index.dtype in (torch.bool, torch.uint8):
        raise NoRuleError
    local: Tensor = local_of(x)
    return GlobalTensor(local[index.local], layout_of(index), index.view_)


ALL = slice(None)
KNOWN_INDICES = (int, slice, Tensor)


def _plain_index(item: Any) -> Any:
    """Return NumPy's arrays and integers as those of torch and Python, anything else unchanged."""
    if isinstance(item, np.ndarray):
        return torch.as_tensor(item)
    return int(item) if isinstance(item, np.integer) else item


def _index_of_each_dim(index: Any, ndim: int) -> list[Any]:
    """Return an index as a list of one item for each dimension, and `None` for new ones.

    Raises:
        NoRuleError: a part of it is a mask, a band or of a type that is not known.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if type(item) in BASIC_INDICES:
            continue
        items[i] = item = _plain_index(item)
        require_whole(item)
        is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
        if is_mask or isinstance(item, bool):
            raise NoRuleError
        if isinstance(item, (list, tuple)):
            if not item or any(type(entry) is not int for entry in item):
                raise NoRuleError
            items[i] = torch.tensor(item)
        elif not isinstance(item, KNOWN_INDICES):
            raise NoRuleError
    missing = ndim - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0:
        raise NoRuleError
    # `in` would compare tensors.
    position = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[position : position + 1] = [slice(None)] * missing
    return items


def _position_of_dim(items: Sequence[Any], dim: int) -> int:
    """Return which item of an index is that of a dimension."""
    positions = [i for i, item in enumerate(items) if item is not None]
    return positions[dim]


def _indexed_dim(items: Sequence[Any], dim: int, ndim: int) -> tuple[int, int]:
    """Return where a dimension that is indexed by `:` is in the result, and the latter's `ndim`."""
    if BASIC_INDICES.issuperset(map(type, items)):
        kept = [type(item) is not int for item in items]
        return sum(kept[: _position_of_dim(items, dim)]), sum(kept)
    indices = [item for item in items if isinstance(item, Tensor)]
    # It is read off a small tensor, in which only this dimension has a size that no index has.
    mark = 2 + max((size for i in indices for size in i.shape), default=0)
    sizes = [mark if d == dim else 1 for d in range(ndim)]
    probe_items: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            probe_items.append(torch.zeros(item.shape, dtype=torch.long))
        elif isinstance(item, int):
            probe_items.append(0)
        else:
            probe_items.append(None if item is None else slice(None))
    shape = list(torch.empty(1).expand(sizes)[tuple(probe_items)].shape)
    return shape.index(mark), len(shape)


@layout_before("__setitem__")
def _layout_before_assignment(x: Any, args: Args, kwargs: Kwargs) -> Layout | None:
    """Return where the rows of a band would lie in a tensor to a slice of which it is assigned."""
    _, index, value = args
    rows, items = layout_of(value), _index_of_each_dim(index, x.ndim)
    for dim in range(x.ndim):
        position = _position_of_dim(items, dim)
        if not isinstance(items[position], slice):
            continue
        sliced = [*items[:position], slice(None), *items[position + 1 :]]
        result_dim, ndim = _indexed_dim(tuple(map(local_of, sliced)), dim, x.ndim)
        if result_dim - ndim == rows.dim - value.ndim:
            return layout_with_rows_of(value, x, dim)
    return None


@rule_for("__setitem__")
def setitem(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Assign to integers, slices and indices: each rank assigns rows of its band, maybe none."""
    x, index, value = args
    layout, view = layout_of(x), x.view_
    *before, mask = index if isinstance(index, tuple) and index else (index,)
    if (
        isinstance(mask, Tensor)
        and mask.dtype is torch.bool
        and all(item is Ellipsis or (isinstance(item, slice) and item == ALL) for item in before)
        and not isinstance(value, Tensor)
    ):
        first = x.ndim - mask.ndim if any(item is Ellipsis for item in before) else len(before)
        end = first + mask.ndim
        # A mask is not broadcast: torch's error comes.
        if mask.shape != x.shape[first:end] or not (x.is_floating_point() or x.is_complex()):
            raise NoRuleError
        mask = mask.to(x.device)  # an index may be on the CPU
        x.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.ndim - end)), value)
        return
    items = _index_of_each_dim(index, x.ndim)
    position = _position_of_dim(items, layout.dim)
    item = items[position]
    if layout.outer != 1 and not (isinstance(item, Tensor) or _is_all(item, layout.size)):
        moved = unfolded(x, _cut_dims(items, x))
        moved[index] = value
        x.local.copy_(with_layout(moved, layout, view))
        return
    order: list[int] = []
    # Where the rows are in the band, with a dimension for them in any case, and in the value.
    if isinstance(item, Tensor):
        if layout.outer != 1 or not _is_only_index(item, items):
            raise NoRuleError
        indices = indices_of(item, layout.size, x.view_)
        # One that occurs several times keeps the last value, as it does on one process.
        order = sorted(range(len(indices)), key=indices.__getitem__)
        partition = _counts_of(indices, layout.partition)
        first = layout.partition.bounds[view.rank]
        own = [indices[i] - first for i in order[partition.rows(view.rank)]]
        items[position] = torch.tensor(own, dtype=torch.long, device=x.device)
        layout = layout._replace(partition=partition)
    else:
        rows = range(layout.size)[item]
        if isinstance(rows, int):
            # Indices on both sides of an integer are neighbours, but not those of a slice.
            if sum(isinstance(other, Tensor) for other in items) > 1:
                raise NoRuleError
            rows = range(rows, rows + 1)
        if layout.outer == 1:
            items[position] = _own_part(rows, layout.partition, view.rank)
            layout = layout._replace(partition=_counts_before(rows, layout.partition))
    if isinstance(value, Tensor):
        sliced = [*items[:position], slice(None), *items[position + 1 :]]
        dim, ndim = _indexed_dim(tuple(map(local_of, sliced)), layout_of(x).dim, x.ndim)
        dims_after = ndim - 1 - dim
        if isinstance(item, int) and value.ndim >= dims_after:
            value = value.unsqueeze(value.ndim - dims_after)
        value = _rows_of_value(value, value.ndim - dims_after - 1, layout, view, order)
    position_here = tuple(map(local_of, items))
    if isinstance(value, Tensor) and is_same_memory(x.local[position_here], value):
        return  # what was written to a view
    x.local[position_here] = value


def _rows_of_value(
    value: Tensor, dim: int, layout: Layout, view: GlobalView, order: Sequence[int]
) -> Tensor:
    """Return this rank's rows of a value that is assigned to the rows of `layout`; a collective.

    `order` has which row of the value each of them gets; empty if they are in their order.

    Raises:
        NoRuleError: it has not as many rows in its dimension `dim`.
    """
    if dim < 0 or value.shape[dim] == 1 != layout.size:  # it broadcasts
        everywhere: Tensor = whole(value)
        return everywhere
    if value.shape[dim] != layout.size:
        raise NoRuleError
    result = layout.at(dim)
    if not order:
        return with_layout(value, result, view)
    if isinstance(value, GlobalTensor) and value.rows is not None:
        if value.rows.dim != dim or value.rows.outer != 1:
            raise NoRuleError
        return rearrange_rows(value, order, result).local
    reordered = value.index_select(dim, torch.tensor(order, device=value.device))
    return with_layout(reordered, result, view)


def _counts_of(indices: Sequence[int], partition: RowPartition) -> RowPartition:
    """Return how sorted rows lie in bands, of which some may have none of them."""
    return RowPartition(tuple(sum(i < bound for i in indices) for bound in partition.bounds))


def _counts_before(rows: range, partition: RowPartition) -> RowPartition:
    """Return how a range of rows lies in bands, of which some may have none of them."""
    counts = (-(-(bound - rows.start) // rows.step) for bound in partition.bounds)
    return RowPartition(tuple(min(max(count, 0), len(rows)) for count in counts))


def _own_part(rows: range, partition: RowPartition, rank: int) -> slice:
    """Return where the rows of a range are in this rank's band."""
    first, bounds = partition.bounds[rank], _counts_before(rows, partition)
    own = rows[bounds.rows(rank)]
    return slice(own.start - first, own.stop - first, own.step) if own else slice(0, 0)


@rule_for("index_select")
def index_select(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Select by an index that every rank has; rows move."""
    arguments = bind(("input", "dim", "index"), args, kwargs)
    x, dim, index = arguments["input"], arguments["dim"], arguments["index"]
    require_whole(index)
    x = unfolded(x, [dim % x.ndim])
    layout = layout_of(x)
    if dim % x.ndim == layout.dim:
        return take_rows(x, indices_of(index, layout.size, x.view_))
    return wrap(x.local.index_select(dim, local_of(index)), layout, x.view_)

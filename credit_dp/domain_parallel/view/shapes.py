"""Rules of functions that view a tensor in another shape: they say anew where the rows are.

Windows may need bands that end where windows end: then rows move between ranks, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.partition import RowPartition, falls_into_equal_parts
from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.view.function_rules import (
    RULES_FOR_WHOLE,
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    Layout,
    bands_of,
    is_band,
    local_of,
    with_layout,
    wrap,
)
from credit_dp.errors import UserError


def unpack_sizes(sizes: Sequence[Any]) -> list[int]:
    """Return sizes or numbers of dimensions, which functions get as a sequence or one by one."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return [int(size) for size in sizes]


def resolve_shape(sizes: Sequence[Any], numel: int) -> tuple[int, ...]:
    """Return sizes with -1 replaced."""
    shape = unpack_sizes(sizes)
    if -1 in shape:
        known = prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = numel // known if known else 0
    return tuple(shape)


def _matching_dims(old: Sequence[int], new: Sequence[int], dim: int) -> tuple[list[int], list[int]]:
    """Return the fewest dimensions around `dim` of a shape, and those of a view with their product.

    Raises:
        NoRuleError: the shapes have different numbers of entries.
    """
    i = j = 0
    while i < len(old):
        left, right = [i], [j] if j < len(new) else []
        entries, new_entries = old[i], new[j] if right else 1
        i, j = i + 1, j + len(right)
        while entries != new_entries:
            if entries < new_entries and i < len(old):
                entries *= old[i]
                left.append(i)
                i += 1
            elif entries > new_entries and j < len(new):
                new_entries *= new[j]
                right.append(j)
                j += 1
            else:
                raise NoRuleError
        if dim in left:
            return left, right
    raise NoRuleError


@lru_cache(4096)
def view_layout(shape: tuple[int, ...], layout: Layout, new: tuple[int, ...]) -> tuple[Layout, int]:
    """Return where rows are in a view, and the unit whose multiples the bands must be.

    Args:
        shape: the global shape.
        layout: where its rows are.
        new: the global shape of the view.

    Raises:
        NoRuleError: rows are spread over several dimensions of the view.
    """
    left, right = _matching_dims(shape, new, layout.dim)
    # The dimensions of the group are (outer, entries, after), with the rows in the middle.
    outer = prod(shape[d] for d in left if d < layout.dim) * layout.outer
    after = prod(shape[d] for d in left if d > layout.dim)
    entries = layout.partition.height
    before = 1  # the product of the dimensions of the view before `dim`
    for position, dim in enumerate(right):
        size, rest = new[dim], prod(new[d] for d in right[position + 1 :])
        remaining_outer, remainder = divmod(outer, before)
        before *= size
        # A dimension of outer entries alone, as a batch has, is none of rows.
        if remainder or size % remaining_outer or size == remaining_outer:
            continue
        # (remaining_outer, entries, after) is to be (size, rest), with `n` parts of all entries.
        n = size // remaining_outer
        if n * rest != entries * after:
            continue
        if rest % after == 0 and entries % (rest // after) == 0:
            unit = rest // after
            return Layout(dim, remaining_outer, _scaled(layout.partition, 1, unit)), unit
        if after % rest == 0:
            return Layout(dim, remaining_outer, _scaled(layout.partition, after // rest, 1)), 1
    raise NoRuleError


def _scaled(partition: RowPartition, factor: int, unit: int) -> RowPartition:
    """Return the partition of entries that are `factor` times smaller or `unit` times larger."""
    return RowPartition(tuple(-(-bound // unit) * factor for bound in partition.bounds))


def in_units(x: GlobalTensor, unit: int) -> GlobalTensor:
    """Return `x` with bands that are multiples of `unit` entries; a collective if they are not."""
    layout = layout_of(x)
    if unit == 1 or layout.partition.bounds_are_multiples_of(unit):
        return x
    return with_bands(x, layout._replace(partition=layout.partition.moved_to_multiples_of(unit)))


def _is_balanced_view(shape: tuple[int, ...], layout: Layout, new: tuple[int, ...]) -> bool:
    """Return whether rows stay in one dimension of a view, with units for all ranks."""
    try:
        _, unit = view_layout(shape, layout, new)
    except NoRuleError:
        return False
    return unit == 1 or -(-layout.partition.height // unit) >= layout.partition.ranks


def _moved_for_view(x: GlobalTensor, shape: tuple[int, ...]) -> GlobalTensor:
    """Return `x` with bands along a dimension in which each rank gets a part of the view.

    A few windows of rows would leave ranks without any. Whole windows along another dimension come
    first, as they stay where they are in attention, then the largest dimension. If there is none,
    `x` itself is returned.
    """
    ranks = x.view_.ranks
    choices: dict[Layout, tuple[bool, int]] = {}
    for dim, size in enumerate(x.shape):
        layout = Layout(dim, 1, RowPartition.balanced(size, ranks))
        if dim == layout_of(x).dim or not _is_balanced_view(x.shape, layout, shape):
            continue
        _, unit = view_layout(x.shape, layout, shape)
        partition = x.view_.partition(size, unit)
        if partition is not None:
            are_windows = unit > 1 and falls_into_equal_parts(size // unit, ranks)
            choices[layout._replace(partition=partition)] = are_windows, size
    return with_bands(x, max(choices, key=choices.__getitem__)) if choices else x


def _part_of_view(
    shape: tuple[int, ...], layout: Layout, new: tuple[int, ...], rank: int
) -> tuple[Layout, list[int]]:
    """Return where rows are in a view, and the shape of a rank's part of it."""
    result, _ = view_layout(shape, layout, new)
    part = list(new)
    part[result.dim] = result.outer * result.partition.sizes[rank]
    return result, part


@lru_cache(4096)
def _view_without_moves(
    shape: tuple[int, ...], layout: Layout, new: tuple[int, ...], rank: int
) -> tuple[Layout, list[int]] | None:
    """Return the same, or None if rows have to move for it."""
    if not _is_balanced_view(shape, layout, new):
        return None
    _, unit = view_layout(shape, layout, new)
    if unit != 1 and not layout.partition.bounds_are_multiples_of(unit):
        return None
    return _part_of_view(shape, layout, new, rank)


def reshape_to(x: GlobalTensor, shape: tuple[int, ...]) -> GlobalTensor:
    """Return `x` with another global shape."""
    source, rank = x, x.view_.rank
    if x.view_.recorder is not None and _is_balanced_view(x.shape, layout_of(x), shape):
        _, unit = view_layout(x.shape, layout_of(x), shape)
        x.view_.recorder.add_windows(layout_of(x).partition.height, unit)
    found = _view_without_moves(x.shape, layout_of(x), shape, rank)
    if found is None:
        if not _is_balanced_view(x.shape, layout_of(x), shape):
            source = _moved_for_view(x, shape)
        try:
            _, unit = view_layout(source.shape, layout_of(source), shape)
        except NoRuleError:
            return _reshaped_by_entries(x, shape)
        source = in_units(source, unit)
        found = _part_of_view(source.shape, layout_of(source), shape, rank)
    layout, part = found
    return GlobalTensor(source.local.reshape(part), layout, x.view_)


def _reshaped_by_entries(x: GlobalTensor, shape: tuple[int, ...]) -> GlobalTensor:
    """Return `x` with another global shape, in which a row may be in parts; a collective.

    Ranks send entries, in their order in memory, until each has whole indices of one dimension.

    Raises:
        NoRuleError: no dimension of the view has an index for each rank.
    """
    layout, view = layout_of(x), x.view_
    left, right = _matching_dims(x.shape, shape, layout.dim)
    outer = prod(x.shape[d] for d in left if d < layout.dim) * layout.outer
    after = prod(x.shape[d] for d in left if d > layout.dim)
    entries = _scaled(layout.partition, after, 1)
    before = 1
    for dim in right:
        rest = prod(shape[d] for d in right if d > dim)
        remaining_outer = outer // before
        count = shape[dim] // remaining_outer
        if count * remaining_outer == shape[dim] and count >= view.ranks:
            break
        before *= shape[dim]
        if outer % before:
            raise NoRuleError
    else:
        raise NoRuleError
    flat = Layout(left[0], outer, entries)
    local = x.local.reshape(*x.shape[: left[0]], -1, *x.shape[left[-1] + 1 :])
    source = in_units(GlobalTensor(local, flat, view), rest)
    result = Layout(dim, remaining_outer, _scaled(layout_of(source).partition, 1, rest))
    sizes = list(shape)
    sizes[dim] = remaining_outer * result.partition.sizes[view.rank]
    return GlobalTensor(source.local.reshape(sizes), result, view)


def move_rows(x: GlobalTensor, dims: Sequence[int], preferred: Sequence[int] = ()) -> GlobalTensor:
    """Return `x` with its bands along another dimension than `dims`, the largest; a collective.

    Args:
        x: the band.
        dims: dimensions that are to be in one piece.
        preferred: dimensions that are chosen before larger ones.

    Raises:
        NoRuleError: no dimension has an entry for each rank.
    """
    candidates = [d for d in range(x.ndim) if d not in dims and x.shape[d] >= x.view_.ranks]
    dim = max(candidates, key=lambda d: (d in preferred, x.shape[d]), default=None)
    partition = None if dim is None else x.view_.partition(x.shape[dim])
    if dim is None or partition is None:
        raise NoRuleError
    return with_bands(x, Layout(dim, 1, partition))


def unfolded(x: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    """Return `x` with bands that a function of `dims` can cut: those of folded rows move elsewhere.

    Raises:
        NoRuleError: no other dimension has an entry for each rank.
    """
    layout = layout_of(x)
    return x if layout.outer == 1 or layout.dim not in dims else move_rows(x, dims)


def with_rows_everywhere(x: GlobalTensor) -> GlobalTensor:
    """Return `x` with a row on each rank; a collective if one has none.

    Raises:
        NoRuleError: there are fewer rows than ranks.
    """
    layout = layout_of(x)
    if 0 not in layout.partition.sizes:
        return x
    partition = x.view_.partition(layout.partition.height)
    if partition is None:
        raise NoRuleError
    return with_bands(x, layout._replace(partition=partition))


def with_bands(x: Any, layout: Layout) -> GlobalTensor:
    """Return a field in a layout; a collective if it is a band with another one."""
    return GlobalTensor(with_layout(x, layout, x.view_), layout, x.view_)


@rule_for("view", "_unsafe_view", "_reshape_alias")
def view(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Views, of windows too: bands are moved to where windows end, if need be."""
    x, *sizes = *args, *kwargs.values()
    if isinstance(sizes[0], torch.dtype):
        raise NoRuleError
    return reshape_to(x, resolve_shape(sizes, x.numel()))


@rule_for("reshape")
def reshape(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Reshapes, as views."""
    x, *sizes = *args, *kwargs.values()
    return reshape_to(x, resolve_shape(sizes, x.numel()))


@rule_for("flatten")
def flatten(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Flatten."""
    defaults = {"start_dim": 0, "end_dim": -1}
    arguments = defaults | bind(("input", "start_dim", "end_dim"), args, kwargs)
    x = arguments["input"]
    start, end = arguments["start_dim"] % x.ndim, arguments["end_dim"] % x.ndim
    if start == end:
        return x
    return reshape_to(x, (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


@rule_for("unflatten")
def unflatten(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Unflatten."""
    arguments = bind(("input", "dim", "sizes"), args, kwargs)
    x = arguments["input"]
    dim = arguments["dim"] % x.ndim
    sizes = resolve_shape((arguments["sizes"],), x.shape[dim])
    return reshape_to(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


@rule_for("view_as", "reshape_as")
def view_as(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Views with another tensor's shape."""
    layout_of(args[0])
    return reshape_to(args[0], args[1].shape)


@rule_for("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint")
def permute(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Permutations of dimensions."""
    x, *others = args
    layout = layout_of(x)
    options = tuple((name, _hashable(value)) for name, value in kwargs.items())
    order = _permutation(func, x.ndim, tuple(map(_hashable, others)), options)
    result = func(x.local, *others, **kwargs)
    return wrap(result, layout.at(order.index(layout.dim)), x.view_)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(4096)
def _permutation(func: Function, ndim: int, args: Args, kwargs: Args) -> tuple[int, ...]:
    """Return which dimension a function moves to each position."""
    # It is read off a tensor without data, whose sizes all differ.
    marks = torch.empty(tuple(range(ndim)), device="meta")
    return tuple(func(marks, *args, **dict(kwargs)).shape)


@rule_for("unsqueeze")
def unsqueeze(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Add a dimension."""
    arguments = bind(("input", "dim"), args, kwargs)
    x = arguments["input"]
    layout, dim = layout_of(x), arguments["dim"] % (x.ndim + 1)
    return wrap(x.local.unsqueeze(dim), layout.at(layout.dim + (dim <= layout.dim)), x.view_)


@rule_for("squeeze")
def squeeze(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Remove dimensions of size 1."""
    arguments = {"dim": None} | bind(("input", "dim"), args, kwargs)
    x, dims = arguments["input"], arguments["dim"]
    layout = layout_of(x)
    if dims is None:
        dims = range(x.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    # Sizes of the globe decide: a band may have one row.
    removed = sorted({d % x.ndim for d in dims if x.shape[d] == 1})
    local = x.local
    for dim in reversed(removed):
        local = local.squeeze(dim)
    return as_view(local, layout.at(layout.dim - sum(d < layout.dim for d in removed)), x)


def as_view(local: Tensor, layout: Layout, x: GlobalTensor) -> GlobalTensor:
    """Return a view of a band, which is another tensor than `x` even if nothing changes."""
    return GlobalTensor(local.view(local.shape) if local is x.local else local, layout, x.view_)


@rule_for("expand", "broadcast_to", "expand_as")
def expand(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Expand dimensions of size 1."""
    x, *sizes = *args, *kwargs.values()
    if not is_band(x):
        # To the shape of a field: the same on all ranks still, without memory.
        shape = sizes[0].shape if isinstance(sizes[0], Tensor) else unpack_sizes(sizes)
        return GlobalTensor(local_of(x).expand(shape), None, bands_of(sizes)[0].view_)
    layout = layout_of(x)
    shape = list(sizes[0].shape) if isinstance(sizes[0], Tensor) else unpack_sizes(sizes)
    dim = layout.dim + len(shape) - x.ndim
    shape[dim] = -1
    return wrap(x.local.expand(shape), layout.at(dim), x.view_)


@rule_for("repeat_interleave")
def repeat_interleave(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Repeat entries along a dimension."""
    names = ("input", "repeats", "dim", "output_size")
    arguments = {"dim": None, "output_size": None} | bind(names, args, kwargs)
    x, count = arguments["input"], arguments["repeats"]
    layout_of(x)
    if not isinstance(count, int) or count < 1:
        raise NoRuleError
    x, dim = (x.flatten(), 0) if arguments["dim"] is None else (x, arguments["dim"] % x.ndim)
    if arguments["output_size"] not in (None, x.shape[dim] * count):
        raise NoRuleError
    layout = layout_of(x)
    if dim == layout.dim:
        layout = layout._replace(partition=_scaled(layout.partition, count, 1))
    return wrap(x.local.repeat_interleave(count, dim), layout, x.view_)


@rule_for("view_as_real", "view_as_complex")
def view_complex(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Complex numbers as pairs of real ones, and back."""
    (x,) = args
    layout = layout_of(x)
    if func.__name__ == "view_as_complex" and layout.dim == x.ndim - 1:
        raise NoRuleError
    return wrap(func(x.local), layout, x.view_)


@rule_for("tril", "triu")
def triangle(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Triangles of matrices."""
    arguments = {"diagonal": 0} | bind(("input", "diagonal"), args, kwargs)
    x, diagonal = arguments["input"], arguments["diagonal"]
    layout = layout_of(x)
    if layout.dim >= x.ndim - 2 and layout.outer != 1:
        raise NoRuleError
    first = layout.partition.bounds[x.view_.rank]
    # The first row of this band is not that of the matrix, nor is the first column.
    shift = {x.ndim - 2: first, x.ndim - 1: -first}.get(layout.dim, 0)
    return wrap(func(x.local, diagonal + shift), layout, x.view_)


@rule_for("diagonal")
def diagonal(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Diagonals of two dimensions without rows."""
    names = ("input", "offset", "dim1", "dim2")
    arguments = {"dim1": 0, "dim2": 1} | bind(names, args, kwargs)
    x = arguments["input"]
    layout = layout_of(x)
    dims = [arguments["dim1"] % x.ndim, arguments["dim2"] % x.ndim]
    if layout.dim in dims:
        raise NoRuleError
    removed = sum(d < layout.dim for d in dims)
    return wrap(func(x.local, *args[1:], **kwargs), layout.at(layout.dim - removed), x.view_)


@rule_for(
    "t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "movedim_", "unflatten_"
)
def reshape_in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Refuse: the tensor would have another shape for the one that holds it already.

    Raises:
        UserError: always.
    """
    name = func.__name__
    raise UserError(f"{name}: can't change the shape of a sharded field. Use {name[:-1]}.")


RULES_FOR_WHOLE.update(function for function, rule in RULES.items() if rule is reshape_in_place)


@rule_for("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def factory(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Tensors of given sizes: the same on all ranks."""
    x, *others = args
    require_whole(others, kwargs)
    return GlobalTensor(func(x.local, *others, **kwargs), None, x.view_)

"""Rules of concatenation, rolls, flips and padding: rows move between ranks, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.padding import extended_bounds, padded_rows, rolled_rows
from credit_dp.domain_parallel.bands.rows import fill_beyond_poles
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.pad import MODES
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    rule_for,
)
from credit_dp.domain_parallel.view.indexing import (
    rearrange_rows,
    take_rows,
)
from credit_dp.domain_parallel.view.shapes import (
    unfolded,
    unpack_sizes,
    with_bands,
    with_rows_everywhere,
)
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    Layout,
    bands_of,
    exchange_entries,
    gather,
    has_usual_bands,
    is_band,
    local_of,
    with_layout,
    wrap,
)
from credit_dp.errors import UserError

CAT = ("tensors", "dim")


@rule_for("cat", "concat", "concatenate")
def cat(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Concatenation, along rows too."""
    arguments = {"dim": 0} | bind(CAT, args, kwargs)
    tensors = [x for x in arguments["tensors"] if x.ndim != 1 or x.numel()]
    bands = bands_of(tensors)
    # Of several fields of the same size one has the bands that layers return, if any has.
    largest = max(bands, key=lambda x: (x.numel(), has_usual_bands(x)))
    layout, view_ = layout_of(largest), largest.view_
    dim = arguments["dim"] % tensors[0].ndim
    if dim == layout.dim:
        return _cat_rows(tensors, bands, dim)
    if any(x.shape[layout.dim] != layout.size for x in tensors):
        raise NoRuleError
    return wrap(torch.cat([with_layout(x, layout, view_) for x in tensors], dim), layout, view_)


def _cat_rows(tensors: list[Any], bands: list[GlobalTensor], dim: int) -> GlobalTensor:
    """Concatenate along the rows of all bands.

    Every rank joins a part of every tensor, empty if need be: their gradients may need collectives,
    which all ranks have to reach.
    """
    view_ = bands[0].view_
    layouts = [x.rows if is_band(x) else None for x in tensors]
    folded = layout_of(bands[0])
    if folded.outer != 1 and all(x is not None and x[::2] == folded[::2] for x in layouts):
        # The same rows of several samples: those of one tensor after those of another.
        folded = folded._replace(outer=sum(layout_of(x).outer for x in tensors))
        return GlobalTensor(torch.cat([x.local for x in tensors], dim), folded, view_)
    tensors = [_in_bands_of(x, dim) for x in tensors]
    largest = max(bands_of(tensors), key=lambda x: x.shape[dim])
    position = next(i for i, x in enumerate(tensors) if x is largest)
    before, after = (
        sum(x.shape[dim] for x in part) for part in (tensors[:position], tensors[position + 1 :])
    )
    partition = _extended_partition(largest, before, after)
    if partition is None:
        raise NoRuleError
    result = Layout(dim, 1, partition)
    parts, start = [], 0
    for x in tensors:
        ranges = _ranges_within(partition, start, x.shape[dim])
        if is_band(x):
            parts.append(exchange_entries(x, ranges, result).local)
        else:
            entries = ranges[view_.rank]
            first, stop = (entries[0].start, entries[0].stop) if entries else (0, 0)
            parts.append(local_of(x).narrow(dim, first, stop - first))
        start += x.shape[dim]
    return GlobalTensor(torch.cat(parts, dim), result, view_)


def _in_bands_of(x: Any, dim: int) -> Any:
    """Return a field with bands along a dimension, or on all ranks if it has too few rows there.

    Tensors without bands are returned unchanged.
    """
    if not is_band(x) or (layout_of(x).dim == dim and layout_of(x).outer == 1):
        return x
    partition = x.view_.partition(x.shape[dim])
    return gather(x) if partition is None else with_bands(x, Layout(dim, 1, partition))


def _extended_partition(x: GlobalTensor, before: int, after: int) -> RowPartition | None:
    """Return bands with more rows on the first and last rank, or with fewer; None if too few."""
    bounds = extended_bounds(layout_of(x).partition.bounds, before, after)
    height = before + layout_of(x).size + after
    return x.view_.partition(height) if bounds is None else RowPartition(bounds)


def _ranges_within(partition: RowPartition, start: int, size: int) -> list[tuple[RowRange, ...]]:
    """Return which of `size` entries from `start` on every rank has, counted from `start`."""
    ranges: list[tuple[RowRange, ...]] = []
    for rank in range(partition.ranks):
        rows = partition.rows(rank)
        first, stop = max(rows.start - start, 0), min(rows.stop - start, size)
        ranges.append((RowRange(first, stop),) if first < stop else ())
    return ranges


@rule_for("stack")
def stack(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Stack along a new dimension."""
    arguments = {"dim": 0} | bind(CAT, args, kwargs)
    tensors = arguments["tensors"]
    band = bands_of(tensors)[0]
    layout, dim = layout_of(band), arguments["dim"] % (band.ndim + 1)
    local = torch.stack([with_layout(x, layout, band.view_) for x in tensors], dim)
    return wrap(local, layout.at(layout.dim + (dim <= layout.dim)), band.view_)


@rule_for("roll")
def roll(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Roll rows and other dimensions."""
    arguments = {"dims": ()} | bind(("input", "shifts", "dims"), args, kwargs)
    x, shifts, dims = arguments["input"], arguments["shifts"], arguments["dims"]
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
    if not dims:
        raise NoRuleError
    x = unfolded(x, dims)
    layout = layout_of(x)
    pairs = list(zip(shifts, dims, strict=True))
    others = [(shift, d) for shift, d in pairs if d != layout.dim]
    shift = sum(shift for shift, d in pairs if d == layout.dim) % layout.size
    if shift:
        bands = map(layout.partition.rows, range(x.view_.ranks))
        x = exchange_entries(x, [rolled_rows(rows, layout.size, shift) for rows in bands], layout)
    local = (
        x.local.roll([shift for shift, _ in others], [d for _, d in others]) if others else x.local
    )
    return _new_tensor(local, layout, args[0])


def _new_tensor(local: Tensor, layout: Layout | None, x: GlobalTensor) -> GlobalTensor:
    """Return the result of a function that is no view: a copy even if nothing changes."""
    return GlobalTensor(local.clone() if local is x.local else local, layout, x.view_)


@rule_for("flip")
def flip(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Flip rows and other dimensions."""
    x, *dims = *args, *kwargs.values()
    flipped = {d % x.ndim for d in unpack_sizes(dims)}
    x = unfolded(x, list(flipped))
    layout = layout_of(x)
    others = sorted(flipped - {layout.dim})
    if layout.dim in flipped:
        x = rearrange_rows(x, range(layout.size)[::-1], layout)
    return _new_tensor(x.local.flip(others) if others else x.local, layout, args[0])


@rule_for("pad")
def pad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Padding and cropping of any dimensions, in all modes."""
    defaults = {"mode": "constant", "value": None}
    arguments = defaults | bind(("input", "pad", "mode", "value"), args, kwargs)
    x, mode, value = arguments["input"], arguments["mode"], arguments["value"]
    widths = [int(width) for width in arguments["pad"]]
    # Widths are given from the last dimension on, two for each.
    padded = [x.ndim - 1 - i // 2 for i, width in enumerate(widths) if width]
    x = unfolded(x, padded)
    layout = layout_of(x)
    position = 2 * (x.ndim - 1 - layout.dim)
    if any(widths[position : position + 2]):
        north, south = widths[position : position + 2]
        x = _pad_rows(x, north, south, mode, value)
        widths[position : position + 2] = [0, 0]
    if mode != "constant" and is_band(x):
        x = with_rows_everywhere(x)  # torch refuses to reflect columns of no rows
    local = func(x.local, widths, mode=mode, value=value) if any(widths) else x.local
    return _new_tensor(local, x.rows, args[0])


def _pad_rows(x: GlobalTensor, north: int, south: int, mode: str, value: Any) -> GlobalTensor:
    """Return `x` with more rows, or with fewer where a width is negative; whole if too few."""
    layout, view = layout_of(x), x.view_
    height, padded = layout.size, layout.size + north + south
    if padded < 1 or mode not in MODES:
        raise NoRuleError
    if view.recorder is not None and north == 0 < south:
        view.recorder.add_padding(height, padded)
    partition = _extended_partition(x, north, south)
    bands = [
        slice(0, padded) if partition is None else partition.rows(r) for r in range(view.ranks)
    ]
    # Zeros are part of the exchange's result, another value is filled in afterwards.
    pole_mode = "zeros" if mode == "constant" and not value else mode
    try:
        required = [padded_rows(rows, height, north, south, pole_mode) for rows in bands]
    except UserError as error:  # torch says what is wrong
        raise NoRuleError from error
    result = exchange_entries(x, required, partition and layout._replace(partition=partition))
    if pole_mode != "constant":
        return result
    out, dim = bands[view.rank], layout.dim - x.ndim
    span = (out.start - north, out.stop - north)
    filled = fill_beyond_poles(result.local, dim, *span, height, value)
    return GlobalTensor(filled, result.rows, view)


@rule_for("repeat", "tile")
def repeat(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Repeat along any dimensions, rows too."""
    x, *counts = *args, *kwargs.values()
    layout, repeats = layout_of(x), unpack_sizes(counts)
    if func.__name__ == "tile":
        repeats = [1] * (x.ndim - len(repeats)) + repeats
    dim = layout.dim + len(repeats) - x.ndim
    if len(repeats) < x.ndim or 0 in repeats:
        raise NoRuleError
    times = repeats[dim]
    if layout.outer == 1 != times:
        repeats[dim] = 1
        x = take_rows(x, list(range(layout.size)) * times)
        layout = layout_of(x)
    else:
        # Copies of folded rows are entries before the rows.
        layout = layout._replace(outer=layout.outer * times)
    return wrap(x.local.repeat(repeats), layout.at(dim), x.view_)

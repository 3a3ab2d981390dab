"""Joined tensors, and copies of one after each other: rows stay where they are if they can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    cut,
    refresh,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.pointwise import has_usual_bands
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    Domain,
    Part,
    domain_of,
    is_band,
    is_partial,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.views import at, dim_of
from credit_dp.domain_parallel.bands.padding import extended_bounds

aten = torch.ops.aten


@rule_for("cat.default", "stack.default")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join tensors along a dimension, which may be that of the rows."""
    tensors = list(args[0])
    given = dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    domain = domain_of(tensors)
    refresh_all(*tensors)
    bands = [x for x in tensors if is_band(x)]
    if not bands:
        if all(map(is_partial, tensors)):
            return Part(func([x.local for x in tensors], dim), PARTIAL)
        return Part(func([whole(x) for x in tensors], dim), WHOLE)
    # Of several fields of the same size one has the bands that layers return, if any has.
    first = max(bands, key=lambda x: (x.numel(), has_usual_bands(x)))
    band = first.band
    is_stack = func is aten.stack.default
    ndim = first.ndim + is_stack
    dim %= ndim
    if is_stack:
        row_dim = dim_of(first)
        rows = at(band, row_dim + (dim <= row_dim), ndim)
        return Part(func([with_rows(x, band, domain) for x in tensors], given), rows)
    # torch takes an empty tensor of one dimension for none.
    tensors = [x for x in tensors if not (x.ndim == 1 and x.numel() == 0 and ndim > 1)]
    if dim != dim_of(first):
        return Part(func([with_rows(x, band, domain) for x in tensors], given), band)
    return join_rows(tensors, bands, dim - ndim, domain)


def join_rows(tensors: Sequence[Any], bands: Sequence[Any], dim: int, domain: Domain) -> Part:
    """Join tensors along the dimension that has the rows of a band, counted from the last."""
    rows = bands[0].rows
    are_alike = all(is_band(x) and x.rows[::2] == rows[::2] and x.rows.dim == dim for x in tensors)
    if rows.outer > 1 and are_alike:
        # The same rows of several samples: those of one tensor after those of another.
        local = torch.cat([x.local for x in tensors], dim)
        return Part(local, rows._replace(outer=sum(x.rows.outer for x in tensors)))
    usual = domain.bounds(sum(x.shape[dim] for x in tensors))
    size = usual[-1]
    bounds = largest_bounds(tensors, dim) or usual
    parts, start = [], 0
    for x in tensors:
        stop = start + x.shape[dim]
        inner = tuple(min(max(bound, start), stop) - start for bound in bounds)
        parts.append(_part(x, Band(dim, 1, inner), domain))
        if is_band(x) and x.rows[:2] == (dim, 1):
            domain.note_read(("part", size, start, stop), x.rows)
        start = stop
    return Part(torch.cat(parts, dim), Band(dim, 1, bounds))


def largest_bounds(tensors: Sequence[Any], dim: int) -> tuple[int, ...] | None:
    """Return the bands of the largest field, the others' rows at its ends; None if uneven."""
    start, best = 0, None
    for x in tensors:
        is_alike = is_band(x) and x.rows[:2] == (dim, 1)
        if is_alike and (best is None or x.shape[dim] > best[1].height):
            best = (start, x.rows)
        start += x.shape[dim]
    if best is None:
        return None
    first, band = best
    return extended_bounds(band.bounds, first, start - first - band.height)


def _part(x: Tensor, rows: Band, domain: Domain) -> Tensor:
    """Return this rank's rows, also of a single row, which does not broadcast in a joint field."""
    if is_band(x):
        return with_rows(x, rows, domain)
    return cut(whole(x), rows, domain.rank)


@rule_for("repeat.default")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat a tensor along dimensions: copies of rows are entries before them."""
    x, counts = args[0], list(args[1])
    refresh(x)
    if not isinstance(x.rows, Band):
        return Part(x.local.repeat(counts), x.rows)
    times = counts[x.rows.dim]
    rows = x.rows._replace(outer=x.rows.outer * times)
    if times > 1:
        x.domain.folds[rows.size] = rows.height
    if times == 0:
        rows = x.rows._replace(outer=1, bounds=(0,) * len(x.rows.bounds))
    return Part(x.local.repeat(counts), rows)

"""Padding, rolls, flips and windows: rows move between ranks, each once.

Rows stay where they are as far as possible: of a padded field the first and the last rank have more
rows. Other dimensions are left to torch, in the same call where no rows are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.interpolation import call_or_empty, rows_of
from credit_dp.domain_parallel.band_tensor.moving import (
    Required,
    band_rows,
    exchange_of,
    fetch,
    give_back,
    part_or_whole,
    unfolded_rows,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.rules import run_whole, short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    Domain,
    OtherLayouts,
    Part,
    domain_of,
    local_of,
    rule_for,
)
from credit_dp.domain_parallel.band_tensor.views import at, dim_of, view_rule
from credit_dp.domain_parallel.bands.padding import (
    extended_bounds,
    flipped_rows,
    padded_rows,
    rolled_rows,
)
from credit_dp.domain_parallel.bands.rows import rows_beyond_poles
from credit_dp.domain_parallel.exchange import RowRange

aten = torch.ops.aten


# ---------------------------------------------------------------- padding


@final
class Padding(NamedTuple):
    """How a rank gets its rows of a padded field.

    Attributes:
        widths: what torch pads of what was fetched, in the order of its functions.
    """

    band: Band
    required: Required
    out: Band
    widths: list[int]


def padding_of(rows: Band, widths: Sequence[int], mode: str, domain: Domain) -> Padding | None:
    """Return how rows are padded; None if torch refuses it, or no row is left."""
    position = 2 * (-rows.dim - 1)
    north, south = (*widths, *[0] * (position + 2))[position : position + 2]
    if not north and not south:
        return Padding(rows, band_rows(rows.bounds), rows, list(widths))
    padded = rows.size + north + south
    if padded < 1 or (mode == "reflect" and max(north, south) >= rows.size):
        return None
    if domain.recorder is not None and north == 0 < south:
        domain.recorder.add_padding(rows.size, padded)
    kept = extended_bounds(rows.bounds, north, south) if rows.outer == 1 else None
    out = Band(rows.dim, 1, kept or domain.bounds(padded))
    band, required, ends = _padded(rows, out.bounds, north, south, mode, domain.rank)
    local_widths = list(widths)
    local_widths[position : position + 2] = ends
    return Padding(band, required, out, local_widths)


@lru_cache(8192)
def _padded(
    rows: Band, out: tuple[int, ...], north: int, south: int, mode: str, rank: int
) -> tuple[Band, Required, tuple[int, int]]:
    """Return the rows that ranks fetch, and how many of them this one pads at either end."""
    kept = extended_bounds(rows.bounds, north, south) if rows.outer == 1 else None
    least = {"reflect": max(north, south) + 1, "replicate": 1}.get(mode)
    ends = min(rows.sizes(0), rows.sizes(len(out) - 2))
    if out == kept and least is not None and min(north, south) >= 0 and ends >= least:
        # torch reflects the rows of the first and the last rank as those of the globe.
        at_ends = north if rank == 0 else 0, south if rank == len(out) - 2 else 0
        return rows, band_rows(rows.bounds), at_ends
    ranges = [padded_rows(slice(a, b), rows.size, north, south, mode) for a, b in pairwise(out)]
    band, required = unfolded_rows(rows, tuple(ranges))
    if mode != "constant":
        return band, required, (0, 0)
    beyond = rows_beyond_poles(out[rank] - north, out[rank + 1] - north, rows.size)
    return band, required, beyond


@rule_for("constant_pad_nd.default")
def pad_with_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pad or crop any dimensions, with a value."""
    x, widths, *value = args
    rows = rows_of(x)
    if rows is PARTIAL and any(value):
        return Part(func(whole(x), widths, *value), WHOLE)
    if not isinstance(rows, Band):
        return Part(func(x.local, widths, *value), rows)
    if x.dtype.is_complex and not any(value):
        spectrum = pad_spectrum(x.local, rows, widths, x.domain)
        if spectrum is not None:
            return spectrum
    padding = padding_of(rows, widths, "constant", x.domain)
    if padding is None:
        return run_whole(func, args, kwargs)
    local = fetch(x.local, padding.band, padding.required, x.domain)
    if local is x.local or any(padding.widths):
        local = func(local, padding.widths, *value)
    return Part(local, padding.out)


def pad_spectrum(x: Tensor, rows: Band, widths: Sequence[int], domain: Domain) -> Part | None:
    """Pad complex numbers with zeros after the last one, for a transform.

    No entry moves, though one rank gets all of the zeros: the transform sends none. None if they
    are padded in another way.
    """
    position = 2 * (-rows.dim - 1)
    south = widths[position + 1] if len(widths) > position + 1 else 0
    if rows.outer > 1 or south <= 0 or any(w for i, w in enumerate(widths) if i != position + 1):
        return None
    own = rows.sizes(domain.rank)
    out = rows._replace(bounds=(*rows.bounds[:-1], rows.height + south))
    sizes = list(x.shape)
    sizes[rows.dim] = out.sizes(domain.rank)
    local = x.new_zeros(sizes)
    local.narrow(rows.dim, 0, own).copy_(x)
    others = OtherLayouts(0)
    others.parts[rows] = local.narrow(rows.dim, 0, own)
    return Part(local, out, others=others)


MODES = {"reflection": "reflect", "replication": "replicate"}
PADS = [f"{name}_pad{n}d" for name in MODES for n in (1, 2, 3)]


def _mode(func: Any) -> str:
    return MODES[short_name(func).partition("_")[0]]


@rule_for(*(f"{name}.default" for name in PADS))
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pad or crop any dimensions, with what is reflected or repeated there."""
    x, widths = args
    rows = rows_of(x)
    if not isinstance(rows, Band):
        return Part(func(x.local, widths), rows)
    padding = padding_of(rows, widths, _mode(func), x.domain)
    if padding is None:
        return run_whole(func, args, kwargs)
    local = fetch(x.local, padding.band, padding.required, x.domain)
    if local is x.local or any(padding.widths):
        local = call_or_empty(func, local, _padded_shape(local, padding.widths), padding.widths)
    return Part(local, padding.out)


@rule_for(*(f"{name}_backward.default" for name in PADS))
def pad_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of a field that was padded."""
    grad, x, widths = args
    domain, rows = domain_of(args), rows_of(x)
    if not isinstance(rows, Band):
        local, held = part_or_whole(grad)
        return Part(func(local, local_of(x), widths), held)
    padding = padding_of(rows, widths, _mode(func), domain)
    if padding is None:
        return run_whole(func, args, kwargs)
    given = local = with_rows(grad, padding.out, domain)
    if any(padding.widths):
        shape = _padded_shape(local, [-width for width in padding.widths])
        local = call_or_empty(func, local, shape, local.new_empty(shape), padding.widths)
    local = give_back(local, padding.band, padding.required, domain)
    # Autograd may write to a gradient that a function returns.
    return Part(local.clone() if local is given else local, rows)


def _padded_shape(x: Tensor, widths: Sequence[int]) -> list[int]:
    shape = list(x.shape)
    for index, width in enumerate(widths):
        shape[-1 - index // 2] += width
    return shape


# ---------------------------------------------------------------- rolls and flips


@lru_cache(8192)
def _rolled(rows: Band, out: tuple[int, ...], shift: int) -> tuple[Band, Required]:
    ranges = [rolled_rows(slice(a, b), rows.size, shift) for a, b in pairwise(out)]
    return unfolded_rows(rows, tuple(ranges))


@lru_cache(8192)
def _flipped(rows: Band, out: tuple[int, ...]) -> tuple[Band, Required]:
    return unfolded_rows(
        rows, tuple(flipped_rows(slice(a, b), rows.size) for a, b in pairwise(out))
    )


def _same_size(rows: Band, domain: Domain) -> Band:
    return rows if rows.outer == 1 else Band(rows.dim, 1, domain.bounds(rows.size))


@rule_for("roll.default")
def roll(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Roll rows and other dimensions."""
    x, shifts, *dims = args
    rows, dims = rows_of(x), dims[0] if dims else []
    if not isinstance(rows, Band):
        return Part(func(*map(local_of, args)), rows)
    if not dims:
        return run_whole(func, args, kwargs)  # a roll of all entries in one dimension
    row_dim = dim_of(x)
    pairs = [(shift, d % x.ndim) for shift, d in zip(shifts, dims, strict=True)]
    others = [pair for pair in pairs if pair[1] != row_dim]
    shift = sum(shift for shift, d in pairs if d == row_dim) % max(rows.size, 1)
    local, out = x.local, rows
    if shift:
        out = _same_size(rows, x.domain)
        local = fetch(local, *_rolled(rows, out.bounds, shift), x.domain)
    if others or local is x.local:
        local = func(local, [shift for shift, _ in others] or [0], [d for _, d in others] or [0])
    return Part(local, out)


@rule_for("flip.default")
def flip(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flip rows and other dimensions."""
    x, dims = args
    rows = rows_of(x)
    if not isinstance(rows, Band):
        return Part(func(x.local, dims), rows)
    row_dim = dim_of(x)
    others = [d for d in dims if d % x.ndim != row_dim]
    local, out = x.local, rows
    if len(others) < len(dims):
        out = _same_size(rows, x.domain)
        local = fetch(local, *_flipped(rows, out.bounds), x.domain)
    return Part(func(local, others) if others or local is x.local else local, out)


@rule_for("rot90.default")
def rotate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rotate two dimensions: flip one, and exchange them."""
    x = args[0]
    turns = args[1] if len(args) > 1 else 1
    first, second = args[2] if len(args) > 2 else (0, 1)
    flipped = {0: [], 1: [second], 2: [first, second], 3: [first]}[turns % 4]
    y = aten.flip.default(x, flipped)
    if turns % 2:
        y = aten.transpose.int(y, first, second)
    return Part(y.local, y.rows)


# ---------------------------------------------------------------- windows


@lru_cache(8192)
def _windows(windows: tuple[int, ...], size: int, step: int) -> Required:
    """Return the rows of each rank's windows, given the bands of windows."""
    return tuple(
        (RowRange(a * step, (b - 1) * step + size),) if a < b else () for a, b in pairwise(windows)
    )


@view_rule("unfold.default")
def unfold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return windows along a dimension, which become a dimension of their own."""
    x, dim, size, step = args
    rows, domain = x.rows, x.domain
    count = (x.shape[dim] - size) // step + 1
    out = at(rows, dim_of(x), x.ndim + 1)
    if dim % x.ndim != dim_of(x):
        return Part(func(x.local, dim, size, step), out)
    if count < 1:
        return run_whole(func, args, kwargs)  # torch says what is wrong
    out = Band(out.dim, 1, domain.bounds(count))
    band, required = unfolded_rows(rows, _windows(out.bounds, size, step))
    local = fetch(x.local, band, required, domain)
    is_copy = not exchange_of(band.bounds, required, domain.rank).is_identity
    if not out.sizes(domain.rank):
        shape = list(local.shape)
        shape[dim] = 0
        return Part(local.new_empty([*shape, size]), out, is_copy)
    return Part(func(local, dim, size, step), out, is_copy)


@rule_for("unfold_backward.default")
def unfold_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sum of the gradients of all windows that a row is in."""
    grad, shape, dim, size, step = args
    rows, dim = rows_of(grad), args[2] % len(shape)
    if not isinstance(rows, Band):
        return Part(func(grad.local, shape, dim, size, step), rows)
    row_dim, domain, shape = dim_of(grad), grad.domain, list(shape)
    if rows.outer > 1 or row_dim == len(shape):
        return run_whole(func, args, kwargs)
    out = at(rows, row_dim, len(shape))
    if dim != row_dim:
        shape[row_dim] = grad.local.shape[row_dim]
        return Part(func(grad.local, shape, dim, size, step), out)
    out = out._replace(bounds=domain.bounds(shape[dim]))
    required = _windows(rows.bounds, size, step)
    shape[dim] = exchange_of(out.bounds, required, domain.rank).length
    local = grad.local
    local = func(local, shape, dim, size, step) if local.numel() else local.new_zeros(shape)
    return Part(give_back(local, out, required, domain), out)

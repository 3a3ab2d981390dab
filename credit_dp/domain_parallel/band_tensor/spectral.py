"""Rules of Fourier transforms: bands move to columns while rows are transformed.

A transform of several dimensions is one of each, one after the other. Those without rows come
first, where they may: the others then need one move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import (
    moved,
    other_layouts,
    refresh,
    return_gradient,
)
from credit_dp.domain_parallel.band_tensor.rules import run_whole
from credit_dp.domain_parallel.band_tensor.tensor import (
    Band,
    BandTensor,
    Part,
    rule_for,
)
from credit_dp.domain_parallel.partition import falls_into_equal_parts


@rule_for("_fft_c2c.default", "_fft_r2c.default", "_fft_c2r.default")
def transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transform dimensions, between complex or real numbers."""
    x, dims = args[0], tuple([d % args[0].ndim for d in args[1]])
    refresh(x)
    band, domain = x.rows, x.domain
    if not isinstance(band, Band):
        return Part(func(x.local, *args[1:], **kwargs), band)  # also of parts: it is linear
    if x.ndim + band.dim not in dims:
        return Part(_transform_local(func, x.local, dims, *args[2:]), band)
    local, shape, zeros = x.local, list(x.shape), 0
    first = without_zeros(x, band)
    if first is not None:
        band, local = first
        zeros = x.rows.height - band.height
    for step in _steps(func, dims, x.ndim + band.dim, tuple(args[2:])):
        if local.ndim + band.dim in step.dims:
            target = _other_dim(shape, step, domain.ranks)
            if target is None:
                return run_whole(func, args, kwargs)
            wanted = Band(target - x.ndim, 1, domain.bounds(shape[target]))
            padded = [0] * (-2 * band.dim - 1) + [zeros]
            local, band = moved(local, band, wanted, domain), wanted
            local = torch.constant_pad_nd(local, padded) if zeros else local
            zeros = 0
        local = _transform_local(step.func, local, step.dims, *step.rest)
        last = step.dims[-1]
        if last != local.ndim + band.dim:
            shape[last] = local.shape[last]
    if band.dim != x.rows.dim and first is None:  # else to where there are no zeros
        return_gradient(x)
    return Part(local, band)


def without_zeros(x: BandTensor, rows: Band) -> tuple[Band, Tensor] | None:
    """Return the rows up to the first of those known to be zero, which are not sent."""
    known = other_layouts(x)
    for band, local in known.parts.items() if known is not None else ():
        if isinstance(band, Band) and band[:2] == rows[:2] and band.height < rows.height:
            return band, local
    return None


class Step(NamedTuple):
    """A part of a transform, of dimensions that each rank needs all entries of.

    Attributes:
        to: dimensions to which bands move before others, if they are in one of `dims`.
    """

    func: Any
    dims: tuple[int, ...]
    rest: tuple[Any, ...]
    to: tuple[int, ...]


@lru_cache(4096)
def _steps(func: Any, dims: tuple[int, ...], row_dim: int, rest: tuple[Any, ...]) -> list[Step]:
    """Return the steps of a transform whose dimension `row_dim` is in bands.

    That of rows comes last, as bands move to other dimensions that are transformed: channels are
    mixed between transforms. But half a spectrum, along the last of the dimensions, is what the
    first one makes of real numbers, and what the last one makes real numbers of.
    """
    c2c, c2r = torch.ops.aten._fft_c2c.default, torch.ops.aten._fft_c2r.default
    last, before = dims[-1], dims[:-1]
    others = tuple(d for d in dims if d != row_dim)
    if func is not c2r:
        if func is not c2c and row_dim == last:
            return [Step(func, dims, rest, ())]
        steps = [Step(func, others, rest, ()), Step(c2c, (row_dim,), (rest[0], True), others)]
        if func is c2c:
            steps[1] = steps[1]._replace(rest=rest)
        return steps if others else steps[1:]
    columns = tuple(d for d in before if d != row_dim)
    steps = [
        Step(c2c, columns, (rest[0], False), ()),
        Step(c2c, (row_dim,), (rest[0], False), others),
        Step(c2r, (last,), rest, before),
    ]
    return [step for step in steps if step.dims and step.dims != (last,)] + steps[2:]


def _other_dim(shape: Sequence[int], step: Step, ranks: int) -> int | None:
    rows = len(shape) - 2
    # The bands of orders that a Legendre transform has left become rows of fields again.
    is_field = rows >= 0 and max(step.dims) > rows and falls_into_equal_parts(shape[rows], ranks)
    first = step.to or ((rows,) if is_field else ())
    dims = [d for d, size in enumerate(shape) if d not in step.dims and size >= ranks]
    return max(dims, key=lambda d: (d in first, shape[d]), default=None)


def _transform_local(func: Any, x: Tensor, dims: Sequence[int], *rest: Any) -> Tensor:
    """Return a transform of what a rank has; libraries refuse one of nothing."""
    if x.numel():
        return func(x, dims, *rest)  # type: ignore[no-any-return]
    shape = [max(n, 1) for n in x.shape]
    result: Tensor = func(x.new_zeros(shape), dims, *rest)
    return result.new_zeros([n if d in dims else x.shape[d] for d, n in enumerate(result.shape)])

"""Pools of one band of rows, given the rows of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.rows import Windows
from credit_dp.domain_parallel.transport import Transport

# ---------------------------------------------------------------- positions of maxima


def global_flat_indices(indices: Tensor, rows: Tensor, columns: int, height: int) -> Tensor:
    """Return flat indices into a channel of the globe, given those into fetched rows.

    Both count in row-major order.

    Args:
        rows: the global row of each fetched row.
        columns: entries of a row; 1 if rows are the last dimension.
    """
    level = indices // (len(rows) * columns)
    row = rows[indices // columns % len(rows)]
    return (level * height + row) * columns + indices % columns


def local_flat_indices(indices: Tensor, first: int, rows: int, columns: int, height: int) -> Tensor:
    """Return flat indices into a channel of `rows` rows from `first` on, given those of the globe.

    The inverse of `global_flat_indices` for consecutive rows.
    """
    level = indices // (height * columns)
    row = indices // columns % height - first
    return (level * rows + row) * columns + indices % columns


# ---------------------------------------------------------------- maxima


def maximum_gradient(
    grad: Tensor, indices: Tensor, like: tuple[torch.Size, torch.memory_format], settings: Any
) -> Tensor:
    """Return the gradient of the rows that a pool has taken maxima of.

    Args:
        settings: kernel size, stride, padding, dilation and ceil mode of the pool.
    """
    shape, memory_format = like
    # Nothing but the shape is used of them.
    rows = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    count = len(settings[0])
    backward = getattr(torch.ops.aten, f"max_pool{count}d_with_indices_backward")
    return backward(grad, rows, *settings, indices)  # type: ignore[no-any-return]


def adaptive_span(out: slice, out_height: int, height: int) -> tuple[int, int]:
    """Return the rows of the windows `out` of an adaptive pool, as `(start, stop)`."""
    return out.start * height // out_height, -(-out.stop * height // out_height)


def adaptive_window_rows(out: slice, out_height: int, height: int) -> tuple[int, ...]:
    """Return the rows of the windows `out`, one window after the other, of equal length.

    Shorter windows repeat their last row, which does not change a maximum. torch's pool on the
    rearranged rows then has exactly these windows.
    """
    spans = [adaptive_span(slice(i, i + 1), out_height, height) for i in range(out_height)]
    longest = max(stop - first for first, stop in spans)
    return tuple(min(first + k, stop - 1) for first, stop in spans[out] for k in range(longest))


def first_maximum(maxima: Tensor, indices: Tensor, transport: Transport) -> tuple[Tensor, Tensor]:
    """Return the maximum over all bands and its index, the first of equal maxima; a collective.

    Args:
        maxima: those of this rank's band; -inf if it has no rows.
        indices: their indices into the globe, of any dtype; infinite if the band has no rows.
    """
    # One collective for both: float64 holds indices up to 2**53 and all values exactly. A band
    # with NaN competes with its index, so that NaN wins as in torch.
    all_maxima, all_indices = transport.all_gather(
        torch.stack([maxima.double(), indices.double()])
    ).unbind(1)
    maximum = all_maxima.amax(0)
    is_first = (all_maxima == maximum) | all_maxima.isnan()
    first = torch.where(is_first, all_indices, torch.inf).amin(0)
    return maximum.to(maxima.dtype), first.long()


# ---------------------------------------------------------------- averages


def has_wrong_gradient(x: Tensor) -> bool:
    """Return whether torch's gradient of a padded average of `(B, C, H, W)` is wrong.

    torch's kernel for channels last on GPUs is wrong, which was seen with torch 2.11.
    """
    return x.is_cuda and x.stride(1) == 1


def count_factors(
    windows: Windows, out: slice, out_height: int, height: int, counts_padding: bool
) -> tuple[float, ...] | None:
    """Return by what to multiply means that torch has divided by all rows of the kernel.

    It can't know which of the rows that it got are padding. None if all of all windows count: the
    counts are those of the whole globe, so all ranks decide alike.
    """
    counts: Sequence[int] = [
        _counted_rows(windows, i, height, counts_padding) for i in range(out_height)
    ]
    if set(counts) == {windows.size}:
        return None
    return tuple(windows.size / count if count > 0 else 0.0 for count in counts[out])


def _counted_rows(windows: Windows, out: int, height: int, counts_padding: bool) -> int:
    first, stop = windows.span(slice(out, out + 1))
    if counts_padding:
        return min(stop, height + windows.north) - first
    return min(stop, height) - max(first, 0)

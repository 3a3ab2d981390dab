"""Which rows of a globe windows cover, and rows beyond its poles.

A convolution and a pool slide windows over the rows: output row `i` depends on window `i`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, RowRange, merge_zeros, rows_with_poles


class Windows(NamedTuple):
    """Windows along rows.

    Attributes:
        size: rows of a window, of a convolution the taps of its kernel.
        stride: rows from the first row of a window to that of the next one.
        north: rows of padding north of the globe, where the first window begins.
        dilation: rows from one row of a window to the next one.
    """

    size: int
    stride: int
    north: int
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Return the number of rows from the first to the last of a window."""
        return self.dilation * (self.size - 1) + 1

    def out_height(self, height: int, south: int, ceil_mode: bool = False) -> int:
        """Return the number of windows of a globe with `south` rows of padding.

        In ceil mode the last window may reach beyond the southern padding, but has to start on the
        globe or in the northern padding, as in torch.

        Source: Dumoulin & Visin 2016, relationship 15.
        """
        spare = height + self.north + south - self.extent
        if not ceil_mode:
            return spare // self.stride + 1
        last = -(-spare // self.stride)
        return last + 1 if last * self.stride < height + self.north else last

    def span(self, out: slice) -> tuple[int, int]:
        """Return the rows from the first to the last of the windows `out`, as `(start, stop)`.

        Rows below 0 and from the height of the globe on lie beyond a pole.
        """
        first = out.start * self.stride - self.north
        return first, (out.stop - 1) * self.stride - self.north + self.extent

    def rows_between(
        self, start: int, stop: int, out: slice, height: int, pole_mode: str
    ) -> tuple[RowRange, ...]:
        """Return the rows `start` to `stop - 1`, with zeros where a wide dilation leaves gaps.

        Args:
            start, stop: part of the span of the windows `out`.
        """
        rows_under_tap = (out.stop - out.start - 1) * self.stride + 1
        if self.dilation <= rows_under_tap:
            return rows_with_poles(start, stop, height, pole_mode)
        ranges: list[RowRange] = []
        for tap in range(self.size):
            first = out.start * self.stride - self.north + tap * self.dilation
            # The rows under this tap, and those up to the next one.
            edges = (first, first + rows_under_tap, first + self.dilation)
            under, gap = ((max(edges[i], start), min(edges[i + 1], stop)) for i in range(2))
            if under[0] < under[1]:
                ranges += rows_with_poles(*under, height, pole_mode)
            if gap[0] < gap[1]:
                ranges.append(RowRange(0, gap[1] - gap[0], zero_filled=True))
        return merge_zeros(ranges)


def is_wide(exchange: RowExchange) -> bool:
    """Return whether an exchange fetches more rows than two bands have, the same on all ranks.

    Kept for backward, such rows would take more memory than the bands.
    """
    bands = exchange.partition
    return exchange.greatest_length * bands.ranks > 2 * bands.height


def pad_rows(x: Tensor, dim: int, north: int, south: int, value: float = 0.0) -> Tensor:
    """Return `x` with rows of `value` at both ends, or without rows where a number is negative.

    In contrast to `narrow`, a crop has no gaps between its samples, and it and the gradient of `x`
    have the memory format of `x`: autograd makes that of a view contiguous.

    Shapes:
        `(..., H, W)` -> `(..., north + H + south, W)` for `dim=-2`; `dim` is negative.
    """
    if not north and not south:
        return x
    return F.pad(x, (*(0, 0) * (-dim - 1), north, south), value=value)


def rows_on_globe(start: int, stop: int, height: int) -> tuple[RowRange, ...]:
    """Return those of the rows `start` to `stop - 1` that are not beyond a pole, maybe none."""
    rows = RowRange(max(start, 0), min(stop, height))
    return (rows,) if rows.length > 0 else ()


def rows_beyond_poles(start: int, stop: int, height: int) -> tuple[int, int]:
    """Return how many of the rows `start` to `stop - 1` are beyond the north and the south pole."""
    return max(0, min(stop, 0) - start), max(0, stop - max(start, height))


def fill_beyond_poles(
    rows: Tensor, dim: int, start: int, stop: int, height: int, value: float
) -> Tensor:
    """Return the rows `start` to `stop - 1`, given those on the globe, with `value` in the others.

    Shapes:
        `(..., rows_on_globe, W)` -> `(..., stop - start, W)` for `dim=-2`; `dim` is negative.
    """
    return pad_rows(rows, dim, *rows_beyond_poles(start, stop, height), value)

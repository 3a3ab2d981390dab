"""Convolutions of one band of rows, from the band and the rows of other bands around it.

With stride 1 a band is convolved while its halo travels (`convolve_with_halo`): first with zeros in
place of the halo, then what the halo contributes at both edges (`BandEdge`) is added. Convolution
is linear, so the sum is exact. Backward (`band_gradients`), the gradients of the edges come first,
then the messages with the halo's gradient start, the gradients of the band are computed meanwhile,
and the gradients that neighbours sent are added at the end.

A transposed convolution computes all rows that the fetched ones reach (`TransposedRows`) and crops
them. Output rows that no input row reaches hold the bias only; they are added last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.rows import Windows, is_wide, pad_rows
from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.halo_exchange import (
    empty_rows_like,
    memory_format_of,
    start_fetching,
    start_returning_gradients,
)
from credit_dp.domain_parallel.transport import Transport


@final
@dataclass(frozen=True)
class ConvSettings:
    """Settings of a convolution with stride 1 along the rows.

    `padding` is the number of zeros on both sides of each spatial dimension. `dim` is the row
    dimension, counted from the end.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dim: int

    def without_row_padding(self) -> ConvSettings:
        """Return these settings without padding north and south."""
        padding = list(self.padding)
        padding[self.dim] = 0
        return replace(self, padding=tuple(padding))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the convolution of a batch."""
        no_output_padding = (0,) * len(self.padding)
        return torch.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            False,
            no_output_padding,
            self.groups,
        )

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs_grad: tuple[bool, bool, bool]
    ) -> list[Tensor]:
        """Return the gradients of input, weight and bias where `needs_grad` is true."""
        sizes = (list(s) for s in (self.stride, self.padding, self.dilation))
        no_output_padding = [0] * len(self.padding)
        grads: list[Tensor] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            [len(weight)],
            *sizes,
            False,
            no_output_padding,
            self.groups,
            list(needs_grad),
        )
        return grads


@final
@dataclass(frozen=True)
class BandEdge:
    """The contribution of the halo on one side of a band to the output rows at that edge.

    Ranges of rows and taps are `(start, length)`, as `Tensor.narrow` takes them.

    Args:
        settings: settings of the convolution, without padding along the rows.
        taps: the kernel's taps that reach into the halo.
        halo: the rows of this side in the tensor that holds both halos.
        zeros: rows of zeros to add north and south of them, in place of the band.
        reached_rows: the band's output rows that depend on the halo.
        skipped_rows: leading rows of the halo's contribution that belong to another band, where
            this one is narrower than the halo.
    """

    settings: ConvSettings
    taps: tuple[int, int]
    halo: tuple[int, int]
    zeros: tuple[int, int]
    reached_rows: tuple[int, int]
    skipped_rows: int

    def add(self, y: Tensor, halo: Tensor, weight: Tensor) -> None:
        """Add the contribution of the halo to the convolved band `y`, in place."""
        contribution = self.settings.convolve(self._rows_of(halo), self._taps_of(weight))
        dim = self.settings.dim
        y.narrow(dim, *self.reached_rows).add_(
            contribution.narrow(dim, self.skipped_rows, self.reached_rows[1])
        )

    def gradients(
        self, grad: Tensor, halo: Tensor, weight: Tensor, needs_grad: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this side's halo and taps, given that of the band's output."""
        operands = (self._gradient_of_rows(grad), self._rows_of(halo), self._taps_of(weight))
        grad_rows, grad_taps, _ = self.settings.gradients(*operands, (*needs_grad, False))
        return grad_rows, grad_taps

    def halo_part(self, grad_rows: Tensor) -> Tensor:
        """Return a view of the first result of `gradients` without the added rows of zeros."""
        return grad_rows.narrow(self.settings.dim, self.zeros[0], self.halo[1])

    def add_weight_grad(self, total: Tensor, grad_taps: Tensor) -> None:
        """Add the second result of `gradients` to the gradient of the weight, in place."""
        self._taps_of(total).add_(grad_taps)

    def _taps_of(self, weight: Tensor) -> Tensor:
        return weight.narrow(self.settings.dim, *self.taps)

    def _rows_of(self, halo: Tensor) -> Tensor:
        dim = self.settings.dim
        rows = pad_rows(halo.narrow(dim, *self.halo), dim, *self.zeros)
        return rows.contiguous(memory_format=memory_format_of(halo))

    def _gradient_of_rows(self, grad: Tensor) -> Tensor:
        # The adjoint of `add`: zeros stand for the output rows that this band does not own.
        dim = self.settings.dim
        missing = self.halo[1] - self.reached_rows[1]
        rows = grad.narrow(dim, *self.reached_rows)
        rows = pad_rows(rows, dim, self.skipped_rows, missing - self.skipped_rows)
        return rows.contiguous(memory_format=memory_format_of(grad))


@lru_cache(4096)  # of a plan's layers
def edges_of(settings: ConvSettings, rows: int, taps: int) -> tuple[BandEdge, BandEdge]:
    """Return the northern and the southern edge of a band of `rows` rows.

    The kernel has `taps` taps along the rows. `settings` pads by `width` rows on either side, as
    far as the kernel reaches from its centre. The halo holds `width` rows from north of the band,
    followed by `width` rows from south of it.
    """
    width = settings.padding[settings.dim]
    taps_beyond = taps // 2
    zeros = settings.dilation[settings.dim] * (taps_beyond - 1)
    reached = min(width, rows)  # a narrow band has fewer rows than the halo reaches
    unpadded = settings.without_row_padding()
    north = BandEdge(
        unpadded,
        taps=(0, taps_beyond),
        halo=(0, width),
        zeros=(0, zeros),
        reached_rows=(0, reached),
        skipped_rows=0,
    )
    south = BandEdge(
        unpadded,
        taps=(taps - taps_beyond, taps_beyond),
        halo=(width, width),
        zeros=(zeros, 0),
        reached_rows=(rows - reached, reached),
        skipped_rows=width - reached,
    )
    return north, south


class Padding(Protocol):
    """Pads all dimensions of a band except the rows."""

    def pad(self, x: Tensor) -> Tensor:
        """Return `x` with its padding."""

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the entries that are not padding."""

    def gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of `x`, given that of the padded `x`."""


@final
class NoPadding:
    """Leaves bands as they are."""

    def pad(self, x: Tensor) -> Tensor:
        """Return the band."""
        return x

    unpad = gradients = pad


NO_PADDING = NoPadding()


@final
@dataclass(frozen=True)
class Halo:
    """The rows next to a band: `exchange` fetches them, northern ones first.

    Column padding is not sent: each rank pads the rows that it receives.
    """

    exchange: RowExchange
    transport: Transport
    column_padding: Padding
    dim: int

    @property
    def is_wide(self) -> bool:
        """Return whether either side has more rows than a band, the same on all ranks."""
        return is_wide(self.exchange)

    def fetch(self, padded: Tensor) -> Callable[[], Tensor]:
        """Start to fetch the rows of the halo; return a function that waits for them."""
        x = self.column_padding.unpad(padded)
        finish = start_fetching(x, self.exchange, self.transport, self.dim)
        # Autocast pads in float32 in some modes.
        return lambda: self.column_padding.pad(finish()).to(padded.dtype)

    def return_gradients(self, grad: Tensor) -> Callable[[Tensor], None]:
        """Start to return the gradient of the halo to those who own its rows.

        Returns a function that adds what others return to the gradient of the padded band.
        """
        grad = self.column_padding.gradients(grad)
        finish = start_returning_gradients(grad, self.exchange, self.transport, self.dim)
        return lambda grad_x: finish(self.column_padding.unpad(grad_x))

    def zeros(self, padded: Tensor) -> Tensor:
        """Return zeros in place of the rows."""
        return empty_rows_like(padded, self.dim, self.exchange.length).zero_()

    def is_blank(self, edge: BandEdge) -> bool:
        """Return whether the halo on that side is zero: beyond a pole."""
        return edge.halo in self.exchange.zero_ranges


def edges_with_rows(
    padded: Tensor, weight: Tensor, settings: ConvSettings, halo: Halo
) -> list[BandEdge]:
    """Return the edges of a band that do not lie at a pole with zeros beyond it."""
    north_and_south = edges_of(settings, padded.shape[halo.dim], weight.shape[halo.dim])
    return [edge for edge in north_and_south if not halo.is_blank(edge)]


def convolve_with_halo(
    padded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvSettings,
    halo: Halo,
    finish: Callable[[], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the convolved band, and the rows of its halo, which `finish` returns.

    Every rank has started the exchange, whichever edges it skips here: sends match receives.
    """
    y = settings.convolve(padded, weight, bias)  # while the halo travels
    rows = finish()
    for edge in edges_with_rows(padded, weight, settings, halo):
        edge.add(y, rows, weight)
    return y, rows


def band_gradients(
    grad: Tensor,
    padded: Tensor,
    weight: Tensor,
    rows: Tensor | None,
    needs_grad: tuple[bool, bool, bool],
    settings: ConvSettings,
    halo: Halo,
    return_gradients: Callable[[Tensor], Callable[[Tensor], None]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of band, weight and bias where `needs_grad` is true.

    `rows` are those of the halo; None if they were not kept. `return_gradients` starts to return
    their gradient, and returns a function that completes the gradient of the band.
    """
    if rows is None:  # only the gradient of the weight needs the values
        rows = halo.fetch(padded)() if needs_grad[1] else halo.zeros(padded)
    # The edges come first: the halo's gradient is sent while that of the band is computed. The
    # gradients of the taps are computed in the same call, as they concern a few rows only.
    edge_gradients = [
        (edge, *edge.gradients(grad, rows, weight, needs_grad[:2]))
        for edge in edges_with_rows(padded, weight, settings, halo)
    ]
    if needs_grad[0]:  # equal on all ranks, so that all send or none does
        parts = [(edge.halo, edge.halo_part(row_grads)) for edge, row_grads, _ in edge_gradients]
        if len(parts) == 2:
            halo_grad = torch.cat([part for _, part in parts], halo.dim)
        else:  # zeros beyond a pole, or beyond both
            halo_grad = torch.zeros_like(rows)
            for place, part in parts:
                halo_grad.narrow(halo.dim, *place).copy_(part)
        finish = return_gradients(halo_grad)
    grad_x, grad_weight, grad_bias = settings.gradients(grad, padded, weight, needs_grad)
    if needs_grad[1]:
        for edge, _, grad_taps in edge_gradients:
            edge.add_weight_grad(grad_weight, grad_taps)
    if needs_grad[0]:  # add the gradients that neighbours computed for this band's rows
        finish(grad_x)
    return grad_x, grad_weight, grad_bias


# ---------------------------------------------------------------- transposed convolutions


class TransposedRows(NamedTuple):
    """How the output rows of a band are cut out of those that its input rows reach.

    Attributes:
        first, stop: the input rows, at least one.
        padding, output_padding: along the rows, with which torch crops at no cost.
        north, south: rows to add then at either end; to crop, where negative.
        is_reached: whether input rows reach all output rows.
    """

    first: int
    stop: int
    padding: int
    output_padding: int
    north: int
    south: int
    is_reached: bool


def transposed_span(windows: Windows, out: slice, height: int) -> tuple[int, int]:
    """Return the input rows whose windows reach the output rows `out`; at least one.

    torch refuses a convolution without rows, so a row is needed even if none reaches `out`.
    """
    first = -(-(out.start + windows.north - windows.extent + 1) // windows.stride)
    last = (out.stop - 1 + windows.north) // windows.stride
    first = min(max(first, 0), height - 1)
    return first, max(first, min(last, height - 1)) + 1


def transposed_rows(windows: Windows, start: int, stop: int, height: int) -> TransposedRows:
    """Return how the output rows `start` to `stop - 1`, at least one, are computed.

    Args:
        windows: each input row adds to the output rows of its window.
    """
    first, last = transposed_span(windows, slice(start, stop), height)
    # The input rows reach the output rows from `reached_start` to `reached_stop - 1`; from
    # `begin` to `end - 1` these are wanted.
    reached_start = first * windows.stride - windows.north
    reached_stop = (last - 1) * windows.stride - windows.north + windows.extent
    begin = min(max(start, reached_start), stop)
    end = max(min(stop, reached_stop), begin)
    north = begin - start
    south = stop - end
    # Rows to crop. If nothing reaches this band, they are all that the fetched row reaches.
    above = min(max(0, begin - reached_start), reached_stop - reached_start)
    below = reached_stop - reached_start - above - (end - begin)
    # torch crops as many rows at both ends by `padding`, which costs nothing, and keeps more of
    # them at the south by `output_padding`, which has to be less than the stride.
    padding, more = 0, 0
    if begin < end:
        more = above - below if 0 < above - below < windows.stride else 0
        padding = min(above, below + more)
    return TransposedRows(
        first,
        last,
        padding,
        more,
        north + padding - above,
        south + padding - more - below,
        not north + south,
    )


def convolve_transposed(
    convolve: Callable[[Tensor | None], Tensor],
    bias: Tensor | None,
    rows: TransposedRows,
    dim: int,
    spatial_ndim: int,
) -> Tensor:
    """Return the output rows of a band.

    Args:
        convolve: convolves the input rows, with the padding and output padding of `rows`, and adds
            the bias that it gets.
    """
    y = convolve(bias if rows.is_reached else None)
    y = pad_rows(y, dim, rows.north, rows.south)
    if rows.is_reached or bias is None:
        return y
    # The rows that nothing reaches are the bias, which is therefore added after padding.
    return y + bias.to(y.dtype).reshape(-1, *(1,) * spatial_ndim)

"""Convolutions with stride 1 of one band of rows, while its halo travels.

`convolve_band` starts to fetch the halo, convolves the band with zeros in place of the halo, then
adds what the halo contributes at both edges (`BandEdge`). Convolution is linear, so the sum is
exact. Backward, the gradients of the edges come first, then the messages with the halo's gradient
start, the gradients of the band are computed meanwhile, and the gradients that neighbours sent are
added at the end. Compiled code does the same in the operators `credit_dp::convolve_band` and
`credit_dp::band_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, named_in_graphs
from credit_dp.domain_parallel.halo_exchange import (
    empty_rows_like,
    fetch_rows,
    gradients_need_graph,
    gradients_with_graph,
    memory_format_of,
    start_fetching,
    start_returning_gradients,
)
from credit_dp.domain_parallel.known_rows import FoundRows, KnownRows, do_nothing
from credit_dp.domain_parallel.layers.base import pad_rows
from credit_dp.domain_parallel.layers.pad import ColumnPadding
from credit_dp.domain_parallel.transport import (
    Transport,
    keep_order,
    keeps_messages,
    transport_named,
)

# Keys: the number of spatial dimensions.
CONV_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


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


@final
@dataclass(frozen=True)
class Halo:
    """The rows next to a band: `exchange` fetches them, northern ones first.

    Column padding is not sent: each rank pads the rows that it receives.
    """

    exchange: RowExchange
    transport: Transport
    column_padding: ColumnPadding
    dim: int

    @property
    def is_wide(self) -> bool:
        """Return whether either side has more rows than a band, the same on all ranks.

        Kept for backward, such halos would take more memory than the bands.
        """
        bands = self.exchange.partition
        return self.exchange.greatest_length * bands.ranks > 2 * bands.height

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


def convolve_band(
    padded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvSettings,
    halo: Halo,
    known: KnownRows | None = None,
) -> Tensor:
    """Return the convolution of this rank's rows of a globe; a collective.

    Args:
        padded: the band with `halo.column_padding`. `settings` may add zeros in all dimensions.
        weight: the kernel. Along the rows its number of taps is odd, or its dilation even, so that
            the kernel reaches equally far north and south.
        bias: one value per channel, or None.
        settings: they pad rows so that the output has as many as the input.
        halo: as many rows on either side as `settings` pads.
        known: rows of the halo that were fetched before; the rows fetched now are added.

    Shapes:
        `(B, C_in, ..., H_local, W)` -> `(B, C_out, ..., H_local, W_out)`; without `B` too.
    """
    x, weight, bias = batched_operands(padded, weight, bias)
    if known is None:
        y = _BandConv.apply(x, weight, bias, settings, halo, None)  # type: ignore[no-untyped-call]
    else:
        found = known.find(halo.exchange, x, halo.transport, halo.dim)
        y = _BandConv.apply(x, weight, bias, settings, halo, found, *found.rows)  # type: ignore[no-untyped-call]
    return y[0] if padded.ndim < x.ndim else y  # type: ignore[no-any-return]


def batched_operands(
    padded: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a convolution as autocast wants them, with a dimension of samples."""
    device = "cpu" if padded.is_meta else padded.device.type  # autocast does not know meta
    # A custom function is opaque to autocast, which would cast the operands of a plain convolution.
    if torch.is_autocast_enabled(device) and padded.dtype != torch.float64:
        autocast_dtype = torch.get_autocast_dtype(device)
        padded, weight = padded.to(autocast_dtype), weight.to(autocast_dtype)
        bias = bias if bias is None else bias.to(autocast_dtype)
    return padded[None] if padded.ndim == weight.ndim - 1 else padded, weight, bias


@final
class _BandConv(torch.autograd.Function):
    """Convolution of a band that is padded with zeros, plus the contribution of its halo.

    The rows of the halo are fetched, or put together from known rows (`found`). Saves the
    same number of tensors on every rank: activation checkpointing compares the numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        padded: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvSettings,
        halo: Halo,
        found: FoundRows | None,
        *known: Tensor,
    ) -> Tensor:
        if found is None:
            finish = halo.fetch(padded)
        else:

            def finish() -> Tensor:
                found.wait()
                return found.assembly.join((padded, *known), padded, halo.dim)

        y, rows = _convolve_with_halo(padded, weight, bias, settings, halo, finish)
        if found is None:
            known = (rows,)
        # What a checkpointed module receives is kept anyway.
        is_fetched = found is None or found.is_first
        ctx.keeps_rows = not (is_fetched and halo.is_wide) or keeps_messages()
        ctx.save_for_backward(padded, weight, *(known if ctx.keeps_rows else ()))
        ctx.settings = settings
        ctx.halo = halo
        ctx.lengths = [] if found is None else [x.shape[halo.dim] for x in found.rows]
        # Without its tensors, which are saved or not needed.
        ctx.found = None if found is None else found._replace(rows=[], wait=do_nothing)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, *kept = ctx.saved_tensors
        settings, halo, found = ctx.settings, ctx.halo, ctx.found
        if gradients_need_graph():
            with_graph = _gradients_with_graph(
                grad, padded, weight, settings, halo, ctx.needs_input_grad[:3]
            )
            # Those of known rows are part of the gradient of the band.
            return *with_graph, *(None,) * (3 + len(ctx.lengths))
        if found is None or not ctx.keeps_rows:
            rows = kept[0] if kept else None
        else:
            rows = found.assembly.join((padded, *kept), padded, halo.dim)
        needs_grad = tuple(ctx.needs_input_grad[:3])
        grads_of_known: list[Tensor | None] = [None] * len(ctx.lengths)

        def return_gradients(halo_grad: Tensor) -> Callable[[Tensor], None]:
            if found is None or found.has_one_reader:
                return halo.return_gradients(halo_grad)  # type: ignore[no-any-return]
            # The exchange that has fetched the rows returns the gradients of all readers.
            grads_of_known[:] = found.assembly.gradients(halo_grad, ctx.lengths, halo.dim)
            return lambda _: None

        grads = _band_gradients(
            grad, padded, weight, rows, needs_grad, settings, halo, return_gradients
        )
        return *grads, *(None,) * 3, *grads_of_known


def _edges_with_rows(
    padded: Tensor, weight: Tensor, settings: ConvSettings, halo: Halo
) -> list[BandEdge]:
    """Return the edges of a band that do not lie at a pole with zeros beyond it."""
    north_and_south = edges_of(settings, padded.shape[halo.dim], weight.shape[halo.dim])
    return [edge for edge in north_and_south if not halo.is_blank(edge)]


def _convolve_with_halo(
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
    for edge in _edges_with_rows(padded, weight, settings, halo):
        edge.add(y, rows, weight)
    return y, rows


def _band_gradients(
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
        for edge in _edges_with_rows(padded, weight, settings, halo)
    ]
    if needs_grad[0]:  # equal on all ranks, so that all send or none does
        parts = [(edge.halo, edge.halo_part(of_rows)) for edge, of_rows, _ in edge_gradients]
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


def _gradients_with_graph(
    grad: Tensor,
    padded: Tensor,
    weight: Tensor,
    settings: ConvSettings,
    halo: Halo,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of band, weight and bias that can be differentiated again."""

    def convolve(padded: Tensor, weight: Tensor) -> Tensor:
        rows = fetch_rows(
            halo.column_padding.unpad(padded), halo.exchange, halo.transport, halo.dim
        )
        rows = halo.column_padding.pad(rows).to(padded.dtype)
        width = settings.padding[halo.dim]
        north, south = (rows.narrow(halo.dim, first, width) for first in (0, width))
        joined = torch.cat([north, padded, south], halo.dim)
        return settings.without_row_padding().convolve(joined, weight)

    grads = gradients_with_graph(convolve, (padded, weight), needs_grad[:2], grad)
    dims = [d for d in range(grad.ndim) if d != 1]
    return [*grads, grad.sum(dims) if needs_grad[2] else None]


class CompiledConv(NamedTuple):
    """What the operators of compiled code need to know of a convolution of bands."""

    settings: ConvSettings
    exchange: RowExchange
    column_padding: ColumnPadding

    def halo(self, transport: str) -> Halo:
        """Return the halo, which the transport of this name fetches."""
        dim = self.settings.dim
        return Halo(self.exchange, transport_named(transport), self.column_padding, dim)


def _empty_like(x: Tensor, format_of: Tensor) -> Tensor:
    """Allocate a tensor of shape and dtype of one tensor, in the memory format of another one."""
    memory_format = memory_format_of(format_of)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format)


# Outputs have the formats that the functions for fake tensors say, whatever the kernels return.
@torch.library.custom_op("credit_dp::convolve_band", mutates_args=())
def convolve_band_operator(
    padded: Tensor, weight: Tensor, bias: Tensor | None, conv: str, transport: str
) -> tuple[Tensor, Tensor]:
    """Return the convolved band, and the rows of its halo if backward needs them.

    `conv` and `transport` are the names of a `CompiledConv` and of a transport.
    """
    plan: CompiledConv = named_in_graphs(conv)
    halo = plan.halo(transport)
    memory_format = memory_format_of(padded)
    y, rows = _convolve_with_halo(padded, weight, bias, plan.settings, halo, halo.fetch(padded))
    kept = rows.new_empty(0) if halo.is_wide else rows.contiguous(memory_format=memory_format)
    return y.contiguous(memory_format=memory_format), kept


@convolve_band_operator.register_fake
def _(
    padded: Tensor, weight: Tensor, bias: Tensor | None, conv: str, transport: str
) -> tuple[Tensor, Tensor]:
    plan: CompiledConv = named_in_graphs(conv)
    halo = plan.halo(transport)
    y = plan.settings.convolve(padded, weight, bias)
    rows = empty_rows_like(padded, halo.dim, plan.exchange.length)
    return _empty_like(y, padded), rows.new_empty(0) if halo.is_wide else rows


@torch.library.custom_op("credit_dp::band_gradients", mutates_args=())
def _band_gradients_operator(
    grad: Tensor,
    padded: Tensor,
    weight: Tensor,
    rows: Tensor,
    needs_grad: Sequence[bool],
    conv: str,
    transport: str,
) -> tuple[Tensor, Tensor, Tensor]:
    plan: CompiledConv = named_in_graphs(conv)
    halo = plan.halo(transport)
    needs = (needs_grad[0], needs_grad[1], needs_grad[2])
    kept = None if halo.is_wide else rows
    grad = grad.contiguous(memory_format=memory_format_of(padded))
    grads = _band_gradients(
        grad, padded, weight, kept, needs, plan.settings, halo, halo.return_gradients
    )
    grad_x, grad_weight, grad_bias = (
        g if g is not None and needed else grad.new_empty(0)
        for g, needed in zip(grads, needs, strict=True)
    )
    return (
        grad_x.contiguous(memory_format=memory_format_of(padded)) if needs[0] else grad_x,
        grad_weight.contiguous(memory_format=memory_format_of(weight)) if needs[1] else grad_weight,
        grad_bias,
    )


@_band_gradients_operator.register_fake
def _(
    grad: Tensor,
    padded: Tensor,
    weight: Tensor,
    rows: Tensor,
    needs_grad: Sequence[bool],
    conv: str,
    transport: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_like(padded, padded) if needs_grad[0] else grad.new_empty(0),
        _empty_like(weight, weight) if needs_grad[1] else grad.new_empty(0),
        weight.new_empty(weight.shape[:1]) if needs_grad[2] else grad.new_empty(0),
    )


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    padded, weight, _, *ctx.names = inputs
    ctx.save_for_backward(padded, weight, output[1])


def _gradients_of_operands(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:3])
    grads = _band_gradients_operator(grad, *ctx.saved_tensors, needs_grad, *ctx.names)
    needed = (g if needs else None for g, needs in zip(grads, needs_grad, strict=True))
    return *needed, None, None


convolve_band_operator.register_autograd(_gradients_of_operands, setup_context=_keep_operands)
keep_order(convolve_band_operator, _band_gradients_operator)

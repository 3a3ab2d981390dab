"""Differentiable convolutions with stride 1 of one band of rows, while its halo travels.

`bands/convolutions.py` says how a band is convolved; `convolve_band` keeps what its gradients need.
Compiled code does the same in the operators `credit_dp::convolve_band` and
`credit_dp::band_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.bands.convolutions import (
    ConvSettings,
    Halo,
    band_gradients,
    convolve_with_halo,
)
from credit_dp.domain_parallel.exchange import RowExchange, named_in_graphs
from credit_dp.domain_parallel.halo_exchange import (
    empty_rows_like,
    fetch_rows,
    gradients_need_graph,
    gradients_with_graph,
    memory_format_of,
)
from credit_dp.domain_parallel.layers.pad import ColumnPadding
from credit_dp.domain_parallel.transport import keep_order, keeps_messages, transport_named

# Keys: the number of spatial dimensions.
CONV_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolve_band(
    padded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvSettings,
    halo: Halo,
) -> Tensor:
    """Return the convolution of this rank's rows of a globe; a collective.

    Args:
        padded: the band with `halo.column_padding`. `settings` may add zeros in all dimensions.
        weight: the kernel. Along the rows its number of taps is odd, or its dilation even, so that
            the kernel reaches equally far north and south.
        settings: they pad rows so that the output has as many as the input.
        halo: as many rows on either side as `settings` pads.

    Shapes:
        `(B, C_in, ..., H_local, W)` -> `(B, C_out, ..., H_local, W_out)`; without `B` too.
    """
    x, weight, bias = batched_operands(padded, weight, bias)
    y = _BandConv.apply(x, weight, bias, settings, halo)  # type: ignore[no-untyped-call]
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

    Saves the same number of tensors on every rank: activation checkpointing compares the numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        padded: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvSettings,
        halo: Halo,
    ) -> Tensor:
        finish = halo.fetch(padded)
        y, rows = convolve_with_halo(padded, weight, bias, settings, halo, finish)
        # What a checkpointed module receives is kept anyway.
        keeps_rows = not halo.is_wide or keeps_messages()
        ctx.save_for_backward(padded, weight, *((rows,) if keeps_rows else ()))
        ctx.settings = settings
        ctx.halo = halo
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, *kept = ctx.saved_tensors
        settings, halo = ctx.settings, ctx.halo
        if gradients_need_graph():
            with_graph = _gradients_with_graph(
                grad, padded, weight, settings, halo, ctx.needs_input_grad[:3]
            )
            return *with_graph, None, None
        rows = kept[0] if kept else None
        needs_grad = tuple(ctx.needs_input_grad[:3])
        grads = band_gradients(
            grad, padded, weight, rows, needs_grad, settings, halo, halo.return_gradients
        )
        return *grads, None, None


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
    y, rows = convolve_with_halo(padded, weight, bias, plan.settings, halo, halo.fetch(padded))
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
    grads = band_gradients(
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

"""A convolution of a band without gluing halos to it.

Convolution is linear. So the band is convolved as if zeros were north and south of it, while the
halo rows travel, and what they contribute is added to the rows at its edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_dp.domain_parallel.exchange import RowExchange, start_fetching, start_returning
from credit_dp.domain_parallel.layers.edges import Edge, Kernel, edges_of
from credit_dp.domain_parallel.transport import Transport


@final
@dataclass(frozen=True)
class Columns:
    """Padding of every dimension but the rows', as `F.pad` takes it: that of the rows is zero."""

    sides: tuple[int, ...]
    mode: str

    def pad(self, x: Tensor) -> Tensor:
        """Return `x` with its padding; equal sides may go around the globe several times."""
        left = self.sides
        while any(left):
            turn = self._turn(left, x)
            x = F.pad(x, turn, mode=self.mode)
            left = tuple(a - b for a, b in zip(left, turn, strict=True))
        return x

    def _turn(self, sides: tuple[int, ...], x: Tensor) -> tuple[int, ...]:
        """Return what of the padding is made at once: of a circular one, a turn at most."""
        if self.mode != "circular":
            return sides
        return tuple(min(side, x.shape[-1 - at // 2]) for at, side in enumerate(sides))

    def inside(self, padded: Tensor) -> Tensor:
        """View what is not padding."""
        for dim, (before, after) in enumerate(zip(self.sides[::2], self.sides[1::2], strict=True)):
            if before or after:
                size = padded.shape[-1 - dim] - before - after
                padded = padded.narrow(-1 - dim, before, size)
        return padded

    def cotangents(self, grad: Tensor) -> Tensor:
        """Return those of `x`, from those of `x` with its padding."""
        if not any(self.sides):
            return grad
        with torch.enable_grad():
            x = torch.zeros_like(self.inside(grad)).requires_grad_()
            return torch.autograd.grad(self.pad(x), x, grad)[0]


@final
@dataclass(frozen=True)
class Halo:
    """How a band gets the rows north and south of it: `exchange` brings them, north first.

    The columns' padding is not sent: each rank pads what it gets.
    """

    exchange: RowExchange
    transport: Transport
    columns: Columns
    dim: int

    def is_blank(self, edge: Edge) -> bool:
        """Return whether only zeros are on that side."""
        return edge.halo in self.exchange.blanks


def convolve_band(
    padded: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel, halo: Halo
) -> Tensor:
    """Convolve the rows that this rank owns of a globe; reached by all ranks together.

    Args:
        padded: the band, with the halo's columns. Other dimensions than the rows' may be padded
            with zeros besides, as the kernel says.
        weight: an odd number of taps, or dilated by an even one.
        bias: one value per channel, or none.
        kernel: it pads rows as well, so that as many come out as go in.
        halo: as many rows on either side as the kernel pads.

    Shapes:
        `(B, C_in, ..., H_local, W)` -> `(B, C_out, ..., H_local, W_out)`; without `B` too.
    """
    device = "cpu" if padded.is_meta else padded.device.type  # there is no autocast on meta
    if torch.is_autocast_enabled(device) and padded.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        padded, weight = padded.to(lower), weight.to(lower)
        bias = bias if bias is None else bias.to(lower)
    unbatched = padded.ndim == weight.ndim - 1
    x = padded[None] if unbatched else padded
    y: Tensor = _BandConv.apply(x, weight, bias, kernel, halo)  # type: ignore[no-untyped-call]
    return y[0] if unbatched else y


@final
class _BandConv(torch.autograd.Function):
    """Saves the same number of tensors on every rank, for activation checkpointing."""

    @staticmethod
    def forward(
        ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel, halo: Halo
    ) -> Tensor:
        x = halo.columns.inside(padded)
        finish = start_fetching(x, halo.exchange, halo.transport, halo.dim)
        y = kernel.convolve(padded, weight, bias)  # while the halo travels
        rows = halo.columns.pad(finish())
        both = edges_of(kernel, padded.shape[halo.dim], weight.shape[halo.dim])
        edges = [edge for edge in both if not halo.is_blank(edge)]
        for edge in edges:
            edge.add(y, rows, weight)
        ctx.save_for_backward(padded, weight, rows)
        ctx.kernel, ctx.halo, ctx.edges = kernel, halo, edges
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, rows = ctx.saved_tensors
        halo, wanted = ctx.halo, tuple(ctx.needs_input_grad[:3])
        # Both at once, though only the halo's are waited for: they are of a few rows.
        found = [(edge, *edge.cotangents(grad, rows, weight, wanted[:2])) for edge in ctx.edges]
        if wanted[0]:  # the same on every rank
            home = torch.zeros_like(rows)
            for edge, of_rows, _ in found:
                edge.add_halo_grad(home, of_rows)
            home = halo.columns.cotangents(home)
            finish = start_returning(home, halo.exchange, halo.transport, halo.dim)
        grad_x, grad_weight, grad_bias = ctx.kernel.gradients(grad, padded, weight, wanted)
        if wanted[1]:
            for edge, _, of_taps in found:
                edge.add_weight_grad(grad_weight, of_taps)
        if wanted[0]:
            finish(halo.columns.inside(grad_x))
        return grad_x, grad_weight, grad_bias, None, None

"""Convolutions on one band of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from credit_dp.domain_parallel.exchange import (
    RowExchange,
    start_fetching,
    start_returning_gradients,
)
from credit_dp.domain_parallel.layers.base import Bands, StencilLayer, overridden_method
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError


def padding_widths(conv: _ConvNd) -> tuple[int, ...]:
    """Return a convolution's padding as `F.pad` takes it: west, east, north, south, ..."""
    return tuple(conv._reversed_padding_repeated_twice)


def is_pointwise(conv: _ConvNd, sides: tuple[int, ...], dim: int) -> bool:
    """Return whether every output entry along `dim` is made of the input entry of its index."""
    start = 2 * (-dim - 1)
    extra = (*sides[start : start + 2], conv.output_padding[dim])
    return (conv.kernel_size[dim], conv.stride[dim]) == (1, 1) and not any(extra)


class ConvLayer(StencilLayer):
    """A layer around an `nn.Conv*d` or `nn.ConvTranspose*d`, which is its `conv`.

    `row_dim`: where rows are in its input; settings of `conv` are indexed by it, from the end.

    Args:
        wrapped: the layer to shard, `conv` itself or a module around it.
        conv: the convolution.
        sides: padding on each side, west, east, north, south, ...
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
    """

    conv: Any
    row_dim: ClassVar[int] = ROW_DIM

    def __init__(
        self,
        wrapped: nn.Module,
        conv: _ConvNd,
        sides: tuple[int, ...],
        shard_dim: int,
        manager: DomainParallelManager | None,
    ) -> None:
        dim = self.row_dim
        reach = conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1
        halo_width = max(0, (reach - conv.stride[dim]) // 2)
        ndim = len(conv.kernel_size) + 2
        super().__init__(wrapped, shard_dim, manager, halo_width=halo_width, ndim=ndim)
        if wrapped is conv:
            self.__dict__["conv"] = conv
        self.halo_width = halo_width
        self.padding_widths = sides
        self.north, self.south = sides[2 * (-dim - 1) : -2 * dim]

    def _check_dim(self) -> None:
        if self.dim != self.row_dim:
            raise UserError(
                f"{type(self).__name__}: only latitude rows, its dimension {self.row_dim}, can be "
                f"sharded, got shard_dim={self.shard_dim}. Use shard_dim={self.row_dim}."
            )

    @property
    def _stride(self) -> int:
        return int(self.conv.stride[self.row_dim])

    @property
    def _kernel_extent(self) -> int:
        """Rows from the kernel's first to its last."""
        conv, dim = self.conv, self.row_dim
        return int(conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet in a spatial dimension; the audit sees whether they do among the channels.

        Raises:
            UserError: the kernel spans another spatial dimension with rows in it.
        """
        if dim == self.row_dim:
            return True
        if dim < -len(self.conv.kernel_size) or is_pointwise(self.conv, self.padding_widths, dim):
            return False
        raise UserError(
            f"{type(self).__name__}: rows are in dimension {dim}, along which its kernel mixes "
            f"them; it needs them in {self.row_dim}. Move them there before this layer."
        )


@final
@dataclass(frozen=True)
class ConvSettings:
    """Settings of a convolution with stride 1 along the rows.

    `padding`: zeros on both sides of every spatial dimension. `dim`: the rows', from the end.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dim: int

    def without_row_padding(self) -> ConvSettings:
        """Return the same without zeros north and south."""
        padding = list(self.padding)
        padding[self.dim] = 0
        return replace(self, padding=tuple(padding))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve a batch."""
        none = (0,) * len(self.padding)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups
        )

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> list[Tensor]:
        """Return the gradients of input, weight and bias, as far as wanted."""
        sizes = (list(s) for s in (self.stride, self.padding, self.dilation))
        none = [0] * len(self.padding)
        made: list[Tensor] = torch.ops.aten.convolution_backward(
            grad, x, weight, [len(weight)], *sizes, False, none, self.groups, list(wanted)
        )
        return made


@final
@dataclass(frozen=True)
class BandEdge:
    """What the halo on one side of a band adds to the band's rows at that edge.

    Args:
        settings: of the convolution, without padding along the rows.
        taps: those of the kernel's taps that meet the halo: the first and how many.
        halo: this side's rows of the whole halo: the first and how many.
        zeros: rows north and south of them that stand for the band, as far as the taps reach.
        reached_rows: the band's rows that are given something: the first and how many.
        skipped_rows: rows before those that the halo gives to more rows than the band has.
    """

    settings: ConvSettings
    taps: tuple[int, int]
    halo: tuple[int, int]
    zeros: tuple[int, int]
    reached_rows: tuple[int, int]
    skipped_rows: int

    def add(self, y: Tensor, halo: Tensor, weight: Tensor) -> None:
        """Add to the convolved band what the halo gives."""
        made = self.settings.convolve(self._rows_of(halo), self._taps_of(weight))
        dim = self.settings.dim
        y.narrow(dim, *self.reached_rows).add_(
            made.narrow(dim, self.skipped_rows, self.reached_rows[1])
        )

    def gradients(
        self, grad: Tensor, halo: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Return those of this side's halo and taps, as far as wanted, given the band's."""
        parts = (self._gradient_of_rows(grad), self._rows_of(halo), self._taps_of(weight))
        of_rows, of_taps, _ = self.settings.gradients(*parts, (*wanted, False))
        return of_rows, of_taps

    def add_halo_grad(self, total: Tensor, of_rows: Tensor) -> None:
        """Add the first of `gradients` to those of the whole halo."""
        dim, (first, number) = self.settings.dim, self.halo
        total.narrow(dim, first, number).add_(of_rows.narrow(dim, self.zeros[0], number))

    def add_weight_grad(self, total: Tensor, of_taps: Tensor) -> None:
        """Add the second of `gradients` to those of the whole weight."""
        self._taps_of(total).add_(of_taps)

    def _taps_of(self, weight: Tensor) -> Tensor:
        return weight.narrow(self.settings.dim, *self.taps)

    def _rows_of(self, halo: Tensor) -> Tensor:
        dim = self.settings.dim
        return _pad_rows(halo.narrow(dim, *self.halo), *self.zeros, dim).contiguous()

    def _gradient_of_rows(self, grad: Tensor) -> Tensor:
        dim, missing = self.settings.dim, self.halo[1] - self.reached_rows[1]
        rows = grad.narrow(dim, *self.reached_rows)
        return _pad_rows(rows, self.skipped_rows, missing - self.skipped_rows, dim).contiguous()


def _pad_rows(rows: Tensor, north: int, south: int, dim: int) -> Tensor:
    return F.pad(rows, (*(0, 0) * (-dim - 1), north, south)) if north or south else rows


def edges_of(kernel: ConvSettings, rows: int, taps: int) -> tuple[BandEdge, BandEdge]:
    """Return the northern and the southern edge of a band of `rows` rows.

    `kernel` has `taps` taps along the rows and pads by half of what they reach over, `width` rows.
    The halo is `width` rows north of the band followed by as many south of it.
    """
    width, reaching = kernel.padding[kernel.dim], taps // 2
    beside = kernel.dilation[kernel.dim] * (reaching - 1)
    met, bare = min(width, rows), kernel.without_row_padding()
    north = BandEdge(bare, (0, reaching), (0, width), (0, beside), (0, met), 0)
    last = (taps - reaching, reaching), (width, width), (beside, 0)
    return north, BandEdge(bare, *last, (rows - met, met), width - met)


@final
@dataclass(frozen=True)
class ColumnPadding:
    """Padding of every dimension but the rows', as `F.pad` takes it: that of the rows is zero."""

    padding_widths: tuple[int, ...]
    mode: str

    def pad(self, x: Tensor) -> Tensor:
        """Return `x` with its padding; equal sides may go around the globe several times."""
        left = self.padding_widths
        while any(left):
            turn = self._single_turn(left, x)
            x = F.pad(x, turn, mode=self.mode)
            left = tuple(a - b for a, b in zip(left, turn, strict=True))
        return x

    def _single_turn(self, sides: tuple[int, ...], x: Tensor) -> tuple[int, ...]:
        """Return what of the padding is made at once: of a circular one, a turn at most."""
        if self.mode != "circular":
            return sides
        return tuple(min(side, x.shape[-1 - at // 2]) for at, side in enumerate(sides))

    def unpad(self, padded: Tensor) -> Tensor:
        """View what is not padding."""
        for dim, (before, after) in enumerate(
            zip(self.padding_widths[::2], self.padding_widths[1::2], strict=True)
        ):
            if before or after:
                size = padded.shape[-1 - dim] - before - after
                padded = padded.narrow(-1 - dim, before, size)
        return padded

    def gradients(self, grad: Tensor) -> Tensor:
        """Return those of `x`, from those of `x` with its padding."""
        if not any(self.padding_widths):
            return grad
        with torch.enable_grad():
            x = torch.zeros_like(self.unpad(grad)).requires_grad_()
            return torch.autograd.grad(self.pad(x), x, grad)[0]


@final
@dataclass(frozen=True)
class Halo:
    """How a band gets the rows north and south of it: `exchange` brings them, north first.

    The columns' padding is not sent: each rank pads what it gets.
    """

    exchange: RowExchange
    transport: Transport
    column_padding: ColumnPadding
    dim: int

    def is_blank(self, edge: BandEdge) -> bool:
        """Return whether only zeros are on that side."""
        return edge.halo in self.exchange.zero_ranges


def convolve_band(
    padded: Tensor, weight: Tensor, bias: Tensor | None, kernel: ConvSettings, halo: Halo
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
        ctx: Any,
        padded: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel: ConvSettings,
        halo: Halo,
    ) -> Tensor:
        x = halo.column_padding.unpad(padded)
        finish = start_fetching(x, halo.exchange, halo.transport, halo.dim)
        y = kernel.convolve(padded, weight, bias)  # while the halo travels
        rows = halo.column_padding.pad(finish())
        both = edges_of(kernel, padded.shape[halo.dim], weight.shape[halo.dim])
        edges = [edge for edge in both if not halo.is_blank(edge)]
        for edge in edges:
            edge.add(y, rows, weight)
        ctx.save_for_backward(padded, weight, rows)
        ctx.settings, ctx.halo, ctx.edges = kernel, halo, edges
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, rows = ctx.saved_tensors
        halo, wanted = ctx.halo, tuple(ctx.needs_input_grad[:3])
        # Both at once, though only the halo's are waited for: they are of a few rows.
        found = [(edge, *edge.gradients(grad, rows, weight, wanted[:2])) for edge in ctx.edges]
        if wanted[0]:  # the same on every rank
            home = torch.zeros_like(rows)
            for edge, of_rows, _ in found:
                edge.add_halo_grad(home, of_rows)
            home = halo.column_padding.gradients(home)
            finish = start_returning_gradients(home, halo.exchange, halo.transport, halo.dim)
        grad_x, grad_weight, grad_bias = ctx.settings.gradients(grad, padded, weight, wanted)
        if wanted[1]:
            for edge, _, of_taps in found:
                edge.add_weight_grad(grad_weight, of_taps)
        if wanted[0]:
            finish(halo.column_padding.unpad(grad_x))
        return grad_x, grad_weight, grad_bias, None, None


# By number of spatial dimensions.
CONV_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class _RowConv(ConvLayer):
    """The geometry that all convolutions share: stride, kernel, and padding beyond the poles."""

    # Padding to be made first, and zeros that the convolution makes: none along the rows.
    column_padding: ColumnPadding
    zeros: tuple[int, ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._halos: dict[RowPartition, RowExchange] = {}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output: Dumoulin & Visin 2016, relationship 15."""
        return (height + self.north + self.south - self._kernel_extent) // self._stride + 1

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows under the kernel, padding included."""
        first = out.start * self._stride - self.north
        return first, (out.stop - 1) * self._stride - self.north + self._kernel_extent

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        if not self._has_equal_halos(bands):
            return self.convolve(self.column_padding.pad(self.fetch(x, bands)))
        conv, dim, zeros = self.conv, self.row_dim, list(self.zeros)
        zeros[dim] = self.north
        kernel = ConvSettings(conv.stride, tuple(zeros), conv.dilation, conv.groups, dim)
        halo = Halo(self._halo_of(bands.input), self.manager.transport, self.column_padding, dim)
        return convolve_band(self.column_padding.pad(x), self.weight, self.bias, kernel, halo)

    def _has_equal_halos(self, bands: Bands) -> bool:
        """Return whether a band of the output is made of that of the input and equal halos.

        Rows that come for several layers at once are glued to the band: it is copied once for all.
        """
        if self.shared_exchange is not None:
            return False
        symmetric = self.north == self.south == (self._kernel_extent - 1) / 2
        return bands.input == bands.output and self._stride == 1 and symmetric and self.north > 0

    def _halo_of(self, bands: RowPartition) -> RowExchange:
        exchange = self._halos.get(bands)
        if exchange is None:
            needs = tuple(self.halo(bands.rows(r), bands.height) for r in range(bands.ranks))
            exchange = self._halos[bands] = RowExchange(bands, needs, self.manager.domain_rank)
        return exchange

    @abstractmethod
    def convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows that are padded by `column_padding`. Reads the weight once."""


class _PaddedConv(_RowConv):
    """An `nn.Conv*d`, or a module that acts as one, which pads as its `padding_mode` says."""

    def __init__(
        self,
        conv: _ConvNd,
        shard_dim: int,
        manager: DomainParallelManager | None,
        wrapped: nn.Module | None = None,
    ) -> None:
        outer = conv if wrapped is None else wrapped
        super().__init__(outer, conv, padding_widths(conv), shard_dim, manager)
        self.pole_mode = conv.padding_mode
        north = 2 * (-self.row_dim - 1)
        sides = (*self.padding_widths[:north], 0, 0, *self.padding_widths[north + 2 :])
        none = (0,) * len(sides)
        if self.pole_mode == "zeros" and sides[::2] == sides[1::2]:
            self.column_padding, self.zeros = ColumnPadding(none, "constant"), sides[-2::-2]
        else:
            mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
            self.column_padding, self.zeros = ColumnPadding(sides, mode), none[::2]

    def convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows that are padded by `column_padding`."""
        conv, zeros = self.conv, self.zeros
        return CONV_FUNCTIONS[len(zeros)](
            rows, self.weight, self.bias, conv.stride, zeros, conv.dilation, conv.groups
        )


@final
class DomainParallelConv1d(_PaddedConv):
    """A `Conv1d` along the rows of one band, equal to that layer on the whole globe.

    Any kernel, stride, dilation, padding and padding mode, any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input, its last one.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local)` -> `(B, C_out, H_out_local)`; without `B` too.

    Raises:
        UserError: `shard_dim` is another one.
    """

    row_dim = -1

    def __init__(
        self,
        conv: nn.Conv1d,
        shard_dim: int = -1,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager)


@final
class DomainParallelConv2d(_PaddedConv):
    """A `Conv2d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, dilation, padding and padding mode, any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.

    Raises:
        UserError: `shard_dim` is not that of rows.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager)


@final
class DomainParallelConv3d(_PaddedConv):
    """A `Conv3d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, dilation, padding and padding mode, any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, T, H_local, W)` -> `(B, C_out, T_out, H_out_local, W_out)`; without `B` too.
        `T` may be times or levels.

    Raises:
        UserError: `shard_dim` is not that of rows.
    """

    def __init__(
        self,
        conv: nn.Conv3d,
        shard_dim: int = 3,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager)


@final
class DomainParallelPeriodicConv2d(_RowConv):
    """A longitude-periodic convolution on one band of rows, equal to it on the whole globe.

    Args:
        periodic_conv: a module that pads by `padding` on all sides, circular in longitude, and then
            applies `conv`, an `nn.Conv2d` without padding. Its `poles` say how latitude is padded
            (`reflect`, `zeros`, `mirror`, `earth`); without that attribute it reflects.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.

    Raises:
        UserError: the inner convolution pads.
    """

    def __init__(
        self,
        periodic_conv: Any,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        conv: nn.Conv2d = periodic_conv.conv
        if conv.padding not in ("valid", (0, 0)):
            raise UserError(
                f"{type(periodic_conv).__name__}: conv has to leave padding to the module around "
                f"it, got padding {conv.padding}. Give its Conv2d padding=0."
            )
        sides = (periodic_conv.padding,) * 4
        super().__init__(periodic_conv, conv, sides, shard_dim, manager)
        self.padding: int = periodic_conv.padding
        self.pole_mode = getattr(periodic_conv, "poles", "reflect")
        # Longitudes are wrapped here.
        self.column_padding = ColumnPadding((self.padding, self.padding, 0, 0), "circular")
        self.zeros = (0, 0)

    @property
    def weight(self) -> Tensor:
        """The kernel of the inner convolution."""
        return self.conv.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the inner convolution."""
        return self.conv.bias  # type: ignore[no-any-return]

    def _has_equal_halos(self, bands: Bands) -> bool:
        conv = self.conv
        hooked = conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks
        plain = not overridden_method(conv) and not hooked
        return plain and super()._has_equal_halos(bands)

    def convolve(self, rows: Tensor) -> Tensor:
        """Call the inner convolution: it may have hooks."""
        return self.conv(rows)  # type: ignore[no-any-return]

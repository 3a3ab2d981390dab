"""Convolutions on one band of rows.

There are two ways to compute a band:

- Any stride, kernel and partition: fetch all rows under the kernel, then convolve
  (`_RowConv.convolve`).
- Stride 1, equal halos north and south, equal bands in input and output, and no shared exchange
  (`convolve_band`): start fetching the halo, convolve the band with zeros in place of the halo,
  then add what the halo contributes at both edges (`BandEdge`). Convolution is linear, so the sum
  is exact, and the messages travel while the band is computed. Backward, the gradients of the edges
  come first, then the messages with the halo's gradient start, the gradients of the band are
  computed meanwhile, and the gradients that neighbours sent are added at the end. Compiled code
  does the same in the operators `credit_dp::convolve_band` and `credit_dp::band_gradients`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from credit_dp.domain_parallel.exchange import (
    RowExchange,
    RowRange,
    empty_rows_like,
    memory_format_of,
    merge_zeros,
    named_in_graphs,
    register_for_graphs,
    rows_with_poles,
    start_fetching,
    start_returning_gradients,
)
from credit_dp.domain_parallel.known_rows import Assembly, KnownRows
from credit_dp.domain_parallel.layers.base import Bands, StencilLayer, overridden_method
from credit_dp.domain_parallel.layers.pad import ColumnPadding
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.transport import Transport, keep_order, transport_named
from credit_dp.errors import UserError


def padding_widths(conv: _ConvNd) -> tuple[int, ...]:
    """Return the padding of a convolution in the order of `F.pad`: west, east, north, south, ..."""
    return tuple(conv._reversed_padding_repeated_twice)


def is_pointwise(conv: _ConvNd, padding: tuple[int, ...], dim: int) -> bool:
    """Return whether output entry `i` along `dim` depends on input entry `i` only."""
    start = 2 * (-dim - 1)
    padding_of_dim = (*padding[start : start + 2], conv.output_padding[dim])
    return (conv.kernel_size[dim], conv.stride[dim]) == (1, 1) and not any(padding_of_dim)


class ConvLayer(StencilLayer):
    """Base of the layers around an `nn.Conv*d` or `nn.ConvTranspose*d`, their `conv`.

    `row_dim` is the row dimension of the input, counted from the end; it also indexes the settings
    of `conv`.

    Args:
        wrapped: the layer to shard, `conv` itself or a module around it.
        conv: the convolution.
        padding_widths: padding in the order of `F.pad`: west, east, north, south, ...
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
    """

    conv: Any
    row_dim: ClassVar[int] = ROW_DIM

    def __init__(
        self,
        wrapped: nn.Module,
        conv: _ConvNd,
        padding_widths: tuple[int, ...],
        shard_dim: int,
        manager: DomainParallelManager | None,
    ) -> None:
        dim = self.row_dim
        kernel_extent = conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1
        halo_width = max(0, (kernel_extent - conv.stride[dim]) // 2)
        ndim = len(conv.kernel_size) + 2
        super().__init__(wrapped, shard_dim, manager, halo_width=halo_width, ndim=ndim)
        if wrapped is conv:
            self.__dict__["conv"] = conv
        self.halo_width = halo_width
        self.padding_widths = padding_widths
        self.north, self.south = padding_widths[2 * (-dim - 1) : -2 * dim]

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
        """Rows that the dilated kernel spans."""
        conv = self.conv
        dim = self.row_dim
        return int(conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether the kernel couples rows along `dim`.

        Along channels or samples it does not; the audit checks those.

        Raises:
            UserError: the rows are in a spatial dimension that this layer does not shard.
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
        rows = _pad_rows(halo.narrow(dim, *self.halo), *self.zeros, dim)
        return rows.contiguous(memory_format=memory_format_of(halo))

    def _gradient_of_rows(self, grad: Tensor) -> Tensor:
        # The adjoint of `add`: zeros stand for the output rows that this band does not own.
        dim = self.settings.dim
        missing = self.halo[1] - self.reached_rows[1]
        rows = grad.narrow(dim, *self.reached_rows)
        rows = _pad_rows(rows, self.skipped_rows, missing - self.skipped_rows, dim)
        return rows.contiguous(memory_format=memory_format_of(grad))


def _pad_rows(rows: Tensor, north: int, south: int, dim: int) -> Tensor:
    return F.pad(rows, (*(0, 0) * (-dim - 1), north, south)) if north or south else rows


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
        known: rows of the halo that were fetched before; gets those that are fetched now.

    Shapes:
        `(B, C_in, ..., H_local, W)` -> `(B, C_out, ..., H_local, W_out)`; without `B` too.
    """
    x, weight, bias = _batched_operands(padded, weight, bias)
    if known is None:
        y = _BandConv.apply(x, weight, bias, settings, halo, False, None)  # type: ignore[no-untyped-call]
    elif not known:
        y, rows = _BandConv.apply(x, weight, bias, settings, halo, True, None)  # type: ignore[no-untyped-call]
        known.add(halo.exchange, rows)
    else:
        assembly, (_, *others) = known.find(halo.exchange, x, halo.transport, halo.dim)
        y = _BandConv.apply(x, weight, bias, settings, halo, False, assembly, *others)  # type: ignore[no-untyped-call]
    return y[0] if padded.ndim < x.ndim else y  # type: ignore[no-any-return]


def _batched_operands(
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

    The rows of the halo are fetched, and returned if `returns_rows`, or put together from rows that
    earlier calls have returned (`assembly` of the band and `known`). Saves the same number of
    tensors on every rank: activation checkpointing compares the numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        padded: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvSettings,
        halo: Halo,
        returns_rows: bool,
        assembly: Assembly | None,
        *known: Tensor,
    ) -> Any:
        if assembly is None:
            finish = halo.fetch(padded)
        else:
            finish = partial(assembly.join, (padded, *known), padded, halo.dim)
        y, rows = _convolve_with_halo(padded, weight, bias, settings, halo, finish)
        if assembly is None and not halo.is_wide:
            known = (rows,)
        ctx.save_for_backward(padded, weight, *known)
        ctx.settings = settings
        ctx.halo = halo
        ctx.assembly = assembly
        if not returns_rows:
            return y
        ctx.set_materialize_grads(False)  # maybe nobody reads the rows
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(rows)
        return y, rows

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_of_rows: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        padded, weight, *kept = ctx.saved_tensors
        settings, halo, assembly = ctx.settings, ctx.halo, ctx.assembly
        if assembly is None:
            rows = kept[0] if kept else None
        else:
            rows = assembly.join((padded, *kept), padded, halo.dim)
        needs_grad = tuple(ctx.needs_input_grad[:3])
        if grad is None:  # nobody has used the convolution, only its rows
            grad = torch.zeros_like(settings.convolve(padded, weight))
        grads_of_known: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 7)

        def return_gradients(halo_grad: Tensor) -> Callable[[Tensor], None]:
            if grad_of_rows is not None:
                halo_grad = halo_grad + grad_of_rows
            if assembly is None:
                return halo.return_gradients(halo_grad)  # type: ignore[no-any-return]
            # Those who have fetched the rows return their gradients.
            _, *grads_of_known[:] = assembly.gradients(halo_grad, (padded, *kept), halo.dim)
            return lambda _: None

        grads = _band_gradients(
            grad, padded, weight, rows, needs_grad, settings, halo, return_gradients
        )
        return *grads, *(None,) * 4, *grads_of_known


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
def _convolve_band_operator(
    padded: Tensor, weight: Tensor, bias: Tensor | None, conv: str, transport: str
) -> tuple[Tensor, Tensor]:
    plan: CompiledConv = named_in_graphs(conv)
    halo = plan.halo(transport)
    memory_format = memory_format_of(padded)
    y, rows = _convolve_with_halo(padded, weight, bias, plan.settings, halo, halo.fetch(padded))
    kept = rows.new_empty(0) if halo.is_wide else rows.contiguous(memory_format=memory_format)
    return y.contiguous(memory_format=memory_format), kept


@_convolve_band_operator.register_fake
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


_convolve_band_operator.register_autograd(_gradients_of_operands, setup_context=_keep_operands)
keep_order(_convolve_band_operator, _band_gradients_operator)


# Keys: the number of spatial dimensions.
CONV_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class _RowConv(ConvLayer):
    """Geometry that all convolutions share: stride, kernel, and padding beyond the poles."""

    # Padding to add before the convolution, and zeros that the convolution itself adds in each
    # spatial dimension. Neither pads rows: those come from the exchange.
    column_padding: ColumnPadding
    zeros: tuple[int, ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._halo_exchanges: dict[RowPartition, RowExchange] = {}
        # By global input height, for compiled code: the name of a `CompiledConv`, or nothing if the
        # rows are fetched first.
        self._compiled_convs: dict[int, str] = {}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global output height.

        Source: Dumoulin & Visin 2016, relationship 15.
        """
        return (height + self.north + self.south - self._kernel_extent) // self._stride + 1

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows under the kernel, padding included."""
        first = out.start * self._stride - self.north
        return first, (out.stop - 1) * self._stride - self.north + self._kernel_extent

    def rows_between(self, start: int, stop: int, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return rows under the kernel, with zeros where a wide dilation leaves gaps."""
        dilation = int(self.conv.dilation[self.row_dim])
        rows_under_tap = (out.stop - out.start - 1) * self._stride + 1
        if dilation <= rows_under_tap:
            return super().rows_between(start, stop, out, height)
        ranges: list[RowRange] = []
        for tap in range(self.conv.kernel_size[self.row_dim]):
            first = out.start * self._stride - self.north + tap * dilation
            # The rows under this tap, and those up to the next one.
            edges = (first, first + rows_under_tap, first + dilation)
            under, gap = ((max(edges[i], start), min(edges[i + 1], stop)) for i in range(2))
            if under[0] < under[1]:
                ranges += rows_with_poles(*under, height, self.pole_mode)
            if gap[0] < gap[1]:
                ranges.append(RowRange(0, gap[1] - gap[0], zero_filled=True))
        return merge_zeros(ranges)

    def compute(self, x: Tensor, bands: Bands, known: KnownRows | None = None) -> Tensor:
        """Return this rank's output rows; `known` has rows that other convolutions have fetched."""
        if torch.compiler.is_dynamo_compiling():  # nothing of the global view, so no known rows
            return self._compute_compiled(x, bands)
        if self.pole_mode != "zeros" or any(self.column_padding.padding_widths):
            known = None
        if not self._can_overlap(bands):  # fetch first, then convolve
            return self.convolve(self.column_padding.pad(self._fetch(x, bands, known)))
        dim = self.row_dim
        halo = Halo(self._halo_of(bands.input), self.manager.transport, self.column_padding, dim)
        padded = self.column_padding.pad(x)
        settings = self._overlap_settings()
        return convolve_band(padded, self.weight, self.bias, settings, halo, known)

    def _fetch(self, x: Tensor, bands: Bands, known: KnownRows | None) -> Tensor:
        """Return the rows under the kernel, of which some may be known."""
        exchange = self.exchange(bands)
        if known is None or exchange.is_identity:
            return self.fetch(x, bands)
        transport = self.manager.transport
        if not known:
            rows = self.fetch(x, bands)
            known.add(exchange, rows)
            return rows
        assembly, sources = known.find(exchange, x, transport, self.row_dim)
        return assembly.join(sources, x, self.row_dim)

    def _compute_compiled(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows, in terms that torch's compiler can follow."""
        conv = self._compiled_convs[bands.input.height]
        if not conv:
            return self.convolve(self.column_padding.pad(self.fetch(x, bands)))
        padded = self.column_padding.pad(x)
        batch, weight, bias = _batched_operands(padded, self.weight, self.bias)
        transport = self.manager.transport.name
        y: Tensor
        y, _ = _convolve_band_operator(batch, weight, bias, conv, transport)
        return y[0] if padded.ndim < batch.ndim else y

    def prepare_height(self, bands: Bands) -> None:
        """Collect what compiled code needs of the plan at one height."""
        super().prepare_height(bands)
        name = ""
        # An operator can't differentiate torch's padding by itself: see `ColumnPadding.gradients`.
        padding = self.column_padding
        is_linear = padding.mode == "circular" or not any(padding.padding_widths)
        if is_linear and self._can_overlap(bands):
            exchange = self._halo_of(bands.input)
            name = register_for_graphs(CompiledConv(self._overlap_settings(), exchange, padding))
        self._compiled_convs[bands.input.height] = name

    def _overlap_settings(self) -> ConvSettings:
        """Return settings with zeros in place of the halo."""
        conv = self.conv
        zeros = list(self.zeros)
        zeros[self.row_dim] = self.north
        return ConvSettings(conv.stride, tuple(zeros), conv.dilation, conv.groups, self.row_dim)

    def _can_overlap(self, bands: Bands) -> bool:
        """Return whether the band can be convolved while its halo travels.

        Not with a shared exchange: its rows arrive joined to the band, copied once for all layers.
        """
        if self.shared_exchange is not None:
            return False
        symmetric = self.north == self.south == (self._kernel_extent - 1) / 2
        return bands.input == bands.output and self._stride == 1 and symmetric and self.north > 0

    def _halo_of(self, bands: RowPartition) -> RowExchange:
        exchange = self._halo_exchanges.get(bands)
        if exchange is None:
            halos = tuple(self.halo(bands.rows(r), bands.height) for r in range(bands.ranks))
            exchange = RowExchange(bands, halos, self.manager.domain_rank)
            self._halo_exchanges[bands] = exchange
        return exchange

    @abstractmethod
    def convolve(self, rows: Tensor) -> Tensor:
        """Return the convolution of fetched rows that have `column_padding`.

        Reads the weight once: a parametrised weight is computed at each access.
        """


class _PaddedConv(_RowConv):
    """An `nn.Conv*d`, or a module that acts like one, with its `padding_mode`."""

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
        without_rows = (*self.padding_widths[:north], 0, 0, *self.padding_widths[north + 2 :])
        no_padding = (0,) * len(without_rows)
        # Equal zeros on both sides can be left to the convolution, which saves a copy of the input.
        if self.pole_mode == "zeros" and without_rows[::2] == without_rows[1::2]:
            self.column_padding = ColumnPadding(no_padding, "constant")
            self.zeros = without_rows[-2::-2]
        else:
            mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
            self.column_padding = ColumnPadding(without_rows, mode)
            self.zeros = no_padding[::2]

    def convolve(self, rows: Tensor) -> Tensor:
        """Return the convolution of fetched rows that have `column_padding`."""
        conv = self.conv
        zeros = self.zeros
        return CONV_FUNCTIONS[len(zeros)](
            rows, self.weight, self.bias, conv.stride, zeros, conv.dilation, conv.groups
        )


@final
class DomainParallelConv1d(_PaddedConv):
    """A `Conv1d` along the rows of one band, equal to that layer on the whole globe.

    Supports every kernel, stride, dilation, padding and padding mode, and any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input, its last one.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local)` -> `(B, C_out, H_out_local)`; without `B` too.

    Raises:
        UserError: `shard_dim` is not the last dimension.
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

    Supports every kernel, stride, dilation, padding and padding mode, and any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.

    Raises:
        UserError: `shard_dim` is not the last dimension but one.
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

    Supports every kernel, stride, dilation, padding and padding mode, and any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, T, H_local, W)` -> `(B, C_out, T_out, H_out_local, W_out)`; without `B` too.
        `T` are times or levels.

    Raises:
        UserError: `shard_dim` is not the last dimension but one.
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
            applies `conv`, an `nn.Conv2d` without padding. Its `poles` attribute is the padding in
            latitude: `reflect` (the default), `zeros`, `mirror` or `earth`.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.

    Raises:
        UserError: the inner convolution has padding.
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
                f"it, got padding {conv.padding}. Set padding=0 in its Conv2d."
            )
        widths = (periodic_conv.padding,) * 4
        super().__init__(periodic_conv, conv, widths, shard_dim, manager)
        self.padding: int = periodic_conv.padding
        self.pole_mode = getattr(periodic_conv, "poles", "reflect")
        # Padding in longitude needs no messages: bands hold complete rows.
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

    def _can_overlap(self, bands: Bands) -> bool:
        # The overlapped path does not call the inner module: its hooks and overrides would not run.
        conv = self.conv
        hooked = conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks
        plain = not overridden_method(conv) and not hooked
        return plain and super()._can_overlap(bands)

    def convolve(self, rows: Tensor) -> Tensor:
        """Call the inner convolution as a module, as it may have hooks."""
        return self.conv(rows)  # type: ignore[no-any-return]

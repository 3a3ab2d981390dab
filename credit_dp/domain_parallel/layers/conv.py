"""Convolutions on one band of rows.

There are two ways to compute a band:

- Any stride, kernel and partition: fetch all rows under the kernel, then convolve
  (`_RowConv.convolve`).
- Stride 1, equal halos north and south, equal bands in input and output, and no shared exchange:
  convolve the band while the halo travels (`conv_bands.convolve_band`). Not bands of few entries:
  to convolve their edges separately takes longer than the halo travels.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.convolutions import ConvSettings, Halo
from credit_dp.domain_parallel.bands.rows import Windows
from credit_dp.domain_parallel.exchange import RowExchange, RowRange, register_for_graphs
from credit_dp.domain_parallel.layers import base
from credit_dp.domain_parallel.layers.base import (
    Bands,
    StencilLayer,
    largest_band_entries,
    overridden_method,
)
from credit_dp.domain_parallel.layers.conv_bands import (
    CONV_FUNCTIONS,
    CompiledConv,
    batched_operands,
    convolve_band,
    convolve_band_operator,
)
from credit_dp.domain_parallel.layers.pad import ColumnPadding, column_padding_of
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.errors import UserError
from credit_dp.torch_private import has_hooks, padding_widths

# They differ in their numbers of dimensions, and in whether they are transposed.
Conv = nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d


def is_pointwise(conv: Conv, padding: tuple[int, ...], dim: int) -> bool:
    """Return whether output entry `i` along `dim` depends on input entry `i` only."""
    start = 2 * (-dim - 1)
    dim_padding = (*padding[start : start + 2], conv.output_padding[dim])
    return (conv.kernel_size[dim], conv.stride[dim]) == (1, 1) and not any(dim_padding)


class ConvLayer(StencilLayer):
    """Base of the layers around an `nn.Conv*d` or `nn.ConvTranspose*d`, their `conv`.

    Args:
        wrapped: the layer to shard, `conv` itself or a module around it.
        padding_widths: padding in the order of `F.pad`: west, east, north, south, ...
    """

    conv: Any

    def __init__(
        self,
        wrapped: nn.Module,
        conv: Conv,
        padding_widths: tuple[int, ...],
        shard_dim: int,
        manager: DomainParallelManager | None,
    ) -> None:
        dim = ROW_DIM
        kernel_extent = conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1
        halo_width = max(0, (kernel_extent - conv.stride[dim]) // 2)
        ndim = len(conv.kernel_size) + 2
        super().__init__(wrapped, shard_dim, manager, halo_width=halo_width, ndim=ndim)
        if wrapped is conv:
            self.__dict__["conv"] = conv
        self.halo_width = halo_width
        self.padding_widths = padding_widths
        self.north, self.south = padding_widths[2 * (-dim - 1) : -2 * dim]

    @property
    def _stride(self) -> int:
        return int(self.conv.stride[ROW_DIM])

    @property
    def _windows(self) -> Windows:
        conv = self.conv
        dim = ROW_DIM
        return Windows(conv.kernel_size[dim], self._stride, self.north, conv.dilation[dim])

    @property
    def _kernel_extent(self) -> int:
        return self._windows.extent

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether the kernel couples rows along `dim`.

        Along channels or samples it does not.
        """
        if dim == ROW_DIM:
            return True
        if dim < -len(self.conv.kernel_size) or is_pointwise(self.conv, self.padding_widths, dim):
            return False
        raise UserError(
            f"{type(self).__name__}: rows are in dimension {dim}, along which its kernel mixes "
            f"them; it needs them in {ROW_DIM}. Move them there before this layer."
        )


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
        return self._windows.out_height(height, self.south)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        return self._windows.span(out)

    def rows_between(self, start: int, stop: int, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return rows under the kernel, with zeros where a wide dilation leaves gaps."""
        return self._windows.rows_between(start, stop, out, height, self.pole_mode)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self._compute_compiled(x, bands)
        if self._is_small(x, bands.input) or not self._can_overlap(bands):
            # fetch first, then convolve
            return self.convolve(self.column_padding.pad(self.fetch(x, bands)))
        dim = ROW_DIM
        halo = Halo(self._halo_of(bands.input), self.manager.transport, self.column_padding, dim)
        padded = self.column_padding.pad(x)
        settings = self._overlap_settings()
        return convolve_band(padded, self.weight, self.bias, settings, halo)

    def _is_small(self, x: Tensor, bands: RowPartition) -> bool:
        """Return whether to fetch rows first, with the same answer on all ranks."""
        # Where columns are padded, the band is copied in either way, and both take as long at 16
        # times as many entries.
        copies_anyway = base.computes_on_cpu(x) and any(self.column_padding.padding_widths)
        limit = base.SMALL_BAND_ENTRIES * (16 if copies_anyway else 1)
        return largest_band_entries(x, ROW_DIM, bands) <= limit

    def _compute_compiled(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows, in terms that torch's compiler can follow."""
        conv = self._compiled_convs[bands.input.height]
        if not conv or self._is_small(x, bands.input):
            return self.convolve(self.column_padding.pad(self.fetch(x, bands)))
        padded = self.column_padding.pad(x)
        batch, weight, bias = batched_operands(padded, self.weight, self.bias)
        transport = self.manager.transport.name
        y: Tensor
        y, _ = convolve_band_operator(batch, weight, bias, conv, transport)
        return y[0] if padded.ndim < batch.ndim else y

    def prepare_height(self, bands: Bands) -> None:
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
        zeros[ROW_DIM] = self.north
        return ConvSettings(conv.stride, tuple(zeros), conv.dilation, conv.groups, ROW_DIM)

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
        conv: Conv,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
        wrapped: nn.Module | None = None,
    ) -> None:
        outer = conv if wrapped is None else wrapped
        super().__init__(outer, conv, padding_widths(conv), shard_dim, manager)
        self.pole_mode = conv.padding_mode
        north = 2 * (-ROW_DIM - 1)
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
        conv = self.conv
        zeros = self.zeros
        return CONV_FUNCTIONS[len(zeros)](
            rows, self.weight, self.bias, conv.stride, zeros, conv.dilation, conv.groups
        )


@final
class DomainParallelConv2d(_PaddedConv):
    """A `Conv2d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride, dilation, padding and padding mode, and any bands.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.
    """


@final
class DomainParallelConv3d(_PaddedConv):
    """A `Conv3d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride, dilation, padding and padding mode, and any bands.

    Shapes:
        `(B, C_in, T, H_local, W)` -> `(B, C_out, T_out, H_out_local, W_out)`; without `B` too.
        `T` are times or levels.
    """

    def __init__(
        self,
        conv: nn.Conv3d,
        shard_dim: int = 3,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager=manager)


@final
class DomainParallelPeriodicConv2d(_RowConv):
    """A longitude-periodic convolution on one band of rows, equal to it on the whole globe.

    Args:
        periodic_conv: a module that pads by `padding` on all sides and then applies `conv`, an
            `nn.Conv2d` without padding. Its `poles` attribute is the padding in latitude: `reflect`
            (the default), `zeros`, `replicate`, `mirror` or `earth`; its `column_mode` that in
            longitude: `circular` (the default), `zeros`, `replicate` or `reflect`.

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
        self.column_padding = column_padding_of(periodic_conv, self.padding)
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
        hooked = has_hooks(conv)
        plain = not overridden_method(conv) and not hooked
        return plain and super()._can_overlap(bands)

    def convolve(self, rows: Tensor) -> Tensor:
        """Call the inner convolution as a module, as it may have hooks."""
        return self.conv(rows)  # type: ignore[no-any-return]

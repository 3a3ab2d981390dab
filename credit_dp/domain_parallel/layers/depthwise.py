"""Depthwise convolutions on one band of rows, with kernels up to the whole globe and beyond.

A kernel that spans many bands would fetch most of the globe. As the channels of a depthwise
convolution are independent, the ranks can instead transpose: each receives all rows of some
channels, convolves them, and sends the output rows back. The plan chooses what sends less.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.channel_parallel import (
    DistributedDepthwiseConv2d,
    Transposition,
    channel_slice,
    channels_per_rank,
    channels_to_rows,
    rows_to_channels,
    transpose_blocks,
)
from credit_dp.domain_parallel.count_transport import received_row_counts
from credit_dp.domain_parallel.exchange import named_in_graphs, register_for_graphs
from credit_dp.domain_parallel.layers.base import Bands
from credit_dp.domain_parallel.layers.conv import _PaddedConv
from credit_dp.domain_parallel.layers.pad import ColumnPadding
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.transport import keep_order, transport_named
from credit_dp.errors import UserError

CHANNEL_DIM = -3


class DepthwiseLayer(_PaddedConv):
    """Fetches the rows under its kernel, or transposes rows to channels if that sends less.

    The plan decides by the bytes that all ranks together send in a forward; without a plan rows are
    fetched. A rank's gradients of weight and bias come from its rows or from its channels. In both
    cases their sum over the ranks is the gradient.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transposed_heights: frozenset[int] = frozenset()
        # Global input height -> columns of the input and of the output.
        self._column_counts: dict[int, tuple[int, int]] = {}
        # By global input height, for compiled code: names of the transposes of `transpose_pair`,
        # and this rank's output channels, from and to.
        self._compiled_transposes: dict[int, tuple[str, str, int, int]] = {}

    def global_forward(self, x: Tensor, *others: Tensor) -> Any:
        """Apply the wrapped layer to the whole globe; while planning, record the columns."""
        y = super().global_forward(x, *others)
        if active_planner() is not None:
            self._column_counts[x.shape[ROW_DIM]] = x.shape[-1], y.shape[-1]
        return y

    def set_plan(self, dim: int, heights: dict[int, int]) -> None:
        """Adopt the plan and choose between halo and transpose for each global height."""
        # The choice depends on global sizes only: all ranks have to run the same collectives.
        super().set_plan(dim, heights)
        table = self.manager.bands
        pairs = (
            Bands(table[in_height], table[out_height]) for in_height, out_height in heights.items()
        )
        self._transposed_heights = frozenset(
            pair.input.height for pair in pairs if self._transpose_moves_less(pair)
        )

    def transposes(self, height: int) -> bool:
        """Return whether inputs of this global height are transposed from rows to channels."""
        return height in self._transposed_heights

    def fetches_halo(self, height: int) -> bool:
        """Return whether the rows under the kernel are fetched."""
        return not self.transposes(height)

    def transpose_pair(self, bands: Bands) -> tuple[Transposition, Transposition]:
        """Return the transposes of the input to channels and of the output back to rows."""
        conv = self.conv
        ranks = bands.input.ranks
        in_channels = channels_per_rank(conv.in_channels, ranks)
        out_channels = tuple(
            number * (conv.out_channels // conv.in_channels) for number in in_channels
        )
        to_channels = Transposition(bands.input.sizes, in_channels)
        to_rows = Transposition(bands.output.sizes, out_channels)
        return to_channels, to_rows

    def _transpose_moves_less(self, bands: Bands) -> bool:
        """Return whether the transposes send no more than a halo would.

        Equal amounts favour the transpose, which convolves each row once.
        """
        in_columns, out_columns = self._column_counts.get(bands.input.height, (1, 1))
        routes = received_row_counts(bands.input, self.exchange(bands).required_rows)
        rows_fetched = sum(rows for received in routes for _, rows in received)
        to_channels, to_rows = self.transpose_pair(bands)
        entries_transposed = (
            to_channels.total_rows_sent(to_channels=True) * in_columns
            + to_rows.total_rows_sent(to_channels=False) * out_columns
        )
        entries_fetched: int = rows_fetched * self.conv.in_channels * in_columns
        return 0 < entries_transposed <= entries_fetched

    @property
    def title(self) -> str:
        """The type and the plan's choice: halo, transpose or both."""
        methods = {
            "transpose" if self.transposes(height) else "halo" for height in self.planned_heights
        }
        return f"{super().title} ({' and '.join(sorted(methods)) or 'halo'})"

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        if not self.transposes(bands.input.height):
            return super().compute(x, bands)
        if torch.compiler.is_dynamo_compiling():
            return self._compute_by_compiled_channels(x, bands)
        return self._compute_by_channels(x, bands)

    def prepare_height(self, bands: Bands) -> None:
        """Collect what compiled code needs of the plan at one height."""
        super().prepare_height(bands)
        height = bands.input.height
        if self.transposes(height):
            to_channels, to_rows = self.transpose_pair(bands)
            own = channel_slice(to_rows.channels, self.manager.domain_rank)
            names = register_for_graphs(to_channels), register_for_graphs(to_rows)
            self._compiled_transposes[height] = (*names, own.start, own.stop)

    def _compute_by_compiled_channels(self, x: Tensor, bands: Bands) -> Tensor:
        to_channels, to_rows, start, stop = self._compiled_transposes[bands.input.height]
        transport = self.manager.transport.name
        globe = _transpose_operator(x, to_channels, transport, True)
        y = self._convolve_globe(globe, slice(start, stop))
        rows: Tensor = _transpose_operator(y, to_rows, transport, False)
        return rows

    def _compute_by_channels(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows: each rank convolves all rows of some channels."""
        to_channels, to_rows = self.transpose_pair(bands)
        transport = self.manager.transport
        globe = rows_to_channels(x, to_channels.rows, transport, to_channels.channels)
        y = self._convolve_globe(globe, channel_slice(to_rows.channels, self.manager.domain_rank))
        return channels_to_rows(y, to_rows.rows, transport, to_rows.channels)

    def _convolve_globe(self, globe: Tensor, out_channels: slice) -> Tensor:
        """Return the convolution of all rows of this rank's channels: the slice `out_channels`."""
        conv = self.conv
        channels = globe.shape[CHANNEL_DIM]
        if not channels:
            # A rank without channels convolves one channel of zeros: activation checkpointing needs
            # the same number of saved tensors on every rank.
            globe = F.pad(globe, (0, 0, 0, 0, 0, 1))
            out_channels = slice(0, conv.out_channels // conv.in_channels)
        globe = self.column_padding.pad(globe)
        zeros = (0, self.zeros[-1])
        if self.pole_mode == "zeros" and self.north == self.south:
            zeros = (self.north, zeros[-1])
        else:
            mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
            globe = F.pad(globe, (0, 0, self.north, self.south), mode=mode)
        # Slices of the parameters: gradients of other ranks' channels are zero here.
        weight = self.weight[out_channels]
        bias = self.bias
        bias = None if bias is None else bias[out_channels]
        groups = globe.shape[CHANNEL_DIM]
        y = F.conv2d(globe, weight, bias, conv.stride, zeros, conv.dilation, groups)
        return y if channels else y.narrow(CHANNEL_DIM, 0, 0)


@torch.library.custom_op("credit_dp::transpose", mutates_args=())
def _transpose_operator(x: Tensor, transposition: str, transport: str, to_channels: bool) -> Tensor:
    y = transpose_blocks(x, named_in_graphs(transposition), transport_named(transport), to_channels)
    return y.contiguous()


@_transpose_operator.register_fake
def _(x: Tensor, transposition: str, transport: str, to_channels: bool) -> Tensor:
    transpose: Transposition = named_in_graphs(transposition)
    return x.new_empty(transpose.shape_on(transport_named(transport).rank, x, to_channels))


def _keep_transpose(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.transposition, ctx.transport, ctx.to_channels = inputs


def _transpose_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = _transpose_operator(grad, ctx.transposition, ctx.transport, not ctx.to_channels)
    return grad_x, None, None, None


_transpose_operator.register_autograd(_transpose_back, setup_context=_keep_transpose)
keep_order(_transpose_operator)


@final
class DomainParallelDepthwiseConv2d(DepthwiseLayer):
    """A depthwise `Conv2d` on one band of rows, equal to that layer on the whole globe.

    The convolution has one group per input channel, each with one or more output channels. Supports
    every kernel, stride, dilation, padding and padding mode, and any bands. With a plan it
    transposes rows to channels where that sends less than fetching rows; a rank may then have no
    channel.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        if conv.groups != conv.in_channels:
            raise UserError(
                f"DomainParallelDepthwiseConv2d: needs one group per channel, got "
                f"{conv.groups} groups of {conv.in_channels} channels. Use DomainParallelConv2d."
            )
        super().__init__(conv, shard_dim, manager=manager)


@final
class DomainParallelDistributedDepthwiseConv2d(DepthwiseLayer):
    """A `DistributedDepthwiseConv2d` on one band of rows, equal to that layer on the whole globe.

    The ranks hold bands of rows and, where that sends less, transpose them to channels inside the
    layer. It replaces the layer's own channel parallelism, so `cp_group` must be None.

    Shapes:
        `(B, C, H_local, W)` -> the same.
    """

    def __init__(
        self,
        depthwise: DistributedDepthwiseConv2d,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        settings = _as_conv(depthwise)
        super().__init__(settings, shard_dim, manager=manager, wrapped=depthwise)
        self.__dict__["conv"] = settings  # not a child: its weight is never used

    @property
    def weight(self) -> Tensor:
        """The kernels in the layout of `nn.Conv2d`, `(C, 1, k_H, k_W)`."""
        expanded: Tensor = self.wrapped.expand_to_channels(self.wrapped.weight)
        return expanded[:, None]

    @property
    def bias(self) -> Tensor | None:
        """The bias of each channel, `(C,)`."""
        bias: Tensor | None = self.wrapped.bias
        return None if bias is None else self.wrapped.expand_to_channels(bias)

    def forward(self, x: Tensor, *others: Any, cp_group: Any = None) -> Any:
        """Return this rank's rows of the output that the layer has on the whole globe."""
        if any(argument is not None for argument in (*others, cp_group)):
            raise UserError(
                "DistributedDepthwiseConv2d: its rows are sharded, which leaves no channels to "
                "share. Call it without cp_group in a model with parallel.domain above 1."
            )
        return super().forward(x)


@final
class DomainParallelLongRangeConv2d(DepthwiseLayer):
    """A depthwise convolution, by default circular in longitude, on one band of rows.

    Padding in longitude sends nothing: each rank pads its own rows.

    Args:
        layer: an `nn.Conv2d` with one group per channel. Its forward first pads `column_padding`
            circular columns on both sides, maybe more than the globe has; if 0, columns are padded
            as rows are, by the convolution.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.
    """

    def __init__(
        self,
        layer: Any,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(layer, shard_dim, manager=manager)
        width = layer.column_padding
        if width:
            self.padding_widths = (width, width, self.north, self.south)
            self.column_padding = ColumnPadding((width, width, 0, 0), "circular")
            self.zeros = (0, 0)

    def _refuse_overridden_behaviour(self, wrapped: nn.Module) -> None:
        """Accept the overridden forward: this class reproduces it."""


def _as_conv(depthwise: DistributedDepthwiseConv2d) -> nn.Conv2d:
    channels = depthwise.hidden_dim
    return nn.Conv2d(
        channels, channels, depthwise.kernel_size, padding="same", groups=channels, bias=False,
        device="meta",
    )  # fmt: skip

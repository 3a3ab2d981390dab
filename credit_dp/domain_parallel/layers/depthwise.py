"""Depthwise convolutions on one band of rows, with kernels up to the whole globe and beyond."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.channel_parallel import (
    DistributedDepthwiseConv2d,
    TransposePlan,
    channel_slice,
    channels_per_rank,
    channels_to_rows,
    rows_to_channels,
)
from credit_dp.domain_parallel.count_transport import received_row_counts
from credit_dp.domain_parallel.layers.base import Bands
from credit_dp.domain_parallel.layers.conv import ColumnPadding, _PaddedConv
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.planner import active_planner
from credit_dp.errors import UserError

CHANNEL_DIM = -3


class DepthwiseLayer(_PaddedConv):
    """Fetches the rows under its kernel or trades rows for channels, whichever moves less.

    The plan decides, by the bytes that all ranks together send in a forward, and so alike on every
    rank; without a plan rows are fetched. Gradients of weights and biases are those of this rank's
    rows or of its channels: either way their sum over the ranks is the gradient.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transposed_heights: frozenset[int] = frozenset()
        # By global height: columns of the input and of the output.
        self._column_counts: dict[int, tuple[int, int]] = {}

    def global_forward(self, x: Tensor, *others: Tensor) -> Any:
        """Return what the layer makes of the whole globe, and note its columns while planning."""
        made = super().global_forward(x, *others)
        if active_planner() is not None:
            self._column_counts[x.shape[ROW_DIM]] = x.shape[-1], made.shape[-1]
        return made

    def set_plan(self, dim: int, planned: dict[int, int]) -> None:
        """Adopt where the plan found rows, and decide for each global height."""
        super().set_plan(dim, planned)
        table = self.manager.bands
        bands = (Bands(table[taken], table[made]) for taken, made in planned.items())
        self._transposed_heights = frozenset(
            its.input.height for its in bands if self._transpose_moves_less(its)
        )

    def transposes(self, height: int) -> bool:
        """Return whether rows of this global height are traded for channels."""
        return height in self._transposed_heights

    def fetches_halo(self, height: int) -> bool:
        """Return whether the rows under the kernel are fetched."""
        return not self.transposes(height)

    def transpose_pair(self, bands: Bands) -> tuple[TransposePlan, TransposePlan]:
        """Return how the input goes there and how the output comes back."""
        conv, ranks = self.conv, bands.input.ranks
        taken = channels_per_rank(conv.in_channels, ranks)
        made = tuple(share * (conv.out_channels // conv.in_channels) for share in taken)
        return TransposePlan(bands.input.sizes, taken), TransposePlan(bands.output.sizes, made)

    def _transpose_moves_less(self, bands: Bands) -> bool:
        """Return whether trading moves no more than fetching: then each row is convolved once."""
        taken, made = self._column_counts.get(bands.input.height, (1, 1))
        routes = received_row_counts(bands.input, self.exchange(bands).required_rows)
        rows = sum(rows for of_rank in routes for _, rows in of_rank)
        there, back = self.transpose_pair(bands)
        traded = (
            there.total_rows_sent(to_channels=True) * taken
            + back.total_rows_sent(to_channels=False) * made
        )
        fetched: int = rows * self.conv.in_channels * taken
        return 0 < traded <= fetched

    @property
    def title(self) -> str:
        """The type, and what the plan has chosen."""
        chosen = {
            "transpose" if self.transposes(height) else "halo" for height in self.planned_heights
        }
        return f"{super().title} ({' and '.join(sorted(chosen)) or 'halo'})"

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        if not self.transposes(bands.input.height):
            return super().compute(x, bands)
        there, back = self.transpose_pair(bands)
        transport = self.manager.transport
        globe = rows_to_channels(x, there.rows, transport, there.channels)
        made = self._convolve_globe(globe, channel_slice(back.channels, self.manager.domain_rank))
        return channels_to_rows(made, back.rows, transport, back.channels)

    def _convolve_globe(self, globe: Tensor, made: slice) -> Tensor:
        """Convolve all rows of this rank's channels, which make the output channels `made`."""
        conv, channels = self.conv, globe.shape[CHANNEL_DIM]
        if not channels:
            # It convolves one channel of zeros: what is saved for backward has to be as many
            # tensors on every rank, for activation checkpointing.
            globe = F.pad(globe, (0, 0, 0, 0, 0, 1))
            made = slice(0, conv.out_channels // conv.in_channels)
        globe, zeros = self.column_padding.pad(globe), (0, self.zeros[-1])
        if self.pole_mode == "zeros" and self.north == self.south:
            zeros = (self.north, zeros[-1])
        else:
            mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
            globe = F.pad(globe, (0, 0, self.north, self.south), mode=mode)
        weight, bias = self.weight[made], self.bias
        bias = None if bias is None else bias[made]
        groups = globe.shape[CHANNEL_DIM]
        y = F.conv2d(globe, weight, bias, conv.stride, zeros, conv.dilation, groups)
        return y if channels else y.narrow(CHANNEL_DIM, 0, 0)


@final
class DomainParallelDepthwiseConv2d(DepthwiseLayer):
    """A depthwise `Conv2d` on one band of rows, equal to that layer on the whole globe.

    As many groups as input channels, several output channels for each as well; any kernel, stride,
    dilation, padding and padding mode, any bands. A plan lets it trade rows for channels where that
    moves less than fetching rows does; then a rank may have no channel at all.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.

    Raises:
        UserError: `shard_dim` is not that of rows, or channels are mixed.
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
                f"DomainParallelDepthwiseConv2d: needs a convolution with a group per channel, got "
                f"{conv.groups} groups of {conv.in_channels} channels. Use DomainParallelConv2d."
            )
        super().__init__(conv, shard_dim, manager)


@final
class DomainParallelDistributedDepthwiseConv2d(DepthwiseLayer):
    """A `DistributedDepthwiseConv2d` on one band of rows, equal to that layer on the whole globe.

    Its ranks share rows outside and, where that moves less, channels inside: `cp_group` has to be
    None.

    Args:
        depthwise: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> the same.

    Raises:
        UserError: `shard_dim` is not that of rows, or a `cp_group` is given.
    """

    def __init__(
        self,
        depthwise: DistributedDepthwiseConv2d,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        settings = _as_conv(depthwise)
        super().__init__(settings, shard_dim, manager, depthwise)
        self.__dict__["conv"] = settings  # no child: it has no parameters that anyone uses

    @property
    def weight(self) -> Tensor:
        """The kernel of each channel, as a convolution of torch has it."""
        expanded: Tensor = self.wrapped.expand_to_channels(self.wrapped.weight)
        return expanded[:, None]

    @property
    def bias(self) -> Tensor | None:
        """The bias of each channel."""
        bias: Tensor | None = self.wrapped.bias
        return None if bias is None else self.wrapped.expand_to_channels(bias)

    def forward(self, x: Tensor, *others: Any, cp_group: Any = None) -> Any:
        """Return this rank's rows of what the layer makes of the whole globe."""
        if any(given is not None for given in (*others, cp_group)):
            raise UserError(
                "DistributedDepthwiseConv2d: its rows are sharded, which leaves no channels to "
                "share. Call it without cp_group in a model with parallel.domain above 1."
            )
        return super().forward(x)


@final
class DomainParallelLongRangeConv2d(DepthwiseLayer):
    """A depthwise convolution that is circular in longitude, on one band of rows.

    The columns around the globe are not sent: each rank pads what it has.

    Args:
        layer: an `nn.Conv2d` with a group per channel and zeros in latitude, whose forward first
            pads `reach` columns on both sides, circularly; if need be more than once around.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.

    Raises:
        UserError: `shard_dim` is not that of rows.
    """

    def __init__(
        self,
        layer: Any,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(layer, shard_dim, manager)
        reach = layer.column_padding
        self.padding_widths = (reach, reach, self.north, self.south)
        self.column_padding, self.zeros = ColumnPadding((reach, reach, 0, 0), "circular"), (0, 0)

    def _check_is_torch(self, wrapped: nn.Module) -> None:
        """Its forward is its own, and done here."""


def _as_conv(depthwise: DistributedDepthwiseConv2d) -> nn.Conv2d:
    """Return a convolution with the settings of a layer, and no weights."""
    channels = depthwise.hidden_dim
    return nn.Conv2d(
        channels, channels, depthwise.kernel_size, padding="same", groups=channels, bias=False,
        device="meta",
    )  # fmt: skip

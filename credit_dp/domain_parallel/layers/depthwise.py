"""The kinds of depthwise convolution on one band of rows."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from credit_dp.channel_parallel import DistributedDepthwiseConv2d
from credit_dp.domain_parallel.layers.band_conv import Columns
from credit_dp.domain_parallel.layers.depthwise_layer import DepthwiseLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError


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
        expanded: Tensor = self.wrapped.expanded(self.wrapped.weight)
        return expanded[:, None]

    @property
    def bias(self) -> Tensor | None:
        """The bias of each channel."""
        bias: Tensor | None = self.wrapped.bias
        return None if bias is None else self.wrapped.expanded(bias)

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
        reach = layer.reach
        self.sides = (reach, reach, self.north, self.south)
        self.columns, self.zeros = Columns((reach, reach, 0, 0), "circular"), (0, 0)

    def _check_is_torch(self, wrapped: nn.Module) -> None:
        """Its forward is its own, and done here."""


def _as_conv(depthwise: DistributedDepthwiseConv2d) -> nn.Conv2d:
    """Return a convolution with the settings of a layer, and no weights."""
    channels = depthwise.hidden_dim
    return nn.Conv2d(
        channels, channels, depthwise.kernel_size, padding="same", groups=channels, bias=False,
        device="meta",
    )  # fmt: skip

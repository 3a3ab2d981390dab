"""Longitude-periodic convolution on one band of rows."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from credit_dp.domain_parallel.layers.band_conv import Columns
from credit_dp.domain_parallel.layers.conv import _RowConv
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.torch_layer import overridden
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


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
        self.columns = Columns((self.padding, self.padding, 0, 0), "circular")
        self.zeros = (0, 0)

    @property
    def weight(self) -> Tensor:
        """The kernel of the inner convolution."""
        return self.conv.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the inner convolution."""
        return self.conv.bias  # type: ignore[no-any-return]

    def _keeps_rows(self, bands: Bands) -> bool:
        conv = self.conv
        hooked = conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks
        plain = not overridden(conv) and not hooked
        return plain and super()._keeps_rows(bands)

    def convolve(self, rows: Tensor) -> Tensor:
        """Call the inner convolution: it may have hooks."""
        return self.conv(rows)  # type: ignore[no-any-return]

"""Convolutions on one band of rows."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


def _halo_width(conv: nn.Conv2d | nn.ConvTranspose2d) -> int:
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    return max(0, (reach - conv.stride[0]) // 2)


def _side_padding(conv: nn.Conv2d) -> tuple[int, int, int, int]:
    """Columns to the west and east, rows to the north and south."""
    west, east, north, south = conv._reversed_padding_repeated_twice
    return west, east, north, south


class _RowConv(WindowLayer):
    """The geometry that both convolutions share: stride, kernel, and padding beyond the poles."""

    conv: nn.Conv2d
    north: int
    south: int

    @property
    def _reach(self) -> int:
        return self.conv.dilation[0] * (self.conv.kernel_size[0] - 1) + 1

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output: Dumoulin & Visin 2016, relationship 15."""
        return (height + self.north + self.south - self._reach) // self.conv.stride[0] + 1

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows under the kernel, padding included."""
        first = out.start * self.conv.stride[0] - self.north
        return first, (out.stop - 1) * self.conv.stride[0] - self.north + self._reach

    def _convolve(self, rows: Tensor, column_padding: int) -> Tensor:
        conv = self.conv
        padding = (0, column_padding)
        return F.conv2d(
            rows, self.weight, self.bias, conv.stride, padding, conv.dilation, conv.groups
        )


@final
class DomainParallelConv2d(_RowConv):
    """A `Conv2d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, dilation, padding and padding mode, any bands.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager, halo_width=_halo_width(conv))
        self.__dict__["conv"] = conv
        self.west, self.east, self.north, self.south = _side_padding(conv)
        self.pole_mode = conv.padding_mode
        self.halo_width = _halo_width(conv)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        rows = self.fetch(x, bands)
        if self.pole_mode == "zeros" and self.west == self.east:
            return self._convolve(rows, self.west)
        mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
        return self._convolve(F.pad(rows, (self.west, self.east, 0, 0), mode=mode), 0)


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
        super().__init__(periodic_conv, shard_dim, manager, halo_width=_halo_width(conv))
        self.padding: int = periodic_conv.padding
        self.north = self.south = self.padding
        self.pole_mode = getattr(periodic_conv, "poles", "reflect")

    @property
    def weight(self) -> Tensor:
        """The kernel of the inner convolution."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the inner convolution."""
        return self.conv.bias

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        rows = self.fetch(x, bands)
        if self.padding:
            rows = F.pad(rows, (self.padding, self.padding, 0, 0), mode="circular")
        return self.conv(rows)  # type: ignore[no-any-return]

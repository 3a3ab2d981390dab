"""Convolutions on one band of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.layers.band_conv import Columns, Halo, convolve_band
from credit_dp.domain_parallel.layers.conv_layer import ConvLayer, sides_of
from credit_dp.domain_parallel.layers.edges import Kernel
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition

# By number of spatial dimensions.
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class _RowConv(ConvLayer):
    """The geometry that all convolutions share: stride, kernel, and padding beyond the poles."""

    # Padding to be made first, and zeros that the convolution makes: none along the rows.
    columns: Columns
    zeros: tuple[int, ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._halos: dict[RowPartition, RowExchange] = {}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output: Dumoulin & Visin 2016, relationship 15."""
        return (height + self.north + self.south - self._reach) // self._stride + 1

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows under the kernel, padding included."""
        first = out.start * self._stride - self.north
        return first, (out.stop - 1) * self._stride - self.north + self._reach

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        if not self._keeps_rows(bands):
            return self.convolve(self.columns.pad(self.fetch(x, bands)))
        conv, dim, zeros = self.conv, self.row_dim, list(self.zeros)
        zeros[dim] = self.north
        kernel = Kernel(conv.stride, tuple(zeros), conv.dilation, conv.groups, dim)
        halo = Halo(self._halo_of(bands.taken), self.manager.transport, self.columns, dim)
        return convolve_band(self.columns.pad(x), self.weight, self.bias, kernel, halo)

    def _keeps_rows(self, bands: Bands) -> bool:
        """Return whether a band of the output is made of that of the input and equal halos.

        Rows that come for several layers at once are glued to the band: it is copied once for all.
        """
        if self.shared_exchange is not None:
            return False
        symmetric = self.north == self.south == (self._reach - 1) / 2
        return bands.taken == bands.made and self._stride == 1 and symmetric and self.north > 0

    def _halo_of(self, bands: RowPartition) -> RowExchange:
        exchange = self._halos.get(bands)
        if exchange is None:
            needs = tuple(self.halo(bands.rows(r), bands.height) for r in range(bands.ranks))
            exchange = self._halos[bands] = RowExchange(bands, needs, self.manager.domain_rank)
        return exchange

    @abstractmethod
    def convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows that are padded by `columns`. Reads the weight once."""


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
        super().__init__(outer, conv, sides_of(conv), shard_dim, manager)
        self.pole_mode = conv.padding_mode
        north = 2 * (-self.row_dim - 1)
        sides = (*self.sides[:north], 0, 0, *self.sides[north + 2 :])
        none = (0,) * len(sides)
        if self.pole_mode == "zeros" and sides[::2] == sides[1::2]:
            self.columns, self.zeros = Columns(none, "constant"), sides[-2::-2]
        else:
            mode = "constant" if self.pole_mode == "zeros" else self.pole_mode
            self.columns, self.zeros = Columns(sides, mode), none[::2]

    def convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows that are padded by `columns`."""
        conv, zeros = self.conv, self.zeros
        return CONVOLVE[len(zeros)](
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

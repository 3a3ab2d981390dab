"""What convolutions and transposed convolutions share: settings along the rows."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError


def sides_of(conv: _ConvNd) -> tuple[int, ...]:
    """Return a convolution's padding as `F.pad` takes it: west, east, north, south, ..."""
    return tuple(conv._reversed_padding_repeated_twice)


def is_pointwise(conv: _ConvNd, sides: tuple[int, ...], dim: int) -> bool:
    """Return whether every output entry along `dim` is made of the input entry of its index."""
    start = 2 * (-dim - 1)
    extra = (*sides[start : start + 2], conv.output_padding[dim])
    return (conv.kernel_size[dim], conv.stride[dim]) == (1, 1) and not any(extra)


class ConvLayer(WindowLayer):
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
        self.sides = sides
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
    def _reach(self) -> int:
        """Rows from the kernel's first to its last."""
        conv, dim = self.conv, self.row_dim
        return int(conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1)

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet in a spatial dimension; the audit sees whether they do among the channels.

        Raises:
            UserError: the kernel spans another spatial dimension with rows in it.
        """
        if dim == self.row_dim:
            return True
        if dim < -len(self.conv.kernel_size) or is_pointwise(self.conv, self.sides, dim):
            return False
        raise UserError(
            f"{type(self).__name__}: rows are in dimension {dim}, along which its kernel mixes "
            f"them; it needs them in {self.row_dim}. Move them there before this layer."
        )

"""Adaptive pooling to several rows, on one band of rows."""

from __future__ import annotations

from abc import ABC
from typing import Any, final

from torch import Tensor, nn

from credit_dp.constants import constant
from credit_dp.domain_parallel.layers.global_pool import AREA_DIMS, AvgPool, MaxPool, size_along
from credit_dp.domain_parallel.layers.positions import positions_on_globe
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.layers.tap_layer import TapLayer
from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError


class _AdaptivePool(RowLayer, ABC):
    """Pooling to a number of rows, each of a window that follows from the heights."""

    def __init__(
        self,
        pool: AvgPool | MaxPool,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        self._area = next(n for kind, n in AREA_DIMS.items() if isinstance(pool, kind))
        dim = max(ROW_DIM, -self._area) if shard_dim is None else shard_dim
        super().__init__(pool, dim, manager, ndim=self._area + 2)

    def _check_dim(self) -> None:
        if (self.dim, self._area) != (-1, 1):
            super()._check_dim()

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet where the pool is.

        Raises:
            UserError: it makes one row of them.
        """
        wrapped = self.__dict__["wrapped"]
        if dim < -self._area:
            return False
        if size_along(wrapped, dim) == 1:
            raise UserError(
                f"{type(wrapped).__name__}: rows are in dimension {dim}, where output_size is 1. "
                f"It needs them in {max(ROW_DIM, -self._area)}. Move them there before this layer."
            )
        return True

    def _out(self, height: int) -> int:
        return size_along(self.__dict__["wrapped"], self.dim) or height

    def _pool(self, x: Tensor, rows: int) -> Any:
        """Return torch's pool with another number of output rows."""
        size: list[int | None] = [
            size_along(self.__dict__["wrapped"], dim) for dim in range(-self._area, 0)
        ]
        size[self.dim] = rows
        indices = (True,) if getattr(self.__dict__["wrapped"], "return_indices", False) else ()
        name = f"adaptive_{self._kind_name}_pool{self._area}d"
        return getattr(nn.functional, name)(x, size if self._area > 1 else rows, *indices)

    _kind_name: str


@final
class DomainParallelAdaptiveAvgPool(_AdaptivePool, TapLayer):
    """An `nn.AdaptiveAvgPool*d` to several rows, equal to that layer on the whole globe.

    Args:
        pool: the layer to shard; its output size is that of the whole globe, and not 1 along rows.
        shard_dim: the row dimension of the input; by default -2, or -1 of one-dimensional pools.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`, or another number of dimensions.
    """

    _kind_name = "avg"

    def along_rows(self, x: Tensor) -> Tensor:
        """Return the pool of one column."""
        return nn.functional.adaptive_avg_pool2d(x, (self._out(x.shape[-2]), 1))

    def along_others(self, x: Tensor) -> Tensor:
        """Return the pool of all dimensions but the rows'."""
        made: Tensor = self._pool(x, x.shape[self.dim])
        return made


@final
class DomainParallelAdaptiveMaxPool(_AdaptivePool, WindowLayer):
    """An `nn.AdaptiveMaxPool*d` to several rows, equal to that layer on the whole globe.

    `return_indices` returns positions on the whole globe. See `DomainParallelAdaptiveAvgPool` for
    arguments and shapes.
    """

    _kind_name = "max"

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return self._out(height)

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows."""
        made = self._out(height)
        return out.start * height // made, -(-out.stop * height // made)

    def _windows(self, bands: Bands) -> list[int]:
        """Return the rows of this rank's windows one after another, each as long as the longest.

        Shorter windows repeat their last row.
        """
        height, out = bands.taken.height, bands.made.rows(self.manager.domain_rank)
        spans = [self.span(slice(i, i + 1), height) for i in range(bands.made.height)]
        longest = max(stop - first for first, stop in spans)
        return [min(first + k, stop - 1) for first, stop in spans[out] for k in range(longest)]

    def compute(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output rows."""
        height, out = bands.taken.height, bands.made.rows(self.manager.domain_rank)
        taken = constant(self._windows(bands), x.device)
        rows = self.fetch(x, bands)
        if height % bands.made.height:  # else the windows lie side by side
            rows = rows.index_select(self.dim, taken - self.span(out, height)[0])
        made = self._pool(rows, out.stop - out.start)
        if not self.return_indices:
            return made  # type: ignore[no-any-return]
        maxima, indices = made
        columns = x.shape[self.dim :].numel() // x.shape[self.dim]
        return maxima, positions_on_globe(indices, taken, columns, height)

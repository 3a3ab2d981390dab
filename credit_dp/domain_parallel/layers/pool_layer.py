"""What all pools with a kernel share: settings along the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM

MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AvgPool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
PowerPool = nn.LPPool1d | nn.LPPool2d | nn.LPPool3d
AREA_DIMS: dict[type[nn.Module], int] = {
    kind: ndim
    for kinds in (MaxPool, AvgPool, PowerPool)
    for ndim, kind in enumerate(kinds.__args__, start=1)
}


def area_dims(pool: nn.Module) -> int:
    """Return how many dimensions a pool's kernel has."""
    return next(ndim for kind, ndim in AREA_DIMS.items() if isinstance(pool, kind))


class PoolLayer(WindowLayer):
    """A layer around a pool with a kernel.

    Args:
        pool: the layer to shard.
        shard_dim: the row dimension of the input; by default -2, or -1 of one-dimensional pools.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
    """

    def __init__(
        self,
        pool: nn.Module,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        self._area = area_dims(pool)
        dim = max(ROW_DIM, -self._area) if shard_dim is None else shard_dim
        super().__init__(pool, dim, manager, ndim=self._area + 2)

    def _check_dim(self) -> None:
        if (self.dim, self._area) != (-1, 1):
            super()._check_dim()

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet where the kernel reaches."""
        return dim >= -self._area

    def setting(self, name: str) -> list[int]:
        """Return a setting of the pool, one number for each dimension of the kernel."""
        value: Any = getattr(self.__dict__["wrapped"], name)
        if value is None:  # the stride
            return self.setting("kernel_size")
        values = [value] if isinstance(value, int) else list(value)
        return values * self._area if len(values) == 1 else values

    def without_rows(self, name: str) -> list[int]:
        """Return a setting that is 0 along the rows."""
        values = self.setting(name)
        values[self.dim] = 0
        return values

    @property
    def _kernel(self) -> int:
        return self.setting("kernel_size")[self.dim]

    @property
    def _stride(self) -> int:
        return self.setting("stride")[self.dim]

    @property
    def _padding(self) -> int:
        return self.setting("padding")[self.dim]

    @property
    def _reach(self) -> int:
        """Rows from the kernel's first to its last."""
        return self._kernel

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output.

        In ceil mode the last window may reach over the padding, but has to start before its end.
        """
        spare = height + 2 * self._padding - self._reach
        if not self.ceil_mode:
            return spare // self._stride + 1
        last = -(-spare // self._stride)
        return last + 1 if last * self._stride < height + self._padding else last

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the rows of the windows."""
        first = out.start * self._stride - self._padding
        return first, (out.stop - 1) * self._stride - self._padding + self._reach

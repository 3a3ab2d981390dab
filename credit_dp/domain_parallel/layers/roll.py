"""Rolling the globe, on one band of rows."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError


@final
class DomainParallelRoll(RowLayer):
    """`torch.roll` on one band of rows, equal to it on the whole globe.

    Args:
        shifts: places to move by, one for each of `dims`.
        dims: dimensions to roll, counted from the start or the end.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, W)` -> the same.

    Raises:
        UserError: there are more shifts than dimensions, or no dimensions.
    """

    def __init__(
        self,
        shifts: int | tuple[int, ...],
        dims: int | tuple[int, ...],
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        roll = _Roll(
            (shifts,) if isinstance(shifts, int) else tuple(shifts),
            (dims,) if isinstance(dims, int) else tuple(dims),
        )
        if not roll.dims or len(roll.shifts) != len(roll.dims):
            raise UserError(
                f"DomainParallelRoll: needs one shift for each dimension, got shifts {roll.shifts} "
                f"and dims {roll.dims}. Name the dimensions."
            )
        super().__init__(roll, shard_dim, manager)
        self._row_shift = 0

    def _check_dim(self) -> None:
        """Accept rows in any dimension."""

    def mixes(self, dim: int, ndim: int) -> bool:
        """Return whether the dimension is rolled."""
        return dim % ndim in {d % ndim for d in self.dims}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows that come to lie here: around a pole they are two runs."""
        start = (out.start - self._row_shift) % height
        stop = start + out.stop - out.start
        runs = (Run(start, min(stop, height)), Run(0, stop - height))
        return tuple(run for run in runs if run.length > 0)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the rolled globe."""
        moves = [(s, d % x.ndim) for s, d in zip(self.shifts, self.dims, strict=True)]
        rows = self.dim % x.ndim
        row_shift = sum(shift for shift, dim in moves if dim == rows)
        if row_shift != self._row_shift:
            self._row_shift, self._exchanges = row_shift, {}
        others = [(shift, dim) for shift, dim in moves if dim != rows]
        x = self.fetch(x, bands)
        return x.roll(*zip(*others, strict=True)) if others else x


@final
class _Roll(nn.Module):
    """`torch.roll` as a module."""

    def __init__(self, shifts: tuple[int, ...], dims: tuple[int, ...]) -> None:
        super().__init__()
        self.shifts, self.dims = shifts, dims

    def forward(self, x: Tensor) -> Tensor:
        """Return the rolled tensor."""
        return torch.roll(x, self.shifts, self.dims)

    def extra_repr(self) -> str:
        """Describe the shifts."""
        return f"shifts={self.shifts}, dims={self.dims}"

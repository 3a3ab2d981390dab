"""How much sharded fields change from each row to the next, also across edges between bands."""

from typing import final

import torch
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import sum_over_ranks


@final
class RowDifferences:
    """Collects mean absolute differences of neighbouring rows; each rank has a band of rows.

    Of each field the first row of every band goes to all ranks.

    Args:
        shape: what is kept apart, for instance (sources, channels); channels come last.
        height: rows of the globe.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        height: int,
        manager: DomainParallelManager,
        device: torch.device,
    ) -> None:
        self._manager, self._own = manager, manager.rows(height)
        self._firsts = list(manager.partition(height).bounds[1:-1])
        sizes = (*shape, height - 1)
        self._sums = torch.zeros(sizes, dtype=torch.float64, device=device)

    def add(self, index: tuple[int, ...], fields: Tensor) -> None:
        """Add fields `(B, C, h, W)`, NaN where there are no values; collective over the domain."""
        own = self._with_next(fields.double())
        steps = own.diff(dim=-2).abs().nanmean(dim=-1).sum(dim=0)
        self._sums[index][:, self._own.start : self._own.start + steps.shape[-1]] += steps

    def _with_next(self, fields: Tensor) -> Tensor:
        """The fields and, below, the first row of the band to the south, if there is one."""
        if not self._firsts:
            return fields
        rows = fields.new_zeros((*fields.shape[:2], len(self._firsts), fields.shape[-1]))
        if self._own.start:
            rows[:, :, self._firsts.index(self._own.start)] = fields[:, :, 0]
        rows = self._manager.transport.sum(rows)
        if self._own.stop not in self._firsts:
            return fields
        south = self._firsts.index(self._own.stop)
        return torch.cat([fields, rows[:, :, south : south + 1]], dim=-2)

    def result(self) -> Tensor:
        """The differences of all pairs of neighbouring rows, added up: `shape + (H - 1,)`.

        NaN where a field has no values. Collective over all axes.
        """
        return sum_over_ranks(self._sums, self._manager)

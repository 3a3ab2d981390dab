"""Means over area and all initial times, summed over the rows of all ranks.

Source:
    Rasp et al. 2024, "WeatherBench 2", section 3.2: cells weigh by their area.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.valid_points import ValidPoints

Index = tuple[int | slice, ...]  # a place, or several, of what is kept apart


@final
class AreaMean:
    """Collects values of own rows and samples; `result` joins all ranks.

    All scores take fields `(B, ..., C, h, W)`: of B samples, which are added up, with whatever else
    is kept apart behind `index`, for instance lead times.

    Args:
        shape: what values are kept apart, for instance (sources, leads, channels).
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self.rows = rows.double()
        self.points = points
        self.sums = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.weights = torch.zeros_like(self.sums)

    def add(self, index: Index, values: Tensor) -> None:
        """Add values `(B, ..., C, h, W)` of all channels to the place `index`."""
        self.sums[index] += weighted_sums(values, self.rows, self.points).sum(dim=0)
        if self.points is None:
            self.weights[index] += len(values) * values.shape[-1] * self.rows.sum()
        else:
            self.weights[index] += len(values) * self.points.weight(self.rows)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The means of the whole globe over all samples, of `shape`, on every rank.

        Collective: every rank calls it, also one that had no samples.
        """
        sums = sum_over_ranks(torch.stack([self.sums, self.weights]), manager)
        return sums[0] / sums[1]


def weighted_sums(values: Tensor, rows: Tensor, points: ValidPoints | None) -> Tensor:
    """`(..., C, h, W)` times the weights `(h,)` of its rows, summed: `(..., C)`, float64."""
    if points is not None:
        values = points.only(values)
    return values.double().sum(dim=-1) @ rows


def sum_over_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """The sum of a detached tensor over the domain and the data axis; a collective."""
    return sum_over_data(manager.transport.sum(tensor.detach()), manager)


def sum_over_data(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """The sum of a tensor, which is changed, over the data axis alone; a collective."""
    if manager.data_parallel_size > 1:
        dist.all_reduce(tensor, group=manager.data_parallel_group)
    return tensor

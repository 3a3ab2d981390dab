"""Root-mean-square errors as WeatherBench 2 defines them, summed over the rows of all ranks.

Source:
    Rasp et al. 2024, "WeatherBench 2", eq. 1: squared errors are averaged over area and over
    all initial times first, the root is taken last.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.valid_points import ValidPoints


@final
class RootMeanSquare:
    """Collects squared errors of own rows and samples; `result` joins all ranks.

    Args:
        shape: what errors are kept apart, for instance (sources, leads, channels).
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self.rows = rows.double()
        self.points = points
        self.squares = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.weights = torch.zeros(shape, dtype=torch.float64, device=rows.device)

    def add(self, index: tuple[int, ...], error: Tensor) -> None:
        """Add errors `(B, C, h, W)` of all channels to the place `index`."""
        batch, _, _, width = error.shape
        if self.points is not None:
            error = self.points.only(error)
        weighted = error.double().square() * self.rows[:, None]
        self.squares[index] += weighted.sum(dim=(0, 2, 3))
        if self.points is None:
            self.weights[index] += batch * width * self.rows.sum()
        else:
            self.weights[index] += batch * self.points.weight(self.rows)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The errors of the whole globe over all samples, of `shape`, on every rank.

        Collective: every rank calls it, also one that had no samples.
        """
        sums = sum_over_ranks(torch.stack([self.squares, self.weights]), manager)
        return (sums[0] / sums[1]).sqrt()


def sum_over_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """The sum of a detached tensor over the domain and the data axis; a collective."""
    total = manager.transport.sum(tensor.detach())
    if manager.data_parallel_size > 1:
        dist.all_reduce(total, group=manager.data_parallel_group)
    return total

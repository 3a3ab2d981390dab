"""Root-mean-square errors as WeatherBench 2 defines them, summed over the rows of all ranks.

Source:
    Rasp et al. 2024, "WeatherBench 2", eq. 1: squared errors are averaged over area and over
    all initial times first, the root is taken last.
"""

from typing import final

from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import AreaMean, Index
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
        self._squares = AreaMean(shape, rows, points)

    def add(self, index: Index, error: Tensor) -> None:
        """Add errors `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._squares.add(index, error.double().square())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The errors of the whole globe over all samples, of `shape`, on every rank.

        Collective: every rank calls it, also one that had no samples.
        """
        return self._squares.result(manager).sqrt()

"""What is left of a field without its climatology: how well forecast, and how strong.

Source:
    Rasp et al. 2024, "WeatherBench 2": the anomaly correlation coefficient, where the mean of an
    anomaly is not taken out. Ben Bouallegue et al. 2024 (arXiv:2307.10128): the forecast activity,
    as the software of WeatherBench computes it, the root of the mean squared anomaly.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import Index, sum_over_ranks, weighted_sums
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.evaluation.valid_points import ValidPoints


@final
class AnomalyCorrelation:
    """Collects, for each initial time, products of anomalies; `result` joins all ranks.

    The coefficient is one of the globe at one time, then averaged over the initial times. Three
    sums per initial time are kept, so that no rank needs another before the end; `fold` makes
    room for as many other initial times.

    Args:
        shape: what is kept apart, for instance (sources, leads, channels).
        samples: how many initial times there are on all ranks together, before `fold` or the end.
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        samples: int,
        rows: Tensor,
        points: ValidPoints | None = None,
    ) -> None:
        self.rows = rows.double()
        self.points = points
        sizes = (3, *shape, samples)
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=rows.device)
        self.folded = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.folds = torch.zeros(shape, dtype=torch.float64, device=rows.device)

    def add(self, index: Index, samples: Sequence[int], forecast: Tensor, truth: Tensor) -> None:
        """Add anomalies `(B, ..., C, h, W)` to the place `index`.

        `samples` says which of all initial times the `B` are, each of which comes once.
        """
        one, two = forecast.double(), truth.double()
        for kind, product in enumerate((one * two, one.square(), two.square())):
            found = weighted_sums(product, self.rows, self.points)
            self.sums[(kind, *index)][..., list(samples)] += found.movedim(0, -1)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean coefficients, of `shape`, on every rank; NaN where an anomaly is zero.

        Collective: every rank calls it, also one that had no samples.
        """
        if not self.folds.any():
            return _mean(self.sums, manager)
        return self.folded / self.folds

    def fold(self, manager: DomainParallelManager, index: Index = ()) -> None:
        """Keep the mean of all `samples`, which have come, and begin anew with others.

        After it nothing but whole folds counts in `result`. Collective, as `result` is.

        Args:
            index: where in `shape` they have come, for instance at some lead times; everywhere.
        """
        sums = self.sums[(slice(None), *index)]
        self.folded[index] += _mean(sums.contiguous(), manager)
        self.folds[index] += 1
        sums.zero_()


def _mean(sums: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return the mean coefficient over samples, from their three sums; collective."""
    both, one, two = sum_over_ranks(sums, manager)
    mean: Tensor = (both / (one.sqrt() * two.sqrt())).mean(dim=-1)
    return mean


@final
class Activity:
    """Collects squared anomalies of own rows and samples; see `RootMeanSquare`.

    Less than the truth's says that a forecast is too smooth.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._squares = RootMeanSquare(shape, rows, points)

    def add(self, index: Index, anomaly: Tensor) -> None:
        """Add anomalies `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._squares.add(index, anomaly.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The standard deviations about the climatology, of `shape`, on every rank; collective."""
        return self._squares.result(manager)

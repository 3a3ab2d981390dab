"""How much too high forecasts are on average.

Source:
    Rasp et al. 2024, "WeatherBench 2": forecast less truth, averaged over area and initial times.
"""

from typing import final

from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import AreaMean, Index
from credit_dp.evaluation.valid_points import ValidPoints


@final
class Bias:
    """Collects errors of own rows and samples; the arguments are those of `AreaMean`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._errors = AreaMean(shape, rows, points)

    def add(self, index: Index, forecast: Tensor, truth: Tensor) -> None:
        """Add fields `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._errors.add(index, forecast.double() - truth.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean errors of the whole globe, of `shape`, on every rank; collective."""
        return self._errors.result(manager)

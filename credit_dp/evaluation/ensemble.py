"""Scores of ensembles: how far members are from the truth, from their mean and from each other.

Source:
    Rasp et al. 2024, "WeatherBench 2", and Zamo & Naveau 2018, eq. 3 and appendix B, for the fair
    continuous ranked probability score; Fortin et al. 2014 for spread and skill, which are equal
    on average where the ensemble is reliable and large.
"""

from typing import final

import torch
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import AreaMean, Index
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.evaluation.valid_points import ValidPoints

MEMBERS = 1  # the dim of an ensemble's members: (B, M, ..., C, h, W)


@final
class FairCRPS:
    """Collects the continuous ranked probability score; the arguments are those of `AreaMean`.

    `E|X - Y| - E|X - X'| / 2`, with X and X' two different members: its expectation does not depend
    on how many members there are. Of one member it is the mean absolute error.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._scores = AreaMean(shape, rows, points)

    def add(self, index: Index, members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the place `index`."""
        # Away from the truth they are small numbers, of which sums lose less.
        away = members.double() - truth.double().unsqueeze(MEMBERS)
        self._scores.add(index, away.abs().mean(dim=MEMBERS) - half_distance(away))

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The scores of the whole globe, of `shape`, on every rank; collective."""
        return self._scores.result(manager)


def half_distance(members: Tensor) -> Tensor:
    """Half the mean distance of two different members: `(B, M, ...)` -> `(B, ...)`.

    Sorted, member i (from 1) is above i - 1 others and below M - i.
    """
    count = members.shape[MEMBERS]
    if count == 1:
        return torch.zeros_like(members[:, 0])
    above = 2 * torch.arange(1, count + 1, dtype=members.dtype, device=members.device) - count - 1
    ordered = members.sort(dim=MEMBERS).values
    return torch.einsum("m,bm...->b...", above, ordered) / (count * (count - 1))


@final
class Spread:
    """Collects the unbiased variance of the members; the arguments are those of `AreaMean`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._variances = AreaMean(shape, rows, points)

    def add(self, index: Index, members: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` to the place `index`."""
        several = members.double()
        if several.shape[MEMBERS] > 1:
            variance = several.var(dim=MEMBERS, correction=1)
        else:
            variance = torch.zeros_like(several[:, 0])
        self._variances.add(index, variance)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The root of the mean variance, of `shape`, on every rank; collective. 0 of one member."""
        return self._variances.result(manager).sqrt()


@final
class Skill:
    """Collects squared errors of the ensemble's mean; see `RootMeanSquare`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._errors = RootMeanSquare(shape, rows, points)

    def add(self, index: Index, members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the place `index`."""
        self._errors.add(index, members.double().mean(dim=MEMBERS) - truth.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The root-mean-square errors, of `shape`, on every rank; collective."""
        return self._errors.result(manager)

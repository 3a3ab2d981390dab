"""Scores, statistics and losses weigh each point of a projection by its own area."""

import numpy as np
import pytest
import torch

from credit_dp.config import StandardLossConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid
from credit_dp.data.statistics import Moments
from credit_dp.data.transforms import weighted_quantiles
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.metrics import (
    AnomalyCorrelation,
    AreaMean,
    EnergyScore,
    FairCRPS,
    RankHistogram,
    RootMeanSquare,
)
from credit_dp.training.loss import build_loss
from tests.data.region_grids import Lambert

ROWS, COLUMNS = 7, 9
GRID = Grid(
    *Lambert().coordinates(
        *(3e5 * (np.arange(n) - n / 2)[::s] for n, s in ((ROWS, -1), (COLUMNS, 1)))
    )
)
AREAS = GRID.weights
ALONE = DomainParallelManager(1, 1)
random = np.random.default_rng(7)
MEMBERS, TRUTH = (
    random.normal(size=(2, 3, 2, ROWS, COLUMNS)),
    random.normal(size=(2, 2, ROWS, COLUMNS)),
)
VALID = random.random((2, ROWS, COLUMNS)) < 0.7
MASKS = {"everywhere": None, "some": ValidPoints(torch.from_numpy(VALID))}


@pytest.mark.parametrize("mask", [pytest.param("everywhere", marks=pytest.mark.exhaustive), "some"])
def test_scores_are_weighted_means_of_points(mask):
    points = MASKS[mask]
    inside = AREAS * (np.ones_like(VALID) if points is None else VALID)  # (C, H, W)
    weights, (members, truth) = torch.from_numpy(AREAS), map(torch.from_numpy, (MEMBERS, TRUTH))

    def mean(values):
        return (values * inside).sum((-2, -1)) / inside.sum((-2, -1))

    area_mean = AreaMean((2,), weights, points)
    area_mean.add((), truth)
    np.testing.assert_allclose(area_mean.result(ALONE), mean(TRUTH).mean(0), rtol=1e-13)

    error = MEMBERS[:, 0] - TRUTH
    rmse = RootMeanSquare((2,), weights, points)
    rmse.add((), torch.from_numpy(error))
    np.testing.assert_allclose(rmse.result(ALONE), np.sqrt(mean(error**2).mean(0)), rtol=1e-13)

    correlation = AnomalyCorrelation((2,), 2, weights, points)
    correlation.add((), [0, 1], members[:, 0], truth)
    first = MEMBERS[:, 0]
    wanted = mean(first * TRUTH) / np.sqrt(mean(first**2) * mean(TRUTH**2))
    np.testing.assert_allclose(correlation.result(ALONE), wanted.mean(0), rtol=1e-12)

    crps = FairCRPS((2,), weights, points)
    crps.add((), members, truth)
    spread = np.abs(MEMBERS[:, :, None] - MEMBERS[:, None]).sum((1, 2)) / 12
    wanted = np.abs(MEMBERS - TRUTH[:, None]).mean(1) - spread
    np.testing.assert_allclose(crps.result(ALONE), mean(wanted).mean(0), rtol=1e-12)

    energy = EnergyScore((2,), 2, weights, points, members=3)
    energy.add((), [0, 1], members, truth)
    distance = np.sqrt(mean(((MEMBERS - TRUTH[:, None]) ** 2).swapaxes(0, 1))).mean(0)
    pairs = np.sqrt(mean((np.diff(MEMBERS, axis=1) ** 2).swapaxes(0, 1))).mean(0)
    np.testing.assert_allclose(energy.result(ALONE), (distance - pairs / 2).mean(0), rtol=1e-12)

    ranks = RankHistogram((2,), 3, weights, points)
    ranks.add((), members, truth)
    rank = (TRUTH[:, None] > MEMBERS).sum(1)
    wanted = np.stack([(inside * (rank == r)).sum((0, 2, 3)) for r in range(4)], axis=-1)
    np.testing.assert_allclose(
        ranks.result(ALONE), wanted / wanted.sum(-1, keepdims=True), rtol=1e-12
    )


def test_statistics_are_weighted_by_points():
    values = TRUTH[:, 0].copy()
    moments = Moments.of(values, AREAS)
    mean = np.average(values, weights=np.broadcast_to(AREAS, values.shape))
    assert moments.mean == pytest.approx(mean, abs=1e-14)
    assert moments.squares == pytest.approx(((values - mean) ** 2 * AREAS).sum(), rel=1e-13)
    values[0, 2, 3] = np.nan
    inside = AREAS * ~np.isnan(values)
    mean = np.nansum(values * inside) / inside.sum()
    assert Moments.of(values, AREAS).mean == pytest.approx(mean, abs=1e-14)
    twice = np.where(np.median(AREAS) < AREAS, 2.0, 1.0)
    repeated = np.repeat(TRUTH[0, 0].ravel(), twice.ravel().astype(int))[None]
    found = weighted_quantiles(TRUTH[0, 0], twice)
    # A value of weight 2 is one step instead of two: both have the same median.
    middle = len(found) // 2
    assert found[middle] == pytest.approx(weighted_quantiles(repeated, np.ones(1))[middle], abs=0.1)


@pytest.mark.parametrize(
    ("mask", "gradient"),
    [pytest.param("everywhere", 0.0, marks=pytest.mark.exhaustive), ("some", 0.7)],
)
def test_the_loss_is_weighted_by_points_and_does_not_wrap_round(mask, gradient):
    points = MASKS[mask]
    channels = Channels((Channel("a"), Channel("b")), (), (), ())
    config = StandardLossConfig(gradient=gradient, level_weight=False, tendency=False)
    scale = torch.ones(2, 1, 1, dtype=torch.float64)
    forecast, truth = MEMBERS[:, 0], TRUTH
    valid = np.ones_like(VALID) if points is None else VALID
    found = build_loss(config, channels, GRID, slice(0, ROWS), scale, points)(
        *map(torch.from_numpy, (forecast, truth))
    )
    error = (forecast - truth) * valid
    norm = (AREAS * valid).sum((1, 2)) if points is not None else np.array([AREAS.sum()] * 2)
    wanted = (error**2 * AREAS).sum((2, 3)) / norm
    east = np.diff(error, axis=-1) ** 2 * (AREAS * valid)[:, :, :-1] * valid[:, :, 1:]
    both = (AREAS[1:] + AREAS[:-1]) / 2 * valid[:, 1:] * valid[:, :-1]
    south = np.diff(error, axis=-2) ** 2 * both
    wanted = wanted + gradient * (east.sum((2, 3)) + south.sum((2, 3))) / norm
    assert found.item() == pytest.approx(wanted.mean(), rel=1e-12)
    halves = [slice(0, 3), slice(3, ROWS)]
    if not gradient and points is None:
        parts = [
            build_loss(config, channels, GRID, rows, scale)(
                *(torch.from_numpy(x[:, :, rows]) for x in (forecast, truth))
            )
            for rows in halves
        ]
        assert sum(parts).item() == pytest.approx(found.item(), rel=1e-13)

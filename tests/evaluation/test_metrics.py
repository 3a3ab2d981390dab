"""Metrics against their definitions, on one rank and summed over bands of rows."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from credit_dp.data.grid import Grid, row_weights
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.metrics import (
    LATITUDE_BANDS,
    Activity,
    AnomalyCorrelation,
    Bias,
    EnergyScore,
    EnsembleMeanRMSE,
    EnsembleSpread,
    FairCRPS,
    RankHistogram,
    RootMeanSquare,
    ZonalSpectra,
    has_spectra,
    latitude_band_weights,
)
from credit_dp.sphere import EARTH_RADIUS
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers

LATITUDES_WITH_POLES = np.linspace(90, -90, 13)


def errors() -> torch.Tensor:
    """(initial times, channels, rows, columns)"""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 2, 13, 6, generator=generator, dtype=torch.float64)


def summed_rmse(manager: DomainParallelManager) -> torch.Tensor:
    rows = manager.rows(13)
    sums = RootMeanSquare((1, 2), torch.as_tensor(row_weights(LATITUDES_WITH_POLES)[rows].copy()))
    for sample in range(manager.dp_rank, 7, manager.dp_world_size):
        sums.add((0,), errors()[sample : sample + 1, :, rows])
    return sums.result(manager)


def by_definition() -> np.ndarray:
    """Return the RMSE: the mean over area and time, then the root."""
    squares = (errors().numpy() ** 2).mean(axis=(0, 3))
    return np.sqrt(np.average(squares, axis=1, weights=row_weights(LATITUDES_WITH_POLES)))


@pytest.mark.parametrize(
    ("ranks", "domain"), tiers(fast=[(3, 1)], slow=[(4, 2)], exhaustive=[(3, 3)])
)
def test_any_mesh_finds_the_same(ranks, domain):
    for found in on_processes(ranks, summed_rmse, domain=domain):
        assert found[0].numpy() == pytest.approx(by_definition(), rel=1e-13)


ROWS, COLUMNS, TIMES, MEMBERS = 17, 8, 5, 4
LATITUDE = np.linspace(90, -90, ROWS)
GRID = Grid(LATITUDE, np.arange(8) * 45.0)
DIMS = ("time", "member", "channel", "latitude", "longitude")


def field(seed: int, masked: bool = False) -> xr.DataArray:
    random = np.random.default_rng(seed)
    values = 280 + random.normal(size=(TIMES, MEMBERS, 2, ROWS, COLUMNS)).cumsum(axis=1)
    values[:, :, 1] *= 3
    array = xr.DataArray(values, dims=DIMS, coords={"latitude": LATITUDE})
    return array.where(mask()) if masked else array


def mask() -> xr.DataArray:
    """The second channel has no values on some points, among them a whole row."""
    inside = np.random.default_rng(9).random((2, ROWS, COLUMNS)) > 0.2
    inside[0] = True
    inside[1, 6:9] = True
    inside[1, 3] = False
    return xr.DataArray(inside, dims=DIMS[2:], coords={"latitude": LATITUDE})


def fields(masked: bool) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Members, truth and climatology."""
    return field(1, masked), field(2, masked).isel(member=0), field(3, masked).isel(member=0)


def weights() -> xr.DataArray:
    """Compute weights by definition: the sine of the cells' edges, which end at the poles."""
    edges = np.concatenate([[90.0], (LATITUDE[1:] + LATITUDE[:-1]) / 2, [-90.0]])
    area = -np.diff(np.sin(np.deg2rad(edges)))
    return xr.DataArray(area, dims="latitude", coords={"latitude": LATITUDE})


def globe(array: xr.DataArray) -> xr.DataArray:
    return array.weighted(weights()).mean(["latitude", "longitude"])


def correlation(members: xr.DataArray, truth: xr.DataArray, normal: xr.DataArray) -> xr.DataArray:
    one, two = members.mean("member") - normal, truth - normal
    return (globe(one * two) / np.sqrt(globe(one**2) * globe(two**2))).mean("time")


def fair_crps(members: xr.DataArray, truth: xr.DataArray, _: xr.DataArray) -> xr.DataArray:
    """Compute the fair CRPS from all pairs of members, one by one."""
    pairs = abs(members - members.rename(member="other")).sum(["member", "other"], skipna=False)
    score = abs(members - truth).mean("member") - pairs / (2 * MEMBERS * (MEMBERS - 1))
    return globe(score).mean("time")


def spread(members: xr.DataArray, _: xr.DataArray, __: xr.DataArray) -> xr.DataArray:
    return np.sqrt(globe(members.var("member", ddof=1, skipna=False)).mean("time"))


def energy_score(members: xr.DataArray, truth: xr.DataArray, _: xr.DataArray) -> xr.DataArray:
    """WeatherBench 2's: the spread is of neighbouring members."""
    skill = np.sqrt(globe((members - truth) ** 2)).mean("member")
    neighbours = np.sqrt(globe(members.diff("member") ** 2)).mean("member")
    return (skill - neighbours / 2).mean("time")


def ranks(members: xr.DataArray, truth: xr.DataArray, _: xr.DataArray) -> xr.DataArray:
    """How often the truth is above none, one, ... of the members."""
    rank = (members < truth).sum("member").where(truth.notnull())
    shares = [globe((rank == n).where(rank.notnull())).mean("time") for n in range(MEMBERS + 1)]
    return xr.concat(shares, "rank").transpose("channel", "rank")


def rmse(members: xr.DataArray, truth: xr.DataArray, _: xr.DataArray) -> xr.DataArray:
    return np.sqrt(globe((members.mean("member") - truth) ** 2).mean("time"))


def bias(members: xr.DataArray, truth: xr.DataArray, _: xr.DataArray) -> xr.DataArray:
    return globe(members.mean("member") - truth).mean("time")


def activity(members: xr.DataArray, _: xr.DataArray, normal: xr.DataArray) -> xr.DataArray:
    return np.sqrt(globe((members.mean("member") - normal) ** 2).mean("time"))


def spectra(members: xr.DataArray, _: xr.DataArray, __: xr.DataArray) -> xr.DataArray:
    """Row by row with explicit sums of cosines and sines."""
    rows = members.isel(member=0)
    k = xr.DataArray(np.arange(COLUMNS // 2 + 1), dims="k")
    angle = 2 * np.pi * k * xr.DataArray(np.arange(COLUMNS), dims="longitude") / COLUMNS
    real = (rows * np.cos(angle)).mean("longitude", skipna=False)
    imaginary = (rows * np.sin(angle)).mean("longitude", skipna=False)
    length = 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(rows["latitude"]))
    power = length * (real**2 + imaginary**2) * xr.where(k > 0, 2, 1)
    found = [
        power.where((power["latitude"] >= south) & (power["latitude"] <= north))
        .weighted(weights())
        .mean("latitude")
        for south, north in LATITUDE_BANDS.values()
    ]
    return xr.concat(found, "band").mean("time").transpose("channel", "band", "k")


DEFINITIONS: dict[str, Callable[..., xr.DataArray]] = {
    "rmse": rmse,
    "bias": bias,
    "acc": correlation,
    "activity": activity,
    "crps": fair_crps,
    "spread": spread,
    "energy": energy_score,
    "ranks": ranks,
    "skill": rmse,
    "spectra": spectra,
}


def collected(manager: DomainParallelManager, masked: bool) -> dict[str, Tensor]:
    """Collect everything at index 1 of two, from this rank's rows and initial times."""
    rows = manager.rows(ROWS)
    area = torch.from_numpy(row_weights(LATITUDE)[rows].copy())
    points = ValidPoints(torch.from_numpy(mask().values[:, rows].copy())) if masked else None
    shape = (2, 2)
    scores = {
        "rmse": RootMeanSquare(shape, area, points),
        "bias": Bias(shape, area, points),
        "acc": AnomalyCorrelation(shape, TIMES, area, points),
        "activity": Activity(shape, area, points),
        "crps": FairCRPS(shape, area, points),
        "spread": EnsembleSpread(shape, area, points),
        "energy": EnergyScore(shape, TIMES, area, points, members=MEMBERS),
        "ranks": RankHistogram(shape, MEMBERS, area, points),
        "skill": EnsembleMeanRMSE(shape, area, points),
        "spectra": ZonalSpectra(shape, GRID, rows, points),
    }
    members, truth, normal = (torch.from_numpy(x.values[..., rows, :]) for x in fields(masked))
    for first in range(manager.dp_rank, TIMES, manager.dp_world_size):
        one = slice(first, first + 1)
        x, y, c = members[one], truth[one], normal[one]
        mean = x.mean(dim=1)
        given = {
            "rmse": (mean - y,),
            "bias": (mean, y),
            "acc": ([first], mean - c, y - c),
            "activity": (mean - c,),
            "crps": (x, y),
            "spread": (x,),
            "energy": ([first], x, y),
            "ranks": (x, y),
            "skill": (x, y),
            "spectra": (x[:, 0],),
        }
        for name, score in scores.items():
            score.add((1,), *given[name])
    return {name: score.result(manager)[1] for name, score in scores.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_each_score_is_its_definition(masked: bool) -> None:
    found = collected(DomainParallelManager(1, 1), masked)
    for name, by_definition in DEFINITIONS.items():
        wanted = by_definition(*fields(masked)).values
        assert found[name].numpy() == pytest.approx(wanted, rel=1e-12), name


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_bands_of_rows_add_up(masked: bool) -> None:
    alone = collected(DomainParallelManager(1, 1), masked)
    for found in on_threads(3, collected, masked):
        for name, wanted in alone.items():
            assert found[name].numpy() == pytest.approx(wanted.numpy(), rel=1e-12), name


@pytest.mark.slow
def test_initial_times_on_other_ranks_add_up() -> None:
    alone = collected(DomainParallelManager(1, 1), True)
    for found in on_processes(4, collected, True, domain=2):
        for name, wanted in alone.items():
            assert found[name].numpy() == pytest.approx(wanted.numpy(), rel=1e-12), name


def test_one_member_has_no_spread() -> None:
    """WeatherBench 2: its score is the mean absolute error."""
    members, truth, _ = fields(False)
    area = torch.from_numpy(row_weights(LATITUDE))
    crps, one = FairCRPS((2,), area), EnsembleSpread((2,), area)
    x, y = torch.from_numpy(members.values[:, :1]), torch.from_numpy(truth.values)
    crps.add((), x, y)
    one.add((), x)
    manager = DomainParallelManager(1, 1)
    wanted = globe(abs(members.isel(member=0) - truth)).mean("time").values
    assert crps.result(manager).numpy() == pytest.approx(wanted, rel=1e-12)
    assert one.result(manager).tolist() == [0, 0]


def test_equal_members_share_the_truth_among_their_ranks() -> None:
    """The mean over all orders in which WeatherBench 2 may break the ties."""
    random = np.random.default_rng(4)
    members = random.integers(0, 3, (1, 3, 1, 2, 50))
    truth = random.integers(0, 3, (1, 1, 2, 50))
    found = RankHistogram((1,), 3, torch.tensor([1.0, 2.0]))
    found.add((), torch.from_numpy(members).double(), torch.from_numpy(truth).double())
    wanted = np.zeros(4)
    for row, column in np.ndindex(2, 50):
        values = [truth[0, 0, row, column], *members[0, :, 0, row, column]]
        orders = list(permutations(range(4)))
        for order in orders:
            # Sorted by value, and by the place in the order among equal values.
            place = sorted(range(4), key=lambda n: (values[n], order[n])).index(0)
            wanted[place] += (1 + row) / len(orders)
    ranks = found.result(DomainParallelManager(1, 1))[0].numpy()
    assert ranks == pytest.approx(wanted / wanted.sum(), rel=1e-12)


@pytest.mark.slow
def test_a_fair_score_does_not_know_how_many_members_there_are() -> None:
    """Members drawn like the truth score half the mean distance of two draws, for any M."""
    random = torch.Generator().manual_seed(0)
    area = torch.ones(400, dtype=torch.float64)
    for count in (2, 3, 9):
        crps = FairCRPS((1,), area)
        draws = torch.randn(1, count + 1, 1, 400, 500, generator=random, dtype=torch.float64)
        crps.add((), draws[:, 1:], draws[:, 0])
        found = crps.result(DomainParallelManager(1, 1)).item()
        assert found == pytest.approx(1 / np.sqrt(np.pi), abs=0.01)


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_what_is_kept_apart_may_be_added_at_once(masked: bool) -> None:
    """Lead times: here the initial times of the other tests."""
    members, truth, normal = (torch.from_numpy(x.values.copy()) for x in fields(masked))
    area = torch.from_numpy(row_weights(LATITUDE))
    points = ValidPoints(torch.from_numpy(mask().values)) if masked else None
    several = members.swapaxes(0, 1)
    shape = (1, TIMES, 2)

    def scores() -> dict[str, Any]:
        return {
            "rmse": RootMeanSquare(shape, area, points),
            "bias": Bias(shape, area, points),
            "acc": AnomalyCorrelation(shape, 1, area, points),
            "crps": FairCRPS(shape, area, points),
            "spread": EnsembleSpread(shape, area, points),
            "spectra": ZonalSpectra(shape, GRID, slice(None), points),
        }

    def add(to: dict[str, Any], leads: slice | int) -> None:
        x, y, c = several[:, leads], truth[leads], normal[leads]
        mean = x.mean(dim=0)
        to["rmse"].add((0, leads), (mean - y)[None])
        to["bias"].add((0, leads), mean[None], y[None])
        to["acc"].add((0, leads), [0], (mean - c)[None], (y - c)[None])
        to["crps"].add((0, leads), x[None], y[None])
        to["spread"].add((0, leads), x[None])
        to["spectra"].add((0, leads), x)

    together, apart = scores(), scores()
    for leads in (slice(0, 2), slice(2, TIMES)):
        add(together, leads)
    for lead in range(TIMES):
        add(apart, lead)
    for name, score in together.items():
        found, wanted = (one.result(DomainParallelManager(1, 1)) for one in (score, apart[name]))
        assert found.numpy() == pytest.approx(wanted.numpy(), rel=1e-13, nan_ok=True), name


def test_spectra_are_of_rows_that_go_round_the_globe():
    latitude = np.linspace(30, -30, 7)
    north, tropics, south = latitude_band_weights(Grid(latitude, np.arange(8) * 45.0)).numpy()
    edges = np.sin(np.radians(np.linspace(35, -35, 8)))
    area = -np.diff(edges) / -np.diff(edges).mean()
    assert tropics == pytest.approx(area * (np.abs(latitude) <= 20), rel=1e-14)
    assert north == pytest.approx(area * (latitude == 30), rel=1e-14)
    assert south == pytest.approx(area * (latitude == -30), rel=1e-14)
    assert has_spectra(Grid(latitude, np.arange(8) * 45.0))
    assert has_spectra(Grid(latitude, np.arange(8) * 10.0))  # a region
    assert not has_spectra(Grid(latitude[:3] + 55, np.arange(8) * 45.0))

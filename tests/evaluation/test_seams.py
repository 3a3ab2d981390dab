"""The ratio at band edges: what it finds, and what it leaves in peace."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.evaluation import seams
from credit_dp.evaluation.row_differences import RowDifferences
from credit_dp.evaluation.seams import (
    Seams,
    contrasts,
    find_seams,
    row_differences,
    seams_told,
    student_quantile,
)
from tests.ranks import on_processes, on_threads

ROWS, COLUMNS, BANDS = 60, 48, 4
EDGES = RowPartition.balanced(ROWS, BANDS).bounds[1:-1]


def judged(fields: np.ndarray, edges: tuple[int, ...] = EDGES, tests: int = 1) -> Seams:
    """Of fields `(T, H, W)`."""
    found = find_seams(row_differences(fields).mean(axis=0), edges, tests)
    assert found is not None
    return found


def smooth() -> np.ndarray:
    """Waves that travel, on a gradient with latitude."""
    time, row, column = np.ogrid[:4, :ROWS, :COLUMNS]
    angle = 2 * np.pi * column / COLUMNS
    return 5.0 * row + 3 * np.sin(2 * angle + row / 9 + time) + np.cos(angle - row / 7)


def noise(seed: int, times: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(times, ROWS, COLUMNS))


def walk(seed: int) -> np.ndarray:
    """Rough at all scales, as weather is."""
    return np.cumsum(noise(seed), axis=1)


def test_a_smooth_field_has_none() -> None:
    found = judged(smooth())
    assert found.across.mean == pytest.approx(1, abs=0.005)
    assert found.across.of_edges == pytest.approx([1] * 3, abs=0.005)
    assert not found.is_far


def test_a_gradient_alone_cancels() -> None:
    assert judged(np.add.outer(np.arange(ROWS) ** 1.0, np.zeros(COLUMNS))[None]).across.mean == 1


@pytest.mark.parametrize("make", [noise, walk])
def test_random_fields_do_not_alarm(make: Callable[[int], np.ndarray]) -> None:
    """One in a hundred may."""
    far = sum(judged(make(seed), tests=seams.tests_of(EDGES)).is_far for seed in range(300))
    assert far <= 8


def step(fields: np.ndarray) -> np.ndarray:
    """One band a little off."""
    moved = fields.copy()
    moved[:, EDGES[0] : EDGES[1]] += 3 * np.abs(np.diff(fields, axis=1)).mean()
    return moved


def shifted(fields: np.ndarray) -> np.ndarray:
    """One band in the wrong place: as of some columns to the east."""
    moved = fields.copy()
    moved[:, EDGES[1] : EDGES[2]] = np.roll(moved[:, EDGES[1] : EDGES[2]], 12, axis=-1)
    return moved


def zero_padded(fields: np.ndarray) -> np.ndarray:
    """A few convolutions of each band on its own, with rows of zeros beyond its edges."""
    bounds = (0, *EDGES, ROWS)
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64) / 9
    done = []
    for first, stop in pairwise(bounds):
        band = torch.from_numpy(fields[:, None, first:stop])
        for _ in range(2):
            band = F.conv2d(F.pad(F.pad(band, (1, 1, 0, 0), "circular"), (0, 0, 1, 1)), kernel)
        done.append(band[:, 0].numpy())
    return np.concatenate(done, axis=1)


@pytest.mark.parametrize("wrong", [step, shifted])
@pytest.mark.parametrize("make", [smooth, lambda: walk(1)], ids=["smooth", "rough"])
def test_wrong_bands_are_found(
    make: Callable[[], np.ndarray], wrong: Callable[[np.ndarray], np.ndarray]
) -> None:
    fields = make()
    found = judged(wrong(fields), tests=500)
    assert found.is_far
    assert max(found.across.of_edges) > 1.05
    elsewhere = tuple(edge - 4 for edge in EDGES)
    assert not judged(wrong(fields), elsewhere).is_far


def test_wrong_padding_is_found() -> None:
    """Of a field in its own standard deviations, as models see it."""
    whole = walk(2) + 10
    found = judged(zero_padded(whole), tests=500)
    # Both sides of an edge are pulled to the same value.
    assert found.across.mean < 0.5
    assert found.beside is not None
    assert found.beside.is_far
    assert not judged(zero_padded(whole), tuple(edge + 5 for edge in EDGES), tests=500).is_far


def test_a_flat_place_is_no_seam() -> None:
    """Where a gradient turns, as at the equator, the difference is smaller than beside it."""
    turning = np.abs(np.arange(ROWS) - 29.5)[None, :, None] + 0.1 * noise(3)
    found = judged(turning, (30,))
    assert found.across.mean < 0.5
    assert not found.is_far


def test_points_without_values_are_left_out() -> None:
    holed = walk(4)
    holed[:, 20:40, ::3] = np.nan
    holed[:, 3:6] = np.nan
    found = judged(holed)
    assert np.isfinite(found.across.mean)
    assert not found.is_far
    holed[:, EDGES[1] - 3 :] = np.nan
    found = judged(holed)
    assert np.isnan(found.across.of_edges).tolist() == [False, True, True]
    assert found.across.mean == pytest.approx(found.across.of_edges[0])
    assert not found.is_far


def test_too_few_rows_say_nothing() -> None:
    assert find_seams(np.ones(9), (4,), 1) is None
    assert find_seams(np.full(59, np.nan), EDGES, 1) is None
    assert find_seams(np.zeros(59), EDGES, 1) is None


def test_quantiles_are_those_of_tables() -> None:
    """Abramowitz & Stegun, table 26.10."""
    assert student_quantile(0.005, 10) == pytest.approx(3.169, abs=2e-3)
    assert student_quantile(0.0005, 20) == pytest.approx(3.850, abs=2e-3)
    assert student_quantile(0.0005, 8) == pytest.approx(5.041, abs=2e-2)


def test_contrasts_have_no_ends() -> None:
    found = contrasts(np.array([1.0, 2, 1, 0, 0, 0]))
    assert np.isnan(found[[0, -1]]).all()
    assert found[1:4].tolist() == [1 / 3, 0, -1]
    assert np.isnan(found[4])


def collected(manager: DomainParallelManager) -> np.ndarray:
    fields = torch.from_numpy(walk(5).reshape(2, 2, ROWS, COLUMNS))
    fields[:, 1, 28:33, 5] = float("nan")
    fields[:, 1, 50:] = float("nan")
    sums = RowDifferences((3, 2), ROWS, manager, torch.device("cpu"))
    for sample in range(manager.dp_rank, 2, manager.dp_world_size):
        sums.add((1,), fields[sample : sample + 1, :, manager.rows(ROWS)])
    return sums.result().numpy()


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_bands_add_up(ranks: int) -> None:
    wanted = collected(DomainParallelManager(1, 1))
    assert not wanted[[0, 2]].any()
    fields = walk(5).reshape(2, 2, ROWS, COLUMNS)
    fields[:, 1, 28:33, 5] = np.nan
    fields[:, 1, 50:] = np.nan
    sums = row_differences(fields).sum(axis=0)
    assert np.isnan(sums).any()
    assert wanted[1] == pytest.approx(sums, rel=1e-12, nan_ok=True)
    for found in on_threads(ranks, collected):
        assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@pytest.mark.slow
def test_initial_times_on_other_ranks_add_up() -> None:
    wanted = collected(DomainParallelManager(1, 1))
    for found in on_processes(4, collected, domain=2):
        assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)


def test_all_fields_are_told_in_a_line() -> None:
    fields = np.stack([walk(seed) for seed in range(3)])
    fields[1] = step(fields[1])
    found = row_differences(fields).mean(axis=1)
    told = seams_told(found, EDGES, ("a", "b", "c"))
    assert told.endswith("; SEAMS IN b")
    right = row_differences(np.stack([walk(seed) for seed in range(3)])).mean(axis=1)
    told = seams_told(right, EDGES, ("a", "b", "c"))
    ratio, low, high = (float(word.strip("(),;")) for word in np.array(told.split())[[0, 3, 5]])
    assert low < ratio < high
    assert "SEAMS" not in told
    assert seams_told(found, (), ("a", "b", "c")) == ""
    assert seams_told(found, (1,), ("a", "b", "c")) == ""

import itertools

import numpy as np
import pytest

from credit_dp.data.grid import Grid, row_weights
from credit_dp.data.regrid import CellLayout, Regridder, regular_grid
from tests.tables import each

EXACT = 1e-12
GRIDS = [(19, 36), (32, 64), (5, 7), (90, 36), (2, 3)]


def field(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(280, 20, size=(rows, columns))


def mean(values: np.ndarray, grid: Grid) -> float:
    return float((values * row_weights(grid.latitude)[:, None]).mean())


def regridder(old: tuple[int, int], new: tuple[int, int], west: float = 0.0) -> Regridder:
    grid = regular_grid(*old)
    layout = CellLayout.of(Grid(grid.latitude, grid.longitude + west))
    return Regridder(layout, regular_grid(*new))


@each("old, new, west", itertools.product(GRIDS, GRIDS, [0.0, -180.0, 1.3]))
def test_global_mean_stays(old: tuple[int, int], new: tuple[int, int], west: float) -> None:
    values = field(*old)
    result = regridder(old, new, west)(values.ravel())
    assert result.shape == new
    before, after = mean(values, regular_grid(*old)), mean(result, regular_grid(*new))
    assert abs(after - before) <= EXACT * abs(before)


@each("old, new", itertools.product(GRIDS, GRIDS))
def test_constants_stay_in_float32(old: tuple[int, int], new: tuple[int, int]) -> None:
    values = np.full(old, 273.15, dtype=np.float32)
    result = regridder(old, new)(values.ravel())
    assert result.dtype == np.float32
    assert (result == np.float32(273.15)).all()


@each("grid", GRIDS)
def test_the_same_grid_changes_nothing(grid: tuple[int, int]) -> None:
    values = field(*grid)
    np.testing.assert_allclose(regridder(grid, grid)(values.ravel()), values, rtol=EXACT)


def test_columns_of_other_origin_are_turned() -> None:
    """Columns from -180 on hold the same globe as those from 0 on."""
    values = field(6, 8)
    turned = regridder((6, 8), (6, 8), west=-180.0)(values.ravel())
    np.testing.assert_allclose(turned, np.roll(values, 4, axis=1), rtol=EXACT)


def test_halving_is_the_mean_over_cells_by_hand() -> None:
    """Four rows without poles to two: weights are differences of sin(latitude)."""
    values = field(4, 4)
    result = regridder((4, 4), (2, 1))(values.ravel())
    inner = np.sin(np.deg2rad(45))
    north = ((1 - inner) * values[0] + inner * values[1]).mean()
    south = (inner * values[2] + (1 - inner) * values[3]).mean()
    np.testing.assert_allclose(result, [[north], [south]], rtol=EXACT)


def test_gaps_leave_the_mean_over_the_valid_part() -> None:
    values = np.array([[1.0, 2.0, np.nan, np.nan], [5.0, np.nan, np.nan, np.nan]])
    # Two rows stay, four columns become two whose edges lie in the middle of old columns.
    grid = regular_grid(2, 4)
    target = Grid(grid.latitude, np.array([45.0, 225.0]))
    result = Regridder(CellLayout.of(grid), target)(values.ravel())
    np.testing.assert_allclose(result, [[1.5, np.nan], [5.0, np.nan]], rtol=EXACT)


def test_gaps_do_not_spread() -> None:
    values = field(12, 12)
    values[2:5, 3:7] = np.nan
    result = regridder((12, 12), (24, 24))(values.ravel())
    assert np.isnan(result).mean() == pytest.approx(12 / 144, abs=0.04)
    assert np.nanmin(result) >= np.nanmin(values) - 1e-9
    assert np.nanmax(result) <= np.nanmax(values) + 1e-9


def test_many_fields_one_by_one() -> None:
    values = np.stack([field(9, 8, seed) for seed in range(6)]).reshape(2, 3, 72)
    using = regridder((9, 8), (4, 6))
    result = using(values)
    assert result.shape == (2, 3, 4, 6)
    assert np.array_equal(result[1, 2], using(values[1, 2]))


@each("rows, pole", [(121, True), (32, False)])
def test_regular_grids_have_poles_if_odd(rows: int, pole: bool) -> None:
    latitude, longitude = regular_grid(rows, 4).latitude, regular_grid(rows, 4).longitude
    assert (latitude[0] == 90) == pole
    np.testing.assert_allclose(latitude, -latitude[::-1], atol=1e-12)
    assert longitude.tolist() == [0, 90, 180, 270]

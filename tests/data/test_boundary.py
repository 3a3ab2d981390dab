"""The rim of a region, and the interpolation of a driver to its points, against formulas."""

import numpy as np
import pytest

from credit_dp.data.boundary import check_boundary, given_share, rim_mask
from credit_dp.data.grid import Grid
from credit_dp.data.regrid import PointInterpolation
from credit_dp.errors import UserError
from tests.tables import each

BOX = Grid(np.linspace(60, 40, 11), (np.arange(13) * 2.0 - 12) % 360)  # 348 to 12 degrees east
GLOBE = Grid(np.linspace(90, -90, 19), np.arange(36) * 10.0)


def box(rows, columns):
    return Grid(np.linspace(60, 40, rows), np.arange(columns) * 2.0)


def test_the_rim_is_what_is_near_an_edge():
    mask = rim_mask(box(7, 9), 2)
    expected = [
        [min(row, 6 - row, column, 8 - column) < 2 for column in range(9)] for row in range(7)
    ]
    assert np.array_equal(mask, expected)
    assert not rim_mask(box(7, 9), 0).any()


def test_the_given_share_falls_from_the_rim_inward():
    share = given_share(box(9, 10), 2, 2)
    inner = {1: 0.5378828427399902, 2: 0.2384058440442351}  # 1 - tanh(j / 2)
    for row in range(9):
        for column in range(10):
            edge = min(row, 8 - row, column, 9 - column)
            assert share[row, column] == pytest.approx(inner.get(edge - 1, float(edge < 2)))
    assert np.array_equal(given_share(box(7, 9), 2, 0), rim_mask(box(7, 9), 2))


def test_columns_round_the_globe_have_no_rim():
    tropics = Grid(np.linspace(30, -30, 7), np.arange(4) * 90.0)
    rim = np.array([1, 1, 0, 0, 0, 1, 1])[:, None] * np.ones(4)
    assert np.array_equal(rim_mask(tropics, 2), rim)
    share = np.array([1, 0.5378828427399902, 0, 0, 0, 0.5378828427399902, 1])  # 1 - tanh(1 / 2)
    found = given_share(tropics, 1, 1)
    assert found.shape == (7, 4)
    assert found == pytest.approx(share[:, None] * np.ones(4), rel=1e-15)
    check_boundary(3, 0, tropics, "tropics.zarr")
    with pytest.raises(UserError, match=r"^data.boundary: 4 rows and columns at each edge leave"):
        check_boundary(4, 0, tropics, "tropics.zarr")


def test_rims_that_make_no_sense_are_refused():
    check_boundary(0, 0, GLOBE, "globe.zarr")
    check_boundary(5, 0, BOX, "box.zarr")
    check_boundary(2, 3, BOX, "box.zarr")
    with pytest.raises(UserError, match=r"^data.boundary: is for regions, but globe.zarr covers"):
        check_boundary(1, 0, GLOBE, "globe.zarr")
    with pytest.raises(UserError, match=r"^data.boundary: 6 rows .* leave none of the 11x13 of b"):
        check_boundary(6, 0, BOX, "box.zarr")
    with pytest.raises(
        UserError, match=r"^data.relaxation: 6 rows .* leave none of the 11x13 of b"
    ):
        check_boundary(2, 4, BOX, "box.zarr")


def on_grid(grid: Grid, latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Interpolate a field that is a product of lines, which bilinear interpolation keeps."""
    east = (grid.longitude + 180) % 360 - 180
    field = (3 + 0.1 * grid.latitude)[:, None] * (2 - 0.05 * east)
    return PointInterpolation(grid, latitude, longitude)(np.stack([field, -field]))


@each("westward", [False, True])
def test_products_of_lines_are_kept_to_rounding(westward):
    random = np.random.default_rng(3)
    latitude, east = random.uniform(40, 60, (4, 5)), random.uniform(-12, 12, (4, 5))
    latitude[0, :2], east[0, :3] = (60, 40), (-12, 12, 0)
    grid = Grid(BOX.latitude, BOX.longitude[::-1]) if westward else BOX
    expected = (3 + 0.1 * latitude) * (2 - 0.05 * east)
    for turned in (east, east % 360):
        found = on_grid(grid, latitude, turned)
        assert found.shape == (2, 4, 5)
        assert np.abs(found[0] - expected).max() < 1e-12
        assert np.array_equal(found[1], -found[0])


def test_a_globe_has_no_seam_and_values_at_the_poles():
    """Between the last column and the first, and beyond the outermost row of a Gaussian grid."""
    gaussian = Grid(np.linspace(85, -85, 18), np.arange(36) * 10.0)
    field = np.random.default_rng(1).normal(size=(18, 36)).astype(np.float32)
    latitude, longitude = np.array([85, 88, -90.0, 80]), np.array([355, 10, 357.5, -2])
    found = PointInterpolation(gaussian, latitude, longitude)(field)
    north = field[0].astype(float)
    row = field[:2].astype(float).mean(0)
    expected = [
        (north[35] + north[0]) / 2,
        north[1],
        0.25 * float(field[17, 35]) + 0.75 * float(field[17, 0]),
        0.2 * row[35] + 0.8 * row[0],
    ]
    assert found.dtype == np.float32
    assert found == pytest.approx(np.array(expected, np.float32), rel=1e-7)


def test_valid_points_share_the_weight_of_missing_ones():
    field = np.arange(4.0).reshape(2, 2)
    field[0, 0] = np.nan
    grid = Grid(np.array([10.0, 0]), np.array([20.0, 30]))
    points = np.array([5.0, 2.5, 10]), np.array([25.0, 22.5, 20])
    found = PointInterpolation(grid, *points)(field)
    weights = np.array([[0, 1, 1, 1], [0, 0.25 * 0.25, 0.75 * 0.75, 0.25 * 0.75]])
    expected = (weights * np.arange(4)).sum(1) / weights.sum(1)
    assert found[:2] == pytest.approx(expected, rel=1e-14)
    assert np.isnan(found[2])


@each(
    "latitude, longitude, said",
    [
        (61.0, 0.0, "covers latitude 60 to 40, but the region has points at 61"),
        (39.5, 0.0, "covers latitude 60 to 40, but the region has points at 39.5"),
        (50.0, 13.0, "covers longitude 348 to 12, but the region has points at 13"),
        (50.0, 180.0, "covers longitude 348 to 12, but the region has points at 180"),
        (50.0, 347.0, "covers longitude 348 to 12, but the region has points at 347"),
    ],
)
def test_points_that_a_region_does_not_cover_are_refused(latitude, longitude, said):
    inside = PointInterpolation(BOX, np.array([60.0005, 39.9995]), np.array([347.9995, 12.0005]))
    assert inside(np.ones((11, 13))) == pytest.approx([1, 1])  # rounded coordinates are no gap
    points = np.array([50.0, latitude]), np.array([0.0, longitude])
    with pytest.raises(UserError, match=said):
        PointInterpolation(BOX, *points)

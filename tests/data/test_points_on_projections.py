"""Interpolation from grids on projections to points, against PROJ's positions of the points."""

import numpy as np
import pytest

from credit_dp.data.grid import Grid
from credit_dp.data.regrid import PointInterpolation, outside_points
from credit_dp.errors import UserError
from tests.data.proj import project
from tests.tables import each

# PROJ's projection, its x of columns and its y of rows. The first and the last lie across longitude
# 180; the second has the pole, columns that go west, and an ellipsoid.
GRIDS = {
    "lambert": (
        "+proj=lcc +lat_1=33 +lat_2=45 +lat_0=39 +lon_0=178 +R=6371229",
        2.5e4 * (np.arange(50) - 20),
        2.5e4 * (17 - np.arange(40)),
    ),
    "polar stereographic": (
        "+proj=stere +lat_0=90 +lat_ts=60 +lon_0=-45 +ellps=WGS84",
        -5e4 * (np.arange(40) - 25),
        5e4 * (np.arange(30) - 12),
    ),
    "rotated pole": (
        {
            "grid_mapping_name": "rotated_latitude_longitude",
            "grid_north_pole_latitude": 39.25,
            "grid_north_pole_longitude": 18.0,
            "earth_radius": 6371229.0,
        },
        np.radians(0.25 * (np.arange(44) - 20)),
        np.radians(0.25 * (21 - np.arange(36))),
    ),
}


def bilinear(field: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    i = np.minimum(row, field.shape[0] - 2).astype(int)
    j = np.minimum(column, field.shape[1] - 2).astype(int)
    down, right = row - i, column - j
    north = field[i, j] * (1 - right) + field[i, j + 1] * right
    return north * (1 - down) + (field[i + 1, j] * (1 - right) + field[i + 1, j + 1] * right) * down


@each("name", GRIDS)
def test_points_on_a_projection(name: str) -> None:
    crs, x, y = GRIDS[name]
    random = np.random.default_rng(3)
    # Of the grid, its edges, and positions in the cells and beyond them.
    row = np.append(random.uniform(-9, len(y) + 9, 900), [0, len(y) - 1, 7, 0, 3.25])
    column = np.append(random.uniform(-9, len(x) + 9, 900), [0, len(x) - 1, 8, 5.5, len(x) - 1])
    wanted = np.array([x[0] + (x[1] - x[0]) * column, y[0] + (y[1] - y[0]) * row])
    mesh = np.array(np.meshgrid(x, y)).reshape(2, -1)
    longitude, latitude = project(crs, *np.concatenate([mesh, wanted], axis=1), "inverse")
    size = mesh.shape[1]
    shape = len(y), len(x)
    grid = Grid(latitude[:size].reshape(shape), longitude[:size].reshape(shape))
    grid.check(name)
    inside = (row >= 0) & (row <= len(y) - 1) & (column >= 0) & (column <= len(x) - 1)
    assert 0 < inside.sum() < len(inside)
    points = latitude[size:], longitude[size:]
    np.testing.assert_array_equal(outside_points(grid, *points), ~inside)
    field = random.normal(size=shape)
    at = tuple(each[inside] for each in points)
    found = PointInterpolation(grid, *at, projected=True)(field)
    # Cells are projected on planes of their own, which differ from the map by 2e-4 of a cell.
    np.testing.assert_allclose(found, bilinear(field, row[inside], column[inside]), atol=2e-3)
    on_points = PointInterpolation(grid, *grid.points, projected=True)(field)
    np.testing.assert_allclose(on_points, field, rtol=0, atol=1e-6)
    # 360 degrees further is the same place, and the other side of the globe is none.
    turned = PointInterpolation(grid, at[0], at[1] + 360, projected=True)(field)
    np.testing.assert_allclose(turned, found, atol=1e-6)
    assert outside_points(grid, -at[0], at[1] + 180).all()


def test_missing_values_near_points_on_a_projection() -> None:
    crs, x, y = GRIDS["lambert"]
    mesh = np.array(np.meshgrid(x, y)).reshape(2, -1)
    shape = len(y), len(x)
    longitude, latitude = project(crs, *mesh, "inverse").reshape(2, *shape)
    grid = Grid(latitude, longitude)
    field = np.ones(shape)
    field[4] = np.nan
    points = (
        np.array([latitude[4, 5], latitude[5, 5]]),
        np.array([longitude[4, 5], longitude[5, 5]]),
    )
    found = PointInterpolation(grid, *points, projected=True)(field)
    np.testing.assert_array_equal(np.isnan(found), [True, False])
    with pytest.raises(UserError, match=r"^covers latitude .* points at 80$"):
        PointInterpolation(grid, np.array([80.0]), np.array([178.0]), projected=True)

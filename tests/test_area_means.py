"""Means over neighbourhoods on the sphere are those of all points within their radius."""

import numpy as np
import pytest
import torch
from numpy.polynomial import legendre

from credit_dp.area_means import AreaMeans, NeighbourhoodSums, rows_within
from credit_dp.data.grid import Grid, unit_vectors
from credit_dp.sphere import EARTH_RADIUS

GAUSSIAN = np.rad2deg(np.arcsin(legendre.leggauss(10)[0]))[::-1]
GRIDS = {
    "poles": (np.linspace(90, -90, 13), 14),
    "odd columns, rising": (np.linspace(-90, 90, 11), 9),
    "gaussian": (GAUSSIAN, 8),
}
# km; the last has all points of the globe
RADII = (1.0, 700.0, 2500.0, 5100.0, 11000.0, 20003.0)


def averaged(grid: Grid, rows: slice, radius: float, fields: np.ndarray, valid: np.ndarray | None):
    """The means of the rows of fields on the whole globe."""
    needed = rows_within(grid.latitude, rows, radius)
    like = torch.zeros((), dtype=torch.float64)
    mask = None if valid is None else torch.from_numpy(valid[:, needed])
    sums = NeighbourhoodSums(grid.latitude, grid.weights, rows, grid[1], radius, like)
    means = AreaMeans(sums, mask)
    return means(torch.from_numpy(fields[..., needed, :])).numpy()


@pytest.mark.parametrize("form", GRIDS)
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_means_of_the_points_within_the_radius(form: str, masked: bool) -> None:
    latitude, columns = GRIDS[form]
    grid = Grid(latitude, np.arange(columns) * 360 / columns)
    random = np.random.default_rng(3)
    fields = random.normal(size=(2, 3, *grid))
    valid = random.random((3, *grid)) < 0.6 if masked else np.ones((3, *grid), dtype=bool)
    fields[:, ~valid] = 0
    points = unit_vectors(*grid.points).reshape(3, -1)
    chord = np.linalg.norm(points[:, :, None] - points[:, None], axis=0).clip(max=2)
    distance = 2 * np.arcsin(chord / 2) * EARTH_RADIUS / 1000
    area = (grid.weights[:, None] * valid).reshape(3, -1)
    for radius in RADII:
        near = distance <= radius + 1e-3
        sums, total = (near @ x[..., None] for x in (fields.reshape(2, 3, -1) * area, area))
        with np.errstate(invalid="ignore"):
            wanted = np.where(valid, (sums / total).reshape(fields.shape), 0)
        for rows in (slice(0, grid[0]), slice(0, 2), slice(3, 8)):
            found = averaged(grid, rows, radius, fields, valid if masked else None)
            assert np.abs(found - wanted[..., rows, :]).max() < 1e-12, (radius, rows)


def test_a_harmonic_is_multiplied_by_the_factor_of_its_degree() -> None:
    """The mean over a disc, by an integral of Legendre's polynomial over the disc."""
    grid = Grid(np.linspace(90, -90, 181), np.arange(360) * 1.0)
    sine, longitude = np.sin(np.deg2rad(grid.latitude)), np.deg2rad(grid.longitude)
    radius = 1500.0
    edge = np.cos(radius * 1000 / EARTH_RADIUS)
    for degree, order in ((1, 0), (3, 2), (8, 5), (20, 3)):
        polynomials = np.eye(degree + 2)
        below, above = (legendre.legval(edge, polynomials[d]) for d in (degree - 1, degree + 1))
        factor = (below - above) / ((2 * degree + 1) * (1 - edge))
        derivative = legendre.legval(sine, legendre.legder(polynomials[degree], order))
        rows = (1 - sine**2).clip(min=0) ** (order / 2) * derivative
        field = (rows / np.abs(rows).max())[:, None] * np.cos(order * longitude)
        found = averaged(grid, slice(0, 181), radius, field[None], None)[0]
        # The edge of a disc is rough by a cell of 111 km.
        assert np.abs(found - factor * field).max() < 0.006, (degree, order)
        assert abs(factor) > 0.01


def test_columns_are_circular_and_bands_of_blocks_join() -> None:
    """More rows than one table has: the blocks' means are those of single rows."""
    grid = Grid(np.linspace(90, -90, 71), np.arange(12) * 30.0)
    field = np.random.default_rng(1).normal(size=(1, *grid))
    whole = averaged(grid, slice(0, 71), 900.0, field, None)
    turned = averaged(grid, slice(0, 71), 900.0, np.roll(field, 5, -1), None)
    assert np.abs(np.roll(whole, 5, -1) - turned).max() < 1e-13
    for row in (0, 31, 32, 33, 64, 70):
        one = averaged(grid, slice(row, row + 1), 900.0, field, None)
        assert np.abs(one - whole[:, row : row + 1]).max() < 1e-13

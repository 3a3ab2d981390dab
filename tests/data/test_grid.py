import base64
import copy
import json
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.legendre import leggauss

from credit_dp.data.grid import Grid, cell_areas, parse_grid, row_weights
from credit_dp.errors import UserError
from tests.data import cell_stores
from tests.data.region_grids import RADIUS, Lambert, polar_stereographic, rotated
from tests.tables import each


def test_weights_of_three_rows_by_hand():
    # Edges at the poles and at 45 degrees north and south.
    cap = 1 - np.sin(np.pi / 4)
    area = np.array([cap, 2 * np.sin(np.pi / 4), cap])
    assert np.allclose(row_weights(np.array([90.0, 0.0, -90.0])), area / area.mean())


@given(rows=st.integers(2, 181), poles=st.booleans())
def test_weights_are_areas_of_bands_that_cover_the_globe(rows, poles):
    half = 0 if poles else 90 / rows
    latitude = np.linspace(90 - half, -90 + half, rows)
    weights = row_weights(latitude)
    assert np.isclose(weights.mean(), 1)
    assert np.all(weights > 0)
    assert np.allclose(weights, weights[::-1])
    assert np.allclose(row_weights(latitude[::-1]), weights[::-1])
    # The mean of sin^2 over the sphere is 1/3: right to second order in the spacing only if the
    # weights are areas.
    mean = np.mean(weights * np.sin(np.deg2rad(latitude)) ** 2)
    assert abs(mean - 1 / 3) < 3 / rows**2


LATITUDE, LONGITUDE = np.linspace(90, -90, 5), np.arange(8) * 45.0
OTHERS = {
    "size": (LATITUDE[1:], LONGITUDE, ("a grid of 5x8", "4x8")),
    "latitude": (np.array([90, 45, 2, -45, -90]), LONGITUDE, ("latitude 0 at index 2", "2")),
    "begins elsewhere": (LATITUDE, LONGITUDE - 180, ("longitude 0 at index 0", "-180")),
    "NaN": (LATITUDE * np.nan, LONGITUDE, ("latitude 90 at index 0", "nan")),
    "rounded": (LATITUDE + 5e-4, LONGITUDE, None),
    "from minus 180": (LATITUDE, np.where(LONGITUDE < 180, LONGITUDE, LONGITUDE - 360), None),
}


@each("case", OTHERS)
def test_how_two_grids_differ(case):
    latitude, longitude, expected = OTHERS[case]
    assert Grid(LATITUDE, LONGITUDE).difference(Grid(latitude, longitude)) == expected


@each("text", ["121", "121x", "x240", "121,240", "0x240", "12.5x24", "-1x4"])
def test_malformed_grid_is_refused(text):
    assert parse_grid("121x240") == (121, 240)
    with pytest.raises(UserError, match=r"data\.grid"):
        parse_grid(text)


def test_cells_of_the_globe_have_the_areas_of_rows():
    grid = Grid(LATITUDE, LONGITUDE)
    assert grid == (len(LATITUDE), len(LONGITUDE))
    assert grid.is_global
    assert np.array_equal(grid.weights, row_weights(LATITUDE))


def test_cells_of_a_box_end_half_a_step_beyond_its_outermost_rows():
    grid = Grid(np.arange(60.0, 39, -5), np.arange(350.0, 380, 10) % 360)
    assert not grid.is_global
    area = [np.sin(np.radians(phi + 2.5)) - np.sin(np.radians(phi - 2.5)) for phi in grid.latitude]
    assert np.allclose(grid.weights, area / np.mean(area), rtol=1e-13)
    at_pole = Grid(np.array([90.0, 80, 70]), np.arange(0.0, 30, 10))
    assert np.array_equal(at_pole.row_edges, [90, 85, 75, 65])


def half_steps(rows):
    return 90 - (np.arange(rows) + 0.5) * 180 / rows


def gaussian(rows):
    return np.degrees(np.arcsin(leggauss(rows)[0]))


ROWS_OF_THE_GLOBE: dict[str, Callable[[], np.ndarray]] = {
    "WeatherBench 2, 64x32": lambda: half_steps(32),
    "WeatherBench 2, 240x121": lambda: np.linspace(90, -90, 121),
    "ERA5": lambda: np.linspace(-90, 90, 721),
    "without those on the poles": lambda: np.linspace(90, -90, 181)[1:-1],
    **{f"Gaussian, {n}": partial(gaussian, n) for n in (2, 3, 8, 48, 160)},
    **{f"HEALPix {n}": lambda n=n: cell_stores.healpix(n).latitude for n in (1, 2, 16)},
}


@each("case", ROWS_OF_THE_GLOBE)
def test_rows_that_reach_the_poles(case):
    rows, columns = ROWS_OF_THE_GLOBE[case](), np.arange(8) * 45.0
    assert Grid(rows, columns).is_global
    if len(rows) > 8:  # each half step or more is seen, at either pole
        beyond = 2 if abs(rows[0]) > 89.9 else 1
        assert not Grid(rows[beyond:], columns).is_global
        assert not Grid(rows[:-beyond], columns).is_global


COLUMNS_ROUND_THE_GLOBE = {
    "one": ([10.0], True),
    "two halves": ([10.0, 190.0], True),
    "two halves, rounded": ([-179.99999, 0.00001], True),
    "two halves westward": ([190.0, 10.0], True),
    "two beside each other": ([10.0, 10.25], False),
    "two thirds": ([0.0, 120.0], False),
    "three thirds": ([0.0, 120.0, 240.0], True),
}


@each("case", COLUMNS_ROUND_THE_GLOBE)
def test_columns_that_go_round_the_globe(case):
    longitude, expected = COLUMNS_ROUND_THE_GLOBE[case]
    grid = Grid(np.array([60.0, 0, -60]), np.array(longitude))
    grid.check("a.zarr")
    assert grid.is_global == expected


@each("step, projection", [(3e3, "lambert"), (5e4, "lambert"), (5e4, "polar stereographic")])
def test_areas_on_a_projection_follow_its_map_factor(projection, step):
    y, x = (np.arange(n) * step - n / 2 * step + shift for n, shift in [(21, 4e5), (30, 7e5)])
    if projection == "lambert":
        latitude, longitude = Lambert().coordinates(y, x)
        scale = Lambert().scale(latitude)
    else:
        latitude, longitude, scale = polar_stereographic(y, x)
    area = (step / scale / RADIUS) ** 2
    # The error is of second order: of the step divided by the radius.
    tolerance = 3 * (step / RADIUS) ** 2 + 1e-8
    assert np.allclose(cell_areas(latitude, longitude), area, rtol=tolerance, atol=0)
    weights = Grid(latitude, longitude).weights
    assert np.allclose(weights, area / area.mean(), rtol=tolerance, atol=0)


@pytest.mark.slow
def test_areas_on_a_rotated_pole_are_those_of_its_own_rows():
    rlat, rlon = np.arange(-10.0, 11, 0.5), np.arange(-15.0, 16, 0.5)
    grid = Grid(*rotated(rlat, rlon, (39.25, -162.0)))
    edges = np.append(rlat - 0.25, rlat[-1] + 0.25)
    area = np.diff(np.sin(np.radians(edges))) * np.radians(0.5)
    assert np.allclose(cell_areas(grid.latitude, grid.longitude), area[:, None], rtol=1e-4, atol=0)


def test_two_dimensional_coordinates_are_compared_along_circles():
    latitude, longitude = rotated(np.arange(-10.0, 11), np.arange(-15.0, 16), (39.25, 20.0))
    grid = copy.deepcopy(Grid(latitude, longitude))
    assert grid.difference(Grid(latitude, longitude), 0) is None
    assert grid.difference(Grid(latitude, longitude % 360)) is None
    moved = latitude.copy()
    moved[3, 4] += 0.1
    expected = (f"latitude {latitude[3, 4]:.9g} at index (3, 4)", f"{moved[3, 4]:.9g}")
    assert grid.difference(Grid(moved, longitude)) == expected
    assert grid.difference(Grid(latitude[:, 0], longitude[0])) == (
        "a grid of 21x31 of 2-D coordinates",
        "21x31",
    )


def plane_with(latitude=None, shape=None):
    """Return the JSON of a plane of 21 x 31 points, with something else in its place."""
    coordinates = rotated(np.arange(-10.0, 11), np.arange(-15.0, 16), (39.25, 20.0))
    fields = Grid(*coordinates).to_json()
    return fields | {"latitude": latitude or fields["latitude"], "shape": shape or [21, 31]}


def text_of(size):
    return "<f8" + base64.b64encode(zlib.compress(bytes(size))).decode()


DAMAGED = {
    "another letter": lambda: plane_with("<f8?" + plane_with()["latitude"][4:]),
    "not compressed": lambda: plane_with("<f8" + base64.b64encode(bytes(21 * 31 * 8)).decode()),
    "cut off": lambda: plane_with(plane_with()["latitude"][:-400]),
    "one value more": lambda: plane_with(text_of(21 * 31 * 8 + 8)),
    "one byte more": lambda: plane_with(text_of(21 * 31 * 8 + 1)),
    "one value less": lambda: plane_with(text_of(21 * 31 * 8 - 8)),
    "another shape": lambda: plane_with(shape=[21, 32]),
    "a negative shape": lambda: plane_with(shape=[21, -31]),
    "an immense shape": lambda: plane_with(shape=[10**15, 10**15]),
}


@each("case", DAMAGED)
def test_damaged_json_is_refused(case):
    latitude, _ = rotated(np.arange(-10.0, 11), np.arange(-15.0, 16), (39.25, 20.0))
    intact = Grid.from_json(json.loads(json.dumps(plane_with())))
    assert np.array_equal(intact.latitude, latitude)
    fields = DAMAGED[case]()
    with pytest.raises(ValueError):
        Grid.from_json(fields)


@pytest.mark.slow
def test_the_contents_of_damaged_json_do_not_fill_the_memory():
    fields = plane_with(text_of(10**8))
    tracemalloc.start()
    with pytest.raises(ValueError):
        Grid.from_json(fields)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


MERCATOR = np.rad2deg(np.arctan(np.sinh(np.linspace(1.1, 0.36, 60))))  # 53 to 20 degrees north
MODEL_E = np.array([90, 88.5, *np.arange(87.5, -88, -1), -88.5, -90])


@each("rows", [MERCATOR, MODEL_E])
def test_rows_may_stretch(rows):
    Grid(rows, np.arange(16) * 22.5).check("here")
    with pytest.raises(UserError, match="latitude must go in roughly equal steps"):
        Grid(np.delete(rows, len(rows) // 2), np.arange(16) * 22.5).check("here")

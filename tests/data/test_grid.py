import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.data.grid import Grid, parse_grid, row_weights
from credit_dp.errors import UserError


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


@pytest.mark.parametrize("case", OTHERS)
def test_how_two_grids_differ(case):
    latitude, longitude, expected = OTHERS[case]
    assert Grid(LATITUDE, LONGITUDE).difference(Grid(latitude, longitude)) == expected


def test_grid_of_rows_and_columns():
    assert parse_grid("121x240") == (121, 240)


@pytest.mark.parametrize("text", ["121", "121x", "x240", "121,240", "0x240", "12.5x24", "-1x4"])
def test_malformed_grid_is_refused(text):
    with pytest.raises(UserError, match=r"data\.grid"):
        parse_grid(text)

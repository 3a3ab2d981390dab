"""Maps are drawn as a picture, and written whole or not at all."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import imread

from credit_dp.data.grid import row_edges
from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import unit_label
from credit_dp.evaluation.maps import NO_LINES, FieldMap, MapGrid
from credit_dp.evaluation.plots import column_edges, draw_map, draw_panel


def field(bounds: tuple[int, ...]) -> FieldMap:
    latitude, longitude = np.linspace(90, -90, 9), np.arange(12) * 30.0
    truth = np.add.outer(np.cos(np.deg2rad(latitude)), np.sin(np.deg2rad(longitude)))
    return FieldMap(
        "t, 24 h", "m2 s-2", truth + 0.1, truth, MapGrid(latitude, longitude, NO_LINES), bounds
    )


def test_the_map_is_a_large_picture(tmp_path):
    draw_map(field((0, 9)), tmp_path / "map.png")
    assert min(imread(tmp_path / "map.png").shape[:2]) > 800
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]


@pytest.mark.parametrize(
    ("bounds", "edges"), [((0, 9), []), ((0, 4, 9), [11.25]), ((0, 2, 4, 9), [56.25, 11.25])]
)
def test_band_edges_are_drawn(bounds, edges):
    shown = field(bounds)
    axes = Figure().subplots()
    draw_panel(axes, shown, shown.truth, "truth", ("viridis", Normalize(-1, 1)))
    # Each edge is a black line on a white one, across the whole map.
    assert [line.get_ydata()[0] for line in axes.lines] == [y for y in edges for _ in range(2)]
    assert [line.get_color() for line in axes.lines] == ["white", "black"] * len(edges)
    assert all(list(line.get_xdata()) == [0, 1] for line in axes.lines)


@pytest.mark.parametrize("unit", ["m2 s-2", "m**2 s**-2", "m^2 s^-2"])
def test_exponents_are_raised_however_they_are_written(unit):
    assert unit_label(unit) == "m² s⁻²"
    assert unit_label("1") == "1"


def test_constant_fields_can_be_drawn(tmp_path):
    still = field((0, 9))
    zero = np.zeros_like(still.truth)
    draw_map(FieldMap("t", "K", zero, zero, still.grid, (0, 9)), tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_dollars_are_no_formula(tmp_path):
    odd = replace(field((0, 4, 9)), title="cost_$x^{_$", unit="$ m2 $")
    draw_map(odd, tmp_path / "odd.png")
    assert (tmp_path / "odd.png").exists()
    assert unit_label("$ m2") == r"\$ m²"


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(UserError, match="plot could not be written"):
        draw_map(field((0, 9)), tmp_path / "missing" / "map.png")


def test_edges_enclose_the_globe():
    assert row_edges(np.array([60.0, 0.0, -60.0])).tolist() == [90, 30, -30, -90]
    assert row_edges(np.linspace(90, -90, 3)).tolist() == [90, 45, -45, -90]
    assert column_edges(np.array([0.0, 90, 180, 270])).tolist() == [-45, 45, 135, 225, 315]
    assert column_edges(np.array([180.0, 270, 0, 90])).tolist() == [135, 225, 315, 405, 495]

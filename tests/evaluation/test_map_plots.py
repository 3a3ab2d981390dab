"""Maps: units and colours of fields, lines, colour bars, coasts and the edges between ranks."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.image import imread

from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.errors import UserError
from credit_dp.evaluation import map_plots
from credit_dp.evaluation.field_display import (
    departure_from_rows,
    display_of,
    error_scale,
    field_scale,
    line_values,
    size_scale,
)
from credit_dp.evaluation.figure_style import COAST, NO_VALUE, TEMPERATURE, figure_style
from credit_dp.evaluation.map_plots import (
    add_bar,
    draw_error_maps,
    draw_map,
    draw_surroundings,
    every_edge,
    frame_of,
    root_mean_square,
)
from credit_dp.evaluation.maps import EARTH, SIMULATED, FieldMap, MapGrid
from tests.data.region_grids import polar_stereographic


def field(bounds: tuple[int, ...] = (0, 9), planet: str = "") -> FieldMap:
    latitude, longitude = np.linspace(90, -90, 9), np.arange(12) * 30.0
    truth = np.add.outer(np.cos(np.deg2rad(latitude)), np.sin(np.deg2rad(longitude)))
    grid = MapGrid(Grid(latitude, longitude), planet)
    channel = Channel("temperature", 500)
    return FieldMap("24 h", "K", truth + 0.1, truth, grid, bounds, channel)


SHOWN = {
    ("geopotential", "m**2 s**-2"): (9.80665 * 5520, "geopotential height", "dam", 552, 552),
    ("z", "m2 s-2"): (9.80665 * 5520, "geopotential height", "dam", 552, 552),
    ("msl", "hPa"): (1013, "mean sea level pressure", "hPa", 1013, 1013),
    ("zg", "m"): (5520, "geopotential height", "dam", 552, 552),
    ("geopotential_height", "gpm"): (5520, "geopotential height", "dam", 552, 552),
    ("potential_temperature", "K"): (300, "potential temperature", "K", 300, 300),
    ("total_cloud_cover", "(0 - 1)"): (0.5, "total cloud cover", "", 0.5, 0.5),
    ("t2m", "K"): (273.15, "2m temperature", "°C", 0, 273.15),
    ("mean_sea_level_pressure", "Pa"): (
        101_325,
        "mean sea level pressure",
        "hPa",
        1013.25,
        1013.25,
    ),
    ("specific_humidity", "kg kg**-1"): (0.002, "specific humidity", "g kg-1", 2, 2),
    ("total_precipitation_6hr", "m"): (0.003, "total precipitation 6hr", "mm", 3, 3),
    ("tp", "kg m**-2"): (3, "total precipitation", "mm", 3, 3),
    ("temperature", "°C"): (3, "temperature", "°C", 3, 3),
    ("ssrd", "J m**-2"): (3e6, "surface solar radiation downwards", "MJ m-2", 3, 3),
    ("dust", "ppm"): (3, "dust", "ppm", 3, 3),
}


def test_fields_are_shown_in_the_units_of_charts() -> None:
    for (name, stored), (value, label, unit, shown, difference) in SHOWN.items():
        display = display_of(name, stored)
        assert (display.label, display.unit) == (label, unit), name
        assert display.values(np.array(value)) == pytest.approx(shown, abs=1e-9), name
        assert display.differences(np.array(value)) == pytest.approx(difference), name
    for unit in ("K", "degC"):
        assert display_of("t2m", unit).difference_unit == "K"
        assert display_of("t2m", unit).colours == TEMPERATURE


def test_lines_are_at_multiples_of_steps_that_charts_have() -> None:
    def lines(low: float, high: float, step: float | None = None) -> list[float]:
        return line_values(np.array([low, high, np.nan]), step).tolist()

    assert np.diff(lines(470, 590)) == pytest.approx(8)
    assert np.diff(lines(985, 1050)) == pytest.approx(4)
    assert lines(7, 23, 8) == [8, 16]
    assert len(lines(0.0011, 0.0014)) in range(10, 22)
    assert lines(5, 5) == []
    assert lines(5, 5 + 1e-12) == []  # the same but for rounding


def test_departures_and_scales_are_even_on_both_sides() -> None:
    rows = np.array([[1.0, 3, np.nan], [10, 10, 16]])
    wanted = np.array([[-1.0, 1, np.nan], [-2, -2, 4]])
    assert departure_from_rows(rows) == pytest.approx(wanted, nan_ok=True)
    assert not departure_from_rows(np.full((2, 7), 551.3)).any()
    same = [field_scale(display_of("x", ""), np.full((2, 2), value)) for value in (0.0, -7.0)]
    for scale in (*same, error_scale(rows * 0), size_scale(rows * 0), error_scale(rows * np.nan)):
        labels = [f"{edge:g}" for edge in scale.edges]
        assert len({*labels}) == len(labels), labels
        assert max(map(len, labels)) < 6, labels
    assert {*same[1].norm(np.array([-7 - 1e-12, -7, -7 + 1e-12]))} == {same[1].norm(-7.0)}
    scale = error_scale(rows - 5)
    assert scale.edges == pytest.approx(-scale.edges[::-1])
    assert scale.colours(scale.norm(0.0))[:3] == pytest.approx((0.97,) * 3, abs=0.02)  # white
    wind = field_scale(display_of("u_component_of_wind", "m s-1"), rows)
    assert wind.edges == pytest.approx(-wind.edges[::-1])
    rain = field_scale(display_of("tp", "mm"), rows * 0)
    assert rain.colours(rain.norm(0.0))[:3] == (1, 1, 1)


def test_numbers_at_a_colour_bar_are_even_on_both_sides_of_its_centre() -> None:
    around_zero = [-1.5, -1, -0.5, 0.5, 1, 1.5]
    for edges, step, shown in (
        (around_zero, 1, around_zero),
        (around_zero, 2, [-1, 1]),
        (around_zero, 3, [-1.5, 1.5]),
        ([0, 1, 2, 3, 4, 5], 2, [0, 2, 4]),
        ([3.0, 4.0], 1, [3, 4]),
    ):
        assert every_edge(edges, step) == shown, (edges, step)


@figure_style()
def test_numbers_at_a_colour_bar_do_not_touch() -> None:
    for low, high in ((0.0, 9.0), (-2.19, -1.46), (-3.2e-5, 4e-5), (98_000.0, 101_000.0)):
        figure = Figure(figsize=(10, 1))
        axes = figure.add_axes((0.2, 0.5, 0.6, 0.2))
        scale = field_scale(display_of("x", ""), np.linspace(low, high, 50)[None])
        bar = add_bar(figure, axes, scale, "")
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in bar.ax.get_xticklabels()]
        assert len(boxes) > 3
        for left, right in pairwise(boxes):
            assert left.x1 + 2 < right.x0, low


def test_numbers_on_lines_are_above_coasts_and_each_is_on_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = field((0, 9), EARTH)
    slopes = 20 * shown.truth
    figure = drawn_map(
        replace(shown, forecast=slopes, truth=slopes, channel=Channel("mean_sea_level_pressure"),
                unit="hPa"), tmp_path / "map.png", monkeypatch,
    )  # fmt: skip
    axes = figure.axes[0]
    (coast,) = (line for line in axes.lines if line.get_color() == COAST)
    numbers = [text for text in axes.texts if text.get_text().lstrip("-").isdigit()]
    assert len(numbers) > 4
    for text in numbers:
        assert text.get_zorder() > max(line.get_zorder() for line in axes.lines)
    (lines,) = (each for each in axes.collections if isinstance(each, ContourSet))
    assert coast.get_zorder() < lines.get_zorder()
    for text in numbers:
        level = [f"{value:g}" for value in lines.levels].index(text.get_text())
        points = np.concatenate(lines.allsegs[level])
        assert np.abs(points - text.get_position()).max(axis=1).min() < 1e-9


def drawn_map(shown: FieldMap, path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Return the figure that `draw_map` saves."""
    figures: list[Figure] = []
    with monkeypatch.context() as patch:
        patch.setattr(map_plots, "save_figure", lambda figure, _: figures.append(figure))
        draw_map(shown, path)
    return figures[0]


def test_forecast_and_truth_share_colours_and_one_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = field((0, 4, 9), SIMULATED)
    figure = drawn_map(shown, tmp_path / "map.png", monkeypatch)
    forecast, truth, shared, error, own, legend = figure.axes
    bars = [shared, own]
    scales = [axes.collections[0].norm for axes in (forecast, truth, error)]
    assert scales[0] is scales[1]
    assert scales[0] is not scales[2]
    assert [bar.get_xlabel() for bar in bars] == ["temperature (°C)", "error (K)"]
    assert "RMSE 0.1 K" in error._left_title.get_text()
    texts = [text.get_text() for text in legend.get_legend().get_texts()]
    assert texts == ["land of the simulated planet", "edge between the bands of 2 ranks"]
    assert figure.get_suptitle() == "500 hPa temperature, 24 h"


def test_errors_are_weighted_by_area() -> None:
    cells = Grid(np.array([60.0, 0, -60]), np.array([0.0, 180]))
    values = np.array([[3.0, 3], [1, np.nan], [3, 3]])
    polar, middle = 1 - np.sin(np.deg2rad(30)), 2 * np.sin(np.deg2rad(30))
    wanted = (4 * polar * 9 + middle) / (4 * polar + middle)
    assert root_mean_square(values, cells) == pytest.approx(np.sqrt(wanted))


def test_band_edges_are_drawn_on_request() -> None:
    cells = field().grid.cells
    for bounds, edges in (((), []), ((0, 4, 9), [11.25]), ((0, 2, 4, 9), [56.25, 11.25])):
        axes, frame = Figure().subplots(), frame_of(cells, "lat-lon")
        draw_surroundings(axes, frame, MapGrid(cells, ""), bounds)
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert [np.rad2deg(line.get_ydata()[0]) for line in dashed] == pytest.approx(edges)


def test_coasts_are_drawn_on_every_kind_of_map() -> None:
    y, x = (1e5 * (np.arange(n) - n / 2 + 0.3) for n in (32, 36))
    latitude, longitude, _ = polar_stereographic(y[::-1], x)
    for cells in (field().grid.cells, Grid(latitude, longitude)):
        for planet in (EARTH, SIMULATED):
            axes = Figure().subplots()
            legend = draw_surroundings(axes, frame_of(cells), MapGrid(cells, planet))
            assert len(legend) == (planet == SIMULATED)
            (coast,) = (line for line in axes.lines if line.get_color() == COAST)
            assert np.isfinite(coast.get_xydata()).all(axis=1).sum() > 10


@pytest.mark.slow
def test_constant_fields_and_odd_names_can_be_drawn(tmp_path: Path) -> None:
    still = field()
    zero = np.zeros_like(still.truth)
    draw_map(replace(still, forecast=zero, truth=zero), tmp_path / "a.png")
    odd = replace(field((0, 4, 9)), title="cost_$x^{_$", unit="$ m2 $", channel=Channel("$x^{_$"))
    draw_map(odd, tmp_path / "odd.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "odd.png"}
    with pytest.raises(UserError, match="plot could not be written"):
        draw_map(still, tmp_path / "missing" / "map.png")


@pytest.mark.slow
def test_points_without_values_are_grey(tmp_path: Path) -> None:
    globe = field()
    holes = globe.truth.copy()
    holes[2:5, 3:6] = np.nan
    draw_map(replace(globe, truth=holes, forecast=holes), tmp_path / "map.png")
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
    picture = imread(tmp_path / "map.png")[..., :3]
    assert picture.shape[1] > 3 * picture.shape[0] > 1000  # three maps in a row
    assert (np.abs(picture - int(NO_VALUE[1:3], 16) / 255) < 0.01).all(axis=-1).sum() > 10_000
    nowhere = np.full_like(holes, np.nan)
    draw_map(replace(globe, truth=nowhere, forecast=nowhere), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


def test_the_title_of_error_maps_is_above_those_of_the_panels() -> None:
    globe = field()
    with figure_style():
        figure = draw_error_maps(globe.grid, globe.truth, globe.truth, "K", "the title", "x")
        figure.draw_without_rendering()
    title = figure.texts[0].get_window_extent()
    assert title.y1 < figure.bbox.y1
    for axes in (figure.axes[0], figure.axes[2]):
        assert axes.get_title(loc="left")
        assert axes._left_title.get_window_extent().y1 < title.y0

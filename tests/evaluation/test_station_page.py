"""The page of scores at stations, and its maps."""

import re
from dataclasses import replace

import numpy as np
import pytest

from credit_dp.data.calendar import STANDARD
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.evaluation.figure_style import figure_style
from credit_dp.evaluation.map_plots import draw_error_maps
from credit_dp.evaluation.map_projection import EqualEarth
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.observations import Observations
from credit_dp.evaluation.station_page import station_page
from credit_dp.evaluation.station_scores import StationScores, StationSums
from tests.data.proj import project
from tests.data.region_grids import Lambert
from tests.evaluation.links import assert_whole

GLOBE = MapGrid(Grid(np.linspace(90, -90, 7), np.arange(12) * 30.0), "")


def test_each_station_is_a_dot_in_its_place_and_colour() -> None:
    latitude, longitude = np.array([10.0, -20, 50, 0]), np.array([0.0, 190, -170, 5])
    rmse, bias = np.array([1.0, 3, 2, np.nan]), np.array([-1.0, 3, -2, np.nan])
    with figure_style():
        figure = draw_error_maps(
            GLOBE, rmse, bias, "K", variable="t2m", places=(latitude, longitude)
        )
        figure.draw_without_rendering()
    maps = figure.axes[0], figure.axes[2]
    assert [axes.get_title(loc="left") for axes in maps] == [
        "root-mean-square error",
        "mean error (forecast - observation)",
    ]
    for axes, values in zip(maps, (rmse, bias), strict=True):
        dots = axes.collections[-1]
        # The largest on top; the one without a value has no dot. The middle of the map is 0 E.
        order = [0, 2, 1]
        assert dots.get_array().tolist() == values[order].tolist()
        east = (longitude[order] + 180) % 360 - 180
        x, y = EqualEarth().forward(east, latitude[order])
        np.testing.assert_allclose(dots.get_offsets(), np.stack([x, y], axis=1), atol=1e-12)
        shade = dots.cmap(dots.norm(values[1]))
        assert tuple(dots.get_facecolor()[-1]) == pytest.approx(shade)


def test_stations_on_a_projection_are_in_rows_and_columns() -> None:
    y, x = 1.2e5 * (np.arange(13)[::-1] - 6), 1.2e5 * (np.arange(16) - 8)
    cells = Grid(*Lambert().coordinates(y, x))
    rows, columns = np.array([2.5, 9.75]), np.array([3.0, 14.25])
    crs = "+proj=lcc +lat_1=38.5 +lat_2=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229"
    longitude, latitude = project(crs, 1.2e5 * (columns - 8), 1.2e5 * (6 - rows), "inverse")
    errors = np.array([1.0, 2.0])
    with figure_style():
        figure = draw_error_maps(
            MapGrid(cells, ""), errors, errors, "K", places=(latitude, longitude)
        )
    placed = np.stack([columns, -rows], axis=1)
    # On the sphere, within a hundredth of a cell of 120 km; see `positions_on_plane`.
    np.testing.assert_allclose(figure.axes[0].collections[-1].get_offsets(), placed, atol=0.01)


def scores(members: int) -> StationScores:
    """Of three stations at 12 hours, of which two report; none reports at 36 hours."""
    sums = StationSums(2, members, np.ones((1, 3), bool), np.ones(3))
    made = 280 + np.arange(members)[:, None] + np.array([[1.0, 2, 3]])
    sums.add(0, 0, 12, np.arange(3), made, np.array([280.0, 280, np.nan]))
    observed = Observations(
        where="there.csv",
        calendar=STANDARD,
        names=["A", "B", "C"],
        latitude=np.array([10.0, 20, 30]),
        longitude=np.array([0.0, 90, 180]),
        elevation=np.full(3, np.nan),
        times=np.array(["2000-01-01T12"] * 2, "M8[ns]"),
        station=np.array([0, 1]),
        values={"2m_temperature": np.array([280.0, 280])},
        units={"2m_temperature": "K"},
    )
    return StationScores(
        "made.zarr", GLOBE, observed, members, [12, 36],
        {"2m_temperature": Channel("2m_temperature")}, {"2m_temperature": "K"},
        {"2m_temperature": sums}, ["global"], "2 of 3 stations count", ["<none> & all"],
    )  # fmt: skip


def test_the_page_has_tables_maps_and_of_ensembles_ranks() -> None:
    for members in (1, 2):
        page = station_page(scores(members))
        assert_whole(page)
        assert "2 of 3 stations count" in page
        assert "&lt;none&gt; &amp; all." in page
        tables = re.findall(r"<h3>(.*?)</h3>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
        assert [title for title, _ in tables] == ["12 h", "36 h"]
        cells = [re.findall(r"<td.*?>(.*?)</td>", body) for _, body in tables]
        # The mean of members has errors of 1 and 2, and half of the distance between two more.
        bias = 1.5 + (members - 1) / 2
        rmse = np.sqrt(bias**2 + 0.25)
        assert cells[0] == ["2m_temperature", "K", f"{rmse:.3g}", "-", f"{bias:.3g}", "2", "0"]
        assert cells[1][2:] == ["-", "-", "-", "0", "0"]
        titles = re.findall(r"<h2 id=.*?>(.*?)</h2>", page)
        assert titles == [
            "Scores",
            "Errors of 2m temperature at 12 h",  # there is nothing to draw at 36 h
            *(["Rank histograms"] if members > 1 else []),
        ]
        assert len(re.findall(r'src="data:image/png', page)) == 1
        assert len(re.findall(r'src="data:image/svg', page)) == members - 1
        assert "could not be drawn" not in page


def test_the_page_of_many_levels_has_maps_of_some() -> None:
    one = scores(2)
    channels = {
        channel.name: channel
        for level in (1000, 850, 500, 50)
        for channel in (Channel("temperature", level), Channel("geopotential", level))
    }
    sums, units = one.sums["2m_temperature"], dict.fromkeys(channels, "K")
    by_name = dict.fromkeys(channels, sums)
    by_name["geopotential_850"] = StationSums(2, 2, np.ones((1, 3), bool), np.ones(3))  # no report
    page = station_page(replace(one, channels=channels, sums=by_name, units=units))
    titles = re.findall(r"<h2 id=.*?>(.*?)</h2>", page)
    assert (titles[0], titles[-1]) == ("Scores", "Rank histograms")
    assert len(titles) == 8
    assert {"Errors of geopotential 500 at 12 h", "Errors of temperature 850 at 12 h"} <= {*titles}
    assert "Errors of geopotential 850 at 12 h" not in titles
    assert "Plots show 6 of the 8 fields, tables all." in page
    assert page.count("<td>temperature_50</td>") == 2  # of both lead times

"""Coastlines on maps: the Earth's, and coasts of a simulated planet's land."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from credit_dp.config import DataConfig, QuickstartConfig
from credit_dp.data import quickstart
from credit_dp.data.grid import Grid
from credit_dp.data.quickstart.dynamics import TITLE
from credit_dp.data.sources.opening import open_source
from credit_dp.evaluation.maps import NO_LINES, MapGrid, coasts_of, earth_coasts, outline
from credit_dp.evaluation.score_plots import draw_cells, draw_coasts
from tests.data import stores
from tests.data.region_grids import polar_stereographic
from tests.evaluation import forecasts


def planet(path: Path, **changes: object) -> DataConfig:
    """Write a store with this title whose eastern half is land."""
    data = stores.dataset(rows=12, columns=8)
    land = np.zeros((12, 8), np.float32)
    land[3:9, 2:6] = 1
    data["land_sea_mask"] = (("latitude", "longitude"), land)
    data = data.assign_attrs(title=f"{TITLE}, T5, seed 0").assign(**changes)
    return stores.config(stores.write(data, path))


def distance(lines: np.ndarray, longitude: float, latitude: float) -> float:
    """Return the degrees to the nearest point of a coast."""
    away = np.abs((lines[:, 0] - longitude + 180) % 360 - 180) * np.cos(np.deg2rad(latitude))
    return float(np.nanmin(np.hypot(away, lines[:, 1] - latitude)))


CAPES = {
    "Good Hope": (18.5, -34.2),
    "Tarifa": (-5.6, 36.0),
    "Horn": (-68, -55),
    "York": (142.5, -10.8),
    "Dezhnev": (-169, 66),
    "East Cape of New Zealand": (178.5, -37.6),
}


def test_capes_are_on_the_coast_and_no_line_crosses_the_map() -> None:
    for name, place in CAPES.items():
        assert distance(earth_coasts(), *place) < 2, name
    assert np.nanmax(np.abs(np.diff(earth_coasts(), axis=0))) < 10
    assert distance(earth_coasts(), -140, 0) > 20


def test_coasts_are_drawn_wherever_the_map_begins() -> None:
    for west in (0, -180, -0.125, 90):
        axes = Figure().subplots()
        axes.set_xlim(west, west + 360)
        axes.set_ylim(-90, 90)
        draw_coasts(axes, earth_coasts())
        assert axes.get_xlim() == (west, west + 360)
        (line,) = axes.lines
        x, y = line.get_data()
        shown = np.stack([x, y], axis=1)[(x >= west) & (x <= west + 360)]
        for longitude in range(-180, 180, 30):  # the Antarctic is everywhere
            inside = (longitude - west) % 360 + west
            away = np.hypot(shown[:, 0] - inside, shown[:, 1] + 70)
            assert np.nanmin(away) < 16, (west, longitude)


@pytest.mark.slow
def test_longitudes_that_fall_or_turn_are_understood() -> None:
    land = np.zeros((6, 8), np.float32)
    land[2:4, 1:3] = 1
    latitude, longitude = np.linspace(75, -75, 6), np.arange(8) * 45.0
    wanted = outline(land, latitude, longitude)
    assert np.nanmin(wanted[:, 0]) == 22.5
    turned = outline(np.roll(land, 4, axis=1), latitude, (longitude + 180) % 360)
    assert distance(turned, 22.5, 15) < 1e-6
    falling = outline(land[:, ::-1], latitude, longitude[::-1])
    assert distance(falling, 22.5, 15) < 1e-6
    assert outline(np.zeros((6, 8)), latitude, longitude) is NO_LINES


def test_a_simulated_planet_has_its_own_coasts(tmp_path: Path) -> None:
    source = open_source(planet(tmp_path / "planet.zarr"))
    lines = coasts_of(source)
    assert distance(lines, 67.5, 0) < 25
    assert np.nanmin(lines[:, 0]) == pytest.approx(67.5)
    real = open_source(stores.config(stores.write(stores.dataset(), tmp_path / "earth.zarr")))
    assert coasts_of(real) is earth_coasts()
    data = xr.open_zarr(tmp_path / "planet.zarr", chunks=None, consolidated=False).load()
    stores.write(data.drop_vars("land_sea_mask"), tmp_path / "sea.zarr")
    assert coasts_of(open_source(stores.config(tmp_path / "sea.zarr"))) is NO_LINES


@pytest.mark.slow
def test_the_quickstart_is_recognised(tmp_path: Path) -> None:
    small = QuickstartConfig(truncation=5, runs=1, run_days=1, spinup_days=0)
    quickstart.build(small, (8, 16), tmp_path / "made.zarr")
    source = open_source(
        DataConfig(name="zarr", store=str(tmp_path / "made.zarr"), prognostic=["x"])
    )
    assert source.title.startswith(TITLE)
    assert 0 < len(coasts_of(source)) < 200


@pytest.mark.parametrize("simulated", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_scorecards_draw_the_coasts_of_the_truth(tmp_path: Path, simulated: bool) -> None:
    observed = forecasts.truth()
    land = np.zeros((9, 8), np.float32)
    land[3:6, 2:6] = 1
    observed["land_sea_mask"] = (("latitude", "longitude"), land)
    if simulated:
        observed = observed.assign_attrs(title=TITLE)
    forecasts.write(observed, tmp_path / "truth.zarr")
    timed = observed.drop_vars("land_sea_mask")
    forecasts.write(forecasts.climatology(timed), tmp_path / "climatology.zarr")
    made = forecasts.write(forecasts.forecast(timed), tmp_path / "forecast.zarr")
    card = forecasts.scored(tmp_path, made, hours=(6,), variables=("2m_temperature",))
    coasts = card.grid.coasts
    assert (coasts is earth_coasts()) != simulated
    assert np.nanmin(coasts[:, 0]) == pytest.approx(67.5) if simulated else True


def test_maps_have_coasts_and_end_at_their_outermost_edges() -> None:
    """A projection with the pole is drawn from the north."""
    turned = (170 + 1.5 * np.arange(16) + 180) % 360 - 180
    for grid, coasts, lines, limits in (
        (Grid(np.linspace(87, -87, 6), np.arange(8) * 45.0), earth_coasts(), 1, (-22.5, 337.5)),
        (Grid(np.linspace(60, 42, 13), turned), NO_LINES, 0, (169.25, 193.25)),
    ):
        axes = Figure().subplots()
        shown = MapGrid(grid, coasts)
        draw_cells(axes, shown, np.zeros(tuple(grid)), ("viridis", Normalize(0, 1)))
        assert len(axes.lines) == lines
        assert axes.get_xlim() == pytest.approx(limits)
    assert axes.get_ylim() == pytest.approx((41.25, 60.75))
    y, x = (1e5 * (np.arange(n) - n / 2 + 0.3) for n in (12, 16))
    latitude, longitude, _ = polar_stereographic(y[::-1], x)
    axes = Figure().subplots()
    grid = MapGrid(Grid(latitude, longitude), earth_coasts())
    draw_cells(axes, grid, np.ones((12, 16)), ("viridis", Normalize(0, 1)))
    bottom, top = axes.get_ylim()
    assert bottom > top  # rows are counted from the north
    assert not axes.lines  # coasts are not on the projection

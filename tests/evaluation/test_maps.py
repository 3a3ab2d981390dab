"""Coastlines on maps: the Earth's, and coasts of a simulated planet's land."""

from pathlib import Path

import numpy as np
import pytest

from credit_dp.config import DataConfig, QuickstartConfig
from credit_dp.data import quickstart
from credit_dp.data.channels import Channel
from credit_dp.data.quickstart.dynamics import TITLE
from credit_dp.data.sources.opening import open_source
from credit_dp.evaluation.maps import EARTH, NO_LINES, SIMULATED, coasts_of, outline, planet_of
from tests.evaluation import forecasts


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
        assert distance(coasts_of(EARTH), *place) < 2, name
    assert np.nanmax(np.abs(np.diff(coasts_of(EARTH), axis=0))) < 10
    assert distance(coasts_of(EARTH), -140, 0) > 20


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


def test_a_simulated_planet_has_its_own_coasts() -> None:
    """The first continent: half widths of 42 and 24 degrees around 80 E, 48 N."""
    coasts = coasts_of(SIMULATED)
    assert distance(coasts, 80, 24) < 2
    assert distance(coasts, 80, 48) > 20
    assert coasts_of("") is NO_LINES


@pytest.mark.slow
def test_the_quickstart_is_recognised(tmp_path: Path) -> None:
    """Its mask of land has the coasts of the maps."""
    small = QuickstartConfig(truncation=5, runs=1, run_days=1, spinup_days=0)
    quickstart.build(small, (24, 48), tmp_path / "made.zarr")
    source = open_source(
        DataConfig(name="zarr", store=str(tmp_path / "made.zarr"), prognostic=["x"])
    )
    assert planet_of(source.title) == SIMULATED
    land = source.read([Channel("land_sea_mask")], slice(0, 1), slice(0, 24))[0, 0]
    for longitude, latitude in outline(land, source.latitude, source.longitude):
        if np.isfinite(latitude) and abs(latitude) < 65:
            assert distance(coasts_of(SIMULATED), longitude, latitude) < 5
    assert planet_of("ERA5") == EARTH


@pytest.mark.parametrize("simulated", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_scorecards_draw_the_coasts_of_the_truth(tmp_path: Path, simulated: bool) -> None:
    observed = forecasts.truth()
    if simulated:
        observed = observed.assign_attrs(title=TITLE)
    forecasts.write(observed, tmp_path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), tmp_path / "climatology.zarr")
    made = forecasts.write(forecasts.forecast(observed), tmp_path / "forecast.zarr")
    card = forecasts.scored(tmp_path, made, hours=(6,), variables=("2m_temperature",))
    assert card.grid.planet == (SIMULATED if simulated else EARTH)

"""Projections of maps against PROJ and published values, and fields on the raster of a map."""

import numpy as np
import pytest

from credit_dp.data.grid import Grid
from credit_dp.evaluation.map_plots import frame_of
from credit_dp.evaluation.map_projection import (
    Box,
    EqualEarth,
    LatLon,
    MapProjection,
    PlaneFrame,
    Polar,
    SphereFrame,
    box_of,
)
from tests.data import proj
from tests.data.region_grids import polar_stereographic
from tests.tables import each

LATITUDE = np.linspace(87, -87, 30)
SPHERES = [
    (EqualEarth(), "+proj=eqearth +R=1"),
    (LatLon(50.0), "+proj=eqc +R=1 +lat_ts=50"),
    (Polar(1), "+proj=laea +R=1 +lat_0=90"),
    (Polar(-1), "+proj=laea +R=1 +lat_0=-90"),
]


def globe(columns: int = 48, first: float = 0.0) -> Grid:
    return Grid(LATITUDE, (first + np.arange(columns) * 360.0 / columns) % 360)


@each("projection, text", SPHERES)
def test_projections_are_those_of_proj(projection: MapProjection, text: str) -> None:
    longitude, latitude = (
        part.ravel() for part in np.meshgrid(np.linspace(-179, 179, 25), np.linspace(-80, 80, 17))
    )
    found = projection.forward(longitude, latitude)
    assert np.stack(found) == pytest.approx(proj.project(text, longitude, latitude), abs=1e-7)
    back = np.stack(projection.inverse(*found))
    assert back == pytest.approx(np.stack([longitude, latitude]), abs=1e-6)


def test_equal_earth_has_its_published_shape() -> None:
    """2.05458 times as wide as high, with poles 0.59247 times as long as the equator."""
    x, y = EqualEarth().forward(np.array([180.0, 180.0]), np.array([0.0, 90.0]))
    assert x[0] / y[1] == pytest.approx(2.05458, abs=1e-5)
    assert x[1] / x[0] == pytest.approx(0.59247, abs=1e-5)


@each("middle", [0.0, -133.7])
def test_a_map_has_no_seam_wherever_its_middle_and_its_first_column_are(middle: float) -> None:
    """Of a smooth wave, no point of the raster is off by more than linear interpolation allows."""
    box = Box(-90, 90, middle - 180, middle + 180)
    for first in (0.0, 181.0):
        cells = globe(first=first)
        latitude, longitude = cells.points
        frame = SphereFrame(cells, EqualEarth(), box)
        raster = frame.sample(np.cos(np.deg2rad(latitude)) * np.cos(np.deg2rad(3 * longitude)))
        east, north = EqualEarth().inverse(*np.meshgrid(frame.x, frame.y))
        with np.errstate(invalid="ignore"):
            inside = (np.abs(east) <= 180) & (np.abs(north) <= 87)
        wanted = np.cos(np.deg2rad(north)) * np.cos(np.deg2rad(3 * (east + middle)))
        # A chord of 7.5 degrees of three waves is off by (3 dx)^2 / 8, and a little by latitude.
        assert inside.sum() > 100_000
        assert np.abs(raster - wanted)[inside].max() < np.deg2rad(3 * 7.5) ** 2 / 8 + 2e-3
        constant = frame.sample(np.broadcast_to(LATITUDE[:, None], cells.shape))
        assert np.ptp(constant[200][inside[200]]) < 1e-9


def test_lines_are_cut_at_the_edge_of_the_map() -> None:
    frame = frame_of(globe())
    x, _ = frame.place(np.linspace(100, 260, 50), np.zeros(50))
    assert np.isnan(x).sum() == 1
    assert np.nanmax(np.abs(np.diff(x))) < 0.1


def test_points_without_a_value_stay_without_one() -> None:
    """To the middle between cells; nothing is interpolated into a gap."""
    values = np.ones(globe().shape)
    values[10:15, 4:9] = np.nan
    frame = frame_of(globe(), "lat-lon")
    missing = np.isnan(frame.sample(values))
    longitude, latitude = LatLon().inverse(*np.meshgrid(frame.x, frame.y))
    rows = (latitude < LATITUDE[9:11].mean()) & (latitude > LATITUDE[14:16].mean())
    columns = (longitude > 3.5 * 7.5) & (longitude < 8.5 * 7.5)
    # Corners are round by a fourth of a cell.
    assert (missing != (rows & columns)).sum() < 0.06 * missing.sum()


def test_a_map_shows_what_its_grid_covers() -> None:
    assert box_of(globe()) == Box(-90, 90, -180, 180)
    turned = Grid(np.linspace(60, 42, 13), (170 + 1.5 * np.arange(16) + 180) % 360 - 180)
    box = box_of(turned)
    assert (box.south, box.north) == (41.25, 60.75)
    assert (box.west, box.east) == pytest.approx((169.25, 193.25))
    frame = frame_of(turned)
    inner = frame.sample(np.broadcast_to(np.arange(16.0), (13, 16)))
    assert inner[100, [0, -1]] == pytest.approx([0, 15])
    assert not np.isnan(inner).any()


def test_maps_around_a_pole_are_polar_and_others_are_not() -> None:
    for south, north, east, projection in (
        (60, 90, 180, Polar(1)),
        (-90, -20, 180, Polar(-1)),
        (-20, 20, 180, LatLon()),
        (60, 90, 40, LatLon(75.0)),
    ):
        frame = frame_of(globe(), box=Box(south, north, -180, east))
        assert isinstance(frame, SphereFrame)
        assert frame.projection == projection, (south, north)


def test_a_grid_on_a_projection_is_its_own_map() -> None:
    """Coasts are placed on its rows and columns, those of the other side of the globe nowhere."""
    y, x = (1e5 * (np.arange(n) - n / 2 + 0.3) for n in (12, 16))
    latitude, longitude, _ = polar_stereographic(y[::-1], x)
    frame = frame_of(Grid(latitude, longitude))
    assert isinstance(frame, PlaneFrame)
    columns, rows = frame.place(
        np.array([longitude[3, 5], np.nan, longitude[3, 5]]),
        np.array([latitude[3, 5], np.nan, -60]),
    )
    assert (columns[0], rows[0]) == pytest.approx((5, -3), abs=1e-6)
    assert np.isnan(columns[1:]).all()
    field = np.arange(192.0).reshape(12, 16)
    assert frame.sample(field)[0].tolist() == field[-1].tolist()

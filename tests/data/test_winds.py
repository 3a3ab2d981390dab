"""Angles of projections, and winds that are turned by them, beside PROJ's and hand-made ones."""

import re

import numpy as np
import pytest

from credit_dp.data.grid import Axis, Grid, Projection
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.data.winds import (
    angle_of_axes,
    lies_along_grid,
    other_component,
    stated_name,
    turn_of,
)
from credit_dp.errors import UserError
from tests.cli.invocation import answer
from tests.data import region_grids, stores, wind_stores, wrf_files
from tests.data.proj import project
from tests.data.wind_stores import NAMES
from tests.tables import each
from tests.tier_cases import every

STEP = 1e-4  # degrees, of finite differences


def grid_of(crs, y, x):
    """The grid of metres by PROJ, with its axes."""
    longitude, latitude = project(crs, *np.meshgrid(x, y), "inverse")
    axes = Axis("y", np.asarray(y), {}), Axis("x", np.asarray(x), {})
    return Grid(latitude, longitude, Projection("crs", {}, *axes))


def step_north(crs, grid):
    """How far a step to the north leads right and up on PROJ's map."""
    latitude = grid.latitude + np.array([-STEP, STEP])[:, None, None]
    points = project(crs, np.broadcast_to(grid.longitude, latitude.shape), latitude)
    return points[:, 1] - points[:, 0]


METRES = 5e4 * np.arange(-6, 7), 5e4 * np.arange(-8, 8)
PROJECTIONS = {
    "lambert": ("+proj=lcc +lat_1=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229", 0.0, 1.5e6),
    "polar": ("+proj=stere +lat_0=90 +lat_ts=60 +lon_0=70 +R=6371000", -3e6, -2e6),
    "south pole": ("+proj=stere +lat_0=-90 +lat_ts=-71 +lon_0=0 +R=6371000", 1e6, -2e6),
    "pole inside": ("+proj=stere +lat_0=90 +lat_ts=60 +lon_0=0 +R=6371000", 2e4, 1e4),
    "mercator": ("+proj=merc +lat_ts=30 +lon_0=-98 +R=6370000", 4e6, 0.0),
}


@each("kind", PROJECTIONS)
def test_the_angle_is_that_of_proj(kind):
    crs, south, west = PROJECTIONS[kind]
    y, x = METRES[0] + south, METRES[1] + west
    grid = grid_of(crs, y, x)
    expected = np.arctan2(*step_north(crs, grid))  # north is 90 degrees less from the x axis
    near = 4e-2 if kind == "pole inside" else 1e-4  # where meridians turn within a step
    for down, left in ((1, 1), (-1, 1), (1, -1)):  # also from the north, and from the east
        order = np.s_[::down, ::left]
        axes = Axis("y", y[::down], {}), Axis("x", x[::left], {})
        stored = Grid(grid.latitude[order], grid.longitude[order], Projection("crs", {}, *axes))
        away = angle_of_axes(stored) - expected[order]
        assert np.abs(np.angle(np.exp(1j * away))).max() < near, (down, left)


@each("kind", wrf_files.PROJECTIONS)
def test_the_angle_is_that_of_wrf(kind):
    """SINALPHA and COSALPHA, which turn `U` and `V` so that `U cos - V sin` is eastward."""
    longitude, latitude = wrf_files.points(kind)
    true = np.radians([30, 60])
    logs = np.log([np.cos(true), np.tan(np.pi / 4 - true / 2)])
    lambert = np.divide(*(logs[:, 0] - logs[:, 1]))
    cone = {"lambert": lambert, "polar": 1.0, "mercator": 0.0}[kind]
    alpha = np.radians(-cone * (longitude + 98))
    angle = angle_of_axes(Grid(latitude, longitude))
    assert np.sin(angle) == pytest.approx(np.sin(alpha), abs=1e-4)
    assert np.cos(angle) == pytest.approx(np.cos(alpha), abs=1e-4)


@each("rotated", [False, True])
def test_winds_are_turned_to_east_and_north_and_back(rotated):
    """Along a meridian, from the south at 10 m/s: the shares along axes are those of the map."""
    crs, narrower = PROJECTIONS["polar"][0], 1.0
    grid = grid_of(crs, *(axis - 2e6 for axis in METRES))
    if rotated:
        rlat, rlon = 6 - 1.0 * np.arange(13), 1.0 * np.arange(16) - 9
        grid = Grid(*region_grids.rotated(rlat, rlon, (39.25, -162.0)))
        crs = "+proj=ob_tran +o_proj=longlat +o_lon_p=0 +o_lat_p=39.25 +lon_0=18"
        narrower = np.cos(np.radians(rlat))[:, None]
    along = step_north(crs, grid)
    along[0] *= narrower
    x, y = 10 * along / np.hypot(*along)
    east, north = (turn_of(name, grid, "", to_grid=False) for name in ("u", "v"))
    assert east(x, y) == pytest.approx(0, abs=2e-3)
    assert north(y, x) == pytest.approx(10, abs=2e-3)
    back = [turn_of(name, grid, "", to_grid=True) for name in ("U10", "V10")]
    assert back[0](np.zeros_like(x), 10 + 0 * x) == pytest.approx(x, abs=2e-3)
    assert back[1](10 + 0 * x, np.zeros_like(x)) == pytest.approx(y, abs=2e-3)
    assert back[0](x.astype("f4"), y.astype("f4")).dtype == np.float32


def test_axes_that_are_not_at_right_angles_are_refused():
    grid = grid_of(
        "+proj=laea +lat_0=52 +lon_0=10 +R=6371000", 1e5 * np.arange(-6, 25), METRES[1] + 2e6
    )
    with pytest.raises(UserError, match=r"^init_file: /a: winds .* degrees from right angles"):
        turn_of("u", grid, "init_file: /a", to_grid=False)


def cfgrib_file(folder, grid_type, flag):
    """A netCDF file as cfgrib converts GRIB, whose standard names do not know the flag."""
    data = wind_stores.box() if grid_type == "box" else wind_stores.lambert(True)
    names = dict(zip(NAMES, ("u10", "v10"), strict=True))
    for name, component in zip(NAMES, ("eastward", "northward"), strict=True):
        attributes = {"standard_name": f"{component}_wind", "GRIB_uvRelativeToGrid": flag}
        data[name].attrs = {**data[name].attrs, **attributes}
    data.rename(names).to_netcdf(folder / "a.nc")
    return folder / "a.nc"


def wrf_file(folder):
    data = wrf_files.dataset("lambert", 2)
    for name in ("U10", "V10"):
        data[name] = data["T2"] * 0
        data[name].attrs = {**data["T2"].attrs, "units": "m s-1"}
    return wrf_files.write(data, folder)


def netcdf_file(folder, **attributes):
    wind_stores.lambert(True, **attributes).to_netcdf(folder / "a.nc")
    return folder / "a.nc"


def prepared_file(folder):
    """A prepared copy of the file that cfgrib converted."""
    store, out = cfgrib_file(folder, "lambert", 1), folder / "prepared.zarr"
    keys = ("workers=1", "data.prognostic=[u10,v10]", "data.static=[]", "data.levels=null")
    with pytest.MonkeyPatch.context() as patch:
        answered = answer(
            patch, "data", "prepare", f"store={store}", f"out={out}", *keys, program=""
        )
    assert answered[0] == 0, answered
    return out


# The file, the standard names that are found, and what is said of both components.
FORMS = {
    "cfgrib's": (lambda x: cfgrib_file(x, "lambert", 1), "x_wind y_wind", "along the grid"),
    "cfgrib's to the east": (
        lambda x: cfgrib_file(x, "lambert", 0), "eastward_wind northward_wind",
        "eastward or northward",
    ),
    "cfgrib's on rows of latitudes": (
        lambda x: cfgrib_file(x, "box", 1), "eastward_wind northward_wind", "",
    ),
    "CF's": (netcdf_file, "x_wind y_wind", "along the grid"),
    "CF's older ones": (
        lambda x: netcdf_file(x, standard_name="grid_northward_wind"), "y_wind y_wind",
        "along the grid",
    ),
    "unstated": (
        lambda x: netcdf_file(x, long_name="wind"), " ",
        "eastward or northward, as no standard name says otherwise",
    ),
    "WRF's": (wrf_file, "x_wind y_wind", "along the grid"),
    "prepared": (prepared_file, "x_wind y_wind", "along the grid"),
}  # fmt: skip


@pytest.mark.parametrize("form", every(3, FORMS))
def test_a_store_says_how_its_winds_lie(form, tmp_path, monkeypatch):
    write, standard_names, said = FORMS[form]
    path = write(tmp_path)
    source = open_single_source(str(path))
    names = [
        name for name, x in source.variables.items() if other_component(name) and not x.problem
    ]
    assert len(names) == 2
    found = [source.variables[name].standard_name for name in names]
    assert found == standard_names.split(" ")
    _, shown, complaints = answer(monkeypatch, "data", "inspect", f"store={path}", program="")
    assert complaints == ""
    lines = [line for line in shown.splitlines() if line.startswith("winds")]
    assert lines == ([f"winds   {said}: {', '.join(names)}"] if said else [])


# Name and standard name in GRIB, and the standard names without and with the flag.
VECTORS = {
    ("10v", ""): ("northward_wind", "y_wind"),
    ("u", "unknown"): ("eastward_wind", "x_wind"),
    ("u10n", "unknown"): ("eastward_neutral_wind", "x_neutral_wind"),
    ("nsss", "surface_downward_northward_stress"): (
        "surface_downward_northward_stress", "surface_downward_y_stress",
    ),
    ("iews", "unknown"): (
        "instantaneous_eastward_turbulent_surface_stress",
        "instantaneous_x_turbulent_surface_stress",
    ),
    ("2t", ""): ("", ""),
    ("10si", "wind_speed"): ("wind_speed", "wind_speed"),
}  # fmt: skip


@each("name, stated", VECTORS)
def test_the_flag_of_grib_suffices(name, stated):
    grid = Grid(wind_stores.LATITUDE, wind_stores.LONGITUDE)
    expected = VECTORS[name, stated]
    for flag in (0, 1):
        attributes = {"standard_name": stated, "GRIB_uvRelativeToGrid": flag}
        found = stated_name(name, attributes, grid)
        assert found == expected[flag]
        assert bool(lies_along_grid(found, grid)) == (expected[0] != expected[flag])


@pytest.mark.slow
def test_degrees_of_a_rotated_pole_may_go_on_from_359_to_0():
    rlat, rlon = 6 - 1.0 * np.arange(13), 1.0 * np.arange(16) - 9
    points = region_grids.rotated(rlat, rlon, (39.25, -162.0))
    axes = [Axis(name, values, {}) for name, values in (("rlat", rlat), ("rlon", rlon % 360))]
    angle = angle_of_axes(Grid(*points, Projection("rotated_pole", {}, *axes)))
    assert np.array_equal(angle, angle_of_axes(Grid(*points)))


def test_files_in_time_whose_winds_lie_otherwise_are_refused(tmp_path):
    for along in (True, False):
        half = slice(0, 10) if along else slice(10, 20)
        wind_stores.lambert(along).isel(time=half).to_netcdf(tmp_path / f"{int(not along)}.nc")
    source = open_source(stores.config(f"{tmp_path}/*.nc"))
    assert re.fullmatch(
        r"is along the grid in .*0\.nc, but eastward or northward in .*1\.nc",
        source.variables[NAMES[0]].problem,
    )

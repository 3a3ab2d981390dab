"""Winds of files that lie otherwise than those of the run, and what is written of the run's."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.forecast.initial_file import InitialFiles
from tests.data import stores, wind_stores
from tests.data.wind_stores import NAMES
from tests.forecast.grib_files import WINDS, write_grib, write_lambert
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.tier_cases import tiers
from tests.training.runs import make_config

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIME = np.datetime64("2000-01-04", "ns")
SELECTED = {"forcing": [], "static": [], "levels": None}


def store_of(data, folder, names=NAMES):
    """Open the store of a run."""
    path = stores.write(data.drop_encoding(), folder / "store.zarr")
    return Store.open(stores.config(path, prognostic=list(names), **SELECTED))


def grib(along, folder):
    """A GRIB file on the Lambert grid, with the flag of its winds."""
    state = wind_stores.lambert(along).sel(time=TIME)
    return write_lambert(folder / "file.grib", state, along)


def grib_of_box(folder):
    """A GRIB file on rows of latitudes, where the flag says nothing."""
    data = wind_stores.box().sel(time=TIME)
    keys = {f"{axis}DirectionIncrementInDegrees": 1 for axis in "ij"}
    return write_grib(folder / "file.grib", data, WINDS, uvRelativeToGrid=1, **keys)


def netcdf(data, folder):
    """A netCDF file."""
    data.sel(time=[TIME]).to_netcdf(folder / "file.nc")
    return folder / "file.nc"


FILES = {
    "box": lambda folder: netcdf(wind_stores.box(), folder),
    "box in GRIB": grib_of_box,
    "eastward": lambda folder: netcdf(wind_stores.lambert(False), folder),
    "along the grid": lambda folder: netcdf(wind_stores.lambert(True), folder),
    "eastward in GRIB": lambda folder: grib(False, folder),
    "along the grid in GRIB": lambda folder: grib(True, folder),
}


@pytest.mark.parametrize(
    ("kind", "along"),
    tiers(
        fast=[
            *(("box in GRIB", True), ("eastward in GRIB", True)),
            ("along the grid in GRIB", False),
        ],
        slow=[("box", False), ("eastward", True), ("along the grid", False)],
        exhaustive=[
            *(("box", True), ("eastward", False), ("along the grid", True)),
            *(("box in GRIB", False), ("eastward in GRIB", False)),
            ("along the grid in GRIB", True),
        ],
    ),
)
def test_a_file_has_the_winds_of_the_run(tmp_path, kind, along):
    store = store_of(wind_stores.lambert(along), tmp_path)
    files = InitialFiles.open(str(FILES[kind](tmp_path)))
    found = files.reader(store, np.array([TIME]), "bilinear").read_states([TIME], slice(2, 9))
    wanted = store.read_states(np.array([TIME]), slice(2, 9))
    assert np.abs(found - wanted).max() < 2e-3
    other = wind_stores.lambert(not along).sel(time=TIME)[NAMES[0]].values
    assert np.abs(wanted[0, 0] - other[::-1][2:9]).max() > 0.5


@pytest.mark.slow
def test_winds_of_wrf_have_those_of_a_driver(tmp_path):
    names = ("U10", "V10")
    store = store_of(wind_stores.lambert(True, names), tmp_path, names)
    files = InitialFiles.open(str(netcdf(wind_stores.box(), tmp_path)))
    found = files.reader(store, np.array([TIME]), "bilinear").read_states([TIME], slice(None))
    assert np.abs(found - store.read_states(np.array([TIME]), slice(None))).max() < 2e-3


def test_winds_without_a_standard_name_are_those_of_the_run(tmp_path):
    store = store_of(wind_stores.lambert(True), tmp_path)
    files = InitialFiles.open(str(netcdf(wind_stores.lambert(True, units="m s-1"), tmp_path)))
    found = files.reader(store, np.array([TIME])).read_states([TIME], slice(None))
    assert np.array_equal(found, store.read_states(np.array([TIME]), slice(None)))


def test_one_component_alone_is_not_turned(tmp_path):
    store = store_of(wind_stores.lambert(True), tmp_path, NAMES[:1])
    files = InitialFiles.open(str(netcdf(wind_stores.box().drop_vars(NAMES[1]), tmp_path)))
    said = (
        r"^init_file: .*file\.nc: 10m_u_component_of_wind is eastward or northward, but along the "
        r"grid in .*, and can't be turned without the other component of this wind\. Add a file"
    )
    with pytest.raises(UserError, match=said) as error:
        files.reader(store, np.array([TIME]), "bilinear")
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a rim on winds along the grid."""
    folder = tmp_path_factory.mktemp("run")
    path = stores.write(wind_stores.lambert(True), folder / "store.zarr")
    config = make_config(path, folder / "run", steps=2)
    fields = {"prognostic": list(NAMES), "boundary": 2, **SELECTED}
    config = replace(config, data=replace(config.data, **fields))
    leave_checkpoint(config)
    return config


@pytest.mark.slow
def test_a_forecast_has_the_winds_of_its_run_on_the_rim_of_a_driver(run, tmp_path):
    driver = stores.write(wind_stores.box(), tmp_path / "driver.zarr")
    path = forecast(forecast_config(run, tmp_path / "a.zarr", boundary=str(driver), lead="12h"))
    rim = np.ones((13, 16), bool)
    rim[2:-2, 2:-2] = False
    with xr.open_zarr(path, decode_timedelta=True) as found:
        for name, standard_name in zip(NAMES, ("x_wind", "y_wind"), strict=True):
            assert found[name].attrs["standard_name"] == standard_name
            valid = found["time"].values[0] + found["prediction_timedelta"].values
            wanted = wind_stores.lambert(True)[name].sel(time=valid).values[:, ::-1]
            away = np.abs(found[name].values[0] - wanted)[:, rim]
            assert away.max() < 2e-3


@pytest.mark.slow
def test_a_checkpoint_is_not_used_with_other_winds(run, tmp_path):
    other = stores.write(wind_stores.lambert(False), tmp_path / "other.zarr")
    moved = replace(run, data=replace(run.data, store=str(other)))
    said = "was trained with 10m_u_component_of_wind along the grid, but .*other.zarr has it eastw"
    with pytest.raises(UserError, match=said):
        forecast(forecast_config(moved, tmp_path / "a.zarr", boundary="truth"))

"""Coordinates are found as the CF conventions say, then by their names."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.sources.coordinates import find_coordinates
from credit_dp.data.sources.opening import open_single_source
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore
from tests.data import stores
from tests.tables import each

DATA = stores.dataset(rows=9, columns=8, steps=3)[["temperature", "2m_temperature"]]
NORTH = {"units": "degrees_north"}
EAST = {"units": "degrees_east"}


def named(new: dict[str, str], **attributes: dict[str, str]) -> xr.Dataset:
    """Return `DATA` with other names of dims, and coordinates with only these attributes."""
    data = DATA.rename(new)
    for dim in data.dims:
        data[dim].attrs = dict(attributes.get(str(dim), {}))
    return data


def along(data: xr.Dataset, coordinates: dict[str, str]) -> xr.Dataset:
    """Return a dataset whose coordinates are variables with other names than their dims."""
    for dim, name in coordinates.items():
        values = xr.Variable(dim, data[dim].values, data[dim].attrs)
        data = data.drop_vars(dim).assign({name: values})
    return data


HYBRID = {"standard_name": "atmosphere_hybrid_sigma_pressure_coordinate", "positive": "down"}
FORMS: dict[str, xr.Dataset] = {
    "own names": DATA,
    "one-dimensional lat(latitude)": along(DATA, {"latitude": "lat", "longitude": "lon"}),
    "with units": along(
        named({}, latitude=NORTH, longitude=EAST), {"latitude": "phi", "longitude": "lambda"}
    ),
    "of axes y and x": along(
        named({"latitude": "y", "longitude": "x"}, y=NORTH, x=EAST), {"y": "lat", "x": "lon"}
    ),
    "capitals": named({"latitude": "LAT", "longitude": "LON"}),
    "capitals with units": named({"latitude": "LAT", "longitude": "LON"}, LAT=NORTH, LON=EAST),
    "standard names": named(
        {"latitude": "a", "longitude": "b", "time": "c", "level": "d"},
        a={"standard_name": "latitude"},
        b={"standard_name": "longitude"},
        c={"standard_name": "time"},
        d={"standard_name": "air_pressure", "units": "hPa"},
    ),
    "axes": named(
        {"latitude": "a", "longitude": "b", "time": "c", "level": "d"},
        a={"axis": "Y"},
        b={"axis": "X"},
        c={"axis": "T"},
        d={"axis": "Z"},
    ),
    "dates": named({"time": "initial"}),
    "rows of numbers": along(
        named({}, latitude=NORTH, longitude=EAST), {"latitude": "phi", "longitude": "lambda"}
    ).assign_coords(latitude=np.arange(9), longitude=np.arange(8)),
    "edges of cells, too": DATA.assign_coords(
        slat=("slat", np.linspace(80, -80, 8), NORTH), slon=("slon", np.arange(22, 360, 45.0), EAST)
    ),
    "heights, too": DATA.assign_coords(height=("height", [2.0, 10.0], {"axis": "Z", "units": "m"})),
}


@pytest.mark.slow
@each("form, kind", zip(FORMS, itertools.cycle(["netcdf", "zarr"]), strict=False))
def test_coordinates_are_found(tmp_path, form, kind):
    source = open_single_source(str(written(FORMS[form], tmp_path, kind)))
    assert np.array_equal(source.times, DATA["time"].values)
    assert np.array_equal(source.latitude, DATA["latitude"].values)
    assert np.array_equal(source.longitude, DATA["longitude"].values)
    levels = tuple(DATA["level"].values.tolist())
    assert source.variables["temperature"].levels == levels
    channels = [Channel("temperature", level) for level in levels]
    found = source.read(channels, slice(0, 3), slice(2, 7))
    wanted = DATA["temperature"].transpose("time", "level", "latitude", "longitude").values
    assert np.array_equal(found, wanted[:, :, 2:7])


def test_levels_in_other_units_of_pressure(tmp_path):
    for unit, scale in (("Pa", 100), ("millibar", 1), ("kPa", 0.1)):
        values = DATA["level"].values * scale
        data = DATA.assign_coords(level=("level", values, {"units": unit}))
        source = open_single_source(str(written(data, tmp_path / unit, "netcdf")))
        assert source.variables["temperature"].levels == tuple(DATA["level"].values.tolist())


def test_two_dimensional_coordinates_of_rows_and_columns_are_those(tmp_path):
    two = DATA.rename(latitude="y", longitude="x").drop_vars(["y", "x"])
    mesh = np.meshgrid(DATA["latitude"], DATA["longitude"], indexing="ij")
    two = two.assign(nav_lat=(("y", "x"), mesh[0]), nav_lon=(("y", "x"), mesh[1]))
    rotated = DATA.rename(latitude="rlat", longitude="rlon")
    rotated["rlat"].attrs = {"standard_name": "grid_latitude", "axis": "Y"}
    rotated["rlon"].attrs = {"standard_name": "grid_longitude", "axis": "X"}
    rotated["lat"], rotated["lon"] = (("rlat", "rlon"), mesh[0]), (("rlat", "rlon"), mesh[1])
    for kind, data in (("two", two), ("rotated", rotated)):
        grid = open_single_source(str(written(data, tmp_path / kind, "netcdf"))).grid
        assert grid.is_global
        assert np.array_equal(grid.latitude, DATA["latitude"].values)
        assert np.array_equal(grid.longitude, DATA["longitude"].values)


def test_curvilinear_grids_round_the_globe_are_refused(tmp_path):
    data = DATA.rename(latitude="y", longitude="x").drop_vars(["y", "x"])
    latitude, longitude = np.meshgrid(np.linspace(80, -80, 9), DATA["longitude"], indexing="ij")
    latitude += 5 * np.sin(np.deg2rad(longitude))
    data = data.assign(nav_lat=(("y", "x"), latitude), nav_lon=(("y", "x"), longitude))
    with pytest.raises(UserError, match=r"a curvilinear grid that goes round the globe can't"):
        open_single_source(str(written(data, tmp_path, "netcdf")))


def test_forecasts_are_found_by_their_standard_names(tmp_path):
    start, lead = np.array(["2000-01-01"], "M8[ns]"), np.array([6, 12], "m8[h]").astype("m8[ns]")
    data = DATA[["2m_temperature"]].isel(time=0, drop=True)
    data = data.expand_dims(e=[0, 1], r=start, p=lead).copy()
    names = ("realization", "forecast_reference_time", "forecast_period")
    for dim, name in zip("erp", names, strict=True):
        data[dim].attrs = {"standard_name": name}
    store = ForecastStore.open(str(written(data, tmp_path, "zarr")))
    assert store.members == 2
    assert np.array_equal(store.initial_times, start)
    assert np.array_equal(store.lead_times, lead)


def test_of_two_coordinates_that_of_the_fields_is_taken(tmp_path):
    """Fields on four levels, and one on the edges between them, as CAM writes."""
    edges: dict[str, Any] = {"ilev": ("ilev", np.arange(4.0), HYBRID)}
    data = named({"level": "lev"}, lev=HYBRID).assign_coords(edges)
    assert find_coordinates(data)["level"] == "lev"
    data = data.assign_coords(lev=("lev", [1, 2, 3], HYBRID))
    variable = open_single_source(str(written(data, tmp_path, "netcdf"))).variables["temperature"]
    assert variable.levels == (1, 2, 3)
    assert variable.model_levels  # by its standard name


def written(data: xr.Dataset, folder: Path, kind: str) -> Path:
    """Write a dataset as it is."""
    folder.mkdir(exist_ok=True)
    if kind == "netcdf":
        data.to_netcdf(folder / "s.nc")
        return folder / "s.nc"
    data.to_zarr(folder / "s.zarr", zarr_format=2)
    return folder / "s.zarr"

"""Where the points of projections are, whatever a file has of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.sources.coordinates import with_points
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.errors import UserError
from tests.data import region_stores
from tests.data.proj import project
from tests.data.region_stores import projected
from tests.tables import each

# Projections in the words of PROJ, and as files have them.
NORKYST_CRS = "+proj=stere +ellps=WGS84 +lat_0=90 +lat_ts=60 +lon_0=70 +x_0=3192800 +y_0=1784000"
NORKYST_MAPPING = {
    "grid_mapping_name": "polar_stereographic",
    "straight_vertical_longitude_from_pole": 70.0,
    "latitude_of_projection_origin": 90.0,
    "standard_parallel": 60.0,
    "false_easting": 3192800.0,
    "false_northing": 1784000.0,
    "ellipsoid": "WGS84",
}
SPHERE = "+proj=stere +R=6371000 +lat_0=90 +lon_0=70 +k_0=0.933"
SCALED = {
    "grid_mapping_name": "polar_stereographic",
    "straight_vertical_longitude_from_pole": 70.0,
    "latitude_of_projection_origin": 90.0,
    "scale_factor_at_projection_origin": 0.933,
    "proj4": SPHERE,
}
CONE = "+proj=lcc +a=6378137 +rf=298.257222 +lat_1=63 +lat_2=60 +lat_0=62 +lon_0=15 +x_0=1e5"
CONIC = {
    "grid_mapping_name": "lambert_conformal_conic",
    "standard_parallel": [63.0, 60.0],
    "latitude_of_projection_origin": 62.0,
    "longitude_of_central_meridian": 15.0,
    "false_easting": 1e5,
    "semi_major_axis": 6378137.0,
    "inverse_flattening": 298.257222,
}
METRE = {"units": "m"}


def norkyst(crs: str, mapping: Any, start: tuple[float, float], attrs: Any = METRE) -> xr.Dataset:
    """Rows and columns Y and X every 20 km on a projection, with 2-D latitudes and longitudes."""
    y, x = (first + 2e4 * np.arange(n) for first, n in zip(start, (6, 8), strict=True))
    longitude, latitude = project(crs, *np.meshgrid(x, y), "inverse")
    data = projected(latitude, longitude, ("Y", "X"), {"Y": ("Y", y, attrs), "X": ("X", x, attrs)})
    for array in data.data_vars.values():
        array.attrs |= {"grid_mapping": "projection_stere", "coordinates": "lon lat"}
    points = {"lat": latitude, "lon": longitude}
    named = {"lat": "latitude", "lon": "longitude"}
    return data.assign(
        {
            "projection_stere": ((), 0, mapping),
            **{x: (("Y", "X"), y, {"standard_name": named[x]}) for x, y in points.items()},
        }
    )


def in_kilometres() -> xr.Dataset:
    data = norkyst(NORKYST_CRS, NORKYST_MAPPING, (2e5, 5e5))
    mapping = {x: y / 1000 if "false" in x else y for x, y in NORKYST_MAPPING.items()}
    axes = {x: (x, data[x].values / 1000, {"units": "km", "axis": x}) for x in "YX"}
    return data.assign(projection_stere=((), 0, mapping)).assign_coords(axes)


def joined_in_time() -> xr.Dataset:
    """As xarray's `open_mfdataset` joins files, with all variables at each time."""
    data = norkyst(NORKYST_CRS, NORKYST_MAPPING, (2e5, 5e5))
    names = ("lat", "lon", "projection_stere")
    return data.assign({x: data[x].expand_dims(time=data["time"]) for x in names})


def of_degrees(**units: str) -> xr.Dataset:
    """A rotated pole, whose axes are in degrees that are no latitudes and longitudes."""
    data = region_stores.dataset("rotated")
    for dim, axis in (("rlat", "Y"), ("rlon", "X")):
        names = {"rlat": "grid_latitude", "rlon": "grid_longitude"}
        named = units[dim] != "degrees"
        data[dim].attrs = {
            "units": units[dim],
            **({"standard_name": names[dim]} if named else {"axis": axis}),
        }
    return data


# Datasets, and whether their own points are left out.
PLANES: dict[str, tuple[Any, bool]] = {
    "NorKyst": (lambda: norkyst(NORKYST_CRS, NORKYST_MAPPING, (2e5, 5e5)), False),
    "NorKyst's axes alone": (lambda: norkyst(NORKYST_CRS, NORKYST_MAPPING, (2e5, 5e5)), True),
    "without attributes": (lambda: norkyst(NORKYST_CRS, NORKYST_MAPPING, (2e5, 5e5), {}), True),
    "kilometres": (in_kilometres, True),
    "scaled": (lambda: norkyst(SPHERE, SCALED, (-3e6, 1e5)), True),
    "conic": (lambda: norkyst(CONE, CONIC, (-1e5, 2e5)), True),
    "rotated": (lambda: region_stores.dataset("rotated"), True),
    "degrees": (lambda: of_degrees(rlat="degrees", rlon="degrees"), False),
    "degrees alone": (lambda: of_degrees(rlat="degrees", rlon="degrees"), True),
    "degrees east": (lambda: of_degrees(rlat="degrees_north", rlon="degrees_east"), False),
    "joined in time": (joined_in_time, False),
}


@pytest.mark.slow
@each("form", PLANES)
def test_points_are_those_of_the_projection(form: str, tmp_path: Path) -> None:
    make, alone = PLANES[form]
    data = make()
    latitude, longitude = (data[x].values for x in ("lat", "lon"))
    if latitude.ndim == 3:
        latitude, longitude = latitude[0], longitude[0]
    if alone:
        data = data.drop_vars(["lat", "lon"])
        for array in data.data_vars.values():
            array.attrs.pop("coordinates", None)
    data.to_netcdf(tmp_path / "a.nc")
    source = GriddedSource.open(str(tmp_path / "a.nc"))
    order = slice(None, None, -1 if latitude[0].mean() < latitude[-1].mean() else 1)
    assert source.grid.dims == data["2m_temperature"].dims[1:]
    np.testing.assert_allclose(source.latitude, latitude[order], atol=1e-8)
    away = (source.longitude - longitude[order] + 180) % 360 - 180
    np.testing.assert_allclose(away, 0, atol=1e-8)
    read = source.read([Channel("2m_temperature")], slice(1, 2), slice(None))[0, 0]
    assert np.array_equal(read, data["2m_temperature"].values[1][order])


def moving() -> xr.Dataset:
    data = joined_in_time()
    later = data["lat"] + 0.1 * np.arange(len(data["time"]))[:, None, None]
    return data.assign(lat=later.assign_attrs(data["lat"].attrs))


def without_points(mapping: Any) -> xr.Dataset:
    data = norkyst(NORKYST_CRS, mapping, (2e5, 5e5)).drop_vars(["lat", "lon"])
    for array in data.data_vars.values():
        array.attrs.pop("coordinates", None)
    return data


UNKNOWN: list[tuple[Any, str]] = [
    (moving, "needs the same grid at all times, but lat changes"),
    (
        lambda: without_points({"grid_mapping_name": "geostationary"}),
        "can't be computed from its grid mapping geostationary (not Lambert, polar stereographic",
    ),
    (
        lambda: without_points({x: y for x, y in NORKYST_MAPPING.items() if x != "ellipsoid"}),
        "can't be computed from its grid mapping polar_stereographic (it lacks 'earth_radius')",
    ),
]


@each("make, expected", UNKNOWN)
def test_points_that_are_not_known_are_refused(make: Any, expected: str, tmp_path: Path) -> None:
    make().to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError) as error:
        GriddedSource.open(str(tmp_path / "a.nc"))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Change data.store.")


def test_rows_of_latitudes_may_have_a_projection_in_whose_plane_they_are_lines() -> None:
    """Mercator's."""
    data = region_stores.dataset("box").assign(crs=((), 0, {"grid_mapping_name": "mercator"}))
    for array in data.data_vars.values():
        array.attrs["grid_mapping"] = "crs"
    for dim, axis in (("latitude", "Y"), ("longitude", "X")):
        data[dim].attrs["axis"] = axis
    assert with_points(data, "a.nc") is data

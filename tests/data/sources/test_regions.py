"""Regions: boxes and projections are read with their coordinates, others refused in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.inspection import inspect_source
from credit_dp.data.sources.coordinates import projected_grid
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.errors import UserError
from tests.cli.invocation import answer
from tests.data import anemoi_stores, region_grids, region_stores, stores
from tests.data.region_stores import KINDS, ROWS
from tests.tables import each
from tests.tier_cases import tiers

NAMES = {"box": ("latitude", "longitude"), "lambert": ("latitude", "longitude")}


@each("kind", KINDS)
def test_a_region_is_read_from_the_north_with_its_coordinates(kind: str, tmp_path: Path) -> None:
    data = region_stores.dataset(kind)
    source = GriddedSource.open(str(region_stores.write(kind, tmp_path)))
    latitude, longitude = (data[name].values for name in NAMES.get(kind, ("lat", "lon")))
    order = slice(None, None, -1) if kind == "lambert" else slice(None)
    assert not source.grid.is_global
    assert source.grid.is_projected == (kind != "box")
    assert np.array_equal(source.latitude, latitude[order])
    columns = longitude if kind == "box" else longitude[order]
    assert np.array_equal(source.longitude, columns)
    assert set(source.variables) == {"mean_sea_level_pressure", "2m_temperature", "land_sea_mask"}
    assert not any(variable.problem for variable in source.variables.values())
    rows = slice(2, 7)
    read = source.read([Channel("mean_sea_level_pressure")], slice(3, 5), rows)
    assert np.array_equal(read[:, 0], data["mean_sea_level_pressure"].values[3:5, order][:, rows])
    assert np.allclose(
        source.grid.weights.reshape(ROWS, -1), region_stores.areas(kind), rtol=2e-3, atol=0
    )


def test_the_projection_is_kept(tmp_path: Path) -> None:
    data = region_stores.dataset("lambert")
    projection = GriddedSource.open(str(region_stores.write("lambert", tmp_path))).grid.projection
    assert projection is not None
    assert projection.name == "crs"
    assert projection.attributes == data["crs"].attrs
    assert json.loads(json.dumps(projection.attributes)) == projection.attributes
    assert projection.rows.name == "projection_y_coordinate"
    assert np.array_equal(projection.rows.values, data["projection_y_coordinate"].values[::-1])
    assert np.array_equal(projection.columns.values, data["projection_x_coordinate"].values)
    assert projection.columns.attributes["units"] == "m"


@pytest.mark.slow
def test_columns_may_come_before_rows(tmp_path: Path) -> None:
    data = region_stores.dataset("lambert")
    swapped = data.transpose("projection_x_coordinate", "projection_y_coordinate", "time")
    swapped.to_zarr(tmp_path / "swapped.zarr", zarr_format=2)
    source = GriddedSource.open(str(tmp_path / "swapped.zarr"))
    assert np.array_equal(source.latitude, data["latitude"].values[::-1])
    read = source.read([Channel("2m_temperature")], slice(0, 2), slice(0, 3))
    assert np.array_equal(read[:, 0], data["2m_temperature"].values[:2, ::-1][:, :3])


def cordex(data: xr.Dataset) -> xr.Dataset:
    """As CORDEX's files: the projection in a text, bounds, and a height."""
    data = data.assign(rotated_pole=((), b"", data["crs"].attrs)).drop_vars("crs")
    for name in ("mean_sea_level_pressure", "2m_temperature"):
        data[name].attrs["grid_mapping"] = "rotated_pole"
    data["rlat"].attrs["bounds"] = "rlat_bnds"
    data["lat"].attrs["bounds"] = "lat_vertices"
    corners = np.zeros((*data["lat"].shape, 4))
    return data.assign(
        lat_vertices=(("rlat", "rlon", "vertices"), corners),
        rlat_bnds=(("rlat", "bnds"), corners[:, 0, :2]),
    ).assign_coords(height=2.0)


def without_axes(data: xr.Dataset) -> xr.Dataset:
    """Dims without coordinates, and latitudes and longitudes that no field names."""
    data = data.drop_vars(["rlat", "rlon", "crs"]).rename(rlat="y", rlon="x")
    for array in data.data_vars.values():
        array.attrs = {"units": array.attrs["units"]}
    return data.reset_coords(["lat", "lon"])


def kilometres(data: xr.Dataset) -> xr.Dataset:
    """Axes that say only which they are."""
    data = data.rename(rlat="y", rlon="x").drop_vars("crs")
    data["y"].attrs, data["x"].attrs = {"axis": "Y"}, {"axis": "X", "units": "km"}
    return data


def with_taken_names(data: xr.Dataset) -> xr.Dataset:
    """Names that forecasts and prepared stores have for something else."""
    data = data.rename(rlat="latitude", rlon="channel", crs="fields")
    for array in data.data_vars.values():
        array.attrs.update({"grid_mapping": "fields"} if "grid_mapping" in array.attrs else {})
    return data


@each("change", [cordex, without_axes, kilometres, with_taken_names])
def test_projections_are_found_in_other_forms(change: Any, tmp_path: Path) -> None:
    data = region_stores.dataset("rotated")
    change(data.copy(deep=True)).to_netcdf(tmp_path / "in.nc")
    source = GriddedSource.open(str(tmp_path / "in.nc"))
    assert np.array_equal(source.latitude, data["lat"].values)
    assert np.array_equal(source.longitude, data["lon"].values)
    readable = {name for name, variable in source.variables.items() if not variable.problem}
    assert readable == {"mean_sea_level_pressure", "2m_temperature", "land_sea_mask"}
    projection = source.grid.projection
    assert projection is not None
    names = {cordex: "rotated_pole", with_taken_names: "crs"}
    assert projection.name == names.get(change, "")
    if change is with_taken_names:
        assert source.grid.dims == ("y", "x")
    assert "bounds" not in projection.rows.attributes


@pytest.mark.slow
@each("dtype", ["f4", "f8"])
def test_small_cuts_of_projections_are_no_boxes(dtype: str) -> None:
    y, x = 7e5 + 3e3 * np.arange(11), 3e3 * np.arange(11)
    latitude, longitude = region_grids.Lambert().coordinates(y, x)
    grid = projected_grid(plane(latitude, longitude, dtype))
    assert grid is not None
    assert grid.is_projected
    assert grid.projection is not None


@pytest.mark.slow
@each("dtype", ["f4", "f8"])
def test_two_dimensional_coordinates_of_a_box_are_lines(dtype: str) -> None:
    lines = 60 - 0.1 * np.arange(11.0), 200 + 0.1 * np.arange(12.0)
    latitude, longitude = np.meshgrid(*lines, indexing="ij")
    noise = np.random.default_rng(0).uniform(-1, 1, latitude.shape)
    noise *= np.spacing(np.array(200, dtype)) / 2  # of other arithmetic
    grid = projected_grid(plane(latitude + noise, longitude + noise, dtype))
    assert grid is not None
    assert not grid.is_projected
    np.testing.assert_allclose(grid.longitude, lines[1], rtol=0, atol=3e-5)


def plane(latitude: Any, longitude: Any, dtype: str) -> xr.Dataset:
    dims = ("y", "x")
    return xr.Dataset(
        {"field": (("y", "x"), np.zeros(latitude.shape), {"grid_mapping": "crs"})},
        {
            "lat": (dims, latitude.astype(dtype), {"units": "degrees_north"}),
            "lon": (dims, longitude.astype(dtype), {"units": "degrees_east"}),
            "crs": ((), 0, {"grid_mapping_name": "lambert_conformal_conic"}),
        },
    )


def test_a_box_may_lie_over_the_date_line(tmp_path: Path) -> None:
    data = region_stores.dataset("box")
    data = data.assign_coords(longitude=(170 + 1.5 * np.arange(16) + 180) % 360 - 180)
    data.to_zarr(tmp_path / "box.zarr", zarr_format=2)
    source = GriddedSource.open(str(tmp_path / "box.zarr"))
    assert not source.grid.is_global
    assert source.longitude[[0, -1]].tolist() == [170, -167.5]
    assert inspect_source(source, [1]).spacing == "1.5 x 1.5 degrees"


@each("across", [1, 7, 15])
def test_a_box_cut_at_its_middle_is_refused_with_the_cure(across: int, tmp_path: Path) -> None:
    data = region_stores.dataset("box")
    data = data.assign_coords(longitude=(1.5 * (np.arange(16) - across)) % 360)
    data.sortby("longitude").to_netcdf(tmp_path / "cut.nc")
    with pytest.raises(UserError) as error:
        GriddedSource.open(str(tmp_path / "cut.nc"))
    cure = f"from its western edge, as xarray's dataset.roll(longitude={across}, roll_coords=True)."
    assert cure in str(error.value)
    again = xr.open_dataset(tmp_path / "cut.nc").roll(longitude=across, roll_coords=True)
    again.to_netcdf(tmp_path / "again.nc")
    assert GriddedSource.open(str(tmp_path / "again.nc")).longitude[0] == 360 - 1.5 * across


@each("is_band", [True, False])
def test_a_band_round_the_globe_is_periodic(is_band: bool, tmp_path: Path) -> None:
    step = 22.5 if is_band else 20.0
    data = region_stores.dataset("box").assign_coords(longitude=step * np.arange(16))
    data.to_zarr(tmp_path / "box.zarr", zarr_format=2)
    names = {"prognostic": ["2m_temperature"], "forcing": [], "static": [], "levels": None}
    source = open_source(stores.config(tmp_path / "box.zarr", **names))
    assert not source.grid.is_global
    assert source.grid.is_periodic == is_band
    text = f"1.5 x {step:g} degrees"
    more = ", columns round the globe" if is_band else ""
    assert inspect_source(source, [1]).spacing == text + more


def test_a_box_of_anemoi_is_read(tmp_path: Path) -> None:
    data = stores.dataset(rows=12, columns=16).isel(latitude=slice(2, 9), longitude=slice(0, 5))
    source = open_single_source(str(anemoi_stores.write(data, tmp_path / "box.zarr")))
    assert not source.grid.is_global
    assert np.array_equal(source.latitude, data["latitude"].values)
    read = source.read([Channel("temperature", 850)], slice(1, 3), slice(2, 4))
    wanted = data["temperature"].sel(level=850).values[1:3, 2:4]
    assert np.array_equal(read[:, 0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "known"),
    tiers([("lambert", True)], [("rotated", False)], [("box", True), ("rotated", True)]),
)
def test_a_region_is_prepared(
    kind: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the store's fields and coordinates, for this program and for xarray."""
    if known:
        path = region_stores.write(kind, tmp_path)
    else:
        data = without_axes(region_stores.dataset("rotated"))
        data.to_netcdf(path := tmp_path / "axes.nc")
    keys = (
        "workers=1",
        "data=zarr",
        "data.prognostic=[2m_temperature,mean_sea_level_pressure]",
        "data.static=[land_sea_mask]",
        "data.levels=null",
    )
    out = tmp_path / "out.zarr"
    code, _, complaints = answer(
        monkeypatch, "data", "prepare", f"store={path}", f"out={out}", *keys, program=""
    )
    assert code == 0, complaints
    source, copy = GriddedSource.open(str(path)), open_single_source(str(out))
    assert source.grid.difference(copy.grid, 0) is None
    assert source.grid.to_json() == copy.grid.to_json()
    for name in ("2m_temperature", "mean_sea_level_pressure", "land_sea_mask"):
        wanted, found = (x.read([Channel(name)], slice(0, 3), slice(2, 9)) for x in (source, copy))
        assert np.array_equal(wanted, found)
    assert inspect_source(copy, [1]).projection == inspect_source(source, [1]).projection
    if not source.grid.is_projected:
        return
    data = xr.open_zarr(out, consolidated=False, decode_coords="all")
    assert np.array_equal(data["fields"]["latitude"].values, source.latitude)
    assert data["fields"].dims[-2:] == source.grid.dims == data["static"].dims[-2:]
    if known:
        stored = region_stores.dataset(kind)
        rows = stored[source.grid.dims[0]].values[:: -1 if kind == "lambert" else 1]
        assert np.array_equal(data[source.grid.dims[0]].values, rows)
        assert data["fields"].encoding["grid_mapping"] == "crs"
        assert data["crs"].attrs == stored["crs"].attrs


def hole(data: xr.Dataset) -> xr.Dataset:
    latitude = data["lat"].values.copy()
    latitude[3, 4] = np.nan
    return data.assign_coords(lat=(("rlat", "rlon"), latitude, data["lat"].attrs))


def crossing(data: xr.Dataset) -> xr.Dataset:
    order = [0, 1, 2, 4, 3, *range(5, ROWS)]
    return data.assign_coords(
        {
            name: (("rlat", "rlon"), data[name].values[order], data[name].attrs)
            for name in ("lat", "lon")
        }
    )


def uneven(data: xr.Dataset) -> xr.Dataset:
    longitude = data["longitude"].values.copy()
    longitude[5] += 0.1
    return data.assign_coords(longitude=longitude)


def jumping(data: xr.Dataset) -> xr.Dataset:
    return data.isel(latitude=[0, 1, 2, 6, 7])


def without_a_row(data: xr.Dataset) -> xr.Dataset:
    return data.drop_isel({data["2m_temperature"].dims[1]: 5})


def without_a_column(data: xr.Dataset) -> xr.Dataset:
    return data.drop_isel(rlon=5)


def around(data: xr.Dataset) -> xr.Dataset:
    return data.assign_coords(longitude=24.0 * np.arange(16))


def repeated(data: xr.Dataset) -> xr.Dataset:
    return data.isel(longitude=[3, 3])


BAD = [
    ("rotated", hole, "latitude is missing at row 3 and column 4 of the file"),
    ("rotated", crossing, "rows and columns must not cross or repeat, but they do between rows 3"),
    ("rotated", without_a_row, "rows 3, 4 and 5 of the file are 1 and 2 degrees apart"),
    ("rotated", without_a_column, "columns 3, 4 and 5 of the file are 0.9986 and 1.997 degrees"),
    ("box", without_a_row, "goes from 60 to 42 in steps of 1.5 to 3 degrees"),
    ("box", uneven, "longitude must go in equal steps, at most once round the globe"),
    ("box", around, "without repeating its first column"),
    ("box", repeated, "but goes from -7.5 to -7.5 in 2 columns with steps of 0 to 0 degrees"),
    ("box", jumping, "latitude must go in roughly equal steps, but goes from 60 to 49.5 in steps"),
]


@each("kind, change, expected", BAD)
def test_coordinates_that_make_no_grid_are_refused(
    kind: str, change: Any, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.nc"
    change(region_stores.dataset(kind)).to_netcdf(path)
    with pytest.raises(UserError) as error:
        GriddedSource.open(str(path))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Change data.store.")


SHOWN = {
    "box": "13 x 16 region, 1.5 x 1.5 degrees, latitude 60 to 42, longitude -12 to 10.5",
    "lambert": "13 x 16 region on lambert_conformal_conic, 120 x 120 km in the middle, latitude",
    "rotated": "13 x 16 region on rotated_latitude_longitude, 111.2 x 111.2 km in the middle",
}


@pytest.mark.slow
@each("kind", KINDS)
def test_inspect_shows_the_region(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = region_stores.write(kind, tmp_path)
    code, said, complaints = answer(monkeypatch, "data", "inspect", f"store={path}", program="")
    assert (code, complaints) == (0, "")
    assert SHOWN[kind] in said

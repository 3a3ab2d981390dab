"""WRF's output is read as it is; what can't be is one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.inspection import inspect_source
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.errors import UserError
from tests.data import region_stores, stores, wrf_files
from tests.data.proj import project
from tests.tables import each


@each("kind", ["lambert", "polar", "mercator", "lat-lon"])
def test_a_file_is_read_as_it_is(kind: str, tmp_path: Path) -> None:
    data = wrf_files.dataset(kind)
    source = open_single_source(str(wrf_files.write(data, tmp_path)))
    lines = kind in ("mercator", "lat-lon")  # whose coordinates are those of rows and columns
    assert source.grid.is_projected != lines
    latitude, longitude = (data[name].values[0, ::-1] for name in ("XLAT", "XLONG"))
    np.testing.assert_allclose(source.latitude, latitude[:, 0] if lines else latitude, rtol=1e-7)
    np.testing.assert_allclose(source.longitude, longitude[0] if lines else longitude, rtol=1e-7)
    expected = region_stores.START + region_stores.STEP * np.arange(40)
    assert np.array_equal(source.times, expected)
    read = source.read([Channel("2m_temperature"), Channel("PSFC")], slice(3, 5), slice(2, 7))
    for index, name in enumerate(("T2", "PSFC")):
        assert np.array_equal(read[:, index], data[name].values[3:5, ::-1][:, 2:7])
    read = source.read([Channel("perturbation_potential_temperature", 2)], slice(1), slice(None))
    assert np.array_equal(read[0, 0], data["T"].values[0, 1, ::-1])
    variables = source.variables
    assert "temperature" not in variables
    assert "XLAT_U" not in variables
    assert not variables["land_sea_mask"].has_time
    assert not variables["HGT"].has_time
    assert "fields on edges of cells can't be used" in variables["U"].problem
    spacing = {"lambert": "92.8", "lat-lon": "0.9 x 0.9 degrees"}.get(kind, "")
    assert inspect_source(source, [1]).spacing.startswith(spacing)


@pytest.mark.slow
@each("kind", ["lambert", "polar"])
def test_the_grid_mapping_is_the_projection(kind: str, tmp_path: Path) -> None:
    """By PROJ, which puts the points on it in equal steps of the file's DX."""
    source = GriddedSource.open(str(wrf_files.write(wrf_files.dataset(kind), tmp_path)))
    assert source.grid.dims == ("south_north", "west_east")
    crs = dict(source.grid.projection.attributes)
    x, y = project(crs, source.longitude, source.latitude)
    rows, columns = wrf_files.axes(kind)
    np.testing.assert_allclose(np.diff(y, axis=0), -wrf_files.SPACING, rtol=1e-4)
    np.testing.assert_allclose(np.diff(x, axis=1), wrf_files.SPACING, rtol=1e-4)
    np.testing.assert_allclose(y[:, 0], rows[::-1], atol=10)
    np.testing.assert_allclose(x[0], columns, atol=10)


def test_files_of_a_pattern_follow_each_other(tmp_path: Path) -> None:
    data = wrf_files.dataset("lambert")
    for part in (slice(0, 1), slice(1, 20), slice(20, 40)):
        wrf_files.write(data.isel(Time=part), tmp_path)
    names = {"prognostic": ["2m_temperature"], "forcing": [], "static": ["HGT"], "levels": None}
    source = open_source(stores.config(f"{tmp_path}/wrfout_d01_*", **names))
    assert len(source.times) == 40
    read = source.read([Channel("2m_temperature")], slice(0, 40), slice(None))
    assert np.array_equal(read[:, 0], data["T2"].values[:, ::-1])


def plain(data: xr.Dataset) -> xr.Dataset:
    """Coordinates that do not repeat, and no dates but XTIME's."""
    for name in ("XLAT", "XLONG"):
        data[name] = data[name].isel(Time=0)
    return data.drop_vars("Times")


def as_arrays(data: xr.Dataset) -> xr.Dataset:
    """Attributes that are arrays, as other programs write them."""
    return data.assign_attrs({name: [data.attrs[name]] * 2 for name in ("MAP_PROJ", "STAND_LON")})


def as_numbers(data: xr.Dataset) -> xr.Dataset:
    """Dates whose letters are bytes, filled up with blanks."""
    letters = [list(text + b"  ") for text in data["Times"].values.astype("S").tolist()]
    return data.assign(Times=(("Time", "DateStrLen"), np.array(letters, np.uint8)))


@each("change", [plain, as_arrays, as_numbers])
def test_other_forms_are_the_same(change: Any, tmp_path: Path) -> None:
    data = wrf_files.dataset("lambert")
    first = GriddedSource.open(str(wrf_files.write(data, tmp_path)))
    change(data).to_netcdf(tmp_path / "plain.nc")
    second = GriddedSource.open(str(tmp_path / "plain.nc"))
    assert second.grid.difference(first.grid, 0) is None
    assert second.grid.to_json() == first.grid.to_json()
    assert np.array_equal(second.times, first.times)


@each(
    "attributes",
    [{"MAP_PROJ": 0}, {"MAP_PROJ": [1, 2]}, {"TRUELAT1": "30 N"}, {"STAND_LON": [-98.0, -97.0]}],
)
def test_without_a_projection_coordinates_suffice(attributes: Any, tmp_path: Path) -> None:
    data = wrf_files.dataset("lambert").assign_attrs(attributes)
    source = GriddedSource.open(str(wrf_files.write(data, tmp_path)))
    assert source.grid.is_projected
    assert source.grid.field_attributes == {"coordinates": "latitude longitude"}


def moved(data: xr.Dataset) -> xr.Dataset:
    data["XLAT"][-1] += 0.1
    return data


def undated(data: xr.Dataset) -> xr.Dataset:
    data["Times"][2] = b"0000-00-00_00:00:00"
    return data


def far(data: xr.Dataset) -> xr.Dataset:
    data["Times"][-1] = b"2500-01-24_12:00:00"
    return data


def unreadable(data: xr.Dataset) -> xr.Dataset:
    data["Times"][2] = b"2000\xe901-24_12:00:00"
    return data


def empty(data: xr.Dataset) -> xr.Dataset:
    return data.isel(Time=slice(0, 0))


@each(
    "change, expected",
    [
        (moved, "needs the same grid at all times, but XLAT changes, as in a nest that moves"),
        (undated, "Times: needs a date of .*, got 0000-00-00T00:00:00"),
        (far, "Times: needs a date of .* from 1678 to 2261, .*, got 2500-01-24T12:00:00"),
        (unreadable, "Times: needs a date of .*, got 2000\u00e901-24T12:00:00"),
        (empty, "has no times. Change data.store."),
    ],
)
def test_what_can_not_be_read_is_one_line(change: Any, expected: str, tmp_path: Path) -> None:
    change(wrf_files.dataset("lambert")).to_netcdf(tmp_path / "wrfout.nc")
    with pytest.raises(UserError, match=expected) as error:
        open_single_source(str(tmp_path / "wrfout.nc"))
    assert "\n" not in str(error.value)

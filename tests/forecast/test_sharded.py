"""Files of ranks, and of other programs, are joined exactly or refused."""

import json
import shutil
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.forecast import open_sharded
from credit_dp.forecast.check import check_forecast

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NORTH, MIDDLE = "2000-01-04T00_member-000_rows-0000-0005.nc", "2000-01-04T00_member-000_rows-0006-"


@pytest.fixture
def folder(bands, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(bands, tmp_path / "copy")


def refusal(path: Path | str) -> str:
    """Return the one line that refuses a folder."""
    with pytest.raises(UserError) as refused:
        open_sharded(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def find_file(folder: Path, name: str) -> Path:
    """Return the file whose name begins with this."""
    (found,) = folder.glob(f"{name}*")
    return found


def change(path: Path, **coords: object) -> None:
    """Write a file with other coordinates."""
    data = xr.load_dataset(path)
    path.unlink()
    changed = {name: (data[name] + add).values for name, add in coords.items()}
    data.assign_coords(changed).to_netcdf(path)


@pytest.mark.slow
def test_all_of_it_is_joined(bands):
    assert len(list(bands.glob("*.nc"))) == 2 * 2 * 3
    assert check_forecast(str(bands)).complete
    with open_sharded(bands) as data:
        assert dict(data.sizes) == {
            "number": 2,
            "time": 2,
            "prediction_timedelta": 2,
            "level": 3,
            "latitude": 17,
            "longitude": 16,
        }
        assert np.array_equal(data.latitude, np.linspace(90, -90, 17))
        assert not np.isnan(data.geopotential.values).any()
        assert data.attrs["Conventions"] == "CF-1.11"
    with open_sharded(f"{bands}/2000-01-04T00_member-001_*.nc") as part:
        assert (part.sizes["time"], part.sizes["number"]) == (1, 1)


def test_values_are_those_of_the_files(bands):
    path = find_file(bands, MIDDLE)
    with open_sharded(bands) as data, xr.open_dataset(path) as file:
        own = data.sel(latitude=file.latitude, time=file.time, number=file.number)
        assert np.array_equal(own.geopotential.values, file.geopotential.values)


@pytest.mark.slow
def test_gaps_and_overlaps_are_refused(bands, tmp_path):
    for number, (name, line) in enumerate(
        (
            (NORTH, "begins at row 6, but the rows before it end at -1"),
            (MIDDLE, "there is a gap"),
            ("2000-01-04T00_member-000_rows-0012", "rows 12 to 16 of the globe are missing"),
        )
    ):
        folder = shutil.copytree(bands, tmp_path / str(number))
        find_file(folder, name).unlink()
        assert line in refusal(folder), name
        assert not check_forecast(str(folder)).complete, name
    folder = shutil.copytree(bands, tmp_path / "member")
    for path in folder.glob("2000-01-04T12_member-001*"):
        path.unlink()
    assert "there is no file for the time 2000-01-04T12" in refusal(folder)
    folder = shutil.copytree(bands, tmp_path / "twice")
    path = find_file(folder, NORTH)
    shutil.copy(path, path.with_name("again.nc"))
    assert "overlaps" in refusal(folder)


def test_other_peoples_files_are_joined_by_their_latitudes(folder, tmp_path):
    data = xr.load_dataset(find_file(folder, NORTH)).isel(number=0, time=0, drop=True)
    data.attrs.clear()
    there = tmp_path / "theirs"
    there.mkdir()
    # From the south to the north, and in another order than their names.
    data = data.isel(latitude=slice(None, None, -1))
    for name, rows in ("a", slice(2, 6)), ("b", slice(0, 2)):
        data.isel(latitude=rows).to_netcdf(there / f"{name}.nc")
    with open_sharded(there) as joined:
        assert np.array_equal(joined.latitude, data.latitude)
        assert np.array_equal(joined.geopotential, data.geopotential)
    (there / "b.nc").unlink()
    data.isel(latitude=slice(0, 1)).to_netcdf(there / "b.nc")
    assert "there is a gap" in refusal(there)


def test_other_coordinates_are_refused(bands, tmp_path):
    hour = np.timedelta64(1, "h").astype("m8[ns]")
    for name, far in (("longitude", 1e-6), ("level", 1), ("prediction_timedelta", hour)):
        folder = shutil.copytree(bands, tmp_path / name)
        change(find_file(folder, MIDDLE), **{name: far})
        line = refusal(folder)
        assert f"has another {name} than the other files" in line
        assert ("by up to 1e-06" in line) == (name == "longitude")


def test_a_file_of_another_forecast_is_refused(folder, tmp_path):
    """The same name, grid, times and size: only the model's weights differ, and so the values."""
    file = find_file(folder, MIDDLE)
    with netCDF4.Dataset(file, "a") as data:
        settings = json.loads(data.credit_dp_forecast)
        data.credit_dp_forecast = json.dumps({**settings, "weights": "0" * 16})
    line = refusal(folder)
    assert line.startswith(f"{file}: is of another forecast than the other files: they have ")
    assert settings["weights"] in line
    (fault,) = (x for x in check_forecast(str(folder)).damaged[0] if "another forecast" in x)
    assert fault.startswith(f"{file}: is of another forecast, with ")


@pytest.mark.slow
def test_a_time_of_another_forecast_is_refused(folder):
    for path in folder.glob("2000-01-04T12*"):
        with netCDF4.Dataset(path, "a") as data:
            settings = json.loads(data.credit_dp_forecast)
            # Another start belongs to another file; another model does not.
            data.credit_dp_forecast = json.dumps({**settings, "times": ["2000-01-04T12"]})
    open_sharded(folder).close()
    for path in folder.glob("2000-01-04T12*"):
        with netCDF4.Dataset(path, "a") as data:
            data.credit_dp_forecast = json.dumps({**settings, "weights": "0" * 16})
    assert "is of another forecast than the other files" in refusal(folder)


@pytest.mark.slow
def test_coordinates_of_other_times_are_compared_too(folder):
    for path in folder.glob("2000-01-04T12*"):
        change(path, longitude=1e-6)
    assert "has another longitude than the other files" in refusal(folder)


def test_what_is_no_file_is_refused(folder, tmp_path):
    assert "needs a folder with netCDF files" in refusal(tmp_path / "nothing")
    find_file(folder, NORTH).write_bytes(b"nothing")
    assert "be read as netCDF" in refusal(folder)
    assert "is not complete" in refusal(tmp_path / "f.partial")


LATITUDE = np.array([50.0, 30.0, 10.0, -10.0, -30.0, -50.0])


def band(rows: slice, time: str = "", units: str = "K", value: float = 0.0) -> xr.Dataset:
    """Write a file with these rows."""
    latitude = LATITUDE[rows]
    values = np.full((len(latitude), 4), value, "f4")
    coords = {"lat": latitude, "lon": np.arange(0, 360, 90.0)}
    data = xr.Dataset({"t2m": (("lat", "lon"), values, {"units": units})}, coords)
    return data.assign_coords(time=np.datetime64(time, "ns")) if time else data


NORTH_ROWS, SOUTH_ROWS = slice(0, 3), slice(3, 6)


def joined(folder: Path, *files: xr.Dataset) -> xr.Dataset:
    """Return the dataset that joins these files."""
    for number, data in enumerate(files):
        data.to_netcdf(folder / f"{number}.nc")
    return open_sharded(folder)


def test_times_that_are_no_dim(tmp_path):
    days = ("2000-01-01", "2000-01-02")
    files = [
        band(rows, day, value=n) for n, day in enumerate(days) for rows in (NORTH_ROWS, SOUTH_ROWS)
    ]
    with joined(tmp_path, *files) as data:
        assert data.t2m.isel(lat=0, lon=0).values.tolist() == [0, 1]


def test_coordinates_of_a_dim_that_is_joined(tmp_path):
    files = []
    for day in ("2000-01-01", "2000-01-02"):
        data = band(slice(0, 6), day).expand_dims("time")
        files.append(data.assign_coords(valid_time=data.time + np.timedelta64(1, "D")))
    with joined(tmp_path, *files) as data:
        assert data.valid_time.values.astype("M8[D]").astype(str).tolist() == [
            "2000-01-02",
            "2000-01-03",
        ]


def other_static(value: float) -> xr.Dataset:
    day = f"2000-01-0{1 + int(value)}"
    static = (("lat", "lon"), np.full((6, 4), value))
    return band(slice(0, 6), day).expand_dims("time").assign(orography=static)


def test_what_would_be_lost_is_refused(tmp_path):
    north, south = band(NORTH_ROWS), band(SOUTH_ROWS)
    for number, (files, line) in enumerate(
        (
            ((north, band(SOUTH_ROWS, units="degC")), "t2m in degC, the other files in K"),
            ((north.assign(p0=1.0), south.assign(p0=2.0)), "another p0 .* by up to 1"),
            ((other_static(0.0), other_static(1.0)), "another orography"),
            ([band(slice(n, n + 1)) for n in (0, 1, 2, 4, 5)], "there is a gap before it"),
            ((band(slice(0, 0)), south), "0.nc: needs rows with numbers as lat"),
            ((north.assign_coords(lat=["a", "b", "c"]), south), "rows with numbers"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UserError, match=line) as refused:
            joined(folder, *files)
        assert "\n" not in str(refused.value)

"""Files of other programs are joined where nothing is lost, and refused otherwise."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.forecast import open_sharded

LATITUDE = np.array([50.0, 30.0, 10.0, -10.0, -30.0, -50.0])


def band(rows: slice, time: str = "", units: str = "K", value: float = 0.0) -> xr.Dataset:
    """Write a file with these rows."""
    latitude = LATITUDE[rows]
    values = np.full((len(latitude), 4), value, "f4")
    coords = {"lat": latitude, "lon": np.arange(0, 360, 90.0)}
    data = xr.Dataset({"t2m": (("lat", "lon"), values, {"units": units})}, coords)
    return data.assign_coords(time=np.datetime64(time, "ns")) if time else data


NORTH, SOUTH = slice(0, 3), slice(3, 6)


def joined(folder: Path, *files: xr.Dataset) -> xr.Dataset:
    """Return the dataset that joins these files."""
    for number, data in enumerate(files):
        data.to_netcdf(folder / f"{number}.nc")
    return open_sharded(folder)


def test_times_that_are_no_dim(tmp_path):
    days = ("2000-01-01", "2000-01-02")
    files = [band(rows, day, value=n) for n, day in enumerate(days) for rows in (NORTH, SOUTH)]
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


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ((band(NORTH), band(SOUTH, units="degC")), "t2m in degC, the other files in K"),
        ((band(NORTH).assign(p0=1.0), band(SOUTH).assign(p0=2.0)), "another p0 .* by up to 1"),
        ((other_static(0.0), other_static(1.0)), "another orography"),
        ([band(slice(n, n + 1)) for n in (0, 1, 2, 4, 5)], "there is a gap before it"),
        ((band(slice(0, 0)), band(SOUTH)), "0.nc: needs rows with numbers as lat"),
        ((band(NORTH).assign_coords(lat=["a", "b", "c"]), band(SOUTH)), "rows with numbers"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, files, line):
    with pytest.raises(UserError, match=line) as refused:
        joined(tmp_path, *files)
    assert "\n" not in str(refused.value)

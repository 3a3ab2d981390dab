"""ERA5 and ERA5T in one file, along the dim `expver`; and times that are not in order."""

import logging
import re

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

DATA = stores.dataset(rows=6)[["2m_temperature", "temperature"]]


@each("versions", [[1, 5], [5, 1], ["0001", "0005"]])
def test_each_time_has_the_version_with_values(tmp_path, caplog, versions):
    caplog.set_level(logging.INFO)
    is_final = xr.DataArray(np.arange(12) < 7, dims="time")
    parts = {version: DATA.where(is_final == (int(version) == 1)) for version in versions}
    # Both have the time before the last final one: ERA5 is used.
    parts[versions[[int(x) for x in versions].index(5)]] = xr.where(
        xr.DataArray(np.arange(12) == 5, dims="time"), DATA + 1, DATA.where(~is_final)
    ).transpose(*DATA.temperature.dims)
    data = xr.concat(parts.values(), dim=xr.DataArray(versions, dims="expver", name="expver"))
    order = ["time", "expver", "level", "latitude", "longitude"]
    data.transpose(*order).to_netcdf(tmp_path / "era5.nc")
    source = GriddedSource.open(str(tmp_path / "era5.nc"))
    assert "combines the versions along expver" in caplog.text
    for times in (slice(0, 12), np.array([11, 5, 2])):
        fields = source.read([Channel("2m_temperature")], times, slice(1, 5))[:, 0]
        assert np.array_equal(fields, DATA["2m_temperature"].values[times][:, 1:5])
        upper = source.read([Channel("temperature", 850)], times, slice(0, 6))[:, 0]
        assert np.array_equal(upper, DATA["temperature"].sel(level=850).values[times])


@each("order", [[0, 2, 1, 3], [0, 1, 1, 2, 3]])
def test_the_recipe_for_times_out_of_order_works(tmp_path, order):
    stores.write(DATA.isel(time=order), tmp_path / "a.zarr")
    with pytest.raises(UserError) as caught:
        GriddedSource.open(str(tmp_path / "a.zarr"))
    recipe = re.search(r"as dataset(\.\S+)\. Change", str(caught.value))[1]
    dataset = xr.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False)
    mended = eval(f"dataset{recipe}", {"dataset": dataset})  # noqa: S307 (the message's own text)
    source = GriddedSource.open(str(stores.write(mended, tmp_path / "b.zarr")))
    assert np.array_equal(source.times, DATA["time"].values[:4])

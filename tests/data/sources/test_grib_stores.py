"""GRIB files as `data.store`."""

import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_source
from credit_dp.errors import UserError
from tests.data import stores
from tests.forecast.test_initial_file import write_grib


def config(where, cache):
    return stores.config(where, cache=str(cache), static=[], forcing=[])


@pytest.mark.parametrize("edition", [1, 2])
def test_fields_of_a_pattern_of_grib_files_are_read(edition, tmp_path):
    data = stores.dataset(steps=6)
    for index, time in enumerate(data["time"].values):
        write_grib(tmp_path / f"part{index // 3}.grib", data.sel(time=time), edition=edition)
    files = sorted(tmp_path.iterdir())
    source = open_source(config(tmp_path / "part*.grib", tmp_path / "cache"))
    np.testing.assert_array_equal(source.times, data["time"].values)
    channels = [Channel("temperature", 850), Channel("temperature", 500)]
    fields = source.read(channels, slice(1, 5), slice(2, 7))
    wanted = data["temperature"].sel(level=[850, 500]).isel(time=slice(1, 5))
    wanted = wanted.transpose("time", "level", "latitude", "longitude").values[:, :, 2:7]
    np.testing.assert_allclose(fields, wanted, rtol=1e-6)
    surface = source.read([Channel("2m_temperature")], slice(0, 6), slice(None))[:, 0]
    np.testing.assert_allclose(surface, data["2m_temperature"].values, rtol=1e-6)
    assert source.chunk_shape(channels[0]) == (1, 1, 12, 8)
    assert [x for x in sorted(tmp_path.iterdir()) if x.is_file()] == files


def test_two_forecasts_for_one_time_are_refused(tmp_path):
    data = stores.dataset(steps=2)
    path = tmp_path / "twice.grib"
    write_grib(path, data.isel(time=0), stepUnits=1, forecastTime=6)
    write_grib(path, data.isel(time=1))
    with pytest.raises(UserError, match="at 2000-01-01T06:00 more than once"):
        open_source(config(path, tmp_path / "cache"))


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = write_grib(tmp_path / "cut.grib", stores.dataset().isel(time=0))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="not a GRIB file that can be read"):
        open_source(config(path, tmp_path / "cache"))

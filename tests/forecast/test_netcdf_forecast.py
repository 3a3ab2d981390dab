"""A forecast as one netCDF file: the same bits, never half written."""

import errno
import os

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.forecast.check import check_forecast
from credit_dp.forecast.stored_forecast import ZarrForecast
from credit_dp.forecast.writer import ForecastWriter
from tests.forecast.runs import forecast, forecast_config

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ONE = {"format": "netcdf_file"}


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_file_has_the_bits_of_the_store(config, whole, tmp_path, ranks):
    out = forecast(forecast_config(config, tmp_path / "f.nc", **ONE), ranks)
    if ranks > 1:
        whole = forecast(forecast_config(config, tmp_path / "f.zarr"), ranks)
    with xr.open_dataset(out, decode_timedelta=True) as found, xr.open_zarr(whole) as wanted:
        assert found.drop_attrs().identical(wanted.drop_attrs().load())
        assert found.attrs.keys() - wanted.attrs.keys() == {"credit_dp_rows"}
        for name in wanted.variables:
            assert found[name].attrs == wanted[name].attrs
    found, wanted = ForecastStore.open(str(out)), ForecastStore.open(str(whole))
    for name, levels in ("temperature", (850,)), ("2m_temperature", ()):
        second = np.array([1])
        one, other = (store.read(name, levels, second, second) for store in (found, wanted))
        assert np.array_equal(one, other), name
    assert sorted(path.name for path in tmp_path.glob("f.nc*")) == ["f.nc"]
    assert check_forecast(str(out)).lines()[0].endswith("complete (2 initial times, 4 lead times)")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["netcdf_file", "netcdf"])
@pytest.mark.parametrize("full", [False, True])
def test_an_interrupted_copy_resumes(config, tmp_path, monkeypatch, full, form):
    read, pieces = ZarrForecast.read, []

    def some(*args):
        pieces.append(1)
        if len(pieces) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else KeyboardInterrupt
        return read(*args)

    settings = forecast_config(config, tmp_path / "f.nc", format=form)
    with monkeypatch.context() as patch:
        patch.setattr(ZarrForecast, "read", some)
        with pytest.raises(UserError if full else KeyboardInterrupt):
            forecast(settings)
    assert {path.name for path in tmp_path.iterdir()} == {"f.nc.partial"}
    begun = tmp_path / "f.nc.partial/.copy"
    if full:  # its space is free again
        assert not begun.is_file()
        assert not list(begun.glob("*.nc"))
    finding = check_forecast(str(tmp_path / "f.nc"))
    assert (finding.complete, finding.missing) == (False, [])
    out = forecast(settings)
    assert {path.name for path in tmp_path.iterdir()} == {"f.nc"}
    assert check_forecast(str(out)).complete


def test_a_damaged_chunk_does_not_get_into_the_file(config, tmp_path, monkeypatch):
    settings = forecast_config(config, tmp_path / "f.nc", **ONE, lead="6h")
    with monkeypatch.context() as patch:
        patch.setattr(ZarrForecast, "read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forecast(settings)
    chunk = tmp_path / "f.nc.partial/temperature/c.1.0.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"temperature 2000-01-04T12 \+6h: can't be decoded"):
        forecast(settings)
    assert not (tmp_path / "f.nc").exists()
    chunk.unlink()
    assert check_forecast(str(forecast(settings))).complete


def test_what_is_lost_while_it_is_put_together_is_missed(config, tmp_path, monkeypatch):
    put = ForecastWriter.copy

    def losing(self, *copy):
        put(self, *copy)
        for chunk in [
            x for x in (self.partial / "2m_temperature").iterdir() if x.name != "zarr.json"
        ]:
            chunk.unlink()

    monkeypatch.setattr(ForecastWriter, "copy", losing)
    settings = forecast_config(config, tmp_path / "f.nc", **ONE, lead="6h", init="2000-01-04")
    with pytest.raises(UserError, match="is missing"):
        forecast(settings)
    assert not (tmp_path / "f.nc").exists()

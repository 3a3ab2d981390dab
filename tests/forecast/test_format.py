"""Other programs can read a forecast's files: dims, levels, coordinates, attributes, codecs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.forecast import open_sharded
from credit_dp.forecast.check import check_forecast
from credit_dp.forecast.format import read_settings_attribute
from credit_dp.forecast.initial_file import InitialFiles
from credit_dp.forecast.stored_forecast import ZarrForecast
from tests.data import stores
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.tier_cases import tiers
from tests.training.masked_stores import RAIN, SEA, SOIL, sea, sea_config
from tests.training.runs import make_config

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NEEDED = {
    "time": {"standard_name": "forecast_reference_time"},
    "prediction_timedelta": {"standard_name": "forecast_period"},
    "level": {"standard_name": "air_pressure", "units": "hPa", "positive": "down"},
    "latitude": {"standard_name": "latitude", "units": "degrees_north"},
    "longitude": {"standard_name": "longitude", "units": "degrees_east"},
    "geopotential": {"standard_name": "geopotential", "units": "m2 s-2"},
    "temperature": {"standard_name": "air_temperature", "units": "K"},
    "2m_temperature": {"standard_name": "air_temperature", "units": "K"},
}
# Names as the conventions recommend, but with a leading digit as in WeatherBench 2.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")


def check_conventions(data: xr.Dataset) -> None:
    """Check names, attributes, coordinates and types against the CF conventions."""
    assert data.attrs["Conventions"] == "CF-1.11"
    assert data.attrs["title"]
    for name, variable in data.variables.items():
        assert NAME.fullmatch(str(name))
        assert "units" in variable.attrs or name == "number"
        assert variable.attrs["long_name"]
        assert variable.dtype.kind in "fiMm"
    for name in data.dims:
        assert data[name].dims == (name,)
        values = data[name].values.astype(float)
        assert np.isfinite(values).all()
        steps = np.sign(np.diff(values))
        assert (steps == steps[:1]).all()  # monotonic, without repeats
        assert "_FillValue" not in data[name].attrs
    for name, wanted in NEEDED.items():
        assert wanted.items() <= data[name].attrs.items()


def test_conventions(whole, bands):
    raw = {"decode_times": False, "decode_timedelta": False}
    for open_raw, path in ((xr.open_zarr, whole), (xr.open_dataset, next(bands.glob("*.nc")))):
        with open_raw(path, **raw) as data:
            check_conventions(data)
            assert data["time"].attrs["units"] == "hours since 1900-01-01"
            assert data["prediction_timedelta"].attrs["units"] == "hours"


def test_plain_xarray_reads_it(whole):
    with xr.open_zarr(whole) as data:
        dims = ("time", "prediction_timedelta", "level", "latitude", "longitude")
        assert data["geopotential"].dims == dims
        assert data["2m_temperature"].dims == tuple(dim for dim in dims if dim != "level")
        assert {str(x.dtype) for x in data.data_vars.values()} == {"float32"}
        times = np.array(["2000-01-04T00", "2000-01-04T12"], "M8[ns]")
        assert np.array_equal(data["time"].values, times)
        leads = np.array([6, 12, 18, 24], "m8[h]").astype("m8[ns]")
        assert np.array_equal(data["prediction_timedelta"].values, leads)
        assert data["level"].values.tolist() == [500, 850, 1000]
        assert data["latitude"].values[[0, -1]].tolist() == [90, -90]
        codecs = data["geopotential"].encoding["compressors"]
        assert {codec.to_dict()["name"] for codec in codecs} == {"blosc", "crc32c"}
        said = json.loads(data.attrs["credit_dp_forecast"])
        assert said["checkpoint"].endswith("step-00000002")


@pytest.mark.slow
def test_a_lead_time_now_and_then(config, tmp_path, whole):
    found = forecast(forecast_config(config, tmp_path / "f", every="12h"))
    with xr.open_zarr(found) as data, xr.open_zarr(whole) as wanted:
        leads = data["prediction_timedelta"]
        assert leads.values.astype("m8[h]").astype(int).tolist() == [12, 24]
        assert data.equals(wanted.sel(prediction_timedelta=leads))


def test_a_band_without_any_value_is_written_too(whole, tmp_path):
    wanted = ZarrForecast.open(whole)
    form = wanted.form
    found = ZarrForecast(tmp_path / "f", form, wanted.settings)
    found.create(RowPartition.balanced(form.height, 1))
    shapes = [form.shape(v)[len(form.leading_dims) :] for v in form.variables]
    for job in found.jobs:
        for lead in range(len(form.hours)):
            fields = [np.full(shape, np.nan, np.float32) for shape in shapes]
            found.write(job, lead, slice(0, form.height), fields)
    assert found.missing() == []


@pytest.mark.parametrize("kind", tiers(fast=[], slow=[("zarr",)], exhaustive=[("netcdf",)]))
def test_points_without_values_have_none(tmp_path, kind):
    config = sea_config(tmp_path, steps=2)
    leave_checkpoint(config)
    settings = forecast_config(config, tmp_path / "f", members=2, perturb=0.2, format=kind)
    found = forecast(replace(settings, request=replace(settings.request, lead="12h")))
    with xr.open_zarr(found) if kind == "zarr" else open_sharded(found) as data:
        for name, valid in ((SEA, sea()), (SOIL, ~sea())):
            assert np.array_equal(
                np.isfinite(data[name].values), np.broadcast_to(valid, data[name].shape)
            )
        assert (data[RAIN].values >= 0).all()
        assert np.isfinite(data["temperature"].values).all()


@pytest.mark.slow
def test_gaps_elsewhere_than_in_training_are_refused(tmp_path):
    config = sea_config(tmp_path, steps=2)
    leave_checkpoint(config)
    row, column = np.argwhere(sea())[0]
    zarr.open_group(config.data.store, mode="r+")[SEA][:, row, column] = np.nan
    with pytest.raises(
        UserError, match=rf": {SEA} has NaN at 2000-\S+ on 1 point where it .* training dates"
    ):
        forecast(forecast_config(config, tmp_path / "f"))


@pytest.mark.slow
def test_points_that_one_training_date_lacked_are_known_to_forecasts(tmp_path):
    """The fields of the other dates, and of the forecast's, have values there."""
    config = sea_config(tmp_path, steps=2)
    row, column = np.argwhere(sea())[0]
    zarr.open_group(config.data.store, mode="r+")[SEA][1, row, column] = np.nan
    leave_checkpoint(config)
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "f"))) as data:
        wanted = sea()
        wanted[row, column] = False
        found = np.isfinite(data[SEA].values)
        assert np.array_equal(found, np.broadcast_to(wanted, found.shape))
        before = data[SEA].values
    # A value at a point that has none in training changes nothing: it is filled.
    zarr.open_group(config.data.store, mode="r+")[SEA][:, row, column] = 300.0
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "g"))) as data:
        assert np.array_equal(data[SEA].values, before, equal_nan=True)


@pytest.mark.slow
def test_rows_and_columns_are_no_cells_to_write_on(config, tmp_path):
    with pytest.raises(UserError, match=r"^grid: source is for data on cells, but .* has rows and"):
        forecast(forecast_config(config, tmp_path / "f.zarr", grid="source"))


def test_a_forecast_says_where_it_started_from_wherever_it_is_read(config, tmp_path, monkeypatch):
    store = Path(config.data.store)
    monkeypatch.chdir(store.parent)
    settings = forecast_config(config, tmp_path / "f.zarr", lead="6h", init="2000-01-04")
    settings = replace(settings, data=replace(settings.data, store=store.name))
    with xr.open_zarr(forecast(settings)) as found:
        assert read_settings_attribute(found.attrs)["stores"] == [str(store)]
    assert read_settings_attribute({}) == {}


def test_a_store_says_what_its_levels_are(tmp_path):
    for number, (dim, attributes, model) in enumerate(
        (
            ("hybrid", {}, True),
            ("level", {"standard_name": "model_level_number"}, True),
            ("level", {"long_name": "Model level number"}, True),
            ("level", {"units": "hPa"}, False),
            ("level", {"standard_name": "air_pressure"}, False),
            ("isobaricInhPa", {}, False),
            ("level", {}, False),  # 500 to 1000: no model has so many levels
        )
    ):
        data = stores.dataset(rows=9, columns=8, steps=2)
        data["level"].attrs = attributes
        data = data.rename({"level": dim} if dim != "level" else {})
        source = GriddedSource.open(str(stores.write(data, tmp_path / f"{number}.zarr")))
        assert source.variables["temperature"].model_levels is model, (dim, attributes)
        assert not source.variables["2m_temperature"].model_levels
    few = data.assign_coords(level=[10, 50, 130])  # either kind
    source = GriddedSource.open(str(stores.write(few, tmp_path / "few.zarr")))
    assert source.variables["temperature"].model_levels is None


@pytest.mark.slow
def test_a_forecast_says_it_too(tmp_path):
    data = stores.dataset(17, 16, 20)
    data["level"] = ("level", [60, 90, 137], {"standard_name": "model_level_number"})
    config = make_config(stores.write(data, tmp_path / "s.zarr"), tmp_path / "run", steps=2)
    config = replace(config, data=replace(config.data, levels=None))
    leave_checkpoint(config)
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "f.zarr", lead="6h"))) as found:
        level = found["level"]
        assert level.values.tolist() == [60, 90, 137]
        assert (level.attrs["standard_name"], level.attrs["units"]) == ("model_level_number", "1")


@pytest.mark.slow
def test_dates_keep_their_minutes(tmp_path):
    data = stores.dataset(17, 16, 20)
    data = data.assign_coords(time=data["time"] + np.timedelta64(30, "m"))
    config = make_config(stores.write(data, tmp_path / "s.zarr"), tmp_path / "run", steps=2)
    leave_checkpoint(config)
    inits = np.array(["2000-01-04T00:30", "2000-01-04T06:30"], "M8[ns]")
    keys = {"init": "[2000-01-04T00:30,2000-01-04T06:30]", "lead": "6h"}
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "f.zarr", **keys))) as found:
        assert np.array_equal(found["time"].values, inits)
        first = found["temperature"].values[:1]
    folder = forecast(forecast_config(config, tmp_path / "f", format="netcdf", **keys))
    names = ["2000-01-04T0030_rows-0000-0016.nc", "2000-01-04T0630_rows-0000-0016.nc"]
    assert sorted(path.name for path in folder.glob("*.nc")) == names
    with open_sharded(folder) as found:
        assert np.array_equal(found["time"].values, inits)
    assert check_forecast(str(folder)).complete
    state = tmp_path / "state.nc"
    data.sel(time=inits[:1]).to_netcdf(state)
    assert InitialFiles.open(str(state)).initial_time(1, 6) == "2000-01-04T00:30"
    keys |= {"init_file": str(state), "init": "2000-01-04T00:30"}
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "g.zarr", **keys))) as found:
        assert np.array_equal(found["temperature"].values, first)

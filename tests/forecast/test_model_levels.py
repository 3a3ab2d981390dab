"""Model levels are not taken for pressure levels, from the store to the forecast."""

from dataclasses import replace

import pytest
import xarray as xr

from credit_dp.data.sources.zarr import GriddedSource
from tests.data import stores
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.training.runs import make_config


@pytest.mark.parametrize(
    ("dim", "attributes", "model"),
    [
        ("hybrid", {}, True),
        ("level", {"standard_name": "model_level_number"}, True),
        ("level", {"long_name": "Model level number"}, True),
        ("level", {"units": "hPa"}, False),
        ("isobaricInhPa", {}, False),
    ],
)
def test_a_store_says_what_its_levels_are(tmp_path, dim, attributes, model):
    data = stores.dataset(rows=9, columns=8, steps=2)
    data["level"].attrs = attributes
    if dim != "level":
        data = data.rename(level=dim)
    source = GriddedSource.open(str(stores.write(data, tmp_path / "s.zarr")))
    assert source.variables["temperature"].model_levels is model
    assert not source.variables["2m_temperature"].model_levels


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

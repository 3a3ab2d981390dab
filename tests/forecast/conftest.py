"""One trained run for all tests of forecasts."""

import pytest

from tests.forecast.runs import forecast, forecast_config, train


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def whole(config, tmp_path_factory):
    """A store that one process has written."""
    return forecast(forecast_config(config, tmp_path_factory.mktemp("whole") / "one.zarr"))


@pytest.fixture(scope="session")
def bands(config, tmp_path_factory):
    """A folder of netCDF files that three ranks have written, with two members."""
    out = tmp_path_factory.mktemp("bands") / "three"
    keys = {"format": "netcdf", "members": 2, "perturb": 0.1, "lead": "12h"}
    return forecast(forecast_config(config, out, **keys), ranks=3)

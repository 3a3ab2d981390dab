"""A file as CMIP6's models write them: its names, bounds, levels in Pa, and calendar."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.data.store import Store
from credit_dp.data.units import check_units
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

STANDARD_NAMES = {
    "zg": ("geopotential_height", "m"),
    "ta": ("air_temperature", "K"),
    "tas": ("air_temperature", "K"),
    "tos": ("sea_surface_temperature", "degC"),
    "pr": ("precipitation_flux", "kg m-2 s-1"),
    "orog": ("surface_altitude", "m"),
}
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, xr.Dataset]:
    """Four times of a noleap calendar across the end of February; latitudes rise."""
    latitude, longitude, days = np.arange(-82.5, 90, 15), np.arange(0, 360, 15.0), np.arange(4)
    sizes = {"time": 4, "plev": 2, "lat": 12, "lon": 24}
    dims = {"zg": tuple(sizes), "ta": tuple(sizes), "orog": ("lat", "lon")}
    units = "days since 2000-02-28 12:00"
    variables = {
        name: (on, RNG.uniform(1, 100, [sizes[x] for x in on]).astype(np.float32), attributes)
        for name, (standard_name, unit) in STANDARD_NAMES.items()
        for on in [dims.get(name, ("time", "lat", "lon"))]
        for attributes in [{"standard_name": standard_name, "units": unit}]
    }
    edges = {"time": days, "lat": latitude, "lon": longitude, "plev": np.array([100000.0, 50000])}
    bounds = {f"{x}_bnds": ((x, "bnds"), edges[x][:, None] + [-0.5, 0.5]) for x in edges}
    variables |= bounds | {"lat_vertices": bounds["lat_bnds"]}
    data = xr.Dataset(
        variables,
        {
            "time": ("time", days, {"units": units, "calendar": "noleap", "bounds": "time_bnds"}),
            "lat": ("lat", latitude, {"units": "degrees_north", "bounds": "lat_vertices"}),
            "lon": ("lon", longitude, {"units": "degrees_east", "bounds": "lon_bnds"}),
            "plev": ("plev", edges["plev"], {"units": "Pa", "axis": "Z", "positive": "down"}),
            "height": ((), 2.0, {"units": "m", "standard_name": "height", "axis": "Z"}),
        },
    )
    path = tmp_path_factory.mktemp("cmip6") / "day.nc"
    data.to_netcdf(path)
    return path, data


def test_names_of_era5_find_those_of_cmip6_and_bounds_are_no_variables(written):
    path, data = written
    source = open_single_source(str(path))
    assert [*source.variables] == [*STANDARD_NAMES]
    assert source.calendar.name == "noleap"
    assert source.calendar.text(source.times[1]) == "2000-03-01T12:00"
    for channel, expected in {
        Channel("temperature", 500): data["ta"][:, 1],
        Channel("t_1000"): data["ta"][:, 0],
        Channel("geopotential", 1000): data["zg"][:, 0],
        Channel("2m_temperature"): data["tas"],
        Channel("sea_surface_temperature"): data["tos"],
        Channel("geopotential_at_surface"): data["orog"].expand_dims("time"),
    }.items():
        count = len(expected)
        read = source.read([channel], slice(0, count), slice(0, 12))[:, 0]
        assert np.array_equal(read, expected.values[:, ::-1])
    assert "total_precipitation" not in source.variables


def test_units_of_cmip6_are_refused_with_the_conversion(written):
    path, data = written
    config = replace(
        stores.config(path),
        prognostic=["geopotential", "sea_surface_temperature"],
        static=[],
        forcing=[],
        levels=[500],
    )
    with pytest.raises(UserError) as caught:
        check_units(open_source(config), config)
    assert 'geopotential:{convert:"m->m2 s-2"}' in str(caught.value)
    assert 'sea_surface_temperature:{convert:"degC->K"}' in str(caught.value)
    config.variables["geopotential"] = VariableConfig(convert="m->m2 s-2")
    config.variables["sea_surface_temperature"] = VariableConfig(convert="degC->K")
    config.limits = {"geopotential": None, "sea_surface_temperature": None}
    store = Store(open_source(config), config)
    channels = [Channel("geopotential", 500), Channel("sea_surface_temperature")]
    read = store.read_channels(channels, store.times[:1], slice(0, 12))
    expected = 9.80665 * data["zg"].values[0, 1, ::-1], data["tos"].values[0, ::-1] + 273.15
    np.testing.assert_allclose(read[0], expected, rtol=1e-6)


@each(
    "name, standard_name",
    [("tas", "unknown"), ("tas", ""), ("ts", "tendency_of_air_temperature"), ("ta500", "")],
)
def test_another_quantity_of_the_same_name_keeps_it(tmp_path, name, standard_name):
    """GRIB's `ta` is the anomaly of the temperature, also in kelvins."""
    data = stores.dataset(12, 24, steps=2)[["2m_temperature"]].rename({"2m_temperature": name})
    data[name].attrs = {"units": "K", "standard_name": standard_name}
    variables = open_single_source(str(stores.write(data, tmp_path / "a.zarr"))).variables
    assert name in variables
    for long in ("2m_temperature", "skin_temperature", "temperature"):
        assert long not in variables


def test_the_mole_fraction_of_ozone_is_no_mixing_ratio(tmp_path):
    data = stores.dataset(12, 24, steps=2)[["2m_temperature"]].rename({"2m_temperature": "o3"})
    data["o3"].attrs = {"units": "mol mol-1", "standard_name": "mole_fraction_of_ozone_in_air"}
    data = data.expand_dims(level=[500])
    path = stores.write(data, tmp_path / "a.zarr")
    config = replace(stores.config(path), prognostic=["o3"], static=[], forcing=[], levels=[500])
    with pytest.raises(UserError, match="standard name mole_fraction_of_ozone_in_air"):
        check_units(open_source(config), config)

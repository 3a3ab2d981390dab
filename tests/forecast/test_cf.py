"""Forecasts of every format pass the public checker of the CF conventions."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Axis, Grid, Projection
from credit_dp.data.units import ACCUMULATED, KNOWN_VARIABLES, canonical_unit
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.forecast import open_sharded
from credit_dp.forecast.format import ForecastFormat
from credit_dp.forecast.netcdf_forecast import create_file
from tests.data.region_grids import LAMBERT, Lambert, rotated
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.tier_cases import tiers
from tests.training.masked_stores import RAIN, sea_config

pytestmark = [
    # Ranks are threads here.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
# Complaints about the form of WeatherBench 2, which the conventions allow.
ALLOWED = (
    "not in the recommended order T, Z, Y, X",  # the lead time is between
    "found in same group",  # says where the coordinates are
    "variable 2m_temperature should begin with a letter",  # is a recommendation
    "Coordinate variable 'time' should have standard_name='time', found: 'forecast_reference_time'",
)


@cache
def checker() -> type[Any]:
    """The checks of CF 1.11."""
    from compliance_checker.cf.cf import CF1_11Check

    return CF1_11Check


def complaints(path: Path) -> list[str]:
    """Return the checker's errors and warnings on a file, without the allowed ones."""
    checks = checker()()
    with netCDF4.Dataset(path) as file:
        checks.setup(file)
        found = [getattr(checks, name)(file) for name in dir(checks) if name.startswith("check_")]
    said = []
    for results in found:
        several = list(results.values()) if isinstance(results, dict) else results
        for result in several if isinstance(several, list | tuple) else [several]:
            said += [] if result is None else result.msgs
    return [line for line in said if not any(part in line for part in ALLOWED)]


def form(
    members: int = 0, model_levels: bool = False, summed: tuple[str, ...] = ()
) -> ForecastFormat:
    """Few fields on few points."""
    levels = [Channel("temperature", 5), Channel("temperature", 9)]
    channels = (*levels, *map(Channel, ("2m_temperature", "total_precipitation")))
    units = {channel.variable: KNOWN_VARIABLES[channel.variable].unit for channel in channels}
    times = np.array(["2000-01-01", "2000-01-02"], "M8[ns]")
    grid = Grid(np.linspace(90, -90, 5), np.arange(0.0, 360, 45))
    span = 6 if summed else 0
    return ForecastFormat(
        channels, units, times, (12, 24), grid, members, summed, span, model_levels
    )


def test_projections_pass(tmp_path):
    y, x = 5e4 * np.arange(6.0, 0, -1), 5e4 * np.arange(8.0)
    axes = [
        Axis(f"{name}c", values, {"units": "m", "standard_name": f"projection_{name}_coordinate"})
        for name, values in (("y", y), ("x", x))
    ]
    grid = Grid(*Lambert().coordinates(y, x), Projection("crs", dict(LAMBERT), *axes))
    create_file(tmp_path / "f.nc", replace(form(), grid=grid), {}, {"yc": slice(1, 4)})
    assert complaints(tmp_path / "f.nc") == []
    with xr.open_dataset(tmp_path / "f.nc") as found:
        assert np.array_equal(found["temperature"].coords["latitude"], grid.latitude[1:4])
        assert found["yc"].values.tolist() == y[1:4].tolist()


def test_coordinates_without_a_projection_come_back(tmp_path):
    latitude, longitude = rotated(np.arange(3.0, -3, -1), np.arange(8.0), (39.25, -162.0))
    plane = replace(form(), grid=Grid(latitude, longitude))
    create_file(tmp_path / "f.nc", plane, {}, {})
    found = ForecastStore.open(str(tmp_path / "f.nc"))
    assert found.grid.difference(plane.grid, 0) is None
    assert set(found.variables) == {"temperature", "2m_temperature", "total_precipitation"}


def test_winds_have_the_standard_names_of_those_of_the_store():
    """Also under names that have none of their own."""
    names = {"U10": "x_wind", "v": "y_wind"}
    winds = replace(form(), channels=tuple(map(Channel, (*names, "u10"))), along_grid=names)
    found = {x.name: x.attributes.get("standard_name") for x in winds.variables}
    assert found == {**names, "u10": None}


@pytest.mark.parametrize(
    ("kind", "members"),
    tiers(
        fast=[],
        slow=[("file", 0), ("bands", 2), ("zarr", 2)],
        exhaustive=[("file", 2), ("bands", 0), ("zarr", 0)],
    ),
)
def test_forecasts_pass(config, bands, whole, tmp_path, kind, members):
    if kind == "bands":
        path = next(bands.glob("*.nc"))  # has members; without, see below
        if not members:
            path = tmp_path / "band.nc"
            create_file(path, form(), {}, {"latitude": slice(1, 3), "time": slice(0, 1)})
    elif kind == "file":
        more = {"members": members, "perturb": 0.1} if members else {}
        path = tmp_path / "f.nc"
        forecast(forecast_config(config, path, format="netcdf_file", lead="6h", **more))
    else:
        store = whole
        if members:
            more = {"members": members, "perturb": 0.1}
            store = forecast(forecast_config(config, tmp_path / "f.zarr", lead="6h", **more))
        path = tmp_path / "of_store.nc"
        raw = {"decode_times": False, "decode_timedelta": False}
        with xr.open_zarr(store, **raw) as data:
            # Otherwise xarray gives coordinates a fill value.
            data.to_netcdf(path, encoding={name: {"_FillValue": None} for name in data.coords})
    assert complaints(path) == []


@pytest.mark.slow
def test_the_checker_finds_what_is_wrong(tmp_path):
    create_file(tmp_path / "f.nc", form(), {}, {})
    with netCDF4.Dataset(tmp_path / "f.nc", "a") as file:
        file["temperature"].standard_name = "warmth"
        file["level"].units = "m"
        del file["longitude"].units
    said = "\n".join(complaints(tmp_path / "f.nc"))
    for part in ("warmth", "level", "longitude"):
        assert part in said


@pytest.mark.parametrize("model_levels", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_sums_and_levels_pass(tmp_path, model_levels):
    path = tmp_path / "f.nc"
    create_file(path, form(2, model_levels, ("total_precipitation",)), {}, {})
    assert complaints(path) == []
    with netCDF4.Dataset(path) as file:
        assert file["total_precipitation"].cell_methods == "prediction_timedelta: sum"
        assert file["temperature"].cell_methods == "prediction_timedelta: point"
        bounds = file[file["prediction_timedelta"].bounds]
        assert bounds[:].tolist() == [[6, 12], [18, 24]]
        level = file["level"]
        said = (level.standard_name, level.units)
        assert said == (("model_level_number", "1") if model_levels else ("air_pressure", "hPa"))
    store = ForecastStore.open(str(path))
    assert store.span == np.timedelta64(6, "h")
    assert store.model_levels is model_levels
    assert [name for name, of in store.variables.items() if of.summed] == ["total_precipitation"]


@pytest.mark.slow
def test_names_and_units_are_in_the_tables():
    from cf_units import Unit
    from compliance_checker.cf.util import StandardNameTable

    table = StandardNameTable()
    for name, known in KNOWN_VARIABLES.items():
        for standard_name in known.standard_names[:1]:
            wanted = table[standard_name].canonical_units
            assert Unit(canonical_unit(known.unit)).is_convertible(Unit(wanted)), name
        assert not Unit(canonical_unit(known.unit)).is_unknown()
    assert ACCUMULATED & KNOWN_VARIABLES.keys()


@pytest.mark.parametrize(
    "kind", tiers(fast=[], slow=[("netcdf",)], exhaustive=[("zarr",), ("netcdf_file",)])
)
def test_a_forecast_says_over_which_span_sums_are(tmp_path, kind):
    rain = {RAIN: VariableConfig(normalise="log1p(1e-4)", nonnegative=True, accumulated=True)}
    config = sea_config(tmp_path, steps=2, diagnostic=[RAIN], prognostic=["temperature"])
    config = replace(config, data=replace(config.data, variables=rain))
    leave_checkpoint(config)
    settings = forecast_config(config, tmp_path / "f.nc", lead="12h", every="12h", format=kind)
    out = forecast(settings)
    data = {"netcdf": open_sharded, "zarr": xr.open_zarr}.get(kind, xr.open_dataset)(out)
    with data:
        assert data[RAIN].attrs["cell_methods"] == "prediction_timedelta: sum"
        bounds = data["prediction_timedelta_bounds"].values
        assert bounds.tolist() == [[6, 12]]
        assert ForecastStore(data, str(out)).span == np.timedelta64(6, "h")

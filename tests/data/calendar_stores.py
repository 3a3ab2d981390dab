"""Stores of climate models in their own calendars, as CESM and HadGEM write them."""

from pathlib import Path

import numpy as np
import xarray as xr

from tests.data import stores

ROWS, COLUMNS, STEPS = 13, 16, 240  # sixty days, six-hourly


def model_output(calendar: str, start: str, units: str, steps: int = STEPS) -> xr.Dataset:
    """Six-hourly waves on an annual cycle of the calendar; times have no bounds."""
    times = xr.date_range(start, periods=steps, freq="6h", calendar=calendar, use_cftime=True)
    latitude = np.linspace(-90, 90, ROWS)
    longitude = np.arange(COLUMNS) * 360 / COLUMNS
    days = np.array([time.dayofyr + time.hour / 24 for time in times])[:, None, None]
    phi, wave = np.deg2rad(latitude)[:, None], np.deg2rad(longitude) - 0.3 * days
    noise = np.random.default_rng(0).normal(size=(steps, ROWS, COLUMNS))
    season = np.sin(2 * np.pi * days / 365) * np.sin(phi)
    fields = {
        "TREFHT": 285 + 20 * np.cos(phi) + 5 * np.cos(phi) * np.sin(2 * wave) + 8 * season,
        "PSL": 101000 + 900 * np.cos(phi) ** 2 * np.cos(3 * wave) - 200 * season,
    }
    sizes, about = {"TREFHT": 0.3, "PSL": 30}, {"TREFHT": "K", "PSL": "Pa"}
    dims = ("time", "lat", "lon")
    data = xr.Dataset(
        {
            name: (dims, (field + sizes[name] * noise).astype("f4"), {"units": about[name]})
            for name, field in fields.items()
        },
        {"time": times, "lat": latitude, "lon": longitude},
    )
    data["lat"].attrs |= {"units": "degrees_north", "long_name": "latitude"}
    data["lon"].attrs |= {"units": "degrees_east", "long_name": "longitude"}
    data["time"].encoding |= {"units": units, "dtype": "float64"}
    return data


def cesm(folder: Path, start: str = "0001-01-20") -> Path:
    """Write a zarr store in years of 365 days, numbered from the start of the run."""
    data = model_output("noleap", start, "days since 0001-01-01 00:00:00")
    return stores.write(data, folder / "cesm.zarr")


def hadgem(folder: Path, start: str = "2000-01-20") -> Path:
    """Write a netCDF file in years of twelve months of 30 days."""
    path = folder / "hadgem.nc"
    model_output("360_day", start, "days since 1859-12-01").to_netcdf(path)
    return path

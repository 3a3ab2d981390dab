"""A small store in the form of WeatherBench 2, for the one that a page's reader has."""

from pathlib import Path

import numpy as np
import xarray as xr

LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
ROWS, COLUMNS, STEPS = 24, 48, 204
ON_LEVELS = {
    "geopotential": "m**2 s**-2",
    "temperature": "K",
    "u_component_of_wind": "m s**-1",
    "v_component_of_wind": "m s**-1",
    "specific_humidity": "kg kg**-1",
}
AT_SURFACE = {
    "2m_temperature": "K",
    "10m_u_component_of_wind": "m s**-1",
    "10m_v_component_of_wind": "m s**-1",
    "mean_sea_level_pressure": "Pa",
    "total_precipitation_6hr": "m",
}
STATICS = {"geopotential_at_surface": "m**2 s**-2", "land_sea_mask": "(0 - 1)"}
DIMS = ("time", "level", "latitude", "longitude")


def write(path: Path) -> None:
    """Noise with the names, dims and units of the 13 levels, six-hourly from January 2001 on."""
    random = np.random.default_rng(0)
    coords = {
        "time": np.datetime64("2001-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h"),
        "level": LEVELS,
        "latitude": 90 - (np.arange(ROWS) + 0.5) * 180 / ROWS,
        "longitude": np.arange(COLUMNS) * 360 / COLUMNS,
    }
    sizes = {name: len(values) for name, values in coords.items()}
    fields = {}
    for group, dims in (
        (ON_LEVELS, DIMS),
        (AT_SURFACE, ("time", *DIMS[2:])),
        (STATICS, DIMS[2:]),
    ):
        for name, unit in group.items():
            values = random.uniform(size=[sizes[dim] for dim in dims]).astype(np.float32)
            fields[name] = (dims, values, {"units": unit})
    data = xr.Dataset(fields, coords)
    chunks = {
        name: {"chunks": (1, *array.shape[1:]) if "time" in array.dims else array.shape}
        for name, array in data.data_vars.items()
    }
    data.to_zarr(path, zarr_format=2, consolidated=True, encoding=chunks)

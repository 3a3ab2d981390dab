"""Writes small stores in place of a reader's own, and of one on a server of WeatherBench 2."""

from pathlib import Path

import numpy as np
import xarray as xr

LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
ROWS, COLUMNS, STEPS = 32, 64, 204
# Units, and the range of values; of variables on levels at the top, then at the bottom.
ON_LEVELS = {
    "geopotential": ("m**2 s**-2", (1.95e5, 2.05e5), (-1e3, 3e3)),
    "temperature": ("K", (205, 220), (250, 305)),
    "u_component_of_wind": ("m s**-1", (-30, 30), (-15, 15)),
    "v_component_of_wind": ("m s**-1", (-30, 30), (-15, 15)),
    "specific_humidity": ("kg kg**-1", (1e-6, 5e-6), (1e-4, 0.02)),
}
AT_SURFACE = {
    "2m_temperature": ("K", (240, 310)),
    "10m_u_component_of_wind": ("m s**-1", (-15, 15)),
    "10m_v_component_of_wind": ("m s**-1", (-15, 15)),
    "mean_sea_level_pressure": ("Pa", (9.6e4, 1.04e5)),
    "surface_pressure": ("Pa", (9.6e4, 1.04e5)),
    "total_precipitation_6hr": ("m", (0, 0.02)),
}
STATICS = {
    "geopotential_at_surface": ("m**2 s**-2", (0, 3e4)),
    "land_sea_mask": ("(0 - 1)", (0, 1)),
}
DIMS = ("time", "level", "latitude", "longitude")


def write(path: Path) -> None:
    """Noise with the names, dims, units and sizes of the 13 levels, six-hourly from 2001 on."""
    random = np.random.default_rng(0)
    coords = {
        "time": np.datetime64("2001-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h"),
        "level": LEVELS,
        "latitude": 90 - (np.arange(ROWS) + 0.5) * 180 / ROWS,
        "longitude": np.arange(COLUMNS) * 360 / COLUMNS,
    }
    sizes = {name: len(values) for name, values in coords.items()}
    height = np.log(LEVELS[-1] / np.array(LEVELS)) / np.log(LEVELS[-1] / LEVELS[0])
    depth = 1 - height.reshape(-1, 1, 1)  # 0 at the top level, 1 at the lowest
    fields = {}
    for group, dims in (
        (ON_LEVELS, DIMS),
        (AT_SURFACE, ("time", *DIMS[2:])),
        (STATICS, DIMS[2:]),
    ):
        for name, (unit, top, *bottom) in group.items():
            low, high = np.array(top, "f4")
            if bottom:
                low, high = (a + depth * (b - a) for a, b in zip(top, *bottom, strict=True))
            share = random.random([sizes[dim] for dim in dims], dtype="f4")
            values = (low + share * (high - low)).astype("f4")
            fields[name] = (dims, values, {"units": unit})
    data = xr.Dataset(fields, coords)
    chunks = {
        name: {"chunks": (1, *array.shape[1:]) if "time" in array.dims else array.shape}
        for name, array in data.data_vars.items()
    }
    data.to_zarr(path, zarr_format=2, consolidated=True, encoding=chunks)


def write_as_on_the_server(folder: Path) -> None:
    """Write WeatherBench 2's coarsest store, with the dims, order and chunks that it has there."""
    data = _read(folder).sortby("latitude")
    data = data.transpose("time", "level", "longitude", "latitude", missing_dims="ignore")
    start = np.datetime64("2016-01-01", "ns")
    data["time"] = start + np.arange(STEPS) * np.timedelta64(6, "h")
    chunks = {
        name: {"chunks": tuple({"time": 100}.get(str(dim), data.sizes[dim]) for dim in array.dims)}
        for name, array in data.data_vars.items()
    }
    path = folder / "1959-2023_01_10-6h-64x32_equiangular_conservative.zarr"
    data.to_zarr(path, zarr_format=2, consolidated=True, encoding=chunks)


def write_others(folder: Path) -> None:
    """Write a region, a climate model's years of 365 days from the year 1, and two members."""
    data = _read(folder).isel(time=slice(0, 80))
    data.sel(latitude=slice(70, 20), longitude=slice(0, 60)).to_netcdf(folder / "europe.nc")
    years = xr.date_range("0001-01-01", periods=80, freq="6h", calendar="noleap", use_cftime=True)
    data.assign_coords(time=years).to_netcdf(folder / "cesm.nc")
    timed = data[[name for name in data if "time" in data[name].dims]]
    members = xr.concat([timed, timed], xr.Variable("number", [0, 1]))
    members.assign({name: data[name] for name in STATICS}).to_netcdf(folder / "eda.nc")


def _read(folder: Path) -> xr.Dataset:
    """Return the store of `write` without its chunks."""
    return xr.open_zarr(folder / "era5.zarr").load().drop_encoding()

"""Stores of regions in the forms of their makers, with fields that move and are easy to predict.

A box of ERA5 as the Climate Data Store cuts it, a Lambert grid as HRRR's in zarr, and a rotated
pole as CORDEX's in netCDF, each with a pressure and a temperature.
"""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tests.data import region_grids

START, STEP = np.datetime64("2019-12-28", "ns"), np.timedelta64(6, "h")
KINDS = ("box", "lambert", "rotated")
ROWS, COLUMNS = 13, 16


def fields(latitude: Any, longitude: Any, steps: int = 40) -> dict[str, NDArray[np.float32]]:
    """Waves that travel east, at latitudes and longitudes `(H, W)`: `(T, H, W)` and `(H, W)`."""
    phi, lam = np.radians(latitude), np.radians(longitude)
    hours = 6.0 * np.arange(steps)[:, None, None]
    wave = np.cos(9 * lam - hours * np.pi / 40) * np.cos(phi)
    noise = np.random.default_rng(5).normal(size=wave.shape)
    return {
        "msl": (101000 + 900 * wave - 2000 * np.sin(phi) + 9 * noise).astype("f4"),
        "t2m": (285 - 20 * np.sin(phi) + 5 * np.roll(wave, 3, 0) + 0.1 * noise).astype("f4"),
        "lsm": (wave[0] > 0).astype("f4"),
    }


def projected(latitude: Any, longitude: Any, dims: tuple[Any, ...], coords: Any) -> xr.Dataset:
    """A dataset of `fields` with coordinates (y, x) along dims."""
    values = fields(latitude, longitude)
    times = START + STEP * np.arange(len(values["msl"]))
    attrs = {"grid_mapping": "crs", "coordinates": "latitude longitude"}
    units = {"msl": "Pa", "t2m": "K", "lsm": "1"}
    names = {"msl": "mean_sea_level_pressure", "t2m": "2m_temperature", "lsm": "land_sea_mask"}
    return xr.Dataset(
        {
            names[name]: (
                (*["time"][: array.ndim - 2], *dims),
                array,
                {**{k: v for k, v in attrs.items() if k in coords}, "units": units[name]},
            )
            for name, array in values.items()
        },
        {"time": times, **coords},
    )


def dataset(kind: str) -> xr.Dataset:
    """The dataset of a kind of region, as its files have it."""
    if kind == "box":
        latitude, longitude = 60 - 1.5 * np.arange(ROWS), -12 + 1.5 * np.arange(COLUMNS)
        plane = np.meshgrid(latitude, longitude, indexing="ij")
        coords = {
            "latitude": ("latitude", latitude, {"units": "degrees_north"}),
            "longitude": ("longitude", longitude, {"units": "degrees_east"}),
        }
        return projected(*plane, ("latitude", "longitude"), coords)
    if kind == "lambert":  # from the south, as HRRR's
        y, x = (1.2e5 * (np.arange(n) - n / 2) for n in (ROWS, COLUMNS))
        latitude, longitude = region_grids.Lambert().coordinates(y, x)
        dims = ("projection_y_coordinate", "projection_x_coordinate")
        axes = {
            dim: (dim, axis, {"units": "m", "standard_name": dim})
            for dim, axis in zip(dims, (y, x), strict=True)
        }
        mapping, names = dict(region_grids.LAMBERT), ("latitude", "longitude")
    else:
        rlat, rlon = 6 - 1.0 * np.arange(ROWS), 1.0 * np.arange(COLUMNS) - 9
        latitude, longitude = region_grids.rotated(rlat, rlon, (39.25, -162.0))
        dims, names = ("rlat", "rlon"), ("lat", "lon")
        axes = {
            dim: (dim, axis, {"units": "degrees", "standard_name": name, "axis": letter})
            for dim, axis, name, letter in [
                ("rlat", rlat, "grid_latitude", "Y"),
                ("rlon", rlon, "grid_longitude", "X"),
            ]
        }
        mapping = {
            "grid_mapping_name": "rotated_latitude_longitude",
            "grid_north_pole_latitude": 39.25,
            "grid_north_pole_longitude": -162.0,
        }
    coords = axes | {
        names[0]: (dims, latitude, {"units": "degrees_north", "standard_name": "latitude"}),
        names[1]: (dims, longitude, {"units": "degrees_east", "standard_name": "longitude"}),
    }
    data = projected(latitude, longitude, dims, coords)
    for array in data.data_vars.values():
        array.attrs["grid_mapping"] = "crs"
    return data.assign(crs=((), 0, mapping))


def write(kind: str, folder: Path, suffix: str = "") -> Path:
    """Write the store of a kind: unless named, zarr, and netCDF for the rotated pole."""
    path = folder / f"{kind}{suffix or ('.nc' if kind == 'rotated' else '.zarr')}"
    data = dataset(kind)
    if path.suffix == ".nc":
        data.to_netcdf(path)
        return path
    encoding = {
        name: {"chunks": (1, *array.shape[1:])}
        for name, array in data.data_vars.items()
        if array.ndim == 3
    }
    data.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=True)
    return path


def overrides(store: Path) -> tuple[str, ...]:
    """The overrides, as a user types them, of a run on a store of `write`."""
    return (
        "data=zarr",
        f"data.store={store}",
        "data.prognostic=[2m_temperature]",
        "data.levels=null",
        "data.static=[land_sea_mask]",
        "data.forcing=[insolation]",
        *(f"data.dates.{split}=[2019-12-28,2020-01-02]" for split in ("train", "valid", "test")),
    )


def areas(kind: str) -> NDArray[np.float64]:
    """Areas of cells from the formulas of projections, `(H, W)` from the north, with mean 1."""
    data = dataset(kind)
    if kind == "lambert":
        area = 1 / region_grids.Lambert().scale(data["latitude"].values[::-1]) ** 2
    else:
        rows = data["latitude" if kind == "box" else "rlat"].values
        step = abs(rows[1] - rows[0])
        edges = np.radians(np.append(rows + step / 2, rows[-1] - step / 2))
        area = np.abs(np.diff(np.sin(edges)))[:, None] * np.ones(COLUMNS)
    return np.asarray(area / area.mean())

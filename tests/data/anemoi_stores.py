"""Small datasets in the form of anemoi: version 2, all variables in one array, cells in one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numcodecs import Blosc

# The dataset's own names of what `stores.dataset` has, in an order of its own; `solar` stays.
SHORT = {
    "2m_temperature": "2t",
    "land_sea_mask": "lsm",
    "solar": "solar",
    "temperature": "t",
    "geopotential": "z",
    "geopotential_at_surface": "z",
}


def names_of(data: xr.Dataset, names: Mapping[str, str] = SHORT) -> list[str]:
    """Return the names `2t`, `lsm`, `t_500`, ..., and `z` alone for the surface."""
    found = []
    for name, short in names.items():
        levels = data["level"].values if "level" in data[name].dims else [None]
        found += [short if level is None else f"{short}_{level}" for level in levels]
    return found


def stacked(data: xr.Dataset, names: Mapping[str, str] = SHORT) -> np.ndarray:
    """`(time, variable, 1, cell)`; what has no time is repeated."""
    fields = []
    for name in names:
        levels = data["level"].values if "level" in data[name].dims else [None]
        for level in levels:
            array = data[name] if level is None else data[name].sel(level=level)
            array = array.broadcast_like(data["2m_temperature"])
            fields.append(array.transpose("time", "latitude", "longitude").values)
    values = np.stack(fields, axis=1)
    return values.reshape(*values.shape[:2], 1, -1)


def write(
    data: xr.Dataset,
    path: Path,
    chunks: tuple[int, ...] | None = None,
    arrays: dict[str, Any] | None = None,
    short: Mapping[str, str] = SHORT,
    **attributes: Any,
) -> Path:
    """Write a store with one time and all the rest per chunk, unless `chunks` differs.

    `arrays` and `attributes` replace the dataset's; None leaves one out.
    `short` has the dataset's own names.
    """
    values = stacked(data, short)
    latitudes, longitudes = np.meshgrid(data["latitude"], data["longitude"], indexing="ij")
    named: dict[str, Any] = {
        "data": values,
        "dates": data["time"].values.astype("datetime64[s]"),
        "latitudes": latitudes.ravel(),
        "longitudes": longitudes.ravel(),
        "mean": np.nanmean(values, axis=(0, 2, 3)),
        "stdev": np.nanstd(values, axis=(0, 2, 3)),
        "minimum": np.nanmin(values, axis=(0, 2, 3)),
        "maximum": np.nanmax(values, axis=(0, 2, 3)),
    }
    named |= arrays or {}
    said: dict[str, Any] = {
        "variables": names_of(data, short),
        "field_shape": [data.sizes["latitude"], data.sizes["longitude"]],
        "variables_metadata": {name: {"mars": {"param": name}} for name in names_of(data, short)},
        "missing_dates": [],
        "frequency": "6h",
        "resolution": "30.0",
    }
    said |= attributes
    group = zarr.create_group(path, zarr_format=2)
    group.attrs.update({name: value for name, value in said.items() if value is not None})
    for name, array in named.items():
        if array is not None:
            whole = (1, *array.shape[1:]) if name == "data" else array.shape
            group.create_array(
                name,
                shape=array.shape,
                dtype=array.dtype,
                chunks=(chunks if name == "data" else None) or whole,
                compressors=Blosc(cname="zstd") if name == "data" else None,
                fill_value=np.nan if name == "data" else None,
            )[...] = array
    return path

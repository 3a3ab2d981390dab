"""Stores of several members of an ensemble, as WeatherBench 2, CDS, ECMWF and anemoi have them."""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tests.data import anemoi_stores, stores

MEMBERS = 3
STATIC = ("geopotential_at_surface", "land_sea_mask")


def dataset(members: int = MEMBERS, dim: str = "number", first: int = 0, **size: Any) -> xr.Dataset:
    """Members with weather of their own and common static fields; `number` comes first."""
    parts = [stores.dataset(seed=seed, **size) for seed in range(members)]
    timed = [part.drop_vars(STATIC) for part in parts]
    numbers = xr.Variable(dim, np.arange(first, first + members))
    return xr.concat(timed, numbers).assign({name: parts[0][name] for name in STATIC})


def member(data: xr.Dataset, index: int) -> xr.Dataset:
    """One member without the dim."""
    dim = next(dim for dim in ("number", "realization", "member", "ensemble") if dim in data.dims)
    return data.isel({dim: index}, drop=True)


def anemoi(data: xr.Dataset, path: Path) -> Path:
    """Write a dataset of anemoi, `(time, variable, ensemble, cell)`, one chunk for each time."""
    parts = [member(data, index) for index in range(data.sizes["number"])]
    values = np.concatenate([anemoi_stores.stacked(part) for part in parts], axis=2)
    return anemoi_stores.write(parts[0], path, None, {"data": values})

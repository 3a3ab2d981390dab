"""Small stores in WeatherBench2-like form, and the config that reads them."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from zarr.storage import MemoryStore

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import SPLITS

LEVELS = (500, 850, 1000)
START = np.datetime64("2000-01-01", "ns")
STEP = np.timedelta64(6, "h")
DIMS = ("time", "level", "latitude", "longitude")


def times(count: int) -> np.ndarray:
    return START + STEP * np.arange(count)


def dataset(rows: int = 12, columns: int = 8, steps: int = 12, seed: int = 0) -> xr.Dataset:
    """Random fields around plausible means, latitude falling from pole to pole."""
    random = np.random.default_rng(seed)
    coords = {
        "time": times(steps),
        "level": np.array(LEVELS),
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.arange(columns) * 360 / columns,
    }
    variables = {}
    heights = np.array([54000.0, 14000.0, 1000.0])[:, None, None]
    for name, mean in (("geopotential", heights), ("temperature", 270.0)):
        shape = (steps, len(LEVELS), rows, columns)
        variables[name] = (DIMS, (mean + mean / 100 * random.normal(size=shape)).astype("f4"))
    flat = (steps, rows, columns)
    dims = ("time", "latitude", "longitude")
    variables["2m_temperature"] = (dims, (280 + 9 * random.normal(size=flat)).astype("f4"))
    variables["solar"] = (dims, (100 + 50 * random.normal(size=flat)).astype("f4"))
    for name, size in (("geopotential_at_surface", 3000), ("land_sea_mask", 0.2)):
        values = size * random.normal(size=(rows, columns))
        variables[name] = (dims[1:], np.clip(values, -size, 2 * size).astype("f4"))
    return xr.Dataset(variables, coords)


def write(data: xr.Dataset, path: Path, **options: Any) -> Path:
    """Write zarr version 3 in uncompressed chunks of one time, unless `options` differ."""
    chunks = options.pop("chunks", {"time": 1})
    version = options.pop("zarr_format", 3)
    encoding = {}
    for name, array in data.data_vars.items():
        sizes = tuple(chunks.get(str(dim), array.sizes[dim]) for dim in array.dims)
        encoding[name] = {"chunks": sizes, "compressors": None}
        if "shards" in options:
            shards = options["shards"]
            encoding[name]["shards"] = tuple(
                shards.get(str(dim), array.sizes[dim]) for dim in array.dims
            )
    chunks = {}  # that are then written one by one, without a thread for each
    data.to_zarr(
        MemoryStore(chunks), zarr_format=version, consolidated=version == 2, encoding=encoding
    )
    for key, chunk in chunks.items():
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(chunk.to_bytes())
    return path


def split_by_day(store: Any, dates: Any) -> list[tuple[int, int]]:
    """Split training dates as `streaming.split_dates` does, by days in place of years."""
    days = store.times[dates.indices].astype("M8[D]")
    edges = np.flatnonzero(days[1:] != days[:-1]) + 1
    return list(itertools.pairwise([0, *edges.tolist(), len(days)]))


def config(path: Path | str, **changes: Any) -> DataConfig:
    """All variables of `dataset`: first 8 times train, the next 2 validate, the last 2 test."""
    settings: dict[str, Any] = {
        "name": "zarr",
        "store": str(path),
        "cache": str(Path(path).parent / "cache"),
        "prognostic": ["geopotential", "2m_temperature", "temperature"],
        "forcing": ["day_of_year_sin", "solar"],
        "static": ["geopotential_at_surface", "land_sea_mask"],
        "batch_size": 2,
    }
    dates = {
        "train": ["2000-01-01", "2000-01-02"],
        "valid": ["2000-01-03T00", "2000-01-03T06"],
        "test": ["2000-01-03T12", "2000-01-03T18"],
    }
    dates |= {split: changes.pop(split) for split in SPLITS if split in changes}
    return DataConfig(**(settings | changes), dates=DatesConfig(**dates))


def expected(data: xr.Dataset, settings: DataConfig, time: np.datetime64) -> np.ndarray:
    """The prognostic channels `(C, H, W)` straight from the dataset, row 0 northernmost."""
    data = data.sortby("latitude", ascending=False).sel(time=time)
    levels = settings.levels or sorted(data["level"].values)
    fields = []
    for name in settings.prognostic:
        array = data[name]
        if "level" in array.dims:
            fields += [array.sel(level=level) for level in levels]
        else:
            fields.append(array)
    return np.stack([f.transpose("latitude", "longitude").values for f in fields])


ORDERS = tuple(itertools.permutations(DIMS))

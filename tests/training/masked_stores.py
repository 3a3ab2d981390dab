"""A store with a sea surface temperature, a soil layer and precipitation, and runs on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from credit_dp.config import Config, ModelConfig, VariableConfig
from tests.data import stores
from tests.training.runs import make_config

ROWS, COLUMNS = 12, 8
SEA, SOIL, RAIN = "sea_surface_temperature", "volumetric_soil_water_layer_1", "rain"


def sea(rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Return where the sea is, `(rows, columns)`: none in the north, random points in the south."""
    found = np.random.default_rng(5).random((rows, columns)) > 0.4
    found[: rows // 2] = False
    return found


def dataset(steps: int = 20) -> xr.Dataset:
    """Return `stores.dataset` and three more fields; soil water has values on land."""
    data = stores.dataset(ROWS, COLUMNS, steps)
    random = np.random.default_rng(6)
    shape, dims = (steps, ROWS, COLUMNS), ("time", "latitude", "longitude")
    water = np.where(sea(), 290 + 5 * random.normal(size=shape), np.nan)
    soil = np.where(sea(), np.nan, 0.1 + 0.05 * random.random(size=shape))
    data[SEA] = (dims, water.astype("f4"))
    data[SOIL] = (dims, soil.astype("f4"))
    data[RAIN] = (dims, random.exponential(1e-3, size=shape).astype("f4"))
    return data


def sea_config(folder: Path, model: ModelConfig | None = None, **changes: Any) -> Config:
    """Return a run of ten steps: sea temperature is prognostic, soil water and rain diagnostic.

    `changes` are keys of the trainer, or else of the data.
    """
    path = folder / "sea.zarr"
    if not path.exists():
        stores.write(dataset(), path, chunks={"time": 1, "latitude": 4})
    trainer = {key: changes.pop(key) for key in ("steps", "dtype") if key in changes}
    config = make_config(path, folder / "run", model, **trainer)
    data: dict[str, Any] = {
        "prognostic": ["temperature", SEA],
        "diagnostic": [RAIN, SOIL],
        "variables": {
            SEA: VariableConfig(fill="mean"),
            SOIL: VariableConfig(fill=0.0),
            RAIN: VariableConfig(normalise="log1p(1e-4)", nonnegative=True),
        },
    }
    return replace(config, data=replace(config.data, **(data | changes)))

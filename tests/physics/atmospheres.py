"""Small random atmospheres with all that budgets need, on pressure and on model levels."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.config import Config, VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.grid import row_weights
from credit_dp.data.statistics import Statistics
from credit_dp.data.transforms import QUANTILE_SCORES
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.physics.columns import PhysicalChannels
from credit_dp.physics.fixers import GlobalMean
from tests.data import stores
from tests.training.runs import make_config

ROWS, COLUMNS = 13, 12  # no multiple of 2 or 3
PRESSURE = (200, 500, 850, 1000)
MODEL = (1, 2, 3, 4)
HYBRID = {
    "a": [0.0, 5000.0, 15000.0, 8000.0, 0.0],
    "b": [0.0, 0.0, 0.2, 0.7, 1.0],
}
KINDS = ("pressure", "model")
WATER = ("specific_humidity", "specific_cloud_liquid_water_content")
UPPER = (*WATER, "temperature", "u_component_of_wind", "v_component_of_wind")
RAIN, EVAPORATION = "total_precipitation_6hr", "evaporation"
TOP = ("top_net_solar_radiation", "top_net_thermal_radiation")
BOTTOM = (
    "surface_net_solar_radiation",
    "surface_net_thermal_radiation",
    "surface_sensible_heat_flux",
    "surface_latent_heat_flux",
)
FLUXES = (RAIN, EVAPORATION, *TOP, *BOTTOM)
# Mean and standard deviation: of variables on levels at the top and at the bottom.
SPREAD: dict[str, tuple[float, float, float]] = {
    "specific_humidity": (1e-5, 8e-3, 0.3),
    "specific_cloud_liquid_water_content": (1e-6, 1e-4, 0.5),
    "temperature": (220.0, 285.0, 0.04),
    "u_component_of_wind": (20.0, 5.0, 0.5),
    "v_component_of_wind": (3.0, 3.0, 1.0),
    "surface_pressure": (9.8e4, 9.8e4, 0.03),
    RAIN: (8e-4, 8e-4, 0.5),
    EVAPORATION: (-8e-4, -8e-4, 0.3),
    TOP[0]: (5e6, 5e6, 0.5),
    TOP[1]: (-5e6, -5e6, 0.2),
    BOTTOM[0]: (3.6e6, 3.6e6, 0.5),
    BOTTOM[1]: (-1.2e6, -1.2e6, 0.3),
    BOTTOM[2]: (-4e5, -4e5, 0.5),
    BOTTOM[3]: (-2e6, -2e6, 0.3),
}


class NoCumulativeSums(TorchDispatchMode):
    """Refuses `cumsum`, as GPUs do if the same bits are needed in every run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default:
            raise RuntimeError("cumsum is not deterministic")
        return func(*args, **(kwargs or {}))


def levels(kind: str) -> tuple[int, ...]:
    """Return the levels, which don't rise in the order of the channels."""
    return PRESSURE[::-1] if kind == "pressure" else MODEL


def latitude(rows: int = ROWS) -> np.ndarray:
    return np.linspace(90, -90, rows)


def channels(kind: str) -> list[Channel]:
    """Return the channels: humidity and so on, surface pressure, and then the fluxes."""
    upper = [Channel(name, level) for name in UPPER for level in levels(kind)]
    return [*upper, Channel("surface_pressure"), *map(Channel, FLUXES)]


def states() -> int:
    return len(UPPER) * len(MODEL) + 1


def mean_and_std(channel: Channel, kind: str) -> tuple[float, float]:
    top, bottom, relative = SPREAD[channel.variable]
    order = sorted(levels(kind))
    depth = 0.0 if channel.level is None else order.index(channel.level) / (len(order) - 1)
    mean = top + depth * (bottom - top)
    return mean, abs(mean) * relative


def statistics(kind: str) -> Statistics:
    moments = np.array([mean_and_std(channel, kind) for channel in channels(kind)])
    none = np.empty(0)
    return Statistics(moments[:, 0], moments[:, 1], 0.05 * moments[:, 1], none, none, none, none)


def ground(rows: int = ROWS) -> torch.Tensor:
    """Return a surface geopotential, `(rows, COLUMNS)`."""
    height = 1500 * np.random.default_rng(4).random((rows, COLUMNS))
    return torch.from_numpy(9.80665 * height)


def quantiles(kind: str) -> NDArray[np.float64]:
    """Return quantiles of all channels, twice as far from the mean above it as below."""
    scores = np.where(QUANTILE_SCORES > 0, 2, 1) * QUANTILE_SCORES
    moments = [mean_and_std(channel, kind) for channel in channels(kind)]
    return np.array([mean + std * scores for mean, std in moments])


def physical(
    kind: str, rows: slice = slice(0, ROWS), rain: str = "log1p(1e-4)", height: int = ROWS
) -> PhysicalChannels:
    """Return the channels; precipitation is normalised by a logarithm.

    With `rain="quantile"`, precipitation and temperature are normalised by quantiles.
    """
    variables = {RAIN: VariableConfig(normalise=rain)}
    hybrid = HYBRID if kind == "model" else {}
    values = statistics(kind)
    if rain == "quantile":
        variables["temperature"] = VariableConfig(normalise=rain)
        values = replace(values, quantiles=quantiles(kind))
        for index, channel in enumerate(channels(kind)):
            if channel.variable in variables:
                values.mean[index], values.std[index] = 0.0, 1.0
    if rain.startswith("log1p"):
        index = states()
        values.mean[index], values.std[index] = 2.0, 0.5
    return PhysicalChannels(channels(kind), variables, values, hybrid, ground(height)[rows])


def global_mean(manager: DomainParallelManager, rows: slice, height: int = ROWS) -> GlobalMean:
    return GlobalMean(row_weights(latitude(height)), rows, COLUMNS, manager.transport)


def fields(kind: str, batch: int = 2, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """Return normalised fields after a step, `(B, C + D, rows, COLUMNS)`, in float64."""
    shape = (batch, len(channels(kind)), rows, COLUMNS)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dataset(kind: str, steps: int = 20) -> xr.Dataset:
    """Return a store's fields, with the coefficients of model levels."""
    data = stores.dataset(ROWS, COLUMNS, steps)[["geopotential_at_surface", "land_sea_mask"]]
    data["geopotential_at_surface"] = (("latitude", "longitude"), ground().numpy().astype("f4"))
    data = data.assign_coords(time=stores.times(steps))
    random = np.random.default_rng(8)
    dim = "level" if kind == "pressure" else "hybrid"
    for name in (*UPPER, "surface_pressure", *FLUXES):
        on_levels = name in UPPER
        names: Sequence[Channel] = [
            Channel(name, level if on_levels else None)
            for level in (sorted(levels(kind)) if on_levels else [0])
        ]
        moments = [mean_and_std(channel, kind) for channel in names]
        values = np.stack(
            [m + s * random.normal(size=(steps, ROWS, COLUMNS)) for m, s in moments], axis=1
        )
        if name in (*WATER, RAIN):
            values = np.abs(values)
        dims = ("time", dim, "latitude", "longitude")
        if not on_levels:
            values, dims = values[:, 0], ("time", *dims[2:])
        data[name] = (dims, values.astype("f4"))
    data = data.assign_coords({dim: sorted(levels(kind))})
    if kind == "model":
        for name in ("a", "b"):
            data[f"hy{name}i"] = ("nhyi", np.array(HYBRID[name]))
    return data


def atmosphere_config(folder: Path, kind: str, fixers: Sequence[str], **changes: Any) -> Config:
    """Return a run with fixers; `changes` are keys of the trainer, or of the data."""
    path = folder / f"{kind}.zarr"
    if not path.exists():
        stores.write(dataset(kind), path, chunks={"time": 1, "latitude": 4})
    trainer = {key: changes.pop(key) for key in ("steps", "dtype", "rollout") if key in changes}
    config = make_config(path, folder / "run", None, **trainer)
    config.model.fixers = list(fixers)
    data: dict[str, Any] = {
        "prognostic": [*UPPER, "surface_pressure"],
        "diagnostic": list(FLUXES),
        "forcing": ["day_of_year_sin"],
        "variables": {RAIN: VariableConfig(normalise="log1p(1e-4)")},
        **changes,
    }
    for key, value in data.items():
        setattr(config.data, key, value)
    return config

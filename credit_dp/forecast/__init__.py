"""Forecast steps and rollouts on sharded fields, and the files that forecasts are written to."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["open_sharded"]


def open_sharded(path: str | Path) -> "xr.Dataset":
    """Join the files that the ranks of a forecast wrote; see `credit_dp.forecast.open_sharded`."""
    from credit_dp.forecast import (
        open_sharded as forecast_open_sharded,  # xarray: not for those who only make steps
    )

    return forecast_open_sharded.open_sharded(path)

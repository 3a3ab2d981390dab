"""Forecast steps and rollouts on sharded fields, and the files that forecasts are written to."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["open_sharded"]


def open_sharded(path: str | Path) -> "xr.Dataset":
    """Join the files that the ranks of a forecast wrote; see `credit_dp.forecast.sharded`."""
    # Here, for it imports xarray, which those who only make forecasts don't need.
    from credit_dp.forecast.sharded import open_sharded as open_files

    return open_files(path)

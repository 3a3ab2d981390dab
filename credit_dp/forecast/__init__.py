"""Make forecasts with a trained model on sharded fields, and write, check and read them.

In this order: `request` parses what to forecast, `make_forecasts` builds the model, reads initial
states (`initial_file`: from files of other sources) and drives all ranks, `writer` writes fields in
the layout of `format` to a zarr store (`stored_forecast`), which may be copied to other formats
(`netcdf_forecast`, `grib_forecast`); `check` verifies a forecast on disk, `sharded` joins netCDF
files of bands.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["open_sharded"]


def open_sharded(path: str | Path) -> "xr.Dataset":
    """Join the files that the ranks of a forecast wrote; see `credit_dp.forecast.sharded`."""
    # Imported here, because it imports xarray, which most users of this package don't need.
    from credit_dp.forecast.sharded import open_sharded as open_files

    return open_files(path)

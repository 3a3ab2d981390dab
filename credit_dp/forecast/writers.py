"""The writer of each format; a further format is a class in a file of its own and a line here."""

from collections.abc import Mapping

from credit_dp.forecast.grib_writer import GribWriter
from credit_dp.forecast.netcdf_writer import NetcdfFileWriter, NetcdfWriter
from credit_dp.forecast.writer import ForecastWriter
from credit_dp.forecast.zarr_writer import ZarrWriter

WRITERS: Mapping[str, type[ForecastWriter]] = {
    "zarr": ZarrWriter,
    "netcdf": NetcdfWriter,
    "netcdf_file": NetcdfFileWriter,
    "grib": GribWriter,
}

"""Which variables can't be below zero, so that forecasts of them are clamped there."""

import math
from fnmatch import fnmatchcase

from credit_dp.config import VariableConfig
from credit_dp.variable_names import meaning

# ERA5's names, as in the Climate Data Store and WeatherBench 2; other names are looked up by their
# meaning. Net thermal radiation, fluxes and evaporation are missing on purpose: they have both
# signs.
NONNEGATIVE = (
    "*_cloud_cover",
    "*_precipitation",
    "*_precipitation_*hr",
    "*_snowfall",
    "*_wind_speed",
    "fraction_of_cloud_cover",
    "ozone_mass_mixing_ratio",
    "relative_humidity",
    "sea_ice_cover",
    "significant_height_of_*",
    "snow_depth",
    "snowfall",
    "specific_cloud_*_water_content",
    "specific_humidity",
    "specific_rain_water_content",
    "specific_snow_water_content",
    "*surface_net_solar_radiation*",
    "*surface_solar_radiation_downward*",
    "*surface_thermal_radiation_downward*",
    "toa_incident_solar_radiation*",
    "top_net_solar_radiation*",
    "total_column_*water*",
    "total_column_cloud_*",
    "total_column_ozone",
    "volumetric_soil_water_layer_*",
    "wind_speed",
)


def is_nonnegative(name: str, variable: VariableConfig) -> bool:
    """Whether a variable can't be below zero: as the config says, or as known of the name.

    What goes through `log1p` is not below zero: smaller values would be lost there.
    """
    if variable.nonnegative is not None:
        return variable.nonnegative
    if not math.isnan(variable.log1p_scale):
        return True
    return any(fnmatchcase(meaning(name), pattern) for pattern in NONNEGATIVE)
